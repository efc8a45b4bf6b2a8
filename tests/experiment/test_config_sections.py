"""What a section of the settings becomes, and what it refuses."""

import math
from typing import Any

import pytest

from helpers.refusals import assert_refused
from metricopt_ext.data.shift import ImageShift
from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.config_sections import ShiftConfig, TrainingConfig


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
