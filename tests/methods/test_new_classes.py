"""How far to go towards a search's end on classes that the metric does not see: closed forms, and whole runs."""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from metricopt_ext import Callback, Metric, Result, Search, Start, optimize_metric
from metricopt_ext.methods.ending import Began, guarded
from metricopt_ext.methods.guard import REACH, STRENGTH, cross_gains, held_back, kept_share
from metricopt_ext.search.direct import CMAES
from metricopt_ext.search.strategy import SearchResult
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.tasks.combine import Combination, Combine, costs_on_pairs
from metricopt_ext.tasks.evaluation import Evaluation, Outcome
from metricopt_ext.tasks.ledger import Ledger
from metricopt_ext.value.gp import GPValueFunction

Make = Callable[..., Any]

C = 6
CURVATURE = torch.tensor([[2.0, 0.6], [0.6, 1.0]], dtype=torch.float64)
# Every division of the classes into two halves, each once: their mean is an expectation in closed form.
DIVISIONS = [(first, tuple(set(range(C)) - set(first))) for first in combinations(range(C), C // 2) if 0 in first]


def gradients(spread: float) -> Tensor:
    """b of each class, ``C x 2``: the class costs ``x H x / 2 - b x``."""
    drawn = torch.randn(C, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return torch.tensor([0.5, 0.4], dtype=torch.float64) + spread * (drawn - drawn.mean(0))


def searched(b: Tensor) -> SearchResult:
    """A search that knows a grid of points, and ends where the mean over the classes is least."""
    axis = torch.linspace(-1, 1, 9, dtype=torch.float64)
    points = torch.cartesian_prod(axis, axis)
    end = torch.linalg.solve(CURVATURE, b.mean(0))
    everywhere = torch.cat([points, end[None]])
    costs = (everywhere @ CURVATURE * everywhere).sum(1)[:, None] / 2 - everywhere @ b.T  # n x C

    def evaluation(of: Tensor) -> Evaluation:
        pairs = tuple((float(of[list(a)].mean()), float(of[list(b)].mean())) for a, b in DIVISIONS)
        return Evaluation(float(of.mean()), pairs=pairs)

    evaluations = tuple(evaluation(of) for of in costs)
    scale = torch.eye(2, dtype=torch.float64) / 6  # so long that the process is nearly a quadratic's
    f = GPValueFunction.conditioned(points, costs[:-1].mean(1), scale, 1e-11)
    return SearchResult(end, evaluations[-1], evaluations[:-1], points, len(points), learns=True, f=f)


def test_what_is_lost_is_takeuchis_criterion() -> None:
    """Over all divisions, the mean of O is tr(H^-1 J) / C, with J the covariance of the classes' gradients."""
    b = gradients(spread=0.1)
    share = kept_share(searched(b), torch.zeros(2, dtype=torch.float64))
    assert share is not None
    expected = float(torch.linalg.solve(CURVATURE, torch.cov(b.T)).trace()) / C
    gain = float(b.mean(0) @ torch.linalg.solve(CURVATURE, b.mean(0))) / 2
    assert share.optimism == pytest.approx(expected, rel=5e-3)  # the process is no quadratic: 1e-3
    assert share.gain == pytest.approx(gain, rel=1e-4)
    assert share.share == pytest.approx(1 - 1.5 * expected / (2 * gain), rel=1e-3)
    assert share.share < 0.999


def test_gains_of_half_the_classes_on_both_halves_have_closed_forms() -> None:
    b = gradients(spread=0.1)
    end = searched(b)
    halves = torch.tensor([each.pairs for each in end.evaluations], dtype=torch.float64)
    assert end.f is not None
    start = torch.zeros(2, dtype=torch.float64)
    own, other = cross_gains(end.f, end.points, halves[..., None], start, end.phi)
    means = torch.stack([b[list(half)].mean(0) for division in DIVISIONS for half in division])
    steps = torch.linalg.solve(CURVATURE, means.T).T
    swapped = means[torch.arange(len(means)) ^ 1]
    assert own.tolist() == pytest.approx(((means * steps).sum(1) / 2).tolist(), rel=1e-3)
    assert other.tolist() == pytest.approx(((swapped - means / 2) * steps).sum(1).tolist(), rel=1e-2)


def test_what_one_half_of_the_classes_does_not_gain_by_the_other_is_not_kept(quadratic: Make) -> None:
    """t would be above 0, as the whole gains much more than a half's end exceeds the other's by."""
    end = searched(gradients(spread=0.1))

    def opposed(point: Tensor, evaluation: Evaluation) -> Evaluation:
        tilt = 0.01 * float(point[0])  # what is good for one half is bad for the other
        return Evaluation(evaluation.cost, pairs=((tilt, -tilt),))

    evaluations = tuple(opposed(*each) for each in zip(end.points, end.evaluations, strict=True))
    moved = replace(end, evaluations=evaluations, evaluation=opposed(end.phi, end.evaluation))
    share = kept_share(moved, torch.zeros(2, dtype=torch.float64))
    assert share is not None
    assert share.crossed < 0 < share.gain
    assert 1 - STRENGTH * share.optimism / (2 * share.gain) > 0.5
    assert share.share == 0
    start = torch.zeros(2, dtype=torch.float64)
    (at,) = (at for at, point in enumerate(moved.points) if torch.equal(point, start))
    began = Began({"start": Start(start)}, {"start": moved.evaluations[at]}, "start", "start", [])
    for new, kept in ((True, "start"), (False, "search")):
        result = guarded(of_classes(quadratic(2), 0.1, new=new), began, moved, 0.95)
        assert result.chosen == kept
        assert "part" not in result.ends


@pytest.mark.parametrize("spread", [0.0, 0.1, 0.4, 0.6])
def test_the_share_follows_from_optimism_and_gain(spread: float) -> None:
    share = kept_share(searched(gradients(spread)), torch.zeros(2, dtype=torch.float64))
    assert share is not None
    assert (share.crossed > 0) == (spread < 0.5)
    expected = 1 - 1.5 * share.optimism / (2 * share.gain) if share.crossed > 0 else 0.0
    assert share.share == pytest.approx(expected, abs=1e-12)


# --- Outcomes ------------------------------------------------------------------------------------------------------


def made_of(end: SearchResult, combine: Combine, sign: int, apart: Callable[[Tensor], list[float]]) -> SearchResult:
    """The same search by a metric that is made of three outcomes, each the metric and something apart, as costs."""
    combination = Combination(combine, sign)

    def evaluation(point: Tensor, one: Evaluation) -> Evaluation:
        outcomes = {}
        for name, more in zip("abc", apart(point), strict=True):
            pairs = tuple((sign * (first + more), sign * (second + more)) for first, second in one.costs_on_pairs)
            outcomes[name] = Outcome(sign * (one.cost + more), pairs)
        value, pairs = combination.value_of(outcomes)
        return Evaluation(value, outcomes=outcomes, pairs=pairs, sign=sign)

    evaluations = tuple(map(evaluation, end.points, end.evaluations))
    assert end.f is not None
    costs = combination.costs(evaluations)
    f = GPValueFunction.conditioned(end.points, costs, end.f.transform, end.f.noise.repeat(3), combination)
    return replace(end, evaluation=evaluation(end.phi, end.evaluation), evaluations=evaluations, f=f)


def cancelling(point: Tensor) -> list[float]:
    """Terms that no mean shows."""
    return [float(point[0]), float(point[1] - point[0]), float(-point[1])]


def far_behind(point: Tensor) -> list[float]:
    """Terms by which the worst is always the first."""
    return [0.0, float(point[0]) - 50, -40.0]


@pytest.mark.parametrize(("combine", "apart"), [("mean", cancelling), ("worst", far_behind)])
@pytest.mark.parametrize("sign", [1, -1])
def test_outcomes_that_make_the_same_metric_keep_the_same_share(combine: Combine, apart: Any, sign: int) -> None:
    """A process with nearly no noise is ill-conditioned, which costs all but a few digits."""
    end, start = searched(gradients(spread=0.1)), torch.zeros(2, dtype=torch.float64)
    expected, found = kept_share(end, start), kept_share(made_of(end, combine, sign, apart), start)
    assert expected is not None
    assert found is not None
    for name in ("share", "optimism", "gain", "crossed"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=2e-3), name
    assert 0.1 < found.share < 0.999


def test_each_outcome_of_a_half_has_its_own_noise() -> None:
    """Where the first is always the worst, nothing hangs on the others', which are large."""
    end, start = searched(gradients(spread=0.1)), torch.zeros(2, dtype=torch.float64)
    tilted = made_of(end, "worst", 1, far_behind)
    assert end.f is not None
    assert tilted.f is not None
    found = []
    for each, noise in ((end, 0.1), (tilted, (0.1, 3.2, 3.2))):
        combination, evaluations = each.f.combination, each.evaluations  # type: ignore[union-attr]
        costs = (
            torch.tensor([[one.cost] for one in evaluations]) if combination is None else combination.costs(evaluations)
        )
        f = GPValueFunction.conditioned(each.points, costs, 6 * end.f.transform, noise, combination)
        halves = costs_on_pairs(evaluations, combination)
        assert halves is not None
        found.append(torch.cat(cross_gains(f, each.points, halves, start, end.phi)))
    assert found[1].tolist() == pytest.approx(found[0].tolist(), rel=1e-9)


def test_of_a_worst_each_half_is_followed_to_where_its_worst_is_least() -> None:
    """|x| is added along the first axis: each half's end is on the other one, at the least of its cost there."""
    start, b = torch.zeros(2, dtype=torch.float64), gradients(spread=0.1)
    tilted = made_of(searched(b), "worst", 1, lambda point: [float(point[0]), -float(point[0]), -40.0])
    assert tilted.f is not None
    halves = costs_on_pairs(tilted.evaluations, tilted.f.combination)
    assert halves is not None
    own, other = cross_gains(tilted.f, tilted.points, halves, start, tilted.phi)
    means = torch.stack([b[list(half)].mean(0) for division in DIVISIONS for half in division])
    steps = means[:, 1] / CURVATURE[1, 1]
    assert float((CURVATURE[0, 1] * steps - means[:, 0]).abs().max()) < 1  # no end is off the axis
    assert own.tolist() == pytest.approx((means[:, 1] * steps / 2).tolist(), rel=0.05)
    swapped = means[torch.arange(len(means)) ^ 1, 1]
    assert other.tolist() == pytest.approx(((swapped - means[:, 1] / 2) * steps).tolist(), rel=0.1)


def test_what_is_promised_is_followed_on_each_half() -> None:
    """Where halves go just as f's promise says: to the end of the reach along it, in the kernel's distances."""
    points = torch.cartesian_prod(*2 * [torch.linspace(-1, 1, 5, dtype=torch.float64)])
    slope, start = torch.tensor([[0.4, -1.0]], dtype=torch.float64), torch.tensor([0.5, 0.5], dtype=torch.float64)
    transform = torch.tensor([[0.5, 0.1], [0.0, 0.2]], dtype=torch.float64)
    f = GPValueFunction.conditioned(
        points, points @ slope.T + 0.1 * (3 * points[:, :1]).sin(), transform, 0.1, None, slope
    )
    end = torch.tensor([0.0, 1.0], dtype=torch.float64)
    halves = (points @ slope.T + torch.tensor([0.3, 0.1], dtype=torch.float64))[:, None, :, None].repeat(1, 3, 1, 1)
    own, other = cross_gains(f, points, halves, start, end)
    best = points[(points @ slope.T).argmin()]
    reach = REACH * float(((end - start) @ transform).norm())
    expected = float((start - best) @ slope[0]) + reach * float(torch.linalg.solve(transform, slope[0]).norm())
    assert own.tolist() == pytest.approx([expected] * 6, rel=1e-6)
    assert other.tolist() == pytest.approx([expected] * 6, rel=1e-6)


# --- Whole runs ----------------------------------------------------------------------------------------------------


def of_classes(task: Any, spread: float, *, new: bool = True, classes: int = 12, queries: int | None = None) -> Any:
    """Let a task's metric be the mean over classes whose goals differ, with 8 divisions into halves."""
    rng = torch.Generator().manual_seed(3)
    goals = task.goal + spread * torch.randn(classes, task.dim, generator=rng, dtype=torch.float64)
    orders = [torch.randperm(classes, generator=rng) for _ in range(8)]

    def metric(model: Any) -> Any:
        costs = (model.metricopt.phi.detach() - goals).square().sum(1)
        pairs = [(float(costs[order[::2]].mean()), float(costs[order[1::2]].mean())) for order in orders]
        return float(costs.mean()), pairs

    judged = Metric(metric, maximize=False, bounds=None, name="distance", ledger=Ledger(queries), new_classes=new)
    return replace(task, metric=judged)


def run_of(task: Any, queries: int = 30, **options: Any) -> Result:
    return optimize_metric(task, queries=queries, callback=Callback(), **options)


def test_a_part_of_the_way_is_kept_known_and_paid_for_within_the_budget(quadratic: Make) -> None:
    """The metric is asked 30 times in all, the last time at what is kept."""
    asked: list[Tensor] = []
    task = of_classes(quadratic(), 1.5, queries=30)
    task.metric.callbacks.append(lambda query: asked.append(query.item))
    result = run_of(task)
    share = result.kept_share
    assert share is not None
    assert result.chosen == "part"
    assert 0 < share.share < 1
    assert share.evaluated
    assert share.share == pytest.approx(1 - 1.5 * share.optimism / (2 * share.gain))
    start, end, kept = (result.ends[name] for name in ("start", "search", "part"))
    assert torch.allclose(kept, start + share.share * (end - start))
    assert torch.equal(task.adapter.phi.detach(), kept)
    assert torch.equal(result.path[-1], kept)
    assert (len(asked), task.metric.ledger.spent, sum(result.queries.values())) == (30, 30, 30)
    assert torch.equal(asked[-1], kept)
    assert result.after == task.metric.judge(task.adapter.model).cost
    assert result.before > result.after > result.best


def test_a_search_without_f_keeps_its_end(quadratic: Make) -> None:
    task = of_classes(quadratic(), 1.5)
    result = run_of(task, strategy=CMAES())
    assert result.chosen == "search"
    assert result.kept_share is None
    assert sum(result.queries.values()) == 30
    assert held_back(CMAES(), task.metric) == 0
    assert held_back(GuidedTrustRegion(), task.metric) == 1


def test_a_failure_at_what_would_be_kept_keeps_the_start(quadratic: Make) -> None:
    task = of_classes(quadratic(), 1.5)
    with Search(task, 30) as search:
        while trials := search.ask(3):
            for trial in trials:
                with trial.applied() as model:
                    if trial.id < 29:
                        search.tell(trial.id, *task.metric.function(model))
                    else:
                        search.fail(trial.id, "the scorer crashed")
        result = search.result()
    assert result.chosen == "start"
    assert result.kept_share is not None
