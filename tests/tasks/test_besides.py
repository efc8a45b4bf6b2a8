"""What a config names besides the metric: names, classes, and functions of one's own."""

from pathlib import Path

import pytest

from helpers.refusals import assert_named, assert_refused
from metricopt_ext.errors import ConfigError
from metricopt_ext.tasks.besides import BesidesConfig, class_number, of_class, own_function
from metricopt_ext.tasks.own_metric import OwnMetricConfig


def test_each_name_is_there_once_with_its_key() -> None:
    config = BesidesConfig(also=["a", "b", "a"], subject_to={"c": ">= 0", "b": "<= 1"})
    assert config.besides == {"a": "metric.also", "b": "metric.subject_to", "c": "metric.subject_to"}
    assert list(config.besides) == ["a", "b", "c"]
    config.check_besides("m")
    assert_refused(lambda: config.check_besides("a"), ConfigError, "metric.also")
    assert_refused(lambda: config.check_besides("c"), ConfigError, "metric.subject_to")
    assert_refused(
        lambda: BesidesConfig(subject_to={"c": "above 3"}).check_besides("m"), ConfigError, "metric.subject_to"
    )


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("recall[person]", ("recall", "person")),
        ("ap50[a [b]: c]", ("ap50", "a [b]: c")),
        ("recall", None),
        ("recall[]", None),
        ("[person]", None),
        ("recall[person", None),
        ("module:function[x]", None),
    ],
)
def test_a_class_stands_in_brackets(name: str, found: tuple[str, str] | None) -> None:
    assert of_class(name) == found


def test_classes_are_found_by_name_in_any_case_unless_that_is_two() -> None:
    assert class_number("cat", ("dog", "cat"), "key") == 1
    assert class_number("CAT", ("dog", "cat"), "key") == 1
    assert class_number("Cat", ("cat", "Cat"), "key") == 1
    for label in ("CAT", "cow"):
        with pytest.raises(ConfigError) as caught:
            class_number(label, ("cat", "Cat"), "key")
        assert_named(caught, "key", label)


def test_functions_are_imported_from_installed_modules_and_the_folder(tmp_path: Path) -> None:
    (tmp_path / "besides_own_scores.py").write_text("def score(x):\n    return x + 1\n")
    assert own_function("accuracy", BesidesConfig(), "metric.also") is None
    found = own_function("math:sqrt", BesidesConfig(), "metric.also")
    assert found is not None
    assert found(4) == 2
    assert_refused(
        lambda: own_function("besides_own_scores:score", BesidesConfig(), "metric.also"),
        ConfigError,
        "besides_own_scores",
    )
    own = own_function("besides_own_scores:score", OwnMetricConfig(folder=str(tmp_path)), "metric.also")
    assert own is not None
    assert own(1) == 2
    assert_refused(
        lambda: own_function("math:nothing", BesidesConfig(), "metric.subject_to"), ConfigError, "metric.subject_to"
    )
