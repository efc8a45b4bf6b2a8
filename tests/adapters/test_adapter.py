"""The handle on an adapter: removing, merging, phi in place of the parameter, files and copies."""

import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.refusals import assert_named, assert_refused
from helpers.tensors import rand
from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film, attach_input_bias, attach_outputs, load_adapter
from metricopt_ext.adapters.signature import Outputs
from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import AdapterError


def test_remove_restores_everything(model_and_shape: tuple[nn.Module, tuple[int, ...]]) -> None:
    model, shape = model_and_shape
    model = model.train()
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
    assert_refused(lambda: adapter.set_phi(torch.ones(3)), AdapterError)


# --- Merging ---------------------------------------------------------------------------------------------------


def test_merged_models(model_and_shape: tuple[nn.Module, tuple[int, ...]]) -> None:
    model, shape = model_and_shape
    model = model.double().eval()
    keys, x = list(model.state_dict()), rand(*shape)
    adapter = attach_film(model, dim=5)
    adapter.set_phi(0.3 * rand(5))
    expected = model(x)
    adapter.merge()
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)
    assert list(model.state_dict()) == keys


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
    ("make", "layers", "name"),
    [
        (Tied, "head", "head.weight"),
        (normed, ["0", "1"], "1.weight"),
    ],
)
def test_merging_where_it_would_be_wrong(make: Callable[[], nn.Module], layers: Any, name: str) -> None:
    model = make()
    adapter = attach_film(model, layers, dim=2)
    adapter.set_phi(torch.ones(2))
    x = rand(6, 3, dtype=torch.float32)
    adapted = model(x)
    for merge in (adapter.check_merge, adapter.merge):
        with pytest.raises(AdapterError) as caught:
            merge()
        assert_named(caught, name)
    assert torch.equal(model(x), adapted)


def test_a_merged_state_dict_is_another_bare_model_s(cnn: Callable[[], nn.Sequential]) -> None:
    model = cnn().double().eval()
    adapter = attach_film(model, dim=3)
    adapter.set_phi(rand(3))
    x = rand(2, 3, 6, 6)
    adapted, before = model(x), adapter.base_state_dict()
    merged = adapter.merged_state_dict()
    assert torch.equal(model(x), adapted)
    assert all(torch.equal(value, before[key]) for key, value in adapter.base_state_dict().items())
    bare = cnn().double().eval()
    bare.load_state_dict(merged, strict=True)
    torch.testing.assert_close(bare(x), adapted)


@pytest.mark.parametrize("attach", [lambda model: attach_input_bias(model, "head", dim=5), attach_outputs])
def test_biases_merge_beside_tied_weights(attach: Callable[[nn.Module], Adapter]) -> None:
    model = Tied()
    adapter = attach(model)
    adapter.set_phi(torch.arange(5.0))
    x = rand(6, 3, dtype=torch.float32)
    adapted = model(x)
    torch.testing.assert_close(adapter.merge()(x), adapted)


# --- using ---------------------------------------------------------------------------------------------------


def test_using_puts_phi_in_place_and_back(cnn: Callable[[], nn.Sequential]) -> None:
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


def test_using_takes_the_adapter_s_own_number_of_coordinates_alone(cnn: Callable[[], nn.Sequential]) -> None:
    adapter = attach_film(cnn().eval(), dim=3)
    for wrong in (rand(4), rand(2), rand(3, 1)):  # of four, the first three would do for A and B
        with pytest.raises(AdapterError) as caught, adapter.using(wrong):
            pass
        assert_named(caught, "phi", "(3,)")
    x = rand(2, 3, 6, 6).float()
    with adapter.using(rand(3)) as model:  # float64, as `set_phi` takes it
        inside = model(x)
    adapter.set_phi(rand(3))
    assert torch.equal(adapter.model(x), inside)


@pytest.mark.parametrize("outputs", [None, Outputs("6", 2.0), Outputs("7", 2.0, True)])
def test_using_is_differentiable_and_maps_over_a_population(
    cnn: Callable[[], nn.Sequential], outputs: Outputs | None
) -> None:
    model = cnn().double()
    adapter = attach_film(model, ["1", "4"], dim=3, outputs=outputs)
    x, phis = rand(2, 3, 6, 6), rand(4, adapter.dim)

    def output(phi: Tensor) -> Tensor:
        with adapter.using(phi):
            return model(x)

    mapped = torch.func.vmap(output)(phis)
    torch.testing.assert_close(mapped, torch.stack([output(phi) for phi in phis]), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(output, (phis[0].clone().requires_grad_(True),))


# --- State dicts, files and copies ---------------------------------------------------------------------------


def test_state_dict_keys(cnn: Callable[[], nn.Sequential], tuned: Callable[..., Adapter]) -> None:
    bare = cnn()
    adapter = tuned()
    extra = [key for key in adapter.model.state_dict() if key not in bare.state_dict()]
    assert extra == ["metricopt.phi", "metricopt.signature"]
    assert list(adapter.base_state_dict()) == list(bare.state_dict())
    bare.load_state_dict(adapter.base_state_dict(), strict=True)
    missing, unexpected = bare.load_state_dict(adapter.model.state_dict(), strict=False)
    assert missing == []
    assert unexpected == ["metricopt.phi", "metricopt.signature"]


def by_pickle(model: nn.Module) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize(
    "attach",
    [
        lambda model: attach_film(model, dim=3),
        lambda model: attach_input_bias(model, dim=3),
        lambda model: attach_film(model, ["1", "7"], dim=3, outputs=Outputs("6", temperature=True)),
    ],
    ids=["film", "input_bias", "film and outputs"],
)
def test_copies_are_isolated(
    cnn: Callable[[], nn.Sequential], copied: Callable[[nn.Module], Any], attach: Callable[[nn.Module], Adapter]
) -> None:
    model = cnn().train()
    adapter = attach(model)
    ones = torch.ones(adapter.dim)
    adapter.set_phi(ones)
    x = rand(2, 3, 6, 6, dtype=torch.float32)
    at_one = model(x)
    twin = copied(model)
    theirs = Adapter(twin)
    assert torch.equal(twin(x), at_one)

    theirs.set_phi(-ones)
    at_minus_one = twin(x)
    assert torch.equal(model(x), at_one)
    assert not torch.allclose(at_minus_one, at_one)
    adapter.set_phi(0 * ones)
    assert torch.equal(twin(x), at_minus_one)
    with theirs.using(0 * ones):
        adapter.set_phi(ones)
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


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle], ids=["deepcopy", "pickle"])
def test_a_copy_has_its_own_phi_and_not_what_is_used_for_a_while(
    tuned: Callable[..., Adapter], copied: Callable[[nn.Module], Any]
) -> None:
    adapter, x = tuned(), rand(2, 3, 6, 6, dtype=torch.float32)
    expected = adapter.model(x)
    with adapter.using(2 * torch.ones(3, requires_grad=True)) as model:
        inside = model(x)
        twin = copied(model)
        assert torch.equal(model(x), inside)
    assert torch.equal(twin(x), expected)
    assert not torch.allclose(inside, expected)


def test_loading_brings_the_matrices_and_their_seed(
    cnn: Callable[[], nn.Sequential], tuned: Callable[..., Adapter], tmp_path: Path
) -> None:
    path, adapter = tmp_path / "adapter.safetensors", tuned(seed=7)
    adapter.save(path)
    mine = tuned(seed=8)
    mine.load(path)
    x = rand(2, 3, 6, 6, dtype=torch.float32)
    assert torch.equal(mine.model(x), adapter.model(x))
    mine.model.load_state_dict(adapter.model.state_dict())
    assert_refused(lambda: mine.model.load_state_dict(tuned(seed=8).model.state_dict()), RuntimeError, "seed", "8")
    mine.save(tmp_path / "again.safetensors")
    again = load_adapter(cnn().eval(), tmp_path / "again.safetensors")
    assert again.context.seed == 7
    assert torch.equal(again.model(x), adapter.model(x))


@pytest.mark.parametrize(
    ("other", "names"), [({"dim": 4}, ("dim", "3", "4")), ({"layers": "1"}, ("layers", "1", "'4'", "'7'"))]
)
def test_file_of_another_adapter_is_refused(
    tuned: Callable[..., Adapter], other: dict[str, Any], names: tuple[str, ...], tmp_path: Path
) -> None:
    tuned().save(tmp_path / "adapter.safetensors")
    mine = tuned(**other)
    assert_refused(lambda: mine.load(tmp_path / "adapter.safetensors"), AdapterError, *names)


@pytest.mark.parametrize(
    ("mine", "names"),
    [
        (None, ("outputs", "scale=2.0", "None")),
        (Outputs("6", 3.0), ("outputs", "scale=2.0", "scale=3.0")),
    ],
)
def test_file_of_other_outputs_is_refused(
    cnn: Callable[[], nn.Sequential], mine: Outputs | None, names: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "adapter.safetensors"
    attach_film(cnn(), ["1", "6"], dim=6, outputs=Outputs("7")).save(path)
    assert_refused(lambda: attach_film(cnn(), "1", dim=6, outputs=Outputs("7")).load(path), AdapterError, "layers")
    theirs = attach_film(cnn(), "1", dim=3, outputs=Outputs("6", 2.0))
    theirs.save(path)
    adapter = attach_film(cnn(), ["1", "6"] if mine is None else "1", dim=8 if mine is None else 3, outputs=mine)
    assert adapter.phi.shape == theirs.phi.shape
    assert_refused(lambda: adapter.load(path), AdapterError, *names)


def test_temperatures_do_not_merge_beside_tied_weights() -> None:
    adapter = attach_outputs(Tied(), Outputs(temperature=True))
    assert_refused(adapter.merge, AdapterError, "head.weight")


# --- Refusals ------------------------------------------------------------------------------------------------


def test_handles_need_an_adapter(cnn: Callable[[], nn.Sequential]) -> None:
    assert_refused(lambda: Adapter(cnn()), AdapterError, "Sequential")


@pytest.mark.parametrize("shape", [(2,), (4,), (1, 3), ()])
def test_phi_of_another_shape(tuned: Callable[..., Adapter], shape: tuple[int, ...]) -> None:
    adapter = tuned()
    assert_refused(lambda: adapter.set_phi(torch.ones(shape)), AdapterError, "phi", shape, "(3,)")


def test_the_handle_is_of_the_model_and_not_of_what_wraps_it(tuned: Callable[..., Adapter]) -> None:
    model = tuned().model
    for wrapped, attribute in [
        (torch.compile(model, backend="eager"), "_orig_mod"),
        (nn.DataParallel(model), "module"),
        (AveragedModel(model), "module"),
    ]:
        with pytest.raises(AdapterError) as caught:
            Adapter(wrapped)
        assert_named(caught, attribute)
        assert Adapter(getattr(wrapped, attribute)).dim == 3


# --- What is cut short -----------------------------------------------------------------------------------------


def ctrl_c(*_: Any) -> None:
    raise KeyboardInterrupt


def as_it_is(model: nn.Module) -> list[Any]:
    """Return what a change of a model could leave behind: its outputs, tensors, flags and hooks."""
    hooks = [(len(each._forward_hooks), len(each._forward_pre_hooks), each.training) for each in model.modules()]
    flags = [(name, each.requires_grad) for name, each in model.named_parameters()]
    state = {name: each.tolist() for name, each in model.state_dict().items() if isinstance(each, Tensor)}
    return [model(rand(5, 3)).tolist(), state, flags, hooks]


@pytest.mark.parametrize("change", ["remove", "merge"])
def test_a_change_that_is_cut_short_is_undone(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double().eval()
    adapter = attach_film(model, dim=3)
    adapter.set_phi(rand(3))
    before = as_it_is(model)
    monkeypatch.setattr(Adapter, "_detach", ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        getattr(adapter, change)()
    assert as_it_is(model) == before


class FullAt(TorchDispatchMode):
    """Has no memory left at the n-th copy."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= function is torch.ops.aten.copy_.default
        if self.left == 0:
            self.left = -1
            raise MemoryError
        return function(*args, **(kwargs or {}))


def test_a_start_whose_copies_fail_is_undone() -> None:
    """One of a replaced weight, a replaced buffer and phi, at each copy in turn."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double().eval()
    adapter = attach_film(model, dim=3)
    adapter.set_phi(rand(3))
    before = as_it_is(model)
    start = Start(rand(3, seed=2), {"1.running_mean": rand(4)}, {"0.bias": rand(4, seed=3)})
    for number in range(1, 4):
        with pytest.raises(MemoryError), FullAt(number):
            adapter.apply(start)
        assert as_it_is(model) == before
        assert not adapter.context.originals
    adapter.apply(start)
    assert model[0].bias.tolist() == start.parameters["0.bias"].tolist()


def test_attaching_that_is_cut_short_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double().eval()
    before = as_it_is(model)
    monkeypatch.setattr("metricopt_ext.adapters.attach.Adapter", ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        attach_film(model, dim=3)
    assert as_it_is(model) == before


def test_a_file_whose_warning_is_an_error_is_not_loaded(tmp_path: Path) -> None:
    """Of another seed and other weights: neither its matrices nor its phi stay."""

    def tuned_with(seed: int) -> Adapter:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double().eval()
        adapter = attach_film(model, dim=3, seed=seed)
        adapter.set_phi(rand(3, seed=seed))
        return adapter

    tuned_with(1).save(tmp_path / "other.safetensors")
    adapter = tuned_with(2)
    before = as_it_is(adapter.model)
    with warnings.catch_warnings(action="error"):
        assert_refused(lambda: adapter.load(tmp_path / "other.safetensors"), UserWarning, "other")
    assert as_it_is(adapter.model) == before
