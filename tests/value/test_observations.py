"""Observations: the labelled points of trajectories, and where f is going to be used."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helpers.refusals import assert_named
from metricopt_ext.adapters.signature import Signature
from metricopt_ext.errors import ValueFunctionError
from metricopt_ext.tasks.trajectories import Trajectory
from metricopt_ext.value.interpolation import GaussianProcessLabels
from metricopt_ext.value.observations import Observations


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rounds", [1, 3])
def test_observations(
    diagonal: Callable[[Tensor], Tensor], trajectories: Callable[..., list[Trajectory]], rounds: int, dtype: torch.dtype
) -> None:
    items = trajectories(diagonal, n=6, rounds=rounds, dtype=dtype)
    data = Observations.of(iter(items))
    assert data.phi.dtype == torch.float32
    assert data.cost.dtype == torch.float64
    used, at = data.where_used(), 0
    for number, item in enumerate(items):
        for step, cost in zip(item.observed.tolist(), item.cost.tolist(), strict=True):
            assert torch.equal(data.phi[at], item.phi[step].float())
            assert float(data.cost[at]) == pytest.approx(cost, rel=1e-6)
            assert (int(data.trajectory[at]), int(data.round[at])) == (number, item.round)
            assert float(data.progress[at]) == pytest.approx(step / 20)
            assert bool(used[at]) == (step >= 10 and (rounds == 1 or item.round > 0))
            at += 1
    assert len(data.phi) == len(data.cost) == len(used) == at


def test_points_used_on_policy_are_late_and_not_of_the_first_round(
    diagonal: Callable[[Tensor], Tensor], trajectories: Callable[..., list[Trajectory]]
) -> None:
    first, second = trajectories(diagonal, n=2, rounds=2)
    data = Observations.of([first, second, first])  # in no order of rounds
    late = data.progress >= 0.5
    assert 0 < data.where_used().sum() < late.sum()
    assert torch.equal(data.where_used(), late & (data.trajectory == 1))
    assert data.sigma.tolist() == [1.0] * 15
    assert data.observed.all()


def test_trajectories_of_different_adapters_are_not_mixed(
    diagonal: Callable[[Tensor], Tensor], trajectories: Callable[..., list[Trajectory]]
) -> None:
    signature = Signature("film", ("a",), (4,), 0, 6, "normal/1", None)
    items = [replace(trajectory, signature=signature) for trajectory in trajectories(diagonal, n=3)]
    assert Observations.of(items).signature == signature
    assert Observations.of(trajectories(diagonal, n=3)).signature is None
    items[2] = replace(items[2], signature=None)  # unknown
    assert Observations.of(items).signature == signature
    items[1] = replace(items[1], signature=replace(signature, seed=1))
    for label in (Observations.of, GaussianProcessLabels()):
        with pytest.raises(ValueFunctionError) as caught:
            label(items)
        assert_named(caught, "trajectories", "2")
