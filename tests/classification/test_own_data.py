"""A classifier's data in parts of one's own: folders of images, and tables."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.refusals import assert_warned

pytest.importorskip("torchvision")

from metricopt_ext.classification.config import ClassificationConfig, MetricConfig
from metricopt_ext.classification.models import build_model
from metricopt_ext.classification.named_metric import build_metric
from metricopt_ext.classification.predictions import predict
from metricopt_ext.classification.split_metric import model_metric
from metricopt_ext.classification.splits import load_splits
from metricopt_ext.data.streamed import is_streamed
from metricopt_ext.tasks.batches import TensorBatches
from metricopt_ext.utils.config import load_config

NAMES = ("cat", "dog")


def config_of(*overrides: str) -> ClassificationConfig:
    config = load_config(ClassificationConfig, None, ["model.name=small_cnn", *overrides])
    config.check()
    return config


def write_images(folder: Path, classes: dict[str, int], grey: int) -> None:
    """Write six images of each class; the first pixel is the class's own number, the second the image's."""
    for name, number in classes.items():
        (folder / name).mkdir(parents=True)
        for i in range(6):
            pixels = np.full((8, 8, 3), grey, np.uint8)
            pixels[0, 0], pixels[0, 1] = number, i
            Image.fromarray(pixels).save(folder / name / f"{i}.png")


@pytest.fixture
def folders(tmp_path: Path) -> Callable[..., list[str]]:
    """Write parts, each of its own grey, and return the settings that name them."""

    def write(**classes: dict[str, int]) -> list[str]:
        for grey, (name, own) in enumerate(classes.items()):
            write_images(tmp_path / name, own, 100 + grey)
        return ["data.name=image_folder", *(f"data.{name}={tmp_path / name}" for name in classes)]

    return write


def test_a_file_in_two_parts_is_found_by_content(folders: Callable[..., list[str]], tmp_path: Path) -> None:
    settings = folders(train={"cat": 1, "dog": 2}, test={"cat": 1, "dog": 2})
    (tmp_path / "test" / "cat" / "other.png").write_bytes((tmp_path / "train" / "cat" / "0.png").read_bytes())
    assert_warned(lambda: load_splits(config_of(*settings), 0), "1", "other.png", "0.png")


def test_a_root_of_parts_is_read_as_such(folders: Callable[..., list[str]], tmp_path: Path) -> None:
    own = {"cat": 1, "dog": 2}
    folders(train=own, val=own)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "unknown.png").write_bytes((tmp_path / "val" / "cat" / "0.png").read_bytes())
    splits = load_splits(config_of("data.name=image_folder", f"data.root={tmp_path}"), 0)
    assert splits.class_names == NAMES
    assert splits.reading is not None
    assert "not read, as it has no classes: test" in splits.reading.found
    assert (splits.train.x[:, :, 2:] * 255).round().unique().tolist() == [100]


# --- Tables ----------------------------------------------------------------------------------------------------


def test_rows_in_two_tables_are_counted(tmp_path: Path) -> None:
    texts = {"train": "a,y\n1,no\n2,yes\n3,no\n4,yes\n", "val": "a,y\n9,no\n2,yes\n", "test": "a,y\n3,yes\n7,no\n"}
    for name, text in texts.items():
        (tmp_path / f"{name}.csv").write_text(text)
    paths = (f"data.{name}={tmp_path / name}.csv" for name in texts)
    settings = ["data.name=csv", "data.target=y", "model.name=tabular_mlp", *paths]
    assert_warned(lambda: load_splits(config_of(*settings), 0), "1", "3", "val.csv")


# --- Images on disk --------------------------------------------------------------------------------------------


def test_the_metric_and_the_batches_are_the_same_from_disk(folders: Callable[..., list[str]]) -> None:
    classes = {"cat": 1, "dog": 2, "emu": 3}
    settings = folders(train=classes, val=classes, test=classes)
    settings += ["shift.kind=image", "shift.contrast=0.6", "shift.noise_std=0.05", "shift.rotation_degrees=9"]
    settings += ["data.image_size=12", "data.mean=[0.5,0.4,0.3]", "data.std=[0.2,0.3,0.2]"]
    memory, disk = (load_splits(config_of(*settings, f"data.stream={each}"), 0) for each in ("false", "true"))
    assert is_streamed(disk.train.x)
    assert is_streamed(disk.test.x)
    torch.manual_seed(0)
    model = build_model("small_cnn", disk.train.x.shape[1:], 3).eval()
    spec = build_metric(MetricConfig("aucpr"))
    for name in ("validation", "test"):
        with torch.no_grad():
            costs = [model_metric(spec, getattr(each, name)).cost(model, "test") for each in (memory, disk)]
            logits = [predict(model, getattr(each, name).x) for each in (memory, disk)]
        assert torch.equal(*logits)
        assert costs[0] == costs[1]
    batches = (TensorBatches(each.train.x, each.train.y, 6, balanced=True)(3, 1, 2) for each in (memory, disk))
    for one, other in zip(*batches, strict=True):
        assert torch.equal(one, other)
