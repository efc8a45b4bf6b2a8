"""What a run tells of itself: its numbers in the metric's units, and words that fit them."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from metricopt_ext.adapters.start import Start
from metricopt_ext.methods.guard import Verdict
from metricopt_ext.methods.recipe_settings import StepWeights
from metricopt_ext.methods.result import KEPT, Details, RecipeDetails, Result, SearchDetails
from metricopt_ext.value.fitting import Fit
from metricopt_ext.value.value_function import Quality, RidgeValueFunction


def searched(**change: Any) -> Result:
    given = {
        "metric": "f1",
        "before": 0.5,
        "after": 0.75,
        "best": 0.75,
        "chosen": "search",
        "chance": 0.0,
        "optimism": 0.0,
        "needed": 0.0,
        "queries": {"search": 100},
        "queries_per_start": 100,
        "ends": {"search": torch.zeros(2)},
        "values": {"start": 0.5, "search": 0.75},
        "guard": "halves",
        "starts": {"start": 0.5},
        "started_at": "start",
        "candidates": {"start": Start(torch.zeros(2))},
        "verdict": Verdict(0.25, 0.0, 0.0, 1.0, 1, 0.0),
        "fit": None,
        "split_half": math.nan,
        "points": torch.zeros(1, 2),
        "costs": (0.5,),
        "path": torch.zeros(2, 2),
        "details": SearchDetails(learns=False, plain=False, widened=1.0),
    }
    return Result(**{**given, **change})


def learned(quality: Quality | None = None, **change: Any) -> Result[RecipeDetails]:
    f = RidgeValueFunction(2, 2)
    f.quality = quality or Quality(
        spearman=0.9, mae=0.01, constant_mae=0.1, points=100, trajectories=40, near_mae=0.01, headroom=0.1
    )
    plain = {**vars(searched()), "chosen": "metricopt", "queries": {"collect": 36, "choose": 6, "guard": 3}}
    details = RecipeDetails(0.625, StepWeights(0.3, 0.15), ())
    return Result(**{**plain, "queries_per_start": 3, "fit": Fit(f), "details": details, **change})


def test_a_search_tells_its_outcome_and_cost() -> None:
    assert str(searched()).splitlines() == [
        "f1: 0.5000 -> 0.7500; kept the end of the search",
        "queries: 100 (search 100); another starting point would cost 100",
    ]


def test_metricopt_tells_what_it_stands_beside_and_whether_f_was_trusted() -> None:
    result = learned()
    first, second, third = result.lines()
    assert first == "f1: 0.5000 -> 0.7500 (loss-only 0.6250); kept MetricOpt"
    assert second == "queries: 45 (collect 36, choose 6, guard 3); another starting point would cost 3"
    assert third == f"value function (ridge): {result.fit.f.quality}"
    assert " to be trusted" in third
    assert "NOT" not in third
    poor = Quality(spearman=0.1, mae=0.2, constant_mae=0.1, points=100, trajectories=40, near_mae=0.2, headroom=0.1)
    assert "NOT to be trusted" in str(learned(poor))


def test_halves_are_told_where_the_metric_has_them() -> None:
    assert "halves" not in str(learned())
    assert str(learned(split_half=0.376)).endswith("; the metric's halves correlate at 0.38")


@pytest.mark.parametrize("make", [searched, learned])
def test_an_unguarded_run_says_so_first_and_what_would_guard_it(make: Any) -> None:
    plain, told = make().lines(), make(guard="none", chance=None, needed=None).lines()
    assert told[0] == plain[0].replace("; kept", ", unguarded; kept")
    (line,) = [line for line in told[1:] if line not in plain]
    assert [each for each in told[1:] if each != line] == plain[1:]
    assert "let the metric return (value, (half, half))" in line
    assert "unguarded" not in str(make(guard="repeats")) + str(make(guard="held-out"))


@pytest.mark.parametrize("make", [searched, learned])
def test_a_gain_that_may_be_chance_is_told_with_what_would_not_be(make: Any) -> None:
    verdict = Verdict(0.25, 0.0625, 0.125, 1.0, 1, 0.25)
    found = make(after=0.5, best=0.75, chosen="start", chance=0.125, needed=0.25, optimism=0.0625, verdict=verdict)
    lines = found.lines()
    assert lines[0].endswith("; kept the model as it was")
    assert lines[1].startswith(
        "the best candidate has 0.7500, but with so little data, up to 0.3125 of a gain may be chance and"
    )
    assert len(lines) == len(make().lines()) + 1


@pytest.mark.parametrize("chosen", KEPT)
def test_every_candidate_has_words(chosen: str) -> None:
    line = replace(learned(), chosen=chosen).lines()[0]
    assert line.endswith(f"; kept {KEPT[chosen]}")
    assert len(set(KEPT.values())) == len(KEPT)


def test_how_far_phi_was_moved_and_that_f_is_missing_is_told() -> None:
    def told(**change: Any) -> list[str]:
        return searched(details=SearchDetails(**{"learns": False, "plain": False, "widened": 1.0, **change})).lines()[
            2:
        ]

    assert told() == told(plain=True) == []
    assert told(widened=8.0) == ["the metric did not react at first, so phi was moved 8 times as far"]
    assert told(widened=0.25) == ["the metric reacted strongly, so phi was moved 4 times less far"]
    first, last = told(learns=True, plain=True)
    assert first == "without a loss, the search treated all directions of phi alike"
    assert last.startswith("the metric never varied, so there is no value function: modulate more layers")


def test_details_of_a_strategy_that_has_none_add_nothing() -> None:
    plain = searched(details=Details())
    assert plain.lines() == searched().lines()
    assert plain.products() == {}


def test_f_s_doubt_is_told_where_the_queries_alone_would_have_believed_the_gain() -> None:
    for predicted, doubted in ((0.1, True), (math.inf, False)):
        verdict = Verdict(0.25, 0.01, 0.05, 1.0, 1, 0.2 if doubted else 0.3, predicted)
        found = searched(after=0.5, chosen="start", needed=verdict.needed, optimism=0.01, verdict=verdict)
        assert ("but f, which has learned from all queries, does not expect it" in str(found)) == doubted
        assert ("with so little data, up to 0.3100" in str(found)) != doubted
