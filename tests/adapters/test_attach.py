"""Attaching: which layers phi modulates, what stays as it was, and what is refused."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.architectures import Tied
from helpers.refusals import assert_refused
from helpers.tensors import rand
from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film, attach_input_bias, attach_outputs, load_adapter
from metricopt_ext.adapters.signature import Outputs
from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import AdapterError, FileFormatError


@pytest.mark.parametrize("end", [Adapter.remove, Adapter.merge])
def test_the_optimizer_that_trained_the_weights_moves_them_no_more(
    cnn: Callable[[], nn.Sequential], end: Callable[[Adapter], nn.Module]
) -> None:
    model = cnn().eval()
    trained = torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=0.1)
    model(rand(2, 3, 6, 6, dtype=torch.float32)).square().sum().backward()
    trained.step()
    adapter = attach_film(model, dim=3)
    frozen = {name: each.clone() for name, each in model.state_dict().items()}
    trained.step()
    assert all(torch.equal(each, frozen[name]) for name, each in model.state_dict().items())
    end(adapter)
    trained.step()
    assert all(torch.equal(each, frozen[name]) for name, each in model.state_dict().items())


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


def test_the_last_linear_layer_gives_the_logits() -> None:
    model = nn.ModuleDict({"first": nn.Linear(4, 4), "last": nn.Linear(4, 2), "attention": nn.MultiheadAttention(2, 1)})
    assert attach_outputs(model).layers == ["last"]  # attention's own projection is no layer


@pytest.mark.parametrize("temperature", [False, True])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_a_head_without_a_bias_gets_one(kind: str, temperature: bool) -> None:
    torch.manual_seed(0)
    head = nn.Linear(4, 3, bias=False) if kind == "linear" else nn.Conv1d(4, 3, 1, bias=False)
    model, x = nn.Sequential(nn.Linear(4, 4), head).double(), rand(4, 4)
    plain, offsets = model(x), torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    adapter = attach_outputs(model, Outputs("1", scale=2.0, temperature=temperature))
    adapter.set_phi(torch.cat([offsets, torch.full((int(temperature),), 0.3)]))
    shown = offsets if kind == "linear" else offsets[:, None]
    expected = plain * math.exp(0.3 * temperature) + 2 * shown
    torch.testing.assert_close(model(x), expected)
    assert adapter.merged_state_dict()["1.bias"].shape == (3,)
    assert head.bias is None  # only the copy's has one
    torch.testing.assert_close(adapter.merge()(x), expected)
    assert model[1].bias.requires_grad


def headed() -> nn.Module:
    return nn.ModuleDict({"body": nn.Linear(3, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 2)})


def state_of(model: nn.Module) -> list[Any]:
    """What attaching changes: modules, hooks, attributes, and what is trainable."""
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    return [
        [(name, type(module), set(vars(module))) for name, module in model.named_modules()],
        [len(getattr(module, each)) for module in model.modules() for each in hooks],
        [(name, parameter.requires_grad) for name, parameter in model.named_parameters()],
        list(model.state_dict()),
    ]


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any], type[Exception], tuple[Any, ...]]] = {
    "a tied head without a bias": (
        lambda: Tied(bias=False), attach_outputs, AdapterError, ("head", "embedding.weight")
    ),
    "no logits": (lambda: nn.Sequential(nn.LayerNorm(3), nn.Conv1d(3, 2, 1)), attach_outputs, AdapterError, ()),
    "no such layer": (
        headed, lambda model: attach_outputs(model, Outputs("heads")), AdapterError, ("heads", "head")
    ),
    "twice on the head": (
        headed,
        lambda model: attach_film(model, ["norm", "head"], dim=2, outputs=Outputs()),
        AdapterError,
        ("head", "layers"),
    ),
    "no linear layer": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.Linear(3, 4, bias=False)),
        attach_input_bias,
        AdapterError,
        ("bias", "attach_film"),
    ),
    **{
        f"{attach.__name__}, dim={dim}": (headed, partial(attach, dim=dim), ValueError, ("dim", dim))
        for attach in (attach_film, attach_input_bias)
        for dim in (0, 10**10, 1.5)
    },
    "no layers": (headed, lambda model: attach_film(model, []), AdapterError, ("layers", "norm")),
    "seed=-1": (headed, lambda model: attach_film(model, seed=-1), ValueError, ("seed", -1)),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_attached_is_refused_and_leaves_the_model_as_it_was(case: str) -> None:
    make, attach, error, names = REFUSED[case]
    model = make()
    before = state_of(model)
    assert_refused(lambda: attach(model), error, *names)
    assert state_of(model) == before


def test_wrappers_compute_with_phi(cnn: Callable[[], nn.Sequential], tmp_path: Path) -> None:
    for wrap in (nn.DataParallel, lambda model: torch.compile(model, backend="eager")):
        model, x = cnn().eval(), rand(2, 3, 6, 6, dtype=torch.float32)
        wrapped = wrap(model)
        plain = wrapped(x)
        adapter = attach_film(wrapped, dim=2)
        assert adapter.model is model
        for size in (0.5, -1.0):
            adapter.set_phi(torch.full((2,), size))
            torch.testing.assert_close(wrapped(x), model(x))
            assert (wrapped(x) - plain).abs().max() > 1e-3
            phi = torch.tensor([size, 0.3])
            for used in (adapter.using(phi), adapter.applied(Start(phi))):
                with used, torch.no_grad():
                    torch.testing.assert_close(wrapped(x), model(x))
        adapter.save(tmp_path / "adapter.safetensors")
        loaded = load_adapter(wrap(cnn().eval()), tmp_path / "adapter.safetensors")
        assert torch.equal(loaded.model(x), model(x))
        adapter.remove()
        torch.testing.assert_close(wrapped(x), plain)


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
    for target in (model[1], nn.Sequential(model)):
        assert_refused(lambda target=target: second(target, dim=2), AdapterError)
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


def test_a_file_for_another_kind_of_layer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "adapter.safetensors"
    attach_film(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), dim=2).save(path)
    for layer, error, names in ((nn.ReLU(), AdapterError, ("'1'", "ReLU")), (nn.RMSNorm(4), FileFormatError, ())):
        model = nn.Sequential(nn.Linear(3, 4), layer)
        before = state_of(model)
        assert_refused(lambda model=model: load_adapter(model, path), error, path.name, *names)
        assert state_of(model) == before
