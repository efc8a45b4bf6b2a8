"""The stage over settings: what it asks, in which order, within its queries and what inference may cost."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from helpers.asked import batches_of
from metricopt_ext.adapters.start import Start
from metricopt_ext.search.stages import INTERVAL, OUTWARDS, SettingsStage
from metricopt_ext.search.strategy import Batches
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.settings import Setting, Settings

Values = dict[str, Any]
AT = Start(torch.zeros(0))
SIZES = (200, 238, 283, 336, 400, 476, 566, 673)
SIZE = Setting("size", values=SIZES, default=336)
FLIP = Setting("flip", values=(False, True), default=False, inference=2.0)
SOFT = Setting("soft", 0.0, 1.0, default=0.0)


def made(*settings: Setting, **more: Any) -> Settings:
    return Settings(settings, nullcontext, **more)


def run(stage: SettingsStage, cost: Callable[[Values], float | None]) -> list[list[Values]]:
    """Answer the stage's batches, and return them."""

    def judge(start: Start) -> Evaluation | None:
        found = cost(dict(start.settings))
        return None if found is None else Evaluation(found)

    def batches() -> Batches:
        yield [AT]  # whose value is needed
        yield from stage.batches()

    _, *asked = batches_of(batches(), lambda start: Evaluation(0.0) if start is AT else judge(start))
    return [[dict(start.settings) for start in batch] for batch in asked]


def values_of(stage: SettingsStage) -> Values:
    return dict(stage.best.start.settings)


def asked(name: str, batches: list[list[Values]]) -> list[list[Any]]:
    return [[values[name] for values in batch] for batch in batches]


# --- Numbers in order ----------------------------------------------------------------------------------------------


def test_numbers_are_followed_outwards_while_they_gain() -> None:
    state = SettingsStage(made(SIZE), AT, Evaluation(0.5))
    batches = run(state, lambda values: abs(values["size"] - 566) / 1000)
    assert asked("size", batches) == [[283, 400, 476], [566], [673]]
    assert values_of(state) == {"size": 566}
    assert state.spent == 5


def test_a_step_that_does_not_gain_ends_it() -> None:
    batches = run(SettingsStage(made(SIZE), AT, Evaluation(0.2)), lambda values: 0.5)
    assert asked("size", batches) == [[283, 400, 476]]
    second = run(SettingsStage(made(SIZE), AT, Evaluation(0.2)), lambda values: 0.5 - 0.4 * (values["size"] == 400))
    assert asked("size", second) == [[283, 400, 476]]  # 476 was asked, and is worse than 400


def test_at_most_so_many_are_asked_of_one_setting() -> None:
    many = Setting("k", values=tuple(range(20)), default=0)
    batches = run(SettingsStage(made(many), AT, Evaluation(1.0)), lambda values: 1 - values["k"] / 20)
    assert asked("k", batches) == [[1, 2], [3], [4], [5]]
    assert sum(map(len, batches)) == OUTWARDS


# --- Choices, and intervals ----------------------------------------------------------------------------------------


def test_choices_are_asked_one_by_one() -> None:
    distance = Setting("distance", values=("cosine", "euclidean", "city"), default="cosine")
    state = SettingsStage(made(distance), AT, Evaluation(0.5))
    batches = run(state, lambda values: {"euclidean": 0.4, "city": 0.6}[values["distance"]])
    assert asked("distance", batches) == [["euclidean", "city"]]
    assert values_of(state) == {"distance": "euclidean"}


@pytest.mark.parametrize("best", [0.05, 0.35, 0.6])
def test_an_interval_is_a_line(best: float) -> None:
    soft = Setting("soft", 0.0, 1.0, default=0.3)
    state = SettingsStage(made(soft), AT, Evaluation((0.3 - best) ** 2))
    batches = run(state, lambda values: (values["soft"] - best) ** 2)
    (first, *_) = asked("soft", batches)
    assert sorted(first) == pytest.approx([0.2, 0.4])
    assert sum(map(len, batches)) == INTERVAL
    assert values_of(state)["soft"] == pytest.approx(best, abs=0.1)


def test_an_integer_is_not_asked_twice() -> None:
    k = Setting("k", 1, 5, default=3)
    batches = run(SettingsStage(made(k), AT, Evaluation(0.5)), lambda values: 0.1 * abs(values["k"] - 1))
    numbers = [number for batch in asked("k", batches) for number in batch]
    assert len(set(numbers)) == len(numbers)
    assert 3 not in numbers


def test_an_interval_is_cut_where_its_first_steps_take_too_long() -> None:
    size = Setting("size", -1.0, 1.0, default=0.0, inference=lambda size: 1 + abs(float(size)))
    state = SettingsStage(made(size, inference=1.1), AT, Evaluation(0.01))
    batches = run(state, lambda values: (values["size"] - 0.1) ** 2)
    assert asked("size", batches)[0] == pytest.approx([0.02, -0.02])  # a tenth of what may be taken
    assert sum(map(len, batches)) == INTERVAL
    assert all(abs(values["size"]) <= 0.1 + 1e-9 for batch in batches for values in batch)
    assert 0 < values_of(state)["size"] <= 0.1


# --- One after another, presets, and bounds ------------------------------------------------------------------------


def test_each_setting_begins_at_the_best_of_those_before() -> None:
    other = Setting("other", values=("a", "b"), default="a")
    state = SettingsStage(made(SIZE, other), AT, Evaluation(1.0))
    batches = run(state, lambda values: 1 - values["size"] / 1000 - 0.1 * (values["other"] == "b"))
    assert batches[-1] == [{"size": 673, "other": "b"}]
    assert values_of(state) == {"size": 673, "other": "b"}


def test_presets_are_put_on_the_best_and_asked_together() -> None:
    presets = {"soft": {"soft": 0.2}, "flip": {"flip": True}, "both": {"soft": 0.2, "flip": True}}
    settings = made(FLIP, Setting("soft", values=(0.0, 0.2), default=0.0), presets=presets, inference=2.0)
    state = SettingsStage(settings, AT, Evaluation(0.5))
    cost = {(False, 0.2): 0.6, (True, 0.0): 0.55, (True, 0.2): 0.3}
    batches = run(state, lambda values: cost[values["flip"], values["soft"]])
    assert batches == [
        [{"flip": True, "soft": 0.0}],
        [{"flip": False, "soft": 0.2}],
        [{"flip": True, "soft": 0.2}],  # the other two are known
    ]
    assert values_of(state) == {"flip": True, "soft": 0.2}


def test_what_takes_too_long_is_not_asked() -> None:
    presets = {"flip": {"flip": True}, "soft": {"soft": 0.2}}
    for inference, expected in ((1.0, [[{"flip": False, "soft": 0.2}]]), (2.0, None)):
        settings = made(FLIP, Setting("soft", values=(0.0, 0.2), default=0.0), presets=presets, inference=inference)
        batches = run(SettingsStage(settings, AT, Evaluation(0.5)), lambda values: 0.6)
        assert expected is None or batches == expected
        assert any(values["flip"] for batch in batches for values in batch) == (inference == 2.0)


@pytest.mark.parametrize("queries", [0, 1, 3, 4, 7, 10, 25])
def test_queries_are_never_exceeded(queries: int) -> None:
    presets = {f"p{i}": {"soft": 0.1 * i + 0.05} for i in range(6)}
    settings = made(SIZE, SOFT, FLIP, presets=presets, inference=9.0, queries=queries)
    state = SettingsStage(settings, AT, Evaluation(0.5))
    number = sum(map(len, run(state, lambda values: 0.5 - 1e-4 * values["size"] - 0.1 * values["soft"])))
    assert number == state.spent <= queries
    assert number >= min(queries, 10)
    fewer = SettingsStage(settings, AT, Evaluation(0.5), queries=2)
    assert sum(map(len, run(fewer, lambda values: 0.4))) == min(queries, 2)


def test_free_values_are_where_it_begins() -> None:
    state = SettingsStage(made(SIZE, SOFT, free={"soft": 0.7}), AT, Evaluation(0.5))
    assert all(start.settings["soft"] == 0.7 for start in next(state.batches()))
    assert values_of(state) == {"size": 336, "soft": 0.7}


# --- Answers -------------------------------------------------------------------------------------------------------


def test_the_first_stays_unless_another_is_better() -> None:
    state = SettingsStage(made(SIZE, FLIP, SOFT, inference=2.0), AT, Evaluation(0.5))
    run(state, lambda values: 0.5)
    assert values_of(state) == {"size": 336, "flip": False, "soft": 0.0}
    assert state.best.evaluation == Evaluation(0.5)


def test_what_was_given_up_costs_no_query_and_is_not_asked_again() -> None:
    state = SettingsStage(made(SIZE), AT, Evaluation(0.5))
    batches = run(state, lambda values: None if values["size"] == 400 else values["size"] / 1000)
    assert asked("size", batches) == [[283, 400, 476], [238], [200]]
    assert state.spent == 4


def test_of_an_interval_what_was_given_up_is_left_out_and_a_batch_without_an_answer_ends_it() -> None:
    soft = Setting("soft", 0.0, 1.0, default=0.3)
    state = SettingsStage(made(soft), AT, Evaluation(0.25))
    batches = run(state, lambda values: None if values["soft"] < 0.3 else (values["soft"] - 0.8) ** 2)
    assert sorted(asked("soft", batches)[0]) == pytest.approx([0.2, 0.4])
    assert len(batches) > 1  # by the other answer
    assert state.spent == sum(values["soft"] >= 0.3 for batch in batches for values in batch)
    assert values_of(state)["soft"] == pytest.approx(0.8, abs=0.1)
    silent = SettingsStage(made(soft), AT, Evaluation(0.25))
    assert len(run(silent, lambda values: None)) == 1
    assert (silent.spent, values_of(silent)) == (0, {"soft": 0.3})
