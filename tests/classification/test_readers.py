"""Users' files as a classifier's data: each form is read as it was written, or refused by name."""

import csv
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.classification.splits import load_splits
from metricopt_ext.data.splits import PARTS, Splits
from metricopt_ext.utils.config import load_config
from testers.loader import (
    Divided,
    InFolders,
    Picture,
    Row,
    Sealed,
    Truth,
    emptied,
    line_changed,
    paint,
    painted,
    pictures,
    tables,
)

KEYS = dict(zip(PARTS, ("train", "val", "test"), strict=True))


class Classified(Divided):
    """Parts that are files or folders of their own, named by their keys."""

    name, suffix = "", ""
    model = "tabular_mlp"
    settings: Sequence[str] = ()

    def truths(self, *, given: bool = True) -> st.SearchStrategy[Truth]:
        return tables(given=given)

    def read(self, folder: Path, **keys: Any) -> Truth:
        splits = self.splits(folder, **keys)
        names = splits.class_names
        parts = {}
        for name in PARTS:
            part = getattr(splits, name)
            inputs = part.x[:]
            parts[name] = [self.row(x, names[y], splits) for x, y in zip(inputs, part.y.tolist(), strict=True)]
        return Truth(names, parts)

    def splits(self, folder: Path, **keys: Any) -> Splits:
        found = [f"data.{key}={folder / key}{self.suffix}" for key in KEYS.values() if self.has(folder, key)]
        if len(found) == 1:
            found = [found[0].replace("data.train", "data.root")]
        more = [f"data.{key}={json.dumps(value)}" for key, value in keys.items()]
        fractions = "data.fractions=[0.4,0.3,0.3]"
        settings = [f"data.name={self.name}", f"model.name={self.model}", *self.settings, fractions, *found, *more]
        return load_splits(load_config(ClassificationConfig, None, settings), 0)

    def has(self, folder: Path, key: str) -> bool:
        return (folder / f"{key}{self.suffix}").exists()

    def row(self, x: torch.Tensor, label: str, splits: Splits) -> Any:
        return Row(tuple(x.tolist()), "", label)


def cells(truth: Truth, rng: random.Random) -> Iterable[tuple[str, list[str], list[list[Any]]]]:
    """Each part's key, header and rows; the first part says the order of columns, and others have their own."""
    for part, rows in truth.parts.items():
        columns: dict[str, Sequence[Any]] = {"label": [row.label for row in rows], "word": [row.word for row in rows]}
        columns |= {f"n{i}": each for i, each in enumerate(zip(*(row.numbers for row in rows), strict=True))}
        header = [*columns] if part == "train" else rng.sample([*columns], len(columns))
        yield KEYS[part], header, [list(row) for row in zip(*(columns[name] for name in header), strict=True)]


class TestCsv(Classified):
    name, suffix = "csv", ".csv"
    settings = ("data.target=label", "data.categories=[word]")
    edits = (
        ("no header", line_changed("train.csv", 1, lambda _: "\n"), ["train.csv", "label"]),
        ("a missing cell", line_changed("val.csv", 3, lambda line: line[: line.rindex(",")] + "\n"), ["val.csv", 3]),
        ("an empty file", emptied("test.csv"), ["test.csv"]),
    )

    def write(self, folder: Path, truth: Truth, rng: random.Random) -> None:
        self.words = sorted({row.word for row in truth.joined()})
        for key, header, rows in cells(truth, rng):
            with (folder / f"{key}.csv").open("w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows([header, *rows])

    def row(self, x: torch.Tensor, label: str, splits: Splits) -> Any:
        assert splits.reading is not None
        named = [*zip(splits.reading.inputs, x.tolist(), strict=True)]
        word = self.words[[value for name, value in named if name == "word"].index(1)]
        return Row(tuple(value for name, value in sorted(named) if name != "word"), word, label)


class TestParquet(Sealed, TestCsv):
    suffix, sealed = ".parquet", "*.parquet"
    edits = (("an empty file", emptied("train.parquet"), ["train.parquet"]),)

    def write(self, folder: Path, truth: Truth, rng: random.Random) -> None:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        self.words = sorted({row.word for row in truth.joined()})
        for key, header, rows in cells(truth, rng):
            columns = dict(zip(header, zip(*rows, strict=True), strict=True))
            parquet.write_table(arrow.table(columns), folder / f"{key}.parquet")


class TestNpz(Sealed, Classified):
    name, suffix, sealed = "arrays", ".npz", "*.npz"

    def truths(self, *, given: bool = True) -> st.SearchStrategy[Truth]:
        return tables(given=given, words=False)

    def write(self, folder: Path, truth: Truth, rng: random.Random) -> None:
        for part, rows in truth.parts.items():
            whole = all(name.lstrip("-").isdecimal() for name in truth.classes)
            labels = np.array([int(row.label) if whole else row.label for row in rows])
            numbers = np.array([row.numbers for row in rows])
            np.savez(folder / f"{KEYS[part]}.npz", x=numbers, y=labels)


class TestLibsvm(Classified):
    name = "libsvm"

    def truths(self, *, given: bool = True) -> st.SearchStrategy[Truth]:
        return tables(given=given, words=False, classes="numbers")

    def write(self, folder: Path, truth: Truth, rng: random.Random) -> None:
        for part, rows in truth.parts.items():
            text = ""
            for row in rows:
                there = [
                    f"{i}:{value!r}" for i, value in enumerate(row.numbers, start=1) if value or rng.random() < 0.5
                ]
                text += " ".join([row.label, *there]) + "\n"
            (folder / KEYS[part]).write_text(text)


class TestClassFolders(InFolders, Sealed, Classified):
    name, model, sealed = "image_folder", "small_cnn", "*.png"
    ways = ({}, {"stream": True})
    in_order = False

    def truths(self, *, given: bool = True) -> st.SearchStrategy[Truth]:
        return pictures(given=given)

    def write(self, folder: Path, truth: Truth, rng: random.Random) -> None:
        for part, rows in truth.parts.items():
            for row in rows:
                paint(folder / KEYS[part] / row.label / f"{rng.random()}.png", row.number)

    def row(self, x: torch.Tensor, label: str, splits: Splits) -> Any:
        return Picture(painted(x), label)
