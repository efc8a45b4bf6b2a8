"""Evidence: whether what a metric is judged on was trained on, and is the same each time that it is read."""

import hashlib
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import ConcatDataset, DataLoader, Dataset, TensorDataset

from metricopt_ext.errors import DataError
from metricopt_ext.utils.seeding import seeded_streams

LOOKED_AT, IN_MEMORY = 512, 20_000  # items of a dataset that are compared by content
TWICE = 32  # that are read twice
LABELS = ("label", "labels", "label_ids", "target")  # entries of an item that are no input
CPU = torch.device("cpu")

Leaf = tuple[Any, Sequence[int]]  # a dataset that is no part of another, and places in it


def check_evidence(train: Any, judged: Any, name: str, collate: Callable[[list[Any]], Any] = itemgetter(0)) -> None:
    """Refuse data to judge on most of which is trained on; warn of some that is, and of items that differ each time.

    Items are compared by their places in a dataset that both are parts of (`Subset`, `ConcatDataset`), by the files of
    torchvision's folders, and where none is of both by content, labels aside: of up to `LOOKED_AT`, evenly spaced.

    Args:
        train: The dataset that is trained on.
        judged: The other; without a length, or an index, only itself is compared.
        name: What it is called in messages.
        collate: Makes a batch of items, perhaps at random.

    Raises:
        DataError: More than half of the items that were compared are trained on.
    """
    if judged is train:
        raise DataError(f"{name} is the training data; give data that the model was not trained on")
    if not (_indexed(train) and _indexed(judged)):
        return
    known, own = {*_names(train)}, _names(judged)
    found, compared = sum(each in known for each in own), len(own)
    if not found:
        known, contents = {*_contents(train)}, _contents(judged)
        found, compared = sum(each in known for each in contents), len(contents)
    if 2 * found > compared:
        raise DataError(
            f"{found} of {compared} items of {name} that were compared are in the training data, too; give data that"
            " the model was not trained on"
        )
    if found:
        warnings.warn(
            f"{found} of {compared} items of {name} that were compared are in the training data, too; what a model has"
            " seen is judged too well",
            stacklevel=5,
        )
    places = spaced(len(judged), TWICE)
    if _read(judged, places, 0, collate) != _read(judged, places, 1, collate):
        warnings.warn(
            f"items of {name} differ each time that they are read, as by random transforms: the metric is of one draw"
            " of them; give it the transforms of a test set",
            stacklevel=5,
        )


def check_function(train: Any, function: Callable[..., Any]) -> None:
    """Refuse a metric whose own names, or arguments, are of one DataLoader, and that is of what is trained on.

    Args:
        train: The dataset that is trained on.
        function: The metric's function.

    Raises:
        DataError: As from `check_evidence`.
    """
    if isinstance(function, partial):
        seen = [*function.args, *function.keywords.values()]
    else:
        names = inspect.getclosurevars(function) if inspect.isfunction(function) else None
        seen = [] if names is None else [*names.nonlocals.values(), *names.globals.values()]
    loaders = {id(each): each for each in seen if isinstance(each, DataLoader)}
    if len(loaders) == 1:
        check_evidence(train, loaders.popitem()[1].dataset, "the metric's DataLoader")


def leaves(data: Any, places: Sequence[int] | None = None) -> Iterator[Leaf]:
    """Yield the datasets that a dataset is made of, as by `Subset` and `ConcatDataset`, each with its items' places."""
    places = range(len(data)) if places is None else places
    held = [each for each in getattr(data, "__dict__", {}).values() if isinstance(each, Dataset) and _indexed(each)]
    inner: Any = getattr(data, "dataset", held[0] if held else None)
    indices = getattr(data, "indices", None)
    if isinstance(data, ConcatDataset):
        start = 0
        for each in data.datasets:
            end = start + len(each)  # type: ignore[arg-type]
            yield from leaves(each, [place - start for place in places if start <= place < end])
            start = end
    elif _indexed(inner) and indices is not None:
        yield from leaves(inner, [int(indices[place]) for place in places])
    elif _indexed(inner) and len(inner) == len(data):  # with transforms of its own
        yield from leaves(inner, places)
    else:
        yield data, places


def _indexed(data: Any) -> bool:
    return hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, str | Mapping)


def _stored(data: Any) -> Any:
    """What a dataset reads its inputs from, item by item: files, an array, a list, or None."""
    samples, held = getattr(data, "samples", None), getattr(data, "__dict__", {})
    if isinstance(samples, list) and samples and isinstance(samples[0], tuple) and isinstance(samples[0][0], str):
        return [os.path.abspath(path) for path, *_ in samples]
    arrays = [held.get("data"), *getattr(data, "tensors", ()), *held.values()]
    return next((each for each in arrays if _of_items(each) and len(each) == len(data)), None)


def _of_items(held: Any) -> bool:
    """Whether something may hold inputs, not labels: rows of numbers, or a list of pairs or of what has names."""
    if isinstance(held, list):
        return bool(held) and isinstance(held[0], tuple | Mapping)
    return isinstance(held, Tensor | np.ndarray) and held.ndim > 1


def _names(data: Any) -> list[Any]:
    """What an item is, without reading it: its file, or its place in which array or dataset."""
    names: list[Any] = []
    for leaf, places in leaves(data):
        stored = _stored(leaf)
        files, base = isinstance(stored, list) and isinstance(stored[0], str), leaf if stored is None else stored
        names += [base[place] if files else (id(base), place) for place in places]
    return names


def _contents(data: Any) -> list[str]:
    found: list[str] = []
    for leaf, places in leaves(data):
        base, most = leaf, IN_MEMORY if isinstance(leaf, list | tuple | TensorDataset) else LOOKED_AT
        if hasattr(leaf, "samples") or hasattr(leaf, "data"):  # torchvision's, before any transform
            base = leaf if (stored := _stored(leaf)) is None else stored
        found += _read(base, [places[i] for i in spaced(len(places), most)])
    return found


def spaced(count: int, most: int) -> list[int]:
    """Return at most so many places of ``count``, evenly spaced."""
    return np.linspace(0, count - 1, min(count, most)).astype(int).tolist() if count else []


def _read(
    data: Any, places: Sequence[int], seed: int = 0, collate: Callable[[list[Any]], Any] = itemgetter(0)
) -> list[str]:
    """A digest of each item's input."""
    with seeded_streams(seed, CPU):
        return [_digest(collate([data[place]])) for place in places]


def _digest(item: Any) -> str:
    if isinstance(item, Mapping):
        item = {key: item[key] for key in sorted(item) if key not in LABELS}
    elif isinstance(item, tuple | list) and len(item) > 1:
        item = item[0]
    elif isinstance(item, str) and os.path.isfile(item):
        with open(item, "rb") as file:
            return hashlib.file_digest(file, "blake2b").hexdigest()
    digest = hashlib.blake2b()
    for leaf in tree_leaves(item):
        if isinstance(leaf, Tensor | np.ndarray) or hasattr(leaf, "__array_interface__"):  # PIL's images have it
            array = leaf.numpy(force=True) if isinstance(leaf, Tensor) else np.asarray(leaf)
            digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
        elif isinstance(leaf, str | bytes | int | float | None):
            digest.update(repr(leaf).encode())
    return digest.hexdigest()
