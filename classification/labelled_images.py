"""Images with several labels each: a CSV file that says which labels an image has, and a folder."""

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from metricopt_ext.classification.columns import PRESENT
from metricopt_ext.data.images import (
    SUFFIXES,
    ImageSize,
    read_images,
    reader,
    stream_images,
)
from metricopt_ext.data.labelled import Labelled
from metricopt_ext.data.reading import Reading, near_names
from metricopt_ext.data.streamed import as_inputs
from metricopt_ext.data.text_files import DELIMITERS, content_of, rows_of_cells
from metricopt_ext.errors import DataError
from metricopt_ext.utils.files import existing, is_hidden, walked
from metricopt_ext.utils.words import brief, counted

# what the column of the images' names is called, in lower case
FILE_COLUMNS = ("filename", "file_name", "image", "image_name", "image_id", "image_path", "file", "path", "img", "id")
TABLES = (".csv", ".tsv")
SEPARATORS = (",", ";", "|")  # between the labels of a cell, before spaces
_SHOWN = 3  # images, rows or labels that a message names
_COUNTED = 30  # labels whose examples are counted in the report


@dataclass(frozen=True)
class Labels:
    """Which labels the images of a file have.

    Attributes:
        file: The file.
        folder: The folder of the images.
        images: Their names there, ``n``.
        labels: The names of all labels, ``k``.
        having: The labels that each image has, ``n`` sets.
        fixed: Whether the file has each label's absence too, in a column of its own.
        said: How they were read, in words.
    """

    file: Path
    folder: Path
    images: list[str]
    labels: tuple[str, ...]
    having: list[set[str]]
    fixed: bool
    said: str

    def targets(self, names: Sequence[str]) -> Tensor:
        """Return which of these labels each image has, ``n x k`` int64 of 0 and 1."""
        return torch.tensor([[int(name in having) for name in names] for having in self.having])


def read_labels(file: Path, *, images: str = "", targets: Sequence[str] = ()) -> Labels:
    """Read which labels images have, from a CSV with a column of their names.

    It has a column for each label, of 0 and 1 (or yes and no, true and false), as Roboflow exports it, or one column
    with the labels of each image, as Kaggle's planet, parted by a comma, semicolon or bar, or else spaces. An image is
    named by its path below the folder, with or without the folders before it, or the suffix.

    Args:
        file: The file.
        images: The folder of the images; empty for the file's own, with what is below it.
        targets: The columns of labels; none for all but the one of names.

    Raises:
        DataError: For an image that is not there or may be either of two, an image with two rows, a column that is
            neither of labels nor of names, labels that may be parted in two ways, or a file that can't be read.
    """
    if file.suffix.lower() not in TABLES:
        raise DataError(f"{file} must be a CSV with the images' names and labels; data.kind=multilabel needs one")
    found = _read_table(file, existing(images) if images else file.parent, targets)
    if len(found.labels) < 2:
        raise DataError(f"{file}: several labels each need two labels at least, got {_few(found.labels) or 'none'}")
    if near := near_names(found.labels):
        raise DataError(f"{file}: of its labels {near[0]}")
    return found


def load_labelled(
    found: Labels,
    names: Sequence[str],
    size: ImageSize | None = None,
    *,
    stream: bool = False,
) -> Labelled:
    """Read the images of a file of labels, in the order of its rows.

    Args:
        found: What `read_labels` returned.
        names: The labels, in the order of the targets' columns.
        size: As in `load_image_folder`.
        stream: As in `load_image_folder`.

    Returns:
        Inputs ``n x 3 x h x w`` uint8, and which labels each has, ``n x k`` int64.

    Raises:
        DataError: For an unreadable image, or unequal sizes without ``size``.
    """
    folder, read = found.folder, reader(found.folder)
    if stream:
        x = as_inputs(stream_images(folder, found.images, read, size))
    else:
        x = read_images(folder, found.images, read, size)
    return Labelled(x, found.targets(names), tuple(names), names=[str(folder / name) for name in found.images])


def warn_of_unlabelled(parts: Sequence[Labels]) -> None:
    """Warn of images in the folders of labelled ones that no file has a row for: they are left out."""
    every = {each.folder / name for each in parts for name in each.images}
    for folder in dict.fromkeys(each.folder for each in parts):
        left = [name for name in _image_names(folder) if folder / name not in every]
        if left:
            warnings.warn(
                f"{folder}: {counted(len(left), 'image')} without a row of labels left out: {_few(left)}", stacklevel=2
            )


def reading_of(parts: Mapping[str, Labels], names: Sequence[str]) -> Reading:
    """Say how files of labels were read, and how many examples each label has."""
    said = "; ".join(f"{name}: {each.said}" if name else each.said for name, each in parts.items())
    counts = sum((Counter(label for having in each.having for label in having) for each in parts.values()), Counter())
    shown = ", ".join(f"{brief(name)} {counts[name]}" for name in names[:_COUNTED])
    more = f" and {len(names) - _COUNTED} more" if len(names) > _COUNTED else ""
    return Reading(f"{said}; examples of each label: {shown}{more}")


def check_same_columns(parts: Mapping[str, Labels]) -> None:
    """Reject files with a column for each label whose columns differ: that one has no column is not to have no label.

    Raises:
        DataError: The message names the label and the file that lacks it.
    """
    first = next(iter(parts.values()))
    for each in parts.values():
        if each.fixed and first.fixed and (other := sorted({*first.labels} ^ {*each.labels})):
            lacking = each if other[0] in first.labels else first
            raise DataError(
                f"{lacking.file} has no column of the label {brief(other[0])}, which another part has; add it, or name"
                " those that all have by data.targets=[A,B,...]"
            )


def _read_table(file: Path, folder: Path, targets: Sequence[str]) -> Labels:
    text = content_of(existing(file))
    delimiter = "\t" if file.suffix.lower() == ".tsv" else ""
    (_, header), *rows = rows_of_cells(file, text, delimiter, _name_column(text))[0]
    if repeated := [name for name in header if header.count(name) > 1]:
        raise DataError(f"{file} has {brief(repeated[0])} twice in its header; name each column differently")
    if unknown := [name for name in targets if name not in header]:
        raise DataError(f"{file} has no column {unknown[0]!r} of data.targets; its columns are {_few(header)}")
    lines = [line for line, _ in rows]
    columns = dict(zip(header, zip(*(row for _, row in rows), strict=True), strict=True))
    place, images = _images(file, folder, columns, lines, targets)
    others = list(targets) or [name for name in header if name != place]
    if not others:
        raise DataError(f"{file} has no column beside {place!r}; it must say which labels each image has")
    if len(others) == 1:
        having, parted = _parted(file, others[0], columns[others[0]], lines)
        labels, how = sorted(set().union(*having)), f"labels in {others[0]!r}, parted by {parted!r}"
    else:
        having, labels, how = _present(file, columns, others, lines), others, "a column for each label"
    said = f"{counted(len(images), 'image')} of {folder} named in {place!r} of {file.name}, {how}"
    return Labels(file, folder, images, tuple(labels), having, len(others) > 1, said)


def _name_column(text: str) -> str:
    """The header's name for the images' names, by which the delimiter is found; empty if none is known."""
    first = text.lstrip().split("\n", 1)[0]
    cells = [cell.strip(' "\r') for delimiter in DELIMITERS for cell in first.split(delimiter)]
    return next((cell for cell in cells if cell.casefold() in FILE_COLUMNS), "")


def _images(
    file: Path, folder: Path, columns: Mapping[str, Sequence[str]], lines: Sequence[Any], targets: Sequence[str]
) -> tuple[str, list[str]]:
    """The column that names the images, and their names in the folder."""
    find = _finder(folder)
    possible = [name for name in columns if name not in targets]
    known = [name for name in possible if name.casefold() in FILE_COLUMNS] or possible
    naming = [name for name in known if all(find(cell) for cell in columns[name])]
    naming = [name for name in naming if len({*columns[name]}) == len(lines)] or naming
    if len(naming) > 1:
        raise DataError(
            f"{file}: its columns {' and '.join(map(repr, naming[:2]))} both name images of {folder}; leave one of them"
            " out of the file"
        )
    if not naming:
        nearest = max(known, key=lambda name: sum(bool(find(cell)) for cell in columns[name]), default="")
        missing = [i for i, cell in enumerate(columns.get(nearest, ())) if not find(cell)]
        if not missing:
            raise DataError(f"{file} has no column of the images' names; add one named filename")
        raise DataError(
            f"{file}: {len(missing)} of {len(lines)} rows name no image below {folder}, such as"
            f" {brief(columns[nearest][missing[0]])} in column {nearest!r}, row {lines[missing[0]]}; add the images, or"
            " set data.images to their folder"
        )
    place = naming[0]
    return place, _each_once(
        file, folder, [(f"row {line}", find(cell)) for line, cell in zip(lines, columns[place], strict=True)]
    )


def _each_once(file: Path, folder: Path, found: Sequence[tuple[str, list[str]]]) -> list[str]:
    """The image of each row, unless one may be either of two or two rows have one."""
    seen: dict[str, str] = {}
    for where, images in found:
        if len(images) > 1:
            raise DataError(
                f"{file}: the image of {where} may be {' or '.join(map(brief, images[:_SHOWN]))} of {folder}; give its"
                " path, or set data.images to the folder that is meant"
            )
        if (other := seen.setdefault(images[0], where)) != where:
            raise DataError(f"{file}: {brief(images[0])} has its labels in {other} and in {where}; give an image one")
    return list(seen)


def _finder(folder: Path) -> Callable[[str], list[str]]:
    """What finds images below a folder by a path of which theirs is the end, or which is the end of theirs."""
    by_name: defaultdict[str, list[str]] = defaultdict(list)
    for name in _image_names(folder):
        for last in {PurePosixPath(name).name, PurePosixPath(name).stem}:
            by_name[last].append(name)
    found: dict[str, list[str]] = {}

    def find(cell: str) -> list[str]:
        if cell not in found:
            path = PurePosixPath(cell.replace("\\", "/"))
            above = [part for part in path.parts[:-1] if part != "/"]
            possible = by_name.get(path.name, [])
            full = [name for name in possible if PurePosixPath(name).name == path.name] or possible
            exact = [name for name in full if [*PurePosixPath(name).parts[:-1]] == above]
            found[cell] = exact or [name for name in full if _ends_alike([*PurePosixPath(name).parts[:-1]], above)]
        return found[cell]

    return find


def _ends_alike(first: Sequence[str], second: Sequence[str]) -> bool:
    return all(a == b for a, b in zip(reversed(first), reversed(second), strict=False))


def _image_names(folder: Path) -> list[str]:
    try:
        names = walked(folder)[0]
    except OSError as error:
        raise DataError(f"{folder} can't be read: {brief(error)}") from error
    return [name for name in names if name.lower().endswith(SUFFIXES) and not is_hidden(name)]


def _present(
    file: Path, columns: Mapping[str, Sequence[str]], names: Sequence[str], lines: Sequence[Any]
) -> list[set[str]]:
    """The labels of each row, of a column for each."""
    having: list[set[str]] = [set() for _ in lines]
    for name in names:
        for i, cell in enumerate(columns[name]):
            if cell.casefold() not in PRESENT:
                raise DataError(
                    f"{file}: column {name!r} must say 1 or 0 in each row, yes or no, true or false, got"
                    f" {brief(cell)} in row {lines[i]}; if it is no label, name those that are by"
                    " data.targets=[A,B,...], or the one that lists them by data.targets=[A]"
                )
            if PRESENT[cell.casefold()]:
                having[i].add(name)
    return having


def _parted(file: Path, name: str, column: Sequence[str], lines: Sequence[Any]) -> tuple[list[set[str]], str]:
    """The labels of each row, of a column of lists, and what parts them."""
    found = [each for each in SEPARATORS if any(each in cell for cell in column)]
    if len(found) > 1:
        at = next(i for i, cell in enumerate(column) if found[1] in cell)
        raise DataError(
            f"{file}: the labels of {name!r} may be parted by {' or '.join(map(repr, found))}, as in"
            f" {brief(column[at])} in row {lines[at]}; part them all by one"
        )
    if all(cell.casefold() in PRESENT for cell in column):
        raise DataError(
            f"{file}: {name!r} says 0 or 1, which is one label; several labels each need two columns or more"
        )
    if wrong := [i for i, cell in enumerate(column) if cell[:1] in ("[", "{", "(")]:
        raise DataError(
            f"{file}: {name!r} must have labels parted by a comma, semicolon, bar or spaces, without brackets, got"
            f" {brief(column[wrong[0]])} in row {lines[wrong[0]]}"
        )
    parted = found[0] if found else " "
    split = [[label.strip() for label in (cell.split() if parted == " " else cell.split(parted))] for cell in column]
    listed = [[label for label in labels if label] for labels in split]
    if parted == " ":
        _check_spaces(file, name, listed)
    return [set(labels) for labels in listed], parted


def _check_spaces(file: Path, name: str, listed: Sequence[Sequence[str]]) -> None:
    """Reject spaces that may be within labels: words of which neither is ever without the other beside it."""
    words = Counter(word for labels in listed for word in labels)
    beside = Counter(pair for labels in listed for pair in pairwise(labels))
    for (first, second), count in beside.items():
        if count > 1 and count == words[first] == words[second]:
            raise DataError(
                f"{file}: spaces part the labels of {name!r}, or are in them: {brief(first)} and {brief(second)} are"
                " always side by side; part them by commas, or give each label a column"
            )


def _few(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(map(brief, listed[:_SHOWN])) + (", ..." if len(listed) > _SHOWN else "")
