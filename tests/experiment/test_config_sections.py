"""What a section of the settings becomes, and what it refuses."""

import math
from typing import Any

import pytest

from helpers.refusals import assert_refused
from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.data.shift import ImageShift
from metricopt_ext.errors import BudgetError, ConfigError
from metricopt_ext.experiment.config_sections import ShiftConfig, TrainingConfig
from metricopt_ext.utils.config import load_config


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"epochs": 0}, ("model.epochs=0", "1")),
        ({"lr": math.nan}, ("model", "nan")),
    ],
)
def test_what_cannot_be_trained_with_is_refused(settings: dict[str, Any], names: tuple[str, ...]) -> None:
    TrainingConfig().check()
    assert_refused(lambda: TrainingConfig(**settings).check(), ConfigError, *names)


def test_a_shift_of_images_has_the_settings_and_no_settings_change_nothing() -> None:
    config = ShiftConfig(kind="image", contrast=0.5, noise_std=0.2, rotation_degrees=30.0)
    assert config.image_shift() == ImageShift(contrast=0.5, noise_std=0.2, rotation_degrees=30.0)
    assert ShiftConfig().image_shift() == ImageShift()
    assert_refused(lambda: ShiftConfig(contrast=2.0).image_shift(), ValueError, "contrast", "0", "1", "2")


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("seed", (-1, 2**32, 2**64, 1.5, "nan", "x")),
        ("seeds", (-1, 0, 2**32, 2**64)),
        ("adapter.dim", (-1, 0, 10_001, 2**64, 1.5, "nan")),
        ("batch_size", (-1, 0, 10**7, 2**64)),
        ("model.batch_size", (-1, 0, 10**7, 2**64)),
        ("data.image_size", (-1, 10_001, 2**64)),
        ("model.lr", (-1, 0, "nan", "inf", 1e300)),
        ("threads", (-1, 0, 10**5, 2**64)),
        ("workers", (-1, 0, 10**5, 2**64)),
        ("queries", (-1, 0, 2**64)),
        ("population", (-1, 0, 2**64)),
        ("finetune.steps", (-1, 2**64)),
    ],
)
def test_sizes_out_of_range_are_refused_by_their_key(key: str, values: tuple[Any, ...]) -> None:
    for value in values:
        overrides = ["data.name=digits", "model.name=small_cnn", "metric.name=accuracy", f"{key}={value}"]
        assert_refused(
            lambda given=overrides: load_config(ClassificationConfig, None, given).check(),
            (ConfigError, BudgetError),
            key.rpartition(".")[2],
        )
