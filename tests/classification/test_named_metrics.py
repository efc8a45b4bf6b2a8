"""Metrics by name, on parts and halves of the data, and what counts besides them."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sklearn.metrics
import torch
import torchmetrics
from torch import Tensor, nn

from helpers.modules import forgotten
from helpers.refusals import assert_refused, assert_warned
from metricopt_ext.classification.besides import besides, check_besides
from metricopt_ext.classification.callable_metric import from_callable, warn_of_scores
from metricopt_ext.classification.config import ClassificationConfig, MetricConfig
from metricopt_ext.classification.metrics import METRICS
from metricopt_ext.classification.models import build_model
from metricopt_ext.classification.named_metric import build_metric, try_metric
from metricopt_ext.classification.split_metric import model_metric
from metricopt_ext.classification.splits import load_splits
from metricopt_ext.classification.targets import Target
from metricopt_ext.data.halves import stratified_halves
from metricopt_ext.data.labelled import Split
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.utils.config import load_config

DIGITS = Path(__file__).parents[2] / "configs" / "classification" / "digits.yaml"


def config_of(*overrides: str, file: Path = DIGITS) -> ClassificationConfig:
    return load_config(ClassificationConfig, file, ["model.epochs=1", "adapter.dim=3", "device=cpu", *overrides])


WINE = ["data.name=wine", "data.fractions=[0.5,0.2,0.3]", "data.standardise=true", "shift.kind=none"]


MLP = ["model.name=tabular_mlp", "adapter.kind=input_bias", "adapter.layers=[]"]


@pytest.mark.parametrize(
    ("metric", "reference"),
    [
        (
            ["metric.name=sklearn.metrics:f1_score", "metric.kwargs.average=macro"],
            lambda y, logits: sklearn.metrics.f1_score(y, logits.argmax(1), average="macro"),
        ),
        (
            [
                "metric.name=sklearn.metrics:roc_auc_score",
                "metric.scores=probabilities",
                "metric.kwargs.multi_class=ovr",
            ],
            lambda y, logits: sklearn.metrics.roc_auc_score(y, logits.double().softmax(1), multi_class="ovr"),
        ),
    ],
)
def test_arguments_of_metrics(metric: list[str], reference: Any) -> None:
    config = config_of(*WINE, *MLP, *metric)
    part = load_splits(config, 0).validation
    try_metric(config.metric, part, Target("classes", 3))
    torch.manual_seed(0)
    model = build_model("tabular_mlp", torch.Size((13,)), 3).eval()
    found = model_metric(build_metric(config.metric), part).evaluate(model, "test").value
    with torch.no_grad():
        assert found == pytest.approx(reference(part.y, model(part.x)))


def test_metrics_tell_their_values_on_halves() -> None:
    y = torch.tensor([0] * 7 + [1] * 4 + [2] * 2)[torch.randperm(13, generator=torch.Generator().manual_seed(0))]
    a, b = stratified_halves(y, seed=3)
    part = Split(torch.randn(13, 5), y)
    model = nn.Linear(5, 3)
    told = model_metric(METRICS["accuracy"], part, (a, b)).evaluate(model, "test")
    assert told.halves is not None
    for half, cost in zip((a, b), told.halves, strict=True):
        assert cost == model_metric(METRICS["accuracy"], Split(part.x[half], y[half])).cost(model, "test")
    assert model_metric(METRICS["accuracy"], part).evaluate(model, "test") == told._replace(pairs=())


CLASSES = ("cat", "Dog", "a:b [x]")


def outputs(count: int = 60) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, generator=rng), torch.randint(3, (count,), generator=rng)


@pytest.mark.parametrize(
    ("metric", "reference"),
    [
        ("recall", sklearn.metrics.recall_score),
        ("precision", sklearn.metrics.precision_score),
        ("f1", sklearn.metrics.f1_score),
    ],
)
def test_a_metric_of_one_class_is_scikit_learn_s(metric: str, reference: object) -> None:
    logits, labels = outputs()
    found = besides(MetricConfig(also=[f"{metric}[{name}]" for name in CLASSES[:2]]), "classes", CLASSES)
    each = reference(labels.numpy(), logits.argmax(1).numpy(), average=None)  # type: ignore[operator]
    for number, spec in enumerate(found.values()):
        assert spec.function(logits, labels) == pytest.approx(each[number], abs=1e-12)
    (positive,) = besides(MetricConfig(also=[f"{metric}[yes]"]), "classes", ("no", "yes")).values()
    one, two = logits[:, 0], (labels > 0).long()
    expected = reference(two.numpy(), (one > 0).long().numpy())  # type: ignore[operator]
    assert positive.function(one, two) == pytest.approx(expected, abs=1e-12)


def test_precision_without_a_prediction_is_0_and_no_example_is_an_error() -> None:
    found = besides(MetricConfig(also=["precision[cat]", "recall[cat]"]), "classes", CLASSES)
    logits, labels = torch.tensor([[0.0, 1.0, 0.0]] * 3), torch.tensor([0, 1, 1])
    assert found["precision[cat]"].function(logits, labels) == 0
    assert found["recall[cat]"].function(logits, labels) == 0
    assert_refused(lambda: found["recall[cat]"].function(logits, labels.clamp(min=1)), DataError, "cat", "recall")
    assert_refused(lambda: check_besides(found, logits, labels.clamp(min=1)), ConfigError, "metric.also")


def test_names_are_the_tool_s_and_functions_of_one_s_own() -> None:
    named = MetricConfig(
        also=["mcc", "sklearn.metrics:zero_one_loss"], subject_to={"accuracy": ">= start", "mcc": ">= 0"}
    )
    found = besides(named, "classes", CLASSES)
    assert list(found) == ["mcc", "sklearn.metrics:zero_one_loss", "accuracy"]
    assert found["mcc"] is METRICS["mcc"]
    logits, labels = outputs()
    loss = found["sklearn.metrics:zero_one_loss"].function(logits, labels)
    assert loss == pytest.approx(1 - METRICS["accuracy"].function(logits, labels))
    assert list(besides(MetricConfig(also=["micro_f1"]), "multilabel")) == ["micro_f1"]
    own = besides(MetricConfig(also=["recall[dog]"]), "classes", CLASSES)["recall[dog]"]
    assert own.function(torch.eye(3), torch.arange(3)) == 1


@pytest.mark.parametrize(
    ("name", "kind", "names"),
    [
        ("acuracy", "classes", ("acuracy", "MODULE:FUNCTION")),
        ("auc[cat]", "classes", ("auc[cat]",)),
        ("recall[cow]", "classes", ("cow",)),
        ("f1", "multilabel", ("f1", "data.kind=multilabel")),
        ("sklearn.metrics:nothing", "classes", ("sklearn.metrics:nothing",)),
    ],
)
def test_what_there_is_not_is_refused_by_name(name: str, kind: str, names: tuple[str, ...]) -> None:
    assert_refused(lambda: besides(MetricConfig(also=[name]), kind, CLASSES), ConfigError, "metric.also", *names)
    constrained = MetricConfig(subject_to={name: ">= 0"})
    assert_refused(lambda: besides(constrained, kind, CLASSES), ConfigError, "metric.subject_to", *names)


def test_what_is_constrained_is_told_with_the_metric_by_one_pass() -> None:
    passes = []

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            passes.append(len(x))
            return x

    logits, labels = outputs()
    found = besides(MetricConfig(also=["mcc"], subject_to={"accuracy": ">= start"}), "classes", CLASSES)
    halves = [torch.arange(0, 60, 2), torch.arange(1, 60, 2)]
    metric = model_metric(METRICS["f1"], Split(logits, labels), halves, also=found, subject_to={"accuracy": ">= start"})
    evaluation = metric.evaluate(Model(), "x")
    assert passes == [60]
    assert evaluation.value == pytest.approx(METRICS["f1"].function(logits, labels))
    assert evaluation.halves is not None
    assert evaluation.also == {"accuracy": METRICS["accuracy"].function(logits, labels)}
    assert metric.look(Model()) == {"mcc": METRICS["mcc"].function(logits, labels)}
    test = model_metric(METRICS["f1"], Split(logits, labels), also=found)
    assert test.evaluate(Model(), "x").also == {}
    assert set(test.look(Model())) == {"mcc", "accuracy"}


# --- What a function's predictions are -------------------------------------------------------------------------

ROWS, TRUE = torch.randn(200, 2, generator=torch.Generator().manual_seed(0)), torch.arange(200) % 2
ODDS = (ROWS[:, 1] - ROWS[:, 0]).double()
DECIDED = (ODDS > 0).long()
AUC = sklearn.metrics.roc_auc_score(TRUE, ODDS)


def mine(y: Any, p: Any) -> Any:
    return sklearn.metrics.roc_auc_score(y, p)


def quality(y_true: Any, y_probability: Any) -> Any:
    return ((y_true - y_probability) ** 2).mean()


class OfObject:
    def __call__(self, y: Any, p: Any) -> Any:
        return sklearn.metrics.roc_auc_score(y, p)

    def method(self, y: Any, p: Any) -> Any:
        return sklearn.metrics.roc_auc_score(y, p)


def of_pairs(y: Any, p: Any) -> float:
    """The area under the curve, of which neither its name nor its code has a word."""
    above, below = p[y == 1][:, None], p[y == 0][None]
    return float((above > below).mean() + (above == below).mean() / 2)


BRIER = float(((TRUE - ODDS.sigmoid()) ** 2).mean())
OF_SCORES: list[tuple[Any, float]] = [
    (sklearn.metrics.roc_auc_score, AUC),
    (sklearn.metrics.average_precision_score, sklearn.metrics.average_precision_score(TRUE, ODDS)),
    (sklearn.metrics.brier_score_loss, BRIER),
    (partial(sklearn.metrics.log_loss, labels=[0, 1]), sklearn.metrics.log_loss(TRUE, ODDS.sigmoid())),
    (sklearn.metrics.hinge_loss, sklearn.metrics.hinge_loss(TRUE, ODDS)),
    (
        partial(partial(sklearn.metrics.roc_auc_score), max_fpr=0.5),
        sklearn.metrics.roc_auc_score(TRUE, ODDS, max_fpr=0.5),
    ),
    (mine, AUC),
    (lambda y, p: sklearn.metrics.roc_auc_score(y, p), AUC),
    (OfObject(), AUC),
    (OfObject().method, AUC),
    (quality, BRIER),
    (lambda labels, yScore: of_pairs(labels, yScore), AUC),
    (lambda scores, labels: of_pairs(labels, scores), AUC),  # in the order of its arguments' names
    (torchmetrics.classification.BinaryAUROC(), AUC),
    (torchmetrics.functional.classification.binary_auroc, AUC),
    (partial(torchmetrics.functional.auroc, task="binary"), AUC),
    (lambda y_true, logits: float(abs(logits).max()), float(ODDS.abs().max())),
]


@pytest.mark.parametrize(("function", "expected"), OF_SCORES)
def test_a_function_of_scores_gets_them(function: Any, expected: float) -> None:
    spec = from_callable(function, maximize=True, bounds=(0.0, 100.0))
    assert spec.function(ROWS, TRUE) == pytest.approx(expected, abs=1e-6)
    assert spec.function(ODDS, TRUE) == pytest.approx(expected, abs=1e-6)  # of one logit


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (sklearn.metrics.f1_score, sklearn.metrics.f1_score(TRUE, DECIDED)),
        (
            lambda preds, labels: sklearn.metrics.recall_score(labels, preds),
            sklearn.metrics.recall_score(TRUE, DECIDED),
        ),
        (lambda y, p: float((y == p).mean()), sklearn.metrics.accuracy_score(TRUE, DECIDED)),
        (torchmetrics.classification.BinaryF1Score(), sklearn.metrics.f1_score(TRUE, DECIDED)),
    ],
)
def test_a_function_of_classes_gets_them(function: Any, expected: float) -> None:
    spec = from_callable(function, maximize=True)
    assert spec.function(ROWS, TRUE) == pytest.approx(expected, abs=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_scores(spec, ROWS, TRUE)


def test_what_would_have_other_values_of_scores_is_warned_of_until_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "of_pairs_alone.py").write_text(
        "def of_pairs(y, p):\n"
        "    above, below = p[y == 1][:, None], p[y == 0][None]\n"
        "    return float((above > below).mean() + (above == below).mean() / 2)\n"
    )
    part, target = Split(ROWS, TRUE), Target("classes", 2)
    own = ["metric.name=of_pairs_alone:of_pairs", f"metric.folder={tmp_path}"]
    with forgotten("of_pairs_alone"):
        assert_warned(lambda: try_metric(config_of(*own).metric, part, target), "of_pairs", "metric.scores")
        for scores in ("labels", "probabilities"):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                try_metric(config_of(*own, f"metric.scores={scores}").metric, part, target)
        also = besides(MetricConfig(also=["sklearn.metrics:brier_score_loss"]), "classes", ("0", "1"))
        assert also["sklearn.metrics:brier_score_loss"].function(ROWS, TRUE) == pytest.approx(BRIER)


def test_a_direction_that_a_name_does_not_say_is_told() -> None:
    neutral = "metric.name=helpers.own:saved"
    assert_warned(lambda: config_of(neutral).check(), "helpers.own:saved", "higher", "metric.maximize")
    for told in (
        [neutral, "metric.maximize=false"],
        ["metric.name=sklearn.metrics:zero_one_loss"],
        ["metric.name=mcr"],
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            config_of(*told).check()


def test_scores_of_several_classes_and_labels() -> None:
    logits, labels = outputs()
    expected = sklearn.metrics.roc_auc_score(labels, logits.double().softmax(1), multi_class="ovr")
    ovr = from_callable(partial(sklearn.metrics.roc_auc_score, multi_class="ovr"), maximize=True)
    assert ovr.function(logits, labels) == pytest.approx(expected)
    top = from_callable(partial(sklearn.metrics.top_k_accuracy_score, k=2), maximize=True)
    assert top.function(logits, labels) == pytest.approx(sklearn.metrics.top_k_accuracy_score(labels, logits, k=2))
    several = torch.nn.functional.one_hot(labels, 3)
    ranked = from_callable(sklearn.metrics.label_ranking_average_precision_score, maximize=True, kind="multilabel")
    expected = sklearn.metrics.label_ranking_average_precision_score(several, logits)
    assert ranked.function(logits, several) == pytest.approx(expected)
