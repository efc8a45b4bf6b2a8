"""Labelled examples from files of arrays."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.refusals import assert_refused, assert_warned

pytest.importorskip("torchvision")

from metricopt_ext.classification.arrays import parts_in, read_arrays
from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.classification.splits import load_splits
from metricopt_ext.data.splits import Splits
from metricopt_ext.errors import DataError
from metricopt_ext.utils.config import load_config

RNG = np.random.default_rng(0)
X = RNG.standard_normal((20, 3))
Y = np.array(["no", "yes"] * 10)


def splits_of(*overrides: str) -> Splits:
    model = "small_cnn" if "images" in overrides else "tabular_mlp"
    settings = [each for each in overrides if each != "images"]
    config = load_config(ClassificationConfig, None, ["data.name=arrays", f"model.name={model}", *settings])
    config.check()
    return load_splits(config, 0)


def test_numbers_keep_their_digits_and_classes_their_names(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X, y=Y[:, None])
    (table,) = read_arrays([tmp_path / "a.npz"])
    assert torch.equal(table.x, torch.from_numpy(X))
    assert (table.class_names, table.y.tolist()) == (("no", "yes"), [0, 1] * 10)
    splits = splits_of(f"data.root={tmp_path / 'a.npz'}", "data.standardise=true", "data.fractions=[0.5,0.2,0.3]")
    assert [len(splits.train), len(splits.validation), len(splits.test)] == [10, 4, 6]


@pytest.mark.parametrize("kind", ["npz", "pt"])
def test_parts_may_be_files_of_their_own(tmp_path: Path, kind: str) -> None:
    for name, rows in (("train", slice(12)), ("val", slice(12, 16)), ("test", slice(16, 20))):
        if kind == "npz":
            np.savez(tmp_path / f"{name}.npz", x=X[rows], y=Y[rows])
        else:
            torch.save({"x": torch.from_numpy(X[rows]), "y": Y[rows].tolist()}, tmp_path / f"{name}.pt")
    splits = splits_of(*(f"data.{name}={tmp_path / name}.{kind}" for name in ("train", "val", "test")))
    assert torch.equal(splits.test.x, torch.from_numpy(X[16:]).float())
    assert splits.validation.y.tolist() == [0, 1, 0, 1]


def test_parts_may_lie_in_one_file(tmp_path: Path) -> None:
    images = RNG.integers(0, 256, (20, 6, 5, 3), dtype=np.uint8)
    arrays: dict[str, Any] = {}
    for part, rows in (("train", slice(12)), ("test", slice(12, 20))):
        arrays |= {f"x_{part}": images[rows], f"y_{part}": np.arange(20)[rows] % 2 + 3}
    np.savez(tmp_path / "all.npz", **arrays)
    assert parts_in(tmp_path / "all.npz") == ("train", "test")
    splits = splits_of("images", f"data.root={tmp_path / 'all.npz'}", "data.fractions=[0.5,0.25,0.25]")
    assert splits.class_names == ("3", "4")
    assert [len(splits.train), len(splits.validation), len(splits.test)] == [8, 4, 8]
    assert torch.equal(splits.test.x, torch.from_numpy(images[12:]).permute(0, 3, 1, 2).float() / 255)


def test_classes_are_compared_by_name_and_copies_found(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X, y=np.arange(20) % 3)
    np.savez(tmp_path / "b.npz", x=X[:4], y=np.array([2, 1, 0, 1]))
    splits = assert_warned(
        lambda: splits_of(f"data.train={tmp_path / 'a.npz'}", f"data.test={tmp_path / 'b.npz'}"), "1"
    )
    assert splits.test.y.tolist() == [2, 1, 0, 1]
    np.savez(tmp_path / "b.npz", x=X[:4], y=np.array([2, 1, 7, 0]))
    assert_refused(
        lambda: splits_of(f"data.train={tmp_path / 'a.npz'}", f"data.test={tmp_path / 'b.npz'}"),
        DataError,
        "'7'",
        "data.test",
    )


@pytest.mark.parametrize(
    ("arrays", "names"),
    [
        ({"x": X}, ()),
        ({"X": X, "y": Y}, ("'x'", "'X'")),
        ({"x": X, "y": Y[:5]}, ("20", "(5,)")),
        ({"x": X, "y": np.eye(20)}, ("(20, 20)",)),
        ({"x": X, "y": X[:, 0]}, ("float64",)),
        ({"x": X[:, 0], "y": Y}, ()),
        ({"x": X / 0.0, "y": Y}, ()),
        ({"x": np.zeros((20, 4, 4, 5), np.uint8), "y": Y}, ()),
        ({"x": np.zeros((20, 1, 4, 3), np.uint8), "y": Y}, ()),
    ],
)
def test_what_is_no_set_is_refused(tmp_path: Path, arrays: dict[str, Any], names: tuple[str, ...]) -> None:
    with np.errstate(divide="ignore", invalid="ignore"):
        np.savez(tmp_path / "a.npz", **arrays)
    assert_refused(lambda: read_arrays([tmp_path / "a.npz"]), DataError, *names)


def test_a_file_of_one_array_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", X)
    assert_refused(lambda: read_arrays([tmp_path / "a.npy"]), DataError)


@pytest.mark.parametrize(
    ("train", "val", "names"),
    [
        ("uint8", "one", ("train.npz", "val.npz", "uint8")),
        ("one", "uint8", ("train.npz", "val.npz", "uint8")),
        ("one", "255", ("val.npz", "255", "uint8")),
        ("255", "one", ("train.npz", "255", "val.npz")),
        ("uint8", "normalised", ("val.npz",)),
        ("normalised", "one", ()),
        ("one", "one", ()),
    ],
)
def test_images_of_all_parts_have_one_white(tmp_path: Path, train: str, val: str, names: tuple[str, ...]) -> None:
    pixels = RNG.integers(0, 256, (20, 1, 4, 4), dtype=np.uint8)
    pixels[:, 0, 0, 0], pixels[:, 0, 0, 1] = 0, 255
    floats = pixels.astype(np.float32)
    forms = {"uint8": pixels, "one": floats / 255, "255": floats, "normalised": floats / 50 - 2}
    for name, form, rows in (("train", train, slice(12)), ("val", val, slice(12, 20))):
        np.savez(tmp_path / f"{name}.npz", x=forms[form][rows], y=Y[rows])
    parts = [f"data.{name}={tmp_path / name}.npz" for name in ("train", "val")]
    if names:
        assert_refused(lambda: splits_of("images", *parts), DataError, *names)
    else:
        assert torch.equal(splits_of("images", *parts).train.x, torch.from_numpy(forms[train][:12]))
