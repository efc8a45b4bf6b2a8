"""The contract that every registered sibling method keeps, whatever it does.

A new method joins by its entry in `METHODS` and one in `CASES`.
"""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers.refusals import assert_named, assert_refused
from metricopt_ext.errors import AdapterError, BudgetError, MetricError
from metricopt_ext.experiment.method import SIBLINGS
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.siblings.batch_metric import BatchMetric
from metricopt_ext.siblings.checkpoints import Checkpoints
from metricopt_ext.siblings.reloss.ranked_batches import BatchSource
from metricopt_ext.siblings.reloss.relational_loss import RelationalTraining
from metricopt_ext.siblings.sibling import Sibling, Trained
from metricopt_ext.siblings.sl.set_loss import UniversalTraining
from metricopt_ext.siblings.training import TRAINS, TrainingTask
from metricopt_ext.tasks.ledger import Ledger
from metricopt_ext.tasks.metric import Metric

# Three children: one query before, then two for each of four actions.
ALA = {"iterations": 12, "action_steps": 3, "reward_evals": 2, "children": 3, "validation_batches": 2, "model_lr": 0.05}
SL = {"iterations": 4, "model_lr": 0.01, "surrogate_lr": 0.01, "evals": 2, "universal": UniversalTraining(steps=5)}


@dataclass(frozen=True)
class Case:
    """How the contract runs a method.

    Attributes:
        settings: Settings under which it takes a moment.
        queries: What it then spends of the model's metric, by purpose.
        batch_queries: What it then spends of the batch's metric, by purpose.
        trains: What it can train.
        outputs: Numbers that the model it trains returns of an example.
    """

    settings: dict[str, Any]
    queries: dict[str, int]
    batch_queries: dict[str, int]
    trains: tuple[str, ...] = field(default=TRAINS)
    outputs: int = 1


RELOSS = {
    "steps": 4,
    "lr": 0.01,
    "evals": 2,
    "source": BatchSource(8, 4, checkpoints=Checkpoints(3, count=2)),
    "training": RelationalTraining(2, batches=4),
}
CASES = {
    "sl_u": Case(SL, {"history": 2}, {"universal": 5}),
    "sl_s": Case(SL, {"history": 2}, {"surrogate": 40}),
    "sl_r": Case(SL, {"history": 2}, {"universal": 5, "surrogate": 40}),
    "reloss": Case(RELOSS, {"history": 2}, {"reloss": 12}),
    "reloss_only": Case(RELOSS, {"history": 2}, {"reloss": 12}),
    "ala": Case(ALA, {"reward": 27}, {}),
    "ala_mixture": Case(ALA, {"reward": 27}, {}, outputs=3),
    "ala_focal": Case(ALA, {"reward": 27}, {}, outputs=3),
}

runs = [(name, trains) for name, case in CASES.items() for trains in case.trains]
every_run = pytest.mark.parametrize(("name", "trains"), runs)


def made(name: str, make: Callable[..., TrainingTask], trains: Any = "model") -> TrainingTask:
    return make(trains, CASES[name].outputs)


def small(name: str) -> Sibling:
    return replace(SIBLINGS[name], **CASES[name].settings)  # type: ignore[type-var]


REFUSED: dict[str, list[dict[str, Any]]] = {
    "sl_u": [{"surrogate": "refind"}, {"iterations": 0}, {"model_lr": 0.0}, {"iterations": 3, "evals": 4}],
    "reloss": [{"steps": 0}, {"lr": 0.0}, {"steps": 3, "evals": 4}],
    "ala": [{"loss": "triplet"}, {"lowest": 0.1}, {"iterations": 300}, {"reward_evals": 201}, {"gamma": 1.1}],
}
"""Settings that a method refuses for the last of them."""


def state(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def changed(before: dict[str, Tensor], model: nn.Module) -> set[str]:
    after = model.state_dict()
    assert after.keys() == before.keys()
    return {key for key in before if not torch.equal(before[key], after[key])}


def same(a: Trained, b: Trained) -> bool:
    return not changed(state(a.model), b.model) and a.history == b.history


class Listening(Callback):
    """Hears how far a method is."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def stage(self, description: str) -> None:
        self.told.append(description)


def test_every_registered_method_is_under_contract() -> None:
    assert list(CASES) == list(SIBLINGS)


@every_run
def test_it_trains_a_copy_and_counts_every_query(
    name: str, trains: Any, training_task: Callable[..., TrainingTask], calls: Any, tmp_path: Path
) -> None:
    task, case, listening = made(name, training_task, trains), CASES[name], Listening()
    task.metric.ledger.spend("earlier", 7)
    task.batch_metric.ledger.spend("surrogate", 3)
    task.model.train()
    modes = [module.training for module in task.model.modules()]
    flags = [parameter.requires_grad for parameter in task.model.parameters()]
    before = state(task.model)
    result = small(name).train(task, callback=listening)
    assert (result.queries, result.batch_queries) == (case.queries, case.batch_queries)
    assert (calls.metric, calls.batch_metric) == (sum(case.queries.values()), sum(case.batch_queries.values()))
    assert task.metric.ledger.spent == calls.metric + 7
    assert task.batch_metric.ledger.spent == calls.batch_metric + 3
    assert result.seconds > 0
    assert listening.told

    assert not changed(before, task.model)
    assert [module.training for module in task.model.modules()] == modes
    assert [parameter.requires_grad for parameter in task.model.parameters()] == flags
    assert all(parameter.grad is None for parameter in task.model.parameters())
    differs = changed(before, result.model)
    assert result.trained == trains
    assert not any(module.training for module in result.model.modules())
    if trains == "phi":
        assert differs == {"metricopt.phi"}
        assert result.phi is not None
        assert torch.equal(result.phi, result.model.state_dict()["metricopt.phi"])
    else:
        assert result.phi is None
        assert {key for key, _ in task.model.named_parameters()} <= differs
    assert len({p.untyped_storage().data_ptr() for p in result.model.parameters()}) == len(flags)
    copy.deepcopy(result.model)

    assert result.history
    for points in result.history.values():
        steps = [step for step, _ in points]
        assert steps == sorted(set(steps))
        assert all(isinstance(step, int) and np.isfinite(value) for step, value in points)
    if result.product is not None:
        result.product.save(tmp_path / "product.safetensors")
        assert (tmp_path / "product.safetensors").stat().st_size > 0


@every_run
def test_its_seed_alone_decides_and_the_global_streams_stay(
    name: str, trains: Any, training_task: Callable[..., TrainingTask]
) -> None:
    task, results = made(name, training_task, trains), []
    for seed, stream in ((3, 1), (3, 2), (4, 2)):
        torch.manual_seed(stream)
        np.random.seed(stream)
        random.seed(stream)
        before = torch.get_rng_state(), str(np.random.get_state()), random.getstate()
        results.append(small(name).train(task, seed=seed))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (str(np.random.get_state()), random.getstate()) == before[1:]
    assert same(results[0], results[1])
    assert not same(results[1], results[2])


@pytest.mark.parametrize(("name", "settings"), [(name, each) for name, all in REFUSED.items() for each in all])
def test_settings_that_a_user_can_not_mean_are_refused(name: str, settings: dict[str, Any]) -> None:
    assert_refused(lambda: replace(SIBLINGS[name], **settings), ValueError, *list(settings.items())[-1])


@pytest.mark.parametrize("name", CASES)
def test_half_precision_is_refused_where_adam_is_nan_in_it(
    name: str, training_task: Callable[..., TrainingTask], calls: Any
) -> None:
    task = made(name, training_task)
    half = replace(task, model=copy.deepcopy(task.model).half())
    method = replace(small(name), optimizer="adam") if name.startswith("ala") else small(name)  # type: ignore[type-var]
    assert_refused(lambda: method.train(half), AdapterError, "torch.float16", "torch.float32")
    assert (calls.metric, calls.batch_metric) == (0, 0)


@pytest.mark.parametrize("name", CASES)
def test_spent_budgets_and_failing_metrics_stop_it_and_leave_the_model(
    name: str, training_task: Callable[..., TrainingTask]
) -> None:
    task = made(name, training_task)
    before = state(task.model)

    def fails(*arguments: Any) -> float:
        raise OSError("the server is down")

    kinds: dict[str, tuple[Any, Any]] = {
        "metric": (
            Metric(lambda model: 0.5, maximize=False, ledger=Ledger(0)),
            Metric(lambda m: fails(), maximize=False),
        ),
        "batch_metric": (
            BatchMetric(lambda scores, labels: 0.5, maximize=False, ledger=Ledger(0)),
            BatchMetric(fails, maximize=False),
        ),
    }
    asked = {"metric": CASES[name].queries, "batch_metric": CASES[name].batch_queries}
    for kind in (kind for kind, queries in asked.items() if queries):
        with pytest.raises(BudgetError):
            small(name).train(replace(task, **{kind: kinds[kind][0]}))
        with pytest.raises(MetricError) as caught:
            small(name).train(replace(task, **{kind: kinds[kind][1]}))
        assert_named(caught, "the server is down")
    assert not changed(before, task.model)
