"""The losses by name, with their arguments, and what is refused before any work."""

from typing import Any

import pytest
import torch
from torch import nn

from helpers.refusals import assert_named, assert_refused
from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.classification.large_margin import LargeMarginSoftmax
from metricopt_ext.classification.losses import CostSensitive, classification_loss, cross_entropy
from metricopt_ext.classification.lovasz import lovasz
from metricopt_ext.classification.named_loss import named_loss, score_loss
from metricopt_ext.classification.ranking_losses import AUCPRLoss, PairwiseAUC
from metricopt_ext.classification.targets import Target
from metricopt_ext.errors import ConfigError
from metricopt_ext.utils.config import known_keys, load_config

TARGET = Target("classes", 3)
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0, 1, 2])
NET = nn.Linear(4, 3)


def config_of(*overrides: str) -> ClassificationConfig:
    return load_config(ClassificationConfig, None, ["data.name=digits", "model.name=small_cnn", *overrides])


@pytest.mark.parametrize(
    ("name", "params", "loss"),
    [
        ("cross_entropy", "", cross_entropy),
        ("aucpr", "{anchors: 3, multiplier: 2.0}", AUCPRLoss(3, 2.0)),
        ("pairwise_auc", "{form: logistic}", PairwiseAUC("logistic")),
        ("lovasz", "", lovasz),
        ("cost_sensitive", "{weights: [1.0, 2.0, 3.0]}", CostSensitive([1.0, 2.0, 3.0])),
    ],
)
def test_a_loss_by_name_is_that_loss_of_the_logits(name: str, params: str, loss: Any) -> None:
    config = config_of(f"loss.name={name}", *([f"loss.params={params}"] if params else []))
    assert named_loss(config, TARGET)(NET, (X, Y)) == loss(NET(X), Y)
    ((key, own),) = score_loss(config, TARGET).items()
    assert (key, own(NET(X), Y)) == (name, loss(NET(X), Y))


def test_a_large_margin_sees_the_model() -> None:
    config = config_of("loss.name=large_margin", "loss.params={margin: 3}")
    assert named_loss(config, TARGET)(NET, (X, Y)) == LargeMarginSoftmax(3)(NET, (X, Y))
    assert list(score_loss(config, TARGET)) == ["cross-entropy"]


def test_without_a_name_it_is_cross_entropy_and_there_are_no_keys() -> None:
    config = config_of()
    assert named_loss(config, TARGET) is classification_loss
    assert score_loss(config, TARGET) == {"cross-entropy": cross_entropy}
    assert not [key for key in known_keys(config) if key.startswith("loss")]
    assert_refused(lambda: config_of("loss.params={margin: 3}"), ConfigError, "loss.params")


def test_costs_come_from_the_metric() -> None:
    costs = "metric.costs=[[0.0,2.0,2.0],[1.0,0.0,1.0],[3.0,3.0,0.0]]"
    config = config_of("loss.name=cost_sensitive", "metric.name=expected_cost", costs)
    expected = CostSensitive([2.0, 1.0, 3.0])(NET(X), Y)
    assert named_loss(config, TARGET)(NET, (X, Y)) == expected
    for other in (config_of("loss.name=cost_sensitive"), config_of(*PRIOR, costs)):
        with pytest.raises(ConfigError) as caught:
            named_loss(other, TARGET)
        assert_named(caught, "loss.name=cost_sensitive")


PRIOR = ["loss.name=cost_sensitive", "metric.name=expected_cost", "metric.prior=[0.2,0.3,0.5]"]


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (
            ["loss.name=focal"],
            ("loss.name='focal'", "cross_entropy"),
        ),
        (["loss.name=lovasz", "loss.params={margin: 1}"], ("lovasz", "margin", "1")),
        (["loss.name=aucpr", "loss.params={anchors: 0}"], ("anchors", "0", "1")),
        (["loss.name=cost_sensitive", "loss.params={weights: 3}"], ("cost_sensitive",)),
    ],
)
def test_what_is_no_loss_is_refused(overrides: list[str], names: tuple[str, ...]) -> None:
    assert_refused(lambda: named_loss(config_of(*overrides), TARGET), ConfigError, *names)


def test_they_are_for_classes() -> None:
    table = ["data.name=csv", "data.targets=[a,b]", "data.root=x.csv", "model.name=tabular_mlp", "data.kind=multilabel"]
    config = load_config(ClassificationConfig, None, [*table, "loss.name=lovasz", "metric.name=macro_f1"])
    assert_refused(config.check, ConfigError, "loss.name=lovasz", "data.kind=multilabel")


def test_costs_that_give_no_weight_are_refused_by_their_key() -> None:
    costs = "metric.costs=[[0.0,0.0,0.0],[1.0,0.0,1.0],[3.0,3.0,0.0]]"
    config = config_of("loss.name=cost_sensitive", "metric.name=expected_cost", costs)
    assert_refused(lambda: named_loss(config, TARGET), ConfigError, "loss.name=cost_sensitive")
