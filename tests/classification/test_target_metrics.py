"""Metrics of several labels, ranks and quantities against scikit-learn and SciPy."""

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics as skm
import torch
from torch import Tensor

from helpers.refusals import assert_named, assert_refused
from metricopt_ext.classification.metrics import METRICS
from metricopt_ext.classification.target_metrics import NAMES, check_rows, target_metric
from metricopt_ext.classification.targets import Target
from metricopt_ext.errors import ConfigError, DataError

RNG = torch.Generator().manual_seed(0)
LOGITS = torch.randn(80, 4, generator=RNG)
LABELS = (torch.randn(80, 4, generator=RNG) + LOGITS > torch.tensor([0.0, 1, 2, -1])).long()
RANKS = torch.randint(0, 5, (80,), generator=RNG)
CUT = LOGITS[:, :1] + RANKS[:, None] / 2 - torch.tensor([0.2, 0.7, 1.1, 1.9])
TRUE = torch.randn(80, dtype=torch.float64, generator=RNG)
PREDICTED = (TRUE + torch.randn(80, generator=RNG)).float()


def value(name: str, kind: str, logits: Tensor, labels: Tensor) -> float:
    return target_metric(name, kind).function(logits, labels)


@pytest.mark.parametrize("average", ["micro", "macro", "samples"])
@pytest.mark.parametrize("beta", ["1", "2", "0.5"])
def test_f_beta_of_several_labels(average: str, beta: str) -> None:
    labels, logits = LABELS.clone(), LOGITS.clone()
    labels[:3], logits[:3] = 0, -1  # nothing there, nothing predicted
    expected = skm.fbeta_score(labels, logits > 0, beta=float(beta), average=average, zero_division=0)
    assert value(f"{average}_f{beta}", "multilabel", logits, labels) == pytest.approx(expected)


def test_other_metrics_of_several_labels() -> None:
    expected = skm.average_precision_score(LABELS, LOGITS, average="macro")
    assert value("map", "multilabel", LOGITS, LABELS) == pytest.approx(expected)
    without = LABELS.clone()
    without[:, 2] = 0
    each = [skm.average_precision_score(LABELS[:, i], LOGITS[:, i]) for i in (0, 1, 3)]
    assert value("map", "multilabel", LOGITS, without) == pytest.approx(np.mean(each))
    assert value("subset_accuracy", "multilabel", LOGITS, LABELS) == skm.accuracy_score(LABELS, LOGITS > 0)
    wrong = target_metric("hamming_loss", "multilabel")
    assert not wrong.maximize
    assert wrong.function(LOGITS, LABELS) == pytest.approx(skm.hamming_loss(LABELS, LOGITS > 0))


@pytest.mark.parametrize("weights", ["linear", "quadratic"])
def test_kappa_of_ranks(weights: str) -> None:
    expected = skm.cohen_kappa_score(RANKS, (CUT > 0).sum(1), weights=weights)
    assert value(f"{weights}_kappa", "ordinal", CUT, RANKS) == pytest.approx(expected)
    same = torch.full((80, 4), 1.0)
    assert value(f"{weights}_kappa", "ordinal", same, torch.full((80,), 4)) == 0


def test_decisions_on_ranks_are_judged_as_on_classes() -> None:
    predicted = Target("ordinal", 5).decide(CUT)
    assert value("balanced_accuracy", "ordinal", CUT, RANKS) == pytest.approx(
        skm.balanced_accuracy_score(RANKS, predicted)
    )
    assert value("macro_f1", "ordinal", CUT, RANKS) == pytest.approx(skm.f1_score(RANKS, predicted, average="macro"))
    assert value("rank_error", "ordinal", CUT, RANKS) == pytest.approx(skm.mean_absolute_error(RANKS, predicted))
    assert target_metric("mcr", "ordinal").maximize == METRICS["mcr"].maximize


def test_metrics_of_quantities() -> None:
    true, predicted = TRUE.numpy(), PREDICTED.double().numpy()
    for quantile in (0.1, 0.9):
        expected = skm.mean_pinball_loss(true, predicted, alpha=quantile)
        assert value(f"pinball_{quantile}", "regression", PREDICTED, TRUE) == pytest.approx(expected)
    expected = {
        "mae": skm.mean_absolute_error(true, predicted),
        "rmse": skm.root_mean_squared_error(true, predicted),
        "r2": skm.r2_score(true, predicted),
        "spearman": scipy.stats.spearmanr(true, predicted).statistic,
        "kendall": scipy.stats.kendalltau(true, predicted).statistic,
        "pearson": np.corrcoef(true, predicted)[0, 1],
    }
    for name, reference in expected.items():
        for output in (PREDICTED, PREDICTED[:, None]):
            assert value(name, "regression", output, TRUE) == pytest.approx(reference, abs=1e-9)
    assert value("spearman", "regression", torch.zeros(80), TRUE) == 0
    assert [target_metric(name, "regression").maximize for name in expected] == [False, False, *[True] * 4]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("accuracy", "multilabel"), ("macro_f0", "multilabel"), ("macro_f", "multilabel"), ("auc", "ordinal")),
        *(("pinball_1.5", "regression"), ("pinball_0", "regression"), ("accuracy", "regression")),
    ],
)
def test_a_metric_of_another_kind_is_refused_with_the_names(name: str, kind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        target_metric(name, kind)
    assert f"metric.name={name!r} is none of data.kind={kind}: {NAMES[kind]}" in str(caught.value)


def test_what_does_not_fit_together_is_refused() -> None:
    assert_refused(lambda: check_rows(Target("ordinal", 4), LOGITS, RANKS), DataError, "outputs", "(80, 3)", "(80, 4)")
    assert_refused(
        lambda: value("map", "multilabel", LOGITS.index_fill(0, torch.tensor([3]), torch.nan), LABELS),
        DataError,
        "NaN",
        "1",
        "80",
    )
    assert_refused(lambda: value("map", "multilabel", LOGITS, 2 * LABELS), DataError, "0", "1")
    assert_refused(lambda: value("accuracy", "ordinal", CUT, RANKS + (RANKS == 4).long()), DataError, "0..4", "5")
    assert_refused(lambda: value("mae", "regression", PREDICTED[:0], TRUE[:0]), DataError)
    for name in ("r2", "pearson"):
        with pytest.raises(DataError) as caught:
            value(name, "regression", PREDICTED, torch.ones(80, dtype=torch.float64))
        assert_named(caught, name, "1")
    assert_refused(lambda: value("map", "multilabel", LOGITS, 0 * LABELS), DataError, "0")


@pytest.mark.parametrize("name", ["mae", "r2", "spearman", "kendall", "pearson", "pinball_0.9"])
def test_targets_that_are_no_column_of_numbers_are_refused(name: str) -> None:
    for wrong in (torch.nan, torch.inf):
        with pytest.raises(DataError) as caught:
            value(name, "regression", PREDICTED, TRUE.index_fill(0, torch.tensor([3]), wrong))
        assert_named(caught, "NaN", "1", "80")
    # not each with all
    assert_refused(lambda: value(name, "regression", PREDICTED, TRUE[:, None]), DataError, "(80,)", "(80, 1)")


def test_infinite_predictions_have_ranks_and_no_pearson() -> None:
    predicted = torch.tensor([torch.inf, 1.0, 2.0])
    assert value("spearman", "regression", predicted, torch.tensor([1.0, 2.0, 3.0])) == -0.5
    assert_refused(
        lambda: value("pearson", "regression", predicted, torch.tensor([1.0, 2.0, 3.0])),
        DataError,
        "pearson",
        "1",
        "inf",
    )
