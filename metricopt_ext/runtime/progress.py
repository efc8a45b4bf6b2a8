"""Progress display: a run's stage, the latest metric value and the queries spent, as a bar or as lines of a log."""

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from metricopt_ext.plain import MESSAGE, plain
from metricopt_ext.runtime import distributed
from metricopt_ext.runtime.pace import Item, Pace, paced, seconds_left
from metricopt_ext.utils.words import brief, decimals, duration

INTERVAL = 30.0  # seconds between two lines of a log, unless a tenth of the queries was spent


class Callback:
    """Notified of a run's progress; subclass it, as this one shows nothing."""

    def stage(self, description: str) -> None:
        """A new stage begins."""

    def on_file(self, queries: int) -> None:
        """An interrupted run goes on: the first of the queries that follow are read from its files."""

    def query(self, spent: int, value: float) -> None:
        """A metric query was answered: how many have been spent, and the metric's value in its own units."""

    def answered(self, query: Any) -> None:
        """Tell `query` of a metric's `Query`: what a metric calls (`Metric.calling`)."""
        self.query(query.spent, query.value)

    def quality(self, queries: int, spearman: float) -> None:
        """It became known how good the f of as many queries is: its Spearman correlation with the metric elsewhere."""

    def say(self, line: str) -> None:
        """A message deserves a line of its own."""

    def warning(self, line: str) -> None:
        """Python has shown a warning."""

    def goes_on(self, taken: int, left: int, seconds: float) -> bool:
        """A training has taken some steps in some seconds, and others are left: return whether it is to go on."""
        return True

    def outcome(self, before: float, after: float) -> None:
        """The model that is kept was chosen: the metric before and after, in its own units."""

    def done(self) -> None:
        """The run is over, even if queries are left unspent."""


def told(items: Sequence[Item], callback: Callback, name: str, done: int = 0) -> Iterator[Item]:
    """Begin a stage, yield what takes its time each, and tell every ten seconds how far it is and how long it takes.

    Args:
        items: What is left.
        callback: It is a stage of its.
        name: What it is.
        done: How many there were before.
    """
    callback.stage(name)
    yield from paced(items, callback.stage, name, done, done + len(items))


def _passed(method: str) -> Any:
    """Return a method that passes on what it is told."""

    def told(self: "_Passing", *arguments: Any) -> None:
        self._pass(method, *arguments)

    return told


class _Passing(Callback):
    """Passes everything on."""

    stage, on_file, query, quality = (_passed(each) for each in ("stage", "on_file", "query", "quality"))
    say, warning, outcome, done = (_passed(each) for each in ("say", "warning", "outcome", "done"))

    @abstractmethod
    def _pass(self, method: str, *arguments: Any) -> None: ...


class Several(_Passing):
    """Passes everything on to several callbacks, in their order."""

    def __init__(self, *callbacks: Callback) -> None:
        self._callbacks = callbacks

    def goes_on(self, taken: int, left: int, seconds: float) -> bool:
        """Return whether all of them would have the training go on."""
        return all(callback.goes_on(taken, left, seconds) for callback in self._callbacks)

    def _pass(self, method: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, method)(*arguments)


class BeforeOthers(Several):
    """Passes everything on but that a run is over, as other methods follow it."""

    def done(self) -> None:
        """Pass nothing on."""


class Within(Callback):
    """Shows a part of a run, whose queries are not among the run's, as a stage of it that takes long.

    Args:
        callback: The run's.
        name: The part's.
        total: Queries that the part may spend.
        clock: Returns seconds, to space out what is said.
    """

    def __init__(self, callback: Callback, name: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._callback, self._name, self._total, self._clock = callback, name, total, clock
        self._told = clock()

    def stage(self, description: str) -> None:
        """Say it under the part's name, unless something was said just before."""
        self._tell(description)

    def query(self, spent: int, value: float) -> None:
        """Say how many of the part's queries have been spent, unless something was said just before."""
        self._tell(f"{spent} of {self._total} queries")

    def say(self, line: str) -> None:
        """Pass on."""
        self._callback.say(line)

    def warning(self, line: str) -> None:
        """Pass on."""
        self._callback.warning(line)

    def _tell(self, description: str) -> None:
        if self._clock() - self._told >= INTERVAL:
            self._callback.stage(f"{self._name}, {description}")
            self._told = self._clock()


class QueueCallback(_Passing):
    """Passes everything on through a queue, from another process to `relay`."""

    def __init__(self, queue: Any, name: str) -> None:
        self._queue, self._name = queue, name

    def _pass(self, method: str, *arguments: Any) -> None:
        self._queue.put((self._name, method, arguments))


def relay(queue: Any, callbacks: dict[str, Callback]) -> None:
    """Pass each `QueueCallback` message on to the callback of that name, until None comes through the queue."""
    for name, method, arguments in iter(queue.get, None):
        getattr(callbacks[name], method)(*arguments)


class Bars(AbstractContextManager["Bars"]):
    """Shows progress bars on the terminal, one for each run that is watched; elsewhere, as in a notebook, plain lines.

    Args:
        console: rich's console; by default the standard output.
        clock: Returns seconds, to space the lines out.
        lines: Show lines on a terminal too, which other processes may write to.
        log: Receives the lines as well, whatever is drawn, and the warnings.

    Examples:
        >>> with Bars() as bars:
        ...     bars.watch("seed 0", total=600, metric="accuracy").query(1, 0.71)  # doctest: +SKIP
    """

    def __init__(
        self,
        console: Any = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        lines: bool = False,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self._console, self._clock, self._log = console or _standard_output(), clock, log
        self._progress = _bars_on(self._console) if self._console.is_interactive and not lines else None
        self._whole: _Whole | None = None

    def watch(self, name: str, total: int, metric: str = "") -> Callback:
        """Show a run of ``total`` queries of a metric."""
        run = name, metric, Pace(total, self._clock)
        shown: list[Callback] = [
            _Lines(self._print, *run, self._clock) if self._progress is None else _Bar(self._progress, *run)
        ]
        if self._log is not None:
            shown.append(_Logged(self._log, name, metric, Pace(total, self._clock), self._clock))
        if self._whole is not None:
            shown.append(self._whole.next())
        return Several(*shown)

    def expect(self, name: str, runs: int, total: int, at_once: int) -> None:
        """Show for the runs that are watched from now on, all in one, how long their queries will take.

        Args:
            name: What the runs are.
            runs: Their number.
            total: Queries of each.
            at_once: How many of them run at the same time.
        """
        paces = [Pace(total, self._clock) for _ in range(runs)]
        tells = [tell for tell in (None if self._progress else self._print, self._log) if tell is not None]
        self._whole = _Whole(name, paces, at_once, self._clock, self._progress, tells)

    def _print(self, line: str) -> None:
        _print_on(self._console, line)

    def __enter__(self) -> "Bars":
        """Start drawing."""
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *details: Any) -> None:
        """Stop drawing and leave the bars on the screen."""
        if self._progress is not None:
            self._progress.stop()


def _standard_output() -> Any:
    """The console that is written to; in a notebook, where each redrawn bar would be an output of its own, a file."""
    from rich.console import Console

    console = Console()
    return Console(force_jupyter=False, force_terminal=False) if console.is_jupyter else console


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


def check_callback(callback: Callback | None) -> None:
    """Refuse what is no callback.

    Raises:
        ValueError: It is none.
    """
    if callback is not None and not isinstance(callback, Callback):
        raise ValueError(f"callback is {brief(callback)}; it must be a Callback, of a class that extends mo.Callback")


@contextmanager
def progress_of(callback: Callback | None, name: str, total: int) -> Iterator[Callback]:
    """Yield the callback or, if there is none, one that shows a run of ``total`` queries of the metric of that name.

    Of ranks that share the run, the first alone shows it.
    """
    if distributed.rank() > 0:
        yield Callback()
        return
    if callback is not None:
        yield callback
        return
    with Bars() as bars:
        yield bars.watch(name, total, name)


def _print_on(console: Any, line: str) -> None:
    console.print(plain(line, MESSAGE), markup=False, emoji=False, highlight=False, soft_wrap=True)


class _Timed(Callback):
    """Keeps the pace of one run's queries."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def stage(self, description: str) -> None:
        self._pace.stage()

    def on_file(self, queries: int) -> None:
        self._pace.on_file(queries)

    def query(self, spent: int, value: float) -> None:
        self._pace.query(spent)

    def outcome(self, before: float, after: float) -> None:
        self._pace.end()

    def done(self) -> None:
        self._pace.end()


class _Shown(_Timed):
    """What is shown of one run: its stage, the metric, and about how long its queries take."""

    def __init__(self, tell: Callable[[str], None], name: str, metric: str, pace: Pace) -> None:
        super().__init__(pace)
        self._print, self._name, self._metric = tell, name, metric
        self._seen = ""

    def query(self, spent: int, value: float) -> None:
        super().query(spent, value)
        self._seen = f"{self._metric} {decimals(value)}".strip()

    def outcome(self, before: float, after: float) -> None:
        super().outcome(before, after)
        self._seen = f"{self._metric} {decimals(before)} -> {decimals(after)}".strip()

    def say(self, line: str) -> None:
        self._print(f"{self._name}  {line}".strip())

    def _with_time(self) -> str:
        left = self._pace.seconds_left
        return self._seen if left is None else f"{self._seen}; about {duration(left)} left"


class _Bar(_Shown):
    def __init__(self, progress: Any, name: str, metric: str, pace: Pace) -> None:
        super().__init__(lambda line: _print_on(progress.console, line), name, metric, pace)
        self._progress = progress
        self._task = progress.add_task("waiting", total=pace.total, name=plain(name), seen="", start=False)

    def stage(self, description: str) -> None:
        super().stage(description)
        self._progress.start_task(self._task)
        self._progress.tasks[self._task].stop_time = None  # other methods or new starts may follow a run that is done
        self._progress.update(self._task, description=plain(description))

    def query(self, spent: int, value: float) -> None:
        super().query(spent, value)
        self._progress.update(self._task, completed=spent, seen=plain(self._with_time()))

    def outcome(self, before: float, after: float) -> None:
        super().outcome(before, after)
        self._progress.update(self._task, seen=plain(self._seen))

    def done(self) -> None:
        super().done()
        self._progress.update(self._task, description="done")
        self._progress.stop_task(self._task)


class _Lines(_Shown):
    def __init__(
        self, tell: Callable[[str], None], name: str, metric: str, pace: Pace, clock: Callable[[], float]
    ) -> None:
        super().__init__(tell, name, metric, pace)
        self._clock = clock
        self._stage, self._told = "waiting", (0, "")
        self._when = clock()

    def stage(self, description: str) -> None:
        super().stage(description)
        self._stage = description
        self._tell()

    def query(self, spent: int, value: float) -> None:
        super().query(spent, value)
        if spent - self._told[0] >= self._pace.total / 10 or self._clock() - self._when >= INTERVAL:
            self._tell()

    def done(self) -> None:
        super().done()
        self._told = (-1, "")  # the last line says how it ended, whatever was said before
        self.stage("done")

    def _tell(self) -> None:
        spent, total = self._pace.spent, self._pace.total
        news = (spent, self._seen)
        queries = f"; {spent} of {total} queries spent, {total - spent} left; {self._with_time()}"
        self.say(self._stage + (queries if news != self._told else ""))
        self._told, self._when = news, self._clock()


class _Logged(_Lines):
    """The same lines for a log, with the warnings, which Python itself has shown elsewhere."""

    def warning(self, line: str) -> None:
        self.say(f"warning: {line}")


class _Part(_Timed):
    """One of several runs that are shown as a whole."""

    def __init__(self, whole: "_Whole", pace: Pace) -> None:
        super().__init__(pace)
        self._whole = whole

    def query(self, spent: int, value: float) -> None:
        super().query(spent, value)
        self._whole.show()

    def done(self) -> None:
        super().done()
        self._whole.show()


class _Whole:
    """Several runs as a whole: a row below a progress display's bars, and lines now and then."""

    def __init__(
        self,
        name: str,
        paces: Sequence[Pace],
        at_once: int,
        clock: Callable[[], float],
        progress: Any,
        tells: Sequence[Callable[[str], None]],
    ) -> None:
        self._name, self._paces, self._at_once = name, paces, at_once
        self._clock, self._when, self._progress, self._tells = clock, clock(), progress, tells
        self._total, self._started = sum(pace.total for pace in paces), 0
        if progress is not None:
            self._row = progress.add_task("", total=self._total, name=name, seen="")

    def next(self) -> Callback:
        """Return the callback of the next run."""
        self._started += 1
        return _Part(self, self._paces[self._started - 1])

    def show(self) -> None:
        left, spent = seconds_left(self._paces, self._at_once), sum(pace.spent for pace in self._paces)
        time_left = "" if left is None else f"about {duration(left)} of queries left"
        if self._progress is not None:
            self._progress.update(self._row, completed=spent, seen=time_left)
        if time_left and self._clock() - self._when >= INTERVAL:
            self._when = self._clock()
            for tell in self._tells:
                tell(f"{self._name}  {spent} of {self._total} queries spent; {time_left}")
