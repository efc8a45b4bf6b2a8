"""A finished sibling method on disk."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.refusals import assert_refused
from metricopt_ext.errors import DataError, FileFormatError
from metricopt_ext.siblings.kept import keep, load_trained
from metricopt_ext.siblings.sibling import Trained
from metricopt_ext.siblings.sl.set_loss import load_set_loss
from metricopt_ext.siblings.sl.surrogate_learning import SurrogateLearning
from metricopt_ext.siblings.training import TrainingTask


def trained(task: TrainingTask) -> Trained:
    return SurrogateLearning("scratch", iterations=2, model_lr=0.01, evals=1).train(task)


@pytest.mark.parametrize("trains", ["phi", "model"])
def test_all_but_the_product_comes_back(
    trains: Any, training_task: Callable[..., TrainingTask], tmp_path: Path
) -> None:
    task = training_task(trains)
    result = trained(task)
    keep(result, tmp_path, "sl_s")
    again = load_trained(task.copied().model.train(), tmp_path, "sl_s")
    assert again is not None
    for name, tensor in result.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], tensor)
    assert not again.model.training
    assert (again.trained, again.queries, again.batch_queries) == (trains, result.queries, result.batch_queries)
    assert (again.seconds, again.history) == (result.seconds, result.history)
    assert again.product is None
    assert load_set_loss(tmp_path / "sl_s.safetensors").metric == "mcr"


def test_what_did_not_finish_is_not_there(training_task: Callable[..., TrainingTask], tmp_path: Path) -> None:
    task = training_task()
    assert load_trained(task.model, tmp_path, "sl_s") is None
    keep(trained(task), tmp_path, "sl_s")
    (tmp_path / "sl_s.json").unlink()
    assert load_trained(task.model, tmp_path, "sl_s") is None


def test_other_files_are_refused(training_task: Callable[..., TrainingTask], tmp_path: Path) -> None:
    task = training_task()
    keep(trained(task), tmp_path, "sl_s")
    assert_refused(lambda: load_trained(training_task(outputs=3).model, tmp_path, "sl_s"), DataError, "Net")
    content = json.loads((tmp_path / "sl_s.json").read_text())
    del content["seconds"]
    (tmp_path / "sl_s.json").write_text(json.dumps(content))
    assert_refused(lambda: load_trained(task.model, tmp_path, "sl_s"), FileFormatError, "sl_s.json")
