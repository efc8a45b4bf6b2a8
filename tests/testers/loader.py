"""The contract of what reads a user's files: the truth that was written, each value in its row, or a refusal.

A case says how a drawn truth is written in a form that users have, how it is read, and what edits of the files are
refused; each names the file and the row, column or value in question::

    class TestNpz(LoaderTester):
        edits = (("another width", narrower, ["val.npz", 3]), ("nothing", emptied("train.npz"), ["train.npz"]))

        def truths(self):
            return tables()

        def write(self, folder, truth, rng):
            for part, rows in truth.parts.items():
                np.savez(folder / f"{part}.npz", x=[row.numbers for row in rows], y=[row.label for row in rows])

        def read(self, folder, **keys):
            return Truth(...)

An edit is a function of the folder and the truth; what it returns, if anything, has to be named too.
"""

import contextlib
import csv
import hashlib
import itertools
import os
import random
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from PIL import Image

import metricopt_ext as mo
from helpers.refusals import assert_refused
from metricopt_ext.runtime.pace import heard
from testers import FEW

PARTS = ("train", "validation", "test")
DRAWN = settings(phases=[Phase.generate])
"""What is drawn is small as it is; to find something smaller would take minutes."""

RANDOM = st.integers(0, 2**32 - 1).map(random.Random)
"""A draw for all that is not shown by itself, such as an order."""

LETTERS = st.characters(codec="utf-8", categories=["Ll", "Lo"])
# what looks like a number or a missing value has rules of its own
WORDS = st.builds("".join, st.tuples(LETTERS, st.text(LETTERS | st.sampled_from("019 -',\""), max_size=5))).filter(
    lambda word: word == word.strip() and word not in ("nan", "na", "none", "null")
)


class Truth(NamedTuple):
    """What files hold: the classes' names, in the order in which labels count them, and the rows of each part."""

    classes: tuple[str, ...]
    parts: Mapping[str, Sequence[Any]]

    def joined(self) -> Counter[Any]:
        """Return how often each row is there, in whatever part."""
        return Counter(row for rows in self.parts.values() for row in rows)


class Row(NamedTuple):
    """A row of a table; its first number is in no other row of the truth."""

    numbers: tuple[float, ...]
    word: str
    label: str


class Picture(NamedTuple):
    """A picture by the number that is painted in it, which no other has, and the name of its class."""

    number: int
    label: str


Edit = Callable[[Path, Truth], Sequence[object] | None]


def class_names(kind: str = "words or numbers") -> st.SearchStrategy[list[str]]:
    """Draw names in the order of their classes: that of whole numbers, or of the alphabet."""
    numbers = st.sets(st.integers(-9, 1200), min_size=2, max_size=4)
    words = st.lists(WORDS, min_size=2, max_size=4, unique_by=str.casefold).map(sorted)
    as_numbers = numbers.map(lambda found: [str(each) for each in sorted(found)])
    kinds = {"words or numbers": words | as_numbers, "numbers": as_numbers, "words": (words | as_numbers).map(sorted)}
    return kinds[kind]


@st.composite
def labels_of_parts(draw: st.DrawFn, names: Sequence[str], *, given: bool = True) -> dict[str, list[str]]:
    """Draw the labels of each part: all classes in train, and one of the last part may be absent if there are three.

    Args:
        draw: Hypothesis'.
        names: The classes.
        given: Whether all three parts are there; otherwise train is alone, or with one of the others.
    """
    parts = PARTS if given else draw(st.sampled_from((PARTS[:1], PARTS[:2], PARTS[::2])))
    labels = {}
    for part in parts:
        there = [*names]
        if part == "test" and given and len(names) > 2 and draw(st.booleans()):
            there.remove(draw(st.sampled_from(names)))
        labels[part] = there * (draw(st.integers(2, 4)) if given else 10)
        draw(RANDOM).shuffle(labels[part])
    return labels


@st.composite
def tables(draw: st.DrawFn, *, given: bool = True, words: bool = True, classes: str = "words or numbers") -> Truth:
    """Draw tables of numbers that float32 has, with a column of words or without; see `class_names`."""
    names, width = draw(class_names(classes)), draw(st.integers(1, 3))
    said = draw(st.lists(WORDS, min_size=2, max_size=3, unique_by=str.casefold)) if words else [""]
    extremes = draw(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=9))
    rng, parts, count = draw(RANDOM), dict[str, list[Row]](), 0
    for part, labels in draw(labels_of_parts(names, given=given)).items():
        parts[part] = []
        for label in labels:
            numbers = tuple(float(count) if i == 0 else rng.choice(extremes) for i in range(width))
            parts[part].append(Row(numbers, rng.choice(said), label))
            count += 1
    return Truth(tuple(names), parts)


@st.composite
def pictures(draw: st.DrawFn, *, given: bool = True) -> Truth:
    """Draw pictures by their numbers, of classes whose names can be those of folders."""
    names = draw(class_names("words"))
    numbers = draw(RANDOM).sample(range(256), 256)
    drawn = draw(labels_of_parts(names, given=given))
    parts = {part: [Picture(numbers.pop(), label) for label in labels] for part, labels in drawn.items()}
    return Truth(tuple(names), parts)


def paint(path: Path, number: int, size: tuple[int, int] = (4, 3)) -> None:
    """Write a picture of one grey, which stands for its number; see `painted`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((size[1], size[0], 3), number, np.uint8)).save(path)


def painted(pixels: Any) -> int:
    """Return the number that a picture, of values in [0, 1] or up to 255, was painted with."""
    first = float(np.asarray(pixels).flat[0])
    return round(first * 255 if np.asarray(pixels).dtype.kind == "f" else first)


# Edits.


def emptied(file: str) -> Edit:
    """Leave a file without a byte."""
    return lambda folder, _: (folder / file).write_bytes(b"") and None


def line_changed(file: str, row: int, change: Callable[[str], str]) -> Edit:
    """Change a line of a text; the header's is 1."""

    def edit(folder: Path, _: Truth) -> None:
        lines = (folder / file).read_text(encoding="utf-8").splitlines(keepends=True)
        lines[row - 1] = change(lines[row - 1])
        (folder / file).write_text("".join(lines), encoding="utf-8", errors="surrogateescape")

    return edit


def cells_changed(file: str, change: Callable[[list[list[str]]], Any]) -> Edit:
    """Change the cells of a CSV file, of which the first row is the header, in place."""

    def edit(folder: Path, _: Truth) -> None:
        with (folder / file).open(encoding="utf-8", newline="") as opened:
            rows = list(csv.reader(opened))
        change(rows)
        with (folder / file).open("w", encoding="utf-8", newline="") as opened:
            csv.writer(opened).writerows(rows)

    return edit


def cell_changed(file: str, row: int, column: str, cell: str) -> Edit:
    """Write something else into a cell of a CSV file; the header's row is 1."""

    def change(rows: list[list[str]]) -> None:
        rows[row - 1][rows[0].index(column)] = cell

    return cells_changed(file, change)


@contextlib.contextmanager
def listed_otherwise(seed: int) -> Iterator[None]:
    """Let the system list folders in another order, as one does on which the files were written so."""
    rng, scandir, listdir = random.Random(seed), os.scandir, os.listdir

    @contextlib.contextmanager
    def shuffled(path: Any = ".") -> Iterator[Iterator[os.DirEntry[Any]]]:
        with scandir(path) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        yield iter(rng.sample(found, len(found)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "scandir", shuffled)
        patch.setattr(os, "listdir", lambda path=".": rng.sample(found := sorted(listdir(path)), len(found)))
        yield


def contents(folder: Path) -> dict[str, tuple[str, int]]:
    """Return what each file holds, and when it was changed."""
    files = sorted(each for each in folder.rglob("*") if each.is_file())
    return {str(each): (hashlib.sha256(each.read_bytes()).hexdigest(), each.stat().st_mtime_ns) for each in files}


class LoaderTester:
    """What is read is the truth, whatever drawn; what is no truth is refused by its name."""

    edits: Sequence[tuple[str, Edit, Sequence[object]]] = ()
    """What is refused: the edit of the files in words, how it is done, and what the refusal names."""
    ways: Sequence[Mapping[str, Any]] = ({},)
    """The keys of `read` with which the same is read."""
    in_order = True
    """Whether the rows of a file are read in its order."""
    one_by_one = True
    """Whether files, rows or columns are read one by one, and not by a library that reads all of them at once."""

    def truths(self, *, given: bool = True) -> st.SearchStrategy[Truth]:
        """Return what draws a truth, of all parts or, if they are not given, of some."""
        raise NotImplementedError

    def write(self, folder: Path, truth: Truth, rng: random.Random) -> None:
        """Write a truth; ``rng`` draws what must not matter, such as the order of columns."""
        raise NotImplementedError

    def read(self, folder: Path, **keys: Any) -> Truth:
        """Read the folder by the product's public way."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _quiet(self) -> Iterator[None]:
        """Readers warn of absent classes and of small parts."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield

    @contextlib.contextmanager
    def written(self, data: st.DataObject, *, given: bool = True) -> Iterator[tuple[Path, Truth]]:
        """Draw a truth and write it into a folder."""
        truth, seed = data.draw(self.truths(given=given)), data.draw(st.integers(0, 2**32 - 1))
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "files"
            folder.mkdir()
            self.write(folder, truth, random.Random(seed))
            yield folder, truth

    def check(self, read: Truth, truth: Truth) -> None:
        """Check that the classes and each row of each part are the truth's."""
        assert read.classes == truth.classes
        assert read.parts.keys() == truth.parts.keys()
        for part, rows in truth.parts.items():
            found = list(read.parts[part])
            assert found == list(rows) if self.in_order else Counter(found) == Counter(rows), part

    @DRAWN
    @given(data=st.data())
    def test_what_is_read_is_the_truth(self, data: st.DataObject) -> None:
        """Each value, its row and its class, whose number is the same in all parts; the files stay as they were."""
        with self.written(data) as (folder, truth):
            before = contents(folder)
            for keys in self.ways:
                self.check(self.read(folder, **keys), truth)
            assert contents(folder) == before

    @settings(DRAWN, max_examples=FEW)
    @given(data=st.data())
    def test_what_takes_long_says_how_far_it_is(self, data: st.DataObject) -> None:
        """As if each file, row or column took twenty seconds; who reads in tools is told, or else standard error."""
        if not self.one_by_one:
            pytest.skip("a library reads all of it at once")
        now, told, clock = itertools.count(0, 20), list[str](), "metricopt_ext.runtime.pace.time.monotonic"
        with self.written(data) as (folder, truth), mock.patch(clock, side_effect=now), heard(told.append):
            assume(all(len(rows) > 1 for rows in truth.parts.values()))
            self.read(folder)
        assert any(re.search(r", \d+%, about .+ left$", stage) for stage in told), told

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Ask for each edit by its name."""
        if "edit" in metafunc.fixturenames:
            metafunc.parametrize("edit", self.edits, ids=[said for said, _, _ in self.edits])

    @settings(DRAWN, max_examples=FEW)
    @given(data=st.data())
    def test_an_edit_is_refused(self, data: st.DataObject, edit: tuple[str, Edit, Sequence[object]]) -> None:
        """It names what it is about, in each way of reading."""
        _, change, names = edit
        with self.written(data) as (folder, truth):
            more = change(folder, truth) or ()
            for keys in self.ways:
                assert_refused(partial(self.read, folder, **keys), mo.errors.MetricOptError, *names, *more)


class InFolders(LoaderTester):
    """The same of files that are found by listing their folders."""

    @settings(DRAWN, max_examples=FEW)
    @given(data=st.data())
    def test_the_order_of_files_does_not_matter(self, data: st.DataObject) -> None:
        """The same rows come in the same order, however the system lists the folders."""
        with self.written(data) as (folder, truth):
            expected = self.read(folder)
            for keys in self.ways:
                with listed_otherwise(data.draw(st.integers(0, 99))):
                    found = self.read(folder, **keys)
                assert found == expected
            self.check(expected, truth)


class Divided(LoaderTester):
    """The same where parts that are not given are held out of those that are."""

    def classes_of(self, row: Any) -> set[str]:
        """Return the classes that a row has."""
        return {row.label}

    @DRAWN
    @given(data=st.data())
    def test_what_is_not_given_is_held_out(self, data: st.DataObject) -> None:
        """No row is in two parts or in none; each has each class; train lends nothing where validation is given."""
        with self.written(data, given=False) as (folder, truth):
            read = self.read(folder)
            assert (read.classes, read.joined()) == (truth.classes, truth.joined())
            assert all(set().union(*map(self.classes_of, rows)) == {*truth.classes} for rows in read.parts.values())
            for name, lends in (("test", "test"), ("train", "validation")):
                assert lends not in truth.parts or Counter(read.parts[name]) == Counter(truth.parts[name])
            assert self.read(folder) == read


class Sealed(LoaderTester):
    """The same of files that tell where they end."""

    sealed = "*"
    """A pattern of their names."""

    @DRAWN
    @given(data=st.data())
    def test_a_file_that_was_cut_is_refused(self, data: st.DataObject) -> None:
        """By its name, wherever it was cut; only what lacks nothing that matters may be read, and is the truth."""
        with self.written(data) as (folder, truth):
            path = data.draw(st.sampled_from(sorted(folder.rglob(self.sealed))))
            whole = path.read_bytes()
            path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
            for keys in self.ways:
                try:
                    read = self.read(folder, **keys)
                except mo.errors.MetricOptError as error:
                    refusal = str(error)
                else:
                    self.check(read, truth)
                    continue
                assert path.name in refusal
