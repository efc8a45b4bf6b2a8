"""Annotated images in YOLO's format: a text file for each image, and data.yaml with the classes and the parts."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from metricopt_ext.detection.boxes_outside import shown_files, warn_of_boxes_outside
from metricopt_ext.detection.records import Annotated, DetectionSet
from metricopt_ext.detection.tables import TruthTable
from metricopt_ext.errors import DataError
from metricopt_ext.runtime.pace import followed
from metricopt_ext.utils.files import bytes_of
from metricopt_ext.utils.words import brief, counted, shortened

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp")
YAML = (".yaml", ".yml")
PARTS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}  # and what data.yaml calls them
ROUNDING = 1e-3  # beyond [0, 1], by as much as files of three decimals are off


@dataclass(frozen=True)
class YoloFile:
    """What data.yaml says.

    Attributes:
        path: The file.
        classes: Names of the classes, by their numbers.
        parts: The folders of the images of each part, by the file's own names of them.
    """

    path: Path
    classes: tuple[str, ...]
    parts: Mapping[str, tuple[Path, ...]]

    def part(self, name: str) -> tuple[Path, ...]:
        """Return the folders of the images of a part.

        Raises:
            DataError: The file has no such part.
        """
        for known in PARTS.get(name, (name,)):
            if known in self.parts:
                return self.parts[known]
        raise DataError(f"{self.path} has no part {name!r}; it has {', '.join(self.parts) or 'none'}")


def yolo_file(root: Path, *, around: bool = True) -> Path | None:
    """Return the ``data.yaml`` of a folder, or the file itself; None without one.

    Args:
        root: The folder, or the file.
        around: Whether the two folders around it are looked at too, for one that names classes.
    """
    if root.suffix.lower() in YAML:
        return root
    for folder in (root, *(root.resolve().parents[:2] if around else ())):
        found = sorted(each for each in folder.glob("*") if each.suffix.lower() in YAML) if folder.is_dir() else []
        named = [each for each in found if each.stem.lower() == "data" and (folder == root or _names_classes(each))]
        named = named or list(filter(_names_classes, found))
        if len(named) == 1:
            return named[0]
    return None


def _names_classes(path: Path) -> bool:
    """Whether a YAML file of another name is YOLO's."""
    try:
        return bool(read_yolo_file(path).parts)
    except DataError:
        return False


def read_yolo_file(path: Path) -> YoloFile:
    """Read a ``data.yaml``; folders are relative to its ``path``, or to its own folder, as Roboflow means ``../train``.

    Raises:
        DataError: It can't be read, names no classes, or another number of them than it says.
    """
    import yaml

    try:
        content = yaml.safe_load(bytes_of(path))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise DataError(f"{path} can't be read as YOLO's data.yaml: {brief(error)}") from error
    names = content.get("names") if isinstance(content, dict) else None
    if "kpt_shape" in (content if isinstance(content, dict) else ()):
        raise DataError(f"{path} has kpt_shape: its labels are keypoints, which are not read; name boxes or polygons")
    if isinstance(names, dict) and {*names} == {*range(len(names))}:
        names = [names[number] for number in range(len(names))]
    if not isinstance(names, list) or not names:
        raise DataError(f"{path} must name the classes by 'names', a list or numbers from 0 with a name each")
    classes = tuple(map(str, names))
    if len({*classes}) < len(classes):
        raise DataError(f"{path} has several classes of one name: {shortened(sorted(classes))}")
    if content.get("nc") not in (None, len(classes)):
        raise DataError(f"{path} says nc: {brief(content['nc'])}, but names {counted(len(classes), 'class')}")
    known = [name for names in PARTS.values() for name in names]
    given = {name: content[name] for name in known if content.get(name)}
    return YoloFile(path, classes, {name: _paths(path, content.get("path"), each) for name, each in given.items()})


def read_yolo(images: Path | Sequence[Path], classes: Sequence[str]) -> DetectionSet:
    """Read annotated images in YOLO's format.

    The boxes of ``images/a.jpg`` are in ``labels/a.txt``, or beside it: ``class x y width height`` on each line, the
    centre and the size as shares of the image's. A line with more numbers is a polygon, of which the box is read. An
    image without such a file has no objects.

    Args:
        images: A folder of images, which may hold further ones; or several.
        classes: Names of the classes, by their numbers from 0.

    Raises:
        DataError: There are no images, no file of labels at all, or one that can't be read; a class is unknown; a
            number is none, or lies outside [0, 1].
    """
    folders = [images] if isinstance(images, Path) else list(images)
    files = [file for folder in folders for file in _files_of(folder)]
    shown = " and ".join(map(str, folders))
    if not files:
        raise DataError(f"{shown} holds no image")
    double = sorted({str(file) for file in files if files.count(file) > 1}) if len({*files}) < len(files) else []
    if double:
        raise DataError(f"{shown} names {double[0]} twice")
    stems = [file.stem for file in files]
    names = [file.as_posix() for file in files] if len({*stems}) < len(stems) else stems
    labels = [_labels_of(file) for file in files]
    without = [file.name for file, found in zip(files, labels, strict=True) if found is None]
    if len(without) == len(files):
        raise DataError(
            f"{shown} has no file of labels for any of {counted(len(files), 'image')}, first {_looked_for(files[0])}"
        )
    if without:
        warnings.warn(
            f"{shown}: {counted(len(without), 'image')} without a file of labels, read as without objects"
            f" ({shown_files(without)})",
            stacklevel=2,
        )
    each = followed(zip(names, files, labels, strict=True), f"read {shown}", len(files))
    read = [_annotated(name, file, found, classes) for name, file, found in each]
    dataset = DetectionSet(tuple(classes), read)
    warn_of_boxes_outside(shown, TruthTable.of(dataset), [file.name for file in files])
    return dataset


def _annotated(name: str, image: Path, labels: Path | None, classes: Sequence[str]) -> Annotated:
    empty = torch.zeros(0, dtype=torch.bool)
    bare = Annotated(name, image, 0, 0, torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), empty, empty).with_size()
    rows = [] if labels is None else _rows(labels, classes)
    scale = torch.tensor([bare.width, bare.height] * 2, dtype=torch.float64)
    boxes = torch.tensor([box for _, box in rows], dtype=torch.float64).reshape(-1, 4) * scale
    return Annotated(
        name,
        image,
        bare.width,
        bare.height,
        boxes.float(),
        torch.tensor([label for label, _ in rows], dtype=torch.int64),
        torch.zeros(len(rows), dtype=torch.bool),
        torch.zeros(len(rows), dtype=torch.bool),
    )


def _rows(file: Path, classes: Sequence[str]) -> list[tuple[int, tuple[float, ...]]]:
    """The class and the edges, as shares of the image, of each object."""
    try:
        lines = bytes_of(file).decode("utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"{file} can't be read: {brief(error)}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words:
            continue
        where = f"line {number} of {file}"
        label = _whole(words[0])
        if not 0 <= label < len(classes):
            raise DataError(
                f"{where} has the class {brief(words[0])}; it must be a number from 0 to {len(classes) - 1}, of"
                f" {shortened(list(classes))}"
            )
        rows.append((label, _edges([_share(word, where) for word in words[1:]], where)))
    return rows


def _whole(word: str) -> int:
    """The number of a class, as 1, or as numpy.savetxt writes it, 1.0 or 1e+00; -1 for what is none."""
    try:
        value = -1.0 if "_" in word else float(word)
    except ValueError:
        return -1
    return int(value) if value.is_integer() else -1


def _edges(shares: Sequence[float], where: str) -> tuple[float, ...]:
    if len(shares) == 4:
        x, y, width, height = shares
        return x - width / 2, y - height / 2, x + width / 2, y + height / 2
    if len(shares) < 6 or len(shares) % 2:
        raise DataError(
            f"{where} has {counted(len(shares), 'number')} after the class; it must have 4, x y width height, or the"
            " corners of a polygon"
        )
    return min(shares[::2]), min(shares[1::2]), max(shares[::2]), max(shares[1::2])


def _share(word: str, where: str) -> float:
    try:
        value = math.nan if "_" in word else float(word)
    except ValueError:
        value = math.nan
    if not -ROUNDING <= value <= 1 + ROUNDING:  # NaN is not
        raise DataError(f"{where} has {brief(word)}; it must be a share of the image's side, from 0 to 1")
    return value


def _paths(file: Path, root: Any, given: Any) -> tuple[Path, ...]:
    """The folders of a part: relative to the file's ``path``, or else to its folder."""
    each = given if isinstance(given, list) else [given]
    bases = [*([file.parent / str(root)] if root else []), file.parent]
    found = []
    for name in map(str, each):
        # Roboflow writes ../train/images for what lies beside the file.
        tried = [base / way for base in bases for way in (name, name.removeprefix("../"))]
        found.append(next((path for path in tried if path.exists()), tried[0]))
    return tuple(found)


def _files_of(folder: Path) -> list[Path]:
    """The images of a folder and those below."""
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder; YOLO's images must be in one")
    return sorted(each for each in folder.rglob("*") if _is_image(each))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()


def _looked_for(image: Path) -> Path:
    """The file of an image's labels, beside ``images`` if it is in such a folder: the last one that is called so."""
    parts = list(image.parts)
    places = [i for i, name in enumerate(parts[:-1]) if name.lower() == "images"]
    if not places:
        return image.with_suffix(".txt")
    parts[places[-1]] = "labels" if parts[places[-1]].islower() else "Labels"
    return Path(*parts).with_suffix(".txt")


def _labels_of(image: Path) -> Path | None:
    return next((each for each in (_looked_for(image), image.with_suffix(".txt")) if each.is_file()), None)
