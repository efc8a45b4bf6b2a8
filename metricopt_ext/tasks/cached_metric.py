"""A metric whose evaluations are kept in a file with their points, so that no interrupted run pays for one twice."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import AdapterError
from metricopt_ext.runtime import distributed
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.log import Entry, Log, same_point
from metricopt_ext.tasks.metric import Item, Metric, OnQuery
from metricopt_ext.tasks.settings import Values


class CachedMetric(Metric):
    """A metric with a file of its evaluations.

    What is on file of a point is returned where that point is asked for again, and booked as before; only then is the
    metric itself called. A point that was asked for twice is on file twice.

    Args:
        metric: The metric; both share a ledger.
        path: The JSON file, to which every evaluation is added; None keeps them in memory only.
        check: Called before the file is written, to refuse it.

    Attributes:
        on_file: How many there were on file.

    Raises:
        FileFormatError: The file holds something else.
    """

    metric: Metric
    callbacks: list[OnQuery]
    on_file: int

    def __init__(self, metric: Metric, path: Path | None, check: Callable[[], None] = lambda: None) -> None:
        super().__init__(metric.function, **metric.settings, ledger=metric.ledger)
        self.metric, self.callbacks = metric, metric.callbacks
        self._log: Log | None = None  # of ranks that share a run, the first alone has it

        def read() -> list[Entry]:
            self._log = Log(path, metric, check)
            return [each for _, each in sorted(self._log.entries.items())]

        self._unused = distributed.on_first(read)
        self._start, self._next = Start(torch.zeros(0)), len(self._unused)
        self.on_file = len(self._unused)

    def with_settings(self, **changes: Any) -> Metric:
        """Return the metric itself with an empty ledger and other ``settings``, none of whose evaluations is kept."""
        return self.metric.with_settings(**changes)

    def of(self, start: Start) -> "CachedMetric":
        """Judge models to which a start is applied from now on; returns itself."""
        self._start = start
        return self

    def each(self, judged: Callable[[Item], Evaluation], items: Sequence[Item], purpose: str) -> Iterator[Evaluation]:
        """Yield what is on file of each item; else evaluate the metric (see `Metric.each`) and store the results."""
        points = [_point_of(item) for item in items]
        at = 0
        while at < len(items):
            if (kept := self._take(points[at])) is not None:
                assert kept.evaluation is not None  # as none fails, and none is given up
                yield from self.repeat(kept.evaluation, purpose, points[at])
                at += 1
                continue
            new = at + 1
            while new < len(items) and not self._on_file(points[new]):
                new += 1
            found, spent = self.metric.answers(judged, items[at:new], purpose), self.ledger.spent
            for point, evaluation in zip(points[at:new], found, strict=True):
                if self._log is not None:
                    asked = Entry.of(self._next, replace(self._start, phi=point))
                    self._log.append([asked.told(evaluation, self.repeats)])
                self._next += 1
                yield evaluation
                spent += self.repeats
                self.tell(evaluation, purpose, point, spent)
            at = new

    def _on_file(self, point: Tensor) -> bool:
        return any(self._matches(kept, point) for kept in self._unused)

    def _take(self, point: Tensor) -> Entry | None:
        found = next((kept for kept in self._unused if self._matches(kept, point)), None)
        if found is not None:
            self._unused.remove(found)
        return found

    def _matches(self, kept: Entry, point: Tensor) -> bool:
        if not kept.is_of(self._start) or len(kept.phi) != len(point):
            return False
        return same_point(kept.at(point), point)

    def judge(self, model: nn.Module, settings: Values | None = None) -> Evaluation:
        """Have the metric itself judge the model; nothing is booked or stored."""
        return self.metric.judge(model) if settings is None else self.metric.judge(model, settings)


def _point_of(item: object) -> Tensor:
    """Return the phi, ``d``, of what is judged; that of a model without an adapter has no numbers."""
    if isinstance(item, Tensor):
        return item
    try:
        return Adapter(cast(nn.Module, item)).phi.detach()
    except AdapterError:
        return torch.zeros(0)
