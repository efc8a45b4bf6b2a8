"""The losses by name, with their arguments, and what is refused before any work."""

from typing import Any

import pytest
import torch
from torch import nn

from helpers.refusals import assert_refused
from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.classification.losses import CostSensitive, classification_loss, cross_entropy
from metricopt_ext.classification.named_loss import named_loss
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
        ("cost_sensitive", "{weights: [1.0, 2.0, 3.0]}", CostSensitive([1.0, 2.0, 3.0])),
    ],
)
def test_a_loss_by_name_is_that_loss_of_the_logits(name: str, params: str, loss: Any) -> None:
    config = config_of(f"loss.name={name}", *([f"loss.params={params}"] if params else []))
    assert named_loss(config, TARGET)(NET, (X, Y)) == loss(NET(X), Y)


def test_without_a_name_it_is_cross_entropy_and_there_are_no_keys() -> None:
    config = config_of()
    assert named_loss(config, TARGET) is classification_loss
    assert not [key for key in known_keys(config) if key.startswith("loss")]
    assert_refused(lambda: config_of("loss.params={margin: 3}"), ConfigError, "loss.params")


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (
            ["loss.name=focal"],
            ("loss.name='focal'", "cross_entropy"),
        ),
        (["loss.name=cross_entropy", "loss.params={margin: 1}"], ("cross_entropy", "margin", "1")),
        (["loss.name=cost_sensitive"], ("cost_sensitive", "weights")),
        (["loss.name=cost_sensitive", "loss.params={weights: 3}"], ("cost_sensitive",)),
    ],
)
def test_what_is_no_loss_is_refused(overrides: list[str], names: tuple[str, ...]) -> None:
    assert_refused(lambda: named_loss(config_of(*overrides), TARGET), ConfigError, *names)


def test_they_are_for_classes() -> None:
    table = ["data.name=csv", "data.targets=[a,b]", "data.root=x.csv", "model.name=tabular_mlp", "data.kind=multilabel"]
    config = load_config(ClassificationConfig, None, [*table, "loss.name=cost_sensitive", "metric.name=macro_f1"])
    assert_refused(config.check, ConfigError, "loss.name=cost_sensitive", "data.kind=multilabel")
