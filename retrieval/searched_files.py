"""What `tools/evaluate_recall.py` searches of files of embeddings."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from metricopt_ext.data.arrays import Names, holds_several, read_array
from metricopt_ext.errors import DataError
from metricopt_ext.retrieval.copies import equal_items
from metricopt_ext.retrieval.evaluation import Search
from metricopt_ext.retrieval.inputs import Items

Gallery = tuple[str, Items | None]  # its name, and its items unless they are the queries


def search_files(arguments: argparse.Namespace) -> Iterator[Search]:
    """Read the queries and, one after the other, the galleries, from files of embeddings.

    Raises:
        DataError: A file can't be read, or does not fit.
    """
    names = Names()  # over all files: the same name is the same class
    queries = read_items(arguments.embeddings, arguments.labels, "--labels", names)
    embeddings, labels = arguments.gallery_embeddings, arguments.gallery_labels
    check_galleries(embeddings, labels, queries)
    others = galleries(embeddings, labels, arguments.embeddings, queries, names)
    for name, items in others:
        yield Search(name, queries, items)


def check_galleries(embeddings: list[Path], labels: list[Path], queries: Items) -> None:
    """Check all galleries' files by their headers, before the first of them is searched.

    Args:
        embeddings: Files of the galleries.
        labels: Files of their labels, one for each gallery; none if the galleries' own files hold them.
        queries: The queries and their labels.

    Raises:
        DataError: The numbers of label files and galleries differ; a file can't be read; or its shape doesn't fit.
    """
    if labels and len(labels) != len(embeddings):
        raise DataError(
            f"each --gallery-embeddings needs its --gallery-labels, got {len(embeddings)} and {len(labels)} of them"
        )
    for i, path in enumerate(embeddings):
        names = labels[i] if labels else None
        check_labels(path, names, "--gallery-labels")
        shape = tuple(read_array(path, "embeddings").shape)
        size = tuple(read_array(names or path, "labels").shape)[:1]
        if shape[1:] != tuple(queries[0].shape)[1:]:
            raise DataError(f"{path} has embeddings of shape {shape}, and the queries {tuple(queries[0].shape)}")
        if shape[:1] != size:
            raise DataError(f"{path} has {shape[0]} embeddings, and {names or path} {size[0] if size else 'no'} labels")


def galleries(
    embeddings: list[Path], labels: list[Path], file: Path, queries: Items, names: Names
) -> Iterator[Gallery]:
    """Read one gallery after the other.

    Args:
        embeddings: As in `check_galleries`; none for the queries themselves.
        labels: As in `check_galleries`.
        file: The queries' file.
        queries: The queries and their labels.
        names: Numbers labels that are names.

    Yields:
        Name and (embeddings, labels) of each; None instead of these for the queries.

    Raises:
        DataError: A file can't be read, or the queries' file comes with other labels.
    """
    if not embeddings:
        yield "the queries", None
    for i, path in enumerate(embeddings):
        items = read_items(path, labels[i] if labels else None, "--gallery-labels", names)
        own = path.samefile(file)
        if own and not equal_items(queries, items):
            raise DataError(f"{path} is the queries' own file, but its labels are not those of --labels")
        yield str(path), None if own else items


def read_items(embeddings: Path, labels: Path | None, option: str, names: Names) -> tuple[Any, Any]:
    """Read embeddings ``n x d`` and their labels ``n``; without a file of labels, both from one file.

    Raises:
        DataError: A file can't be read or lacks what it should hold; ``option`` is the option for a file of labels.
    """
    check_labels(embeddings, labels, option)
    own = labels or embeddings
    return read_array(embeddings, "embeddings"), names.numbered(read_array(own, "labels"), own)


def check_labels(embeddings: Path, labels: Path | None, option: str) -> None:
    """Refuse embeddings without labels, or with two kinds of them.

    Raises:
        DataError: They are so, or a file can't be read; ``option`` is the option for a file of labels.
    """
    if not holds_several(embeddings):
        if labels is None:
            raise DataError(f"{embeddings} holds no labels; name their file with {option}")
    elif labels is not None and not (labels.exists() and labels.samefile(embeddings)):
        try:
            own = read_array(embeddings, "labels")
        except DataError:  # it has none, or will be refused as it is read
            return
        if not np.array_equal(own, read_array(labels, "labels")):
            raise DataError(f"{embeddings} holds labels other than {labels}; leave {option} out for its own")
