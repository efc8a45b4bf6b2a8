"""Halves of a metric against metrics whose chance part is known."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from metricopt_ext.tasks.evaluation import Evaluation, Pairs
from metricopt_ext.tasks.split_half import (
    chance_of_gain,
    correlation_of_halves,
    evaluations_where_used,
    fault_of_halves,
    optimism_of_gain,
    repeats_agree,
    seen_on_half,
)
from metricopt_ext.tasks.trajectories import Trajectory


def trajectory(round: int, observed: list[int], halves: list[list[float]] | None, steps: int = 10) -> Trajectory:
    pairs: list[Pairs] = [()] * len(observed) if halves is None else [((a, b),) for a, b in halves]
    told = tuple(Evaluation(0.0, pairs=each) for each in pairs)
    return Trajectory(round, 0, torch.zeros(steps + 1, 2), torch.zeros(steps), torch.tensor(observed), told)


def test_chance_is_the_standard_error_of_an_accuracys_gain() -> None:
    """Models that differ from the start on independent examples: the textbook standard error, from halves alone."""
    rng = np.random.default_rng(1)
    n, models, changed = 400, 4000, 0.2
    start = np.zeros(n)
    wrong = (rng.random((models, n)) < changed) * rng.choice([-1.0, 1.0], size=(models, n))  # gains cancel on average
    halves = np.stack([wrong[:, :200].mean(1), wrong[:, 200:].mean(1)], 1).tolist()
    elsewhere = [Evaluation(sum(pair) / 2, pairs=((pair[0], pair[1]),)) for pair in halves]
    estimated = chance_of_gain(Evaluation(start.mean(), pairs=((0.0, 0.0),)), elsewhere)
    assert estimated == pytest.approx(math.sqrt(changed / n), rel=0.05)


def test_chance_does_not_count_what_both_halves_gain_and_is_unknown_without_halves() -> None:
    elsewhere = [Evaluation(0.2, pairs=((0.1, 0.3),)), Evaluation(0.3, pairs=((0.2, 0.4),))]
    assert chance_of_gain(Evaluation(0.6, pairs=((0.5, 0.7),)), elsewhere) == pytest.approx(0, abs=1e-15)
    assert chance_of_gain(Evaluation(0.6, pairs=((0.6, 0.6),)), elsewhere) == pytest.approx(0.1)
    for start, points in ((Evaluation(0.6), elsewhere), (Evaluation(0.6, pairs=((0.5, 0.7),)), [Evaluation(0.2)])):
        assert chance_of_gain(start, points) == 0


def test_chance_is_the_root_mean_square_over_all_divisions_of_the_data() -> None:
    start = Evaluation(0.6, pairs=((0.6, 0.6), (0.6, 0.6)))
    elsewhere = [Evaluation(0.2, pairs=((0.1, 0.3), (0.2, 0.2))), Evaluation(0.4, pairs=((0.1, 0.7), (0.3, 0.5)))]
    assert chance_of_gain(start, elsewhere) == pytest.approx(math.sqrt((0.2**2 + 0.6**2 + 0.2**2) / 4) / 2)


def told(value: Any, first: Any, second: Any) -> list[Evaluation]:
    shape = np.broadcast_shapes(*(np.shape(each) for each in (value, first, second)))
    columns = (np.broadcast_to(each, shape).tolist() for each in (value, first, second))
    return [Evaluation(cost, pairs=((a, b),)) for cost, a, b in zip(*columns, strict=True)]


DRAWN = np.random.default_rng(0).random((3, 24))


@pytest.mark.parametrize(
    ("first", "second", "fault"),
    [
        (DRAWN[0], DRAWN[0], "alike"),
        (DRAWN[0] + 1e-12 * DRAWN[1], DRAWN[0], "alike"),  # but for rounding
        (DRAWN[0] - 0.1, DRAWN[0] + 0.1, "alike"),
        (0.5, 0.5, "constant"),
        (DRAWN[0], DRAWN[1], "one always moves"),
        (DRAWN[1], DRAWN[2], ""),
        (0.3, DRAWN[1], ""),  # a half that is easy
        (DRAWN[0] + 1e-4 * DRAWN[1], DRAWN[0] - 1e-4 * DRAWN[1], ""),
    ],
)
@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_halves_that_can_t_be_of_two_halves_of_data(first: Any, second: Any, fault: str, scale: float) -> None:
    evaluations = told(scale * DRAWN[0], scale * np.asarray(first), scale * np.asarray(second))
    for given in (evaluations, [*evaluations, Evaluation(0.5)]):  # points without halves don't count
        said = fault_of_halves(given)
        assert fault in said if fault else not said
    assert fault_of_halves(evaluations[:2]) == ""
    apart = Evaluation(0.5 * scale, pairs=((0.3 * scale, 0.75 * scale),))  # a single point where they differ
    assert fault_of_halves([*evaluations, apart]) == ""
    if fault == "alike":
        assert math.isnan(correlation_of_halves(torch.tensor([each.halves for each in evaluations])))


@pytest.mark.parametrize(
    ("times", "fault"),
    [
        (1, ""),
        (0.5, ""),
        (100, "100 times"),
        (0.01, "0.01 times"),
        (-1, "against"),
    ],
)
def test_halves_in_another_unit_than_the_value(times: float, fault: str) -> None:
    drawn = np.random.default_rng(0).normal(size=(2, 30, 12))  # of 30 examples each, at 12 points
    first, second = (drawn * 0.02 + np.linspace(0, 1, 12)).mean(1)
    evaluations = told((first + second) / 2, times * first, times * second)
    said = fault_of_halves(evaluations)
    assert fault in said if fault else not said
    assert fault_of_halves(evaluations[:7]) == ""  # too few points tell nothing
    noise = np.arange(12.0) * (-1.0) ** np.arange(12)
    assert fault_of_halves(told(noise, times * first, times * second)) == ""  # nor do halves that go their own way
    assert fault_of_halves(told(noise, times * first, -times * first)) == ""


@pytest.mark.parametrize("right", [20, 17])
def test_a_metric_that_never_varies_and_few_examples_are_not_mistaken(right: int) -> None:
    assert fault_of_halves(told(np.full(9, right / 20), right / 20, right / 20)) == ""
    flipped = [(right, 0, 0), (right - 1, 1, 0), (right - 2, 1, 1), (right - 2, 2, 0)]  # examples wrong in each half
    assert fault_of_halves([Evaluation(1 - n / 20, pairs=((a / 10, b / 10),)) for n, a, b in flipped]) == ""
    assert fault_of_halves([]) == fault_of_halves([Evaluation(0.1 * i) for i in range(5)]) == ""


def test_evaluations_are_those_of_late_points_on_policy() -> None:
    early = trajectory(0, [0, 4, 5, 10], [[1, 1], [2, 2], [3, 3], [4, 4]])
    late = trajectory(2, [0, 4, 6, 10], [[5, 5], [6, 6], [7, 7], [8, 8]])

    def first(trajectories: list[Trajectory]) -> list[float | None]:
        return [each.halves[0] if each.halves else None for each in evaluations_where_used(trajectories)]

    assert first([early]) == [3, 4]
    assert first([early, late]) == [7, 8]
    assert first([late, trajectory(1, [0, 10], None)]) == [7, 8, None]
    assert first([]) == []


def test_optimism_is_that_of_least_squares() -> None:
    """The mean is the least-squares fit of a constant: its squared error is optimistic by 2 var / n, as is known."""
    rng = np.random.default_rng(2)
    n, found, true = 40, [], []
    for _ in range(4000):
        y = rng.normal(size=n)
        halves = y[::2], y[1::2]

        def answer(c: float, halves: tuple[np.ndarray, ...] = halves) -> Evaluation:
            costs = [float(((half - c) ** 2).mean()) for half in halves]
            return Evaluation(sum(costs) / 2, pairs=((costs[0], costs[1]),))

        found.append(optimism_of_gain([answer(half.mean()) for half in halves]))  # never below 0 here, so not cut
        true.append((1 + y.mean() ** 2) - ((y - y.mean()) ** 2).mean())  # on new data, less on its own
    assert np.mean(found) == pytest.approx(2 / n, rel=0.05)
    assert np.mean(true) == pytest.approx(2 / n, rel=0.2)


def test_optimism_is_never_below_0_and_0_where_unknown() -> None:
    assert optimism_of_gain(
        [Evaluation(0.5, pairs=((0.4, 0.6),)), Evaluation(0.5, pairs=((0.7, 0.4),))]
    ) == pytest.approx((0.2 + 0.3) / 4)
    assert optimism_of_gain([Evaluation(0.5, pairs=((0.6, 0.4),)), Evaluation(0.5, pairs=((0.4, 0.6),))]) == 0
    assert optimism_of_gain([]) == 0
    assert (
        optimism_of_gain([Evaluation(0.5, pairs=((0.1, 0.9),)), Evaluation(0.5)]) == 0
    )  # the second half may just be harder


def test_a_half_is_judged_by_itself() -> None:
    items = [trajectory(0, [0, 10], [[1, 2], [3, 4]]), trajectory(1, [0, 10], None)]
    assert [t.cost.tolist() for t in seen_on_half(items, 0)] == [[1, 3]]
    assert [t.cost.tolist() for t in seen_on_half(items, 1)] == [[2, 4]]


def test_what_never_differs_has_no_correlation_and_repeats_that_agree_no_noise() -> None:
    for halves in (None, torch.tensor([[0.5, 0.5]] * 5), torch.tensor([[0.5, 1.0], [1.0, 0.5]])):
        assert math.isnan(correlation_of_halves(halves))
    alike = [Evaluation(cost, noise=0.0) for cost in (1.0, 2.0, 3.0)]
    assert repeats_agree([*alike, Evaluation(5.0)])  # the last has no repeats
    for others in (alike[:2], [alike[0]] * 5, [*alike, Evaluation(1.0, noise=0.1)]):
        assert not repeats_agree(others)
