"""A retrieval set in parts of one's own, or with queries and a gallery: parts whose classes differ."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metricopt_ext.data.labelled import Labelled, Split
from metricopt_ext.data.own_parts import FOLDERS, folders_of_parts
from metricopt_ext.data.reading import Reading
from metricopt_ext.data.splits import PARTS, Splits
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.retrieval.config import DataConfig, OwnDataConfig
from metricopt_ext.retrieval.data import Searched, disjoint, hold_out_classes, split_classes
from metricopt_ext.retrieval.layouts import GALLERIES, QUERIES, joined, load_class_folders, queries_and_gallery
from metricopt_ext.utils.named import named
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.words import brief, counted

VALIDATION, TEST = PARTS[1:]


def own_parts(data: DataConfig, seed: int) -> Splits | None:
    """Read parts of one's own; None if the settings name none, and ``data.root`` is no folder that holds them.

    Validation that is not given is held out from train's classes (``data.validation_share``), test from validation's
    (half of them).

    Args:
        data: The settings.
        seed: Draws what is held out.

    Raises:
        ConfigError: The settings of the parts don't go together.
        DataError: A part can't be read; a class is in two parts; queries have no gallery.
    """
    paths, left = {name: Path(path) for name, path in data.parts.items()}, list[Path]()
    if not paths and data.name == "class_folders" and data.root:
        paths, left = _folders_of(Path(data.root))
    if not paths:
        return None
    read = {name: _part(path, data) for name, path in paths.items()}
    told = {
        name: " and ".join(f"{counted(len(each), 'image')} of {paths[name] / own}" for own, each in part.items())
        for name, part in read.items()
    }
    said = ", ".join(f"{name}: {folders}" for name, folders in told.items())
    more = f"; not read, as it has no classes: {left[0].name}" if left else ""
    return completed(read, data, seed, f"folders of images for each part ({said}){more}")


def of_function(data: OwnDataConfig, seed: int) -> Splits:
    """Return what a function of the user's own gives, ``data.name=MODULE:FUNCTION``, called with ``data.kwargs``.

    It returns ``{"train": (images, labels)}``, and perhaps ``"validation"`` and ``"test"`` of other classes, of which
    each may be ``{"query": (images, labels), "gallery": (images, labels)}``. Images are ``n x c x h x w``, uint8 or
    floats; labels ``n`` integers or words. Of train alone all parts are made by ``data.fractions``; else what is
    missing is held out as in `own_parts`.

    Args:
        data: The settings.
        seed: Draws what is held out.

    Raises:
        ConfigError: There is no such function, it fails, or settings choose a test part that it gives.
        DataError: It returns something else; a class is in two parts.
    """
    function, where = named("data.name", data.name, data.folder, data.kwargs), f"data.name={data.name}"
    try:
        found = function()
    except Exception as error:
        raise ConfigError(f"{where} fails with data.kwargs={data.kwargs}: {brief(error)}") from error
    if not isinstance(found, Mapping) or "train" not in found or not {*found} <= {*PARTS}:
        raise DataError(
            f"{where} returned {brief(found)}; it must return {{'train': (images, labels)}}, and perhaps 'validation'"
            " and 'test'"
        )
    read = {}
    for name in (name for name in PARTS if name in found):
        part = found[name] if isinstance(found[name], Mapping) else {"": found[name]}
        if [*part] not in ([""], ["query", "gallery"]) or (name == "train" and len(part) > 1):
            raise DataError(f"{where} returned {brief(found[name])} as {name}; it must be (images, labels)")
        read[name] = {own: _given(f"{own or name} of {where}", each) for own, each in part.items()}
    if len(read) > 1:
        if data.last_test or data.test_classes:
            raise ConfigError(f"{where} gives {' and '.join(read)}; leave data.last_test and data.test_classes out")
        return completed(read, data, seed, where)
    whole = joined(read["train"])
    splits = split_classes(whole, data.fractions, seed, last_test=data.last_test, test_classes=data.test_classes)
    return replace(splits, reading=Reading(where))


def _given(where: str, pair: Any) -> Labelled:
    """Images and labels that a function gave.

    Raises:
        DataError: They are not.
    """
    try:
        x, y = (each.detach().cpu() if isinstance(each, Tensor) else np.asarray(each) for each in pair)
        x = torch.as_tensor(x)
        names, places = np.unique(np.asarray(y), return_inverse=True)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where} must be a pair, images and labels: {brief(error)}") from error
    if x.dim() != 4 or not (x.dtype == torch.uint8 or x.is_floating_point()):
        raise DataError(
            f"{where}: images must be n x c x h x w, uint8 or floats, got {str(x.dtype).removeprefix('torch.')} of"
            f" shape {tuple(x.shape)}"
        )
    if y.ndim != 1 or len(y) != len(x) or names.dtype.kind not in "iubUS":
        raise DataError(
            f"{where}: labels must be {len(x)} integers or words, got {names.dtype} of shape {tuple(y.shape)}"
        )
    x = x if x.dtype == torch.uint8 else x.float()
    return Labelled(x, torch.from_numpy(places.reshape(-1).astype(np.int64)), tuple(map(str, names.tolist())))


def completed(read: Mapping[str, Mapping[str, Labelled]], data: DataConfig, seed: int, found: str) -> Splits:
    """Return all parts; one that is not given is held out from another, whole classes.

    Args:
        read: Of each part its images: one set, or queries and a gallery, in this order.
        data: The settings.
        seed: Draws what is held out.
        found: What was read, in words.

    Raises:
        DataError: A class is in two parts, or a part has too few.
    """
    pooled = {name: joined(part) for name, part in read.items()}
    _check_classes(pooled)
    said, queries = found, None
    if TEST in read and len(read[TEST]) > 1:
        first, second = (len(part) for part in read[TEST].values())
        queries = torch.arange(first + second) < first
        said += f"; {counted(first, 'test query')} search {counted(second, 'gallery image')}"
    if VALIDATION in read and len(read[VALIDATION]) > 1:
        said += "; queries and gallery of validation are one set, in which each searches all others"
    train, reading = pooled["train"], Reading(said)
    if VALIDATION not in pooled:
        splits = hold_out_classes(train, pooled[TEST], data.validation_share, seed)
        said += f"; validation: {counted(len(splits.classes_of(VALIDATION)), 'class')} held out from train"
    elif TEST not in pooled:
        splits = _divided(train, pooled[VALIDATION], seed)
        said += f"; test: {counted(len(splits.classes_of(TEST)), 'class')} held out from validation"
    else:
        splits = _joined(train, pooled[VALIDATION], pooled[TEST])
    reading = replace(reading, found=said)
    return Searched(splits.train, splits.validation, splits.test, splits.class_names, reading, queries)


def _joined(train: Labelled, validation: Labelled, test: Labelled) -> Splits:
    """Splits of parts whose labels count their own classes; each part after the first counts on."""
    first = len(train.class_names)
    second = first + len(validation.class_names)
    names = train.class_names + validation.class_names + test.class_names

    def placed(part: Labelled, start: int) -> Split:
        return Split(part.x, part.y + start, names=part.names)

    return disjoint(Splits(placed(train, 0), placed(validation, first), placed(test, second), names))


def _divided(train: Labelled, other: Labelled, seed: int) -> Splits:
    """Splits whose validation and test have half of a part's classes each."""
    n = len(other.class_names)
    order = torch.randperm(n, generator=generator(seed, "classes"))
    halves = order.tensor_split([n - n // 2])
    validation, test = (_of_classes(other, half.sort().values) for half in halves)
    return _joined(train, validation, test)


def _of_classes(part: Labelled, classes: Tensor) -> Labelled:
    rows = torch.isin(part.y, classes).nonzero().flatten()
    places = torch.full((len(part.class_names),), -1)
    places[classes] = torch.arange(len(classes))
    names, own = tuple(part.class_names[label] for label in classes.tolist()), part.take(rows)
    return Labelled(own.x, places[own.y], names, names=own.names)


def _part(path: Path, data: DataConfig) -> dict[str, Labelled]:
    """A part's images by folder within it: all of them, or queries and gallery."""
    both = queries_and_gallery(path)
    return {
        folder.name if both else "": load_class_folders(folder, data.image_size or None, data.stream)[0]
        for folder in both or (path,)
    }


def _folders_of(root: Path) -> tuple[dict[str, Path], list[Path]]:
    """The folder of each part in a root: train, and val, test, or queries and a gallery beside it."""
    if queries_and_gallery(root) is None:
        return folders_of_parts(root)
    inner = [each for each in root.iterdir() if each.is_dir()]
    train, val = ([each for each in inner if each.name.lower() in FOLDERS[part]] for part in ("train", VALIDATION))
    if len(train) != 1:
        raise DataError(
            f"{root} holds queries and a gallery, but no folder train, whose classes the loss sees; name it by"
            " data.train, and the folder of queries and gallery by data.test"
        )
    known = {*QUERIES, *GALLERIES}
    others = sorted(each.name for each in inner if each.name.lower() not in known and each not in [*train, *val[:1]])
    if others:
        raise DataError(f"{root} holds train, queries and a gallery, and also {brief(others)}; take these away")
    return {"train": train[0], **({VALIDATION: val[0]} if val else {}), TEST: root}, []


def _check_classes(parts: Mapping[str, Labelled]) -> None:
    """Refuse a class that is in two parts, by name."""
    seen: dict[str, str] = {}
    for part, labelled in parts.items():
        for name in labelled.class_names:
            if name in seen:
                raise DataError(
                    f"class {name!r} is in {seen[name]} and in {part}; the parts of a retrieval set share no class"
                )
            seen[name] = part
