"""Searches of other packages, where these are installed: they keep to the contract, in a box, and get closer."""

import sys
from collections.abc import Callable
from statistics import mean
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from helpers.refusals import assert_refused
from metricopt_ext.adapters.start import Start
from metricopt_ext.methods.evaluating import searched
from metricopt_ext.search.box import Box, sobol
from metricopt_ext.search.direct import CMAES
from metricopt_ext.search.ngopt import NGOpt
from metricopt_ext.search.noisy_ei import NoisyEI
from metricopt_ext.search.optuna_sampler import OptunaSampler
from metricopt_ext.search.strategy import Answer, Answers, DirectSearch, SearchStrategy
from metricopt_ext.tasks.evaluation import Evaluation
from testers.strategy import StrategyTester


class RivalTester(StrategyTester):
    package: ClassVar[str]
    queries = 16

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def installed(cls) -> None:
        pytest.importorskip(cls.package, reason="needs the extra compare")


class TestNGOpt(RivalTester):
    package = "nevergrad"

    def strategy(self) -> Any:
        return NGOpt()


class TestTPE(RivalTester):
    package = "optuna"

    def strategy(self) -> Any:
        return OptunaSampler("tpe")


@pytest.mark.slow
class TestOptunasProcess(RivalTester):
    package = "optuna"

    def strategy(self) -> Any:
        return OptunaSampler("gp")


@pytest.mark.slow
class TestNoisyEI(RivalTester):
    package = "botorch"

    def strategy(self) -> Any:
        return NoisyEI(batch=2, initial=6, samples=16, restarts=1, raw=8)


RIVALS = {"cma": CMAES(), "nevergrad": NGOpt(), "optuna": OptunaSampler(), "botorch": NoisyEI()}


@pytest.mark.parametrize("package", RIVALS)
def test_a_missing_package_says_what_to_install(
    quadratic: Callable[..., Any], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    task = quadratic()
    assert_refused(lambda: searched(task, RIVALS[package], task.origin(), 50), ImportError, "pip install", package)
    assert task.queries == 0


@pytest.mark.outcome
@pytest.mark.parametrize(
    ("package", "search", "queries", "left"),
    [
        ("nevergrad", NGOpt(0.3), 150, 0.1),  # its model of the metric, a quadratic, is exact: 2e-18
        ("optuna", OptunaSampler("tpe", half_width=2.0), 80, 0.1),  # .0047 over six seeds, at most .0114
        ("optuna", OptunaSampler("gp", half_width=2.0), 20, 0.05),  # .0001, at most .0004
        ("botorch", NoisyEI(batch=2, initial=6, samples=16, restarts=1, raw=8, half_width=2.0), 20, 0.1),  # .0023
    ],
)
def test_a_quadratic_gets_better(
    quadratic: Callable[..., Any], package: str, search: SearchStrategy, queries: int, left: float
) -> None:
    pytest.importorskip(package)
    task = quadratic(dim=3)
    found = [searched(task, search, task.origin(), queries, seed=seed).cost for seed in range(2)]
    assert mean(found) < left * task.true_cost(task.origin())


def test_points_stay_in_the_box_and_a_longer_run_goes_on(quadratic: Callable[..., Any]) -> None:
    pytest.importorskip("optuna")
    task, search = quadratic(dim=5), OptunaSampler("tpe", half_width=0.2)
    start = task.starts(0.3, 0, [0])[0]
    short, long = (searched(task, search, start, queries, seed=2).points for queries in (12, 16))
    assert float((long - start).abs().max()) <= 0.2 + 1e-12
    assert torch.equal(long[:12], short)


def told(box: Box, unit: Tensor, answers: Callable[[list[Start]], list[Answer]]) -> Any:
    asking = box.proposed(unit)
    starts = next(asking)
    with pytest.raises(StopIteration) as stopped:
        asking.send(Answers(answers(starts)))
    return torch.stack([each.phi for each in starts]), *stopped.value.value


def test_the_unit_box_is_the_start_plus_or_minus_half_a_width() -> None:
    """What rounding to single precision makes of a point is not told; a point in its place is, and none given up."""
    begun = DirectSearch(Start(torch.tensor([1.0, -2.0])), lambda: 9, lambda search: iter(()))
    box = Box(begun, 0.5)
    unit = torch.tensor([[0.5, 0.5], [0.0, 1.0], [0.3, 0.7]], dtype=torch.float64)
    points, same, costs = told(box, unit, lambda asked: [Answer(p, Evaluation(float(i))) for i, p in enumerate(asked)])
    torch.testing.assert_close(points, torch.tensor([[1.0, -2.0], [0.5, -1.5], [0.8, -1.8]]))
    assert torch.equal(same, unit)
    assert costs.tolist() == [0, 1, 2]
    other = Start(torch.tensor([1.25, -2.25]))
    _, found, costs = told(
        box,
        unit,
        lambda asked: [Answer(other, Evaluation(5.0)), Answer(asked[1], None), Answer(asked[2], Evaluation(7.0))],
    )
    torch.testing.assert_close(found, torch.tensor([[0.75, 0.25], [0.3, 0.7]], dtype=torch.float64))
    assert costs.tolist() == [5, 7]
    assert torch.equal(sobol(3, 8, 5), sobol(3, 8, 5))
    assert not torch.equal(sobol(3, 8, 5), sobol(3, 8, 6))
