"""What sibling methods have in common: labels, the task, Adam, checkpoints, files, the metric that was learned."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.refusals import assert_named, assert_refused
from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.errors import AdapterError, ConfigError, DataError, FileFormatError, MetricError
from metricopt_ext.experiment.method import SIBLINGS
from metricopt_ext.siblings.batch_metric import BatchMetric
from metricopt_ext.siblings.checkpoints import Checkpoints
from metricopt_ext.siblings.class_labels import class_labels
from metricopt_ext.siblings.clipped_adam import ClippedAdam
from metricopt_ext.siblings.kept import keep, load_trained
from metricopt_ext.siblings.learned_metric import check_metric
from metricopt_ext.siblings.reloss.relational_loss import RelationalLoss, load_relational_loss
from metricopt_ext.siblings.sl.set_loss import SetLoss, UniversalTraining, load_set_loss
from metricopt_ext.siblings.sl.surrogate_learning import SurrogateLearning
from metricopt_ext.siblings.training import TrainingTask
from metricopt_ext.tasks.metric import Metric

Make = Callable[..., TrainingTask]


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


# --- Labels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32])
def test_whole_numbers_are_read_however_they_are_stored(dtype: torch.dtype) -> None:
    labels = torch.tensor([0, 2, 1, 2])
    found = class_labels(torch.zeros(4, 3), labels.to(dtype))
    assert found.dtype == torch.int64
    assert torch.equal(found, labels)
    assert class_labels(torch.zeros(2), torch.tensor([True, False])).tolist() == [1, 0]


@pytest.mark.parametrize("name", ["sl_s", "reloss", "ala"])
@pytest.mark.parametrize("outputs", [1, 3])
def test_each_method_refuses_other_labels_and_scores_before_any_query(
    name: str, outputs: int, training_task: Make, calls: Any
) -> None:
    task = training_task("model", outputs)
    wrong: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
        "-1": lambda scores, labels: (scores, 2 * labels - 1),
        f"{max(2, outputs)}": lambda scores, labels: (scores, labels + 1),
        "0.5": lambda scores, labels: (scores, labels / 2),
        "squeeze(1)": lambda scores, labels: (scores.reshape(12, -1)[:, :1], labels),
        "(12,)": lambda scores, labels: (scores[:5], labels),
    }
    for named, changed in wrong.items():
        with pytest.raises(DataError) as caught:
            SIBLINGS[name].train(replace(task, predict=lambda model, batch, of=changed: of(model(batch[0]), batch[1])))
        assert_named(caught, named)
    assert (calls.metric, calls.batch_metric) == (0, 0)


# --- The task ---------------------------------------------------------------------------------------------------


def of(task: Any, **settings: Any) -> TrainingTask:
    metric = BatchMetric(lambda scores, labels: 0.5, maximize=False)
    return TrainingTask.of(task, predict=lambda model, batch: (batch, batch), batch_metric=metric, **settings)


def test_it_is_a_copy_at_phi_0_or_one_without_an_adapter(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    task.adapter.set_phi(torch.ones(4, dtype=torch.float64))
    made = of(task)
    assert made.parameters() == [Adapter(made.model).phi]
    assert torch.equal(made.parameters()[0], torch.zeros(4, dtype=torch.float64))
    assert torch.equal(task.adapter.phi, torch.ones(4, dtype=torch.float64))
    whole = of(task, trains="model")
    assert dict(whole.model.named_parameters()).keys() == {"weight", "bias"}
    assert all(parameter.requires_grad for parameter in whole.parameters())
    assert Adapter(task.adapter.model).dim == 4  # its own is still there


def test_an_untrained_model_comes_from_its_seed(training_task: Make) -> None:
    task = training_task("phi")
    first, again, other = (task.untrained(seed).model.state_dict() for seed in (3, 3, 4))
    assert same(first, again)
    assert not torch.equal(first["head.weight"], other["head.weight"])
    assert task.untrained(3).trains == "model"


def test_what_can_not_be_trained_or_judged_is_refused(training_task: Make) -> None:
    task = training_task("model")
    assert_refused(lambda: replace(task, trains="theta"), ValueError, "trains", "theta", "phi", "model")
    assert_refused(lambda: replace(task, trains="phi"), AdapterError, "Net")
    known = Metric(lambda: 0.5, maximize=True, name="known")
    assert_refused(lambda: replace(task, metric=known), MetricError, "metric", "known")
    adapted = training_task("phi").model
    assert_refused(lambda: replace(task, model=adapted), AdapterError, "Net")


# --- Adam after clipping, and checkpoints of a training, against torch's own ----------------------------------------


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


@pytest.mark.parametrize("clip", [None, 1e-5, 0.3])
def test_steps_are_those_of_torch(clip: float | None) -> None:
    x = torch.randn(20, 5, 3, dtype=torch.float64)
    ours, theirs = network(), network()
    reference = torch.optim.Adam(theirs.parameters(), 0.01)
    with ClippedAdam(ours.parameters(), 0.01, clip) as optimizer:
        for batch in x:
            optimizer.step(ours(batch).square().mean())
            reference.zero_grad()
            theirs(batch).square().mean().backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(theirs.parameters(), clip)
            reference.step()
            for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert torch.allclose(a, b, rtol=0, atol=1e-12)
    assert not torch.equal(ours[0].weight, network()[0].weight)
    assert len({parameter.untyped_storage().data_ptr() for parameter in ours.parameters()}) == 4


@pytest.mark.parametrize("builds", [True, False])
def test_each_checkpoint_is_the_network_after_that_many_steps(builds: bool, training_task: Make) -> None:
    task = training_task("model", dropout=0.0)
    if not builds:
        task = replace(task, build=None)
    before, found = state(task.model), list[dict[str, Tensor]]()
    for model in Checkpoints(4, lr=0.02, count=3).models(task, 5):
        assert not any(module.training for module in model.modules())
        found.append(state(model))
    assert same(state(task.model), before)

    plain = task.build(5) if task.build else task.copied().model
    plain.train()
    optimizer = torch.optim.Adam(plain.parameters(), 0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=4)
    expected = [state(plain)]
    for step in range(4):
        optimizer.zero_grad()
        task.loss(plain, task.batches(5, 0, step)).backward()
        optimizer.step()
        schedule.step()
        if step in (0, 3):  # denser at first
            expected.append(state(plain))
    assert len(found) == 3
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


# --- On file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trains", ["phi", "model"])
def test_a_finished_method_comes_back_from_its_files(trains: Any, training_task: Make, tmp_path: Path) -> None:
    task = training_task(trains)
    assert load_trained(task.model, tmp_path, "sl_s") is None
    result = SurrogateLearning("scratch", iterations=2, model_lr=0.01, evals=1).train(task)
    keep(result, tmp_path, "sl_s")
    again = load_trained(task.copied().model.train(), tmp_path, "sl_s")
    assert again is not None
    assert same(state(result.model), state(again.model))
    assert not again.model.training
    assert (again.trained, again.queries, again.batch_queries) == (trains, result.queries, result.batch_queries)
    assert (again.seconds, again.history) == (result.seconds, result.history)
    assert load_set_loss(tmp_path / "sl_s.safetensors").metric == "mcr"
    assert_refused(lambda: load_trained(training_task(outputs=3).model, tmp_path, "sl_s"), DataError, "Net")
    content = json.loads((tmp_path / "sl_s.json").read_text())
    del content["seconds"]
    (tmp_path / "sl_s.json").write_text(json.dumps(content))
    assert_refused(lambda: load_trained(task.model, tmp_path, "sl_s"), FileFormatError, "sl_s.json")
    (tmp_path / "sl_s.json").unlink()  # it did not finish
    assert load_trained(task.model, tmp_path, "sl_s") is None


# --- The metric that a loss was learned for ---------------------------------------------------------------------------

COSTS: dict[str, Any] = {"costs": [[0.0, 1.0], [10.0, 0.0]], "prior": None}


def metric(**changes: Any) -> BatchMetric:
    given = {"maximize": False, "bounds": (0.0, 10.0), "name": "cost", "arguments": COSTS, **changes}
    return BatchMetric(lambda scores, labels: 0.5, **given)


@pytest.mark.parametrize(("kind", "load"), [(SetLoss, load_set_loss), (RelationalLoss, load_relational_loss)])
def test_a_loss_of_another_metric_is_refused_in_memory_and_from_a_file(kind: Any, load: Any, tmp_path: Path) -> None:
    learned = kind(metric="cost", identity=metric().identity)
    learned.save(tmp_path / "loss.safetensors")
    others: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"name": "other"}, ("cost", "other")),
        ({"maximize": True}, ("cost", "maximize", "False", "True")),
        ({"bounds": (0.0, 20.0)}, ("bounds", "0.0", "10.0", "20.0")),
        ({"arguments": {**COSTS, "costs": [[0, 10.0], [1, 0]]}}, ("10.0", "0.0", "1")),
    ]
    for each in (learned, load(tmp_path / "loss.safetensors")):
        check_metric("it stands for", each, metric())
        for changes, names in others:
            with pytest.raises(ConfigError) as caught:
                check_metric("it stands for", each, metric(**changes))
            assert_named(caught, *names)


def test_a_method_refuses_it_before_any_query(training_task: Make, calls: Any) -> None:
    task = training_task()
    settings: dict[str, Any] = {"iterations": 1, "model_lr": 0.01, "universal": UniversalTraining(3)}
    begin, asked = SurrogateLearning("universal", **settings).train(task).product, calls.batch_metric
    turned = replace(task, batch_metric=BatchMetric(task.batch_metric.function, maximize=True, name="mcr"))
    again = SurrogateLearning("universal", **settings, begin=begin)  # type: ignore[arg-type]
    assert_refused(lambda: again.train(turned), ConfigError, "mcr", "maximize", "False", "True")
    assert calls.batch_metric == asked
    again.train(task)
