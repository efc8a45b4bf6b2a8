"""The keys of the data's settings are there for the data that they are of."""

from helpers.refusals import assert_refused
from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.errors import ConfigError
from metricopt_ext.utils.config import leaf_keys, load_config


def test_keys_of_a_table_are_there_for_a_table() -> None:
    table = load_config(ClassificationConfig, None, ["data.name=csv", "model.name=tabular_mlp", "data.target={y"])
    assert (table.data.name, getattr(table.data, "target", None)) == ("csv", "{y")
    other = load_config(ClassificationConfig, None, ["data.name=iris", "model.name=tabular_mlp"])
    own = set(leaf_keys(table)) - set(leaf_keys(other))
    names = ("target", "targets", "drop", "categories", "missing")
    assert own == {f"data.{name}" for name in (*names, "train", "val", "test")}
    named = ("data.missing", "data.name=csv", "data.name=iris")
    assert_refused(
        lambda: load_config(ClassificationConfig, None, ["data.name=iris", "data.missing=mean"]), ConfigError, *named
    )


def test_keys_of_parts_are_there_for_files() -> None:
    folder = load_config(ClassificationConfig, None, ["data.name=image_folder", "model.name=small_cnn"])
    other = load_config(ClassificationConfig, None, ["data.name=digits", "model.name=small_cnn"])
    assert {"data.train", "data.val", "data.test", "data.stream"} <= {*leaf_keys(folder)} - {*leaf_keys(other)}
    names = ("data.train", "data.name=arrays", "image_folder", "data.name=digits")
    assert_refused(
        lambda: load_config(ClassificationConfig, None, ["data.name=digits", "data.train=there"]), ConfigError, *names
    )
