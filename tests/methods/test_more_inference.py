"""What more inference would give: asked after a run of what it kept, counted, and kept by nobody."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.inference import put_into
from helpers.refusals import assert_refused
from metricopt_ext.errors import BudgetError
from metricopt_ext.methods.more_inference import PURPOSE, MoreInference, more_inference
from metricopt_ext.methods.pipeline import optimize_metric
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.tasks.ledger import Ledger
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.settings import Setting, Settings
from metricopt_ext.tasks.task import FinetuneTask

Make = Callable[..., Any]
GAINS = {"size": 1.0, "flip": 0.5, "soft": 0.1}  # of what each taken alone lowers the distance by


class Slow:
    """distance = |phi - goal|^2 + 4 - what settings gain: the size by its logarithm, a flip with soft-NMS alone."""

    def __init__(self, make: Make, **options: Any) -> None:
        self.task, self.asked = make(8), list[dict[str, Any]]()
        self.now: dict[str, Any] = {"size": 2, "flip": False, "soft": 0.0}
        self.apply = put_into(self.now)
        size = Setting("size", values=(1, 2, 4, 8), default=2, inference=lambda size: float(size) / 2)
        flip = Setting("flip", values=(False, True), default=False, inference=2.0)
        soft = Setting("soft", values=(0.0, 0.2), default=0.0)
        presets = {"soft": {"soft": 0.2}, "both": {"flip": True, "soft": 0.2}}
        self.settings = Settings([size, flip, soft], self.apply, **{"alone": ["size"], "presets": presets, **options})

    def gain(self, values: dict[str, Any]) -> float:
        both = GAINS["flip"] * (values["flip"] and values["soft"] > 0)
        return GAINS["size"] * math.log2(values["size"]) + both + GAINS["soft"] * (values["soft"] > 0)

    def distance(self, model: Any) -> Any:
        self.asked.append(dict(self.now))
        value = self.task.distance(model) + 4 - self.gain(self.now)
        luck = 0.01 * math.sin(float(model.metricopt.phi.sum()) + 5 * self.now["size"])
        return value, (value + luck, value - luck)

    def judged(self, function: Any = None, **options: Any) -> FinetuneTask:
        metric = Metric(function or self.distance, maximize=False, bounds=None, name="distance", **options)
        return replace(self.task, metric=metric, settings=self.settings)


def run(task: FinetuneTask) -> Any:
    return optimize_metric(task, queries=40, callback=Callback())


def test_each_factor_has_its_best_settings_and_nothing_changes(quadratic: Make) -> None:
    slow = Slow(quadratic)
    task = slow.judged()
    result = run(task)
    phi, spent, before = task.adapter.phi.detach().clone(), task.metric.ledger.spent, len(slow.asked)
    kept = result.settings.after
    assert kept == {"size": 2, "flip": False, "soft": 0.2}
    two, six, eight = more_inference(task, result, most=[8, 2, 6, 2])
    assert [each.most for each in (two, six, eight)] == [2, 6, 8]
    assert two.settings == {"size": 4, "flip": False, "soft": 0.2}
    assert six.settings == {"size": 8, "flip": False, "soft": 0.2}
    assert eight.settings == {"size": 8, "flip": True, "soft": 0.2}
    assert [each.factor for each in (two, six, eight)] == [2.0, 4.0, 8.0]
    for each in (two, six, eight):
        assert each.before == pytest.approx(result.after)
        assert each.value == pytest.approx(result.after + slow.gain(kept) - slow.gain(each.settings))
        assert each.sure
    assert two.changes == {"size": (2, 4)}
    assert torch.equal(task.adapter.phi, phi)
    assert slow.now == {"size": 2, "flip": False, "soft": 0.0}
    new = slow.asked[before:]
    assert task.metric.ledger.spent_on[PURPOSE] == task.metric.ledger.spent - spent == len(new)
    assert new[0] == kept
    assert all(new.count(each) == 1 for each in new)  # what two factors ask is asked once
    assert not any(slow.settings.affords(each) for each in new[1:])  # nor what the run might ask
    assert [each.tried for each in (two, six, eight)] == [1, 2, 3]
    assert [each.queries for each in (two, six, eight)] == [2, 1, 1]


def test_nothing_is_asked_where_nothing_takes_longer(quadratic: Make) -> None:
    slow = Slow(quadratic, inference=8.0)
    task = slow.judged()
    result = run(task)
    before = len(slow.asked)
    assert more_inference(task, result, most=[2, 6, 8]) == ()
    assert len(slow.asked) == before


def test_chance_is_said(quadratic: Make) -> None:
    slow = Slow(quadratic)

    def noise(model: Any) -> Any:
        value = slow.task.distance(model)
        luck = 0.1 * math.sin(70 * slow.now["size"] + 3 * slow.now["flip"])
        return value + luck, (value + 9 * luck, value - 7 * luck)

    task = slow.judged(noise)
    (six,) = more_inference(task, run(task), most=[6])
    assert six.changes
    assert not six.sure
    assert str(six).endswith("times as long; it may be chance")


def test_what_violates_a_constraint_is_not_chosen(quadratic: Make) -> None:
    slow = Slow(quadratic)

    def distance(model: Any) -> dict[str, Any]:
        return {"distance": slow.distance(model), "frames": 8 / slow.now["size"]}

    task = slow.judged(distance, subject_to={"frames": ">= start - 2"})
    (six,) = more_inference(task, run(task), most=[6])
    assert six.settings["size"] == 4  # 2 frames, of 4 at the start


def test_the_budget_holds(quadratic: Make) -> None:
    slow = Slow(quadratic)
    task = slow.judged(ledger=Ledger(41))
    result = run(task)
    assert_refused(lambda: more_inference(task, result), BudgetError)
    assert slow.now == {"size": 2, "flip": False, "soft": 0.0}


def test_what_can_not_be_asked_is_refused(quadratic: Make) -> None:
    slow = Slow(quadratic)
    task = slow.judged()
    result = run(task)
    assert_refused(lambda: more_inference(task, result, most=[0.5]), ValueError, "most", "0.5", "1")
    assert_refused(lambda: more_inference(task.with_settings(None), result), ValueError)


def test_it_is_said_in_a_line() -> None:
    values = {"size": 1.41}
    found = MoreInference(2.0, 1.9881, values, {"size": (1.0, 1.41)}, 0.83521, 0.94771, 5, True, 6)
    assert str(found) == (
        "within 2 times the inference: 0.8352 -> 0.9477 by size 1 -> 1.41 (5 tried), which takes 1.99 times as long"
    )
    assert str(replace(found, changes={})) == "within 2 times the inference: nothing gains (5 tried)"
