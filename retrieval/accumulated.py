"""Metrics of rankings whose embeddings come batch by batch, as torchmetrics' come."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from metricopt_ext.errors import DataError
from metricopt_ext.retrieval.inputs import as_ids, check_options
from metricopt_ext.retrieval.neighbours import Distance
from metricopt_ext.retrieval.ranking import Ranking, check_names, ranking_metrics
from metricopt_ext.retrieval.vectors import Array


class RankingMetrics:
    """The metrics of `ranking_metrics`, of all batches since the last `reset`.

    Copies of the embeddings are kept on the CPU. Under torchrun `compute` gathers those of all processes, so
    each of them must call it, and returns the same everywhere; a ``DistributedSampler`` repeats examples to share them
    evenly, which ``rows`` tells apart.

    Args:
        names: As in `ranking_metrics`.
        ks: As in `ranking_metrics`.
        distance: As in `recall_at_k`.
        query_subset: As in `recall_at_k`.
        seed: As in `recall_at_k`.

    Attributes:
        ranking: What `compute` found last, with intervals and the values of each query; None before.

    Raises:
        DataError: A name, a k or another option is impossible.

    Examples:
        >>> metric = RankingMetrics(("recall", "ndcg_at_k"), ks=(1, 2))
        >>> metric.update(torch.tensor([[0.0], [1.0]]), torch.tensor([0, 1]))
        >>> metric.update(torch.tensor([[3.0], [3.5]]), torch.tensor([0, 1]))
        >>> metric.compute()["recall_at_2"]
        0.5
    """

    def __init__(
        self,
        names: Sequence[str] = ("recall", "mean_average_precision"),
        ks: Sequence[int] = (1, 10, 100, 1000),
        *,
        distance: Distance = "l2",
        query_subset: int | None = None,
        seed: int = 0,
    ) -> None:
        check_names(names)
        check_options(ks, distance, query_subset, seed)
        self._names, self._ks = tuple(names), tuple(ks)
        self._options: dict[str, Any] = {"distance": distance, "query_subset": query_subset, "seed": seed}
        self.reset()

    def reset(self) -> None:
        """Forget all batches."""
        self.ranking: Ranking | None = None
        self._batches: dict[str, list[dict[str, Tensor]]] = {"queries": [], "gallery": []}

    def update(
        self,
        embeddings: Array,
        labels: Array,
        *,
        cameras: Array | None = None,
        rows: Array | None = None,
        gallery: bool = False,
    ) -> None:
        """Add a batch.

        Args:
            embeddings: ``b x d``.
            labels: ``b`` integers.
            cameras: ``b`` integers; as in `ranking_metrics`, so for all batches or for none.
            rows: Which examples of the data these are, ``b`` integers, for all batches or for none. They order the
                items, and one that comes again is left out.
            gallery: Whether they are of a gallery that is searched; with none, the queries search each other.

        Raises:
            DataError: They differ in number, or are not what they should be.
        """
        kept = _copied(embeddings)
        given = {"labels": labels, "cameras": cameras, "rows": rows}
        batch = {name: _copied(as_ids(each, "", name)) for name, each in given.items() if each is not None}
        if kept.ndim != 2 or any(len(each) != len(kept) for each in batch.values()):
            sizes = ", ".join(f"{len(each)} {name}" for name, each in batch.items())
            raise DataError(
                f"a batch must have b x d embeddings and b of the rest, got {tuple(kept.shape)} and {sizes}"
            )
        self._batches["gallery" if gallery else "queries"].append({"embeddings": kept, **batch})

    def compute(self) -> dict[str, float]:
        """Return the metrics by name, in [0, 1]; `ranking` has the rest.

        Raises:
            DataError: There were no queries; batches with and without cameras or rows; or as in `ranking_metrics`.
        """
        queries, gallery = self._gathered("queries"), self._gathered("gallery")
        if queries is None:
            raise DataError("there are no queries to judge; call update with embeddings and labels before")
        searched = gallery or queries
        if ("cameras" in queries) != ("cameras" in searched):
            raise DataError("cameras must be given for queries and gallery, or for neither")
        self.ranking = ranking_metrics(
            queries["embeddings"],
            queries["labels"],
            self._names,
            self._ks,
            gallery=None if gallery is None else (gallery["embeddings"], gallery["labels"]),
            cameras=(queries["cameras"], searched["cameras"]) if "cameras" in queries else None,
            **self._options,
        )
        return dict(self.ranking.values)

    def _gathered(self, part: str) -> dict[str, Tensor] | None:
        """All batches of all processes as one; None without any."""
        batches = self._batches[part]
        if distributed.is_available() and distributed.is_initialized():
            everywhere: list[Any] = [None] * distributed.get_world_size()
            distributed.all_gather_object(everywhere, batches)
            batches = [batch for each in everywhere for batch in each]
        if not batches:
            return None
        if some := [name for name in ("cameras", "rows") if 0 < sum(name in each for each in batches) < len(batches)]:
            raise DataError(f"{some[0]} must be given for all batches of the {part}, or for none")
        if len(sizes := {each["embeddings"].shape[1] for each in batches}) > 1:
            raise DataError(f"batches of the {part} must have embeddings of one dimension, got {sorted(sizes)}")
        whole = {name: torch.cat([each[name] for each in batches]) for name in batches[0]}
        if "rows" in whole:
            _, first = np.unique(whole["rows"].numpy(), return_index=True)
            whole = {name: each[torch.from_numpy(first)] for name, each in whole.items()}
        return whole


def _copied(values: Array) -> Tensor:
    """A copy on the CPU: loops may fill the same buffer with the next batch."""
    if isinstance(values, Tensor):
        return values.detach().to("cpu", copy=True)
    found = np.asarray(values)
    return torch.from_numpy(np.array(found, dtype=found.dtype.newbyteorder("="), order="C"))
