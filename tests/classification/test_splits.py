"""The data of configs: shifted, thinned out, standardised and divided as they say."""

from pathlib import Path

import pytest
import torch

from helpers.pictures import coloured
from helpers.refusals import assert_refused
from metricopt_ext.classification.adapter import attach
from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.classification.models import build_model
from metricopt_ext.classification.splits import load_splits
from metricopt_ext.errors import ConfigError
from metricopt_ext.utils.config import load_config

DIGITS = Path(__file__).parents[2] / "configs" / "classification" / "digits.yaml"
LONGTAIL = DIGITS.with_name("digits_longtail.yaml")


def config_of(*overrides: str, file: Path = DIGITS) -> ClassificationConfig:
    return load_config(ClassificationConfig, file, ["model.epochs=1", "adapter.dim=3", "device=cpu", *overrides])


def test_only_validation_and_test_are_shifted_and_always_in_the_same_way() -> None:
    clean, shifted, again = (load_splits(config_of(*more), 5) for more in (["shift.kind=none"], [], []))
    assert torch.equal(clean.train.x, shifted.train.x)
    for name in ("validation", "test"):
        a, b, c = (getattr(splits, name) for splits in (clean, shifted, again))
        assert torch.equal(a.y, b.y)
        assert torch.equal(b.x, c.x)
        assert ((a.x - b.x).abs().flatten(1).amax(1) > 0.05).all()
    other = load_splits(config_of(), 6)
    assert not torch.equal(other.train.y, shifted.train.y)
    sizes = [len(getattr(shifted, name)) for name in ("train", "validation", "test")]
    assert sizes == [1797 - 359 - 629, 359, 629]


@pytest.mark.parametrize("name", ["digits", "wine"])
def test_another_class_ratio_leaves_out_validation_and_test_examples_alone(name: str) -> None:
    ratio = [0.55] + [0.05] * 9 if name == "digits" else [0.2, 0.3, 0.5]
    data = [f"data.name={name}", "data.fractions=[0.5,0.2,0.3]", "data.standardise=" + str(name == "wine").lower()]
    shift = ["shift.kind=class_ratio", f"shift.ratio={ratio}"]
    clean, shifted, other = (
        load_splits(config_of(*data, *more), 5)
        for more in (["shift.kind=none"], shift, [*shift, "metric.name=expected_cost"])
    )
    assert torch.equal(clean.train.x, shifted.train.x)
    for part in ("validation", "test"):
        a, b, c = (getattr(splits, part) for splits in (clean, shifted, other))
        assert torch.equal(b.x, c.x)
        assert len(b) < len(a)
        rows = {tuple(x.flatten().tolist()): int(y) for x, y in zip(a.x, a.y, strict=True)}
        assert all(rows[tuple(x.flatten().tolist())] == int(y) for x, y in zip(b.x, b.y, strict=True))
        torch.testing.assert_close(b.y.bincount() / len(b), torch.tensor(ratio), atol=0.05, rtol=0)


def test_the_long_tailed_digits() -> None:
    config, natural = (load_config(ClassificationConfig, file) for file in (LONGTAIL, DIGITS))
    splits, whole = load_splits(config, 3), load_splits(natural, 3)
    assert torch.bincount(splits.train.y).tolist() == [60, 44, 33, 24, 18, 13, 10, 7, 5, 4]
    for name in ("validation", "test"):
        assert torch.equal(getattr(splits, name).y, getattr(whole, name).y)
    torch.testing.assert_close(splits.validation.x, load_splits(config_of("shift.kind=none"), 3).validation.x)
    adapter = attach(build_model("small_cnn", torch.Size((1, 8, 8)), 10), config, 3)
    assert (adapter.dim, adapter.offsets) == (42, slice(32, 42))


def test_a_long_tail_is_standardised_by_what_is_left() -> None:
    settings = ["data.name=wine", "data.standardise=true", "shift.kind=none", "data.imbalance=4"]
    splits = load_splits(config_of(*settings), 1)
    counts = torch.bincount(splits.train.y).tolist()
    assert counts[0] == pytest.approx(4 * counts[2], abs=3)
    torch.testing.assert_close(splits.train.x.mean(0), torch.zeros(13), atol=1e-5, rtol=0)


def test_a_shift_does_what_its_settings_say() -> None:
    plain = ["shift.noise_std=0", "shift.rotation_degrees=0", "shift.contrast=0.5"]
    clean, shifted = (load_splits(config_of(*more), 5) for more in (["shift.kind=none"], plain))
    for name in ("validation", "test"):
        x = getattr(clean, name).x
        mean = x.mean((2, 3), keepdim=True)
        expected = (mean + 0.5 * (x - mean)).clamp(0, 1)
        torch.testing.assert_close(getattr(shifted, name).x, expected)
    assert_refused(lambda: load_splits(config_of("data.name=iris"), 0), ConfigError, "shift.kind=image")


def test_tables_are_standardised_by_train_and_pixels_come_in_unit_range(tmp_path: Path) -> None:
    splits = load_splits(config_of("data.name=wine", "data.standardise=true", "shift.kind=none"), 1)
    torch.testing.assert_close(splits.train.x.mean(0), torch.zeros(13), atol=1e-5, rtol=0)
    torch.testing.assert_close(splits.train.x.std(0, correction=0), torch.ones(13))
    pictures = ["data.name=image_folder", f"data.root={coloured(tmp_path, per_class=6)}", "shift.kind=none"]
    x = load_splits(config_of(*pictures, "data.fractions=[0.4,0.3,0.3]"), 1).train.x
    assert x.dtype == torch.float32
    assert 0 <= x.min() < 0.1
    assert 0.9 < x.max() <= 1
