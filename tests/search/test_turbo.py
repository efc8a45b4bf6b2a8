"""TuRBO: its trust region's rules, its box, and what it reaches beside its authors' own code."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor

from metricopt_ext.search.turbo import LENGTH, LONGEST, SHORTEST, Region, TuRBO
from metricopt_ext.tasks.metric import Metric


@pytest.fixture
def botorch() -> None:
    pytest.importorskip("botorch", reason="needs the extra compare")


def after(region: Region, *improved: bool) -> Region:
    for each in improved:
        region = region.after(each)
    return region


def test_the_region_grows_after_three_successes_and_shrinks_after_its_patience() -> None:
    region = Region(patience=4)
    assert after(region, True, True).length == LENGTH == 0.8
    assert after(region, True, True, True) == Region(4, 1.6)
    assert after(region, *[True] * 6).length == LONGEST == 1.6  # no longer
    assert after(region, True, True, False, True, True).length == 0.8  # not in a row
    assert after(region, False, False, False).length == 0.8
    assert after(region, False, False, False, False) == Region(4, 0.4)
    assert after(region, False, False, False, True, False).length == 0.8
    assert after(region, *[False] * 4 * 7).length < SHORTEST == 2.0**-7


@pytest.mark.usefixtures("botorch")
def test_it_keeps_to_the_protocol(keeps_to_protocol: Callable[..., None]) -> None:
    keeps_to_protocol(TuRBO(batch=4, initial=6, candidates=50, iterations=5), 21)


@pytest.mark.usefixtures("botorch")
def test_points_stay_in_the_box_and_a_longer_run_goes_on(quadratic: Callable[..., Any]) -> None:
    task, search = quadratic(dim=5), TuRBO(0.2, batch=4, initial=6, candidates=50, iterations=5)
    start, points = task.starts(0.3, 0, [0])[0], {}
    for queries in (18, 31):
        seen: list[Tensor] = []
        noting = task.judged_by(Metric(lambda model, seen=seen: _note(task, model, seen), maximize=False, bounds=None))
        search(noting, start, queries, seed=2)
        points[queries] = torch.stack(seen)
        assert float((points[queries] - start).abs().max()) <= 0.2 + 1e-12
    assert torch.equal(points[31][:18], points[18])


def _note(task: Any, model: Any, seen: list[Tensor]) -> float:
    seen.append(model.metricopt.phi.detach().clone())
    return task.true_cost(seen[-1])


@pytest.mark.usefixtures("botorch")
def test_a_metric_that_never_improves_restarts_with_new_points(quadratic: Callable[..., Any]) -> None:
    """One batch without improvement halves the side; after seven the region is given up for ``initial`` new points."""
    task, seen = quadratic(dim=2), []
    flat = task.judged_by(Metric(lambda model: _note(task, model, seen) * 0, maximize=False, bounds=None))
    TuRBO(batch=2, initial=3, candidates=20, iterations=2)(flat, task.origin(), 3 + 7 * 2 + 3 + 2)
    distance = torch.stack(seen).abs().amax(1)
    assert distance[0] == 0
    assert float(distance[15:17].max()) < 0.6 * 2 * 0.8 / 2**6  # the last batch, around the first point: flat, so best
    assert float(distance[17:20].max()) > 0.05  # points of the whole box
    assert len({tuple(point.tolist()) for point in seen[1:3] + seen[17:20]}) == 5


@pytest.mark.usefixtures("botorch")
@pytest.mark.outcome
def test_a_quadratic_gets_better(quadratic: Callable[..., Any]) -> None:
    left = []
    for seed in range(3):
        task = quadratic(dim=5)
        left.append(TuRBO(2.0)(task, task.origin(), 60, seed=seed).cost / task.true_cost(task.origin()))
    assert mean(left) < 0.3  # 0.012 ± 0.001


def levy(x: Tensor) -> float:
    """Levy's function of ten numbers in [-5, 10], with its minimum of 0 at (1, ..., 1)."""
    w = 1 + (x - 1) / 4
    middle = (w[1:-1] - 1) ** 2 * (1 + 10 * torch.sin(math.pi * w[1:-1] + 1) ** 2)
    last = (w[-1] - 1) ** 2 * (1 + torch.sin(2 * math.pi * w[-1]) ** 2)
    return float(torch.sin(math.pi * w[0]) ** 2 + middle.sum() + last)


@pytest.mark.usefixtures("botorch")
@pytest.mark.slow
@pytest.mark.outcome
def test_levy_is_lowered_as_far_as_by_the_authors_code(quadratic: Callable[..., Any]) -> None:
    """Their published example, 20 initial points and batches of 10, has 5.759 after 200 evaluations.

    It is the one run printed in examples/Turbo1.ipynb of github.com/uber-research/TuRBO; a figure over several runs is
    not given there.
    """
    reached = []
    for seed in range(5):
        task = quadratic(dim=10)
        task = task.judged_by(Metric(lambda model: levy(model.metricopt.phi), maximize=False, bounds=None))
        start = torch.full((10,), 2.5, dtype=torch.float64)
        reached.append(TuRBO(7.5, batch=10, initial=20)(task, start, 200, seed=seed).cost)
    assert mean(reached) < 5.759  # 2.0 ± 0.9


@pytest.mark.parametrize(
    ("name", "value"), [("half_width", 0.0), ("batch", 0), ("initial", 1), ("candidates", 7), ("iterations", 0)]
)
def test_impossible_settings_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        replace(TuRBO(), **{name: value})


def test_a_missing_package_says_what_to_install(quadratic: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botorch", None)
    task = quadratic()
    with pytest.raises(ImportError, match=r"pip install 'metricopt-ext\[compare\]'"):
        TuRBO()(task, task.origin(), 50)
    assert task.queries == 0
