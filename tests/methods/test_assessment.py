"""What the first points of a search say: on noise, on cases known in closed form, and where nothing can be told."""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import permutations
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch

from metricopt_ext import Metric
from metricopt_ext.methods.assessment import (
    ORDERS,
    Evaluated,
    assessed,
    by_chance,
    queries_to_search,
    smallest_gain,
)
from metricopt_ext.methods.guard import judge
from metricopt_ext.tasks.constraints import Constraint, Limits
from metricopt_ext.tasks.evaluation import Evaluation, Outcome
from metricopt_ext.tasks.split_half import TELLING

DIM, Z = 24, NormalDist().inv_cdf(0.93)
STARTS: list[tuple[str, str]] = [
    ("start", "trained"),
    ("loss_finetune", "phi"),
    ("batchnorm", "batchnorm"),
    ("prior", "offsets"),
    ("prior_twice", "offsets"),
]
WITH_STARTS: list[tuple[str, str]] = [*STARTS, *[("", "phi")] * 7]
ALONE: list[tuple[str, str]] = [("start", "trained"), *[("", "phi")] * 11]


def metric_of(**options: Any) -> Metric:
    return Metric(lambda model: 0.0, maximize=True, name="score", **options)


def halved(value: float, apart: float) -> Evaluation:
    """An evaluation by a value to be maximised, whose halves are so far above and below."""
    return Evaluation(1 - value, pairs=((1 - value - apart, 1 - value + apart),))


def case(
    values: Sequence[float], kinds: Sequence[tuple[str, str]] = WITH_STARTS, apart: float = 0.01
) -> list[Evaluated]:
    """Points of these values; how far apart their halves are goes up and down."""
    return [
        Evaluated(*kind, halved(value, apart * (1, -1, 0.5, -0.5)[i % 4]))
        for i, (value, kind) in enumerate(zip(values, kinds, strict=True))
    ]


# --- Noise ----------------------------------------------------------------------------------------------------------


def noisy(
    rng: random.Random, kinds: Sequence[tuple[str, str]], draw: Callable[[random.Random], float]
) -> list[Evaluated]:
    halves = [(draw(rng), draw(rng)) for _ in kinds]
    return [
        Evaluated(*kind, Evaluation(sum(half) / 2, pairs=(half,))) for kind, half in zip(kinds, halves, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [WITH_STARTS, ALONE], ids=["starts", "alone"])
@pytest.mark.parametrize(
    "draw",
    [lambda rng: 0.5 + 0.07 * rng.gauss(0, 1), lambda rng: sum(rng.random() < 0.5 for _ in range(40)) / 40],
    ids=["normal", "shares of 40"],
)
def test_noise_is_left_alone(kinds: Any, draw: Any) -> None:
    """In the long run about 4% are not (800 other runs of each)."""
    rng = random.Random(1)
    said = Counter(assessed(metric_of(), noisy(rng, kinds, draw), DIM).recommendation for _ in range(300))
    assert said["do not"] >= 285


@pytest.mark.parametrize("repeats", [2, 3])
def test_so_is_noise_that_repeats_show(repeats: int) -> None:
    rng = random.Random(2)

    def run() -> str:
        told = []
        for kind in WITH_STARTS:
            calls = torch.tensor([0.5 + 0.05 * rng.gauss(0, 1) for _ in range(repeats)], dtype=torch.float64)
            noise = float(calls.std()) / math.sqrt(repeats)
            told.append(Evaluated(*kind, Evaluation(float(calls.mean()), noise=noise)))
        return assessed(metric_of(repeats=repeats), told, DIM).recommendation

    assert Counter(run() for _ in range(300))["do not"] >= 285


def test_halves_are_compared_in_all_orders() -> None:
    """Against all 720 orders; drawn ones differ from them by three deviations of their share at most."""
    rng = random.Random(3)
    for _ in range(8):
        halves = np.array([(rng.gauss(0, 1), rng.gauss(0, 1)) for _ in range(6)])
        halves[:, 1] += rng.choice([0, 1]) * halves[:, 0]
        first, second = (halves - halves.mean(0)).T
        found = [float(first @ second[list(order)]) for order in permutations(range(6))]
        exact = np.mean([each >= found[0] - 1e-12 for each in found])
        allowed = 3 * math.sqrt(exact * (1 - exact) / ORDERS) + 2 / ORDERS
        assert by_chance(torch.from_numpy(halves)[:, None]) == pytest.approx(exact, abs=allowed)


# --- What can't be told ---------------------------------------------------------------------------------------------


def test_without_halves_or_repeats_nobody_can_tell() -> None:
    told = [Evaluated(*kind, Evaluation(0.5 - 0.01 * i)) for i, kind in enumerate(WITH_STARTS)]
    found = assessed(metric_of(), told, DIM)
    assert (found.recommendation, found.smallest) == ("undecided", None)
    assert math.isnan(found.reliability)
    assert found.best_start == "prior_twice"
    assert found.headroom == pytest.approx(0.04)
    assert found.found == pytest.approx(0.11)


@pytest.mark.parametrize("pairs", [(), ((0.4, 0.6),)])
def test_a_constant_metric_tells_nothing(pairs: Any) -> None:
    found = assessed(metric_of(), [Evaluated(*kind, Evaluation(0.5, pairs=pairs)) for kind in ALONE], DIM)
    assert (found.recommendation, found.found, found.best_start, found.headroom) == ("undecided", 0, "", 0)


def test_a_few_points_tell_nothing() -> None:
    told = [Evaluated(*kind, Evaluation(0.5 - 0.01 * i, pairs=((0.4, 0.6),))) for i, kind in enumerate(ALONE)]
    for few in (told[: TELLING - 1], told[:1] * (TELLING - 1)):
        found = assessed(metric_of(), few, DIM)
        assert (found.recommendation, "too few" in found.reason) == ("undecided", True)


def test_what_failed_does_not_count() -> None:
    told = case([0.5, 0.5, 0.5, 0.9, 0.8, *np.linspace(0.3, 0.6, 7)])
    lost = Evaluated("", "phi", Evaluation(1.0, failed=True))
    assert assessed(metric_of(), [*told, lost], DIM) == assessed(metric_of(), told, DIM)


# --- What is recommended --------------------------------------------------------------------------------------------

SPREAD = (0.32, 0.41, 0.35, 0.44, 0.38, 0.47, 0.3)


@pytest.mark.parametrize(
    ("starts", "said"),
    [
        ((0.5, 0.5, 0.49, 0.6, 0.7), "a threshold or offsets"),
        ((0.5, 0.5, 0.7, 0.6, 0.6), "BatchNorm on the deployment's inputs"),
        ((0.5, 0.7, 0.5, 0.5, 0.5), "search"),  # from the end of a loss finetune
        ((0.5, 0.5, 0.5, 0.4, 0.3), "do not"),
    ],
)
def test_the_start_that_holds_the_gain_is_named(starts: Any, said: str) -> None:
    found = assessed(metric_of(), case([*starts, *SPREAD]), DIM)
    assert found.recommendation == said
    assert found.before == pytest.approx(0.5)
    assert found.headroom == pytest.approx(max(starts[1:]) - 0.5)
    assert found.reliability > 0.9
    assert (found.search_queries is None) == (said != "search")


def test_a_point_beyond_the_start_asks_for_a_search() -> None:
    found = assessed(metric_of(), case([0.5, 0.5, 0.49, 0.6, 0.7, *SPREAD[:-1], 0.8]), DIM)
    assert (found.recommendation, found.search_queries) == ("search", 40)
    assert "search with 40 queries" in str(found)


def test_a_gain_that_the_guard_refuses_asks_for_data() -> None:
    """The factor is the one at which the guard would keep it: chance shrinks with the root of the data."""
    told = case([0.5, 0.5, 0.5, 0.4, 0.3, *SPREAD[:-1], 0.56], apart=0.03)
    found = assessed(metric_of(), told, DIM)
    points = [each.evaluation for each in told]
    verdict = judge(told[0].evaluation, told[-1].evaluation, points)
    assert not verdict.accepted
    assert found.recommendation == "more validation data"
    assert found.data is not None
    assert verdict.needed is not None
    assert found.data > 1
    assert verdict.optimism > 0
    assert verdict.gain - verdict.optimism / found.data == pytest.approx(verdict.needed / math.sqrt(found.data))


def test_a_gain_that_the_luckiest_of_the_points_has_too_asks_for_nothing() -> None:
    """It is 1.5 deviations of chance; of twelve draws of chance alone the largest is expected to be 1.63."""
    told = case([0.5, 0.5, 0.5, 0.4, 0.3, *SPREAD[:-1], 0.55], apart=0.03)
    verdict = judge(told[0].evaluation, told[-1].evaluation, [each.evaluation for each in told])
    assert 1.5 < verdict.gain / (verdict.chance or 0) < 1.6292  # which tables have for twelve
    assert not verdict.accepted
    assert assessed(metric_of(), told, DIM).recommendation == "do not"


@pytest.mark.parametrize("apart", [0.002, 0.02, 0.2])
def test_the_smallest_gain_is_the_guards(apart: float) -> None:
    told = case([0.5, 0.5, 0.48, 0.6, 0.7, *SPREAD], apart=apart)
    points, trained = [each.evaluation for each in told], told[0].evaluation

    def short(gain: float) -> bool:
        needed = judge(trained, trained._replace(value=trained.cost - gain), points).needed
        assert needed is not None
        return gain < needed

    smallest = smallest_gain(trained, points)
    assert short(0.999 * smallest)
    assert not short(1.001 * smallest)
    gains = torch.tensor([(trained.halves[0] - a) - (trained.halves[1] - b) for a, b in (p.halves for p in points)])  # type: ignore[index, misc]
    size = sum(abs(trained.cost - each.cost) for each in points)
    assert smallest >= Z**2 * float(gains.square().sum()) / 4 / size * 0.999  # chance by size alone
    assert smallest_gain(trained, points, 0.5) == 0


def test_what_violates_a_constraint_is_no_gain() -> None:
    limits = Limits((Constraint("b", True, False, 0.5),), (0.5,))

    def with_b(values: Sequence[float]) -> list[Evaluated]:
        told = case([0.5, 0.5, 0.49, 0.6, 0.7, *SPREAD[:-1], 0.8])
        return [
            each._replace(evaluation=each.evaluation._replace(outcomes={"b": Outcome(b)}))
            for each, b in zip(told, values, strict=True)
        ]

    free = assessed(metric_of(), with_b([1.0] * 12), DIM, limits=limits)
    assert (free.recommendation, free.best_start) == ("search", "prior_twice")
    assert free.found == pytest.approx(0.3)
    within = assessed(metric_of(), with_b([1.0] * 4 + [0.0] + [1.0] * 6 + [0.0]), DIM, limits=limits)
    assert (within.recommendation, within.best_start) == ("a threshold or offsets", "prior")
    assert within.found == pytest.approx(0.1)
    assert within.smallest == free.smallest
    nowhere = assessed(metric_of(), with_b([1.0] + [0.0] * 11), DIM, limits=limits)
    assert (nowhere.recommendation, nowhere.best_start, nowhere.found) == ("do not", "", 0.0)


def test_a_search_has_a_query_for_each_slope_and_more_where_part_is_chance() -> None:
    assert queries_to_search(12, 16, 1.0) == 30
    assert queries_to_search(12, 16, 0.5) == 50
    assert queries_to_search(12, 2000, 1.0) == queries_to_search(12, 16, 0.0) == 300
    assert queries_to_search(400, 16, 1.0) == 400
    assert queries_to_search(8, 2, 1.0, least=13) == 20
    assert queries_to_search(8, 2, 1.0, least=310) == 310
