"""Attaching: which layers phi modulates, what stays as it was, and what is refused."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from helpers.refusals import assert_refused
from helpers.tensors import rand
from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film, attach_input_bias, attach_outputs, load_adapter
from metricopt_ext.adapters.signature import Outputs
from metricopt_ext.errors import AdapterError, FileFormatError


def test_nothing_changes_at_phi_zero(model_and_shape: tuple[nn.Module, tuple[int, ...]]) -> None:
    model, shape = model_and_shape
    model = model.eval()
    x = rand(*shape, dtype=torch.float32)
    with torch.no_grad():  # with gradients torch's attention takes another path once its weights are frozen
        before = model(x)
        adapter = attach_film(model, dim=3)
        assert torch.equal(model(x), before)
        adapter.set_phi(torch.ones(3))
        assert not torch.allclose(model(x), before)


def test_train_mode_computes_as_eval(model_and_shape: tuple[nn.Module, tuple[int, ...]]) -> None:
    model, shape = model_and_shape
    adapter = attach_film(model, dim=3)
    adapter.set_phi(torch.ones(3))
    x = rand(*shape, dtype=torch.float32)
    expected = model.eval()(x)
    buffers = [b.clone() for b in model.buffers()]
    assert torch.equal(model.train()(x), expected)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))


def test_only_phi_learns(cnn: Callable[[], nn.Sequential]) -> None:
    model = cnn()
    attach_film(model, dim=3)
    model(rand(2, 3, 6, 6, dtype=torch.float32)).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["metricopt.phi"]
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["metricopt.phi"]


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("end", [Adapter.remove, Adapter.merge])
def test_the_optimizer_that_trained_the_weights_moves_them_no_more(
    cnn: Callable[[], nn.Sequential], optimizer: Any, end: Callable[[Adapter], nn.Module]
) -> None:
    model = cnn().eval()
    trained = optimizer(model.parameters(), lr=0.1, weight_decay=0.1)
    model(rand(2, 3, 6, 6, dtype=torch.float32)).square().sum().backward()
    trained.step()
    adapter = attach_film(model, dim=3)
    frozen = {name: each.clone() for name, each in model.state_dict().items()}
    trained.step()
    assert all(torch.equal(each, frozen[name]) for name, each in model.state_dict().items())
    end(adapter)
    trained.step()
    assert all(torch.equal(each, frozen[name]) for name, each in model.state_dict().items())


def test_attaching_leaves_the_global_stream_alone(cnn: Callable[[], nn.Sequential]) -> None:
    model = cnn()
    state = torch.get_rng_state()
    attach_film(model, dim=3)
    assert torch.equal(torch.get_rng_state(), state)


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
            "scale": nn.RMSNorm(4),
            "linear": nn.Linear(4, 4),
        }
    )
    assert attach_film(model, dim=2).layers == ["bn", "last"]


@pytest.mark.parametrize("kind", ["film", "input_bias"])
def test_file_roundtrip(cnn: Callable[[], nn.Sequential], kind: str, tmp_path: Path) -> None:
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


def test_file_roundtrip_of_a_scale(tmp_path: Path) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.RMSNorm(4), nn.LayerNorm(4))

    adapter = attach_film(model(), ["0", "1"], dim=3, seed=7)
    adapter.set_phi(rand(3, dtype=torch.float32))
    adapter.save(tmp_path / "adapter.safetensors")
    x = rand(2, 4, dtype=torch.float32)
    loaded = load_adapter(model(), tmp_path / "adapter.safetensors")
    assert torch.equal(loaded.model(x), adapter.model(x))
    attach_film(nn.Sequential(nn.LayerNorm(4)), "0", dim=3).save(tmp_path / "b.safetensors")
    assert_refused(
        lambda: load_adapter(nn.Sequential(nn.RMSNorm(4)), tmp_path / "b.safetensors"), FileFormatError, "matrices.0.B"
    )


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
    assert_refused(lambda: attach_film(nn.Sequential(ConvolutionWithMore(norm, activation)), "0"), AdapterError, "'0'")


def test_convolutions_that_could_end_in_more_merge(randomise: Callable[..., Any]) -> None:
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


def test_input_bias_needs_a_linear_layer_with_bias() -> None:
    assert_refused(
        lambda: attach_input_bias(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Linear(3, 4, bias=False))),
        AdapterError,
        "bias",
        "attach_film",
    )
    model = nn.ModuleDict({"encoder": nn.Linear(3, 4), "head": nn.Linear(4, 2)})
    assert_refused(lambda: attach_input_bias(model, "heads"), AdapterError, "heads", "head")


# --- Logits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [False, True])
@pytest.mark.parametrize("kind", ["film", "input_bias", "outputs"])
def test_file_roundtrip_with_outputs(
    cnn: Callable[[], nn.Sequential], kind: str, temperature: bool, tmp_path: Path
) -> None:
    outputs, model, path = Outputs("7", 2.5, temperature), cnn().eval(), tmp_path / "adapter.safetensors"
    if kind == "film":
        adapter = attach_film(model, ["1", "4"], dim=3, seed=7, outputs=outputs)
    elif kind == "input_bias":
        adapter = attach_input_bias(model, dim=3, seed=7, outputs=outputs)
    else:
        adapter = attach_outputs(model, outputs)
    adapter.set_phi(rand(adapter.dim, dtype=torch.float32))
    adapter.save(path)
    x = rand(2, 3, 6, 6, dtype=torch.float32)
    loaded = load_adapter(cnn().eval(), path)
    assert repr(loaded) == repr(adapter)
    assert loaded.signature == adapter.signature
    assert torch.equal(loaded.model(x), adapter.model(x))
    loaded.model.load_state_dict(adapter.model.state_dict())


def test_one_logit_has_one_offset() -> None:
    class Binary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).squeeze(1)  # type: ignore[no-any-return]

    model = Binary().double()
    x = rand(5, 3)
    plain = model(x)
    adapter = attach_outputs(model, Outputs(scale=4))
    assert adapter.dim == 1
    adapter.set_phi(torch.tensor([-0.25]))
    torch.testing.assert_close(model(x), plain - 1, rtol=1e-12, atol=1e-12)


def test_a_linear_model_itself() -> None:
    model = nn.Linear(4, 3).double()
    x = rand(5, 4)
    plain = model(x)
    adapter = attach_outputs(model)
    assert adapter.layers == [""]
    adapter.set_phi(torch.tensor([1.0, 0, -2]))
    expected = plain + torch.tensor([1.0, 0, -2])
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(adapter.merge()(x), expected, rtol=1e-12, atol=1e-12)


def test_no_coordinate_is_an_offset_without_outputs(cnn: Callable[[], nn.Sequential]) -> None:
    adapter = attach_film(cnn(), dim=3)
    assert adapter.outputs is None
    assert torch.arange(3)[adapter.offsets].numel() == 0


class Tied(nn.Module):
    """A head that is the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.words.weight


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * nn.functional.linear(x, self.weight)


@pytest.mark.parametrize("temperature", [False, True])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_a_head_without_a_bias_gets_one(kind: str, temperature: bool, tmp_path: Path) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        head = nn.Linear(4, 3, bias=False) if kind == "linear" else nn.Conv1d(4, 3, 1, bias=False)
        return nn.Sequential(nn.Linear(4, 4), head).double()

    bare, x = model(), rand(4, 4)
    outputs = Outputs("1", scale=2.0, temperature=temperature)
    adapter = attach_outputs(bare, outputs)
    offsets = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    shown = offsets if kind == "linear" else offsets[:, None]
    factor = 1.0
    if temperature:
        offsets, factor = torch.cat([offsets, torch.tensor([0.3], dtype=torch.float64)]), math.exp(0.3)
    adapter.set_phi(offsets)
    expected = model()(x) * factor + 2 * shown
    torch.testing.assert_close(bare(x), expected)
    assert bare[1].bias is None
    adapter.save(tmp_path / "adapter.safetensors")
    torch.testing.assert_close(load_adapter(model(), tmp_path / "adapter.safetensors").model(x), expected)
    assert adapter.merged_state_dict()["1.bias"].shape == (3,)
    assert bare[1].bias is None  # of the copy alone
    torch.testing.assert_close(adapter.merge()(x), expected)
    assert bare[1].bias.requires_grad
    assert list(bare.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_removing_leaves_a_head_without_a_bias() -> None:
    model = nn.Sequential(nn.Linear(4, 3, bias=False))
    adapter = attach_outputs(model)
    adapter.set_phi(torch.ones(3))
    adapter.remove()
    assert model[0].bias is None


HEAD = {"body": nn.Linear(3, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 2)}


@pytest.mark.parametrize(
    ("make", "attach", "names"),
    [
        (Tied, attach_outputs, ("head", "words.weight")),
        (
            lambda: nn.Sequential(Doubled(3, 2, bias=False)),
            attach_outputs,
            ("'0'", "Doubled"),
        ),
        (lambda: nn.Sequential(nn.LayerNorm(3), nn.Conv1d(3, 2, 1)), attach_outputs, ()),
        (
            lambda: nn.ModuleDict(HEAD),
            lambda model: attach_outputs(model, Outputs("heads")),
            ("heads", "head"),
        ),
        (
            lambda: nn.Sequential(nn.ReLU(), nn.Linear(3, 2)),
            lambda model: attach_outputs(model, Outputs("0")),
            ("'0'",),
        ),
        (
            lambda: nn.Sequential(nn.RMSNorm(3), nn.Linear(3, 2)),
            lambda model: attach_outputs(model, Outputs("0")),
            ("'0'",),
        ),
        (
            lambda: nn.ModuleDict(HEAD),
            lambda model: attach_film(model, ["norm", "head"], dim=2, outputs=Outputs()),
            ("head", "layers"),
        ),
        (
            lambda: nn.Sequential(nn.Linear(3, 2)),
            lambda model: attach_input_bias(model, dim=2, outputs=Outputs()),
            ("'0'",),
        ),
        (
            lambda: nn.ModuleDict(HEAD),
            lambda model: attach_film(model, dim=2, outputs=True),
            ("outputs", "Outputs(...)"),
        ),
    ],
)
def test_outputs_that_can_not_be_attached(
    make: Callable[[], nn.Module], attach: Callable[[nn.Module], Adapter], names: tuple[str, ...]
) -> None:
    model = make()
    before = state_of(model)
    assert_refused(lambda: attach(model), AdapterError, *names)
    assert state_of(model) == before


def state_of(model: nn.Module) -> list[Any]:
    """What attaching changes: modules, hooks, attributes, and what is trainable."""
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    return [
        [(name, type(module), set(vars(module))) for name, module in model.named_modules()],
        [len(getattr(module, each)) for module in model.modules() for each in hooks],
        [(name, parameter.requires_grad) for name, parameter in model.named_parameters()],
        list(model.state_dict()),
    ]


@pytest.mark.parametrize("attach", [attach_film, attach_input_bias])
@pytest.mark.parametrize(
    "wrong", [{"dim": 0}, {"dim": -2}, {"dim": 4.0}, {"dim": True}, {"seed": -1}, {"seed": 1.5}, {"seed": None}]
)
def test_bad_numbers(cnn: Callable[[], nn.Sequential], attach: Callable[..., Adapter], wrong: dict[str, Any]) -> None:
    model = cnn()
    before = state_of(model)
    ((name, value),) = wrong.items()
    assert_refused(lambda: attach(model, **wrong), ValueError, name, value)
    assert state_of(model) == before


def test_no_layers(cnn: Callable[[], nn.Sequential]) -> None:
    assert_refused(lambda: attach_film(cnn(), []), AdapterError, "layers")


@pytest.mark.parametrize("attach", [attach_film, attach_input_bias])
def test_a_compiled_model_computes_with_phi(cnn: Callable[[], nn.Sequential], attach: Callable[..., Adapter]) -> None:
    model, x = cnn().eval(), rand(2, 3, 6, 6, dtype=torch.float32)
    compiled = torch.compile(model, backend="eager")
    plain = compiled(x)
    adapter = attach(compiled, dim=2)
    assert adapter.model is model
    for size in (0.5, -1.0):
        adapter.set_phi(torch.full((2,), size))
        torch.testing.assert_close(compiled(x), model(x))
        assert (compiled(x) - plain).abs().max() > 1e-3
    adapter.remove()
    torch.testing.assert_close(compiled(x), plain)


def test_an_adapter_that_does_not_fit_into_memory_changes_nothing(
    cnn: Callable[[], nn.Sequential], monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*args: Any) -> None:
        raise MemoryError

    model = cnn()
    before = state_of(model)
    monkeypatch.setattr("metricopt_ext.adapters.modulation._gaussian", out_of_memory)
    with pytest.raises(MemoryError):
        attach_film(model, dim=2)
    assert state_of(model) == before


def attach_outputs_alone(model: nn.Module, dim: int) -> Adapter:
    """Attach outputs; their number is the model's to say."""
    return attach_outputs(model)


@pytest.mark.parametrize("first", [attach_film, attach_input_bias, attach_outputs_alone])
@pytest.mark.parametrize("second", [attach_film, attach_input_bias, attach_outputs_alone])
def test_attaching_twice(
    cnn: Callable[[], nn.Sequential], first: Callable[..., Adapter], second: Callable[..., Adapter]
) -> None:
    model = cnn()
    adapter = first(model, dim=2)
    for target in (model, nn.Sequential(model)):
        with pytest.raises(AdapterError):
            second(target, dim=2)
    adapter.remove()
    second(model, dim=2)


def head(*before: nn.Module) -> nn.Module:
    """A part of a model: the given modules and a linear layer."""
    return nn.Sequential(*before, nn.Linear(4, 3))


@pytest.mark.parametrize("second", [attach_film, attach_input_bias])
@pytest.mark.parametrize(
    ("part", "layers"),
    [(lambda: head(nn.LayerNorm(4)), None), (lambda: head(nn.LayerNorm(4), nn.Dropout(0.5)), "0")],
    ids=["modulated", "pinned to evaluation mode"],
)
def test_a_part_of_an_adapted_model_takes_no_second_adapter(
    part: Callable[[], nn.Module], layers: Any, second: Callable[..., Adapter]
) -> None:
    model = nn.Sequential(nn.LayerNorm(4), part())
    bare = state_of(model)
    adapter = attach_film(model, layers, dim=2)
    before = state_of(model)
    assert_refused(lambda: second(model[1], dim=2), AdapterError)
    assert state_of(model) == before
    adapter.remove()
    assert state_of(model) == bare


@pytest.mark.parametrize("first", [0, 1])
def test_adapters_of_disjoint_parts_are_removed_in_any_order(first: int) -> None:
    """A layer that the adapter of the whole leaves alone may have its own."""
    model = nn.Sequential(nn.LayerNorm(4), head())
    bare = state_of(model)
    adapters = [attach_film(model, dim=2), attach_input_bias(model[1], dim=2)]
    adapters[first].remove()
    adapters[1 - first].remove()
    assert state_of(model) == bare


@pytest.mark.parametrize("attach", [attach_film, attach_input_bias, attach_outputs])
def test_wrapped_models(cnn: Callable[[], nn.Sequential], attach: Callable[..., Adapter], tmp_path: Path) -> None:
    def attached(model: nn.Module) -> Adapter:
        return attach(model) if attach is attach_outputs else attach(model, dim=2)

    model, other = cnn().eval(), cnn().eval()
    wrapped, x = nn.DataParallel(model), rand(2, 3, 6, 6, dtype=torch.float32)
    adapter = attached(wrapped)
    assert adapter.model is model
    assert adapter.layers == attached(other).layers
    adapter.set_phi(torch.full((adapter.dim,), 0.5))
    assert torch.equal(wrapped(x), model(x))
    assert "metricopt.phi" in nn.DataParallel(model).module.state_dict()
    adapter.save(tmp_path / "adapter.safetensors")
    loaded = load_adapter(nn.DataParallel(cnn().eval()), tmp_path / "adapter.safetensors")
    assert torch.equal(loaded.model(x), model(x))


class Sealed(nn.LayerNorm):
    """Takes no module below itself."""

    def add_module(self, name: str, module: nn.Module | None) -> None:
        raise RuntimeError("sealed")


def test_a_layer_that_takes_no_modulation_leaves_the_model_as_it_was() -> None:
    """The layer before it has its own already, that after it not yet."""
    model = nn.Sequential(nn.LayerNorm(4), Sealed(4), nn.LayerNorm(4), nn.Dropout()).train()
    before = state_of(model)
    assert_refused(lambda: attach_film(model, dim=2), RuntimeError, "sealed")
    assert state_of(model) == before


def test_a_file_for_another_kind_of_layer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "adapter.safetensors"
    attach_film(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), dim=2).save(path)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    before = state_of(model)
    assert_refused(lambda: load_adapter(model, path), AdapterError, "adapter.safetensors", "'1'", "ReLU")
    assert state_of(model) == before


def test_a_file_for_another_layer_of_logits_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "adapter.safetensors"
    attach_outputs(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))).save(path)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    before = state_of(model)
    assert_refused(lambda: load_adapter(model, path), AdapterError, "'2'")
    assert state_of(model) == before
