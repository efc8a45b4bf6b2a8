"""A model's weights are put back as they were, and copied only where they changed."""

import ctypes
import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from metricopt_ext.utils import weights
from metricopt_ext.utils.weights import (
    ENTRIES,
    KeptWeights,
    held_weights,
    kept_weights,
    put_back_different,
    same_bits,
    where_and_how_often,
)


def test_only_changed_parameters_are_copied_again() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    kept = KeptWeights()
    kept.update(model)
    first = {name: each.data_ptr() for name, each in kept.contents().items()}
    with torch.no_grad():
        model[1].bias.add_(1)
    kept.update(model)
    second = {name: each.data_ptr() for name, each in kept.contents().items()}
    assert {name for name in first if first[name] != second[name]} == {"1.bias"}
    assert kept.restore(model) == []


def test_nan_is_equal_to_itself() -> None:
    model: Any = nn.BatchNorm1d(2)
    with torch.no_grad():
        model.weight.fill_(float("nan"))
        model.running_mean.fill_(float("nan"))
    kept = KeptWeights()
    kept.update(model)
    assert kept.restore(model) == []
    model.running_mean.zero_()
    assert kept.restore(model) == ["running_mean"]
    assert model.running_mean.isnan().all()


def test_a_model_that_is_gone_leaves_no_copy() -> None:
    model = nn.Linear(2, 2)
    gc.collect()  # models of other tests
    before = len(weights._KEPT)
    kept_weights(model)
    assert len(weights._KEPT) == before + 1
    del model
    gc.collect()
    assert len(weights._KEPT) == before


def through_data(parameter: Tensor) -> None:
    parameter.data[0] += 1


def through_numpy(parameter: Tensor) -> None:
    parameter.detach().numpy()[0] = 7.0


def through_its_storage(parameter: Tensor) -> None:
    parameter.untyped_storage().fill_(3)


def through_a_pointer(parameter: Tensor) -> None:
    """Write as an extension may."""
    (ctypes.c_float * parameter.numel()).from_address(parameter.data_ptr())[0] = 7.0


def to_nan(parameter: Tensor) -> None:
    parameter.data.fill_(math.nan)


without_a_trace = pytest.mark.parametrize(
    "change", [through_data, through_numpy, through_its_storage, through_a_pointer, to_nan]
)


@without_a_trace
def test_changes_without_a_trace_are_put_back(change: Callable[[Tensor], None]) -> None:
    model: Any = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    kept = KeptWeights()
    kept.update(model)
    for changed in (model[1].weight, model[0].bias):
        state = where_and_how_often(changed)
        change(changed)
        assert where_and_how_often(changed) == state
        assert kept.restore(model) == []
        assert kept.unnoticed(model, 1.0) == [next(name for name, each in model.named_parameters() if each is changed)]
        assert all(same_bits(each, before[name]) for name, each in model.named_parameters())
        assert kept.unnoticed(model, 1.0) == []


@pytest.mark.parametrize("held", [False, True])
def test_what_changed_between_queries_is_kept_unless_the_model_is_held(held: bool) -> None:
    model: Any = nn.Linear(3, 2)
    kept = KeptWeights()
    kept.update(model)
    kept.held = held
    model.bias.data.fill_(5.0)
    kept.update(model)
    assert kept.unnoticed(model, 1.0) == (["bias"] if held else [])
    assert model.bias.eq(5.0).all() == (not held)


@pytest.mark.parametrize("shape", [(512, 512), (4096, 1024), (64, 32, 3, 3), (5001,), (8191,), (1000, 2048)])
def test_entries_lie_in_all_rows_and_columns(shape: tuple[int, ...]) -> None:
    where = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    entries = weights.some_entries(where, ENTRIES)
    assert entries is not None
    assert ENTRIES / 4 <= len(entries) <= ENTRIES
    flat = entries.view(torch.float64).long()
    assert flat.diff().unique().numel() == 1  # evenly spaced, to the end
    assert flat[-1] >= math.prod(shape) - 2 * flat[1]
    for axis, index in enumerate(torch.unravel_index(flat, shape)):
        assert len(index.unique()) == min(shape[axis], len(flat))


def test_all_entries_of_a_small_tensor_are_looked_at() -> None:
    for tensor in (torch.randn(()), torch.randn(4096), torch.randn(8, 3, 5, 5).to(memory_format=torch.channels_last)):
        entries = weights.some_entries(tensor, ENTRIES)
        assert entries is not None
        assert sorted(entries.view(torch.float32).tolist()) == sorted(tensor.flatten().tolist())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0),
        torch.zeros(4, 4)[:, :3],
        torch.zeros(4, 1).expand(4, 3),
        torch.eye(3).to_sparse(),
        torch.zeros(3, device="meta"),
    ],
    ids=["empty", "gaps", "expanded", "sparse", "meta"],
)
def test_tensors_without_entries_of_their_own(tensor: Tensor) -> None:
    assert weights.some_entries(tensor, ENTRIES) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e5m2])
def test_entries_of_any_type(dtype: torch.dtype) -> None:
    model = nn.ParameterDict({"a": torch.ones(5).to(dtype), "b": torch.ones(5)})
    kept = KeptWeights()
    kept.update(model)
    model["a"].data[3] = 0
    assert kept.unnoticed(model, 1.0) == ["a"]
    assert same_bits(model["a"], torch.ones(5).to(dtype))


def test_an_entry_that_is_not_looked_at_shows_when_all_are() -> None:
    model: Any = nn.Linear(100, 100)
    with held_weights(model) as contents:
        kept = kept_weights(model)
        model.weight.data.view(-1)[1] += 1  # the entries are every third, from 0 on
        assert kept.restore(model) == kept.unnoticed(model, 1.0) == []
        changed = model.weight.detach().clone()
        assert put_back_different(model, contents) == ["weight"]
        assert not torch.equal(model.weight, changed)
        assert put_back_different(model, contents) == []
    model.weight.data.copy_(changed)  # by the user, between two runs
    with held_weights(model) as contents:
        assert torch.equal(contents["weight"], changed)


def test_fewer_entries_are_compared_where_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(100, 100)
    times = iter([0.0, 0.009, 1.0, 1.011, 2.0, 2.0005, 3.0, 3.002])
    kept = KeptWeights()
    kept.update(model)
    monkeypatch.setattr(weights.time, "perf_counter", lambda: next(times))
    found = []
    for query in (1.0, 1.0, 0.001, 0.001):  # allowed are 10 ms and 1 ms
        assert kept.unnoticed(model, query) == []
        found.append(kept._most)
    assert found == [4096, 2048, 2048, 1024]
    monkeypatch.undo()
    model.weight.data.add_(1)
    assert kept.unnoticed(model, 1.0) == ["weight"]


def test_tensors_made_under_inference_mode_are_put_back() -> None:
    with torch.inference_mode():
        model = nn.Linear(3, 2)
        before = model.weight.clone()
    kept = KeptWeights()
    kept.update(model)
    with torch.inference_mode():
        model.weight.zero_()
    assert kept.unnoticed(model, 1.0) == ["weight"]
    assert torch.equal(model.weight, before)
