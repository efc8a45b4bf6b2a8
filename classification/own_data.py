"""A classifier's data in parts of one's own: three folders of images, or three tables."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metricopt_ext.classification.arrays import images, labelled, parts_in, read_arrays
from metricopt_ext.classification.data import divided, hold_out
from metricopt_ext.classification.data_config import (
    DataConfig,
    ImageFolderConfig,
    LabelledImagesConfig,
    OwnDataConfig,
    PartsConfig,
    TableConfig,
)
from metricopt_ext.classification.labelled_images import (
    check_same_columns,
    load_labelled,
    read_labels,
    reading_of,
    warn_of_unlabelled,
)
from metricopt_ext.classification.libsvm import read_libsvm
from metricopt_ext.classification.tables import read_csv
from metricopt_ext.data.images import ImageSize, load_image_folder
from metricopt_ext.data.labelled import Labelled, Split, Table, Unscaled
from metricopt_ext.data.own_parts import (
    folders_of_parts,
    renumbered,
    same_classes,
)
from metricopt_ext.data.reading import Reading, row_numbers
from metricopt_ext.data.splits import PARTS, Splits, check_fractions
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.utils.named import named
from metricopt_ext.utils.words import brief, counted


def own_parts(data: DataConfig, seed: int, size: ImageSize | None, columns: Sequence[str] = ()) -> Splits | None:
    """Read parts of one's own; None if the settings name none, and ``data.root`` is no folder that holds them.

    Validation that is not given is held out from train, test from validation, class by class.

    Args:
        data: The settings.
        seed: Draws what is held out.
        size: The size of images, as `load_image_folder` takes it.
        columns: What the metric is given besides (`Split.columns`).

    Raises:
        ConfigError: The settings of the parts don't go together.
        DataError: A part can't be read; a part alone has a class; the parts' columns differ.
    """
    if isinstance(data, OwnDataConfig):
        given = parts_of_function(data)
        where = dict.fromkeys(given, f"data.name={data.name}")
        return completed(*_arrays_together(given, where), data.fractions, seed)
    if not isinstance(data, PartsConfig):
        return None
    paths = {name: Path(path) for name, path in data.parts.items()}
    without_classes: list[Path] = []
    if not paths and data.root and data.name == "arrays" and "train" in parts_in(Path(data.root)):
        paths = dict.fromkeys(parts_in(Path(data.root)), Path(data.root))
    if not paths and data.root and type(data) is ImageFolderConfig:
        paths, without_classes = folders_of_parts(Path(data.root))
    if not paths:
        return None
    if data.name == "arrays":
        parts, names, found = array_parts(paths)
    elif isinstance(data, LabelledImagesConfig):
        parts, names, found = labelled_image_parts(data, paths, size)
    elif isinstance(data, ImageFolderConfig):
        parts, names, found = image_parts(paths, size, data.stream)
    else:
        parts, names, found = table_parts(data, paths, columns)
    if without_classes:
        found = replace(found, found=f"{found.found}; not read, as it has no classes: {without_classes[0].name}")
    return completed(parts, names, found, data.fractions, seed)


def image_parts(
    paths: Mapping[str, Path], size: ImageSize | None, stream: bool = False
) -> tuple[dict[str, Split], tuple[str, ...], Reading]:
    """Read a folder of images, ``<class>/<file>``, for each part; their classes are compared by name.

    Returns:
        The parts, the classes' names, and what was read.
    """
    loaded = {name: load_image_folder(path, size, stream=stream) for name, path in paths.items()}
    classes = same_classes({name: part.class_names for name, part in loaded.items()})
    parts = {
        name: Split(part.x, renumbered(part.y, part.class_names, classes), names=part.names)
        for name, part in loaded.items()
    }
    said = ", ".join(f"{name}: {counted(len(part), 'image')} in {paths[name]}" for name, part in parts.items())
    return parts, classes, Reading(f"folders of images for each part ({said})")


def labelled_image_parts(
    data: LabelledImagesConfig, paths: Mapping[str, Path], size: ImageSize | None
) -> tuple[dict[str, Split], tuple[str, ...], Reading]:
    """Read a file of labels and its images for each part; the labels are compared by name.

    Returns:
        The parts, the labels' names, and what was read.
    """
    read = {name: read_labels(path, images=data.images, targets=data.targets) for name, path in paths.items()}
    check_same_columns(read)
    labels = same_classes({name: each.labels for name, each in read.items()})
    loaded = {name: load_labelled(each, labels, size, stream=data.stream) for name, each in read.items()}
    warn_of_unlabelled([*read.values()])
    return {**loaded}, labels, reading_of(read, labels)


def labelled_images(data: LabelledImagesConfig, size: ImageSize | None) -> tuple[Labelled, Reading]:
    """Read the file of labels that ``data.root`` is, and its images, which are yet to be divided."""
    found = read_labels(Path(data.root), images=data.images, targets=data.targets)
    whole = load_labelled(found, found.labels, size, stream=data.stream)
    warn_of_unlabelled([found])
    return whole, reading_of({"": found}, found.labels)


def array_parts(paths: Mapping[str, Path]) -> tuple[dict[str, Split], tuple[str, ...], Reading]:
    """Read the arrays of each part, of a file each, or all of one file.

    Returns:
        The parts, the classes' names, and what was read.
    """
    names = [name if name in parts_in(path) else "" for name, path in paths.items()]
    read = read_arrays(list(paths.values()), names)
    return _arrays_together(dict(zip(paths, read, strict=True)), paths)


def parts_of_function(data: OwnDataConfig) -> dict[str, Labelled | Table]:
    """Return the parts that a function of the user's own gives.

    It is called as ``FUNCTION(**data.kwargs)`` and returns ``{"train": (inputs, labels)}``, perhaps with
    ``"validation"``, ``"test"`` or both. Inputs and labels are tensors or arrays, as `read_arrays` takes them; with
    ``data.kind=multilabel`` labels are ``n x k`` of 0 and 1.

    Raises:
        ConfigError: There is no such function, or it fails.
        DataError: It returns something else.
    """
    function, where = named("data.name", data.name, data.folder, data.kwargs), f"data.name={data.name}"
    try:
        found = function()
    except Exception as error:
        raise ConfigError(
            f"{where} fails as FUNCTION({'**data.kwargs' if data.kwargs else ''}): {type(error).__name__}:"
            f" {brief(error)}"
        ) from error
    shape = "{'train': (inputs, labels)}, and perhaps 'validation' and 'test'"
    if not isinstance(found, Mapping) or "train" not in found or not {*found} <= {*PARTS}:
        raise DataError(f"{where} returned {brief(found)}; it must return {shape}")
    read = {}
    for name in PARTS:
        if name in found:
            if not isinstance(found[name], tuple | list) or len(found[name]) != 2:
                raise DataError(f"{where} returned {brief(found[name])} as {name}; it must return {shape}")
            x, y = found[name]
            read[name] = _of_function(f"{name} of {where}", x, y, data.kind == "multilabel")
    return read


def _of_function(where: str, x: Any, y: Any, several: bool) -> Labelled | Table:
    try:
        inputs = x if isinstance(x, Tensor) else torch.from_numpy(np.asarray(x))
        labels = y.numpy(force=True) if isinstance(y, Tensor) else np.asarray(y)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where} must be tensors or arrays of numbers: {brief(error)}") from error
    if not several:
        return labelled(where, inputs, labels)
    if labels.ndim != 2 or len(labels) != len(inputs) or labels.dtype.kind not in "iub":
        raise DataError(
            f"{where}: with data.kind=multilabel labels must be {len(inputs)} x k integers, each 0 or 1, got"
            f" {labels.dtype} of shape {labels.shape}"
        )
    numbers, names = torch.from_numpy(labels.astype(np.int64)), tuple(map(str, range(labels.shape[1])))
    if inputs.dim() == 2:
        return Table(inputs.double(), numbers, names, Reading(f"{counted(len(inputs), 'row')} of {where}"))
    return Labelled(images(where, inputs), numbers, names)


def _arrays_together(
    loaded: Mapping[str, Labelled | Table], where: Mapping[str, object]
) -> tuple[dict[str, Split], tuple[str, ...], Reading]:
    """The parts with labels that count the classes of all, the classes' names, and what was read."""
    classes = same_classes({name: part.class_names for name, part in loaded.items()})
    parts: dict[str, Split] = {}
    for name, part in loaded.items():
        kind = Unscaled if isinstance(part, Table) else Split
        y = part.y if part.y.ndim == 2 else renumbered(part.y, part.class_names, classes)
        parts[name] = kind(part.x, y, names=part.names)
    _check_one_white({name: part.x for name, part in parts.items()}, where)
    said = ", ".join(f"{name}: {counted(len(part), 'row')} of {where[name]}" for name, part in parts.items())
    x = parts["train"].x
    return parts, classes, Reading(f"arrays, {tuple(x.shape[1:])} each ({said}){row_numbers(x)}")


def _check_one_white(parts: Mapping[str, Tensor], paths: Mapping[str, object]) -> None:
    """Refuse images of parts in which different values are white.

    Raises:
        DataError: Some are uint8 and others floats, or some end at 1 and others at 2 or later.
    """
    seen: list[tuple[str, str]] = []  # a part's name, and what its images are
    for name, x in parts.items():
        if x.dim() != 4:
            continue
        low, high = float(x.min()), float(x.max())
        own = "uint8" if x.dtype == torch.uint8 else "floats in [0, 1]" if high <= 1 else f"floats up to {high:g}"
        if own != "uint8" and (low < 0 or 1 < high < 2):
            own = ""  # normalised: what is white there, no one can tell
        for first, other in seen:
            kinds = {own.split(" up")[0], other.split(" up")[0]}  # nothing, if no one can tell
            if len(kinds) == 2 and ("" not in kinds or "uint8" in kinds):
                raise DataError(
                    f"{paths[first]} has {other or 'floats'} as images of {first}, {paths[name]} has"
                    f" {own or 'floats'} as those of {name}; save all parts as uint8, or all as floats in [0, 1]"
                )
        seen.append((name, own))


def table_parts(
    data: PartsConfig, paths: Mapping[str, Path], columns: Sequence[str] = ()
) -> tuple[dict[str, Split], tuple[str, ...], Reading]:
    """Read a table for each part as one: a column is of one kind in all, and has the values of all.

    Returns:
        The parts, the classes' names, and what was read.
    """
    whole = read_table(data, list(map(str, paths.values())), columns)
    divided = torch.arange(len(whole)).split(whole.sizes)
    parts = {name: whole.take(rows) for name, rows in zip(paths, divided, strict=True)}
    names = whole.class_names
    if whole.y.ndim == 1:  # each label is a class
        same_classes({name: tuple(names[label] for label in part.y.unique().tolist()) for name, part in parts.items()})
    said = ", ".join(f"{name}: {counted(len(part), 'row')}" for name, part in parts.items())
    return {**parts}, names, replace(whole.reading, found=f"{whole.reading.found} ({said})")


def read_table(data: DataConfig, paths: Sequence[str], columns: Sequence[str] = ()) -> Table:
    """Read one table from files, as the settings say, with the columns that the metric is given."""
    if not isinstance(data, TableConfig):
        return read_libsvm(paths)
    return read_csv(
        paths,
        data.target,
        drop=data.drop,
        categories=data.categories,
        columns=columns,
        targets=data.targets,
        missing=bool(data.missing),
    )


def streams(data: DataConfig) -> bool:
    """Return whether images are read from disk whenever they are asked for."""
    return isinstance(data, ImageFolderConfig) and data.stream


def completed(
    parts: Mapping[str, Split], names: tuple[str, ...], reading: Reading, fractions: Sequence[float], seed: int
) -> Splits:
    """Return all three parts; one that is not given is held out from another, class by class, and two from train.

    Args:
        parts: Train, and perhaps validation and test.
        names: The classes' names.
        reading: How the parts were read; what is held out is added.
        fractions: Shares of train, validation and test; those that take part say how many are held out.
        seed: Draws them.

    Raises:
        ValueError: For fractions out of range.
        DataError: A part is too small to hold every class.
    """
    check_fractions(fractions)
    train, validation, test = (parts.get(name) for name in ("train", "validation", "test"))
    if train is None:
        raise DataError("the train part is missing; give data.train")
    if validation is not None and test is not None:
        return Splits(train, validation, test, names, reading)
    if validation is not None:
        validation, test = hold_out(validation, fractions[2] / (fractions[1] + fractions[2]), seed)
        said = f"test: {counted(len(test), 'example')} held out from validation"
        splits = Splits(train, validation, test, names)
    elif test is not None:
        train, validation = hold_out(train, fractions[1] / (fractions[0] + fractions[1]), seed)
        said = f"validation: {counted(len(validation), 'example')} held out from train"
        splits = Splits(train, validation, test, names)
    else:
        splits, said = divided(train, names, fractions, seed), "validation and test held out from train"
    return replace(splits, reading=replace(reading, found=f"{reading.found}; {said}"))
