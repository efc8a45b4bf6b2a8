"""The logits and labels that a loss learned on logits takes, and that each sibling method refuses others at once."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.refusals import assert_named, assert_refused
from metricopt_ext.errors import DataError
from metricopt_ext.experiment.method import SIBLINGS
from metricopt_ext.siblings.ala.adaptive_losses import ClassCorrelation
from metricopt_ext.siblings.class_labels import class_labels
from metricopt_ext.siblings.reloss.ranked_batches import true_class_log_probability
from metricopt_ext.siblings.reloss.relational_loss import RelationalLoss
from metricopt_ext.siblings.sl.set_loss import SetLoss
from metricopt_ext.siblings.training import TrainingTask


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float32, torch.float64])
def test_whole_numbers_are_read_however_they_are_stored(dtype: torch.dtype) -> None:
    labels = torch.tensor([0, 2, 1, 2])
    found = class_labels(torch.zeros(4, 3), labels.to(dtype))
    assert found.dtype == torch.int64
    assert torch.equal(found, labels)
    assert class_labels(torch.zeros(2), torch.tensor([True, False])).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("scores", "labels", "names"),
    [
        (torch.zeros(2), torch.tensor([1, -1]), ("label", "-1", "2", "0..1")),
        (torch.zeros(2), torch.tensor([1, 2]), ("label", "2", "0..1")),
        (torch.zeros(2, 3), torch.tensor([0, 3]), ("label", "3", "0..2")),
        (torch.zeros(2, 3), torch.tensor([0, -1]), ("label", "-1", "0..2")),
        (torch.zeros(2), torch.tensor([0.5, 1.0]), ("label", "0.5", "0..1")),
        (torch.zeros(2), torch.tensor([torch.nan, 1.0]), ("label", "nan", "0..1")),
        (torch.zeros(2, 1), torch.tensor([0, 1]), ("(2, 1)", "squeeze(1)")),
        (torch.zeros(2, 3), torch.zeros(2, 3), ("(2, 3)", "argmax(1)")),
        (torch.zeros(2).long(), torch.tensor([0, 1]), ("torch.int64", "(2,)")),
    ],
)
def test_others_are_refused_with_the_value_and_the_remedy(
    scores: Tensor, labels: Tensor, names: tuple[str, ...]
) -> None:
    assert_refused(lambda: class_labels(scores, labels), DataError, *names)


@pytest.mark.parametrize("wrong", [-1, 2])
def test_each_learned_loss_refuses_them(wrong: int) -> None:
    labels = torch.tensor([0, 1, wrong])
    correlation = ClassCorrelation(2)
    for scores in (torch.zeros(3), torch.zeros(3, 2)):
        for call in (
            lambda x, y: correlation.loss(correlation.initial(), x, y),
            correlation.confusions,
            true_class_log_probability,
            RelationalLoss("mcr"),
            SetLoss(scores.dim(), "mcr"),
        ):
            with pytest.raises(DataError) as caught:
                call(scores, labels)
            assert_named(caught, "label", wrong, "0..1")


@pytest.mark.parametrize("name", ["sl_u", "sl_s", "sl_r", "reloss", "ala"])
@pytest.mark.parametrize("outputs", [1, 3])
def test_each_method_refuses_them_before_any_query(
    name: str, outputs: int, training_task: Callable[..., TrainingTask], calls: Any
) -> None:
    task = training_task("model", outputs)
    wrong: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
        "-1": lambda scores, labels: (scores, 2 * labels - 1),
        f"{max(2, outputs)}": lambda scores, labels: (scores, labels + 1),
        "squeeze(1)": lambda scores, labels: (scores.reshape(12, -1)[:, :1], labels),
    }
    for named, changed in wrong.items():
        with pytest.raises(DataError) as caught:
            SIBLINGS[name].train(replace(task, predict=lambda model, batch, of=changed: of(model(batch[0]), batch[1])))
        assert_named(caught, named)
    assert (calls.metric, calls.batch_metric) == (0, 0)
