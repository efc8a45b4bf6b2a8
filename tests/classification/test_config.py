"""The settings of the classification tool, and the configurations that come with it."""

from pathlib import Path

import pytest

from helpers.refusals import assert_refused
from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.errors import ConfigError
from metricopt_ext.utils.config import known_keys, load_config

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "classification").glob("*.yaml"))


def test_a_value_that_must_be_given() -> None:
    assert_refused(lambda: load_config(ClassificationConfig, None), ConfigError, "data.name")


@pytest.mark.parametrize("file", CONFIGS, ids=lambda path: path.stem)
def test_our_configurations_load_and_can_be_run(file: Path) -> None:
    config = load_config(ClassificationConfig, file)
    config.check()
    if config.method.name == "search":
        load_config(ClassificationConfig, file, ["method.name=recipe"]).check()  # as well


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("model.batch_size=-5", ("model.batch_size=-5",)),
        ("metric.bounds=[1,0]", ("metric.bounds", "0.0")),
        ("data.name=csv", ("data.name=csv", "data.target=COLUMN")),
    ],
)
def test_numbers_out_of_range_are_refused_before_any_work(override: str, names: tuple[str, ...]) -> None:
    section = override.partition(".")[0]
    chosen = ["metric.name=sklearn.metrics:f1_score"] if section == "metric" else []
    config = load_config(
        ClassificationConfig, None, ["data.name=iris", "model.name=tabular_mlp", *chosen, *override.split()]
    )
    assert_refused(config.check, ConfigError, *names)


def test_keys_of_a_table_are_there_for_a_table() -> None:
    table = load_config(ClassificationConfig, None, ["data.name=csv", "model.name=tabular_mlp", "data.target={y"])
    assert (table.data.name, getattr(table.data, "target", None)) == ("csv", "{y")
    other = load_config(ClassificationConfig, None, ["data.name=iris", "model.name=tabular_mlp"])
    own = known_keys(table).keys() - known_keys(other).keys()
    names = ("target", "targets", "drop", "categories", "missing")
    assert own == {f"data.{name}" for name in (*names, "train", "val", "test")}
    named = ("data.missing", "data.name=csv", "data.name=iris")
    assert_refused(
        lambda: load_config(ClassificationConfig, None, ["data.name=iris", "data.missing=mean"]), ConfigError, *named
    )
