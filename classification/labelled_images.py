"""Images with several labels each: a CSV file or COCO's JSON that says which labels an image has, and a folder."""

import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from metricopt_ext.classification.columns import PRESENT, near_names
from metricopt_ext.data.images import (
    SUFFIXES,
    ImageSize,
    noting,
    read_images,
    reader,
    stream_images,
)
from metricopt_ext.data.labelled import Labelled
from metricopt_ext.data.own_parts import FOLDERS
from metricopt_ext.data.reading import Reading
from metricopt_ext.data.streamed import as_inputs
from metricopt_ext.data.text_files import DELIMITERS, content_of, rows_of_cells
from metricopt_ext.errors import DataError
from metricopt_ext.utils.files import existing, parse_json, walked
from metricopt_ext.utils.words import brief, counted

WHOLE = ""  # in place of a part's name: the file is of all examples
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


def labels_files(root: Path) -> dict[str, Path]:
    """Return the file of labels that a folder holds, as that of `WHOLE`, or those of its parts.

    Args:
        root: The file itself; or a folder that has one, or one for each part by its name, as ``train.csv`` or
            ``instances_val.json``, in itself or in ``annotations``; or whose folders ``train``, ``valid`` and ``test``
            have one each, as Roboflow exports them.

    Raises:
        DataError: There is none, or none can be told to be the one that is meant.
    """
    if not existing(root).is_dir():
        return {WHOLE: root}
    inner = [each for each in sorted(root.iterdir()) if each.is_dir() and not each.name.startswith((".", "__"))]
    here = _tables_in(root) or _tables_in(root / "annotations")
    if not here and len(inner) == 1:
        return labels_files(inner[0])
    if len(here) == 1:
        return {WHOLE: here[0]}
    if here:
        return _by_part({file: _words(file) for file in here}, root)
    files = {folder: found for folder in inner if (found := _tables_in(folder))}
    if several := [folder for folder, found in files.items() if len(found) > 1]:
        raise DataError(
            f"{several[0]} must have one file of labels, got {_few(file.name for file in files[several[0]])}; name each"
            " part's, data.train=FILE data.val=FILE"
        )
    if not files:
        raise DataError(
            f"{root} has no file of labels, a CSV with the images' names or COCO's JSON; data.kind=multilabel needs one"
        )
    return _by_part({found[0]: [folder.name.lower()] for folder, found in files.items()}, root)


def read_labels(
    file: Path,
    *,
    images: str = "",
    targets: Sequence[str] = (),
    separator: str = "",
) -> Labels:
    """Read which labels images have, from a CSV with a column of their names, or from COCO's JSON.

    A CSV has a column for each label, of 0 and 1 (or yes and no, true and false), as Roboflow exports it, or one column
    with the labels of each image, as Kaggle's planet. Of COCO's JSON an image has the categories of its annotations. An
    image is named by its path below the folder, with or without the folders before it, or the suffix.

    Args:
        file: The file.
        images: The folder of the images; empty for the one beside the file that has its name (without ``instances_``),
            or else the file's own, with what is below it.
        targets: The columns of labels; none for all but the one of names.
        separator: What parts the labels of a cell; empty for a comma, semicolon or bar, or else spaces.

    Raises:
        DataError: For an image that is not there or may be either of two, an image with two rows, a column that is
            neither of labels nor of names, labels that may be parted in two ways, or a file that can't be read.
    """
    folder = existing(images) if images else _folder_of(file)
    read = _read_coco if file.suffix.lower() == ".json" else _read_table
    found = read(file, folder, targets, separator)
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
    contents: dict[str, str] | None = None,
) -> Labelled:
    """Read the images of a file of labels, in the order of its rows.

    Args:
        found: What `read_labels` returned.
        names: The labels, in the order of the targets' columns.
        size: As in `load_image_folder`.
        stream: As in `load_image_folder`.
        contents: As in `load_image_folder`.

    Returns:
        Inputs ``n x 3 x h x w`` uint8, and which labels each has, ``n x k`` int64.

    Raises:
        DataError: For an unreadable image, or unequal sizes without ``size``.
    """
    folder, y = found.folder, found.targets(names)
    if stream:
        streamed = stream_images(folder, found.images, reader(folder), size)
        return Labelled(as_inputs(streamed), y, tuple(names))
    read = noting(reader(folder), contents)
    return Labelled(read_images(folder, found.images, read, size), y, tuple(names))


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


def _read_table(file: Path, folder: Path, targets: Sequence[str], separator: str) -> Labels:
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
        having, parted = _parted(file, others[0], columns[others[0]], lines, separator)
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
    hidden = re.compile(r"(^|/)(\.|__MACOSX/)")
    return [name for name in names if name.lower().endswith(SUFFIXES) and not hidden.search(name)]


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


def _parted(
    file: Path, name: str, column: Sequence[str], lines: Sequence[Any], separator: str
) -> tuple[list[set[str]], str]:
    """The labels of each row, of a column of lists, and what parts them."""
    found = [separator] if separator else [each for each in SEPARATORS if any(each in cell for cell in column)]
    if len(found) > 1:
        at = next(i for i, cell in enumerate(column) if found[1] in cell)
        raise DataError(
            f"{file}: the labels of {name!r} may be parted by {' or '.join(map(repr, found))}, as in"
            f" {brief(column[at])} in row {lines[at]}; say which by data.separator"
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
    if not separator and parted == " ":
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
                " always side by side; data.separator=' ' says that they do, and another character that they don't"
            )


def _read_coco(file: Path, folder: Path, targets: Sequence[str], separator: str) -> Labels:
    if targets or separator:
        raise DataError(f"{file}: data.targets and data.separator are for CSV; COCO's JSON has categories")
    try:
        content = parse_json(content_of(existing(file)))
    except ValueError as error:
        raise DataError(f"cannot read {file} as JSON: {brief(error)}") from error
    try:
        names = {each["id"]: str(each["name"]) for each in content["categories"]}
        rows = {each["id"]: str(each["file_name"]) for each in content["images"]}
        pairs = Counter((each["image_id"], each["category_id"]) for each in content["annotations"])
        sizes = len(content["categories"]), len(content["images"])
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{file} must be COCO's JSON, of images (id, file_name), annotations (image_id, category_id) and categories"
            f" (id, name): {brief(error)}"
        ) from error
    if sizes != (len(names), len(rows)) or len({*names.values()}) < len(names):
        raise DataError(f"{file}: two images or categories have one id, or two categories one name; make them differ")
    having: dict[Any, set[str]] = {each: set() for each in rows}
    for image, category in pairs:
        if image not in having or category not in names:
            raise DataError(f"{file}: an annotation names image {image!r} and category {category!r}; one is not there")
        having[image].add(names[category])
    find = _finder(folder)
    if missing := [name for name in rows.values() if not find(name)]:
        raise DataError(
            f"{file}: {len(missing)} of {counted(len(rows), 'image')} not below {folder}, such as {brief(missing[0])};"
            " add them, or set data.images to their folder"
        )
    images = _each_once(file, folder, [(f"image {key!r}", find(name)) for key, name in rows.items()])
    met = set().union(*having.values())
    labels = tuple(name for name in names.values() if name in met)
    said = f"{counted(len(images), 'image')} of {folder}, labels by the categories of {file.name}"
    if unused := len(names) - len(labels):
        said += f", {unused} of which no image has"
    return Labels(file, folder, images, labels, list(having.values()), False, said)


def _tables_in(folder: Path) -> list[Path]:
    """The files of labels right in a folder."""
    if not folder.is_dir():
        return []
    files = [each for each in sorted(folder.iterdir()) if each.is_file() and not each.name.startswith(".")]
    return [each for each in files if each.suffix.lower() in (*TABLES, ".json")]


def _words(file: Path) -> list[str]:
    """The words of a file's name, in lower case, without numbers."""
    return [word for word in re.split(r"[^a-z]+", file.stem.lower()) if word]


def _by_part(files: Mapping[Path, Sequence[str]], root: Path) -> dict[str, Path]:
    """The file of each part, by the words of its name or its folder's."""
    found: dict[str, Path] = {}
    for file, words in files.items():
        parts = [part for part, known in FOLDERS.items() if {*words} & {*known}]
        if len(parts) != 1 or parts[0] in found:
            raise DataError(
                f"{root} has files of labels, {_few(str(each.relative_to(root)) for each in files)}, and which is of"
                " which part can't be told; name the one to divide, data.root=FILE, or each part's, data.train=FILE"
                " data.val=FILE"
            )
        found[parts[0]] = file
    return {part: found[part] for part in FOLDERS if part in found}


def _folder_of(file: Path) -> Path:
    """The folder of a file's images: one of its name beside it, or beside COCO's ``annotations``; else its own."""
    name = file.stem.removeprefix("instances_")
    above = [file.parent, *([file.parent.parent] if file.parent.name == "annotations" else [])]
    return next((place / name for place in above if (place / name).is_dir()), above[-1])


def _few(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(map(brief, listed[:_SHOWN])) + (", ..." if len(listed) > _SHOWN else "")
