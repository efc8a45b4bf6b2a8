"""Metrics of several labels against scikit-learn."""

import numpy as np
import pytest
import sklearn.metrics as skm
import torch
from torch import Tensor

from helpers.refusals import assert_refused
from metricopt_ext.classification.label_metrics import NAMES, label_metric
from metricopt_ext.errors import ConfigError, DataError

RNG = torch.Generator().manual_seed(0)
LOGITS = torch.randn(80, 4, generator=RNG)
LABELS = (torch.randn(80, 4, generator=RNG) + LOGITS > torch.tensor([0.0, 1, 2, -1])).long()


def value(name: str, logits: Tensor, labels: Tensor) -> float:
    return label_metric(name).function(logits, labels)


@pytest.mark.parametrize("average", ["micro", "macro", "samples"])
@pytest.mark.parametrize("beta", ["1", "2", "0.5"])
def test_f_beta_of_several_labels(average: str, beta: str) -> None:
    labels, logits = LABELS.clone(), LOGITS.clone()
    labels[:3], logits[:3] = 0, -1  # nothing there, nothing predicted
    expected = skm.fbeta_score(labels, logits > 0, beta=float(beta), average=average, zero_division=0)
    assert value(f"{average}_f{beta}", logits, labels) == pytest.approx(expected)


def test_other_metrics_of_several_labels() -> None:
    expected = skm.average_precision_score(LABELS, LOGITS, average="macro")
    assert value("map", LOGITS, LABELS) == pytest.approx(expected)
    without = LABELS.clone()
    without[:, 2] = 0
    each = [skm.average_precision_score(LABELS[:, i], LOGITS[:, i]) for i in (0, 1, 3)]
    assert value("map", LOGITS, without) == pytest.approx(np.mean(each))
    assert value("subset_accuracy", LOGITS, LABELS) == skm.accuracy_score(LABELS, LOGITS > 0)
    wrong = label_metric("hamming_loss")
    assert not wrong.maximize
    assert wrong.function(LOGITS, LABELS) == pytest.approx(skm.hamming_loss(LABELS, LOGITS > 0))


@pytest.mark.parametrize("name", ["accuracy", "macro_f0", "macro_f", "mean_iou"])
def test_another_metric_is_refused_with_the_names(name: str) -> None:
    assert_refused(lambda: label_metric(name), ConfigError, f"metric.name={name!r}", "data.kind=multilabel", NAMES)


def test_what_does_not_fit_together_is_refused() -> None:
    assert_refused(lambda: value("map", LOGITS[:, 0], LABELS), DataError, "80", "(80,)")
    some = LOGITS.index_fill(0, torch.tensor([3]), torch.nan)
    assert_refused(lambda: value("map", some, LABELS), DataError, "NaN", "1", "80")
    assert_refused(lambda: value("map", LOGITS, 2 * LABELS), DataError, "0", "1")
    assert_refused(lambda: value("map", LOGITS, 0 * LABELS), DataError, "0")
    assert_refused(lambda: value("map", LOGITS[:0], LABELS[:0]), DataError)
