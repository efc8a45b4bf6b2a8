"""Progress for people who watch: one bar with the metric last seen and the queries left."""

from contextlib import AbstractContextManager
from typing import Any

from .metric import Metric


class Progress(AbstractContextManager["Progress"]):
    """A progress bar over metric queries; silent where nobody watches.

    Args:
        metric: Its ledger says what was spent and what is left.
        total: Queries that are planned.
        enabled: False shows nothing.
    """

    def __init__(self, metric: Metric, total: int, *, enabled: bool = True) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        self.metric = metric
        self._bar = RichProgress(
            TextColumn("{task.description:<24}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("queries  {task.fields[seen]}"),
            TimeElapsedColumn(),
            disable=not enabled,
        )
        self._task = self._bar.add_task("", total=total, seen="")

    def stage(self, description: str) -> None:
        """Name what is being done."""
        self._bar.update(self._task, description=description)

    def query(self, cost: float) -> None:
        """Show one more query and the metric it gave."""
        seen = f"{self.metric.name} {self.metric.to_value(cost):.4f}"
        self._bar.update(self._task, completed=self.metric.ledger.spent, seen=seen)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(line, highlight=False) if not self._bar.disable else None

    def __enter__(self) -> "Progress":
        """Start the bar."""
        self._bar.start()
        return self

    def __exit__(self, *details: Any) -> None:
        """Leave the finished bar on the screen."""
        self._bar.stop()
