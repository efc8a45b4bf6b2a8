"""Searches of other packages, where these are installed: they keep to the contract, in a box, and get closer."""

import sys
from collections.abc import Callable
from dataclasses import replace
from statistics import mean
from typing import Any, ClassVar

import pytest
import torch

from helpers.refusals import assert_refused
from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.baselines import searched
from metricopt_ext.experiment.rivals import BoTorch, BoTorchComposite, Nevergrad, Optuna
from metricopt_ext.search.strategy import SearchStrategy
from metricopt_ext.tasks.metric import Metric
from testers.strategy import StrategyTester


class RivalTester(StrategyTester):
    package: ClassVar[str]
    queries = 16

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def installed(cls) -> None:
        pytest.importorskip(cls.package, reason="needs the extra compare")


class TestNevergrad(RivalTester):
    package = "nevergrad"

    def strategy(self) -> Any:
        return Nevergrad()


class TestTPE(RivalTester):
    package, grows, ends = "optuna", True, 0

    def strategy(self) -> Any:
        return Optuna()


@pytest.mark.slow
class TestOptunasProcess(RivalTester):
    package, grows, ends = "optuna", True, 0

    def strategy(self) -> Any:
        return Optuna(name="GPSampler")


@pytest.mark.slow
class TestBoTorch(RivalTester):
    package, grows, ends = "botorch", True, 0

    def strategy(self) -> Any:
        return BoTorch(batch=2, initial=6, samples=16, restarts=1, raw=8)


RIVALS = {"nevergrad": Nevergrad(), "optuna": Optuna(), "botorch": BoTorch()}


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
        ("nevergrad", Nevergrad(0.3), 150, 0.1),  # its model of the metric, a quadratic, is exact: 2e-18
        ("optuna", Optuna(2.0), 80, 0.1),  # .0047 over six seeds, at most .0114
        ("optuna", Optuna(2.0, "GPSampler"), 20, 0.05),  # .0001, at most .0004
        ("botorch", BoTorch(2.0, batch=2, initial=6, samples=16, restarts=1, raw=8), 20, 0.1),  # .0023
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
    task, search = quadratic(dim=5), Optuna(0.2)
    start = task.starts(0.3, 0, [0])[0]
    short, long = (searched(task, search, start, queries, seed=2).points for queries in (12, 16))
    assert float((long - start).abs().max()) <= 0.2 + 1e-12
    assert torch.equal(long[:12], short)


QUICK: dict[str, Any] = {"batch": 2, "initial": 6, "samples": 16, "restarts": 1, "raw": 8}


def made_of_outcomes(task: Any, parts: int, combine: Any = "worst") -> Any:
    """The squared distance in so many parts of phi."""

    def told(model: Any) -> dict[str, float]:
        apart = (model.metricopt.phi.detach() - task.goal).square()
        return {f"part {at}": float(apart[at::parts].sum()) for at in range(parts)}

    return replace(task, metric=Metric(told, maximize=False, bounds=None, name="distance", combine=combine))


def test_a_composite_needs_a_metric_that_is_made_of_outcomes(quadratic: Callable[..., Any]) -> None:
    pytest.importorskip("botorch")
    task = quadratic()
    search = BoTorchComposite(2.0, **QUICK)
    assert_refused(lambda: searched(task, search, task.origin(), 20), ConfigError, "distance", "combine='worst'")
    assert task.queries == 0


@pytest.mark.slow
def test_of_one_outcome_a_composite_is_the_search_of_its_value(quadratic: Callable[..., Any]) -> None:
    pytest.importorskip("botorch")
    task = quadratic(dim=3)
    made = made_of_outcomes(task, 1)
    found, expected = (
        searched(made, search(2.0, **QUICK), task.origin(), 12, seed=1).points for search in (BoTorchComposite, BoTorch)
    )
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.outcome
def test_a_composite_knows_the_worst_of_several(quadratic: Callable[..., Any]) -> None:
    """.0003 of the start's value is left over three seeds; of the search of the value alone .17."""
    pytest.importorskip("botorch")
    made = made_of_outcomes(quadratic(dim=4), 4)
    found = searched(made, BoTorchComposite(2.0, **QUICK), made.origin(), 20, seed=0).cost
    assert found < 0.02 * made.evaluate(made.origin(), "start").cost
