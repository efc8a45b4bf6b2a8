"""pytorch-metric-learning's AccuracyCalculator with Recall@k, for its testers and hooks.

Its own metrics have no Recall@k: its ``precision_at_k`` is the share of correct neighbours.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from metricopt_ext.errors import DataError
from metricopt_ext.retrieval.inputs import as_ids, check_options
from metricopt_ext.retrieval.neighbours import Distance
from metricopt_ext.retrieval.recall import recall_at_k
from metricopt_ext.retrieval.vectors import Array, Integers
from metricopt_ext.utils.extras import install

try:
    import faiss
    from pytorch_metric_learning.utils import accuracy_calculator
    from pytorch_metric_learning.utils.accuracy_calculator import nan_accuracy, try_getting_not_lone_labels
    from pytorch_metric_learning.utils.inference import FaissKNN
except ImportError as error:
    raise ImportError(
        f"RecallCalculator needs FAISS and pytorch-metric-learning: {install('faiss')} and"
        f" {install('pytorch_metric_learning')}"
    ) from error


class AccuracyCalculator(accuracy_calculator.AccuracyCalculator):  # type: ignore[misc]
    """pytorch-metric-learning's calculator of this name, which calculates ``recall_at_<k>`` too.

    It takes the place of that calculator by its import alone. The recalls are those of `recall_at_k`, with its memory
    use, exact labels and rules for ties and for classes with a single member. With a search or a comparison of labels
    of one's own they follow these. pytorch-metric-learning's own metrics are calculated as it does, by float32
    distances and with all neighbours in memory at once. It takes labels as float32, so ids are numbered from 0 before.

    Args:
        include: Metrics to calculate, e.g. ``("recall_at_1", "mean_average_precision_at_r")``; by default all.
        exclude: Those of these metrics to leave out.
        avg_of_avgs: Whether each value is the mean over classes of their means, not the mean over queries.
        return_per_class: Whether each value is a list of the means of the classes, ascending by label. Only classes of
            queries with a match are among them.
        k: Number of neighbours for pytorch-metric-learning's own metrics: a number, ``"max_bin_count"`` for the size
            of the largest class, or None for all.
        label_comparison_fn: Says which labels match: called with two tensors of labels that broadcast, ``n x 1 x ...``
            and ``n x k x ...`` in float32; returns booleans, ``n x k``. None for equal ones.
        device: Where pytorch-metric-learning's own metrics are calculated; None for a GPU if there is one.
        knn_func: Finds neighbours, e.g. pytorch-metric-learning's ``CustomKNN``; None for exact search by ``distance``.
        kmeans_func: Clusters embeddings for NMI and AMI; None for FAISS' k-means.
        ks: Numbers of neighbours to calculate recalls for, each at least 1.
        distance: ``"l2"``, ``"ip"`` or ``"cosine"``, for all metrics; with a ``knn_func`` its own counts instead.

    Raises:
        ValueError: ``include`` or ``exclude`` names an unknown metric, or other arguments are not
            pytorch-metric-learning's.
        DataError: For impossible ``ks`` or distance; a distance beside a ``knn_func``; from `get_accuracy`, as in
            `recall_at_k`.

    Examples:
        >>> calculator = AccuracyCalculator(("recall_at_2", "precision_at_1"), ks=(1, 2))
        >>> found = calculator.get_accuracy(torch.tensor([[0.0], [1.0], [3.0], [3.5]]), torch.tensor([0, 1, 0, 1]))
        >>> found == {"recall_at_2": 0.5, "precision_at_1": 0.0}
        True
    """

    def __init__(
        self,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        avg_of_avgs: bool = False,
        return_per_class: bool = False,
        k: int | str | None = None,
        label_comparison_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
        device: torch.device | None = None,
        knn_func: Callable[..., tuple[Tensor, Tensor]] | None = None,
        kmeans_func: Callable[..., Any] | None = None,
        *,
        ks: Sequence[int] = (1, 10, 100, 1000),
        distance: Distance = "l2",
    ) -> None:
        if knn_func is not None and distance != "l2":
            raise DataError(f"distance={distance!r} is not that of knn_func, which has its own; leave one of them out")
        self._distance: Distance = distance
        numbers = check_options(ks, distance)
        self._ks = {f"recall_at_{number}": number for number in numbers}
        for name, number in self._ks.items():
            # The base class finds its metrics by this prefix, and calls each for its value.
            setattr(self, f"calculate_{name}", partial(self._recall_at, number))
        self._compares = label_comparison_fn is not None
        self._exact = knn_func is None and not self._compares
        index = faiss.IndexFlatL2 if distance == "l2" else faiss.IndexFlatIP
        super().__init__(
            tuple(include),
            tuple(exclude),
            avg_of_avgs,
            return_per_class,
            k,
            label_comparison_fn,
            device,
            FaissKNN(index_init_fn=index) if knn_func is None else knn_func,
            kmeans_func,
        )

    def requires_knn(self) -> list[str]:
        """Return the metrics that need neighbours: ``mean_reciprocal_rank`` too, which the base class forgets."""
        return [*super().requires_knn(), "mean_reciprocal_rank", *self._ks]

    def get_accuracy(
        self,
        query: Array,
        query_labels: Array,
        reference: Array | None = None,
        reference_labels: Array | None = None,
        ref_includes_query: bool = False,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Calculate the metrics.

        Args:
            query: Embeddings, ``n x d``.
            query_labels: As in `recall_at_k`, e.g. the whole float32 numbers that a tester of two streams stores. With
                a ``label_comparison_fn`` any numbers, ``n x ...``, that float32 keeps apart.
            reference: Embeddings of the gallery, ``m x d``; None to search the queries themselves.
            reference_labels: Their labels; None without a gallery.
            ref_includes_query: Whether the first n items of ``reference`` are the queries.
            include: Metrics to calculate this time; by default all.
            exclude: Those of these metrics to leave out this time.

        Returns:
            Values by name, or lists of those of classes.

        Raises:
            DataError: As in `recall_at_k`; labels of a gallery without it, or a gallery without labels; labels
                that are the same float32, with a ``label_comparison_fn``; an unknown metric.
        """
        if (reference is None) != (reference_labels is None):
            given, lacks = ("reference", "reference_labels")[:: 1 if reference_labels is None else -1]
            raise DataError(f"{given} is given without {lacks}; give both, or none to search the queries themselves")
        if unknown := [name for name in include if name not in self.original_function_dict]:
            known = ", ".join(self.original_function_dict)
            raise DataError(f"include names {unknown[0]!r}, which is not among those chosen at first: {known}")
        functions = self.get_function_dict(include, exclude)
        exact = {name: function for name, function in functions.items() if name in self._ks and self._exact}
        others = [name for name in functions if name not in exact]
        values: dict[str, Any] = {}
        if exact:
            recall = recall_at_k(
                query,
                query_labels,
                list(dict.fromkeys(self._ks[name] for name in exact)),
                gallery=None if reference is None else (reference, reference_labels),  # type: ignore[arg-type]
                gallery_starts_with_queries=reference is not None and ref_includes_query,
                distance=self._distance,
            )
            values = self._get_accuracy(exact, places=recall.places, query_labels=as_ids(query_labels)[recall.rows])
        if others:
            unit = self._distance == "cosine"
            query, reference = _prepared(query, unit), None if reference is None else _prepared(reference, unit)
        recalls = [name for name in others if name in self._ks]  # which may need more neighbours than the others
        for names in (recalls, [name for name in others if name not in self._ks]):
            if names:
                labels, theirs = self._as_float32(query_labels, reference_labels)
                values |= super().get_accuracy(query, labels, reference, theirs, ref_includes_query, include=names)
        self.curr_function_dict = functions  # testers and hooks read the names of these
        return {name: values[name] for name in functions}

    def determine_k(self, bin_counts: Tensor, num_reference_embeddings: int, ref_includes_query: bool) -> int:
        """Return how many neighbours are searched: those that the recalls need, or as the base class has it."""
        if recalls := [self._ks[name] for name in self.get_curr_metrics() if name in self._ks]:
            return min(max(recalls), num_reference_embeddings - ref_includes_query)
        k: int = super().determine_k(bin_counts, num_reference_embeddings, ref_includes_query)
        return k

    def _as_float32(self, labels: Array, others: Array | None) -> tuple[Tensor, Tensor | None]:
        """Labels of queries and gallery as float32, which tells them apart."""
        given = [each for each in (labels, others) if each is not None]
        if self._compares:
            found = [torch.as_tensor(each).float() for each in given]
            for each, whose in zip(given, ("", "gallery "), strict=False):
                _check_apart(each, whose)
        else:
            ids = [as_ids(each) for each in given]
            numbers = np.unique(np.concatenate(ids), return_inverse=True)[1]
            found = [torch.from_numpy(each).float() for each in np.split(numbers, [len(ids[0])])[: len(ids)]]
        return found[0], found[1] if len(found) > 1 else None

    def _recall_at(
        self,
        number: int,
        query_labels: Any,
        places: Integers | None = None,
        knn_labels: Any = None,
        not_lone_query_mask: Any = None,
        label_counts: Any = None,
        **_: Any,
    ) -> Any:
        """Recall@k by the places of queries' first matches, or else by the labels of their neighbours, as theirs."""
        if places is None:
            knn_labels, query_labels = try_getting_not_lone_labels(knn_labels, query_labels, not_lone_query_mask)
            if knn_labels is None:
                return nan_accuracy(label_counts[0], self.return_per_class)
            same = self.label_comparison_fn(query_labels[:, None], knn_labels[:, :number])
            hits, query_labels = same.any(dim=1).numpy(force=True), query_labels.numpy(force=True)
        else:
            hits = places < number
        if not (self.avg_of_avgs or self.return_per_class):
            return float(np.mean(hits))
        of_class = np.unique(query_labels, axis=0, return_inverse=True)[1].ravel()
        means = np.bincount(of_class, weights=hits) / np.bincount(of_class)
        return means.tolist() if self.return_per_class else float(means.mean())


class RecallCalculator(AccuracyCalculator):
    """An `AccuracyCalculator` that calculates the recalls and, unless ``include`` names others, nothing else.

    Examples:
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
        **options: Any,
    ) -> None:
        """Take the arguments of `AccuracyCalculator`; ``include`` is by default all recalls."""
        recalls = [f"recall_at_{number}" for number in check_options(ks)]
        super().__init__(tuple(include) or recalls, exclude, ks=ks, **options)


def _prepared(embeddings: Array, unit: bool) -> Tensor:
    """What pytorch-metric-learning searches, FAISS in one piece of memory; scaled to length 1 for the cosine."""
    if not isinstance(embeddings, Tensor):
        found = np.asarray(embeddings)
        embeddings = torch.from_numpy(np.array(found, dtype=found.dtype.newbyteorder("="), order="C"))
    return F.normalize(embeddings.float()) if unit else embeddings.contiguous()


def _check_apart(labels: Array, whose: str) -> None:
    """Refuse labels that differ, but not in float32."""
    exact = torch.as_tensor(labels).numpy(force=True)
    if exact.dtype != np.float32 and len(np.unique(exact)) != len(np.unique(exact.astype(np.float32))):
        raise DataError(f"{whose}labels must differ in float32 for label_comparison_fn; number them from 0")
