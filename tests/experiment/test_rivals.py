"""Searches of other packages, where these are installed: they keep to the contract, in a box, and get closer."""

import sys
from collections.abc import Callable
from statistics import mean
from typing import Any, ClassVar

import pytest
import torch

from helpers.refusals import assert_refused
from metricopt_ext.experiment.rivals import BoTorch, Nevergrad, Optuna
from metricopt_ext.methods.evaluating import searched
from metricopt_ext.search.strategy import SearchStrategy
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
