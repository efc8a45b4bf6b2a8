"""A mixture of models as phi, against the models themselves and a naive mixture in float64."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from helpers.refusals import assert_refused
from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_mixture
from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import AdapterError, DataError


def network(seed: int) -> nn.Module:
    """A network with BatchNorm, whose statistics and weights are of this seed."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    model(torch.randn(16, 3, 8, 8))
    return model.eval().double()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(9)).double()


@pytest.fixture
def models() -> list[nn.Module]:
    return [network(seed) for seed in range(3)]


def states(models: list[nn.Module]) -> list[dict[str, Tensor]]:
    return [model.state_dict() for model in models[1:]]


def at(adapter: Adapter, *phi: float) -> nn.Module:
    adapter.set_phi(torch.tensor(phi, dtype=adapter.phi.dtype))
    return adapter.model


@torch.no_grad()
def test_phi_of_0_is_the_base_and_a_unit_vector_a_checkpoint(models: list[nn.Module], x: Tensor) -> None:
    adapter = attach_mixture(copy.deepcopy(models[0]), states(models))
    assert (adapter.dim, adapter.layers, adapter.phi.dtype) == (2, [""], torch.float64)
    for phi, model in zip([(0.0, 0.0), (1.0, 0.0), (0.0, 1.0)], models, strict=True):
        assert torch.equal(at(adapter, *phi)(x), model(x))


@torch.no_grad()
def test_tensors_are_mixed_by_weights_that_sum_to_one(models: list[nn.Module], x: Tensor) -> None:
    adapter = attach_mixture(copy.deepcopy(models[0]), states(models))
    expected = copy.deepcopy(models[0])
    parts = [model.state_dict() for model in models]
    mixed = {
        name: sum(w * part[name] for w, part in zip([0.3, 0.3, 0.4], parts, strict=True))
        for name, own in parts[0].items()
        if own.is_floating_point()
    }
    expected.load_state_dict(mixed, strict=False)
    torch.testing.assert_close(at(adapter, 0.3, 0.4)(x), expected(x), rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_weights_are_cut_off_and_variances_stay_above_a_tenth(models: list[nn.Module], x: Tensor) -> None:
    adapter = attach_mixture(copy.deepcopy(models[0]), states(models))
    assert torch.equal(at(adapter, 7.0, 0.0)(x), at(adapter, 1.5, 0.0)(x))
    assert torch.equal(at(adapter, 0.0, -7.0)(x), at(adapter, 0.0, -0.5)(x))
    wide = copy.deepcopy(models[1])
    wide[1].running_var.mul_(1e3)
    adapter = attach_mixture(copy.deepcopy(models[0]), [wide.state_dict()])
    at(adapter, -0.5)
    assert torch.equal(adapter.merge()[1].running_var, 0.1 * models[0][1].running_var)


@torch.no_grad()
def test_film_has_coordinates_of_its_own(models: list[nn.Module]) -> None:
    adapter = attach_mixture(models[0], states(models), film=500, seed=3)
    assert adapter.layers == ["", "1"]
    film = adapter.moves["1"]
    assert not film.A[:, :2].any()
    spread = torch.cat([film.A[:, 2:], film.B[:, 2:]]).std() * 500**0.5
    assert abs(float(spread) - 1) < 3 * (2 * 4000) ** -0.5


@torch.no_grad()
def test_its_checkpoints_in_another_order_are_another_adapter(models: list[nn.Module]) -> None:
    adapter = attach_mixture(models[0], states(models))
    again = attach_mixture(network(0), states(models)[::-1])
    assert [name for name, *_ in again.signature.differences(adapter.signature)] == ["generator"]


class Masked(nn.Module):
    """A layer, and a mask as attention has them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(3, 3)
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1) + seed)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) + self.mask).softmax(-1)


def test_infinite_numbers_are_the_base_s() -> None:
    base, other, x = Masked(0), Masked(1), torch.rand(3, 3)
    adapter = attach_mixture(copy.deepcopy(base), [other.state_dict()])
    for phi, model in ((0.0, base), (1.0, other)):
        assert torch.equal(at(adapter, phi)(x), model(x))
    at(adapter, -0.25)(x)[:, 0].sum().backward()
    assert adapter.phi.grad is not None
    assert bool(adapter.phi.grad.isfinite().all())
    assert torch.equal(adapter.merge().mask.isinf(), base.mask.isinf())
    for mask in (torch.zeros(3, 3), torch.full((3, 3), -torch.inf)):
        state = {**other.state_dict(), "mask": mask}
        assert_refused(lambda state=state: attach_mixture(base, [state]), DataError, "mask")


class Mixed(nn.Module):
    """Tied layers in half precision, a head in double."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(3, 3).bfloat16(), nn.Linear(3, 3).bfloat16()
        self.second.weight, self.head = self.first.weight, nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)).double())  # type: ignore[no-any-return]


@torch.no_grad()
def test_tensors_are_mixed_each_in_its_own_precision_and_tied_ones_together() -> None:
    base, other, x = Mixed(0), Mixed(1), torch.randn(4, 3).bfloat16()
    plain, expected, naive = base(x), other(x), base.first.weight.float() * 0.999 + other.first.weight.float() * 0.001
    adapter = attach_mixture(base, [other.state_dict()])
    assert torch.equal(at(adapter, 0.0)(x), plain)
    assert torch.equal(at(adapter, 1.0)(x), expected)
    at(adapter, 0.001)  # half precision would round the weights
    merged = adapter.merge()
    assert merged.second.weight is merged.first.weight
    assert torch.equal(merged.first.weight, naive.bfloat16())


@torch.no_grad()
def test_checkpoints_are_files_of_any_framework(models: list[nn.Module], x: Tensor, tmp_path: Path) -> None:
    save_file(states(models)[0], tmp_path / "one.safetensors")
    torch.save({"model": {f"module.{k}": v for k, v in states(models)[1].items()}}, tmp_path / "two.pth")
    adapter = attach_mixture(copy.deepcopy(models[0]), [tmp_path / "one.safetensors", tmp_path / "two.pth"], example=x)
    assert torch.equal(at(adapter, 1.0, 0.0)(x), models[1](x))
    assert torch.equal(at(adapter, 0.0, 1.0)(x), models[2](x))


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"checkpoints": []}, ("1", "8")),
        ({"checkpoints": [nn.Linear(1, 1)]}, ("checkpoints", "Linear", "state_dict()")),
        ({"checkpoints": [network(0).state_dict()]}, ("0",)),
        ({"checkpoints": [network(1).state_dict()] * 2}, ("1", "0")),
        ({"layers": "1"}, ("film",)),
    ],
)
def test_what_can_not_be_mixed_is_refused(
    models: list[nn.Module], given: dict[str, Any], names: tuple[str, ...]
) -> None:
    assert_refused(lambda: attach_mixture(models[0], **{"checkpoints": states(models), **given}), AdapterError, *names)


@torch.no_grad()
def test_a_forward_pass_that_was_put_in_place_of_the_class_s_is_mixed_and_comes_back(
    models: list[nn.Module], x: Tensor
) -> None:
    """As accelerate does."""
    model = models[0]
    own = model.forward = lambda x: 3 * nn.Sequential.forward(model, x)  # type: ignore[arg-type,method-assign]
    adapter = attach_mixture(model, states(models))
    assert torch.equal(at(adapter, 0.0, 1.0)(x), 3 * models[2](x))
    adapter.remove()
    assert model.forward is own


class Encoder(nn.Module):
    """Has a method besides its forward that calls a layer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def encode(self, x: Tensor) -> Tensor:
        return self.body(x).relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


@pytest.mark.parametrize("way", ["set_phi", "using", "applied"])
def test_a_call_past_the_model_s_forward_is_of_the_mixture(way: str) -> None:
    model, x = Encoder(0), torch.randn(5, 4)
    adapter = attach_mixture(model, [Encoder(1).state_dict()])
    expected, phi = Encoder(1).encode(x), torch.ones(1, requires_grad=True)
    if way == "set_phi":
        adapter.set_phi(phi.detach())
        found = model.encode(x)
        found.sum().backward()
        assert adapter.phi.grad is not None
        assert bool(adapter.phi.grad)
    else:
        with adapter.using(phi) if way == "using" else adapter.applied(Start(phi.detach())):
            found = model.encode(x)
    assert torch.equal(found, expected)


def test_statistics_of_norms_have_gradients(models: list[nn.Module], x: Tensor) -> None:
    adapter = attach_mixture(copy.deepcopy(models[0]), states(models))
    phi, way = torch.tensor([0.3, 0.4]).double(), torch.tensor([0.6, -0.8]).double()
    adapter.set_phi(phi)
    loss = adapter.model(x).square().sum()
    loss.backward()

    @torch.no_grad()
    def at_phi(phi: Tensor) -> Tensor:
        with adapter.applied(Start(phi)) as model:
            return model(x).square().sum()  # type: ignore[no-any-return]

    slope = (at_phi(phi + 1e-6 * way) - at_phi(phi - 1e-6 * way)) / 2e-6
    torch.testing.assert_close(loss.detach(), at_phi(phi), rtol=1e-12, atol=1e-12)
    assert adapter.phi.grad is not None
    torch.testing.assert_close(adapter.phi.grad @ way, slope, rtol=1e-6, atol=1e-6)
