"""Settings of inference through a whole run: tuned first, then phi from there, counted, kept, resumed and told."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.inference import put_into
from helpers.refusals import assert_refused
from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import BudgetError, FileFormatError, MetricError
from metricopt_ext.methods.algorithm1 import Algorithm1
from metricopt_ext.methods.algorithm_s1 import AlgorithmS1
from metricopt_ext.methods.pipeline import optimize_metric
from metricopt_ext.methods.recipe import Recipe
from metricopt_ext.methods.result import Result
from metricopt_ext.methods.search import Search
from metricopt_ext.methods.tuned_settings import SETTINGS, TunedSettings
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.direct import CMAES
from metricopt_ext.search.random_search import RandomSearch
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.settings import Setting, Settings

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
    assert result.settings.changed == {"size": (2.0, BEST), "kind": ("hard", "soft")}
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
    assert f"settings: size 2 -> {BEST:g}, kind hard -> soft (5 tried); inference takes 4.00 times as long" in str(
        result
    )


def test_every_query_is_counted_once(quadratic: Make) -> None:
    toy = Toy(quadratic)
    task = toy.judged()
    result = run(task, 37, starts={"mine": Start(task.origin() + 0.1)})
    assert result.queries == {"starts": 2, "settings": 5, "search": 30}
    assert task.metric.ledger.spent_on == {"starts": 2, "settings": 5, "search": 30}
    assert len(toy.asked) == 37


def test_a_direct_search_has_them_too(quadratic: Make) -> None:
    result = run(Toy(quadratic).judged(), 40, strategy=CMAES())
    assert result.settings is not None
    assert result.settings.after == {"size": BEST, "kind": "soft"}
    assert sum(result.queries.values()) <= 40


def test_nothing_that_takes_longer_is_chosen_unless_it_may(quadratic: Make) -> None:
    result = run(Toy(quadratic, inference=1.0).judged())
    assert result.settings is not None
    assert result.settings.after == {"size": 2.0, "kind": "soft"}
    assert result.settings.factor == 1.0
    assert "inference takes" not in str(result)


def test_what_is_free_is_there_from_the_first_query_on(quadratic: Make) -> None:
    toy = Toy(quadratic, free={"size": 4.0}, queries=0)
    result = run(toy.judged())
    assert {each["size"] for each in toy.asked} == {4.0}
    assert result.settings is not None
    assert result.settings.before["size"] == 2.0
    assert result.settings.after == {"size": 4.0, "kind": "hard"}
    assert result.settings.changed == {}
    assert "settings for the metric alone, free: size 2 -> 4; for deployment keep the model's own" in str(result)


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
    assert "settings: as they were; none of 5 other choices surely gains" in str(result)


def test_a_metric_may_take_them_as_its_argument(quadratic: Make) -> None:
    toy, seen = Toy(quadratic), []

    def distance(model: Any, settings: dict[str, Any]) -> Any:
        seen.append(settings)
        assert settings == toy.now
        return toy.distance(model)

    assert run(toy.judged(distance)).settings == run(Toy(quadratic).judged()).settings
    assert seen == toy.asked


def test_a_metric_that_takes_them_needs_some(quadratic: Make) -> None:
    task = replace(
        quadratic(8), metric=Metric(lambda model, settings: 0.5, maximize=False, bounds=None, name="distance")
    )
    assert_refused(lambda: run(task), MetricError, "takes", "FinetuneTask")


def test_a_default_of_its_own_stays_where_there_are_none(quadratic: Make) -> None:
    task = quadratic(8)

    def distance(model: Any, settings: str = "mine") -> float:
        assert settings == "mine"
        return float(task.distance(model))

    assert run(replace(task, metric=Metric(distance, maximize=False, bounds=None, name="distance"))).settings is None


def test_they_are_applied_to_the_model_that_is_judged(quadratic: Make) -> None:
    """A start that replaces tensors is judged on a copy."""
    toy, models = Toy(quadratic), list[tuple[Any, Any]]()

    @contextmanager
    def apply(values: dict[str, Any], model: Any) -> Iterator[None]:
        with toy.apply(values):
            toy.model = model
            yield

    def distance(model: Any) -> Any:
        models.append((model, toy.model))
        return toy.distance(model)

    toy.settings = Settings([toy.settings[name] for name in toy.settings.names], apply, inference=4.0)
    task = toy.judged(distance)
    name, own = next(iter(task.adapter.base_state_dict().items()))
    start = Start(task.origin() + 0.3, parameters={name: own.detach() * 1.001})
    run(task, starts={"mine": start})
    assert all(judged is applied for judged, applied in models)
    assert len({id(judged) for judged, _ in models}) == 2


@pytest.mark.slow
def test_a_killed_run_goes_on_in_each_stage(quadratic: Make, tmp_path: Path) -> None:
    whole = run(Toy(quadratic).judged(), 30, output_dir=tmp_path / "whole")
    for at in (1, 3, 6, 9, 20):
        toy, folder = Toy(quadratic), tmp_path / f"killed-{at}"
        toy.dies_at = at
        with pytest.raises(KeyboardInterrupt):
            run(toy.judged(), 30, output_dir=folder)
        assert toy.now == {"size": 2.0, "kind": "hard"}
        toy = Toy(quadratic)
        result = run(toy.judged(), 30, output_dir=folder, resume=True)
        assert len(toy.asked) == 30 - at
        assert result.settings == whole.settings
        assert torch.equal(result.ends[result.chosen], whole.ends[whole.chosen])
        name = "evaluations.json"
        assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_folder_of_other_settings_is_refused(quadratic: Make, tmp_path: Path) -> None:
    run(Toy(quadratic).judged(), 30, output_dir=tmp_path)
    assert_refused(
        lambda: run(Toy(quadratic, inference=2.0).judged(), 30, output_dir=tmp_path, resume=True),
        FileFormatError,
        "inference",
    )


def test_settings_on_file_are_told_as_they_are(quadratic: Make, tmp_path: Path) -> None:
    """Another processor would round an interval's points in another way."""
    run(Toy(quadratic).judged(), 30, output_dir=tmp_path)
    content = json.loads((tmp_path / "evaluations.json").read_text())
    asked = [each.get("settings") for each in content["evaluations"]]
    assert asked[0] is None
    assert asked[1] == {"size": 1.0, "kind": "hard"}
    assert asked[-1] == {"size": BEST, "kind": "soft"}


def test_ask_and_tell_hands_them_out(quadratic: Make) -> None:
    toy = Toy(quadratic)
    search = Search(toy.judged(), queries=40)
    while trials := search.ask(8):
        for trial in trials:
            with trial.applied() as model:
                assert toy.now == trial.settings
                value, halves = toy.distance(model)
            search.tell(trial.id, value, halves)
    result = search.result()
    assert result.settings == run(Toy(quadratic).judged()).settings
    assert toy.now == {"size": 2.0, "kind": "hard"}


def test_a_start_may_have_its_own(quadratic: Make) -> None:
    toy = Toy(quadratic, queries=0)
    task = toy.judged()
    result = run(task, starts={"large": Start(task.origin(), settings={"size": 4.0})})
    assert result.started_at == "large"
    assert result.settings is not None
    assert result.settings.after["size"] == 4.0
    assert_refused(
        lambda: run(task, starts={"wrong": Start(task.origin(), settings={"size": 5.0})}),
        ValueError,
        "size",
        "5.0",
        "1.0",
        "2.0",
    )
    assert_refused(
        lambda: run(toy.task, starts={"wrong": Start(task.origin(), settings={"size": 4.0})}), ValueError, "settings"
    )


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


@pytest.mark.parametrize("told", [0, 1, 2])
def test_there_is_no_result_before_the_stage_is_over(quadratic: Make, told: int) -> None:
    search = Search(Toy(quadratic).judged(), queries=40, strategy=RandomSearch())
    search.tell(search.ask()[0].id, 3.0)
    for trial in search.ask(3)[:told]:
        search.tell(trial.id, 3.0)
    assert_refused(search.result, BudgetError, 4 - told, 1 + told)


def test_what_held_out_data_prefer_has_its_own_settings(quadratic: Make) -> None:
    toy = Toy(quadratic)

    def other(model: Any) -> float:
        return float(toy.task.distance(model)) + 20 * (toy.now["size"] == BEST)

    aside = Metric(other, maximize=False, bounds=None, name="aside")
    result = run(toy.judged(), holdout=aside)
    assert result.overruled
    assert result.chosen == "start"
    assert result.holdout["settings"] == pytest.approx(result.holdout["start"] + 20)  # judged with their own in force
    assert result.settings is not None
    assert result.settings.after == result.settings.before
    assert result.settings.factor == 1.0
    assert "settings: as they were; size 2 -> 8, kind hard -> soft gained (5 tried), but was not kept" in str(result)


def test_what_held_out_data_confirm_keeps_its_settings(quadratic: Make) -> None:
    toy = Toy(quadratic)
    aside = Metric(lambda model: toy.distance(model)[0], maximize=False, bounds=None, name="aside")
    result = run(toy.judged(), holdout=aside)
    assert not result.overruled
    assert result.settings == run(Toy(quadratic).judged()).settings


def test_what_violates_a_constraint_is_neither_kept_nor_built_upon(quadratic: Make) -> None:
    toy = Toy(quadratic)

    def distance(model: Any) -> dict[str, Any]:
        return {"distance": toy.distance(model), "frames": 8 / toy.now["size"]}

    result = run(toy.judged(distance, subject_to={"frames": ">= 2"}))
    assert result.settings is not None
    assert result.settings.after == {"size": 4.0, "kind": "soft"}
    assert {each["size"] for each in toy.asked[6:]} == {4.0}


def test_where_all_violates_a_constraint_nothing_is_kept(quadratic: Make) -> None:
    toy = Toy(quadratic)

    def distance(model: Any) -> dict[str, Any]:
        return {"distance": toy.distance(model), "frames": 0.0}

    result = run(toy.judged(distance, subject_to={"frames": ">= 2"}))
    assert result.chosen == "start"
    assert result.settings is not None
    assert result.settings.after == result.settings.before
    assert "settings: as they were; size 2 -> 8, kind hard -> soft gained (5 tried), but was not kept" in str(result)


def test_it_is_said_why_none_was_tried(quadratic: Make) -> None:
    least = GuidedTrustRegion().least_queries(8)
    assert "settings: none was tried, as the search needs all queries; give it more" in str(
        run(Toy(quadratic).judged(), least)
    )
    assert "none was tried" not in str(run(Toy(quadratic, queries=0).judged()))
    toy = Toy(quadratic)
    size = Setting("size", values=SIZES[1:], default=2.0, inference=lambda size: float(size) / 2)
    toy.settings = Settings([size], lambda values: toy.apply({"kind": "hard", **values}))
    result = run(toy.judged())
    assert result.queries["settings"] == 0
    assert (
        "settings: none was tried, as what else there is takes more than 1 times as long; allow more by inference="
        in str(result)
    )


@pytest.mark.parametrize("queries", [7, 8, 9, 12])
def test_no_budget_is_exceeded(quadratic: Make, queries: int) -> None:
    toy = Toy(quadratic)
    result = run(toy.judged(), queries)
    assert len(toy.asked) == sum(result.queries.values()) == queries
    assert_refused(lambda: run(Toy(quadratic).judged(), 6), BudgetError, "6", "queries")


@pytest.mark.parametrize("strategy", [Recipe(), Algorithm1(), AlgorithmS1()])
def test_what_tunes_no_settings_refuses_them(quadratic: Make, strategy: Any) -> None:
    toy = Toy(quadratic, free={"kind": "soft"})
    assert_refused(lambda: run(toy.judged(), 400, strategy=strategy), ValueError, "1", type(strategy).__name__)
    assert not toy.asked


def test_an_error_names_the_settings_in_force(quadratic: Make) -> None:
    toy = Toy(quadratic)

    def distance(model: Any) -> Any:
        if toy.now["size"] == 4.0:
            raise RuntimeError("out of memory")
        return toy.distance(model)

    names = ("RuntimeError", "4.0", "hard", "3", "40", "phi")
    assert_refused(lambda: run(toy.judged(distance)), MetricError, *names)
    assert toy.now == {"size": 2.0, "kind": "hard"}


def test_settings_that_cannot_be_applied_end_the_run(quadratic: Make) -> None:
    toy = Toy(quadratic)

    @contextmanager
    def apply(values: dict[str, Any]) -> Iterator[None]:
        if values["size"] == 4.0:
            raise RuntimeError("no such engine")
        with toy.apply(values):
            yield

    toy.settings = Settings([toy.settings[name] for name in toy.settings.names], apply, inference=4.0)
    names = ("4.0", "hard", "RuntimeError", "3", "40")
    assert_refused(lambda: run(toy.judged()), MetricError, *names)


def test_what_the_settings_suppress_is_an_error_all_the_same(quadratic: Make) -> None:
    toy = Toy(quadratic)

    @contextmanager
    def apply(values: dict[str, Any]) -> Iterator[None]:
        with suppress(Exception), toy.apply(values):
            yield

    toy.settings = Settings([toy.settings[name] for name in toy.settings.names], apply)
    task = toy.judged()
    task.metric.function = lambda: 1 / 0
    assert_refused(lambda: run(task), MetricError, "ZeroDivisionError")


def test_where_nobody_waits_for_a_setting_it_is_as_without(quadratic: Make) -> None:
    toy = Toy(quadratic)
    search = Search(toy.judged(), queries=30)
    while trials := search.ask(8):
        for trial in trials:
            if search.stage_of(trial.id) == "settings":
                search.give_up(trial.id)
                continue
            with trial.applied() as model:
                search.tell(trial.id, *toy.distance(model))
    result = search.result()
    assert len(toy.asked) == search.spent == 30
    assert result.queries == {"starts": 1, "settings": 0, "search": 29}
    assert "settings: none was tried, as all were given up" in str(result)


def test_what_fails_in_the_stage_counts_and_is_not_kept(quadratic: Make) -> None:
    toy = Toy(quadratic)
    search = Search(toy.judged(), queries=30)
    while trials := search.ask(8):
        for trial in reversed(trials):
            if trial.settings["size"] == BEST:
                search.fail(trial.id, "out of memory")
                continue
            with trial.applied() as model:
                search.tell(trial.id, *toy.distance(model))
    result = search.result()
    assert result.settings is not None
    assert result.settings.after == {"size": 4.0, "kind": "soft"}
    assert (search.spent, search.failed) == (30, 1)


@pytest.mark.slow
def test_a_search_goes_on_after_each_trial_in_any_order(quadratic: Make, tmp_path: Path) -> None:
    whole, told = run(Toy(quadratic).judged(), 30), 0
    while True:
        toy = Toy(quadratic)
        with Search(toy.judged(), queries=30, output_dir=tmp_path, resume=told > 0) as search:
            search.ask(8)
            if not (trials := search.open()):
                break
            trial, told = trials[told % len(trials)], told + 1
            with trial.applied() as model:
                search.tell(trial.id, *toy.distance(model))
    result = search.result()
    assert told == 30
    assert result.settings == whole.settings
    assert torch.equal(result.ends[result.chosen], whole.ends[whole.chosen])


def test_changes_are_counted_from_the_model_s_own_settings() -> None:
    """What was free is no change by the metric, but one all the same."""
    found = TunedSettings(
        before={"size": 1.0, "flip": False, "kind": "hard"},
        after={"size": 2.0, "flip": True, "kind": "hard"},
        free={"flip": True},
        factor=1.0,
        tried=(),
        started={"size": 2.0, "flip": True, "kind": "hard"},
    )
    assert found.changed == {"size": (1.0, 2.0)}
    assert found.changes == {"size": (1.0, 2.0), "flip": (False, True)}
