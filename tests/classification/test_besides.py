"""What counts besides a classifier's metric: against scikit-learn, and what is refused by name."""

import pytest
import sklearn.metrics
import torch
from torch import Tensor, nn

from helpers.refusals import assert_refused
from metricopt_ext.classification.besides import besides, check_besides
from metricopt_ext.classification.config import ClassificationConfig, MetricConfig
from metricopt_ext.classification.metrics import METRICS
from metricopt_ext.classification.split_metric import model_metric
from metricopt_ext.data.labelled import Split
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.utils.config import load_config

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
        ("recall", "classes", ("recall",)),
        ("f1", "multilabel", ("f1", "data.kind=multilabel")),
        ("sklearn.metrics:nothing", "classes", ("sklearn.metrics:nothing",)),
    ],
)
def test_what_there_is_not_is_refused_by_name(name: str, kind: str, names: tuple[str, ...]) -> None:
    assert_refused(lambda: besides(MetricConfig(also=[name]), kind, CLASSES), ConfigError, "metric.also", *names)
    constrained = MetricConfig(subject_to={name: ">= 0"})
    assert_refused(lambda: besides(constrained, kind, CLASSES), ConfigError, "metric.subject_to", *names)


def test_a_module_that_there_is_not_is_refused_by_name() -> None:
    nobody = MetricConfig(also=["besides_of_nobody:f"])
    assert_refused(lambda: besides(nobody, "classes", CLASSES), ConfigError, "besides_of_nobody")


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
    assert evaluation.cost == pytest.approx(1 - METRICS["f1"].function(logits, labels))
    assert evaluation.halves is not None
    assert evaluation.also == {"accuracy": METRICS["accuracy"].function(logits, labels)}
    assert metric.look(Model()) == {"mcc": METRICS["mcc"].function(logits, labels)}
    test = model_metric(METRICS["f1"], Split(logits, labels), also=found)
    assert test.evaluate(Model(), "x").also is None
    assert set(test.look(Model())) == {"mcc", "accuracy"}


BASE = ["data.name=digits", "model.name=small_cnn"]


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (
            ["metric.subject_to.mcc=> 0"],
            ("metric.subject_to",),
        ),
        (["metric.subject_to.accuracy=>= 0"], ("subject_to", "metric")),
        (["metric.also=[accuracy]"], ("metric.also",)),
        (
            ["metric.subject_to.mcc=>= 0", "method.name=recipe"],
            ("subject_to", "0", "method.name=search"),
        ),
        (
            ["metric.subject_to.mcc=>= 0", "methods=[metricopt_paper]"],
            ("metricopt_paper",),
        ),
    ],
)
def test_settings_that_can_t_be_are_refused(overrides: list[str], names: tuple[str, ...]) -> None:
    assert_refused(lambda: load_config(ClassificationConfig, None, [*BASE, *overrides]).check(), ConfigError, *names)


def test_constraints_are_texts_by_names_with_dots_and_brackets() -> None:
    given = ["metric.subject_to.recall[3]=>= start - 0.5", "metric.subject_to.sklearn.metrics:f1_score=<= ${x} 1"]
    config = load_config(ClassificationConfig, None, [*BASE, *given])
    assert config.metric.subject_to == {"recall[3]": ">= start - 0.5", "sklearn.metrics:f1_score": "<= ${x} 1"}
    assert_refused(config.check, ConfigError)
