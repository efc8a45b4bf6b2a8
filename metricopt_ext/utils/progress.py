"""Progress display: a run's stage, the latest metric value and the queries spent, as a bar or as lines of a log."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from metricopt_ext.utils import ranks

INTERVAL = 30.0  # seconds between two lines of a log, unless a tenth of the queries was spent


class Watcher:
    """Is notified of a run's progress; this one shows nothing."""

    def stage(self, description: str) -> None:
        """A new stage begins."""

    def query(self, spent: int, seen: str) -> None:
        """A metric query was made: how many have been spent, and the value it returned."""

    def say(self, line: str) -> None:
        """A message deserves a line of its own."""

    def outcome(self, seen: str) -> None:
        """The model that is kept was chosen: its metric before and after."""

    def done(self) -> None:
        """The run is over, even if queries are left unspent."""


class Bars(AbstractContextManager["Bars"]):
    """Shows progress bars on the terminal, one for each run that is watched; without a terminal, plain lines.

    Args:
        console: rich's console; by default the standard output.
        clock: Returns seconds, to space the lines out.
        lines: Show lines on a terminal too, which other processes may write to.

    Example:
        >>> with Bars() as bars:
        ...     bars.watch("seed 0", total=600).query(1, "accuracy 0.71")  # doctest: +SKIP
    """

    def __init__(
        self, console: Any = None, clock: Callable[[], float] = time.monotonic, *, lines: bool = False
    ) -> None:
        from rich.console import Console

        self._console, self._clock = console or Console(), clock
        drawable = self._console.is_interactive or self._console.is_jupyter
        self._progress = _bars_on(self._console) if drawable and not lines else None

    def watch(self, name: str, total: int) -> Watcher:
        """Show a run of ``total`` queries."""
        if self._progress is None:
            return _Lines(self._console, name, total, self._clock)
        return _Bar(self._progress, name, total)

    def __enter__(self) -> "Bars":
        """Start drawing."""
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *details: Any) -> None:
        """Stop drawing and leave the bars on the screen."""
        if self._progress is not None:
            self._progress.stop()


def _bars_on(console: Any) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    whole, folded = Column(no_wrap=True), Column(overflow="fold")  # no number is cut off
    return Progress(
        TextColumn("{task.fields[name]}", markup=False, table_column=whole),  # a metric's name may contain brackets
        TextColumn("{task.description:<20}", markup=False, table_column=whole),
        BarColumn(bar_width=20 if console.width >= 100 else 4),
        MofNCompleteColumn(table_column=whole),
        TextColumn("queries", table_column=whole),
        TextColumn("{task.fields[seen]}", markup=False, table_column=folded),
        TimeElapsedColumn(table_column=whole),
        console=console,
    )


@contextmanager
def watched(watcher: Watcher | None, name: str, total: int) -> Iterator[Watcher]:
    """Yield the watcher or, if there is none, one that shows a run of ``total`` queries on the terminal.

    Of ranks that share the run, the first alone shows it.
    """
    if ranks.rank() > 0:
        yield Watcher()
        return
    if watcher is not None:
        yield watcher
        return
    with Bars() as bars:
        yield bars.watch(name, total)


class _Shown(Watcher):
    def __init__(self, console: Any, name: str) -> None:
        self._console, self._name = console, name

    def say(self, line: str) -> None:
        text = f"{self._name}  {line}".strip()
        self._console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)


class _Bar(_Shown):
    def __init__(self, progress: Any, name: str, total: int) -> None:
        super().__init__(progress.console, name)
        self._progress = progress
        self._task = progress.add_task("waiting", total=total, name=name, seen="", start=False)

    def stage(self, description: str) -> None:
        self._progress.start_task(self._task)
        self._progress.tasks[self._task].stop_time = None  # rivals or new starts may follow a run that is done
        self._progress.update(self._task, description=description)

    def query(self, spent: int, seen: str) -> None:
        self._progress.update(self._task, completed=spent, seen=seen)

    def outcome(self, seen: str) -> None:
        self._progress.update(self._task, seen=seen)

    def done(self) -> None:
        self._progress.update(self._task, description="done")
        self._progress.stop_task(self._task)


class _Lines(_Shown):
    def __init__(self, console: Any, name: str, total: int, clock: Callable[[], float]) -> None:
        super().__init__(console, name)
        self._total, self._clock = total, clock
        self._stage, self._spent, self._seen = "waiting", 0, ""
        self._told: tuple[int, str] | None = (0, "")
        self._when = clock()

    def stage(self, description: str) -> None:
        self._stage = description
        self._tell()

    def query(self, spent: int, seen: str) -> None:
        self._spent, self._seen = spent, seen
        if spent - (self._told or (0,))[0] >= self._total / 10 or self._clock() - self._when >= INTERVAL:
            self._tell()

    def outcome(self, seen: str) -> None:
        self._seen = seen

    def done(self) -> None:
        self._told = None  # the last line says how it ended, whatever was said before
        self.stage("done")

    def _tell(self) -> None:
        news = (self._spent, self._seen)
        queries = f"; {self._spent} of {self._total} queries spent, {self._total - self._spent} left; {self._seen}"
        self.say(self._stage + (queries if news != self._told else ""))
        self._told, self._when = news, self._clock()


class QueueWatcher(Watcher):
    """Passes everything on through a queue, from another process to `relay`."""

    def __init__(self, queue: Any, name: str) -> None:
        self._queue, self._name = queue, name

    def stage(self, description: str) -> None:
        """Pass on."""
        self._queue.put((self._name, "stage", (description,)))

    def query(self, spent: int, seen: str) -> None:
        """Pass on."""
        self._queue.put((self._name, "query", (spent, seen)))

    def say(self, line: str) -> None:
        """Pass on."""
        self._queue.put((self._name, "say", (line,)))

    def outcome(self, seen: str) -> None:
        """Pass on."""
        self._queue.put((self._name, "outcome", (seen,)))

    def done(self) -> None:
        """Pass on."""
        self._queue.put((self._name, "done", ()))


def relay(queue: Any, watchers: dict[str, Watcher]) -> None:
    """Pass each `QueueWatcher` message on to the watcher of that name, until None comes through the queue."""
    for name, method, arguments in iter(queue.get, None):
        getattr(watchers[name], method)(*arguments)
