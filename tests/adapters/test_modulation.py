"""What phi does to a layer's output: the formulas, their merging, types, and phi in checkpoints."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.convnext import LayerNorm2d
from torchvision.ops import FrozenBatchNorm2d

from helpers.refusals import assert_named, assert_refused
from helpers.tensors import rand
from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film, attach_input_bias, attach_outputs
from metricopt_ext.adapters.signature import Outputs


def test_matrices_are_seeded_gaussians() -> None:
    def matrices(**kwargs: Any) -> dict[str, Tensor]:
        model = nn.Sequential(nn.BatchNorm1d(400), nn.BatchNorm1d(400))
        adapter = attach_film(model, dim=50, **kwargs)
        return {f"{i}{name}": b for i, (_, m) in enumerate(adapter.modulations()) for name, b in m.named_buffers()}

    one = matrices(seed=1)
    assert list(one) == ["0A", "0B", "1A", "1B"]
    for value in one.values():
        assert value.shape == (400, 50)
        assert abs(float(value.mean())) < 4 / (20000 * 50) ** 0.5
        assert float(value.var()) == pytest.approx(1 / 50, rel=0.05)
    flat = [value.flatten() for value in one.values()]
    assert np.abs(np.corrcoef(torch.stack(flat)) - np.eye(4)).max() < 0.04
    again, other = matrices(seed=1), matrices(seed=2)
    assert all(torch.equal(one[key], again[key]) for key in one)
    assert not any(torch.allclose(one[key], other[key]) for key in one)


class ChannelsFirst(nn.LayerNorm):
    """A LayerNorm over the channels of ``B x C x H x W``, as Transformers has it, under a name that says nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "batch_norm_1d": (lambda: nn.BatchNorm1d(4), (5, 4), 1),
    "batch_norm_1d_sequence": (lambda: nn.BatchNorm1d(4), (5, 4, 3), 1),
    "batch_norm_2d": (lambda: nn.BatchNorm2d(4), (2, 4, 3, 3), 1),
    "batch_norm_3d": (lambda: nn.BatchNorm3d(4), (2, 4, 2, 3, 2), 1),
    "frozen_batch_norm_2d": (lambda: FrozenBatchNorm2d(4), (2, 4, 3, 3), 1),
    "a detector's own": (lambda: type("DetrFrozenBatchNorm2d", (FrozenBatchNorm2d,), {})(4), (2, 4, 3, 3), 1),
    "group_norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 5), 1),
    "instance_norm_1d": (lambda: nn.InstanceNorm1d(4, affine=True), (2, 4, 5), 1),
    "instance_norm_2d": (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (2, 4, 3, 3), 1),
    "instance_norm_3d": (lambda: nn.InstanceNorm3d(4, affine=True), (2, 4, 2, 3, 2), 1),
    "instance_norm_2d_unbatched": (lambda: nn.InstanceNorm2d(4, affine=True), (4, 4, 3), 0),
    "layer_norm": (lambda: nn.LayerNorm(4), (2, 4, 4), -1),
    "layer_norm_2d": (lambda: LayerNorm2d(4), (2, 4, 3, 4), 1),
    **{
        f"layer_norm_channels_first_{c}": (lambda c=c: ChannelsFirst(c), (2, c, 3, 4), 1)  # type: ignore[misc]
        for c in (1, 2, 4)
    },
    "conv_1d": (lambda: nn.Conv1d(2, 4, 2), (3, 2, 5), 1),
    "conv_2d": (lambda: nn.Conv2d(2, 4, 2), (3, 2, 5, 5), 1),
    "conv_2d_unbatched": (lambda: nn.Conv2d(2, 4, 2), (2, 5, 5), 0),
    "conv_2d_depthwise": (lambda: nn.Conv2d(4, 4, 2, groups=4), (3, 4, 5, 5), 1),
    "conv_3d": (lambda: nn.Conv3d(2, 4, 2), (3, 2, 3, 3, 3), 1),
    "linear": (lambda: nn.Linear(3, 4), (2, 4, 3), -1),
}


class NormWithMore(nn.GroupNorm):
    """A norm as timm has them: a dropout and an activation inside."""

    def __init__(self) -> None:
        super().__init__(2, 4)
        self.drop, self.act = nn.Dropout(0.5), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))


def test_a_norm_with_an_activation_inside_is_modulated_before_it(randomise: Callable[..., Any]) -> None:
    model = randomise(nn.Sequential(NormWithMore())).double()
    x, phi = rand(3, 4, 5, 5), rand(3, seed=2)
    weight, bias = model[0].weight.detach().clone(), model[0].bias.detach().clone()
    adapter = attach_film(model, dim=3)
    adapter.set_phi(phi)
    (film,) = [m for _, m in adapter.modulations()]
    scale, shift = 1 + film.A @ phi, film.B @ phi
    expected = F.group_norm(x, 2, weight * scale, bias * scale + shift).relu()
    torch.testing.assert_close(model(x).detach(), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(adapter.merge().eval()(x).detach(), expected, rtol=1e-12, atol=1e-12)
    assert not model[0].drop._forward_hooks


@pytest.mark.parametrize(("layer", "shape", "axis"), LAYERS.values(), ids=LAYERS)
def test_film_and_its_merge(
    randomise: Callable[..., Any], layer: Callable[[], nn.Module], shape: tuple[int, ...], axis: int
) -> None:
    model = randomise(nn.Sequential(layer())).double().eval()
    x, phi = rand(*shape), rand(3, seed=2)
    bare_keys, plain = list(model.state_dict()), model(x)
    adapter = attach_film(model, "0", dim=3, seed=4)
    adapter.set_phi(phi)
    (film,) = [m for _, m in adapter.modulations()]
    A, B = (np.array(getattr(film, name).tolist()) for name in "AB")
    expected = np.moveaxis(plain.detach().numpy(), axis, -1)
    expected = np.moveaxis(expected * (1 + A @ phi.numpy()) + B @ phi.numpy(), -1, axis)

    adapted = model(x).detach()
    np.testing.assert_allclose(adapted, expected, rtol=1e-12, atol=1e-12)
    assert np.abs(expected - plain.detach().numpy()).max() > 0.05
    assert adapter.merge() is model
    np.testing.assert_allclose(model(x).detach(), expected, rtol=1e-12, atol=1e-12)
    assert list(model.state_dict()) == bare_keys


def test_a_norm_without_a_bias_is_scaled(randomise: Callable[..., Any]) -> None:
    model = randomise(nn.Sequential(nn.RMSNorm(4, eps=1e-6))).double()
    x, phi, weight = rand(2, 3, 4), rand(3, seed=2), model[0].weight.detach().clone()
    adapter = attach_film(model, "0", dim=3, seed=4)
    adapter.set_phi(phi)
    (scale,) = [m for _, m in adapter.modulations()]
    assert adapter.signature.channels == (4,)
    factor = weight * (1 + scale.A @ phi)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * factor
    torch.testing.assert_close(model(x).detach(), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(adapter.merge()(x).detach(), expected, rtol=1e-12, atol=1e-12)
    assert list(model.state_dict()) == ["0.weight"]


@pytest.mark.parametrize("name", [None, "2"])
def test_input_bias_and_its_merge(randomise: Callable[..., Any], name: str | None) -> None:
    model = randomise(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))).double()
    x, phi = rand(5, 3), rand(3, seed=2)
    keys = list(model.state_dict())
    weights = [p.detach().numpy() for p in model.parameters()]
    adapter = attach_input_bias(model, name, dim=3)
    adapter.set_phi(phi)
    assert adapter.layers == [name or "0"]
    shift = adapter.modulations()[0][1].C.numpy() @ phi.numpy()
    first = x.numpy() @ weights[0].T + weights[1] + (shift if name is None else 0)
    expected = np.tanh(first) @ weights[2].T + weights[3] + (0 if name is None else shift)

    np.testing.assert_allclose(model(x).detach(), expected, rtol=1e-12)
    adapter.merge()
    np.testing.assert_allclose(model(x).detach(), expected, rtol=1e-12)
    assert list(model.state_dict()) == keys


# --- Logits --------------------------------------------------------------------------------------------------


def classifier(randomise: Callable[..., Any]) -> nn.Module:
    """A norm, and a linear layer of three logits."""
    return randomise(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3))).double()  # type: ignore[no-any-return]


@pytest.mark.parametrize("temperature", [False, True])
@pytest.mark.parametrize("kind", ["film", "input_bias", "outputs"])
def test_logits_by_hand_and_their_merge(randomise: Callable[..., Any], kind: str, temperature: bool) -> None:
    model = classifier(randomise)
    x, keys = rand(5, 3), list(model.state_dict())
    plain = model(x)
    outputs = Outputs(scale=2.5, temperature=temperature)
    if kind == "outputs":
        adapter, d = attach_outputs(model, outputs), 0
    else:
        adapter, d = (attach_film if kind == "film" else attach_input_bias)(model, dim=2, outputs=outputs), 2
    assert adapter.dim == d + 3 + temperature
    assert adapter.offsets == slice(d, d + 3)
    assert adapter.outputs == Outputs("3", 2.5, temperature)
    assert adapter.layers == {"film": ["1", "3"], "input_bias": ["0", "3"], "outputs": ["3"]}[kind]
    assert torch.equal(model(x), plain)

    phi = rand(adapter.dim, seed=2)
    adapter.set_phi(phi)
    first, norm, last = model[0], model[1], model[3]
    matrices = dict(adapter.modulations()[0][1].named_buffers())
    h = x @ first.weight.T + first.bias
    if kind == "input_bias":
        h = h + matrices["C"] @ phi[:2]
    h = (h - h.mean(1, keepdim=True)) / (h.var(1, correction=0, keepdim=True) + norm.eps).sqrt()
    h = h * norm.weight + norm.bias
    if kind == "film":
        h = h * (1 + matrices["A"] @ phi[:2]) + matrices["B"] @ phi[:2]
    logits = torch.tanh(h) @ last.weight.T + last.bias
    factor = float(np.exp(float(phi[-1]))) if temperature else 1.0
    expected = logits * factor + 2.5 * phi[d : d + 3]

    adapted = model(x).detach()
    torch.testing.assert_close(adapted, expected, rtol=1e-12, atol=1e-12)
    assert (expected - plain).abs().max() > 0.1
    adapter.merge()
    torch.testing.assert_close(model(x), adapted, rtol=1e-12, atol=1e-12)
    assert list(model.state_dict()) == keys


def test_outputs_of_a_dense_classifier(randomise: Callable[..., Any]) -> None:
    """Logits of pixels: the class axis of a convolution is the second."""
    model = randomise(nn.Sequential(nn.Conv2d(2, 4, 1), nn.ReLU(), nn.Conv2d(4, 3, 1))).double()
    x = rand(2, 2, 5, 5)
    plain = model(x)
    adapter = attach_outputs(model, Outputs("2", scale=2, temperature=True))
    phi = rand(4, seed=2)
    adapter.set_phi(phi)
    expected = plain * phi[3].exp() + 2 * phi[:3].view(3, 1, 1)
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(adapter.merge()(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("attach", [attach_film, attach_input_bias])
def test_matrices_are_the_same_with_outputs(randomise: Callable[..., Any], attach: Callable[..., Adapter]) -> None:
    plain = attach(classifier(randomise), dim=3, seed=7)
    more = attach(classifier(randomise), dim=3, seed=7, outputs=Outputs(temperature=True))
    assert len(plain.modulations()) == 1
    for (_, one), (_, other) in zip(plain.modulations(), more.modulations()[:-1], strict=True):
        for (name, mine), (same, theirs) in zip(one.named_buffers(), other.named_buffers(), strict=True):
            assert name == same
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_offsets_follow_the_logits_type(randomise: Callable[..., Any], dtype: torch.dtype) -> None:
    model = classifier(randomise).to(dtype)
    x = rand(5, 3, dtype=dtype)
    plain = model(x)
    adapter = attach_film(model, dim=2, outputs=Outputs(scale=3.0, temperature=True))
    assert adapter.phi.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(model(x), plain)
    phi = torch.tensor([0, 0, 1, 2, -1, 0.5]).to(adapter.phi.dtype)
    adapter.set_phi(phi)
    assert model(x).dtype == dtype
    expected = plain * phi[-1].exp().to(dtype) + (3 * phi[2:5]).to(dtype)
    assert torch.equal(model(x), expected)


def test_one_layer_used_twice_is_modulated_twice() -> None:
    norm = nn.LayerNorm(4)
    model = nn.Sequential(norm, nn.Tanh(), norm).double()
    x, phi = rand(3, 4), rand(2)
    adapter = attach_film(model, dim=2)
    adapter.set_phi(phi)
    (film,) = [m for _, m in adapter.modulations()]
    scale, shift = 1 + film.A @ phi, film.B @ phi
    expected = norm.forward(torch.tanh(norm.forward(x) * scale + shift)) * scale + shift
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)
    adapter.merge()
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_output_follows_the_input(cnn: Callable[[], nn.Sequential], dtype: torch.dtype) -> None:
    model = cnn().to(dtype).eval()
    x = rand(2, 3, 6, 6, dtype=dtype)
    plain = model(x)
    adapter = attach_film(model, dim=3)
    assert adapter.phi.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(model(x), plain)
    adapter.set_phi(torch.ones(3))
    assert model(x).dtype == dtype
    assert not torch.equal(model(x), plain)


@pytest.mark.parametrize("attach", [attach_film, attach_input_bias])
def test_autocast(attach: Callable[..., Adapter]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    dtypes: list[torch.dtype] = []
    for layer in model:
        layer.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    x = rand(5, 3, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(x)
        adapter = attach(model, dim=2)
        assert torch.equal(model(x), plain)
        assert dtypes[:4] == dtypes[4:]
        adapter.set_phi(torch.ones(2))
        assert model(x).dtype == plain.dtype == torch.bfloat16
        assert not torch.equal(model(x), plain)  # autocast caches casts: the new phi must count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("attach", [attach_film, attach_input_bias])
def test_casting_the_model_does_not_round_phi(
    cnn: Callable[[], nn.Sequential], attach: Callable[..., Adapter], dtype: torch.dtype
) -> None:
    adapter = attach(cnn().eval(), dim=3, seed=7)
    adapter.set_phi(rand(3, dtype=torch.float32))
    expected = [adapter.phi.clone(), *(b.clone() for _, module in adapter.modulations() for b in module.buffers())]
    model = adapter.model.to(dtype)
    assert {value.dtype for value in adapter.base_state_dict().values() if value.is_floating_point()} == {dtype}
    assert model(rand(2, 3, 6, 6).to(dtype)).dtype == dtype
    kept = [adapter.phi, *(b for _, module in adapter.modulations() for b in module.buffers())]
    assert all(torch.equal(a, b) for a, b in zip(kept, expected, strict=True))
    assert model.double().metricopt.phi.dtype == torch.float64


def test_autocast_does_not_round_phi() -> None:
    model = nn.Sequential(nn.LayerNorm(4))
    adapter = attach_film(model, dim=2)
    adapter.set_phi(torch.tensor([0.123456, 1.234567]))
    x = rand(5, 4, dtype=torch.float32)
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), expected)  # LayerNorm computes in float32


def test_base_checkpoint_loads_strictly_and_keeps_phi(
    cnn: Callable[[], nn.Sequential], randomise: Callable[..., Any], tuned: Callable[..., Adapter]
) -> None:
    adapter = tuned()
    phi = adapter.phi.detach().clone()
    other = randomise(cnn(), seed=9)
    adapter.model.load_state_dict(other.state_dict(), strict=True)
    assert all(torch.equal(adapter.base_state_dict()[key], value) for key, value in other.state_dict().items())
    assert torch.equal(adapter.phi, phi)


def test_adapted_checkpoint_restores_the_output(
    cnn: Callable[[], nn.Sequential], randomise: Callable[..., Any], tuned: Callable[..., Adapter]
) -> None:
    adapter = tuned()
    other = attach_film(randomise(cnn(), seed=9).eval(), dim=3)
    other.model.load_state_dict(adapter.model.state_dict(), strict=True)
    x = rand(2, 3, 6, 6, dtype=torch.float32)
    assert torch.equal(other.model(x), adapter.model(x))


@pytest.mark.parametrize("mine", [Outputs(scale=2.0), Outputs(temperature=True), Outputs("0"), None])
def test_checkpoint_of_other_outputs_is_refused(mine: Outputs | None) -> None:
    """Each has four coordinates in all; only what the last of them mean differs."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3))

    def attached(outputs: Outputs | None) -> Adapter:
        own = 4 if outputs is None else 4 - 3 - outputs.temperature
        if not own:
            return attach_outputs(model(), outputs)
        return attach_film(model(), "1", dim=own, outputs=outputs)

    theirs = attached(Outputs())
    for each in (mine, Outputs()):
        adapter = attached(each)
        assert adapter.phi.shape == theirs.phi.shape
        if each == Outputs():
            adapter.model.load_state_dict(theirs.model.state_dict())
            continue
        with pytest.raises(RuntimeError) as caught:
            adapter.model.load_state_dict(theirs.model.state_dict())
        assert_named(caught, "differs", "outputs", "seed")


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("other", [{"seed": 1}, {"layers": "1"}, {"layers": "4"}])
def test_checkpoint_of_another_adapter_is_refused(
    tuned: Callable[..., Adapter], other: dict[str, Any], strict: bool
) -> None:
    mine = tuned()
    phi = mine.phi.detach().clone()
    assert_refused(
        lambda: mine.model.load_state_dict(tuned(**other).model.state_dict(), strict=strict),
        RuntimeError,
        "seed",
        other.get("seed", 0),
    )
    assert torch.equal(mine.phi, phi)


@pytest.mark.parametrize("attach", [lambda model: attach_film(model, "1", dim=3), attach_outputs])
def test_phi_acts_before_the_users_own_hooks_as_what_it_is_merged_into_does(
    attach: Callable[[nn.Module], Adapter],
) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 3)).double()
    for layer in model:
        layer.register_forward_hook(lambda module, args, output: output.tanh())
    adapter, x = attach(model), rand(5, 4)
    adapter.set_phi(torch.tensor([1.0, -0.5, 2.0]))
    adapted = model(x).detach()
    torch.testing.assert_close(adapter.merge()(x), adapted)
