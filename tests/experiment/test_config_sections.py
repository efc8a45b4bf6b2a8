"""What a section of the settings becomes, and what it refuses."""

import math
from typing import Any

import pytest

from metricopt_ext.data.shift import ImageShift
from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.config_sections import ShiftConfig, TrainingConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "model.epochs=0: it must be at least 1"),
        ({"optimizer": "adam"}, r"model\.optimizer='adam'.*adamw, sgd"),
        ({"lr": 0.0}, r"model: lr is 0\.0; it must be above 0"),
        ({"lr": math.nan}, r"model.*nan; it must be a finite number"),
        ({"lr": math.inf}, r"model.*inf; it must be a finite number"),
        ({"weight_decay": math.nan}, r"model: weight_decay.*finite number"),
        ({"weight_decay": -0.1}, r"model\.weight_decay=-0\.1.*least 0"),
    ],
)
def test_what_cannot_be_trained_with_is_refused(settings: dict[str, Any], message: str) -> None:
    TrainingConfig().check()
    with pytest.raises(ConfigError, match=message):
        TrainingConfig(**settings).check()


def test_a_shift_of_images_has_the_settings_and_no_settings_change_nothing() -> None:
    config = ShiftConfig(kind="image", contrast=0.5, brightness=0.1, noise_std=0.2, rotation_degrees=30.0)
    assert config.image_shift() == ImageShift(contrast=0.5, brightness=0.1, noise_std=0.2, rotation_degrees=30.0)
    assert ShiftConfig().image_shift() == ImageShift()
    with pytest.raises(ValueError, match=r"contrast must be in \(0, 1\], got 2"):
        ShiftConfig(contrast=2.0).image_shift()
