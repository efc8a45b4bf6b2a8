"""A classifier's data in parts of one's own: folders of images, and tables."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.refusals import assert_refused, assert_warned

pytest.importorskip("torchvision")

from metricopt_ext.classification.config import ClassificationConfig, MetricConfig
from metricopt_ext.classification.experiment import ClassificationExperiment
from metricopt_ext.classification.models import build_model
from metricopt_ext.classification.named_metric import build_metric
from metricopt_ext.classification.predictions import predict
from metricopt_ext.classification.split_metric import model_metric
from metricopt_ext.classification.splits import load_splits
from metricopt_ext.data.splits import Splits
from metricopt_ext.data.streamed import is_streamed
from metricopt_ext.errors import DataError
from metricopt_ext.experiment.cli import run_and_report
from metricopt_ext.tasks.batches import TensorBatches
from metricopt_ext.utils.config import load_config

NAMES = ("cat", "dog")


def config_of(*overrides: str) -> ClassificationConfig:
    config = load_config(ClassificationConfig, None, ["model.name=small_cnn", *overrides])
    config.check()
    return config


def write_images(folder: Path, classes: dict[str, int], grey: int, count: int = 6, side: int = 8) -> None:
    """Write ``count`` images of each class; the first pixel is the class's own number, the second the image's."""
    for name, number in classes.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = np.full((side, side, 3), grey, np.uint8)
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


def numbers(splits: Splits, name: str) -> list[tuple[int, int]]:
    """Return the label of each image, and the class's number that is painted in it."""
    part = getattr(splits, name)
    return list(zip(part.y.tolist(), (part.x[:, 0, 0, 0] * 255).round().long().tolist(), strict=True))


def test_each_part_has_its_own_images_and_all_have_the_same_labels(folders: Callable[..., list[str]]) -> None:
    own = {"cat": 1, "dog": 2, "emu": 3}
    splits = assert_warned(
        lambda: load_splits(config_of(*folders(train=own, val={"dog": 2, "emu": 3}, test=own)), 0), "cat", "data.val"
    )
    assert splits.class_names == ("cat", "dog", "emu")
    for grey, name in enumerate(("train", "validation", "test")):
        assert {number - label for label, number in numbers(splits, name)} == {1}
        assert (getattr(splits, name).x[:, :, 2:] * 255).round().unique().tolist() == [100 + grey]
    assert [len(splits.train), len(splits.validation), len(splits.test)] == [18, 12, 18]
    assert splits.reading is not None
    assert "train: 18 images" in splits.reading.found


def test_a_class_of_one_part_alone_is_refused_by_name(folders: Callable[..., list[str]]) -> None:
    settings = folders(train={"cat": 1, "dog": 2}, val={"cat": 1, "dog": 2, "emu": 3}, test={"cat": 1, "dog": 2})
    assert_refused(lambda: load_splits(config_of(*settings), 0), DataError, "emu", "data.val")


def test_a_file_in_two_parts_is_found_by_content(folders: Callable[..., list[str]], tmp_path: Path) -> None:
    settings = folders(train={"cat": 1, "dog": 2}, test={"cat": 1, "dog": 2})
    (tmp_path / "test" / "cat" / "other.png").write_bytes((tmp_path / "train" / "cat" / "0.png").read_bytes())
    assert_warned(lambda: load_splits(config_of(*settings), 0), "1", "other.png", "0.png")


def test_validation_is_held_out_of_train_and_test_of_validation(folders: Callable[..., list[str]]) -> None:
    own = {"cat": 1, "dog": 2}
    settings = folders(train=own, val=own)
    splits = load_splits(config_of(*settings, "data.fractions=[0.5,0.25,0.25]"), 0)
    assert [len(splits.train), len(splits.validation), len(splits.test)] == [12, 6, 6]
    settings = [each.replace("data.val=", "data.test=") for each in settings]
    splits = load_splits(config_of(*settings, "data.fractions=[0.5,0.25,0.25]"), 0)
    assert [len(splits.train), len(splits.validation), len(splits.test)] == [8, 4, 12]
    assert splits.reading is not None
    assert "4 examples held out from train" in splits.reading.found


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


def tables(tmp_path: Path, **texts: str) -> list[str]:
    for name, text in texts.items():
        (tmp_path / f"{name}.csv").write_text(text)
    paths = (f"data.{name}={tmp_path / name}.csv" for name in texts)
    return ["data.name=csv", "data.target=y", "model.name=tabular_mlp", *paths]


def test_tables_have_the_same_inputs_whatever_values_each_has(tmp_path: Path) -> None:
    settings = tables(
        tmp_path,
        train="a,c,y\n1,red,no\n2,blue,yes\n3,red,no\n4,blue,yes\n",
        val="a,c,y\n5,red,no\n6,red,yes\n",
        test="c,a,y\ngreen,7,yes\nred,8,no\n",
    )
    splits = load_splits(config_of(*settings), 0)
    assert splits.class_names == ("no", "yes")
    assert splits.train.x.tolist() == [[1, 0, 0, 1], [2, 1, 0, 0], [3, 0, 0, 1], [4, 1, 0, 0]]
    assert splits.validation.x.tolist() == [[5, 0, 0, 1], [6, 0, 0, 1]]
    assert splits.test.x.tolist() == [[7, 0, 1, 0], [8, 0, 0, 1]]
    assert (splits.validation.y.tolist(), splits.test.y.tolist()) == ([0, 1], [1, 0])


def test_a_bad_cell_is_named_by_its_file(tmp_path: Path) -> None:
    rows = "".join(f"{i},{'no' if i % 2 else 'yes'}\n" for i in range(20))
    settings = tables(tmp_path, train="a,y\n" + rows, test="a,y\n1,no\nlots,yes\n")
    assert_refused(lambda: load_splits(config_of(*settings), 0), DataError, "lots", "3", "test.csv")


def test_a_column_that_one_table_lacks_is_named(tmp_path: Path) -> None:
    settings = tables(tmp_path, train="a,b,y\n1,2,no\n1,3,yes\n", test="a,y\n1,no\n2,yes\n")
    assert_refused(lambda: load_splits(config_of(*settings), 0), DataError, "test.csv", "'b'")


def test_rows_in_two_tables_are_counted(tmp_path: Path) -> None:
    texts = {"train": "a,y\n1,no\n2,yes\n3,no\n4,yes\n", "val": "a,y\n9,no\n2,yes\n", "test": "a,y\n3,yes\n7,no\n"}
    assert_warned(lambda: load_splits(config_of(*tables(tmp_path, **texts)), 0), "1", "3", "val.csv")


def test_a_class_of_one_table_alone_is_named(tmp_path: Path) -> None:
    texts = {"train": "a,y\n1,no\n2,yes\n", "val": "a,y\n9,no\n2,yes\n", "test": "a,y\n3,yes\n7,maybe\n"}
    assert_refused(lambda: load_splits(config_of(*tables(tmp_path, **texts)), 0), DataError, "maybe", "data.test")


def test_parquet_is_read_as_csv_is(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns: dict[str, Any] = {"a": [1, 2, 3, 4], "b": [0.1, 2.5, -1e300, 4.0], "c": ["x", "y", "x", "x"]}
    rows = [*zip(*columns.values(), ["no", "yes", "no", "yes"], strict=True)]
    text = "a,b,c,y\n" + "".join(",".join(map(str, row)) + "\n" for row in rows)
    (tmp_path / "t.csv").write_text(text)
    parquet.write_table(arrow.table({**columns, "y": ["no", "yes", "no", "yes"]}), tmp_path / "t.parquet")
    from metricopt_ext.classification.tables import read_csv

    ours, theirs = (read_csv(tmp_path / f"t.{kind}", "y") for kind in ("parquet", "csv"))
    assert torch.equal(ours.x, theirs.x)
    assert torch.equal(ours.y, theirs.y)
    assert ours.class_names == theirs.class_names


def test_libsvm_files_are_parts(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("-1 1:1 2:5\n+1 2:2\n-1 1:4\n+1 1:9\n")
    (tmp_path / "b").write_text("+1 3:1\n-1 1:7\n")
    settings = ["data.name=libsvm", "model.name=tabular_mlp", f"data.train={tmp_path / 'a'}"]
    both = [f"data.val={tmp_path / 'b'}", f"data.test={tmp_path / 'b'}"]
    splits = assert_warned(lambda: load_splits(config_of(*settings, *both), 0), "2")
    assert splits.train.x.tolist() == [[1, 5, 0], [0, 2, 0], [4, 0, 0], [9, 0, 0]]
    assert splits.test.x.tolist() == [[0, 0, 1], [7, 0, 0]]


# --- Images on disk --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [True, False], ids=["parts", "root"])
def test_the_metric_and_the_batches_are_the_same_from_disk(
    folders: Callable[..., list[str]], tmp_path: Path, own: bool
) -> None:
    classes = {"cat": 1, "dog": 2, "emu": 3}
    settings = folders(train=classes, val=classes, test=classes)
    if not own:
        settings = [settings[0], f"data.root={tmp_path / 'train'}", "data.fractions=[0.4,0.3,0.3]"]
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


def test_copies_are_found_among_images_on_disk(folders: Callable[..., list[str]], tmp_path: Path) -> None:
    own = {"cat": 1, "dog": 2}
    settings = [*folders(train=own, test=own), "data.stream=true"]
    (tmp_path / "test" / "cat" / "other.png").write_bytes((tmp_path / "train" / "cat" / "0.png").read_bytes())
    assert_warned(lambda: load_splits(config_of(*settings), 0), "1", "0.png")


@pytest.mark.slow
def test_a_run_from_disk_ends_as_one_in_memory(folders: Callable[..., list[str]], tmp_path: Path) -> None:
    own = {"cat": 1, "dog": 2}
    settings = [*folders(train=own, val=own, test=own), "model.epochs=1", "queries=19", "seeds=1"]
    settings += [
        "adapter.dim=3",
        "adapter.outputs=true",
        "finetune.steps=2",
        "population=1",
        "workers=1",
    ]
    found = {}
    for stream in ("false", "true"):
        config = config_of(*settings, f"data.stream={stream}", "device=cpu")
        report = run_and_report(ClassificationExperiment, config, tmp_path / f"out-{stream}", resume=False)
        found[stream] = {name: [each.test for each in ends] for name, ends in report.records[0].outcomes.items()}
    assert found["true"] == found["false"]
    assert len(found["true"]) > 3
