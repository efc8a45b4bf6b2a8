"""The settings of the classification tool, and the configurations that come with it."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from helpers.refusals import assert_refused
from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.errors import ConfigError
from metricopt_ext.tasks.own_metric import OwnMetricConfig
from metricopt_ext.utils.config import known_keys, leaf_keys, load_config

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "classification").glob("*.yaml"))


def test_a_value_that_must_be_given() -> None:
    assert_refused(lambda: load_config(ClassificationConfig, None), ConfigError, "data.name")


@pytest.mark.parametrize("file", CONFIGS, ids=lambda path: path.stem)
def test_our_configurations_load_and_can_be_run(file: Path) -> None:
    config = load_config(ClassificationConfig, file)
    config.check()
    if config.method.name == "search":
        load_config(ClassificationConfig, file, ["method.name=recipe"]).check()  # as well


def test_a_default_run_has_few_enough_keys() -> None:
    """Whoever adds one asks whether every run reads it: what a chosen method alone reads is not here."""
    config = load_config(ClassificationConfig, CONFIGS[0].with_name("digits.yaml"))
    assert len(leaf_keys(config)) <= 75
    assert {"method", "finetune", "guard"} < set(known_keys(config))
    assert not {key for key in known_keys(OwnMetricConfig) if f"metric.{key}" in known_keys(config)}
    assert not {"siblings", "paper", "learned"} & set(known_keys(config))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda path: path.stem)
def test_our_configurations_say_how_batches_are_made_up(file: Path) -> None:
    """Balanced or not is a matter of the metric, in training and in finetuning."""
    content = OmegaConf.load(file)
    assert isinstance(content.balanced, bool)
    assert isinstance(content.model.balanced, bool)


def test_there_are_configurations_to_load() -> None:
    assert {"a9a", "digits", "digits_longtail"} <= {path.stem for path in CONFIGS}


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("model.batch_size=-5", ("model.batch_size=-5",)),
        ("metric.bounds=[1,0]", ("metric.bounds", "0.0")),
        ("data.image_size=-1", ("data.image_size=-1",)),
        ("data.name=csv", ("data.name=csv", "data.target=COLUMN")),
        ("data.name=csv data.target=y data.missing=zero", ("data.missing='zero'",)),
        ("data.name=csv data.target=y data.drop=[y]", ("data.target='y'",)),
    ],
)
def test_numbers_out_of_range_are_refused_before_any_work(override: str, names: tuple[str, ...]) -> None:
    section = override.partition(".")[0]
    chosen = ["metric.name=sklearn.metrics:f1_score"] if section == "metric" else []
    config = load_config(
        ClassificationConfig, None, ["data.name=iris", "model.name=tabular_mlp", *chosen, *override.split()]
    )
    assert_refused(config.check, ConfigError, *names)
