"""Metrics of a classifier, against scikit-learn; functions of one's own as metrics."""

import functools
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as skm
import torch
import torchmetrics
import torchmetrics.functional as tmf
from hypothesis import strategies as st
from scipy.optimize import brentq
from torch import Tensor

from helpers.refusals import assert_named, assert_refused, having
from metricopt_ext.classification.callable_metric import from_callable
from metricopt_ext.classification.label_metrics import label_metric
from metricopt_ext.classification.metrics import METRICS, expected_cost
from metricopt_ext.errors import ConfigError, DataError, MetricError
from testers.metric import MetricTester, Rows, labelled_rows


class OfClasses(MetricTester):
    """A metric by its name, of one logit, of two, and of four classes."""

    name = ""
    widths: tuple[int, ...] = (0, 2, 4)

    def inputs(self, kind: str) -> st.SearchStrategy[Rows]:
        return st.sampled_from(self.widths).flatmap(
            lambda width: labelled_rows(kind, width=width, classes=max(2, width))
        )

    def ours(self, logits: Tensor, labels: Tensor) -> float:
        return METRICS[self.name].function(logits, labels)


class OfDecisions(OfClasses):
    """A metric of the classes that are predicted."""

    def of(self, labels: Any, predicted: Any, average: str) -> float:
        """Return scikit-learn's value; ``average`` is what it calls binary or macro."""
        raise NotImplementedError

    def reference(self, logits: Tensor, labels: Tensor) -> float:
        two = logits.ndim == 1 or logits.shape[1] == 2
        predicted = logits.numpy() > 0 if logits.ndim == 1 else logits.numpy().argmax(1)
        return float(self.of(labels.numpy(), predicted.astype(int), "binary" if two else "macro"))


class TestMisclassificationRate(OfDecisions):
    name = "mcr"
    of = staticmethod(lambda labels, predicted, _: skm.zero_one_loss(labels, predicted))


class TestAccuracy(OfDecisions):
    name = "accuracy"
    of = staticmethod(lambda labels, predicted, _: skm.accuracy_score(labels, predicted))


class TestRecall(OfDecisions):
    name, widths = "recall", (0, 2)
    of = staticmethod(lambda labels, predicted, _: skm.recall_score(labels, predicted, zero_division=0))


class TestPrecision(OfDecisions):
    name, widths = "precision", (0, 2)
    of = staticmethod(lambda labels, predicted, _: skm.precision_score(labels, predicted, zero_division=0))


class TestF1(OfDecisions):
    name = "f1"

    def of(self, labels: Any, predicted: Any, average: str) -> float:
        return skm.f1_score(labels, predicted, average=average, zero_division=0)


class TestMacroF1(OfDecisions):
    name = "macro_f1"

    def of(self, labels: Any, predicted: Any, average: str) -> float:
        return skm.f1_score(labels, predicted, average="macro", zero_division=0)


class TestJaccard(OfDecisions):
    name = "jaccard"

    def of(self, labels: Any, predicted: Any, average: str) -> float:
        return skm.jaccard_score(labels, predicted, average=average, zero_division=0)


class TestMeanIou(OfDecisions):
    name = "mean_iou"

    def of(self, labels: Any, predicted: Any, average: str) -> float:
        return skm.jaccard_score(labels, predicted, average="macro", zero_division=0)


class TestBalancedAccuracy(OfDecisions):
    name = "balanced_accuracy"
    of = staticmethod(lambda labels, predicted, _: skm.balanced_accuracy_score(labels, predicted))


class TestWorstRecall(OfDecisions):
    name = "worst_recall"

    def of(self, labels: Any, predicted: Any, average: str) -> float:
        return skm.recall_score(labels, predicted, average=None, labels=np.unique(labels)).min()


class TestMatthews(OfDecisions):
    name, bounds = "mcc", (-1.0, 1.0)
    of = staticmethod(lambda labels, predicted, _: skm.matthews_corrcoef(labels, predicted))


COSTS = np.array([[0.0, 5, 1, 2], [2, 0, 1, 3], [10, 4, -1, 1], [1, 1, 1, 0]])


class TestExpectedCost(OfDecisions):
    bounds, widths = (-1.0, 10.0), (4,)

    def ours(self, logits: Tensor, labels: Tensor) -> float:
        return expected_cost(COSTS).function(logits, labels)

    def of(self, labels: Any, predicted: Any, average: str) -> float:
        return float(np.mean([COSTS[true, said] for true, said in zip(labels, predicted, strict=True)]))


class TestTop5(OfClasses):
    name, widths = "top5_accuracy", (6, 8)

    def reference(self, logits: Tensor, labels: Tensor) -> float:
        """Of equal logits the first are at the top."""
        first = (-logits.numpy()).argsort(1, kind="stable")[:, :5]
        return float((first == labels.numpy()[:, None]).any(1).mean())


class OfOrder(OfClasses):
    """A metric of the order of the scores, of each class against the rest."""

    def of(self, positive: Any, scores: Any) -> float:
        raise NotImplementedError

    def least(self, positive: Any) -> bool:
        """Whether a value is defined."""
        return bool(positive.any() and not positive.all())

    def reference(self, logits: Tensor, labels: Tensor) -> float:
        if logits.ndim == 1 or logits.shape[1] == 2:
            odds = logits if logits.ndim == 1 else logits[:, 1].double() - logits[:, 0].double()
            positive = labels.numpy() == 1
            return self.of(positive, odds.numpy()) if self.least(positive) else np.nan
        scores, y = logits.double().log_softmax(1).numpy(), labels.numpy()
        values = [self.of(y == k, scores[:, k]) if self.least(y == k) else np.nan for k in np.unique(y)]
        return float(np.mean(values))


class TestAveragePrecision(OfOrder):
    name = "aucpr"

    def least(self, positive: Any) -> bool:
        return bool(positive.any())

    def of(self, positive: Any, scores: Any) -> float:
        return float(skm.average_precision_score(positive, scores))


class TestAreaUnderRoc(OfOrder):
    name = "auc"

    def of(self, positive: Any, scores: Any) -> float:
        return float(skm.roc_auc_score(positive, scores))


class TestEqualErrorRate(OfOrder):
    name = "eer"

    def of(self, positive: Any, scores: Any) -> float:
        """Where the ROC curve, joined by lines, crosses 1 - x."""
        fpr, tpr, _ = skm.roc_curve(positive, scores, drop_intermediate=False)
        return float(brentq(lambda x: 1 - x - np.interp(x, fpr, tpr), 0, 1, xtol=1e-14))


class OfLabels(MetricTester):
    """A metric of four labels each."""

    name = ""

    def inputs(self, kind: str) -> st.SearchStrategy[Rows]:
        return labelled_rows(kind, width=4, classes=16, of=lambda x, y, _: (x, y[:, None] >> torch.arange(4) & 1))

    def ours(self, logits: Tensor, labels: Tensor) -> float:
        return label_metric(self.name).function(logits, labels)

    def of(self, labels: Any, predicted: Any) -> float:
        raise NotImplementedError

    def reference(self, logits: Tensor, labels: Tensor) -> float:
        return float(self.of(labels.numpy(), (logits > 0).numpy().astype(int)))


class TestMicroF2OfLabels(OfLabels):
    name = "micro_f2"

    def of(self, labels: Any, predicted: Any) -> float:
        return skm.fbeta_score(labels, predicted, beta=2, average="micro", zero_division=0)


class TestMacroFHalfOfLabels(OfLabels):
    name = "macro_f0.5"

    def of(self, labels: Any, predicted: Any) -> float:
        return skm.fbeta_score(labels, predicted, beta=0.5, average="macro", zero_division=0)


class TestSamplesF1OfLabels(OfLabels):
    name = "samples_f1"

    def of(self, labels: Any, predicted: Any) -> float:
        return skm.f1_score(labels, predicted, average="samples", zero_division=0)


class TestSubsetAccuracy(OfLabels):
    name = "subset_accuracy"
    of = staticmethod(skm.accuracy_score)


class TestHammingLoss(OfLabels):
    name = "hamming_loss"
    of = staticmethod(skm.hamming_loss)


class TestMeanAveragePrecisionOfLabels(OfLabels):
    name = "map"

    def reference(self, logits: Tensor, labels: Tensor) -> float:
        """Of the labels that have an example."""
        y = labels.numpy()
        each = [skm.average_precision_score(y[:, k], logits.numpy()[:, k]) for k in range(4) if y[:, k].any()]
        return float(np.mean(each)) if each else np.nan


@pytest.mark.parametrize("name", METRICS)
def test_bounds_are_reached_by_the_perfect_and_the_worst(name: str) -> None:
    # The bounds of some take two classes, those of others many.
    classes = {"auc": 2, "eer": 2, "mcc": 2, "precision": 2, "recall": 2, "top5_accuracy": 9}.get(name, 3)
    labels = torch.tensor([0, 1, 2, 2]).clamp(max=classes - 1)
    right = 10.0 * torch.eye(classes)[labels]
    spec = METRICS[name]
    best, worst = spec.bounds[::-1] if spec.maximize else spec.bounds
    assert spec.function(right, labels) == best
    if name != "aucpr":  # at its lowest still above 0
        wrong = -right if name == "top5_accuracy" else right.roll(1, 1)
        assert spec.function(wrong, labels) == worst


@pytest.mark.parametrize(
    ("logits", "labels", "names"),
    [
        (torch.zeros(3, 3), torch.tensor([0, 1, 3]), ("0..2", "3")),
        (torch.zeros(3), torch.tensor([0, -1, 1]), ("-1",)),
        (torch.zeros(2, 1), torch.tensor([0, 1]), ("(2, 1)",)),
        (torch.zeros(2), torch.tensor([0.0, 1.0]), ("float32",)),
    ],
)
def test_bad_input_is_named(logits: Tensor, labels: Tensor, names: tuple[str, ...]) -> None:
    assert_refused(lambda: METRICS["f1"].function(logits, labels), DataError, *names)


@pytest.mark.parametrize("name", ["aucpr", "auc", "eer"])
def test_infinite_logits_have_an_order_or_are_refused(name: str) -> None:
    labels, inf = torch.tensor([1, 0, 1, 0]), torch.inf
    masked = torch.tensor([[0.0, 1.0, -inf], [2.0, -inf, 0.0], [0.0, 1.0, 0.5], [1.0, 0.0, 0.5]])
    expected = METRICS[name].function(masked.clamp(min=-1e6), labels)
    assert METRICS[name].function(masked, labels) == pytest.approx(expected)
    wrong = torch.tensor([[inf, inf], [0.0, 1.0]])
    assert_refused(lambda: METRICS[name].function(wrong, torch.tensor([0, 1])), DataError, name, "1", "2")


def test_what_is_no_metric_of_these_data_is_refused() -> None:
    assert_refused(lambda: METRICS["top5_accuracy"].function(torch.zeros(8, 5), torch.zeros(8).long()), DataError, "5")
    assert_refused(
        lambda: METRICS["recall"].function(torch.zeros(2, 3), torch.tensor([0, 1])), DataError, "recall", "3"
    )
    assert_refused(lambda: expected_cost([[0, 1, 2], [1, 0, 2]]), ValueError, "(2, 3)")
    assert_refused(lambda: expected_cost(COSTS).function(torch.zeros(2), torch.tensor([0, 1])), DataError, "4", "2")
    assert_refused(lambda: label_metric("mean_iou"), ConfigError, "metric.name='mean_iou'", "data.kind=multilabel")
    assert_refused(lambda: label_metric("map").function(torch.zeros(2, 3), 2 + torch.zeros(2, 3)), DataError, "0", "1")


def case(classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(300, classes, generator=rng), torch.randint(classes, (300,), generator=rng)


def test_from_callable_takes_scikit_learn() -> None:
    logits, labels = case(5)
    spec = from_callable(skm.cohen_kappa_score, maximize=True, bounds=(-1, 1))
    assert (spec.name, spec.bounds) == ("cohen_kappa_score", (-1, 1))
    assert spec.function(logits, labels) == skm.cohen_kappa_score(labels, logits.argmax(1))
    ovr = from_callable(functools.partial(skm.roc_auc_score, multi_class="ovr"), maximize=True, scores="probabilities")
    assert ovr.name == "roc_auc_score"
    expected = skm.roc_auc_score(labels, logits.double().softmax(1), multi_class="ovr")
    assert ovr.function(logits, labels) == pytest.approx(expected)


@pytest.mark.parametrize("scores", ["labels", "probabilities", "logits"])
def test_from_callable_takes_functions_that_work_in_place(scores: Any) -> None:
    def in_place(y: Any, p: Any) -> float:
        value = float(y.mean() + abs(p).mean())
        y[:], p[:] = 0, 0
        return value

    logits, labels = case(5)
    function = from_callable(in_place, maximize=True, bounds=(0, 100), scores=scores).function
    assert function(logits, labels) == function(logits, labels) > 0


def test_from_callable_gives_binary_functions_the_positive_class() -> None:
    pair, labels = case(2)
    probability = pair.double().softmax(1)[:, 1]
    brier = from_callable(skm.brier_score_loss, maximize=False, scores="probabilities")
    assert brier.function(pair, labels) == pytest.approx(skm.brier_score_loss(labels, probability))
    auc = from_callable(skm.roc_auc_score, maximize=True, scores="logits")
    assert auc.function(pair, labels) == pytest.approx(skm.roc_auc_score(labels, probability))


def test_from_callable_takes_torchmetrics_in_their_order() -> None:
    logits, labels = case(2)
    logits[:, 1] += 1  # recall and precision differ, so that swapped arguments show
    expected = skm.recall_score(labels, logits.argmax(1))
    functional = functools.partial(tmf.recall, task="binary")
    assert from_callable(functional, maximize=True).function(logits, labels) == pytest.approx(expected)
    assert from_callable(tmf.classification.binary_recall, maximize=True).name == "binary_recall"
    used = torchmetrics.classification.BinaryRecall()
    used.update(1 - labels, labels)
    spec = from_callable(used, maximize=True)
    assert spec.name == "BinaryRecall"
    assert spec.function(logits, labels) == pytest.approx(expected)
    flipped = skm.recall_score(labels, (-logits).argmax(1))
    assert spec.function(-logits, labels) == pytest.approx(flipped)  # nothing kept from earlier calls
    auc = from_callable(torchmetrics.classification.MulticlassAUROC(5), maximize=True, scores="logits")
    many, classes = case(5)
    assert auc.function(many, classes) == pytest.approx(
        skm.roc_auc_score(classes, many.double().softmax(1), multi_class="ovr"), abs=1e-5
    )


def test_from_callable_gives_columns_by_place_or_by_name() -> None:
    logits, labels = case(2)
    weight = np.random.default_rng(0).random(len(labels))
    expected = skm.f1_score(labels, logits.argmax(1), sample_weight=weight)
    by_name = from_callable(skm.f1_score, maximize=True, columns=["importance"])  # scikit-learn's sample_weight
    assert by_name.columns == ("importance",)
    assert by_name.function(logits, labels, weight) == pytest.approx(expected)
    by_place = from_callable(lambda y, p, w: skm.f1_score(y, p, sample_weight=w), maximize=True, columns=["any"])
    assert by_place.function(logits, labels, weight) == pytest.approx(expected)

    def two(y: Any, p: Any, *, b: Any, a: Any) -> float:
        return float((a - b).max())

    assert from_callable(two, maximize=True, columns=["a", "b"]).function(logits, labels, weight, 0 * weight) < 1
    for columns in (["importance", "region"], ["a"]):
        with pytest.raises(ValueError, match=having("called", "metric.columns")):
            from_callable(skm.f1_score if len(columns) == 2 else two, maximize=True, columns=columns)


def test_from_callable_forgives_rounding_but_nothing_else() -> None:
    logits, labels = case(2)
    assert from_callable(lambda y, p: 1 + 1e-7, maximize=True).function(logits, labels) == 1
    for result, names in ((1.5, ("bounds",)), (float("nan"), ("nan",)), ([1, 2], ())):
        spec = from_callable(lambda y, p, result=result: result, maximize=True, name="mine")
        with pytest.raises(MetricError) as caught:
            spec.function(logits, labels)
        assert_named(caught, "mine", *names)
