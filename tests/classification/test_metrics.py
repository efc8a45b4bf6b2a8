"""Metrics of a classifier, against scikit-learn and torchmetrics."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as skm
import torch
import torchmetrics
import torchmetrics.functional as tmf
from scipy.optimize import brentq
from torch import Tensor

from helpers.refusals import assert_named, assert_refused, having
from metricopt_ext.classification.callable_metric import from_callable
from metricopt_ext.classification.metrics import METRICS, check_split, expected_cost
from metricopt_ext.errors import DataError, MetricError


def _f1(y: Any, p: Any, binary: bool) -> Any:
    return skm.f1_score(y, p, average="binary" if binary else "macro", zero_division=0)


def _jaccard(y: Any, p: Any, binary: bool) -> Any:
    return skm.jaccard_score(y, p, average="binary" if binary else "macro", zero_division=0)


def _recalls(y: Any, p: Any) -> Any:
    return skm.recall_score(y, p, average=None, labels=np.unique(y))


REFERENCES: dict[str, Callable[[Any, Any, bool], Any]] = {
    "mcr": lambda y, p, _: skm.zero_one_loss(y, p),
    "accuracy": lambda y, p, _: skm.accuracy_score(y, p),
    "f1": _f1,
    "jaccard": _jaccard,
    "balanced_accuracy": lambda y, p, _: skm.balanced_accuracy_score(y, p),
    "mcc": lambda y, p, _: skm.matthews_corrcoef(y, p),
    "macro_f1": lambda y, p, _: _f1(y, p, False),
    "mean_iou": lambda y, p, _: _jaccard(y, p, False),
    "worst_recall": lambda y, p, _: _recalls(y, p).min(),
}


def _case(kind: str, seed: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    classes = 2 if kind.startswith("binary") else 5
    shape = (300,) if "one logit" in kind else (300, classes)
    logits = torch.randn(shape, generator=rng)
    labels = torch.randint(classes, (300,), generator=rng)
    if "ties" in kind:
        logits = (logits * 2).round()
    if "absent" in kind:
        labels[labels == 2] = 3
        logits[:, 1] -= 50  # class 1 never predicted, class 2 never true
    if "unused" in kind:
        labels[labels == 2] = 3
        logits[:, 2] -= 50
    if "single" in kind:
        labels[:] = 1
    if "all one" in kind:
        logits[..., -1] = 50
    if "rare" in kind:
        labels = (torch.rand(300, generator=rng) < 0.02).long()
    return logits, labels


KINDS = [
    "binary",
    "binary one logit",
    "binary rare",
    "binary ties",
    "binary one logit ties",
    "binary all one",
    "multi",
    "multi ties",
    "multi absent",
    "multi unused",
    "multi all one",
]


@pytest.mark.parametrize("kind", [*KINDS, "binary single", "multi single"])
@pytest.mark.parametrize("name", REFERENCES)
def test_decisions_agree_with_scikit_learn(name: str, kind: str) -> None:
    for seed in range(3):
        logits, labels = _case(kind, seed)
        decisions = (logits > 0).long() if logits.ndim == 1 else torch.from_numpy(logits.numpy().argmax(1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # classes predicted but never true
            expected = REFERENCES[name](labels.numpy(), decisions.numpy(), logits.ndim == 1 or logits.shape[1] == 2)
        assert METRICS[name].function(logits, labels) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_top5_accuracy_agrees_with_scikit_learn(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits, labels = torch.randn(300, 9, generator=rng), torch.randint(9, (300,), generator=rng)
    expected = skm.top_k_accuracy_score(labels, logits, k=5, labels=range(9))
    assert METRICS["top5_accuracy"].function(logits, labels) == pytest.approx(expected, abs=1e-12)


def test_of_equal_logits_the_first_five_are_at_the_top() -> None:
    value = METRICS["top5_accuracy"].function(torch.zeros(8, 8), torch.arange(8))
    assert value == 5 / 8
    assert_refused(lambda: METRICS["top5_accuracy"].function(torch.zeros(8, 5), torch.arange(8) % 5), DataError, "5")


@pytest.mark.parametrize("kind", KINDS)
def test_aucpr_agrees_with_scikit_learn(kind: str) -> None:
    for seed in range(3):
        logits, labels = _case(kind, seed)
        if logits.ndim == 2 and logits.shape[1] > 2:
            scores = logits.double().log_softmax(1).numpy()
            present = np.unique(labels)
            expected = np.mean([skm.average_precision_score(labels.numpy() == k, scores[:, k]) for k in present])
        else:
            margin = logits if logits.ndim == 1 else logits[:, 1] - logits[:, 0]
            expected = skm.average_precision_score(labels.numpy(), margin.numpy())
        assert METRICS["aucpr"].function(logits, labels) == pytest.approx(expected, abs=1e-6)


def _equal_error_rate(y: Any, scores: Any) -> float:
    """Where the ROC curve of scikit-learn, joined by lines, crosses 1 - x."""
    fpr, tpr, _ = skm.roc_curve(y, scores, drop_intermediate=False)
    return float(brentq(lambda x: 1 - x - np.interp(x, fpr, tpr), 0, 1, xtol=1e-14))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "reference"), [("auc", skm.roc_auc_score), ("eer", _equal_error_rate)])
def test_values_of_the_roc_curve_agree_with_scikit_learn(name: str, reference: Any, kind: str) -> None:
    for seed in range(3):
        logits, labels = _case(kind, seed)
        if logits.ndim == 2 and logits.shape[1] > 2:
            scores = logits.double().log_softmax(1).numpy()
            expected = np.mean([reference(labels.numpy() == k, scores[:, k]) for k in np.unique(labels)])
        else:
            margin = logits.double() if logits.ndim == 1 else logits[:, 1].double() - logits[:, 0].double()
            expected = reference(labels.numpy(), margin.numpy())
        assert METRICS[name].function(logits, labels) == pytest.approx(expected, abs=1e-9)


def test_the_equal_error_rate_by_hand() -> None:
    eer = METRICS["eer"].function
    labels = torch.tensor([1, 1, 0, 1, 0, 0])
    assert eer(torch.tensor([6.0, 5, 4, 3, 2, 1]), labels) == pytest.approx(1 / 3, abs=1e-12)  # at a threshold
    assert eer(torch.zeros(6), labels) == pytest.approx(0.5, abs=1e-12)  # all tied: the middle of the diagonal
    assert eer(torch.tensor([3.0, 2, 1, 2, 1, 0]), labels) == 0


@pytest.mark.parametrize("name", ["auc", "eer"])
def test_a_roc_curve_needs_two_classes(name: str) -> None:
    assert_refused(lambda: METRICS[name].function(torch.randn(4, 3), torch.full((4,), 2)), DataError, name, "2")


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("f1", functools.partial(tmf.f1_score, task="multiclass", num_classes=5, average="macro")),
        ("jaccard", functools.partial(tmf.jaccard_index, task="multiclass", num_classes=5)),
        ("aucpr", functools.partial(tmf.average_precision, task="multiclass", num_classes=5)),
    ],
)
@pytest.mark.parametrize("kind", ["multi", "multi absent", "multi unused"])
def test_agrees_with_torchmetrics(name: str, reference: Callable[..., Tensor], kind: str) -> None:
    logits, labels = _case(kind, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # average precision of an absent class
        expected = float(reference(logits.double(), labels))
    assert METRICS[name].function(logits, labels) == pytest.approx(expected, abs=1e-5)


def test_aucpr_of_constant_scores_is_the_share_of_positives() -> None:
    assert METRICS["aucpr"].function(torch.zeros(4), torch.tensor([1, 0, 0, 0])) == 0.25


@pytest.mark.parametrize("name", [name for name in METRICS if name != "top5_accuracy"])
def test_one_logit_equals_two(name: str) -> None:
    logit, labels = _case("binary one logit", 1)
    pair = torch.stack([torch.full_like(logit, 3), logit + 3], 1).double()
    assert METRICS[name].function(logit, labels) == pytest.approx(METRICS[name].function(pair, labels), abs=1e-6)


@pytest.mark.parametrize("name", METRICS)
def test_bounds_are_reached_by_the_perfect_and_the_worst(name: str) -> None:
    # The bounds of some take two classes, those of others many.
    classes = {"auc": 2, "eer": 2, "mcc": 2, "top5_accuracy": 9}.get(name, 3)
    labels = torch.tensor([0, 1, 2, 2]).clamp(max=classes - 1)
    right = 10.0 * torch.eye(classes)[labels]
    spec = METRICS[name]
    best, worst = spec.bounds[::-1] if spec.maximize else spec.bounds
    assert spec.function(right, labels) == best
    if name != "aucpr":  # at its lowest still above 0
        wrong = -right if name == "top5_accuracy" else right.roll(1, 1)
        assert spec.function(wrong, labels) == worst


def test_metrics_ignore_gradients_and_half_precision() -> None:
    logits, labels = _case("multi", 0)
    logits = torch.cat([logits, logits.roll(1, 0)], 1)
    for spec in METRICS.values():
        half = logits.bfloat16()
        assert spec.function(half.requires_grad_(), labels) == spec.function(half.detach().float(), labels)


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize(
    ("logits", "labels", "names"),
    [
        (torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), ()),
        (torch.zeros(4, 3), torch.tensor([0, 1, 2]), ("4", "3")),
        (torch.zeros(3, 3), torch.tensor([0, 1, 3]), ("0..2", "3")),
        (torch.zeros(3), torch.tensor([0, 1, 2]), ("0..1", "2")),
        (torch.zeros(3), torch.tensor([0, -1, 1]), ("-1",)),
        (torch.tensor([[0.0, 1], [float("nan"), 0]]), torch.tensor([0, 1]), ("NaN", "1", "2")),
        (torch.zeros(2, 1), torch.tensor([0, 1]), ("(2, 1)",)),
        (torch.zeros(2, 2, 2), torch.tensor([0, 1]), ("(2, 2, 2)",)),
        (torch.zeros(2, dtype=torch.int64), torch.tensor([0, 1]), ()),
        (torch.zeros(2), torch.tensor([0.0, 1.0]), ()),
    ],
)
def test_bad_input_is_named(name: str, logits: Tensor, labels: Tensor, names: tuple[str, ...]) -> None:
    assert_refused(lambda: METRICS[name].function(logits, labels), DataError, *names)


@pytest.mark.parametrize("name", ["aucpr", "auc", "eer"])
def test_infinite_logits_have_an_order_or_are_refused(name: str) -> None:
    labels, inf = torch.tensor([1, 0, 1, 0]), torch.inf
    logits = torch.tensor([3.0, -2.0, 0.5, -0.5])
    finite = METRICS[name].function(logits, labels)
    assert METRICS[name].function(torch.where(logits.abs() > 1, logits * inf, logits), labels) == finite
    masked = torch.tensor([[0.0, 1.0, -inf], [2.0, -inf, 0.0], [0.0, 1.0, 0.5], [1.0, 0.0, 0.5]])
    expected = METRICS[name].function(masked.clamp(min=-1e6), labels)
    assert METRICS[name].function(masked, labels) == pytest.approx(expected)
    for wrong in ([[inf, 0.0, 1.0], [1.0, 0.0, 0.0]], [[inf, inf], [0.0, 1.0]]):
        with pytest.raises(DataError) as caught:
            METRICS[name].function(torch.tensor(wrong), torch.tensor([0, 1]))
        assert_named(caught, name, "1", "2")


def test_aucpr_needs_a_positive() -> None:
    assert_refused(lambda: METRICS["aucpr"].function(torch.zeros(3), torch.zeros(3, dtype=torch.int64)), DataError)


COSTS = [[0.0, 5.0, 1.0], [2.0, 0.0, 1.0], [10.0, 4.0, -1.0]]


def test_expected_cost() -> None:
    logits, labels = torch.eye(3)[[0, 1, 1, 0]], torch.tensor([0, 0, 1, 2])
    spec = expected_cost(COSTS)
    assert spec.bounds == (-1, 10)
    assert not spec.maximize
    assert spec.function(logits, labels) == (0 + 5 + 0 + 10) / 4
    assert expected_cost(np.array(COSTS)).function(logits, labels) == spec.function(logits, labels)


def test_expected_cost_of_zero_one_costs_is_the_error_rate() -> None:
    logits, labels = _case("multi", 0)
    assert expected_cost(1 - torch.eye(5)).function(logits, labels) == pytest.approx(
        METRICS["mcr"].function(logits, labels)
    )


@pytest.mark.parametrize(
    ("costs", "names"),
    [
        ([[0, 1, 2], [1, 0, 2]], ("(2, 3)",)),
        ([[0, float("inf")], [1, 0]], ()),
        ([[1, 1], [1, 1]], ()),
        ([[0, "a"], [1, 0]], ()),
        ([[0, 1], [1]], ()),
    ],
)
def test_impossible_costs_are_named(costs: Any, names: tuple[str, ...]) -> None:
    assert_refused(lambda: expected_cost(costs), ValueError, *names)


def test_costs_must_fit_the_data() -> None:
    labels = torch.tensor([0, 1])
    assert_refused(lambda: expected_cost(COSTS).function(torch.zeros(2), labels), DataError, "3", "2")


def test_from_callable_takes_scikit_learn() -> None:
    logits, labels = _case("multi", 0)
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

    logits, labels = _case("multi", 0)
    function = from_callable(in_place, maximize=True, bounds=(0, 100), scores=scores).function
    assert function(logits, labels) == function(logits, labels) > 0


def test_from_callable_gives_binary_functions_the_positive_class() -> None:
    pair, labels = _case("binary", 0)
    probability = pair.double().softmax(1)[:, 1]
    brier = from_callable(skm.brier_score_loss, maximize=False, scores="probabilities")
    assert brier.function(pair, labels) == pytest.approx(skm.brier_score_loss(labels, probability))
    auc = from_callable(skm.roc_auc_score, maximize=True, scores="logits")
    assert auc.function(pair, labels) == pytest.approx(skm.roc_auc_score(labels, probability))


def test_from_callable_takes_torchmetrics_in_their_order() -> None:
    logits, labels = _case("binary rare", 0)
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
    many, classes = _case("multi", 0)
    assert auc.function(many, classes) == pytest.approx(
        skm.roc_auc_score(classes, many.double().softmax(1), multi_class="ovr"), abs=1e-5
    )


def test_from_callable_gives_columns_by_place_or_by_name() -> None:
    logits, labels = _case("binary", 0)
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


def test_from_callable_gives_torchmetrics_columns_as_tensors() -> None:
    logits, labels = _case("binary", 0)
    queries = np.arange(len(labels)) % 3
    spec = from_callable(torchmetrics.retrieval.RetrievalMAP(), maximize=True, scores="probabilities", columns=["qid"])
    scores = logits.double().softmax(1)[:, 1]
    each = [skm.average_precision_score(labels[queries == q], scores[queries == q]) for q in range(3)]
    assert spec.function(logits, labels, queries) == pytest.approx(np.mean(each), abs=1e-6)
    assert_refused(lambda: spec.function(logits, labels, queries.astype(str).astype(object)), DataError, "qid")


def test_from_callable_forgives_rounding_but_nothing_else() -> None:
    logits, labels = _case("binary", 0)
    assert from_callable(lambda y, p: 1 + 1e-7, maximize=True).function(logits, labels) == 1
    for result, names in ((1.5, ("bounds",)), (float("nan"), ("nan",)), ([1, 2], ())):
        spec = from_callable(lambda y, p, result=result: result, maximize=True, name="mine")
        with pytest.raises(MetricError) as caught:
            spec.function(logits, labels)
        assert_named(caught, "mine", *names)


def test_from_callable_checks_its_arguments() -> None:
    assert_refused(lambda: from_callable(skm.f1_score, maximize=True, scores="margins"), ValueError, "margins")
    assert_refused(lambda: from_callable(skm.f1_score, maximize=True, bounds=(1, 0)), ValueError, "(1, 0)")


def test_check_split() -> None:
    check_split(torch.tensor([0, 2, 2]), 3)
    assert_refused(lambda: check_split(torch.zeros(0, dtype=torch.int64), 3, "tuning"), DataError, "tuning")
    assert_refused(lambda: check_split(torch.tensor([2, 2]), 3), DataError, "2")
    assert_refused(lambda: check_split(torch.tensor([0, 2]), 2), DataError, "0..1", "2")
