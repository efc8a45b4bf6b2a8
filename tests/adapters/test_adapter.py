"""The handle on an adapter: what can't be merged, what a file is refused for, and copies that fail."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.architectures import Tied
from helpers.refusals import assert_refused
from helpers.tensors import rand
from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film, attach_outputs, load_adapter
from metricopt_ext.adapters.signature import Outputs
from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import AdapterError

CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Adapter], str]] = {
    "tied": (Tied, lambda model: attach_film(model, "head", dim=2), "head.weight"),
    "tied, by a temperature": (Tied, lambda model: attach_outputs(model, Outputs(temperature=True)), "head.weight"),
    "computed": (
        lambda: nn.Sequential(nn.Embedding(7, 3), nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))),
        lambda model: attach_film(model, "1", dim=2),
        "1.weight",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_merging_where_it_would_be_wrong(case: str) -> None:
    make, attach, name = CASES[case]
    model, x = make(), torch.arange(7)
    adapter = attach(model)
    adapter.set_phi(torch.ones(adapter.dim))
    adapted = model(x)
    for merge in (adapter.check_merge, adapter.merge):
        assert_refused(merge, AdapterError, name)
    assert torch.equal(model(x), adapted)


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
    assert again.signature == adapter.signature
    assert torch.equal(again.model(x), adapter.model(x))


@pytest.mark.parametrize(
    ("mine", "names"),
    [({"dim": 4}, ("dim", "8", "9")), ({"layers": "1"}, ("layers",)), ({"outputs": Outputs("6")}, ("outputs",))],
)
def test_file_of_another_adapter_is_refused(
    cnn: Callable[[], nn.Sequential], mine: dict[str, Any], names: tuple[str, ...], tmp_path: Path
) -> None:
    path, given = tmp_path / "adapter.safetensors", {"dim": 3, "layers": ["1", "4"], "outputs": Outputs("6", 2.0)}
    attach_film(cnn(), **given).save(path)
    assert_refused(lambda: attach_film(cnn(), **{**given, **mine}).load(path), AdapterError, *names)


def test_the_handle_is_of_the_model_and_not_of_what_wraps_it(tuned: Callable[..., Adapter]) -> None:
    model = tuned().model
    for wrapped, attribute in [
        (torch.compile(model, backend="eager"), "_orig_mod"),
        (nn.DataParallel(model), "module"),
        (AveragedModel(model), "module"),
    ]:
        assert_refused(lambda wrapped=wrapped: Adapter(wrapped), AdapterError, attribute)
        assert Adapter(getattr(wrapped, attribute)).dim == 3


# --- What is cut short -----------------------------------------------------------------------------------------


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double().eval()


def as_it_is(model: nn.Module) -> list[Any]:
    state = {name: each.tolist() for name, each in model.state_dict().items() if isinstance(each, Tensor)}
    return [model(rand(5, 3)).tolist(), state]


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
    model = small()
    adapter = attach_film(model, dim=3)
    adapter.set_phi(rand(3))
    before = as_it_is(model)
    start = Start(rand(3, seed=2), {"1.running_mean": rand(4)}, {"0.bias": rand(4, seed=3)})
    for number in range(1, 4):
        with pytest.raises(MemoryError), FullAt(number):
            adapter.apply(start)
        assert as_it_is(model) == before
        assert not adapter.as_start().replaced
    adapter.apply(start)
    assert model[0].bias.tolist() == start.parameters["0.bias"].tolist()


def test_a_file_whose_warning_is_an_error_is_not_loaded(tmp_path: Path) -> None:
    """Of another seed and other weights: neither its matrices nor its phi stay."""

    def tuned_with(seed: int) -> Adapter:
        torch.manual_seed(seed)
        adapter = attach_film(small(), dim=3, seed=seed)
        adapter.set_phi(rand(3, seed=seed))
        return adapter

    tuned_with(1).save(tmp_path / "other.safetensors")
    adapter = tuned_with(2)
    before = as_it_is(adapter.model)
    with warnings.catch_warnings(action="error"):
        assert_refused(lambda: adapter.load(tmp_path / "other.safetensors"), UserWarning, "other")
    assert as_it_is(adapter.model) == before
