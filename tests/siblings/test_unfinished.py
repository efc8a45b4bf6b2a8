"""A training by a sibling method that was killed ends as an undisturbed one, and what is kept of it is checked."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.refusals import assert_refused
from metricopt_ext.errors import BudgetError, FileFormatError
from metricopt_ext.siblings import unfinished
from metricopt_ext.siblings.sibling import Trained
from metricopt_ext.siblings.sl.set_loss import SetLoss, UniversalTraining
from metricopt_ext.siblings.sl.surrogate_learning import SurrogateLearning
from metricopt_ext.siblings.training import TrainingTask
from metricopt_ext.siblings.unfinished import Unfinished, difference
from metricopt_ext.tasks.batch_metric import BatchMetric
from metricopt_ext.tasks.metric import Metric

METHOD = SurrogateLearning(
    "refined", iterations=6, model_lr=0.01, surrogate_lr=0.01, evals=3, universal=UniversalTraining(steps=12)
)
# Queries after which the next one is refused: in the universal stage, in Algorithm 1, in its last iteration.
KILLS = (1, 7, 12, 13, 25, 40, 71)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unfinished, "KEEP_EVERY", 0.0)


def killed(method: SurrogateLearning, task: TrainingTask, queries: int, file: Path) -> None:
    """Train until so many batch queries are spent."""
    task.batch_metric.ledger.budget = queries
    with pytest.raises(BudgetError):
        method.train(task, seed=3, unfinished=file)


def same(a: Trained, b: Trained) -> bool:
    weights = zip(a.model.state_dict().values(), b.model.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in weights) and all(
        getattr(a, name) == getattr(b, name) for name in ("history", "queries", "batch_queries", "trained")
    )


@pytest.mark.parametrize("trains", ["phi", "model"])
@pytest.mark.parametrize("surrogate", ["universal", "scratch", "refined"])
def test_a_killed_training_ends_as_an_undisturbed_one(
    surrogate: Any, trains: Any, training_task: Callable[..., TrainingTask], tmp_path: Path, always: None
) -> None:
    method = replace(METHOD, surrogate=surrogate)
    whole = method.train(training_task(trains), seed=3)
    spent = sum(whole.batch_queries.values())
    for queries in (n for n in KILLS if n < spent):
        file = tmp_path / f"{queries}.safetensors"
        killed(method, training_task(trains), queries, file)
        left = training_task(trains)
        again = method.train(left, seed=3, unfinished=file)
        assert same(again, whole), queries
        assert left.batch_metric.ledger.spent == spent
        assert left.metric.ledger.spent == METHOD.evals


def test_it_may_be_killed_several_times(
    training_task: Callable[..., TrainingTask], tmp_path: Path, always: None, calls: Any
) -> None:
    whole, file = METHOD.train(training_task(), seed=3), tmp_path / "left.safetensors"
    before = calls.batch_metric
    for queries in KILLS:
        killed(METHOD, training_task(), queries, file)
    assert same(METHOD.train(training_task(), seed=3, unfinished=file), whole)
    asked = sum(whole.batch_queries.values())
    assert asked <= calls.batch_metric - before <= asked + 10 * len(KILLS)  # at most an iteration is done again


def test_nothing_is_kept_without_a_file_or_before_a_minute(
    training_task: Callable[..., TrainingTask], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr(unfinished, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    kept: list[int] = []
    monkeypatch.setattr(unfinished, "write_tensors", lambda *args: kept.append(args[3]["step"]))
    task = training_task()
    for file in (None, tmp_path / "left.safetensors"):
        left = Unfinished(task, {}, file)
        for step in range(1, 121):
            left.keep("stage", step, {})
    assert kept == [60, 120]  # a second passes at each look at the clock


def test_the_seconds_of_both_parts_count(
    training_task: Callable[..., TrainingTask], tmp_path: Path, always: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, clock = tmp_path / "left.safetensors", iter(range(0, 10**9, 1000))
    with monkeypatch.context() as patched:
        patched.setattr(unfinished, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
        killed(METHOD, training_task(), 1, file)
    assert Unfinished(training_task(), METHOD.identity(training_task(), 3), file).seconds == 1000
    assert METHOD.train(training_task(), seed=3, unfinished=file).seconds > 1000


@pytest.mark.parametrize(
    ("settings", "seed", "trains"),
    [({"model_lr": 0.02}, 3, "model"), ({}, 4, "model"), ({}, 3, "phi"), ({"surrogate": "universal"}, 3, "model")],
)
def test_another_training_is_refused_before_any_query(
    settings: dict[str, Any],
    seed: int,
    trains: Any,
    training_task: Callable[..., TrainingTask],
    tmp_path: Path,
    always: None,
    calls: Any,
) -> None:
    file = tmp_path / "left.safetensors"
    killed(METHOD, training_task(), 1, file)
    asked = calls.batch_metric
    assert_refused(
        lambda: replace(METHOD, **settings).train(training_task(trains), seed=seed, unfinished=file),
        FileFormatError,
        "left.safetensors",
    )
    assert calls.batch_metric == asked


def changed(task: TrainingTask, what: str) -> TrainingTask:
    batch, judge = task.batch_metric, task.batch_metric.function
    draw = task.batches
    return {
        "name": lambda: replace(task, batch_metric=BatchMetric(judge, maximize=False, name="other")),
        "direction": lambda: replace(task, batch_metric=BatchMetric(judge, maximize=True, name=batch.name)),
        "costs": lambda: replace(task, batch_metric=BatchMetric(judge, maximize=False, name="mcr", arguments={"c": 2})),
        "the model's metric": lambda: replace(task, metric=Metric(lambda model: 0.5, maximize=True, name="mcr")),
        "labels": lambda: replace(task, predict=lambda model, batch: (model(batch[0]), 1 - batch[1])),
        "inputs": lambda: replace(task, batches=lambda *at: (draw(*at)[0] + 1, draw(*at)[1])),
        "batch size": lambda: replace(task, batches=lambda *at: tuple(part[:10] for part in draw(*at))),
    }[what]()


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("name", ("mcr", "other")),
        ("direction", ("False", "True")),
        ("costs", ("'c'", "2")),
        ("the model's metric", ("metric", "False", "True")),
        ("labels", ()),
        ("inputs", ()),
        ("batch size", ("batch",)),
    ],
)
def test_another_task_is_refused_before_any_query(
    what: str,
    names: tuple[str, ...],
    training_task: Callable[..., TrainingTask],
    tmp_path: Path,
    always: None,
    calls: Any,
) -> None:
    file = tmp_path / "left.safetensors"
    killed(METHOD, training_task(), 1, file)
    asked = calls.batch_metric
    assert_refused(
        lambda: METHOD.train(changed(training_task(), what), seed=3, unfinished=file), FileFormatError, *names
    )
    assert calls.batch_metric == asked


def test_another_loss_to_begin_with_is_refused(
    training_task: Callable[..., TrainingTask], tmp_path: Path, always: None
) -> None:
    file, (one, other) = tmp_path / "left.safetensors", (SetLoss(1, "mcr").double() for _ in range(2))
    killed(replace(METHOD, begin=one), training_task(), 12, file)
    assert_refused(
        lambda: replace(METHOD, begin=other).train(training_task(), seed=3, unfinished=file), FileFormatError, "begin"
    )


def test_a_larger_model_is_refused(training_task: Callable[..., TrainingTask], tmp_path: Path, always: None) -> None:
    file, method = tmp_path / "left.safetensors", replace(METHOD, surrogate="scratch")
    killed(method, training_task(), 12, file)
    assert_refused(
        lambda: method.train(training_task(outputs=2), seed=3, unfinished=file), FileFormatError, "alpha.mean", "(34,)"
    )


def test_what_was_spent_between() -> None:
    assert difference({"a": 3, "b": 2, "c": 1}, {"a": 1, "b": 2}) == {"a": 2, "c": 1}
