"""Adapters: what they leave alone, what they compute, and what is refused."""

import copy
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.convnext import CNBlockConfig, ConvNeXt, LayerNorm2d
from torchvision.ops import FrozenBatchNorm2d, StochasticDepth

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film, attach_input_bias, load_adapter
from metricopt_ext.errors import AdapterError, FileFormatError


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give affine weights and running statistics values that no layer is born with."""
    rng = torch.Generator().manual_seed(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point():
            drawn = torch.rand(tensor.shape, generator=rng, dtype=torch.float64)
            tensor.data.copy_(drawn + 0.5 if "var" in name else drawn * 2 - 1)
    return model


def rand(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def cnn() -> nn.Sequential:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.GroupNorm(2, 4),
        nn.Flatten(),
        nn.Linear(4 * 4 * 4, 5),
        nn.LayerNorm(5),
    )
    return randomise(model)  # type: ignore[return-value]


class Stochastic(nn.Module):
    """Every kind of layer whose output depends on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(6)
        self.instance = nn.InstanceNorm1d(6, affine=True, track_running_stats=True)
        self.dropouts = nn.Sequential(nn.Dropout(0.5), nn.AlphaDropout(0.5), nn.FeatureAlphaDropout(0.5))
        self.dropout1d = nn.Dropout1d(0.5)
        self.depth = StochasticDepth(0.5, "row")
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True)
        self.rnn = nn.LSTM(6, 6, num_layers=2, dropout=0.5, batch_first=True)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn(x)
        h = self.depth(self.dropout1d(self.dropouts(self.instance(h)))).mT
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.norm(self.rnn(h)[0])


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "cnn": (cnn, (2, 3, 6, 6)),
    "stochastic": (lambda: randomise(Stochastic()), (4, 6, 5)),
    "convnext": (
        lambda: ConvNeXt(
            [CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)], stochastic_depth_prob=0.5, num_classes=3
        ),
        (2, 3, 32, 32),
    ),
    "vit": (
        lambda: randomise(torchvision.models.VisionTransformer(8, 4, 1, 2, 8, 16, dropout=0.3, attention_dropout=0.3)),
        (2, 3, 8, 8),
    ),
}

each_model = pytest.mark.parametrize(("make", "shape"), MODELS.values(), ids=MODELS)


@each_model
def test_nothing_changes_at_phi_zero(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    model = make().eval()
    x = rand(*shape, dtype=torch.float32)
    with torch.no_grad():  # with gradients torch's attention takes another path once its weights are frozen
        before = model(x)
        adapter = attach_film(model, dim=3)
        assert torch.equal(model(x), before)
        adapter.set_phi(torch.ones(3))
        assert not torch.allclose(model(x), before)


@each_model
def test_remove_restores_everything(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    model = make().train()
    next(model.parameters()).requires_grad_(False)  # frozen by its owner: stays frozen
    bare = copy.deepcopy(model)
    adapter = attach_film(model, dim=3)
    adapter.set_phi(torch.ones(3))
    x = rand(*shape, dtype=torch.float32)
    model(x)

    assert adapter.remove() is model
    assert list(model.state_dict()) == list(bare.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), bare.state_dict().values(), strict=True))
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in bare.parameters()]
    assert [m.training for m in model.modules()] == [m.training for m in bare.modules()]
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called")
    assert not any(getattr(module, name) for module in model.modules() for name in hooks)
    assert [set(vars(m)) for m in model.modules()] == [set(vars(m)) for m in bare.modules()]
    for mode in (True, False):
        outputs = []
        for each in (model, bare):
            torch.manual_seed(3)
            outputs.append(each.train(mode)(x))
        assert torch.equal(*outputs)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), bare.buffers(), strict=True))
    with pytest.raises(AdapterError, match="removed or merged"):
        adapter.set_phi(torch.ones(3))


@each_model
def test_train_mode_computes_as_eval(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    model = make()
    adapter = attach_film(model, dim=3)
    adapter.set_phi(torch.ones(3))
    x = rand(*shape, dtype=torch.float32)
    expected = model.eval()(x)
    buffers = [b.clone() for b in model.buffers()]
    assert torch.equal(model.train()(x), expected)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))


def test_mode_is_restored_when_a_pinned_layer_raises() -> None:
    model = cnn().train()
    attach_film(model, dim=3)
    with pytest.raises(RuntimeError):
        model[1](torch.zeros(2, 9, 3, 3))  # 9 channels, BatchNorm has 4
    assert model[1].training


def test_only_phi_learns() -> None:
    model = cnn()
    attach_film(model, dim=3)
    model(rand(2, 3, 6, 6, dtype=torch.float32)).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["metricopt.phi"]
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["metricopt.phi"]


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


def test_attaching_leaves_the_global_stream_alone() -> None:
    model = cnn()
    state = torch.get_rng_state()
    attach_film(model, dim=3)
    assert torch.equal(torch.get_rng_state(), state)


# --- The formula, and merging -------------------------------------------------------------------------------

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "batch_norm_1d": (lambda: nn.BatchNorm1d(4), (5, 4), 1),
    "batch_norm_1d_sequence": (lambda: nn.BatchNorm1d(4), (5, 4, 3), 1),
    "batch_norm_2d": (lambda: nn.BatchNorm2d(4), (2, 4, 3, 3), 1),
    "batch_norm_3d": (lambda: nn.BatchNorm3d(4), (2, 4, 2, 3, 2), 1),
    "frozen_batch_norm_2d": (lambda: FrozenBatchNorm2d(4), (2, 4, 3, 3), 1),
    "group_norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 5), 1),
    "instance_norm_1d": (lambda: nn.InstanceNorm1d(4, affine=True), (2, 4, 5), 1),
    "instance_norm_2d": (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (2, 4, 3, 3), 1),
    "instance_norm_3d": (lambda: nn.InstanceNorm3d(4, affine=True), (2, 4, 2, 3, 2), 1),
    "instance_norm_2d_unbatched": (lambda: nn.InstanceNorm2d(4, affine=True), (4, 4, 3), 0),
    "layer_norm": (lambda: nn.LayerNorm(4), (2, 4, 4), -1),
    "layer_norm_2d": (lambda: LayerNorm2d(4), (2, 4, 3, 4), 1),
    "conv_1d": (lambda: nn.Conv1d(2, 4, 2), (3, 2, 5), 1),
    "conv_2d": (lambda: nn.Conv2d(2, 4, 2), (3, 2, 5, 5), 1),
    "conv_2d_unbatched": (lambda: nn.Conv2d(2, 4, 2), (2, 5, 5), 0),
    "conv_2d_depthwise": (lambda: nn.Conv2d(4, 4, 2, groups=4), (3, 4, 5, 5), 1),
    "conv_3d": (lambda: nn.Conv3d(2, 4, 2), (3, 2, 3, 3, 3), 1),
    "linear": (lambda: nn.Linear(3, 4), (2, 4, 3), -1),
}


@pytest.mark.parametrize(("layer", "shape", "axis"), LAYERS.values(), ids=LAYERS)
def test_film_and_its_merge(layer: Callable[[], nn.Module], shape: tuple[int, ...], axis: int) -> None:
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
    assert np.abs(expected - plain.detach().numpy()).max() > 0.1
    assert adapter.merge() is model
    np.testing.assert_allclose(model(x).detach(), expected, rtol=1e-12, atol=1e-12)
    assert list(model.state_dict()) == bare_keys


@pytest.mark.parametrize("name", [None, "2"])
def test_input_bias_and_its_merge(name: str | None) -> None:
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


@each_model
def test_merged_models(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    model = make().double().eval()
    keys, x = list(model.state_dict()), rand(*shape)
    adapter = attach_film(model, dim=5)
    adapter.set_phi(0.3 * rand(5))
    expected = model(x)
    adapter.merge()
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)
    assert list(model.state_dict()) == keys


def test_resnet() -> None:
    model = torchvision.models.resnet18(num_classes=3).double().eval()
    bare = copy.deepcopy(model)
    adapter = attach_film(model, "layer4.*.bn2", dim=8)
    assert adapter.layers == ["layer4.0.bn2", "layer4.1.bn2"]
    x = rand(1, 3, 32, 32)
    assert torch.equal(model(x), bare(x))
    adapter.set_phi(rand(8))
    adapted = model(x)
    assert (adapted - bare(x)).abs().max() > 1e-3
    adapter.merge()
    torch.testing.assert_close(model(x), adapted, rtol=1e-12, atol=1e-12)
    changed = [key for key, value in model.state_dict().items() if not torch.equal(value, bare.state_dict()[key])]
    assert changed == [f"layer4.{i}.bn2.{name}" for i in (0, 1) for name in ("weight", "bias")]


def test_default_is_every_usable_norm() -> None:
    model = nn.ModuleDict(
        {
            "conv": nn.Conv2d(3, 4, 1),
            "bn": nn.BatchNorm2d(4),
            "plain": nn.BatchNorm2d(4, affine=False),
            "instance": nn.InstanceNorm2d(4),
            "image": nn.LayerNorm((4, 3, 3)),
            "last": nn.LayerNorm(4),
            "unbiased": nn.LayerNorm(4, bias=False),
            "linear": nn.Linear(4, 4),
        }
    )
    assert attach_film(model, dim=2).layers == ["bn", "last"]


def test_patterns_are_joined_without_doubles() -> None:
    assert attach_film(cnn(), ["1", "[14]", "6"], dim=2).layers == ["1", "4", "6"]


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


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x.argmax(1)))


def normed() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(3), nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)))


@pytest.mark.parametrize(
    ("make", "layers", "message"),
    [
        (Tied, "head", r"head\.weight is shared with another layer"),
        (normed, ["0", "1"], r"1\.weight is computed from other tensors"),
    ],
)
def test_merging_where_it_would_be_wrong(make: Callable[[], nn.Module], layers: Any, message: str) -> None:
    model = make()
    adapter = attach_film(model, layers, dim=2)
    adapter.set_phi(torch.ones(2))
    x = rand(6, 3, dtype=torch.float32)
    adapted = model(x)
    with pytest.raises(AdapterError, match=message):
        adapter.merge()
    assert torch.equal(model(x), adapted)


def test_input_bias_merges_beside_tied_weights() -> None:
    model = Tied()
    adapter = attach_input_bias(model, "head", dim=2)
    adapter.set_phi(torch.ones(2))
    x = rand(6, 3, dtype=torch.float32)
    adapted = model(x)
    torch.testing.assert_close(adapter.merge()(x), adapted)


# --- using ---------------------------------------------------------------------------------------------------


def test_using_puts_phi_in_place_and_back() -> None:
    model = cnn().double().eval()
    adapter = attach_film(model, dim=3)
    x, phi = rand(2, 3, 6, 6), rand(3)
    plain = model(x)
    with adapter.using(phi) as same:
        assert same is model
        inside = model(x)
        with adapter.using(torch.zeros(3).double()):
            assert torch.equal(model(x), plain)
        assert torch.equal(model(x), inside)
    assert torch.equal(model(x), plain)
    with pytest.raises(KeyError), adapter.using(phi):
        raise KeyError
    assert torch.equal(model(x), plain)
    adapter.set_phi(phi)
    assert torch.equal(model(x), inside)


def test_using_is_differentiable_and_maps_over_a_population() -> None:
    model = cnn().double()
    adapter = attach_film(model, dim=3)
    x, phis = rand(2, 3, 6, 6), rand(4, 3)

    def output(phi: Tensor) -> Tensor:
        with adapter.using(phi):
            return model(x)

    mapped = torch.func.vmap(output)(phis)
    torch.testing.assert_close(mapped, torch.stack([output(phi) for phi in phis]), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(output, (phis[0].clone().requires_grad_(True),))


# --- Types ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_output_follows_the_input(dtype: torch.dtype) -> None:
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


# --- State dicts, files and copies ---------------------------------------------------------------------------


def test_autocast_does_not_round_phi() -> None:
    model = nn.Sequential(nn.LayerNorm(4))
    adapter = attach_film(model, dim=2)
    adapter.set_phi(torch.tensor([0.123456, 1.234567]))
    x = rand(5, 4, dtype=torch.float32)
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), expected)  # LayerNorm computes in float32


def tuned(seed: int = 0, layers: Any = None, dim: int = 3) -> Adapter:
    adapter = attach_film(cnn().eval(), layers, dim=dim, seed=seed)
    adapter.set_phi(rand(dim, seed=5, dtype=torch.float32))
    return adapter


def test_state_dict_keys() -> None:
    bare = cnn()
    adapter = tuned()
    extra = [key for key in adapter.model.state_dict() if key not in bare.state_dict()]
    assert extra == ["metricopt.phi", "metricopt.signature"]
    assert list(adapter.base_state_dict()) == list(bare.state_dict())
    bare.load_state_dict(adapter.base_state_dict(), strict=True)
    missing, unexpected = bare.load_state_dict(adapter.model.state_dict(), strict=False)
    assert missing == []
    assert unexpected == ["metricopt.phi", "metricopt.signature"]


def test_base_checkpoint_loads_strictly_and_keeps_phi() -> None:
    adapter = tuned()
    phi = adapter.phi.detach().clone()
    other = randomise(cnn(), seed=9)
    adapter.model.load_state_dict(other.state_dict(), strict=True)
    assert all(torch.equal(adapter.base_state_dict()[key], value) for key, value in other.state_dict().items())
    assert torch.equal(adapter.phi, phi)


def test_adapted_checkpoint_restores_the_output() -> None:
    adapter = tuned()
    other = attach_film(randomise(cnn(), seed=9).eval(), dim=3)
    other.model.load_state_dict(adapter.model.state_dict(), strict=True)
    x = rand(2, 3, 6, 6, dtype=torch.float32)
    assert torch.equal(other.model(x), adapter.model(x))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("other", [{"seed": 1}, {"layers": "1"}, {"layers": "4"}])
def test_checkpoint_of_another_adapter_is_refused(other: dict[str, Any], strict: bool) -> None:
    mine = tuned()
    phi = mine.phi.detach().clone()
    with pytest.raises(RuntimeError, match=rf"seed {other.get('seed', 0)}\).*attach with its"):
        mine.model.load_state_dict(tuned(**other).model.state_dict(), strict=strict)
    assert torch.equal(mine.phi, phi)


def by_pickle(model: nn.Module) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("kind", ["film", "input_bias"])
def test_copies_are_isolated(copied: Callable[[nn.Module], Any], kind: str) -> None:
    model = cnn().train()
    adapter = attach_film(model, dim=3) if kind == "film" else attach_input_bias(model, dim=3)
    adapter.set_phi(torch.ones(3))
    x = rand(2, 3, 6, 6, dtype=torch.float32)
    at_one = model(x)
    twin = copied(model)
    theirs = Adapter(twin)
    assert torch.equal(twin(x), at_one)

    theirs.set_phi(-torch.ones(3))
    at_minus_one = twin(x)
    assert torch.equal(model(x), at_one)
    assert not torch.allclose(at_minus_one, at_one)
    adapter.set_phi(torch.zeros(3))
    assert torch.equal(twin(x), at_minus_one)
    with theirs.using(torch.zeros(3)):
        adapter.set_phi(torch.ones(3))
        assert torch.equal(model(x), at_one)

    theirs.remove()
    assert not any(hasattr(module, "metricopt_modulation") for module in twin.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in twin.modules())
    assert torch.equal(model(x), at_one)
    with pytest.raises(RuntimeError):
        model[1](torch.zeros(2, 9, 3, 3))
    assert model[1].training  # the original's pins still survive an exception
    adapter.merge()
    torch.testing.assert_close(model.eval()(x), at_one)


@pytest.mark.parametrize("kind", ["film", "input_bias"])
def test_file_roundtrip(kind: str, tmp_path: Path) -> None:
    attach = attach_film if kind == "film" else attach_input_bias
    adapter = attach(cnn().eval(), dim=3, seed=7)
    adapter.set_phi(rand(3, dtype=torch.float32))
    adapter.save(tmp_path / "adapter.safetensors")
    x = rand(2, 3, 6, 6, dtype=torch.float32)

    loaded = load_adapter(cnn().eval(), tmp_path / "adapter.safetensors")
    assert repr(loaded) == repr(adapter)
    assert f"Adapter({kind}, dim=3" in repr(loaded)
    assert torch.equal(loaded.phi, adapter.phi)
    assert torch.equal(loaded.model(x), adapter.model(x))
    assert loaded.model.state_dict().keys() == adapter.model.state_dict().keys()
    loaded.model.load_state_dict(adapter.model.state_dict())


def test_loading_brings_the_matrices_and_their_seed(tmp_path: Path) -> None:
    path, adapter = tmp_path / "adapter.safetensors", tuned(seed=7)
    adapter.save(path)
    mine = tuned(seed=8)
    mine.load(path)
    x = rand(2, 3, 6, 6, dtype=torch.float32)
    assert torch.equal(mine.model(x), adapter.model(x))
    mine.model.load_state_dict(adapter.model.state_dict())
    with pytest.raises(RuntimeError, match="seed 8"):
        mine.model.load_state_dict(tuned(seed=8).model.state_dict())
    mine.save(tmp_path / "again.safetensors")
    again = load_adapter(cnn().eval(), tmp_path / "again.safetensors")
    assert again.context.seed == 7
    assert torch.equal(again.model(x), adapter.model(x))


@pytest.mark.parametrize("damage", ["empty", "half", "cut", "garbage", "absent", "other kind"])
def test_damaged_files_are_refused_by_name(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "adapter.safetensors"
    tuned().save(path)
    data = path.read_bytes()
    if damage == "absent":
        path.unlink()
    else:
        path.write_bytes(
            {
                "empty": b"",
                "half": data[: len(data) // 2],
                "cut": data[:-1],
                "garbage": b"\xff" * len(data),
                "other kind": data.replace(b"metricopt_ext/adapter", b"metricopt_ext/another"),
            }[damage]
        )
    model = cnn()
    with pytest.raises(FileFormatError, match=re.escape(str(path))):
        load_adapter(model, path)
    assert not hasattr(model, "metricopt")


def test_a_description_that_is_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "adapter.safetensors"
    tuned().save(path)
    path.write_bytes(path.read_bytes().replace(b'{\\"kind', b' \\"kind'))
    with pytest.raises(FileFormatError, match="corrupt"):
        load_adapter(cnn(), path)


@pytest.mark.parametrize(
    ("other", "named"), [({"dim": 4}, "dim is 3, .* is 4"), ({"layers": "1"}, r"layers is \['1', '4', '7'\]")]
)
def test_file_of_another_adapter_is_refused(other: dict[str, Any], named: str, tmp_path: Path) -> None:
    tuned().save(tmp_path / "adapter.safetensors")
    mine = tuned(**other)
    with pytest.raises(AdapterError, match=named):
        mine.load(tmp_path / "adapter.safetensors")


# --- Refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("layer4.*.bn3", r"'layer4\.\*\.bn3' matches no layer; did you mean \[.*layer4\.\d\.bn"),
        (["bn1", "layer9.0.bn1"], r"layers='layer9\.0\.bn1'"),
        ("relu", "matches 'relu', which is a ReLU, neither"),
        ("conv1", "matches 'conv1', which is a Conv2d without a weight and a bias"),
    ],
)
def test_unusable_layers(layers: Any, message: str) -> None:
    model = torchvision.models.resnet18()
    with pytest.raises(AdapterError, match=message):
        attach_film(model, layers)
    assert not hasattr(model, "metricopt")
    assert all(p.requires_grad for p in model.parameters())


def test_attention_output_projection_is_no_layer() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2)})
    with pytest.raises(AdapterError, match=r"'attention\.out_proj', which is the output projection"):
        attach_film(model, "attention.*")


class ConvolutionWithMore(nn.Conv2d):
    """A convolution as Detectron2 has them: a norm and an activation inside."""

    def __init__(self, norm: nn.Module | None, activation: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__(3, 4, 3)
        self.norm = norm
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        h = h if self.norm is None else self.norm(h)
        return h if self.activation is None else self.activation(h)


@pytest.mark.parametrize(("norm", "activation"), [(nn.BatchNorm2d(4), None), (None, torch.relu)])
def test_convolutions_that_end_in_more_are_refused(norm: Any, activation: Any) -> None:
    with pytest.raises(AdapterError, match="'0', which is a ConvolutionWithMore with a norm or an activation inside"):
        attach_film(nn.Sequential(ConvolutionWithMore(norm, activation)), "0")


def test_convolutions_that_could_end_in_more_merge() -> None:
    model = randomise(
        nn.Sequential(ConvolutionWithMore(None, None), ConvolutionWithMore(nn.BatchNorm2d(4), torch.relu))
    )
    model[1].weight = nn.Parameter(rand(4, 4, 3, 3, dtype=torch.float32))
    model.eval()
    adapter = attach_film(model, ["0", "1.norm"], dim=3)
    adapter.set_phi(rand(3, dtype=torch.float32))
    x = rand(2, 3, 8, 8, dtype=torch.float32)
    adapted = model(x)
    torch.testing.assert_close(adapter.merge()(x), adapted)


def test_norm_over_several_axes_has_no_channel() -> None:
    with pytest.raises(AdapterError, match="over 2 axes"):
        attach_film(nn.Sequential(nn.LayerNorm((3, 4))), "0")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(2, 3), nn.ReLU()), r"no normalisation layer.*\['0'\]"),
        (nn.Sequential(nn.ReLU()), "none of its layers has both weight and bias"),
    ],
)
def test_model_without_norms(model: nn.Module, message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        attach_film(model)


def test_input_bias_needs_a_linear_layer_with_bias() -> None:
    with pytest.raises(AdapterError, match="no linear layer with a bias; use attach_film"):
        attach_input_bias(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Linear(3, 4, bias=False)))
    model = nn.ModuleDict({"encoder": nn.Linear(3, 4), "head": nn.Linear(4, 2)})
    with pytest.raises(AdapterError, match=r"'heads'; did you mean \['head'"):
        attach_input_bias(model, "heads")


@pytest.mark.parametrize("attach", [attach_film, attach_input_bias])
@pytest.mark.parametrize(
    ("kwargs", "message"), [({"dim": 0}, "dim is 0"), ({"dim": -2}, "dim is -2"), ({"seed": -1}, "seed is -1")]
)
def test_bad_numbers(attach: Callable[..., Adapter], kwargs: dict[str, int], message: str) -> None:
    model = cnn()
    with pytest.raises(AdapterError, match=message):
        attach(model, **kwargs)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("first", [attach_film, attach_input_bias])
@pytest.mark.parametrize("second", [attach_film, attach_input_bias])
def test_attaching_twice(first: Callable[..., Adapter], second: Callable[..., Adapter]) -> None:
    model = cnn()
    adapter = first(model, dim=2)
    for target in (model, nn.Sequential(model)):
        with pytest.raises(AdapterError, match="adapter already"):
            second(target, dim=2)
    adapter.remove()
    second(model, dim=2)


@pytest.mark.parametrize("attach", [attach_film, attach_input_bias])
def test_wrapped_models(attach: Callable[..., Adapter]) -> None:
    model = cnn()
    with pytest.raises(AdapterError, match=r"DataParallel wraps the model .* attach before wrapping it"):
        attach(nn.DataParallel(model), dim=2)
    attach(model, dim=2)
    assert "metricopt.phi" in nn.DataParallel(model).module.state_dict()


def test_handles_need_an_adapter() -> None:
    with pytest.raises(AdapterError, match="Sequential has no adapter"):
        Adapter(cnn())


@pytest.mark.parametrize("shape", [(2,), (4,), (1, 3), ()])
def test_phi_of_another_shape(shape: tuple[int, ...]) -> None:
    adapter = tuned()
    with pytest.raises(AdapterError, match=re.escape(f"phi has shape {shape}, this adapter's is (3,)")):
        adapter.set_phi(torch.ones(shape))
