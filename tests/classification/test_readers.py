"""Users' files as a classifier's data: each form is read as it was written, or refused by name."""

import csv
import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from PIL import Image

from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.classification.splits import load_splits
from metricopt_ext.data.splits import PARTS, Splits
from metricopt_ext.utils.config import load_config
from testers.loader import (
    Divided,
    Edit,
    InFolders,
    Picture,
    Row,
    Sealed,
    Truth,
    cell_changed,
    cells_changed,
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
            labels = [self.labels(y, names) for y in part.y.tolist()]
            parts[name] = [self.row(x, label, splits) for x, label in zip(inputs, labels, strict=True)]
        return Truth(names, parts)

    def labels(self, y: Any, names: Sequence[str]) -> Any:
        return names[y]

    def splits(self, folder: Path, **keys: Any) -> Splits:
        found = self.found(folder, **keys)
        more = [f"data.{key}={json.dumps(value)}" for key, value in keys.items() if key != "by_root"]
        fractions = "data.fractions=[0.4,0.3,0.3]"
        settings = [f"data.name={self.name}", f"model.name={self.model}", *self.settings, fractions, *found, *more]
        return load_splits(load_config(ClassificationConfig, None, settings), 0)

    def found(self, folder: Path, **keys: Any) -> list[str]:
        """Return the settings that name the parts; of train alone it is the root."""
        there = [key for key in KEYS.values() if (folder / f"{key}{self.suffix}").exists()]
        names = there if len(there) > 1 else ["root"]
        return [f"data.{name}={folder / key}{self.suffix}" for name, key in zip(names, there, strict=True)]

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
        ("a missing number", cell_changed("val.csv", 3, "n0", ""), ["n0", 3, "val.csv"]),
        ("NaN", cell_changed("train.csv", 2, "n0", "nan"), ["n0", "nan", 2, "train.csv"]),
        ("infinity", cell_changed("test.csv", 4, "n0", "-inf"), ["n0", "-inf", 4, "test.csv"]),
        ("a number with text", cell_changed("test.csv", 2, "n0", "7 kg"), ["n0", "7 kg", 2, "test.csv"]),
        ("a decimal comma", cell_changed("train.csv", 5, "n0", "1,5"), ["n0", "1,5", 5, "train.csv"]),
        ("more than float32", cell_changed("train.csv", 2, "n0", "1e39"), ["n0", "1e+39"]),
        ("a missing label", cell_changed("val.csv", 2, "label", ""), ["label", 2, "val.csv"]),
        ("a class that train lacks", cell_changed("test.csv", 3, "label", "novel"), ["novel", "data.test"]),
        ("a row that is too short", cells_changed("val.csv", lambda rows: rows[2].pop()), ["val.csv", 3]),
        ("a row that is too long", cells_changed("test.csv", lambda rows: rows[1].append("1")), ["test.csv", 2]),
        ("a column that a part lacks", cell_changed("val.csv", 1, "word", "other"), ["val.csv", "word"]),
        (
            "a column without a name",
            cells_changed("train.csv", lambda rows: [row.insert(0, "") for row in rows]),
            ["train.csv", "data.drop"],
        ),
        ("the target twice", cell_changed("train.csv", 1, "n0", "label"), ["train.csv", "label", 2]),
        ("no header", cells_changed("train.csv", lambda rows: rows.pop(0)), ["train.csv", "label"]),
        ("no rows", cells_changed("val.csv", lambda rows: rows.__delitem__(slice(1, None))), ["val.csv"]),
        ("an empty file", emptied("test.csv"), ["test.csv"]),
        ("another encoding", line_changed("val.csv", 2, lambda line: line + "\udcff"), ["val.csv", "UTF-8"]),
        ("a NUL", line_changed("val.csv", 2, lambda line: "\0" + line), ["val.csv", 2, "NUL"]),
        ("an open quote", line_changed("test.csv", 3, lambda line: '"' + line), ["test.csv"]),
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


class TestLibsvm(Classified):
    one_by_one = False
    name = "libsvm"
    edits = (
        ("a word as a value", line_changed("val", 2, lambda _: "1 2:oops\n"), ["val", "LIBSVM"]),
        ("features out of order", line_changed("train", 2, lambda _: "1 2:1 1:1\n"), ["train", "LIBSVM"]),
        ("NaN as a value", line_changed("test", 1, lambda _: "1 1:nan\n"), ["test", "nan"]),
        ("NaN as a label", line_changed("train", 1, lambda _: "nan 1:1\n"), ["train", "labels", "nan"]),
        ("a label of many digits", line_changed("train", 1, lambda _: f"{2**53} 1:1\n"), ["train", 2**53]),
        ("a class that train lacks", line_changed("test", 2, lambda _: "1234.5 1:1\n"), ["1234.5", "data.test"]),
        ("an empty file", emptied("train"), ["data.train"]),
    )

    def truths(self, *, given: bool = True) -> st.SearchStrategy[Truth]:
        return tables(given=given, words=False, classes="numbers")

    def write(self, folder: Path, truth: Truth, rng: random.Random) -> None:
        """Of zeros any may be left out."""
        for part, rows in truth.parts.items():
            text = ""
            for row in rows:
                numbers = [f"{i}:{number!r}" for i, number in enumerate(row.numbers, 1) if number or rng.random() < 0.5]
                text += " ".join([row.label, *numbers]) + "\n"
            (folder / KEYS[part]).write_text(text)


def labels_of(truth: Truth, rows: Sequence[Row | Picture]) -> Any:
    """Whole numbers as such."""
    whole = all(name.lstrip("-").isdecimal() for name in truth.classes)
    return np.array([int(row.label) if whole else row.label for row in rows])


def arrays_changed(file: str, change: Callable[[Any, Any], dict[str, Any]]) -> Edit:
    """Write other arrays in place of a file's x and y."""

    def edit(folder: Path, _: Truth) -> None:
        with np.load(folder / file) as arrays:
            changed = change(arrays["x"], arrays["y"])
        np.savez(folder / file, **changed)

    return edit


class TestNpz(Sealed, Classified):
    one_by_one = False
    name, suffix, sealed = "arrays", ".npz", "*.npz"
    edits = (
        ("a row without a label", arrays_changed("val.npz", lambda x, y: {"x": x, "y": y[1:]}), ["val.npz"]),
        ("no labels", arrays_changed("test.npz", lambda x, y: {"x": x, "z": y}), ["test.npz", "'y'", "'z'"]),
        ("quantities as labels", arrays_changed("train.npz", lambda x, y: {"x": x, "y": x[:, 0] / 7}), ["train.npz"]),
        ("NaN", arrays_changed("train.npz", lambda x, y: {"x": x * np.nan, "y": y}), ["nan"]),
        ("infinity", arrays_changed("val.npz", lambda x, y: {"x": x + np.inf, "y": y}), ["val.npz"]),
        ("another width", arrays_changed("test.npz", lambda x, y: {"x": x.repeat(2, 1), "y": y}), ["test"]),
        ("objects", arrays_changed("val.npz", lambda x, y: {"x": x, "y": y.astype(object)}), ["val.npz", "Python"]),
        ("no rows", arrays_changed("val.npz", lambda x, y: {"x": x[:0], "y": y[:0]}), ["val.npz"]),
        ("an empty file", emptied("test.npz"), ["test.npz"]),
    )

    def truths(self, *, given: bool = True) -> st.SearchStrategy[Truth]:
        return tables(given=given, words=False)

    def write(self, folder: Path, truth: Truth, rng: random.Random) -> None:
        for part, rows in truth.parts.items():
            numbers = np.array([row.numbers for row in rows])
            np.savez(folder / f"{KEYS[part]}.npz", x=numbers, y=labels_of(truth, rows))


class TestPt(TestNpz):
    suffix, sealed = ".pt", "*.pt"
    edits = (("an empty file", emptied("test.pt"), ["test.pt"]),)

    def write(self, folder: Path, truth: Truth, rng: random.Random) -> None:
        for part, rows in truth.parts.items():
            x, y = torch.tensor([row.numbers for row in rows], dtype=torch.float64), labels_of(truth, rows)
            whole = y.dtype.kind == "i"
            torch.save({"x": x, "y": torch.from_numpy(y) if whole else y.tolist()}, folder / f"{KEYS[part]}.pt")


class TestArraysOfAllParts(TestNpz):
    """Of one file, whose arrays are in any order."""

    edits = (("an empty file", emptied("all.npz"), ["all.npz"]),)

    def found(self, folder: Path, **keys: Any) -> list[str]:
        return [f"data.root={folder / 'all.npz'}"]

    def write(self, folder: Path, truth: Truth, rng: random.Random) -> None:
        arrays = {}
        for part, rows in truth.parts.items():
            arrays[f"x_{KEYS[part]}"] = np.array([row.numbers for row in rows])
            arrays[f"y_{KEYS[part]}"] = labels_of(truth, rows)
        np.savez(folder / "all.npz", **{name: arrays[name] for name in rng.sample([*arrays], len(arrays))})


class TestArraysOfImages(Classified):
    one_by_one = False
    """Bytes with channels last or first, or grey ones; or floats in [0, 1]."""

    name, suffix, model = "arrays", ".npz", "small_cnn"
    edits = (
        ("another white", arrays_changed("val.npz", lambda x, y: {"x": (255 * as_floats(x)), "y": y}), ["val.npz"]),
        (
            "bytes here, floats there",
            arrays_changed("test.npz", lambda x, y: {"x": other_type(x), "y": y}),
            ["test.npz"],
        ),
        (
            "floats here, bytes there",
            arrays_changed("train.npz", lambda x, y: {"x": other_type(x), "y": y}),
            ["train.npz"],
        ),
        ("another shape", arrays_changed("val.npz", lambda x, y: {"x": x[..., :1, :1], "y": y}), []),
        (
            "five channels",
            arrays_changed("test.npz", lambda x, y: {"x": np.ones((len(y), 5, 5, 5)), "y": y}),
            ["test.npz"],
        ),
        ("a vector", arrays_changed("test.npz", lambda x, y: {"x": x.ravel()[: len(y)], "y": y}), ["test.npz"]),
    )

    def truths(self, *, given: bool = True) -> st.SearchStrategy[Truth]:
        return pictures(given=given)

    def write(self, folder: Path, truth: Truth, rng: random.Random) -> None:
        layout = rng.choice(["n h w", "n h w c", "n c h w", "floats"])
        for part, rows in truth.parts.items():
            numbers = np.array([row.number for row in rows], np.uint8)
            x = np.broadcast_to(numbers[:, None, None, None], (len(rows), 3, 4, 5))
            forms = {"n h w": x[:, 0], "n h w c": x.transpose(0, 2, 3, 1), "floats": as_floats(x)}
            np.savez(folder / f"{KEYS[part]}.npz", x=forms.get(layout, x), y=np.array([row.label for row in rows]))

    def row(self, x: torch.Tensor, label: str, splits: Splits) -> Any:
        assert tuple(x.shape) in ((3, 4, 5), (1, 4, 5))
        return Picture(painted(x), label)


def as_floats(x: Any) -> Any:
    """Bytes as floats in [0, 1], others as they are."""
    return x.astype(np.float32) / 255 if x.dtype == np.uint8 else x


def other_type(x: Any) -> Any:
    """Bytes as floats in [0, 1], and the other way round."""
    return as_floats(x) if x.dtype == np.uint8 else (255 * x).astype(np.uint8)


def spoilt(part: str, spoil: Callable[[Path], Any]) -> Edit:
    """Change the first picture of a part, which is named."""

    def edit(folder: Path, _: Truth) -> list[str]:
        path = min((folder / part).rglob("*.png"))
        spoil(path)
        return [path.name]

    return edit


def grey_of_16_bits(path: Path) -> None:
    Image.fromarray(np.full((3, 4), 4095, np.uint16)).save(path)


class TestClassFolders(InFolders, Sealed, Classified):
    name, model, sealed = "image_folder", "small_cnn", "*.png"
    ways = ({}, {"stream": True}, {"by_root": True})
    in_order = False
    edits = (
        ("an empty picture", spoilt("val", lambda path: path.write_bytes(b"")), ["empty"]),
        ("no picture", spoilt("train", lambda path: path.write_bytes(b"PK\3\4")), []),
        ("16 bits", spoilt("test", grey_of_16_bits), ["8 bits"]),
        ("another size", spoilt("val", lambda path: paint(path, 1, (9, 9))), ["9 x 9", "image_size"]),
        ("a picture deeper below", spoilt("val", lambda path: paint(path.parent / "more" / path.name, 1)), []),
        ("a class that train lacks", lambda folder, _: paint(folder / "test/novel/1.png", 1), ["novel"]),
        ("a class without a picture", lambda folder, _: (folder / "val/void").mkdir(), ["void"]),
    )

    def truths(self, *, given: bool = True) -> st.SearchStrategy[Truth]:
        return pictures(given=given)

    def write(self, folder: Path, truth: Truth, rng: random.Random) -> None:
        for part, rows in truth.parts.items():
            for row in rows:
                paint(folder / KEYS[part] / row.label / f"{rng.random()}.png", row.number)

    def found(self, folder: Path, **keys: Any) -> list[str]:
        return [f"data.root={folder}"] if keys.pop("by_root", False) else super().found(folder)

    def row(self, x: torch.Tensor, label: str, splits: Splits) -> Any:
        return Picture(painted(x), label)


class TestLabelledImages(InFolders, Sealed, Classified):
    """A file with a column for each label, or with one that lists them; pictures with any number of labels each."""

    name, model, suffix, sealed = "image_folder", "small_cnn", "/labels.csv", "*.png"
    settings = ("data.kind=multilabel", "metric.name=macro_f1")
    ways = ({}, {"stream": True})
    edits = (
        ("a picture that is not there", cell_changed("val/labels.csv", 2, "file", "gone.png"), ["gone.png", 2]),
        ("one that is outside", cell_changed("val/labels.csv", 2, "file", "../../outside.png"), ["outside.png", 2]),
        ("two rows of a picture", cells_changed("test/labels.csv", lambda rows: rows.append(rows[1])), [2]),
        ("an empty picture", spoilt("train", lambda path: path.write_bytes(b"")), ["empty"]),
        ("no rows", cells_changed("val/labels.csv", lambda rows: rows.__delitem__(slice(1, None))), ["val/labels.csv"]),
        ("an empty file", emptied("test/labels.csv"), ["test/labels.csv"]),
    )

    def truths(self, *, given: bool = True) -> st.SearchStrategy[Truth]:
        return pictures(given=given).map(with_labels)

    def write(self, folder: Path, truth: Truth, rng: random.Random) -> None:
        listed = rng.random() < 0.5
        paint(folder.parent / "outside.png", 1)
        for part, rows in truth.parts.items():
            text = [["file", *(["tags"] if listed else truth.classes)]]
            for row in rows:
                name = f"{rng.random()}.png"
                paint(folder / KEYS[part] / "images" / name, row.number)
                has = [int(label in row.label) for label in truth.classes]
                text.append([name, *(["|".join(row.label)] if listed else has)])
            with (folder / KEYS[part] / "labels.csv").open("w", newline="") as file:
                csv.writer(file).writerows(text)

    def labels(self, y: Any, names: Sequence[str]) -> Any:
        return tuple(name for name, has in zip(names, y, strict=True) if has)

    def row(self, x: torch.Tensor, label: Any, splits: Splits) -> Any:
        return Picture(painted(x), label)

    def classes_of(self, row: Any) -> set[str]:
        return {*row.label}


def with_labels(truth: Truth) -> Truth:
    """The same pictures with labels: each part has each label, and rows with several or none of them."""
    names = ("cloud", "lake", "road")
    parts = {}
    for part, rows in truth.parts.items():
        having = [tuple(name for i, name in enumerate(names) if place >> i & 1) for place in range(1, len(rows) + 1)]
        parts[part] = [Picture(row.number, labels) for row, labels in zip(rows, having, strict=True)]
    return Truth(names, parts)


LOADER = """
import json
from pathlib import Path

import numpy as np


def load():
    parts = json.loads((Path(__file__).parent / "rows.json").read_text())
    return {name: (np.array(x), np.array(y)) for name, (x, y) in parts.items()}
"""


def rows_changed(change: Callable[[dict[str, Any]], Any]) -> Edit:
    """Let the function return something else."""

    def edit(folder: Path, _: Truth) -> None:
        parts = json.loads((folder / "rows.json").read_text())
        change(parts)
        (folder / "rows.json").write_text(json.dumps(parts))

    return edit


class TestFunction(Classified):
    one_by_one = False
    """A function of the user's own, in a folder that the settings name."""

    edits = (
        ("no train part", rows_changed(lambda parts: parts.pop("train")), ["data.name", "'train'"]),
        ("another part", rows_changed(lambda parts: parts.update(more=parts["train"])), ["data.name", "more"]),
        ("no labels", rows_changed(lambda parts: parts["test"][1].clear()), ["test"]),
        ("NaN", rows_changed(lambda parts: parts["train"][0][0].__setitem__(0, float("nan"))), ["nan"]),
        ("an error", lambda folder, _: (folder / "rows.json").unlink(), ["data.name", "FileNotFoundError"]),
    )

    def truths(self, *, given: bool = True) -> st.SearchStrategy[Truth]:
        return tables(given=given, words=False)

    def write(self, folder: Path, truth: Truth, rng: random.Random) -> None:
        self.name = f"loader_{folder.parent.name}:load"  # a module that no other test imports
        (folder / f"{self.name.partition(':')[0]}.py").write_text(LOADER)
        parts = {
            part: ([row.numbers for row in rows], labels_of(truth, rows).tolist()) for part, rows in truth.parts.items()
        }
        (folder / "rows.json").write_text(json.dumps(parts))

    def found(self, folder: Path, **keys: Any) -> list[str]:
        return [f"data.folder={folder}"]
