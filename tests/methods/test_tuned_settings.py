"""Settings of inference through a whole run: tuned first, then phi from there, counted, kept, resumed and told."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.inference import put_into
from helpers.refusals import assert_refused, having
from metricopt_ext import Callback, Metric, Result, Setting, Settings, Start, optimize_metric
from metricopt_ext.errors import MetricError
from metricopt_ext.methods.guard import TunedSettings
from metricopt_ext.search.stages import SETTINGS

Make = Callable[..., Any]
BEST, WORTH = 8.0, 0.5  # of the setting "size", and what each doubling away from it costs
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0)


class Toy:
    """distance = |phi - goal|^2 + what an external setting costs: it is separable, and the best of each is known."""

    def __init__(self, make: Make, dim: int = 8, apart: float = 0.05, **options: Any) -> None:
        self.task, self.apart = make(dim), apart
        self.now: dict[str, Any] = {"size": 2.0, "kind": "hard"}
        self.apply = put_into(self.now)
        self.asked: list[dict[str, Any]] = []
        self.dies_at = -1
        size = Setting("size", values=SIZES, default=2.0, inference=lambda size: float(size) / 2)
        kind = Setting("kind", values=("hard", "soft", "other"), default="hard")
        self.settings = Settings([size, kind], self.apply, **{"inference": 4.0, **options})

    def worth(self, values: dict[str, Any]) -> float:
        """What the settings cost."""
        return WORTH * abs(math.log2(values["size"] / BEST)) + 0.2 * (values["kind"] != "soft")

    def distance(self, model: Any) -> Any:
        if len(self.asked) == self.dies_at:
            raise KeyboardInterrupt
        self.asked.append(dict(self.now))
        value = self.task.distance(model) + self.worth(self.now)
        luck = self.apart * math.sin(float(model.metricopt.phi.sum()) + 5 * self.now["size"])
        return value, (value + luck, value - luck)

    def judged(self, function: Any = None, **options: Any) -> Any:
        metric = Metric(function or self.distance, maximize=False, bounds=None, name="distance", **options)
        return replace(self.task, metric=metric, settings=self.settings)


def run(task: Any, queries: int = 40, **options: Any) -> Result:
    return optimize_metric(task, queries=queries, callback=Callback(), **options)


def test_settings_are_tuned_first_and_then_phi(quadratic: Make) -> None:
    toy = Toy(quadratic)
    task = toy.judged()
    result = run(task)
    assert result.settings is not None
    assert result.settings.before == {"size": 2.0, "kind": "hard"}
    assert result.settings.after == {"size": BEST, "kind": "soft"}
    assert result.settings.changes == {"size": (2.0, BEST), "kind": ("hard", "soft")}
    assert result.settings.factor == pytest.approx(4.0)
    assert result.started_at == SETTINGS
    assert result.chosen == "search"
    tried = [values for values, _ in result.settings.tried]
    assert [each["size"] for each in tried] == [2.0, 1.0, 4.0, 8.0, BEST, BEST]
    assert [each["kind"] for each in tried] == ["hard"] * 4 + ["soft", "other"]
    assert toy.asked[: len(tried)] == tried
    assert all(each == result.settings.after for each in toy.asked[len(tried) :])
    assert toy.now == {"size": 2.0, "kind": "hard"}  # as it was
    assert result.after < result.starts[SETTINGS] < result.before


def test_nothing_that_takes_longer_is_chosen_unless_it_may(quadratic: Make) -> None:
    result = run(Toy(quadratic, inference=1.0).judged())
    assert result.settings is not None
    assert result.settings.after == {"size": 2.0, "kind": "soft"}
    assert result.settings.factor == 1.0


def test_what_is_free_is_there_from_the_first_query_on(quadratic: Make) -> None:
    toy = Toy(quadratic, free={"size": 4.0}, queries=0)
    result = run(toy.judged())
    assert {each["size"] for each in toy.asked} == {4.0}
    assert result.settings is not None
    assert result.settings.before["size"] == 2.0
    assert result.settings.after == {"size": 4.0, "kind": "hard"}
    assert result.settings.changes == {"size": (2.0, 4.0)}


def test_luck_is_not_kept(quadratic: Make) -> None:
    """The halves agree on nothing that the settings do."""
    toy = Toy(quadratic)

    def noise(model: Any) -> Any:
        value = toy.task.distance(model)
        luck = 0.1 * math.sin(70 * toy.now["size"] + 9 * len(toy.now["kind"]))
        return value + luck, (value + 9 * luck, value - 7 * luck)

    result = run(toy.judged(noise))
    assert result.settings is not None
    assert result.settings.after == result.settings.before
    assert len(result.settings.tried) == 6
    assert SETTINGS not in result.candidates


def test_a_metric_may_take_them_as_its_argument(quadratic: Make) -> None:
    toy, seen = Toy(quadratic), []

    def distance(model: Any, settings: dict[str, Any]) -> Any:
        seen.append(settings)
        assert settings == toy.now
        return toy.distance(model)

    assert run(toy.judged(distance)).settings == run(Toy(quadratic).judged()).settings
    assert seen == toy.asked


def test_a_start_may_have_its_own(quadratic: Make) -> None:
    toy = Toy(quadratic, queries=0)
    task = toy.judged()
    result = run(task, starts={"large": Start(task.origin(), settings={"size": 4.0})})
    assert result.started_at == "large"
    assert result.settings is not None
    assert result.settings.after["size"] == 4.0
    for other, names in ((task, ("size", "5.0", "1.0")), (toy.task, ("settings",))):
        wrong = {"wrong": Start(task.origin(), settings={"size": 5.0})}
        assert_refused(lambda other=other, wrong=wrong: run(other, starts=wrong), ValueError, *names)


def test_settings_are_tuned_from_those_of_the_best_start(quadratic: Make) -> None:
    """The best start has a size that it alone gains by; what is tried and told is told of that size."""
    toy = Toy(quadratic)

    def distance(model: Any) -> Any:
        toy.asked.append(dict(toy.now))
        return float(toy.task.distance(model)) - 2 * (toy.now["size"] == 16.0) - 0.2 * (toy.now["kind"] == "soft")

    toy.settings = toy.settings.limited(inference=8.0)
    result = run(toy.judged(distance), starts={"large": Start(toy.task.origin(), settings={"size": 16.0})})
    assert result.settings is not None
    known = [values for values, _ in result.settings.tried]
    assert known[0] == {"size": 16.0, "kind": "hard"}
    assert known[1:] == toy.asked[2 : 1 + len(known)]
    assert known[1:] == [{"size": 8.0, "kind": "hard"}, *({"size": 16.0, "kind": kind} for kind in ("soft", "other"))]
    assert result.settings.after == {"size": 16.0, "kind": "soft"}
    assert result.starts[SETTINGS] == pytest.approx(result.starts["large"] - 0.2)


def test_what_held_out_data_prefer_has_its_own_settings(quadratic: Make) -> None:
    toy = Toy(quadratic)

    def other(model: Any) -> float:
        return float(toy.task.distance(model)) + 20 * (toy.now["size"] == BEST)

    aside = Metric(other, maximize=False, bounds=None, name="aside")
    result = run(toy.judged(), holdout=aside)
    assert result.chosen == "start"
    assert result.holdout["settings"] == pytest.approx(result.holdout["start"] + 20)  # judged with their own in force
    assert result.settings is not None
    assert result.settings.after == result.settings.before
    assert result.settings.factor == 1.0


def test_what_violates_a_constraint_is_neither_kept_nor_built_upon(quadratic: Make) -> None:
    toy = Toy(quadratic)

    def distance(model: Any) -> dict[str, Any]:
        return {"distance": toy.distance(model), "frames": 8 / toy.now["size"]}

    result = run(toy.judged(distance, subject_to={"frames": ">= 2"}))
    assert result.settings is not None
    assert result.settings.after == {"size": 4.0, "kind": "soft"}
    assert {each["size"] for each in toy.asked[6:]} == {4.0}


@pytest.mark.parametrize("queries", [7, 9, 12])
def test_no_budget_is_exceeded(quadratic: Make, queries: int) -> None:
    toy = Toy(quadratic)
    result = run(toy.judged(), queries)
    assert len(toy.asked) == sum(result.queries.values()) == queries


def test_a_metric_that_takes_settings_needs_some(quadratic: Make) -> None:
    task = quadratic(8).judged_by(Metric(lambda model, settings: 0.5, maximize=False, bounds=None))
    assert_refused(lambda: run(task), MetricError, "FinetuneTask")


def test_an_error_names_the_settings_in_force(quadratic: Make) -> None:
    toy = Toy(quadratic)

    def distance(model: Any) -> Any:
        if toy.now["size"] == 4.0:
            raise RuntimeError("out of memory")
        return toy.distance(model)

    names = ("RuntimeError", "4.0", "hard", "3", "40", "phi")
    assert_refused(lambda: run(toy.judged(distance)), MetricError, *names)
    assert toy.now == {"size": 2.0, "kind": "hard"}


@pytest.mark.parametrize(
    ("after", "factor", "tried", "names"),
    [
        ({"size": 4.0, "kind": "hard"}, 2.0, 3, ("size", "2", "4", "2.00")),
        ({"size": 2.0, "kind": "soft"}, 1.0, 3, ("kind", "hard", "soft")),
        ({"size": 2.0, "kind": "hard"}, 1.0, 3, ("as they were", "2")),
        ({"size": 2.0, "kind": "hard"}, 1.0, 1, ("none was tried", "queries", "inference=")),
    ],
)
def test_what_became_of_settings_is_said_in_a_line(after: Any, factor: float, tried: int, names: Any) -> None:
    before = {"size": 2.0, "kind": "hard"}
    (line,) = TunedSettings(before, after, {}, factor, ((before, 0.5),) * tried, tried == 1).lines()
    assert re.search(having(*names), line)
    assert ("times as long" in line) == (factor != 1)
    free, *_ = TunedSettings(before, {**before, "kind": "soft"}, {"kind": "soft"}, 1.0, ((before, 0.5),)).lines()
    assert re.search(having("kind", "soft", "free"), free)


@pytest.mark.parametrize(("moved", "heavier"), [(1, 0), (0, 1), (1, 1), (0, 0)])
def test_settings_that_are_kept_at_another_start_say_so(quadratic: Make, moved: int, heavier: int) -> None:
    """They may be tuned at a start that has its own phi and weights, which the model has from then on."""
    toy = Toy(quadratic)
    own = toy.task.problem.layer.weight.detach()
    phi, weight = moved * toy.task.goal, own + heavier
    there = Start(phi, {"weight": weight} if heavier else {})

    def distance(model: Any) -> float:
        apart = 5 * float((model.metricopt.phi.detach() - phi).square().sum())
        return apart + toy.worth(toy.now) + (not torch.equal(model.weight.detach(), weight))

    result = run(toy.judged(distance), 20, starts={"there": there} if moved or heavier else {})
    assert result.chosen == SETTINGS
    assert ("start" in result.what_was_kept()) == bool(moved or heavier)
    assert result.what_was_kept() in str(result)
