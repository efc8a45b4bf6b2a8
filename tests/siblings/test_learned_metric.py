"""A loss that was learned for another metric is refused, whatever the metrics are called."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.refusals import assert_named, assert_refused
from metricopt_ext.errors import ConfigError, FileFormatError
from metricopt_ext.siblings.learned_metric import check_metric
from metricopt_ext.siblings.reloss.relational_loss import FILE_FORMAT as RELATIONAL
from metricopt_ext.siblings.reloss.relational_loss import RelationalLoss, load_relational_loss
from metricopt_ext.siblings.reloss.reloss import ReLoss
from metricopt_ext.siblings.sl.set_loss import FILE_FORMAT as SET
from metricopt_ext.siblings.sl.set_loss import SetLoss, UniversalTraining, load_set_loss
from metricopt_ext.siblings.sl.surrogate_learning import SurrogateLearning
from metricopt_ext.siblings.training import TrainingTask
from metricopt_ext.tasks.batch_metric import BatchMetric
from metricopt_ext.utils.files import write_tensors

COSTS: dict[str, Any] = {"costs": [[0.0, 1.0], [10.0, 0.0]], "prior": None}


def metric(**changes: Any) -> BatchMetric:
    given = {"maximize": False, "bounds": (0.0, 10.0), "name": "cost", "arguments": COSTS, **changes}
    return BatchMetric(lambda scores, labels: 0.5, **given)


@pytest.mark.parametrize("kind", [SetLoss, RelationalLoss])
@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"name": "other"}, ("cost", "other")),
        ({"maximize": True}, ("cost", "maximize", "False", "True")),
        ({"bounds": (0.0, 20.0)}, ("bounds", "0.0", "10.0", "20.0")),
        ({"arguments": {**COSTS, "costs": [[0, 10.0], [1, 0]]}}, ("10.0", "0.0", "1")),
        ({"arguments": {}}, ("arguments", "10.0")),
    ],
)
def test_another_metric_is_refused_in_memory_and_from_a_file(
    kind: Any, changes: dict[str, Any], names: tuple[str, ...], tmp_path: Path
) -> None:
    learned = kind(metric="cost", identity=metric().identity)
    learned.save(tmp_path / "loss.safetensors")
    load = load_set_loss if kind is SetLoss else load_relational_loss
    for each in (learned, load(tmp_path / "loss.safetensors")):
        assert json.loads(json.dumps(each.identity)) == metric().identity
        check_metric("it stands for", each, metric())
        with pytest.raises(ConfigError) as caught:
            check_metric("it stands for", each, metric(**changes))
        assert_named(caught, *names)


def test_without_an_identity_it_is_known_by_its_metrics_name(tmp_path: Path) -> None:
    set_loss, relational = SetLoss(1, "cost"), RelationalLoss("cost")
    losses: dict[str, tuple[Any, str, dict[str, Any], Any]] = {
        "set": (set_loss, SET, {"outputs": 1, "metric": "cost", "network": "published"}, load_set_loss),
        "relational": (relational, RELATIONAL, {"metric": "cost", "absolute": False}, load_relational_loss),
    }
    for name, (loss, kind, described, load) in losses.items():
        loss.save(tmp_path / name)
        found = load(tmp_path / name)
        assert found.identity is None
        check_metric("it stands for", found, metric(maximize=True))
        with pytest.raises(ConfigError) as caught:
            check_metric("it stands for", found, metric(name="other"))
        assert_named(caught, "cost", "other")
        write_tensors(tmp_path / name, loss.state_dict(), kind, {**described, "identity": 3})
        with pytest.raises(FileFormatError) as caught:
            load(tmp_path / name)
        assert_named(caught, "identity", "3")


def test_a_method_refuses_it_before_any_query(
    training_task: Callable[..., TrainingTask], calls: Any, tmp_path: Path
) -> None:
    task = training_task()
    settings: dict[str, Any] = {"iterations": 1, "model_lr": 0.01, "universal": UniversalTraining(3)}
    product = SurrogateLearning("universal", **settings).train(task).product
    assert product is not None
    product.save(tmp_path / "sl_u.safetensors")
    begin, asked = load_set_loss(tmp_path / "sl_u.safetensors").double(), calls.batch_metric
    judge = task.batch_metric.function
    turned = replace(task, batch_metric=BatchMetric(judge, maximize=True, name=task.batch_metric.name))
    assert_refused(
        lambda: SurrogateLearning("universal", **settings, begin=begin).train(turned),
        ConfigError,
        "mcr",
        "maximize",
        "False",
        "True",
    )
    ranked = RelationalLoss("mcr", identity=task.batch_metric.identity).double()
    assert_refused(lambda: ReLoss(begin=ranked).train(turned), ConfigError, "mcr", "maximize", "False", "True")
    assert calls.batch_metric == asked
    SurrogateLearning("universal", **settings, begin=begin).train(task)
