"""BoTorch's noisy expected improvement: its box, its budget, and what it reaches."""

import sys
from collections.abc import Callable
from dataclasses import replace
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.refusals import assert_refused
from metricopt_ext.search.noisy_ei import NoisyEI
from metricopt_ext.tasks.metric import Metric

SMALL = NoisyEI(batch=2, initial=6, samples=16, restarts=1, raw=8)


@pytest.fixture
def botorch() -> None:
    pytest.importorskip("botorch", reason="needs the extra compare")


@pytest.mark.slow
@pytest.mark.usefixtures("botorch")
def test_it_keeps_to_the_protocol(keeps_to_protocol: Callable[..., None]) -> None:
    keeps_to_protocol(SMALL, 8)


@pytest.mark.usefixtures("botorch")
def test_points_stay_in_the_box_and_a_longer_run_goes_on(quadratic: Callable[..., Any]) -> None:
    task, search = quadratic(dim=5), replace(SMALL, half_width=0.2)
    start, points = task.starts(0.3, 0, [0])[0], {}
    for queries in (9, 12):
        result = search(task, start, queries, seed=2)
        points[queries] = result.points
        assert float((result.points - start).abs().max()) <= 0.2 + 1e-12
    assert torch.equal(points[12][:9], points[9])


@pytest.mark.usefixtures("botorch")
def test_a_metric_that_never_varies_gets_points_of_the_whole_box(quadratic: Callable[..., Any]) -> None:
    task = quadratic(dim=2)
    seen: list[Tensor] = []

    def flat(model: Any) -> float:
        seen.append(model.metricopt.phi.detach().clone())
        return 1.0

    SMALL(task.judged_by(Metric(flat, maximize=False, bounds=None)), task.origin(), 12)
    assert len({tuple(point.tolist()) for point in seen}) == 12


@pytest.mark.usefixtures("botorch")
@pytest.mark.outcome
def test_a_quadratic_gets_better(quadratic: Callable[..., Any]) -> None:
    left = []
    for seed in range(2):
        task = quadratic(dim=3)
        left.append(
            replace(SMALL, half_width=2.0)(task, task.origin(), 20, seed=seed).cost / task.true_cost(task.origin())
        )
    assert mean(left) < 0.1  # .0023 over six seeds, at most .0059


@pytest.mark.parametrize(
    ("name", "value"),
    [("half_width", 0.0), ("batch", 0), ("initial", 1), ("samples", 0), ("restarts", 0), ("raw", 3)],
)
def test_impossible_settings_are_refused(name: str, value: float) -> None:
    assert_refused(lambda: replace(NoisyEI(), **{name: value}), ValueError, name, value)


def test_a_missing_package_says_what_to_install(quadratic: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botorch", None)
    task = quadratic()
    assert_refused(lambda: NoisyEI()(task, task.origin(), 50), ImportError, "pip install 'botorch")
    assert task.queries == 0
