"""Labelled data in memory: loaders of common formats, and the three parts that finetuning for a metric needs."""

import bz2
import csv
import difflib
import gzip
import io
import os
import reprlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from metricopt_ext.data.images import MAX_PIXELS, load_image_folder
from metricopt_ext.data.labelled import MAX_BYTES, Labelled, Split, check_bytes
from metricopt_ext.data.splits import Splits, check_fractions
from metricopt_ext.errors import DataError
from metricopt_ext.utils.checks import check_at_least
from metricopt_ext.utils.files import existing, read_at_most
from metricopt_ext.utils.words import brief, counted

StrPath = str | os.PathLike[str]
Array = npt.NDArray[Any]

# Text may have max_bytes divided by this: while it is parsed, it takes up to 30 times its size.
TEXT_SHARE = 32

_SKLEARN_SETS = ("breast_cancer", "digits", "iris", "wine")
_BLANK = {"", "?"}  # how tables mark a missing value
_MISSING = {*_BLANK, "n/a", "na", "none", "null"}  # and a missing number, in lower case; float reads nan


def split(
    x: Tensor,
    y: Tensor,
    fractions: Sequence[float] = (0.7, 0.1, 0.2),
    seed: int = 0,
    class_names: Sequence[str] | None = None,
) -> Splits:
    """Divide a set at random, the same way for the same seed.

    Args:
        x: Inputs, ``n x ...``.
        y: Labels, ``n`` int64 from 0.
        fractions: Shares of train, validation and test, above 0 and summing to 1.
        seed: Seed of the shuffle.
        class_names: A name for each class; by default their numbers, up to the largest label.

    Raises:
        ValueError: For fractions out of range.
        DataError: For a set too small to divide this way.
    """
    check_fractions(fractions)
    whole = Split(x, y)
    if len(whole) == 0:
        raise DataError("the set to split is empty")
    names = tuple(class_names) if class_names is not None else tuple(map(str, range(int(y.max()) + 1)))
    single = (y.bincount() == 1).nonzero().flatten().tolist()
    if single:
        raise DataError(
            f"class {names[single[0]]!r} has a single example, which can't be in train, validation and test"
        )
    _, validation, test = (round(share * len(whole)) for share in fractions)
    rest, test_part = hold_out(whole, test, seed)
    train_part, validation_part = hold_out(rest, validation, seed)
    return Splits(train_part, validation_part, test_part, names)


def hold_out(data: Split, size: int | float, seed: int = 0) -> tuple[Split, Split]:
    """Set aside a part at random, e.g. for validation in a set that comes with its own test part.

    Args:
        data: The examples.
        size: How many to set aside, or their share if it is a float in (0, 1).
        seed: Seed of the shuffle.

    Returns:
        The rest, and the part set aside.

    Raises:
        DataError: If either part would be empty, or too small to hold every class.
    """
    from sklearn.model_selection import train_test_split

    count = round(size * len(data)) if isinstance(size, float) else size
    if not 0 < count < len(data):
        raise DataError(f"holding out a part must leave neither part empty, got {count} of {len(data)} examples")
    labels = data.y.numpy(force=True)
    try:
        rest, held = train_test_split(np.arange(len(data)), test_size=count, random_state=seed, stratify=labels)
    except ValueError as error:
        raise DataError(f"cannot set aside {count} of {len(data)} examples by class: {error}") from error
    return data.take(torch.from_numpy(rest)), data.take(torch.from_numpy(held))


def standardise(splits: Splits) -> Splits:
    """Shift and scale each feature by its mean and standard deviation in train; constant features are only shifted.

    Args:
        splits: Parts with float32 inputs ``n x d``.

    Raises:
        DataError: For inputs of another shape or type.
    """
    x = splits.train.x
    if x.ndim != 2 or not x.is_floating_point():
        raise DataError(f"inputs to standardise must be n x d floats, got {x.dtype} of shape {tuple(x.shape)}")
    mean, std = x.double().mean(0), x.double().std(0, correction=0)
    std = torch.where(x.amax(0) > x.amin(0), std, 1)

    return splits.map(lambda part, name: Split(((part.x.double() - mean) / std).float(), part.y))


def with_positive(splits: Splits, name: str) -> Splits:
    """Number two classes such that the one of this name is 1, the positive class of binary metrics.

    Raises:
        DataError: There are more than two classes, or none has this name.
    """
    names = splits.class_names
    if len(names) != 2:
        raise DataError(f"data.positive={name!r} is for two classes, but the data have {len(names)}")
    if name not in names:
        raise DataError(f"data.positive={name!r} must be one of the two classes, {names[0]!r} or {names[1]!r}")
    if name == names[1]:
        return splits
    return replace(splits.map(lambda part, _: Split(part.x, 1 - part.y)), class_names=names[::-1])


def load_libsvm(
    paths: StrPath | Sequence[StrPath], num_features: int | None = None, *, max_bytes: int = MAX_BYTES
) -> Labelled:
    """Read files in LIBSVM (SVMlight) format, gzipped if named ``.gz``, and stack them.

    Args:
        paths: One file or several.
        num_features: Number of features d; by default the largest index found.
        max_bytes: Most bytes of the inputs in memory; of the text, unzipped, a 32nd part of it.

    Returns:
        Inputs ``n x d`` float32, and classes numbered in ascending order of their labels in the file (-1 before +1).

    Raises:
        DataError: For a file that is missing or malformed, or has more than d features, or more bytes than allowed.
    """
    from sklearn.datasets import load_svmlight_files

    files = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    named, left = ", ".join(map(str, files)), max_bytes // TEXT_SHARE
    texts = []
    for file in files:
        texts.append(_text(existing(file), left))
        left -= len(texts[-1])
    try:
        loaded = load_svmlight_files(list(map(io.BytesIO, texts)), n_features=num_features, dtype=np.float32)
    except Exception as error:  # it indexes and converts whatever it reads, with errors of many types
        raise DataError(f"cannot read {named} as LIBSVM data: {brief(error)}") from error
    del texts
    rows, features = sum(part.shape[0] for part in loaded[::2]), loaded[0].shape[1]
    check_bytes(f"{named}, of {rows} rows and {features} features,", 4 * rows * features, max_bytes)
    x = np.concatenate([part.toarray() for part in loaded[::2]])
    labels, y = np.unique(np.concatenate(loaded[1::2]), return_inverse=True)
    if len(y) == 0:
        raise DataError(f"{named} holds no examples")
    return Labelled(torch.from_numpy(x), torch.from_numpy(y), tuple(f"{label:g}" for label in labels))


def load_a9a(root: StrPath, *, max_bytes: int = MAX_BYTES) -> Labelled:
    """Read the two files of a9a (Adult), 48,842 rows of 123 features; class 1 earns more than 50,000.

    Args:
        root: Folder of ``a9a`` and ``a9a.t``, each gzipped (``.gz``) or not.
        max_bytes: As in `load_libsvm`.

    Raises:
        DataError: For a missing or malformed file.
    """
    files = [existing(Path(root, name), Path(root, f"{name}.gz")) for name in ("a9a", "a9a.t")]
    return load_libsvm(files, 123, max_bytes=max_bytes)


def load_csv(
    path: StrPath,
    target: str,
    *,
    drop: Sequence[str] = (),
    delimiter: str = ",",
    max_categories: int = 100,
    max_bytes: int = MAX_BYTES,
) -> Labelled:
    """Read a table with a header row; numeric columns are kept, each other column becomes one 0/1 column per value.

    Args:
        path: The file, in UTF-8.
        target: Name of the class column; classes are numbered in numeric or else alphabetical order, and a class named
            NA or none comes after numbers.
        drop: Names of columns to leave out.
        delimiter: Character between cells; whitespace around cells is ignored.
        max_categories: Maximum number of values in a text column, or of classes in the target.
        max_bytes: Most bytes of the inputs in memory; of the file a 32nd part of it.

    Returns:
        Inputs ``n x d`` float32, and classes named by their values.

    Raises:
        DataError: For a missing or malformed file, a name not in the header or a column without a name, a missing
            number (an empty cell, ``?``, ``NA``, ...), a decimal comma, an empty cell or ``?`` in the target, a
            column with too many values, or more bytes than allowed.
    """
    if len(delimiter) != 1:
        raise DataError(f"data.delimiter={delimiter!r} must be one character")
    rows = _table(path, delimiter, max_bytes // TEXT_SHARE)
    header = rows[0][1]
    _check_header(path, header, target, drop)
    lines = [line for line, _ in rows[1:]]
    columns = list(zip(header, zip(*(row for _, row in rows[1:]), strict=True), strict=True))

    features: list[Array] = []
    width = 0
    for name, column in columns:
        if name == target or name in drop:
            continue
        numbers = _numbers(column)
        if numbers is None:
            if _numbers([cell.replace(",", ".") for cell in column]) is not None:
                comma = next(cell for cell in column if "," in cell)
                raise DataError(f"{path}: numbers must have a decimal point, got {comma!r} in column {name!r}")
            values, codes = _coded(column)
            if len(values) > max_categories:
                raise DataError(
                    f"{path}: {_too_many('text column', name, values, max_categories)}; leave it out"
                    f" (data.drop=[{name}]) or raise data.max_categories"
                )
            width += len(values)
            check_bytes(
                f"{path}, of {len(codes)} rows and at least {width} features,", 4 * width * len(codes), max_bytes
            )
            features.append(codes[:, None] == np.arange(len(values)))
            continue
        invalid = np.flatnonzero(~np.isfinite(numbers))
        if len(invalid):
            at = int(invalid[0])
            raise DataError(
                f"{path}: column {name!r} must be a finite number in each row, got {column[at]!r} in row {lines[at]}; "
                f"fill it in, or leave out the row or the column (data.drop=[{name}])"
            )
        width += 1
        features.append(numbers[:, None].astype(np.float32))
    if not features:
        raise DataError(f"{path} must have a feature column besides the target {target!r}, got {header}")

    labels = dict(columns)[target]
    for line, label in zip(lines, labels, strict=True):
        if label in _BLANK:
            raise DataError(f"{path}: {target!r} must be given in each row, but is {label!r} in row {line}")
    classes, y = _coded(labels)
    if len(classes) > max_categories:
        raise DataError(
            f"{path}: {_too_many('target', target, classes, max_categories)}; it must hold classes, not a quantity"
            " (or raise data.max_categories)"
        )
    numbers = _numbers(classes)
    if numbers is not None:
        order = np.argsort(numbers, kind="stable")
        classes, y = [classes[i] for i in order], np.argsort(order)[y]
    x = np.concatenate(features, axis=1, dtype=np.float32)
    return Labelled(torch.from_numpy(x), torch.from_numpy(y), tuple(classes))


def load_cifar10(
    root: StrPath,
    limit_per_class: int | None = None,
    *,
    max_bytes: int = MAX_BYTES,
    max_pixels: int = MAX_PIXELS,
) -> tuple[Labelled, Labelled]:
    """Read the train and test sets of CIFAR-10, 50,000 and 10,000 images of ten classes.

    Args:
        root: Folder that holds either ``cifar-10-batches-py``, or ``train`` and ``test``, each a folder or a ``.zip``
            of ``<class>/<file>`` images.
        limit_per_class: Keep only the first this many of each class in each set; at least 1.
        max_bytes: As in `load_image_folder`.
        max_pixels: As in `load_image_folder`.

    Returns:
        Train and test, with inputs ``n x 3 x 32 x 32`` uint8 (RGB).

    Raises:
        DataError: If neither layout is found, a file is corrupt, or the sets' classes differ.
    """
    check_at_least(1, limit_per_class=limit_per_class)
    if Path(root, "cifar-10-batches-py").is_dir():
        return _cifar10_batches(root, True, limit_per_class), _cifar10_batches(root, False, limit_per_class)
    train, test = (
        load_image_folder(
            existing(Path(root, name), Path(root, f"{name}.zip")),
            limit_per_class=limit_per_class,
            max_bytes=max_bytes,
            max_pixels=max_pixels,
        )
        for name in ("train", "test")
    )
    if train.class_names != test.class_names:
        raise DataError(f"{root}: test must have the classes of train {train.class_names}, got {test.class_names}")
    return train, test


def load_sklearn(name: str) -> Labelled:
    """Load a real data set that comes with scikit-learn.

    Args:
        name: ``breast_cancer``, ``digits``, ``iris`` or ``wine``.

    Returns:
        Inputs ``n x d`` float32; for digits, ``n x 1 x 8 x 8`` in [0, 1].

    Raises:
        ValueError: For another name.
    """
    import sklearn.datasets

    if name not in _SKLEARN_SETS:
        raise ValueError(f"the data set must be one of {', '.join(_SKLEARN_SETS)}, got {name!r}")
    bunch = getattr(sklearn.datasets, f"load_{name}")()
    x = torch.tensor(bunch.data, dtype=torch.float32)
    if name == "digits":
        x = x.view(-1, 1, 8, 8) / 16
    return Labelled(x, torch.tensor(bunch.target, dtype=torch.int64), tuple(map(str, bunch.target_names)))


def _text(path: Path, most: int) -> bytes:
    """A file's content, unzipped if it is named ``.gz`` or ``.bz2``: at most so many bytes."""
    openers: dict[str, Callable[..., IO[bytes]]] = {".gz": gzip.open, ".bz2": bz2.open}  # type: ignore[dict-item]
    opener = openers.get(path.suffix, open)
    try:
        with opener(path, "rb") as file:
            text = read_at_most(file, most)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {brief(error)}") from error
    if text is None:
        raise DataError(
            f"{path} has more than {most} bytes of text; all text may have max_bytes / {TEXT_SHARE}, so raise max_bytes"
            " if that is right"
        )
    return text


def _table(path: StrPath, delimiter: str, most: int) -> list[tuple[int, list[str]]]:
    """The rows that are not blank, header first, each with its number and its cells stripped."""
    try:
        lines = io.StringIO(_text(existing(path), most).decode("utf-8-sig"), newline="")
        read = list(csv.reader(lines, delimiter=delimiter, skipinitialspace=True, strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path} as CSV: {brief(error)}") from error
    rows = [(number, [cell.strip() for cell in row]) for number, row in enumerate(read, start=1) if row]
    if len(rows) < 2:
        raise DataError(f"{path} must hold a header and at least one row, got {counted(len(rows), 'row')}")
    width = len(rows[0][1])
    for number, row in rows:
        if len(row) != width:
            raise DataError(f"{path}: row {number} must have {width} cells like the header, got {len(row)}")
    return rows


def _check_header(path: StrPath, header: list[str], target: str, drop: Sequence[str]) -> None:
    for name in (target, *drop):
        if header.count(name) == 1:
            continue
        near = ", ".join(
            map(brief, difflib.get_close_matches(name, [cell[:100] for cell in header[:1000]], cutoff=0.0))
        )
        why = f"{path} must have one column {name!r}, got {header.count(name)}; nearest among {len(header)}: {near}"
        if len(header) == 1:
            why += "; is data.delimiter the character between its cells?"
        elif sum(_numbers([cell]) is not None for cell in header) > len(header) / 2:
            why += "; its first row must name the columns"
        raise DataError(why)
    if "" in header and "" not in drop:
        raise DataError(
            f"{path}: column {header.index('') + 1} of {len(header)} has no name, like one of row numbers; name it, or"
            """ leave it out ("data.drop=['']")"""
        )


def _numbers(column: Sequence[str]) -> Array | None:
    """The column as float64 with NaN for missing numbers; None if it holds text, or nothing but words such as none."""
    words = {cell.lower() for cell in column} - _BLANK
    if words and words <= _MISSING:
        return None
    try:
        return np.array(["nan" if cell.lower() in _MISSING else cell for cell in column], dtype=np.float64)
    except ValueError:
        return None


def _coded(column: Sequence[str]) -> tuple[list[str], Array]:
    """The distinct values in alphabetical order, and the place of each cell's. NumPy would make all as long as one."""
    values = sorted(set(column))
    places = {value: place for place, value in enumerate(values)}
    return values, np.array([places[cell] for cell in column])


def _too_many(what: str, name: str, values: Sequence[str], limit: int) -> str:
    shown = reprlib.repr(values[:3])
    return f"{what} {name!r} must have at most {limit} distinct values, got {len(values)} such as {shown}"


def _cifar10_batches(root: StrPath, train: bool, limit_per_class: int | None) -> Labelled:
    from torchvision.datasets import CIFAR10

    try:
        batches = CIFAR10(os.fspath(root), train=train)
    except RuntimeError as error:
        raise DataError(f"{Path(root, 'cifar-10-batches-py')} is incomplete or corrupt: {error}") from error
    y = torch.tensor(batches.targets)
    every = [(y == label).nonzero().flatten()[:limit_per_class] for label in range(len(batches.classes))]
    rows = torch.cat(every).sort().values
    x = torch.from_numpy(batches.data).permute(0, 3, 1, 2).contiguous()
    return Labelled(x[rows], y[rows], tuple(batches.classes))
