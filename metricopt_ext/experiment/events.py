"""TensorBoard events: a seed's queries and f's quality while it runs, and the methods' curves once it has."""

import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from metricopt_ext.experiment.report import Report
from metricopt_ext.runtime.progress import Callback

FLUSHED = 5  # seconds until an event is in its file


class QueryEvents(Callback):
    """Writes a seed's queries as TensorBoard events as it goes on; the x axis is the query's number.

    ``queries/<metric>`` is the validation metric of each query, ``queries/best`` the best so far, ``queries/left`` the
    queries that are left, and ``value_function/spearman`` f's correlation with the metric, known after each round of a
    recipe, and after each batch of a guided search.

    A run that is resumed tells of its queries from the first on, those on file too: its events take the place of the
    earlier ones, so that no query is drawn twice. One that has nothing to tell leaves them as they are.

    Args:
        folder: Of the events.
        metric: The metric's name.
        maximize: Whether higher is better.
        queries: The seed's budget.
    """

    def __init__(self, folder: Path, metric: str, maximize: bool, queries: int) -> None:
        self._folder, self._metric, self._total = folder, metric, queries
        self._better: Callable[[float, float], float] = max if maximize else min
        self._best = -math.inf if maximize else math.inf
        self._writer: Any = None

    def query(self, spent: int, value: float) -> None:
        """Write a query's value, the best and what is left."""
        self._best = self._better(value, self._best)
        self._write(f"queries/{self._metric}", value, spent)
        self._write("queries/best", self._best, spent)
        self._write("queries/left", self._total - spent, spent)

    def quality(self, queries: int, spearman: float) -> None:
        """Write f's quality at the latest query that it knows of."""
        self._write("value_function/spearman", spearman, queries)

    def close(self) -> None:
        """Write what is not in the file yet."""
        if self._writer is not None:
            self._writer.close()

    def _write(self, tag: str, value: float, step: int) -> None:
        if self._writer is None:
            self._writer = _fresh_writer(self._folder)
        self._writer.add_scalar(tag, value, step)


@contextmanager
def query_events(folder: Path, metric: str, maximize: bool, queries: int) -> Iterator[Callback]:
    """Yield a `QueryEvents`, and close it at the end, however that comes."""
    importlib.import_module("torch.utils.tensorboard")  # takes a second or two, which would count as the first query's
    events = QueryEvents(folder, metric, maximize, queries)
    try:
        yield events
    finally:
        events.close()


def write_events(report: Report, folder: str | Path) -> None:
    """Write the validation metric along finetuning as TensorBoard events, one run for each seed and method."""
    for record in report.records:
        for name, curve in record.curves.items():
            with _fresh_writer(Path(folder, f"seed-{record.seed}", name)) as writer:
                for step, value in enumerate(curve):
                    writer.add_scalar(f"validation/{report.metric}", value, step)


def _fresh_writer(folder: Path) -> Any:
    """Return a writer to a folder without earlier events, which a resumed run would draw twice."""
    from torch.utils.tensorboard import SummaryWriter

    for earlier in folder.glob("events.out.tfevents.*"):
        earlier.unlink()
    return SummaryWriter(str(folder), flush_secs=FLUSHED)
