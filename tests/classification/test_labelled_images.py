"""Images with several labels each, in the layouts that people have them in: each image gets its own labels."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.refusals import assert_refused, assert_warned
from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.classification.experiment import ClassificationExperiment
from metricopt_ext.classification.splits import load_splits
from metricopt_ext.data.splits import PARTS, Splits
from metricopt_ext.data.streamed import is_streamed
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.experiment.cli import run_and_report
from metricopt_ext.utils.config import load_config

NAMES = ("cloudy", "primary", "road", "water")


def labels_of(number: int) -> list[str]:
    """What image ``number`` has: its digits to base two, so that no two of a set have the same by chance."""
    return [name for place, name in enumerate(NAMES) if number >> place & 1]


def draw(folder: Path, numbers: Sequence[int], suffix: str = ".png", size: int = 8) -> None:
    """Write images whose every pixel is the image's number."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        Image.fromarray(np.full((size, size, 3), number, np.uint8)).save(folder / f"img_{number}{suffix}")


def columns(numbers: Sequence[int], suffix: str = ".png") -> str:
    rows = [[f"img_{n}{suffix}", *(str(int(name in labels_of(n))) for name in NAMES)] for n in numbers]
    return "\n".join(", ".join(row) for row in [["filename", *NAMES], *rows]) + "\n"


def lists(numbers: Sequence[int], between: str = " ", quote: str = "", header: str = "image_name,tags") -> str:
    return "\n".join([header, *(f"img_{n},{quote}{between.join(labels_of(n))}{quote}" for n in numbers)]) + "\n"


def config_of(*more: str) -> ClassificationConfig:
    settings = ["data.name=image_folder", "data.kind=multilabel", "model.name=small_cnn", "metric.name=macro_f1"]
    config = load_config(ClassificationConfig, None, [*settings, "data.fractions=[0.5,0.25,0.25]", *more])
    config.check()
    return config


def check(splits: Splits, numbers: Mapping[str, Sequence[int]] | None = None, scale: float = 255.0) -> None:
    """Each image has the labels of its number, and each part its images."""
    met = []
    for name in PARTS:
        part = getattr(splits, name)
        shown = (part.x[:][:, 0, 0, 0] * scale).round().long().tolist()
        met += shown
        for number, row in zip(shown, part.y.tolist(), strict=True):
            assert sorted(name for name, has in zip(splits.class_names, row, strict=True) if has) == labels_of(number)
        if numbers is not None:
            assert sorted(shown) == sorted(numbers[name])
    assert len({*met}) == len(met)


def refused(*more: str) -> str:
    with pytest.raises(DataError) as caught:
        load_splits(config_of(*more), 0)
    return str(caught.value)


KEYS = {"train": "train", "val": "valid", "test": "test"}
PARTED = {"train": range(1, 16), "validation": range(16, 32), "test": range(33, 48)}


def test_an_export_of_roboflow_has_its_parts(tmp_path: Path) -> None:
    for folder, numbers in zip(("train", "valid", "test"), PARTED.values(), strict=True):
        draw(tmp_path / folder, numbers)
        (tmp_path / folder / "_classes.csv").write_text(columns(numbers))
    files = [f"data.{key}={tmp_path / folder / '_classes.csv'}" for key, folder in KEYS.items()]
    splits = load_splits(config_of(*files), 0)
    assert splits.class_names == NAMES
    check(splits, PARTED)
    assert splits.reading is not None
    counts = ", ".join(
        f"'{name}' {sum(name in labels_of(n) for each in PARTED.values() for n in each)}" for name in NAMES
    )
    assert splits.reading.found.endswith(f"examples of each label: {counts}")
    alone = load_splits(config_of(*files[:2]), 0)
    assert (len(alone.train), len(alone.validation) + len(alone.test)) == (15, 16)
    check(alone)
    (tmp_path / "valid" / "_classes.csv").write_text(columns(PARTED["validation"]).replace("water", "ice"))
    assert "_classes.csv has no column of the label 'ice', which another part has" in refused(*files)


@pytest.mark.parametrize(("between", "quote"), [(" ", ""), (", ", '"'), ("|", ""), (" | ", ""), (";", "")])
def test_a_column_that_lists_the_labels(tmp_path: Path, between: str, quote: str) -> None:
    draw(tmp_path / "train-jpg", range(1, 48))
    (tmp_path / "train_v2.csv").write_text(lists(range(1, 48), between, quote))
    splits = load_splits(config_of(f"data.root={tmp_path / 'train_v2.csv'}"), 0)
    assert splits.class_names == NAMES
    check(splits)
    assert sum(len(getattr(splits, name)) for name in PARTS) == 47


def test_kaggle_s_planet_is_read_where_its_file_and_folder_are_named(tmp_path: Path) -> None:
    draw(tmp_path / "train-jpg", range(1, 48))
    draw(tmp_path / "train-tif-v2", range(1, 48), ".tif")
    (tmp_path / "train_v2.csv").write_text(lists(range(1, 48)))
    found = refused(f"data.root={tmp_path / 'train_v2.csv'}")
    assert "the image of row 2 may be 'train-jpg/img_1.png' or 'train-tif-v2/img_1.tif'" in found
    check(load_splits(config_of(f"data.root={tmp_path / 'train_v2.csv'}", f"data.images={tmp_path / 'train-jpg'}"), 0))


def test_files_of_the_parts_may_share_a_folder(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    draw(tmp_path / "images", [*range(1, 32), 200])
    (tmp_path / "train.csv").write_text(columns(range(1, 16)).replace("img_", "images/img_"))
    (tmp_path / "val.csv").write_text(columns(range(16, 32)).replace("img_", "/kaggle/input/images/img_"))
    splits = load_splits(config_of(f"data.train={tmp_path / 'train.csv'}", f"data.val={tmp_path / 'val.csv'}"), 0)
    check(splits)
    assert len(splits.train) == 15
    left = [str(each.message) for each in recwarn if "without a row of labels" in str(each.message)]
    assert left == [f"{tmp_path}: 1 image without a row of labels left out: 'images/img_200.png'"]


def test_parts_whose_images_have_the_same_names_keep_apart(tmp_path: Path) -> None:
    for name, shift in (("train", 0), ("val", 16)):
        draw(tmp_path / name, range(1, 16))
        for file in (tmp_path / name).iterdir():
            number = int(file.stem.removeprefix("img_")) + shift
            Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(file)
        (tmp_path / name / "labels.csv").write_text(columns(range(1, 16)))
    splits = load_splits(config_of(*(f"data.{name}={tmp_path / name / 'labels.csv'}" for name in ("train", "val"))), 0)
    check(splits)  # of 16 more the labels are the same
    assert {int(255 * value) for value in splits.train.x[:, 0, 0, 0]} <= {*range(16)}


def test_images_may_stay_on_disk_and_copies_are_found(tmp_path: Path) -> None:
    draw(tmp_path / "images", range(1, 32))
    draw(tmp_path / "more", [1])
    (tmp_path / "train.csv").write_text(columns(range(1, 16)).replace("img_", "images/img_"))
    rows = columns(range(16, 32)).replace("img_", "images/img_") + "more/img_1.png, 1, 0, 0, 0\n"
    (tmp_path / "val.csv").write_text(rows)
    parts = [f"data.train={tmp_path / 'train.csv'}", f"data.val={tmp_path / 'val.csv'}"]
    memory = assert_warned(lambda: load_splits(config_of(*parts), 0), "1", "more/img_1.png")
    disk = assert_warned(lambda: load_splits(config_of(*parts, "data.stream=true"), 0), "1")
    for name in PARTS:
        assert is_streamed(getattr(disk, name).x)
        assert torch.equal(getattr(disk, name).x[:], getattr(memory, name).x)
        assert torch.equal(getattr(disk, name).y, getattr(memory, name).y)


def test_columns_that_are_no_labels_are_left_out_by_name(tmp_path: Path) -> None:
    draw(tmp_path, range(1, 48))
    text = [row.split(", ") for row in columns(range(1, 48)).splitlines()]
    widened = "\n".join(",".join([str(i), *row, "64" if i else "width"]) for i, row in enumerate(text))
    (tmp_path / "labels.csv").write_text(widened + "\n")
    assert "column '0' must say 1 or 0 in each row, yes or no, true or false, got '2' in row 3" in refused(
        f"data.root={tmp_path / 'labels.csv'}"
    )
    splits = load_splits(config_of(f"data.root={tmp_path / 'labels.csv'}", "data.targets=[water,road]"), 0)
    assert splits.class_names == ("water", "road")
    for part in (splits.train, splits.validation, splits.test):
        numbers = (255 * part.x[:, 0, 0, 0]).round().long()
        assert torch.equal(part.y, torch.stack([numbers >> 3 & 1, numbers >> 2 & 1], 1))


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        (lists(range(1, 9), "|").replace("cloudy|primary", "cloudy,primary", 1), [], "must have 2 cells"),
        (
            'filename,tags\nimg_1,"a|b"\nimg_2,"a,b"\n',
            [],
            r"parted by ',' or '\|', as in 'a|b' in row 2",
        ),
        ("filename,tags\nimg_1,hot dog\nimg_2,hot dog cat\nimg_3,cat\n", [], "'hot' and 'dog' are always side by side"),
        ("filename,tags\nimg_1,\"['a', 'b']\"\nimg_2,['a']\n", [], "without brackets, got"),
        ("filename,tags\nimg_1,1\nimg_2,0\n", [], "'tags' says 0 or 1, which is one label"),
        ("filename,tags\nimg_1,a b\nimg_2,A\n", [], r"'A' and 'a'.*write them alike"),
        ("filename,tags\nimg_1,a\nimg_2,a\n", [], "two labels at least, got 'a'"),
        ("filename,a,b\nimg_1,1,0\nimg_1,0,1\n", [], r"'img_1.png'.*2 and in row 3"),
        ("filename,a,b\nimg_1,1,0\nimg_99.png,0,1\n", [], r"1 of 2 rows.*, such as 'img_99.png'"),
        ("filename,a,b\nimg_1,1,0\nother/img_50.png,0,1\n", [], r"1 of 2.*image below .*other/img_50.png"),
        ("filename,a,b\nimg_1,1,0\nimg_2,,1\n", [], r"column 'a'.*1 or 0.*'' in row 3"),
        ("filename,a,a\nimg_1,1,0\n", [], "has 'a' twice in its header"),
        ("filename,a,b\nimg_1,1,0\n", ["data.targets=[c,a]"], "has no column 'c' of data.targets"),
        ("filename,image,a,b\nimg_1,img_1,1,0\n", [], r"columns 'filename'.*both name images"),
        ("filename\nimg_1\nimg_2\n", [], "has no column beside 'filename'"),
    ],
)
def test_what_may_mean_another_is_refused(tmp_path: Path, text: str, more: list[str], message: str) -> None:
    draw(tmp_path, range(1, 9))
    draw(tmp_path / "some", [50])
    (tmp_path / "labels.csv").write_text(text)
    assert re.search(message, refused(f"data.root={tmp_path / 'labels.csv'}", *more))


def test_keys_are_there_for_images_with_several_labels_alone(tmp_path: Path) -> None:
    names = ("data.images", "data.name=image_folder", "data.kind=multilabel")
    assert_refused(
        lambda: load_config(
            ClassificationConfig, None, ["data.name=image_folder", "data.images=x", "model.name=small_cnn"]
        ),
        ConfigError,
        *names,
    )
    draw(tmp_path / "cat", range(1, 9))
    assert "must be a CSV with the images' names and labels" in refused(f"data.root={tmp_path}")


@pytest.mark.slow
def test_a_run_reports_its_labels(tmp_path: Path) -> None:
    draw(tmp_path / "set", range(1, 121))
    (tmp_path / "set" / "labels.csv").write_text(columns(range(1, 121)))
    config = config_of(
        *(
            f"data.root={tmp_path / 'set' / 'labels.csv'}",
            "model.epochs=1",
            "model.batch_size=20",
            "batch_size=20",
            "adapter.dim=2",
            "methods=[label_thresholds]",
        ),
        *("queries=14", "finetune.steps=2", "seeds=1", "device=cpu", "population=1"),
    )
    run_and_report(ClassificationExperiment, config, tmp_path / "run", False)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    counts = ", ".join(f"'{name}' {sum(name in labels_of(n) for n in range(1, 121))}" for name in NAMES)
    assert f"examples of each label: {counts}" in json.dumps(report)
    assert "label_thresholds" in report["methods"]
