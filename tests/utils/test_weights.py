"""A change of a model's weights is noticed, with and without a trace."""

import ctypes
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from metricopt_ext.utils.weights import ENTRIES, Watched, checksums, some_entries, where_and_how_often


def test_nan_is_equal_to_itself() -> None:
    model: Any = nn.BatchNorm1d(2)
    with torch.no_grad():
        model.weight.fill_(float("nan"))
        model.running_mean.fill_(float("nan"))
    kept = Watched(model)
    assert kept.changed(model) == []
    model.running_mean.zero_()
    assert kept.changed(model) == ["running_mean"]


def through_data(parameter: Tensor) -> None:
    parameter.data[0] += 1


def through_a_pointer(parameter: Tensor) -> None:
    """Write as an extension may."""
    (ctypes.c_float * parameter.numel()).from_address(parameter.data_ptr())[0] = 7.0


@pytest.mark.parametrize("change", [through_data, through_a_pointer])
def test_changes_without_a_trace_are_noticed(change: Callable[[Tensor], None]) -> None:
    model: Any = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    for name, changed in (("1.weight", model[1].weight), ("0.bias", model[0].bias)):
        kept, state = Watched(model), where_and_how_often(changed)
        change(changed)
        assert where_and_how_often(changed) == state
        assert kept.changed(model) == [name]


@pytest.mark.parametrize("shape", [(512, 512), (64, 32, 3, 3), (8191,)])
def test_entries_lie_in_all_rows_and_columns(shape: tuple[int, ...]) -> None:
    where = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    entries = some_entries(where, ENTRIES)
    assert entries is not None
    assert ENTRIES / 4 <= len(entries) <= ENTRIES
    flat = entries.view(torch.float64).long()
    assert flat.diff().unique().numel() == 1  # evenly spaced, to the end
    assert flat[-1] >= math.prod(shape) - 2 * flat[1]
    for axis, index in enumerate(torch.unravel_index(flat, shape)):
        assert len(index.unique()) == min(shape[axis], len(flat))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.float8_e5m2])
def test_entries_of_any_type(dtype: torch.dtype) -> None:
    model = nn.ParameterDict({"a": torch.ones(5).to(dtype), "b": torch.ones(5)})
    kept, sums = Watched(model), checksums(model)
    model["a"].data[3] = 0
    assert kept.changed(model) == ["a"]
    assert [name for name, each in checksums(model).items() if each != sums[name]] == ["a"]


def test_an_entry_that_is_not_looked_at_shows_when_all_are() -> None:
    model: Any = nn.Linear(100, 100)
    kept, sums = Watched(model), checksums(model)
    model.weight.data.view(-1)[1] += 1
    assert kept.changed(model) == []
    assert [name for name, each in checksums(model).items() if each != sums[name]] == ["weight"]
