"""Progress display: a bar for each run with its stage, the latest metric value and the queries spent."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


class Watcher:
    """Is notified of a run's progress; this one shows nothing."""

    def stage(self, description: str) -> None:
        """A new stage begins."""

    def query(self, spent: int, seen: str) -> None:
        """A metric query was made: how many have been spent, and the value it returned."""

    def say(self, line: str) -> None:
        """A message deserves a line of its own."""

    def done(self) -> None:
        """The run is over, even if queries are left unspent."""


class Bars(AbstractContextManager["Bars"]):
    """Shows progress bars on the terminal, one for each run that is watched.

    Example:
        >>> with Bars() as bars:
        ...     bars.watch("seed 0", total=600).query(1, "accuracy 0.71")  # doctest: +SKIP
    """

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.fields[name]}", markup=False),  # a metric's name may contain brackets
            TextColumn("{task.description:<22}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("queries  {task.fields[seen]}", markup=False),
            TimeElapsedColumn(),
        )

    def watch(self, name: str, total: int) -> Watcher:
        """Add a bar for a run of ``total`` queries."""
        return _Bar(self._progress, name, total)

    def __enter__(self) -> "Bars":
        """Start drawing."""
        self._progress.start()
        return self

    def __exit__(self, *details: Any) -> None:
        """Stop drawing and leave the bars on the screen."""
        self._progress.stop()


@contextmanager
def watched(watcher: Watcher | None, name: str, total: int) -> Iterator[Watcher]:
    """Yield the watcher or, if there is none, a bar on the terminal for a run of ``total`` queries."""
    if watcher is not None:
        yield watcher
        return
    with Bars() as bars:
        yield bars.watch(name, total)


class _Bar(Watcher):
    def __init__(self, progress: Any, name: str, total: int) -> None:
        self._progress, self._name = progress, name
        self._task = progress.add_task("waiting", total=total, name=name, seen="", start=False)

    def stage(self, description: str) -> None:
        self._progress.start_task(self._task)
        self._progress.update(self._task, description=description)

    def query(self, spent: int, seen: str) -> None:
        self._progress.update(self._task, completed=spent, seen=seen)

    def done(self) -> None:
        self._progress.update(self._task, description="done")
        self._progress.stop_task(self._task)

    def say(self, line: str) -> None:
        text = f"{self._name}  {line}".strip()
        self._progress.console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)


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

    def done(self) -> None:
        """Pass on."""
        self._queue.put((self._name, "done", ()))


def relay(queue: Any, watchers: dict[str, Watcher]) -> None:
    """Pass each `QueueWatcher` message on to the watcher of that name, until None comes through the queue."""
    for name, method, arguments in iter(queue.get, None):
        getattr(watchers[name], method)(*arguments)
