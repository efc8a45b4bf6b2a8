"""A metric whose evaluations are kept in a file, so that an interrupted run pays for none of them twice."""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from metricopt_ext.errors import FileFormatError
from metricopt_ext.tasks.metric import Evaluation, Item, Metric
from metricopt_ext.utils import ranks
from metricopt_ext.utils.described import from_json
from metricopt_ext.utils.files import read_json, to_json, write_json
from metricopt_ext.utils.words import brief


class CachedMetric(Metric):
    """A metric with a file of its evaluations, in order.

    Runs are repeatable, so a run that is started again evaluates the same points in the same order: the evaluations on
    file are returned first, and booked as before; only then is the metric itself called.

    Args:
        metric: The metric; both share a ledger.
        path: The JSON file, rewritten with every evaluation; None keeps them in memory only.

    Attributes:
        evaluations: Those returned by this object so far.
        on_file: How many there were on file.

    Raises:
        FileFormatError: The file holds something else.
    """

    def __init__(self, metric: Metric, path: Path | None) -> None:
        super().__init__(metric.function, **metric.settings, ledger=metric.ledger)
        self.metric = metric
        self.path = path
        self.evaluations: list[Evaluation] = []
        self._on_file = ranks.on_first(lambda: [] if path is None or not path.exists() else _read(path, metric))
        self.on_file = len(self._on_file)

    def each(self, judged: Callable[[Item], Evaluation], items: Sequence[Item], purpose: str) -> Iterator[Evaluation]:
        """Yield the next evaluations on file; then evaluate the metric (see `Metric.each`) and store the results."""
        kept = self._on_file[len(self.evaluations) :][: len(items)]
        for evaluation in kept:
            self.ledger.spend(purpose, self.repeats)
            self.metric.saw(evaluation)
            self.evaluations.append(evaluation)
            yield evaluation
        for evaluation in self.metric.each(judged, items[len(kept) :], purpose):
            self.evaluations.append(evaluation)
            if self.path is not None and ranks.rank() == 0:
                write_json(self.path, {"checksum": _checksum(self.evaluations), "evaluations": self.evaluations})
            yield evaluation

    def judge(self, model: nn.Module) -> Evaluation:
        """Have the metric itself judge the model; nothing is booked or stored."""
        return self.metric.judge(model)


@dataclass(frozen=True)
class _File:
    """What the file holds."""

    checksum: str
    evaluations: list[Evaluation]


def _read(path: Path, metric: Metric) -> list[Evaluation]:
    content = read_json(path)
    try:
        kept = from_json(_File, content)
        if kept.checksum != _checksum(kept.evaluations):
            raise ValueError("its checksum is another than when it was written")
        for cost, halves, noise in kept.evaluations:
            if noise is not None and not 0 <= noise < math.inf:
                raise ValueError(f"{noise} is no standard error")
            for each in (cost, *(halves or ())):
                if not math.isfinite(each) or (metric.bounds is not None and not 0 <= each <= 1):
                    raise ValueError(f"{each} is no cost of a metric with bounds {metric.bounds}")
    except ValueError as error:
        raise FileFormatError(
            f"{path} holds no evaluations of the metric: {brief(error)}; delete it to evaluate again"
        ) from error
    return kept.evaluations


def _checksum(evaluations: Sequence[Evaluation]) -> str:
    return hashlib.blake2b(to_json(evaluations).encode(), digest_size=8).hexdigest()
