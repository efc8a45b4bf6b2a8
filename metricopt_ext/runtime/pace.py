"""How fast a run's queries come, and how long those that are left will take, and other things that take their time."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from metricopt_ext.plain import plain
from metricopt_ext.utils.words import duration

LEAST = 3  # queries of this process before anything is said about those to come
EVERY = 10.0  # seconds between two words on how far a part is that asks no queries

Item = TypeVar("Item")
Say = Callable[[str], None]


def _on_stderr(line: str) -> None:
    print(f"{plain(line)} ...", file=sys.stderr, flush=True)


_HEARS: ContextVar[Say] = ContextVar("hears", default=_on_stderr)


@contextmanager
def heard(say: Say) -> Iterator[None]:
    """Let a function be told how far what is `followed` is; elsewhere it is written to the standard error."""
    before = _HEARS.set(say)
    try:
        yield
    finally:
        _HEARS.reset(before)


def followed(items: Iterable[Item], name: str, total: int) -> Iterator[Item]:
    """Yield what is gone through one by one, and tell every ten seconds how far it is and how long it takes.

    Args:
        items: It.
        name: What is done with it.
        total: About how many there are.
    """
    yield from paced(items, _HEARS.get(), name, 0, total)


def paced(items: Iterable[Item], say: Say, name: str, done: int, total: int) -> Iterator[Item]:
    """The same of what goes on after some was done, told to a function.

    Args:
        items: What is left of it.
        say: The function.
        name: What is done with it.
        done: How many there were before.
        total: About how many there are, those included.
    """
    began = last = time.monotonic()
    for number, item in enumerate(items, start=done):
        now = time.monotonic()
        if number > done and now - last >= EVERY:
            left = duration((now - began) / (number - done) * max(total - number, 0))
            say(f"{name}, {min(100 * number // total, 100)}%, about {left} left")
            last = now
        yield item


class Pace:
    """Times the queries of one run that this process makes; those on file after a resume are not timed.

    Args:
        total: The run's queries.
        clock: Returns seconds.

    Attributes:
        spent: Queries spent so far, those on file included.
    """

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self.spent = total, 0
        self._clock, self._on_file, self._over = clock, 0, False
        self._began = self._latest = clock()

    def stage(self) -> None:
        """A stage begins: what came before this process's first query, such as training, is not counted."""
        if self._own == 0:
            self._began = self._clock()

    def on_file(self, queries: int) -> None:
        """The first of the queries are on file."""
        self._on_file = queries

    def query(self, spent: int) -> None:
        """A query was made, or read from its file."""
        self.spent, self._latest, self._over = spent, self._clock(), False
        if self._own == 0:
            self._began = self._latest

    def end(self) -> None:
        """No more queries follow, even if some are left."""
        self._over = True

    @property
    def queries_left(self) -> int:
        """Queries that may follow."""
        return 0 if self._over else max(0, self.total - self.spent)

    @property
    def seconds_per_query(self) -> float | None:
        """Mean seconds of a query of this process, with what happens between two; None before there are `LEAST`."""
        return (self._latest - self._began) / self._own if self._own >= LEAST else None

    @property
    def seconds_left(self) -> float | None:
        """About how long the queries that are left take; None if there are none, or nothing is known yet."""
        return seconds_left([self], 1)

    @property
    def _own(self) -> int:
        return max(0, self.spent - self._on_file)


def seconds_left(paces: Sequence[Pace], at_once: int) -> float | None:
    """Return about how long the queries of several runs take that are left; None if none are, or nothing is known yet.

    A run that has not begun is taken to be as fast as the others are on average.

    Args:
        paces: The runs.
        at_once: How many of them run at the same time.
    """
    known = [seconds for pace in paces if (seconds := pace.seconds_per_query) is not None]
    if not known or not any(pace.queries_left for pace in paces):
        return None
    mean = sum(known) / len(known)
    each = [pace.queries_left * (mean if (own := pace.seconds_per_query) is None else own) for pace in paces]
    return max([sum(each) / at_once, *each])
