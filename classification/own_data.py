"""A classifier's data in parts of one's own: three folders of images, or three tables."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from metricopt_ext.classification.arrays import parts_in, read_arrays
from metricopt_ext.classification.data import hold_out
from metricopt_ext.classification.data_config import (
    DataConfig,
    ImageFolderConfig,
    LabelledImagesConfig,
    PartsConfig,
    TableConfig,
)
from metricopt_ext.classification.labelled_images import (
    WHOLE,
    Labels,
    check_same_columns,
    labels_files,
    load_labelled,
    read_labels,
    reading_of,
    warn_of_unlabelled,
)
from metricopt_ext.classification.libsvm import read_libsvm
from metricopt_ext.classification.tables import read_csv
from metricopt_ext.data.images import ImageSize, Limits, load_image_folder
from metricopt_ext.data.labelled import Labelled, Split, Table, Unscaled
from metricopt_ext.data.own_parts import (
    digests_of_files,
    digests_of_rows,
    folders_of_parts,
    renumbered,
    same_classes,
    warn_of_copies,
)
from metricopt_ext.data.reading import Reading
from metricopt_ext.data.splits import Splits, check_fractions
from metricopt_ext.errors import DataError
from metricopt_ext.utils.words import counted


def own_parts(
    data: DataConfig, limits: Limits, seed: int, size: ImageSize | None, columns: Sequence[str] = ()
) -> Splits | None:
    """Read parts of one's own; None if the settings name none, and ``data.root`` is no folder that holds them.

    Validation that is not given is held out from train, test from validation, class by class.

    Args:
        data: The settings.
        limits: What the files may take.
        seed: Draws what is held out.
        size: The size of images, as `load_image_folder` takes it.
        columns: What the metric is given besides (`Split.columns`).

    Raises:
        ConfigError: The settings of the parts don't go together.
        DataError: A part can't be read; a part alone has a class; the parts' columns differ.
    """
    if not isinstance(data, PartsConfig):
        return None
    paths = {name: Path(path) for name, path in data.parts.items()}
    without_classes: list[Path] = []
    if not paths and data.root and data.name == "arrays" and "train" in parts_in(Path(data.root)):
        paths = dict.fromkeys(parts_in(Path(data.root)), Path(data.root))
    if not paths and data.root and isinstance(data, LabelledImagesConfig):
        files = labels_files(Path(data.root))
        paths = {} if WHOLE in files else files
    elif not paths and data.root and isinstance(data, ImageFolderConfig):
        paths, without_classes = folders_of_parts(Path(data.root))
    if not paths:
        return None
    if data.name == "arrays":
        parts, names, found = array_parts(paths, limits)
    elif isinstance(data, LabelledImagesConfig):
        parts, names, found = labelled_image_parts(data, paths, limits, size)
    elif isinstance(data, ImageFolderConfig):
        parts, names, found = image_parts(paths, limits, size, data.stream)
    else:
        parts, names, found = table_parts(data, paths, limits, columns)
    if without_classes:
        found = replace(found, found=f"{found.found}; not read, as it has no classes: {without_classes[0].name}")
    return completed(parts, names, data.fractions, seed, found)


def image_parts(
    paths: Mapping[str, Path], limits: Limits, size: ImageSize | None, stream: bool = False
) -> tuple[dict[str, Split], tuple[str, ...], Reading]:
    """Read a folder of images, ``<class>/<file>``, for each part; their classes are compared by name.

    Returns:
        The parts, the classes' names, and what was read.
    """
    loaded: dict[str, Labelled] = {}
    contents: dict[str, dict[str, str]] = {}
    for name, path in paths.items():
        digests: dict[str, str] = {}
        loaded[name] = load_image_folder(path, size, contents=digests, stream=stream, **limits)
        contents[name] = {str(path / file): digest for file, digest in digests.items()}
    classes = same_classes({name: part.class_names for name, part in loaded.items()})
    warn_of_copies(contents)
    parts = {name: Split(part.x, renumbered(part.y, part.class_names, classes)) for name, part in loaded.items()}
    said = ", ".join(f"{name}: {counted(len(part), 'image')} in {paths[name]}" for name, part in parts.items())
    return parts, classes, Reading(f"folders of images for each part ({said})")


def labelled_image_parts(
    data: LabelledImagesConfig, paths: Mapping[str, Path], limits: Limits, size: ImageSize | None
) -> tuple[dict[str, Split], tuple[str, ...], Reading]:
    """Read a file of labels and its images for each part; the labels are compared by name.

    Returns:
        The parts, the labels' names, and what was read.
    """
    read = {name: read_one(data, path, limits) for name, path in paths.items()}
    check_same_columns(read)
    labels = same_classes({name: each.labels for name, each in read.items()})
    contents: dict[str, dict[str, str]] = {}
    parts: dict[str, Split] = {}
    for name, each in read.items():
        digests: dict[str, str] = {}
        parts[name] = load_labelled(each, labels, limits, size, stream=data.stream, contents=digests)
        contents[name] = {str(each.folder / file): digest for file, digest in digests.items()}
    if data.stream:  # which has read none
        files = {name: [each.folder / file for file in each.images] for name, each in read.items()}
        contents = digests_of_files(files)
    warn_of_copies(contents)
    warn_of_unlabelled([*read.values()])
    return parts, labels, reading_of(read, labels)


def labelled_images(data: LabelledImagesConfig, limits: Limits, size: ImageSize | None) -> tuple[Labelled, Reading]:
    """Read the file of labels that ``data.root`` is or holds, and its images, which are yet to be divided."""
    found = read_one(data, Path(data.root), limits)
    whole = load_labelled(found, found.labels, limits, size, stream=data.stream)
    warn_of_unlabelled([found])
    return whole, reading_of({WHOLE: found}, found.labels)


def read_one(data: LabelledImagesConfig, path: Path, limits: Limits) -> Labels:
    """Read the one file of labels that a path is or holds.

    Raises:
        DataError: It holds those of several parts; and as from `read_labels`.
    """
    files = labels_files(path)
    if WHOLE not in files:
        shown = " and ".join(map(str, files.values()))
        raise DataError(f"{path} has a file of labels for each part, {shown}; name the one that is meant")
    return read_labels(files[WHOLE], limits, images=data.images, targets=data.targets, separator=data.separator)


def array_parts(paths: Mapping[str, Path], limits: Limits) -> tuple[dict[str, Split], tuple[str, ...], Reading]:
    """Read the arrays of each part, of a file each, or all of one file.

    Returns:
        The parts, the classes' names, and what was read.
    """
    names = [name if name in parts_in(path) else "" for name, path in paths.items()]
    read = read_arrays(list(paths.values()), names, max_bytes=limits["max_bytes"])
    loaded = dict(zip(paths, read, strict=True))
    classes = same_classes({name: part.class_names for name, part in loaded.items()})
    parts: dict[str, Split] = {}
    for name, part in loaded.items():
        kind = Unscaled if isinstance(part, Table) else Split
        parts[name] = kind(part.x, renumbered(part.y, part.class_names, classes))
    _check_one_white({name: part.x for name, part in parts.items()}, paths)
    warn_of_copies(
        {
            name: digests_of_rows(part.x, part.y, (f"row {i} of {paths[name]}" for i in range(len(part))))
            for name, part in parts.items()
        },
        "row",
    )
    said = ", ".join(f"{name}: {counted(len(part), 'row')} of {paths[name]}" for name, part in parts.items())
    return parts, classes, Reading(f"arrays, {tuple(parts['train'].x.shape[1:])} each ({said})")


def _check_one_white(parts: Mapping[str, Tensor], paths: Mapping[str, Path]) -> None:
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
    data: PartsConfig, paths: Mapping[str, Path], limits: Limits, columns: Sequence[str] = ()
) -> tuple[dict[str, Split], tuple[str, ...], Reading]:
    """Read a table for each part as one: a column is of one kind in all, and has the values of all.

    Returns:
        The parts, the classes' names, and what was read.
    """
    whole = read_table(data, list(map(str, paths.values())), limits, columns)
    divided = torch.arange(len(whole)).split([len(rows) for rows in whole.rows])
    parts = {name: whole.take(rows) for name, rows in zip(paths, divided, strict=True)}
    names = whole.class_names
    if whole.y.ndim == 1 and not whole.y.is_floating_point():  # each label is a class
        same_classes({name: tuple(names[label] for label in part.y.unique().tolist()) for name, part in parts.items()})
    rows = dict(zip(paths, whole.rows, strict=True))
    warn_of_copies(
        {name: digests_of_rows(part.x, part.y, (f"row {row}" for row in rows[name])) for name, part in parts.items()},
        "row",
    )
    said = ", ".join(f"{name}: {counted(len(part), 'row')}" for name, part in parts.items())
    return {**parts}, names, replace(whole.reading, found=f"{whole.reading.found} ({said})")


def read_table(data: DataConfig, paths: Sequence[str], limits: Limits, columns: Sequence[str] = ()) -> Table:
    """Read one table from files, as the settings say, with the columns that the metric is given."""
    quantity = data.kind == "regression"
    if not isinstance(data, TableConfig):
        return read_libsvm(paths, columns=columns, quantity=quantity, max_bytes=limits["max_bytes"])
    return read_csv(
        paths,
        data.target,
        drop=data.drop,
        categories=data.categories,
        columns=columns,
        targets=data.targets,
        quantity=quantity,
        delimiter=data.delimiter,
        decimal=data.decimal,
        encoding=data.encoding,
        missing=bool(data.missing),
        max_categories=data.max_categories,
        max_bytes=limits["max_bytes"],
    )


def size_of(data: DataConfig) -> ImageSize | None:
    """Return the size of images, as `load_image_folder` takes it."""
    return data.size if isinstance(data, ImageFolderConfig) else data.image_size or None


def streams(data: DataConfig) -> bool:
    """Return whether images are read from disk whenever they are asked for."""
    return isinstance(data, ImageFolderConfig) and data.stream


def completed(
    parts: Mapping[str, Split], names: tuple[str, ...], fractions: Sequence[float], seed: int, reading: Reading
) -> Splits:
    """Return all three parts; one that is not given is held out from another, class by class.

    Args:
        parts: Train, and validation or test or both.
        names: The classes' names.
        fractions: Shares of train, validation and test; the two that take part say how many are held out.
        seed: Draws them.
        reading: How the parts were read; what is held out is added.

    Raises:
        ValueError: For fractions out of range.
        DataError: A part is too small to hold every class.
    """
    check_fractions(fractions)
    train, validation, test = (parts.get(name) for name in ("train", "validation", "test"))
    said, held = reading.found, Split(torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64))
    if train is None:
        raise DataError("the train part is missing; give data.train")
    if validation is None:
        train, held = hold_out(train, fractions[1] / (fractions[0] + fractions[1]), seed)
        said += f"; validation: {counted(len(held), 'example')} held out from train"
    elif test is None:
        validation, held = hold_out(validation, fractions[2] / (fractions[1] + fractions[2]), seed)
        said += f"; test: {counted(len(held), 'example')} held out from validation"
    splits = Splits(train, held if validation is None else validation, held if test is None else test, names)
    return replace(splits, reading=replace(reading, found=said))
