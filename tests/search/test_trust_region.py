"""The guided search on quadratics: what it asks, where it ends, and that neither depends on how long it goes on."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor

from helpers.asked import batches_of, ends
from helpers.refusals import assert_refused
from helpers.tensors import rand
from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import BudgetError
from metricopt_ext.experiment.baselines import searched
from metricopt_ext.search import trust_region
from metricopt_ext.search.descent import FIRST_STEP, STEPS, descend
from metricopt_ext.search.probe import probe
from metricopt_ext.search.strategy import SearchResult
from metricopt_ext.search.trust_region import (
    FIRST_RADIUS,
    SCALES,
    WIDEST,
    GuidedTrustRegion,
)
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.value.gp import EXPONENTS, LENGTHS, GPLearner, GPValueFunction, Hyperparameters

SEARCH = GuidedTrustRegion()


def run(task: Any, start: Tensor, queries: int, *, seed: int = 0) -> SearchResult:
    return searched(task, SEARCH, start, queries, seed=seed)


def rugged(task: Any, depth: float = 2.0) -> Any:
    """Add to the metric what no smooth f can follow, so that the hyper-parameters keep changing."""

    def metric(model: Any) -> float:
        return task.distance(model) + depth * math.sin(1e4 * float(model.metricopt.phi.sum()))

    task = replace(task, metric=Metric(metric, maximize=False, bounds=None, ledger=task.metric.ledger))
    return task


def judged(task: Any, cost: Callable[[Tensor], float]) -> Any:
    def metric(model: Any) -> float:
        task.problem.queries += 1
        return cost(model.metricopt.phi.detach())

    task = replace(task, metric=Metric(metric, maximize=False, bounds=None, name="other"))
    return task


def bounded(task: Any, cost: Callable[[Tensor], float]) -> Any:
    other = judged(task, cost)
    return replace(other, metric=Metric(other.metric.function, maximize=False, bounds=(0, 1), name="other"))


def assert_same(a: SearchResult, b: SearchResult) -> None:
    for name in ("cost", "queries", "evaluation", "evaluations", "widened"):
        assert getattr(a, name) == getattr(b, name), name
    for name in ("phi", "points", "predicted"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert (a.f is None) == (b.f is None)
    if a.f is not None and b.f is not None:
        assert a.f.quality == b.f.quality
        assert all(torch.equal(value, b.f.state_dict()[key]) for key, value in a.f.state_dict().items())


# --- What it costs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "design"), [(1, 4), (4, 4), (8, 4), (13, 6), (24, 6), (500, 6)])
def test_the_least_budget_has_a_design_a_proposal_and_an_end(
    quadratic: Callable[..., Any], dim: int, design: int
) -> None:
    assert SEARCH.design_size(dim) == design
    least = SEARCH.least_queries(dim)
    assert least == design + 3
    task = quadratic(dim)
    assert_refused(lambda: run(task, task.origin(), least - 1), BudgetError, "queries", least - 1, dim, least)
    assert task.queries == 0
    end = run(task, task.origin(), least)
    assert task.queries == least
    assert len(end.predicted) == 1


def test_the_quality_so_far_is_the_rank_correlation_of_what_was_predicted(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    begun = SEARCH.begin(task, Start(task.origin()), lambda: 16)

    def judge(start: Start) -> Evaluation:
        assert begun.quality() is None or len(begun.points) > SEARCH.design_size(4)
        return Evaluation(task.true_cost(start.phi))

    batches_of(begun.batches(), judge)
    predicted = begun.end().predicted
    assert len(predicted) > 4
    quality = begun.quality()
    assert quality is not None
    assert quality.spearman == pytest.approx(spearmanr(*predicted.T).statistic)


# --- One search has the ends of all ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_checkpoints_are_the_ends_of_separate_runs_bit_for_bit(quadratic: Callable[..., Any], seed: int) -> None:
    """Ends just after the number of points has grown by a quarter would choose hyper-parameters anew."""
    checkpoints = [13, 14, 48, 60, 90]
    task = rugged(quadratic(8))
    whole = list(ends(SEARCH, task, task.origin(), checkpoints, seed=seed))
    assert task.queries == 90 + 4
    for queries, end in zip(checkpoints, whole, strict=True):
        alone = run(rugged(quadratic(8)), task.origin(), queries, seed=seed)
        assert end.queries == queries
        assert_same(end, alone)
        assert torch.equal(end.points, whole[-1].points[: queries - 1])


def test_known_points_count_but_are_not_asked_again(quadratic: Callable[..., Any]) -> None:
    plain, task = quadratic(), quadratic()
    start, other = task.origin(), rand(4, seed=3)
    known = [(other, plain.evaluate(other, "before")), (start, plain.evaluate(start, "before"))]
    (end,) = ends(SEARCH, task, start, [30], known=known)
    assert task.queries == 28
    assert (end.queries, len(end.points)) == (30, 29)
    assert torch.equal(end.points[:2], torch.stack([other, start]))
    assert list(end.evaluations[:2]) == [evaluation for _, evaluation in known]
    assert_same(next(iter(ends(SEARCH, quadratic(), start, [30], known=known[1:]))), run(quadratic(), start, 30))


# --- The design --------------------------------------------------------------------------------------------------


def test_the_design_is_pairs_of_three_scales_around_the_start_of_the_probed_shape(
    quadratic: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust_region, "DESIGN", 24)
    task, start = quadratic(64), rand(64, seed=2)
    end, seen = run(task, start, 27, seed=4), probe(quadratic(64), start, 4)
    offsets = end.points[1:25] - start
    torch.testing.assert_close(offsets[:12], -offsets[12:], rtol=0, atol=1e-12)
    normal = offsets[:12] @ torch.linalg.inv(seen.scale * seen.spectrum.root(1.0)).T
    for pair, scale in enumerate(SCALES):  # chi-squared of 256: three standard errors are 0.27
        assert 0.73 < float(normal[pair :: len(SCALES)].square().mean()) / scale**2 < 1.27
    assert end.widened == 1


def test_the_design_is_around_the_best_that_is_known(quadratic: Callable[..., Any]) -> None:
    plain, task = quadratic(16), quadratic(16)
    start, better = task.origin(), 0.5 * plain.problem.goal
    known = [(each, plain.evaluate(each, "before")) for each in (start, better)]
    assert known[1][1].cost < known[0][1].cost
    (end,) = ends(SEARCH, task, start, [20], known=known)
    torch.testing.assert_close(end.points[2:5] + end.points[5:8], 2 * better.expand(3, -1), rtol=0, atol=1e-12)


def test_a_flat_metric_widens_the_design_and_ends_at_the_start(quadratic: Callable[..., Any]) -> None:
    task = judged(quadratic(), lambda phi: 0.25)
    start = rand(4, seed=2)
    end = run(task, start, 80, seed=1)
    assert end.f is None
    assert (end.widened, end.cost, end.evaluation) == (WIDEST, 0.25, Evaluation(0.25))
    assert torch.equal(end.phi, start)
    assert task.queries == end.queries == task.metric.ledger.spent == 79  # there is no end to ask for
    assert end.predicted.shape == (0, 2)
    assert end.gain_over(start) == 0
    lengths = (end.points[1:] - start).norm(dim=1)
    scale = probe(quadratic(), start, 1).scale
    assert 0.3 < float(lengths[1] / lengths[0]) * 2 < 3  # the first design alone has two scales
    for part, wider in zip(lengths[4:].split(4), (2, 4, 8, 16, 32, 64, 64), strict=False):
        assert 0.3 < float(part.square().mean().sqrt()) / (wider * scale * 2) < 3


def steep(goal: Tensor, width: float, value: float = 0.8) -> Callable[[Tensor], float]:
    """A cost in [0, 1] that is low within a distance of a goal alone."""
    return lambda phi: 1 - value * math.exp(-float((phi - goal).square().sum()) / (2 * width**2))


@pytest.mark.parametrize("times", [4, 16])
def test_a_scale_that_is_too_wide_is_mended(quadratic: Callable[..., Any], times: int) -> None:
    """At the full scale all is lost; the design is narrowed until its smallest pair loses little, and not further."""
    task = quadratic(16)
    typical = 4 * probe(task, task.origin(), 0).scale
    width = typical / times
    end = run(bounded(task, steep(task.origin(), width)), task.origin(), 40)
    assert end.widened <= 1 / 4
    assert 0.1 < end.widened * typical / width < 4
    smallest = [at for at in range(1, 40 - 1) if float(end.points[at].norm()) < width / 2]
    assert smallest
    assert end.f is not None
    learner = GPLearner(end.widened * typical / 4, probe(quadratic(16), task.origin(), 0).spectrum)
    grid = (Hyperparameters(*each, (end.f.noise.item(),)) for each in itertools.product(EXPONENTS, LENGTHS))
    assert any(torch.allclose(end.f.transform, learner.transform(each), rtol=1e-12, atol=0) for each in grid)


def test_the_mean_loss_of_the_smallest_pair_narrows_the_design(quadratic: Callable[..., Any]) -> None:
    """One side loses less than is far, the other more: it is the curvature that counts, not the slope."""
    task, side = quadratic(16), rand(16, seed=6)
    lost = bounded(task, lambda phi: 0.5 + (0.2 * float(phi @ side > 0) + 0.005 if phi.any() else 0))
    assert run(lost, task.origin(), 20).widened < 1


def test_a_right_scale_is_left_alone(quadratic: Callable[..., Any]) -> None:
    """The smallest pair loses less than FAR: the metric falls off within four times the typical distance."""
    task = quadratic(16)
    width = 4 * 4 * probe(task, task.origin(), 0).scale
    assert run(bounded(task, steep(task.origin(), width)), task.origin(), 20).widened == 1


def test_chance_does_not_narrow_the_design(quadratic: Callable[..., Any]) -> None:
    """The same losses, but the halves differ by as much: they may all be chance."""
    task = quadratic(16)
    cost = steep(task.origin(), 4 * probe(task, task.origin(), 0).scale / 3)

    def end(apart: float) -> SearchResult:
        def halves(model: Any) -> tuple[float, tuple[float, float]]:
            phi = model.metricopt.phi.detach()
            value, more = cost(phi), apart * math.sin(1e3 * float(phi.sum()))
            return value, (value + more, value - more)

        metric = Metric(halves, maximize=False, bounds=(-1, 2), name="steep")
        return run(replace(quadratic(16), metric=metric), task.origin(), 12)

    assert end(1e-6).widened < 1
    assert end(1.0).widened == 1


@pytest.mark.parametrize(("along", "scale"), [(0.25, 1 / 4), (1.0, 1.0), (None, 1 / 4)])
def test_the_first_radius_is_that_of_the_pair_that_holds_the_best(
    quadratic: Callable[..., Any], along: float | None, scale: float
) -> None:
    """The goal is at the small pair's own point, at the large one's, or at the start, so that none gains."""
    task = quadratic(16)
    design = run(quadratic(16), task.origin(), 9).points[1:7]
    goal = task.origin() if along is None else design[{0.25: 2, 1.0: 0}[along]]
    far = judged(task, lambda phi: -1e3 * float((phi - goal).norm() < 1e-9) - float(phi @ rand(16, seed=5)) * 1e-3)
    end = run(far, task.origin(), 7 + 4 + 1)
    typical = 4 * probe(quadratic(16), task.origin(), 0).scale
    moved = (end.points[7:11] - goal).norm(dim=1)
    assert float(moved.max()) <= min(1.0, max(0.2, FIRST_RADIUS * scale)) * typical * (1 + 1e-9)


def test_the_first_of_a_batch_minimises_f_itself(
    quadratic: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If posterior samples deviate nowhere, all points of a batch do: they agree, but for where their descent began."""
    task, deviations = quadratic(), GPValueFunction.deviations
    bold = run(quadratic(), task.origin(), 5 + 4 + 1).points[5:9]

    def without(self: GPValueFunction, count: int, rng: torch.Generator) -> Callable[[Tensor], Tensor]:
        drawn = deviations(self, count, rng)
        return lambda phi: 0 * drawn(phi)

    monkeypatch.setattr(GPValueFunction, "deviations", without)
    end = run(task, task.origin(), 5 + 4 + 1)
    batch, scale = end.points[5:9], probe(quadratic(), task.origin(), 0).scale
    assert torch.equal(bold[0], batch[0])  # tau is 0 there
    assert float((bold - bold[0]).norm(dim=1).max()) > 3 * float((batch - batch[0]).norm(dim=1).max())
    assert float((batch - batch[0]).norm(dim=1).max()) < 0.2 * scale


# --- The end -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0.0, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_end_is_no_worse_than_the_best_by_f(quadratic: Callable[..., Any], seed: int, depth: float) -> None:
    task = rugged(quadratic(), depth)
    end = run(task, task.origin(), 50, seed=seed)
    assert end.f is not None
    best = int(end.f.mean(end.points).argmin())
    assert end.cost <= end.evaluations[best].cost + end.f.noise_std(end.phi)
    assert end.cost == end.evaluation.cost == task.evaluate(end.phi, "check").cost
    order = end.f.mean(end.points).argsort()
    mean_of_best = end.points[order[:6]].mean(0)  # an eighth of 49
    assert any(torch.equal(end.phi, each) for each in (mean_of_best, end.points[best]))


@pytest.mark.parametrize("seed", range(3))
def test_the_end_is_no_worse_than_the_best_seen_but_for_what_halves_show_to_be_chance(
    quadratic: Callable[..., Any], seed: int
) -> None:
    """The halves differ by 2e-3 at most, so chance is at most that; f's noise, all misfit, is far more."""
    task = rugged(quadratic())
    value = task.metric.function

    def halves(model: Any) -> tuple[float, tuple[float, float]]:
        found, apart = value(model), 1e-3 * math.sin(1e3 * float(model.metricopt.phi.sum()))
        return found, (found + apart, found - apart)

    told = replace(task, metric=Metric(halves, maximize=False, bounds=None))
    end = run(told, task.origin(), 30, seed=seed)
    assert end.f is not None
    assert end.f.noise_std(end.phi) > 0.02
    assert end.cost <= min(each.cost for each in end.evaluations) + 2e-3


def test_f_comes_with_its_domain_quality_and_adapter(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    end = run(task, task.origin(), 50)
    assert end.f is not None
    assert end.f.quality is not None
    torch.testing.assert_close(end.f.centre.double(), end.phi, rtol=1e-6, atol=1e-6)
    assert float(end.f.radius) >= float(end.phi.norm()) * (1 - 1e-6)
    assert end.f.signature == task.adapter.signature
    assert end.f.quality.points == len(end.predicted) == 49 - 5
    assert end.predicted[:, 1].tolist() == [each.cost for each in end.evaluations[5:]]
    error = (end.predicted[:, 0] - end.predicted[:, 1]).abs()
    assert end.f.quality.mae == pytest.approx(float(error.mean()), rel=1e-12)
    costs = torch.tensor([each.cost for each in end.evaluations], dtype=torch.float64)
    so_far = [float(costs[: 5 + 4 * (at // 4)].min()) for at in range(44)]
    incumbent = (costs[5:] - torch.tensor(so_far, dtype=torch.float64)).abs().mean()
    assert end.f.quality.incumbent_mae == pytest.approx(float(incumbent), rel=1e-12)


# --- Descent in a ball ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [True, False])
def test_descent_ends_at_the_minimum_of_a_bowl(inside: bool) -> None:
    """In the ball, or where the ball is closest to it; steps decay to 0 from a length of FIRST_STEP."""
    centre = torch.zeros(3, dtype=torch.float64)
    goal = torch.tensor([0.3, -0.2, 0.1] if inside else [3.0, -2.0, 1.0], dtype=torch.float64)
    ends, _ = descend(lambda phi: (phi - goal).square().sum(1), 0.1 * rand(5, 3), centre, 1.0)
    expected = goal if inside else goal / goal.norm()
    assert float((ends - expected).norm(dim=1).max()) < 2 * FIRST_STEP / STEPS
