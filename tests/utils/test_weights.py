"""A model's weights are put back as they were, and copied only where they changed."""

import ctypes
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


def through_data(parameter: Tensor) -> None:
    parameter.data[0] += 1


def through_a_pointer(parameter: Tensor) -> None:
    """Write as an extension may."""
    (ctypes.c_float * parameter.numel()).from_address(parameter.data_ptr())[0] = 7.0


without_a_trace = pytest.mark.parametrize("change", [through_data, through_a_pointer])


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


@pytest.mark.parametrize("shape", [(512, 512), (64, 32, 3, 3), (8191,)])
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.float8_e5m2])
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
