"""Recall@k for pytorch-metric-learning: an AccuracyCalculator for its testers and hooks.

pytorch-metric-learning's own metrics have no Recall@k: its ``precision_at_k`` is the share of correct neighbours.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from metricopt_ext.errors import DataError
from metricopt_ext.retrieval.neighbours import Array, Distance
from metricopt_ext.retrieval.recall import Recall, as_ids, check_options, recall_at_k

try:
    import faiss
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
    from pytorch_metric_learning.utils.inference import FaissKNN
except ImportError as error:
    raise ImportError(
        "RecallCalculator needs pytorch-metric-learning: pip install 'metricopt-ext[retrieval]'"
    ) from error


class RecallCalculator(AccuracyCalculator):  # type: ignore[misc]
    """Calculates ``recall_at_<k>`` and, on request, pytorch-metric-learning's own metrics too.

    The recalls are those of `recall_at_k`, with its memory use, exact labels and rules for ties and for classes with a
    single member. pytorch-metric-learning's own metrics are calculated as it does, by float32 distances and with all
    neighbours in memory at once; it takes labels as float32, so ids are numbered from 0 before.

    Args:
        include: Metrics to calculate, e.g. ``("recall_at_1", "mean_average_precision_at_r")``; by default all recalls
            and nothing else.
        exclude: Those of these metrics to leave out.
        ks: Numbers of neighbours to calculate recalls for, each at least 1.
        distance: ``"l2"``, ``"ip"`` or ``"cosine"``, for all metrics.
        query_subset: As in `recall_at_k`; for the recalls only.
        seed: As in `recall_at_k`.
        k: Number of neighbours for pytorch-metric-learning's own metrics; see its documentation.
        device: Where its own metrics are calculated; None for a GPU if there is one.

    Raises:
        ValueError: ``include`` or ``exclude`` names an unknown metric.
        DataError: For impossible ``ks``, distance, subset or seed; from `get_accuracy`, as in `recall_at_k`.

    Example:
        >>> calculator = RecallCalculator(ks=(1, 2))
        >>> calculator.get_accuracy(torch.tensor([[0.0], [1.0], [3.0], [3.5]]), torch.tensor([0, 1, 0, 1]))
        {'recall_at_1': 0.0, 'recall_at_2': 0.5}
    """

    def __init__(
        self,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        *,
        ks: Sequence[int] = (1, 10, 100, 1000),
        distance: Distance = "l2",
        query_subset: int | None = None,
        seed: int = 0,
        k: int | str | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._options: dict[str, Any] = {"distance": distance, "query_subset": query_subset, "seed": seed}
        numbers = check_options(ks, distance, query_subset, seed)
        self._ks = {f"recall_at_{number}": number for number in numbers}
        for name, number in self._ks.items():
            # The base class finds its metrics by this prefix, and calls each for its value.
            setattr(self, f"calculate_{name}", partial(_recall_at, number))
        index = faiss.IndexFlatL2 if distance == "l2" else faiss.IndexFlatIP
        super().__init__(
            tuple(include) or tuple(self._ks),
            tuple(exclude),
            k=k,
            device=device,
            knn_func=FaissKNN(index_init_fn=index),
        )

    def get_accuracy(
        self,
        query: Array,
        query_labels: Array,
        reference: Array | None = None,
        reference_labels: Array | None = None,
        ref_includes_query: bool = False,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
    ) -> dict[str, float]:
        """Calculate the metrics.

        Args:
            query: Embeddings, ``n x d``.
            query_labels: As in `recall_at_k`, e.g. the whole float32 numbers that a tester of two streams stores.
            reference: Embeddings of the gallery, ``m x d``; None to search the queries themselves.
            reference_labels: Their labels; None without a gallery.
            ref_includes_query: Whether the first n items of ``reference`` are the queries.
            include: Metrics to calculate this time; by default all.
            exclude: Those of these metrics to leave out this time.

        Returns:
            Values by name.

        Raises:
            DataError: As in `recall_at_k`; or labels of a gallery without it, or a gallery without labels.
        """
        if (reference is None) != (reference_labels is None):
            given, lacks = ("reference", "reference_labels")[:: 1 if reference_labels is None else -1]
            raise DataError(f"{given} is given without {lacks}; give both, or none to search the queries themselves")
        functions = self.get_function_dict(include, exclude)
        recalls = {name: function for name, function in functions.items() if name in self._ks}
        own = tuple(name for name in functions if name not in self._ks)
        values: dict[str, float] = {}
        if recalls:
            recall = recall_at_k(
                query,
                query_labels,
                [self._ks[name] for name in recalls],
                gallery=None if reference is None else (reference, reference_labels),  # type: ignore[arg-type]
                gallery_starts_with_queries=reference is not None and ref_includes_query,
                **self._options,
            )
            values = self._get_accuracy(recalls, recall=recall)
        if own and self._options["distance"] == "cosine":
            query, reference = _unit_length(query), None if reference is None else _unit_length(reference)
        if own:
            ids = [as_ids(each) for each in (query_labels, reference_labels) if each is not None]
            numbers = np.split(np.unique(np.concatenate(ids), return_inverse=True)[1], [len(ids[0])])
            theirs = None if reference is None else numbers[1]
            values |= super().get_accuracy(query, numbers[0], reference, theirs, ref_includes_query, include=own)
        self.curr_function_dict = functions  # testers and hooks read the names of these
        return {name: values[name] for name in functions}


def _unit_length(embeddings: Array) -> Tensor:
    return F.normalize(torch.as_tensor(embeddings).float())


def _recall_at(k: int, recall: Recall) -> float:
    return recall.at[k]
