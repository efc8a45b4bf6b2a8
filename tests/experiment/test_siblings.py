"""The sibling methods as methods of a comparison, and their settings."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.refusals import assert_refused
from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.compare import compare
from metricopt_ext.experiment.method import SIBLINGS, siblings_of
from metricopt_ext.experiment.siblings import (
    EmbedderSiblingsConfig,
    SiblingsConfig,
    training,
)
from metricopt_ext.experiment.usual_methods import planned
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.siblings.batch_metric import BatchMetric
from metricopt_ext.siblings.sibling import Sibling
from metricopt_ext.siblings.training import TrainingTask
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask


def test_the_default_settings_are_the_papers() -> None:
    assert {name: SiblingsConfig().build(name) for name in SIBLINGS} == SIBLINGS
    built = {name: EmbedderSiblingsConfig().build(name) for name in siblings_of("embedders")}
    assert built == {name: SIBLINGS[name] for name in siblings_of("embedders")}


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (SiblingsConfig(threshold_evals=-1), ("threshold_evals", "0")),
        (SiblingsConfig(sl={"universal": {"steps": 0}}), ("siblings.sl", "0", "1")),
        (SiblingsConfig(reloss={"source": {"random": 2.0}}), ("siblings.reloss", "2.0", "1")),
    ],
)
def test_settings_out_of_range_are_refused_before_any_work(config: SiblingsConfig, names: tuple[str, ...]) -> None:
    assert_refused(lambda: config.check(["sl_u", "reloss"]), ConfigError, *names)


@pytest.mark.parametrize(
    ("config", "names", "named"),
    [
        (SiblingsConfig(sl={"begin": "x"}), ["sl_s"], ("siblings.sl.begin=x", "sl_u", "sl_r", "methods")),
        (SiblingsConfig(ala={"offset": 5.0}), ["ala"], ("siblings.ala.offset=5.0", "ala_focal")),
    ],
)
def test_a_key_that_no_chosen_method_reads_is_refused(
    config: EmbedderSiblingsConfig, names: list[str], named: tuple[str, ...]
) -> None:
    assert_refused(lambda: config.check(names), ConfigError, *named)


class Nudge(Sibling):
    """Adds 1 to the first parameter, and asks the batch metric three times and the metric once."""

    def __init__(self) -> None:
        self.runs = 0

    def run(self, task: TrainingTask, seed: int, callback: Callback) -> tuple[None, dict[str, Any]]:
        self.runs += 1
        with torch.no_grad():
            task.parameters()[0].add_(1)
        for _ in range(3):
            task.batch_metric.cost(torch.zeros(2), torch.zeros(2), "nudge")
        return None, {"value": [(0, task.metric.cost(task.model, "nudge"))]}


def of(task: FinetuneTask) -> TrainingTask:
    return TrainingTask.of(
        task,
        trains="phi",
        predict=lambda model, batch: (batch, batch),
        batch_metric=BatchMetric(lambda scores, labels: 0.5, maximize=False),
    )


@pytest.fixture
def nudged(quadratic: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Compare the nudge alone, with a threshold that two queries find or without; returns the outcomes."""

    def run(method: Sibling, tuned: bool, resume: bool = False) -> Any:
        task = quadratic()
        metric = Metric(task.distance, maximize=False, bounds=None, name="distance")

        def tune(task: FinetuneTask, model: nn.Module) -> nn.Module | None:
            for _ in range(2):
                task.metric.cost(model, "threshold")
            return model if tuned else None

        made = training("sl_r", method, of, tune, folder=tmp_path, resume=resume)
        return task, compare(task.judged_by(metric), metric, {"sl_r": planned(made)}).outcomes["sl_r"]

    return run


def test_its_ends_are_judged_and_both_kinds_of_queries_count(nudged: Callable[..., Any], tmp_path: Path) -> None:
    task, (before, after) = nudged(Nudge(), tuned=True)
    true: Tensor = ((1 - task.goal) ** 2).sum()
    assert before.validation == after.validation == after.test == pytest.approx(float(true))
    assert (before.queries_total, after.queries_total, after.queries_per_start) == (1, 3, 3)
    assert before.batch_queries == after.batch_queries == 3
    assert after.seconds >= before.seconds > 0
    assert {path.name for path in tmp_path.iterdir()} == {"sl_r.json", "sl_r_model.safetensors"}
    assert len(nudged(Nudge(), tuned=False)[1]) == 1


def test_a_finished_training_is_not_repeated_on_resume(nudged: Callable[..., Any]) -> None:
    method = Nudge()
    _, first = nudged(method, tuned=True)
    _, again = nudged(method, tuned=True, resume=True)
    assert method.runs == 1
    assert [vars(each) | {"seconds": 0} for each in first] == [vars(each) | {"seconds": 0} for each in again]
    assert again[0].seconds == first[0].seconds
    nudged(method, tuned=True)
    assert method.runs == 2
