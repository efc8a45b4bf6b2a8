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
from metricopt_ext.errors import AdapterError, BudgetError, DataError, MetricError
from metricopt_ext.experiment.method import SIBLINGS
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.siblings.checkpoints import Checkpoints
from metricopt_ext.siblings.reloss.ranked_batches import BatchSource
from metricopt_ext.siblings.reloss.relational_loss import RelationalTraining
from metricopt_ext.siblings.sibling import Sibling, Trained
from metricopt_ext.siblings.sl.set_loss import UniversalTraining
from metricopt_ext.siblings.training import TRAINS, TrainingTask
from metricopt_ext.tasks.batch_metric import BatchMetric
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
        refused: Settings that it refuses for the last of them.
        trains: What it can train.
        outputs: Numbers that the model it trains returns of an example.
    """

    settings: dict[str, Any]
    queries: dict[str, int]
    batch_queries: dict[str, int]
    refused: list[dict[str, Any]]
    trains: tuple[str, ...] = field(default=TRAINS)
    outputs: int = 1


SL_REFUSED = [
    {"surrogate": "refind"},
    {"iterations": 0},
    {"model_steps": 0},
    {"surrogate_steps": 0.5},
    {"model_lr": 0.0},
    {"surrogate_lr": -1.0},
    {"clip": 0.0},
    {"iterations": 3, "evals": 4},
]
RELOSS = {
    "steps": 4,
    "lr": 0.01,
    "evals": 2,
    "source": BatchSource(8, 4, checkpoints=Checkpoints(3, count=2)),
    "training": RelationalTraining(2, batches=4),
}
RELOSS_REFUSED = [
    {"steps": 0},
    {"records": 0},
    {"lr": 0.0},
    {"steps": 3, "evals": 4},
]
ALA_REFUSED = [
    {"loss": "triplet"},
    {"optimizer": "rmsprop"},
    {"lowest": 0.1},
    {"lowest": -1.1},
    {"link": "log"},
    {"iterations": 300},
    {"reward_evals": 201},
    {"reward_evals": 0},
    {"children": 0},
    {"gamma": 1.1},
    {"gamma": 0},
    {"beta": -0.1},
    {"decay": 1.0},
    {"momentum": 1.0},
    {"memory": 0},
    {"validation_batches": 0},
    {"policy_lr": -1.0},
    {"model_lr": 0.0},
    {"offset": 0.0},
    {"learn": False},
]
CASES = {
    "sl_u": Case(SL, {"history": 2}, {"universal": 5}, SL_REFUSED),
    "sl_s": Case(SL, {"history": 2}, {"surrogate": 40}, SL_REFUSED),
    "sl_r": Case(SL, {"history": 2}, {"universal": 5, "surrogate": 40}, SL_REFUSED),
    "reloss": Case(RELOSS, {"history": 2}, {"reloss": 12}, RELOSS_REFUSED),
    "reloss_only": Case(RELOSS, {"history": 2}, {"reloss": 12}, RELOSS_REFUSED),
    "ala": Case(ALA, {"reward": 27}, {}, ALA_REFUSED),
    "ala_mixture": Case(ALA, {"reward": 27}, {}, ALA_REFUSED, outputs=3),
    "ala_focal": Case(ALA, {"reward": 27}, {}, ALA_REFUSED, outputs=3),
}

runs = [(name, trains) for name, case in CASES.items() for trains in case.trains]
every_run = pytest.mark.parametrize(("name", "trains"), runs)


def made(name: str, make: Callable[..., TrainingTask], trains: Any = "model") -> TrainingTask:
    return make(trains, CASES[name].outputs)


def small(name: str) -> Sibling:
    return replace(SIBLINGS[name], **CASES[name].settings)  # type: ignore[type-var]


def state(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def changed(before: dict[str, Tensor], model: nn.Module) -> set[str]:
    after = model.state_dict()
    assert after.keys() == before.keys()
    return {key for key in before if not torch.equal(before[key], after[key])}


def same(a: Trained, b: Trained) -> bool:
    return not changed(state(a.model), b.model) and a.history == b.history


def test_every_registered_method_is_under_contract() -> None:
    assert list(CASES) == list(SIBLINGS)


@every_run
def test_it_counts_every_query_of_both_kinds_by_purpose(
    name: str, trains: Any, training_task: Callable[..., TrainingTask], calls: Any
) -> None:
    task, case = made(name, training_task, trains), CASES[name]
    task.metric.ledger.spend("earlier", 7)
    task.batch_metric.ledger.spend("surrogate", 3)
    result = small(name).train(task)
    assert (result.queries, result.batch_queries) == (case.queries, case.batch_queries)
    assert (calls.metric, calls.batch_metric) == (sum(case.queries.values()), sum(case.batch_queries.values()))
    assert task.metric.ledger.spent == calls.metric + 7
    assert task.batch_metric.ledger.spent == calls.batch_metric + 3
    assert result.seconds > 0


@every_run
def test_it_trains_a_copy_and_what_it_says_alone(
    name: str, trains: Any, training_task: Callable[..., TrainingTask]
) -> None:
    task = made(name, training_task, trains)
    task.model.train()
    modes = [module.training for module in task.model.modules()]
    flags = [parameter.requires_grad for parameter in task.model.parameters()]
    before = state(task.model)
    result = small(name).train(task)
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


@every_run
def test_it_repeats_itself_for_a_seed_and_no_other(
    name: str, trains: Any, training_task: Callable[..., TrainingTask]
) -> None:
    first, again, other = (small(name).train(made(name, training_task, trains), seed=seed) for seed in (3, 3, 4))
    assert same(first, again)
    assert not same(first, other)


@every_run
def test_it_neither_touches_the_global_streams_nor_depends_on_them(
    name: str, trains: Any, training_task: Callable[..., TrainingTask]
) -> None:
    task, results = made(name, training_task, trains), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        before = torch.get_rng_state(), str(np.random.get_state()), random.getstate()
        results.append(small(name).train(task))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (str(np.random.get_state()), random.getstate()) == before[1:]
    assert same(*results)


@pytest.mark.parametrize("name", CASES)
def test_its_history_can_be_plotted(name: str, training_task: Callable[..., TrainingTask]) -> None:
    history = small(name).train(made(name, training_task)).history
    assert history
    for points in history.values():
        steps = [step for step, _ in points]
        assert steps == sorted(set(steps))
        assert all(isinstance(step, int) and np.isfinite(value) for step, value in points)


@pytest.mark.parametrize("name", CASES)
def test_it_tells_how_far_it_is(name: str, training_task: Callable[..., TrainingTask]) -> None:
    told = []

    class Listening(Callback):
        def stage(self, description: str) -> None:
            told.append(description)

    small(name).train(made(name, training_task), callback=Listening())
    assert told


@pytest.mark.parametrize("name", CASES)
def test_what_it_learned_besides_can_be_saved(
    name: str, training_task: Callable[..., TrainingTask], tmp_path: Path
) -> None:
    product = small(name).train(made(name, training_task)).product
    if product is not None:
        product.save(tmp_path / "product.safetensors")
        assert (tmp_path / "product.safetensors").stat().st_size > 0


@pytest.mark.parametrize(("name", "settings"), [(n, each) for n, c in CASES.items() for each in c.refused])
def test_bad_settings_are_refused(name: str, settings: dict[str, Any]) -> None:
    assert_refused(lambda: replace(SIBLINGS[name], **settings), ValueError, *list(settings.items())[-1])


@pytest.mark.parametrize("name", CASES)
def test_a_bad_seed_is_refused_before_any_work(
    name: str, training_task: Callable[..., TrainingTask], calls: Any
) -> None:
    assert_refused(lambda: small(name).train(made(name, training_task), seed=-1), ValueError, "seed", "-1", "0")
    assert (calls.metric, calls.batch_metric) == (0, 0)


@pytest.mark.parametrize("name", CASES)
def test_scores_that_are_nan_before_any_step_are_not_laid_to_the_rates(
    name: str, training_task: Callable[..., TrainingTask]
) -> None:
    task = made(name, training_task)
    draw = task.batches

    def spoilt(seed: int, index: int, step: int) -> Any:
        x, y = draw(seed, index, step)
        if (seed, index, step) != (0, 0, 0):  # which `check` has seen
            x = torch.cat([x[:-1], torch.full_like(x[-1:], torch.nan)])
        return x, y

    assert_refused(
        lambda: small(name).train(replace(task, batches=spoilt), seed=1), DataError, "NaN", "12", "torch.float64"
    )


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
def test_it_trains_in_bfloat16(name: str, training_task: Callable[..., TrainingTask]) -> None:
    task = made(name, training_task)
    cast = replace(
        task,
        model=copy.deepcopy(task.model).bfloat16(),
        predict=lambda model, batch: (model(batch[0].bfloat16()), batch[1]),
        metric=Metric(lambda model: 0.5, maximize=False),
        loss=lambda model, batch: model(batch[0].bfloat16()).square().mean(),
        build=None,
    )
    history = small(name).train(cast).history
    assert all(np.isfinite(value) for points in history.values() for _, value in points)


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
