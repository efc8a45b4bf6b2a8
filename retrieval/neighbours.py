"""The nearest neighbours of embeddings, by FAISS' exact search."""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch import Tensor

try:
    import faiss
except ImportError as error:
    raise ImportError(
        "Recall@k needs FAISS: pip install 'metricopt-ext[retrieval]', or 'metricopt-ext[retrieval-gpu]' for a GPU"
    ) from error

Array = Tensor | npt.NDArray[Any]
Distance = Literal["l2", "ip", "cosine"]

CHUNK = 4096  # FAISS itself takes this many queries at a time: such chunks cost no time and give the very same floats
# With fewer numbers in its queries (rows times dimension), FAISS doesn't use BLAS: slower, and rounded differently.
# Older versions need 20 rows.
FEWEST_NUMBERS, FEWEST_ROWS = 128_000, 20
NEIGHBOURS = 2**24  # held at once, about 30 bytes each
GPU_LARGEST_K = 2048  # of FAISS' GPU indices


def ranks_of_first(
    queries: npt.NDArray[np.float32],
    labels: npt.NDArray[np.int64],
    chosen: npt.NDArray[np.int64],
    items: npt.NDArray[np.float32],
    item_labels: npt.NDArray[np.int64],
    includes_queries: bool,
    largest: int,
    distance: Distance,
    progress: str | None = None,
) -> npt.NDArray[np.int64]:
    """Places, from 0, of the nearest item with the label of each chosen query; beyond ``largest`` if it is further."""
    k = min(largest, len(items) - includes_queries)
    search = searcher(items, k + includes_queries, distance)
    ranks = np.empty(len(chosen), dtype=np.int64)
    parts = chunks(len(chosen), *chunk_sizes(k, queries.shape[1]))
    for part in _with_bar(parts, progress):
        rows = chosen[part]
        neighbours = search(queries[rows])
        if includes_queries:
            neighbours = without_own(neighbours, rows)
        ranks[part] = _rank_of_first(item_labels[neighbours] == labels[rows, None])
    return ranks


def searcher(items: npt.NDArray[np.float32], k: int, distance: Distance) -> Callable[[Any], npt.NDArray[np.int64]]:
    """A function from queries ``b x d`` to the rows of their k nearest items, ``b x k``, nearest first."""
    if faiss.get_num_gpus() > 0 and k <= GPU_LARGEST_K:
        resources = faiss.StandardGpuResources()
        kind = faiss.GpuIndexFlatL2 if distance == "l2" else faiss.GpuIndexFlatIP
        index = kind(resources, items.shape[1])
        index.add(items)
        return lambda queries: index.search(queries, k)[1]
    metric = faiss.METRIC_L2 if distance == "l2" else faiss.METRIC_INNER_PRODUCT
    # IndexFlat's search without the index, which would hold a copy of all items.
    return lambda queries: faiss.knn(queries, items, k, metric)[1]


def without_own(neighbours: npt.NDArray[np.int64], own: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Remove each query's own row from its neighbours: ``b x (k + 1)`` and ``b`` to ``b x k``."""
    remove: npt.NDArray[np.bool_] = neighbours == own[:, None]
    # With more than k + 1 duplicates of a query, its own row may be missing: all are then neighbours, one too many.
    remove[~remove.any(axis=1), -1] = True
    return neighbours[~remove].reshape(len(own), -1)


def _rank_of_first(hits: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Places, from 0, of the first hit in each row of ``b x k``; larger than any k if there is none."""
    return np.where(hits.any(axis=1), hits.argmax(axis=1), np.iinfo(np.int64).max)


def chunk_sizes(k: int, dimension: int) -> tuple[int, int]:
    """How many queries to search at once, and the fewest that merit their own search."""
    fewest = max(FEWEST_ROWS, -(-FEWEST_NUMBERS // dimension))
    size = CHUNK * min(4, -(-fewest // CHUNK))
    return min(size, max(FEWEST_ROWS, NEIGHBOURS // (k + 1))), fewest


def chunks(total: int, size: int = CHUNK, fewest: int = 1) -> list[slice]:
    """Slices of ``size`` rows; a last one shorter than ``fewest`` joins the one before."""
    starts = list(range(0, total, size))
    if len(starts) > 1 and total - starts[-1] < fewest:
        starts.pop()
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], total], strict=True)]


def _with_bar(parts: list[slice], title: str | None) -> Iterator[slice]:
    """Show a bar on the terminal's error stream while the chunks are worked on; none without a title."""
    if title is None:
        yield from parts
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    named = TextColumn("{task.description}", markup=False)  # a path may contain brackets
    with Progress(
        named, BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), console=Console(stderr=True)
    ) as progress:
        yield from progress.track(parts, description=title)
