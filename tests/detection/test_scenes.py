"""Scenes of pasted digits: drawn from the seed, boxes tight, splits that share no scan, a shift for val and test."""

from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.refusals import assert_refused

pytest.importorskip("PIL")
pytest.importorskip("sklearn")

from sklearn.datasets import load_digits

from metricopt_ext.detection import scenes
from metricopt_ext.detection.records import DetectionSet
from metricopt_ext.detection.scenes import SceneShift, write_scenes
from metricopt_ext.detection.voc import read_voc
from metricopt_ext.errors import DataError, FileFormatError

COUNTS = (12, 5, 7)


def pixels(data: DetectionSet) -> torch.Tensor:
    return torch.stack([image.load() for image in data.images]).double() / 255


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.*")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scenes(tmp_path_factory.mktemp("scenes"), images=COUNTS, seed=3)


def test_splits_have_the_numbers_and_ranges_that_were_asked_for(folder: Path) -> None:
    for split, count in zip(("train", "val", "test"), COUNTS, strict=True):
        data = read_voc(folder, split, classes=scenes.CLASSES)
        assert pixels(data).shape == (count, 3, 96, 96)
        for image in data.images:
            assert 1 <= len(image.boxes) <= 4
            sides = image.boxes[:, 2:] - image.boxes[:, :2]
            assert sides.max() <= 36
            assert sides.max(1).values.min() >= 8


def test_the_seed_draws_everything(folder: Path, tmp_path: Path) -> None:
    again = files(write_scenes(tmp_path / "again", images=COUNTS, seed=3))
    assert again == files(folder)
    other = files(write_scenes(tmp_path / "other", images=COUNTS, seed=4))
    assert other.keys() == again.keys()
    assert all(other[name] != again[name] for name in again if name.endswith(".png"))


def test_more_scenes_leave_the_first_as_they_are(folder: Path, tmp_path: Path) -> None:
    more = files(write_scenes(tmp_path, images=(13, 6, 8), seed=3))
    assert all(more[name] == data for name, data in files(folder).items() if name.endswith(".png"))


def test_no_scan_is_in_two_splits() -> None:
    parts = [[scan.numpy().tobytes() for scan, _ in part] for part in scenes._scans(0).values()]
    everything = [(scan / 16).tobytes() for scan in load_digits().images]
    assert sum(map(len, parts)) == len(everything)
    assert sum(len(set(part)) for part in parts) == len(set(everything)) == len(set().union(*parts))


def test_boxes_are_tight_around_ink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grey = 102 / 255
    monkeypatch.setattr(scenes, "_background", lambda size, rng: np.full((size, size, 3), grey))
    write_scenes(tmp_path, images=(20, 1, 1), digits_per_scene=(1, 1))
    for image in read_voc(tmp_path, "train").images:
        rows, columns = ((image.load() != 102).any(0).any(axis).nonzero() for axis in (1, 0))
        assert image.boxes.tolist() == [[columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]]


def test_a_shift_changes_val_and_test_alone(folder: Path, tmp_path: Path) -> None:
    write_scenes(tmp_path, images=COUNTS, seed=3, shift=SceneShift(contrast=0.5))
    for split in ("train", "val", "test"):
        plain, shifted = (pixels(read_voc(root, split, classes=scenes.CLASSES)) for root in (folder, tmp_path))
        expected = plain if split == "train" else 0.5 + 0.5 * (plain - 0.5)
        assert (shifted - expected).abs().max() <= (0 if split == "train" else 1 / 255)


@pytest.mark.slow
def test_a_shift_adds_noise_and_scales_digits(tmp_path: Path) -> None:
    counts = (30, 30, 1)
    write_scenes(tmp_path, images=counts, digits_per_scene=(1, 1), shift=SceneShift(noise_std=0.1, scale=0.6))
    train, val = (read_voc(tmp_path, split) for split in ("train", "val"))

    def roughness(data: DetectionSet) -> float:
        values = pixels(data)
        return float((values[..., 1:] - values[..., :-1]).std())

    def height(data: DetectionSet) -> float:
        return float(torch.cat([image.boxes[:, 3] - image.boxes[:, 1] for image in data.images]).mean())

    assert roughness(val) == pytest.approx(0.1 * 2**0.5, rel=0.2)
    assert roughness(train) < 0.06
    assert height(val) == pytest.approx(0.6 * height(train), rel=0.2)


def test_a_finished_folder_is_left_as_it_is(tmp_path: Path) -> None:
    write_scenes(tmp_path, images=(2, 1, 1))
    image = tmp_path / "JPEGImages" / "train_00001.png"
    whole = image.read_bytes()
    image.unlink()
    write_scenes(tmp_path, images=(2, 1, 1))
    assert not image.exists()
    (tmp_path / "scenes.json").unlink()  # as after a crash
    write_scenes(tmp_path, images=(2, 1, 1))
    assert image.read_bytes() == whole


def test_a_folder_with_other_settings_is_refused(tmp_path: Path) -> None:
    write_scenes(tmp_path, images=(1, 1, 1))
    assert_refused(
        lambda: write_scenes(tmp_path, images=(1, 1, 1), shift=SceneShift(contrast=0.5)),
        FileFormatError,
        "shift.contrast",
        "1.0",
        "0.5",
    )


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"images": (0, 1, 1)}, ("images",)),
        ({"digits_per_scene": (3, 2)}, ("digits_per_scene",)),
        ({"shift": SceneShift(scale=3.0)}, ("42", "8", "96")),
    ],
)
def test_impossible_settings_are_named(tmp_path: Path, settings: dict[str, object], names: tuple[str, ...]) -> None:
    assert_refused(lambda: write_scenes(tmp_path, **settings), DataError, *names)
    assert_refused(lambda: SceneShift(contrast=0.0), DataError, "contrast")
