"""What phi does to a layer's output: the formulas by hand, types, and phi in checkpoints."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.convnext import LayerNorm2d
from torchvision.ops import FrozenBatchNorm2d

from helpers.architectures import OwnRMSNorm
from helpers.refusals import assert_refused
from helpers.tensors import rand
from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film, attach_input_bias, attach_outputs
from metricopt_ext.adapters.signature import Outputs


def test_matrices_are_seeded_gaussians() -> None:
    def matrices(**kwargs: Any) -> dict[str, Tensor]:
        model = nn.Sequential(nn.BatchNorm1d(400), nn.BatchNorm1d(400))
        adapter = attach_film(model, dim=50, **kwargs)
        return {f"{i}{name}": b for i, move in enumerate(adapter.moves.values()) for name, b in move.named_buffers()}

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


class OwnLayerNorm(nn.Module):
    """As DeBERTa's."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(rand(size, seed=3)), nn.Parameter(rand(size, seed=4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:], self.weight, self.bias)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "batch_norm_1d": (lambda: nn.BatchNorm1d(4), (5, 4), 1),
    "frozen_batch_norm_2d": (lambda: FrozenBatchNorm2d(4), (2, 4, 3, 3), 1),
    "a detector's own": (lambda: type("DetrFrozenBatchNorm2d", (FrozenBatchNorm2d,), {})(4), (2, 4, 3, 3), 1),
    "group_norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 5), 1),
    "instance_norm_2d": (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (2, 4, 3, 3), 1),
    "layer_norm": (lambda: nn.LayerNorm(4), (2, 4, 4), -1),
    "layer_norm_2d": (lambda: LayerNorm2d(4), (2, 4, 3, 4), 1),
    "layer_norm_channels_first_1": (lambda: ChannelsFirst(1), (2, 1, 3, 4), 1),
    "layer_norm_channels_first_4": (lambda: ChannelsFirst(4), (2, 4, 3, 4), 1),
    "layer_norm of its own": (lambda: OwnLayerNorm(4), (5, 3, 4), -1),
    "rms_norm": (lambda: nn.RMSNorm(4), (2, 3, 4), -1),
    "rms_norm of its own, as Gemma's": (lambda: OwnRMSNorm(4, 1.0), (2, 3, 4), -1),
    "layer_norm without a bias": (lambda: nn.LayerNorm(4, bias=False), (2, 3, 4), -1),
    "conv_2d_unbatched": (lambda: nn.Conv2d(2, 4, 2), (2, 5, 5), 0),
    "conv_2d_depthwise": (lambda: nn.Conv2d(4, 4, 2, groups=4), (3, 4, 5, 5), 1),
    "linear": (lambda: nn.Linear(3, 4), (2, 4, 3), -1),
}


@pytest.mark.parametrize(("layer", "shape", "axis"), LAYERS.values(), ids=LAYERS)
def test_film_and_its_merge(
    randomise: Callable[..., Any], layer: Callable[[], nn.Module], shape: tuple[int, ...], axis: int
) -> None:
    model = randomise(nn.Sequential(layer())).double().eval()
    x, phi = rand(*shape), rand(3, seed=2)
    bare_keys, plain = list(model.state_dict()), model(x).detach().numpy()
    adapter = attach_film(model, "0", dim=3, seed=4)
    adapter.set_phi(phi)
    (film,) = adapter.moves.values()
    matrices = {name: each.numpy() for name, each in film.named_buffers()}
    expected = np.moveaxis(plain, axis, -1) * (1 + matrices["A"] @ phi.numpy())
    expected = np.moveaxis(expected + (matrices["B"] @ phi.numpy() if "B" in matrices else 0), -1, axis)

    np.testing.assert_allclose(model(x).detach(), expected, rtol=1e-12, atol=1e-12)
    assert np.abs(expected - plain).max() > 0.05
    adapter.merge()
    np.testing.assert_allclose(model(x).detach(), expected, rtol=1e-12, atol=1e-12)
    assert list(model.state_dict()) == bare_keys


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
    (film,) = adapter.moves.values()
    scale, shift = 1 + film.A @ phi, film.B @ phi
    expected = F.group_norm(x, 2, weight * scale, bias * scale + shift).relu()
    torch.testing.assert_close(model(x).detach(), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(adapter.merge().eval()(x).detach(), expected, rtol=1e-12, atol=1e-12)
    assert not model[0].drop._forward_hooks


# --- Logits --------------------------------------------------------------------------------------------------


def classifier(randomise: Callable[..., Any]) -> nn.Module:
    """A norm, and a linear layer of three logits."""
    return randomise(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3))).double()  # type: ignore[no-any-return]


@pytest.mark.parametrize("temperature", [False, True])
@pytest.mark.parametrize("kind", ["film", "input_bias", "outputs"])
def test_logits_by_hand(randomise: Callable[..., Any], kind: str, temperature: bool) -> None:
    model = classifier(randomise)
    x, outputs = rand(5, 3), Outputs(scale=2.5, temperature=temperature)
    if kind == "outputs":
        adapter, d = attach_outputs(model, outputs), 0
    else:
        adapter, d = (attach_film if kind == "film" else attach_input_bias)(model, dim=2, outputs=outputs), 2
    assert adapter.dim == d + 3 + temperature
    assert adapter.offsets == slice(d, d + 3)
    assert adapter.outputs == Outputs("3", 2.5, temperature)
    assert adapter.layers == {"film": ["1", "3"], "input_bias": ["0", "3"], "outputs": ["3"]}[kind]

    phi = rand(adapter.dim, seed=2)
    adapter.set_phi(phi)
    first, norm, last = model[0], model[1], model[3]
    matrices = dict(next(iter(adapter.moves.values())).named_buffers())
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
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)


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


def test_one_layer_used_twice_is_modulated_twice() -> None:
    norm = nn.LayerNorm(4)
    model, x, phi = nn.Sequential(norm, nn.Tanh(), norm).double(), rand(3, 4), rand(2)
    adapter = attach_film(model, dim=2)
    adapter.set_phi(phi)
    (film,) = adapter.moves.values()
    scale, shift = 1 + film.A @ phi, film.B @ phi
    expected = norm.forward(torch.tanh(norm.forward(x) * scale + shift)) * scale + shift
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)
    adapter.merge()
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)


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


# --- Types -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_outputs_follow_the_models_type(randomise: Callable[..., Any], dtype: torch.dtype) -> None:
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
    torch.testing.assert_close(model(x), expected)  # within the type's rounding


@pytest.mark.parametrize("attach", [attach_film, attach_input_bias])
def test_autocast(attach: Callable[..., Adapter]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    x = rand(5, 3, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(x)
        adapter = attach(model, dim=2)
        assert torch.equal(model(x), plain)
        adapter.set_phi(torch.ones(2))
        assert model(x).dtype == plain.dtype == torch.bfloat16
        assert not torch.equal(model(x), plain)  # autocast caches casts: the new phi must count


@pytest.mark.parametrize("attach", [attach_film, attach_input_bias])
def test_casting_the_model_does_not_round_phi(cnn: Callable[[], nn.Sequential], attach: Callable[..., Adapter]) -> None:
    adapter = attach(cnn().eval(), dim=3, seed=7)
    adapter.set_phi(rand(3, dtype=torch.float32))
    expected = [adapter.phi.clone(), *(b.clone() for move in adapter.moves.values() for b in move.buffers())]
    model = adapter.model.bfloat16()
    assert {each.dtype for each in adapter.base_state_dict().values() if each.is_floating_point()} == {torch.bfloat16}
    assert model(rand(2, 3, 6, 6).bfloat16()).dtype == torch.bfloat16
    kept = [adapter.phi, *(b for move in adapter.moves.values() for b in move.buffers())]
    assert all(torch.equal(a, b) for a, b in zip(kept, expected, strict=True))
    assert model.double().metricopt.phi.dtype == torch.float64


# --- Checkpoints -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [True, False])
def test_checkpoint_of_another_seed_is_refused(tuned: Callable[..., Adapter], strict: bool) -> None:
    mine, theirs = tuned(), tuned(seed=1).model.state_dict()
    phi = mine.phi.detach().clone()
    assert_refused(lambda: mine.model.load_state_dict(theirs, strict=strict), RuntimeError, "seed")
    assert torch.equal(mine.phi, phi)
