"""Retrieval across cameras, by the rule of Market-1501: what a query's own camera shows of its identity is ignored."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from metricopt_ext.errors import DataError
from metricopt_ext.retrieval.inputs import check_options
from metricopt_ext.retrieval.recall import nearest
from metricopt_ext.utils.seeding import generator

CAMERA = "camera"  # the column of a part whose images have cameras
JUNK = -1  # in place of an identity: parts of bodies and what else is no image of Market-1501
Cameras = npt.NDArray[Any]  # a number for each image, n
Labels = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Seen:
    """Embeddings of images that cameras took.

    Attributes:
        embeddings: ``n x d``, on the CPU.
        labels: The identities, ``n``.
        cameras: ``n``.
    """

    embeddings: Tensor
    labels: Tensor
    cameras: Cameras

    def take(self, rows: Tensor) -> "Seen":
        """Those of some rows: indices or booleans."""
        return Seen(self.embeddings[rows], self.labels[rows], self.cameras[rows.numpy(force=True)])

    def parted(self, queries: Tensor | None) -> tuple["Seen", "Seen"]:
        """Return queries and gallery, by which rows are queries, ``n`` booleans; for None all are both."""
        return (self, self) if queries is None else (self.take(queries), self.take(~queries))


def nearest_across_cameras(queries: Seen, gallery: Seen, k: int) -> npt.NDArray[np.int64]:
    """Return the k nearest gallery images of each query, ``n x k`` rows, nearest first, but for those that are ignored.

    Ignored are those of the query's identity and camera (Zheng et al., Scalable Person Re-identification: A Benchmark,
    ICCV 2015): with them the query itself, if the gallery has it. A row is -1 where no further image is left.

    Args:
        queries: The queries.
        gallery: What is searched.
        k: Number of neighbours, at least 1.
    """
    wide = min(k + int(_alike(*_numbers(queries), *_numbers(gallery))[1].max(initial=0)), len(gallery.labels))
    near = nearest(queries.embeddings, wide, gallery=gallery.embeddings)
    labels, own = gallery.labels.numpy(), queries.labels.numpy()
    ignored = (labels[near] == own[:, None]) & (gallery.cameras[near] == queries.cameras[:, None])
    order = ignored.argsort(axis=1, kind="stable")[:, :k]
    return np.where(np.take_along_axis(ignored, order, 1), -1, np.take_along_axis(near, order, 1))


def hits_across_cameras(
    queries: Seen, gallery: Seen, ks: Sequence[int], *, query_subset: int = 0, seed: int = 0
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return which queries are hits at k: whether an image by another camera of their identity is among the k nearest.

    The mean of a column is Recall@k, the cumulative matching characteristic (CMC) at rank k.

    Args:
        queries: The queries.
        gallery: What is searched; see `nearest_across_cameras`.
        ks: Numbers of neighbours, each at least 1.
        query_subset: Only so many queries, drawn from those that another camera shows; 0 for all.
        seed: Draws them.

    Returns:
        The rows of the m queries whose identity another camera shows in the gallery, ascending, and whether each is a
            hit, ``m x len(ks)``.

    Raises:
        DataError: There is no such query; and as from `recall_at_k`, for embeddings and ks.
    """
    ks = check_options(ks, "l2", None, seed)
    rows = shown_elsewhere(*_numbers(queries), *_numbers(gallery))
    if query_subset:
        order = torch.randperm(len(rows), generator=generator(seed, "recall queries")).numpy()
        rows = np.sort(rows[order[:query_subset]])
    asked = queries.take(torch.from_numpy(rows))
    near = nearest_across_cameras(asked, gallery, max(ks))
    right = (near >= 0) & (gallery.labels.numpy()[near] == asked.labels.numpy()[:, None])
    return rows, np.stack([right[:, :k].any(1) for k in ks], 1)


def recall_across_cameras(queries: Seen, gallery: Seen, ks: Sequence[int], *, query_subset: int = 0) -> float:
    """Return the mean of Recall@k over ks, in [0, 1]; see `hits_across_cameras`."""
    _, hits = hits_across_cameras(queries, gallery, ks, query_subset=query_subset)
    return float(hits.mean())


def shown_elsewhere(
    labels: Labels, cameras: Cameras, item_labels: Labels, item_cameras: Cameras
) -> npt.NDArray[np.int64]:
    """Return the rows of the queries whose identity another camera shows in the gallery, ascending.

    Args:
        labels: The queries' identities, ``n``.
        cameras: Their cameras, ``n``.
        item_labels: The gallery's identities, ``m``.
        item_cameras: Its cameras, ``m``.

    Raises:
        DataError: There is no such query.
    """
    of_identity, of_both = _alike(labels, cameras, item_labels, item_cameras)
    rows = np.flatnonzero(of_identity > of_both)
    if not len(rows):
        raise DataError("no query's identity is shown by another camera in the gallery, so nothing can be found")
    return rows


def _numbers(seen: Seen) -> tuple[Labels, Cameras]:
    return seen.labels.numpy(), seen.cameras


def _alike(
    labels: Labels, cameras: Cameras, item_labels: Labels, item_cameras: Cameras
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """How many gallery images of its identity there are for each query, and how many of these by its camera."""
    both = np.stack([labels, cameras], 1), np.stack([item_labels, item_cameras], 1)
    return _count(labels, item_labels), _count(*both)


def _count(of: npt.NDArray[Any], among: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """How often each row of an array is in another."""
    known, places = np.unique(np.concatenate([among, of]), axis=0, return_inverse=True)
    places = places.ravel()
    counts = np.bincount(places[: len(among)], minlength=len(known))
    found: npt.NDArray[np.int64] = counts[places[len(among) :]]
    return found
