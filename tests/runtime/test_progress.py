"""Progress: what people who watch are shown, and messages from other processes."""

import io
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from metricopt_ext.runtime.progress import INTERVAL, Bars, Callback, QueueCallback, Several, Within, relay, told


class Recorder(Callback):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def stage(self, description: str) -> None:
        self.told.append(("stage", description))

    def query(self, spent: int, value: float) -> None:
        self.told.append(("query", spent, value))

    def on_file(self, queries: int) -> None:
        self.told.append(("on_file", queries))

    def quality(self, queries: int, spearman: float) -> None:
        self.told.append(("quality", queries, spearman))

    def say(self, line: str) -> None:
        self.told.append(("say", line))

    def warning(self, line: str) -> None:
        self.told.append(("warning", line))

    def outcome(self, before: float, after: float) -> None:
        self.told.append(("outcome", before, after))

    def done(self) -> None:
        self.told.append(("done",))


def tell_everything(callback: Callback) -> list[tuple[object, ...]]:
    callback.stage("guard")
    callback.on_file(2)
    callback.query(3, 0.71)
    callback.quality(3, 0.5)
    callback.say("value function: 50 %")
    callback.warning("UserWarning: odd")
    callback.outcome(0.6, 0.71)
    callback.done()
    return [
        ("stage", "guard"),
        ("on_file", 2),
        ("query", 3, 0.71),
        ("quality", 3, 0.5),
        ("say", "value function: 50 %"),
        ("warning", "UserWarning: odd"),
        ("outcome", 0.6, 0.71),
        ("done",),
    ]


def test_everything_goes_through_a_queue_to_the_callback_of_its_name() -> None:
    messages: queue.Queue[object] = queue.Queue()
    callbacks: dict[str, Callback] = {"seed 0": Recorder(), "seed 1": Recorder()}
    expected = tell_everything(QueueCallback(messages, "seed 1"))
    QueueCallback(messages, "seed 0").stage("train the model")
    messages.put(None)
    QueueCallback(messages, "seed 0").stage("never heard of")
    relaying = threading.Thread(target=relay, args=(messages, callbacks), daemon=True)
    relaying.start()
    relaying.join(10)
    assert not relaying.is_alive()
    assert callbacks["seed 1"].told == expected  # type: ignore[attr-defined]
    assert callbacks["seed 0"].told == [("stage", "train the model")]  # type: ignore[attr-defined]


def terminal(columns: int) -> Any:
    """A console that takes itself for a terminal."""
    return Console(file=io.StringIO(), width=columns, force_terminal=True, force_interactive=True, color_system=None)


@pytest.mark.parametrize("console", [terminal(200), Console(file=io.StringIO(), width=200)], ids=["bars", "lines"])
def test_what_a_terminal_would_obey_is_written_out(console: Any) -> None:
    hostile, written_out = "\x1b]0;owned\r\x07\u202e.", r"\x1b]0;owned\r\x07\u202e."
    with Bars(console) as bars:
        callback = bars.watch(f"run {hostile}", 9, f"f1 {hostile}")
        callback.stage(f"stage {hostile}")
        callback.query(7, 0.5)
        callback.say(f"value function of {hostile}")
        callback.outcome(0.5, 0.6)
        callback.stage(f"guard {hostile}")
    shown = console.file.getvalue()
    assert "\x1b]0;" not in shown
    assert "\u202e" not in shown
    assert f"run {written_out}  value function of {written_out}\n" in shown
    assert f"guard {written_out}" in shown
    assert f"f1 {written_out} 0.5000 -> 0.6000" in shown


# --- Without a terminal ------------------------------------------------------------------------------------------


def lines_of(tell: Callable[[Callback, Callable[[float], None]], None], total: int) -> list[str]:
    """What is printed where there is no terminal; ``tell`` is given the callback and what lets seconds pass."""
    now = 0.0

    def wait(seconds: float) -> None:
        nonlocal now
        now += seconds

    with Bars(Console(file=(file := io.StringIO()), width=40), clock=lambda: now) as bars:
        tell(bars.watch("seed 0", total, "accuracy"), wait)
    return file.getvalue().splitlines()


def test_a_training_ends_where_any_of_several_would_have_it_end() -> None:
    class Ending(Callback):
        def goes_on(self, taken: int, left: int, seconds: float) -> bool:
            return seconds < 3

    several = Several(Callback(), Several(Ending(), Recorder()))
    assert several.goes_on(1, 9, 2.0)
    assert not several.goes_on(2, 8, 3.0)


# --- The time that is left ---------------------------------------------------------------------------------------


def test_several_runs_are_told_of_as_a_whole_every_half_minute() -> None:
    now, log = [0.0], list[str]()
    with Bars(Console(file=(file := io.StringIO()), width=40), clock=lambda: now[0], log=log.append) as bars:
        bars.expect("all seeds", 3, 10, 2)
        first, second = bars.watch("seed 0", 10), bars.watch("seed 1", 10)
        for spent in range(1, 6):
            now[0] += 11
            first.query(spent, 0.5)
            second.query(spent, 0.5)
        second.done()
    for lines in (file.getvalue().splitlines(), log):
        # At 33 s, when the first has made 3 queries and the second 2, and not again before 63 s: 7 + 8 + 10 queries of
        # 11 s are left, two at a time.
        assert [line for line in lines if line.startswith("all seeds")] == [
            "all seeds  5 of 30 queries spent; about 2 min of queries left"
        ]


def test_what_takes_long_says_how_far_it_is_and_how_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    now, run, seen = [0.0], Recorder(), []
    monkeypatch.setattr("metricopt_ext.runtime.pace.time.monotonic", lambda: now[0])
    for step in told(range(20, 40), run, "train", 20):
        seen.append(step)
        now[0] += 4
    assert seen == list(range(20, 40))
    assert run.told == [
        ("stage", "train"),
        ("stage", "train, 57%, about 68 s left"),  # after 3 of 20 steps of 4 s, 20 having been taken before
        *(("stage", f"train, {percent}%, about {left} s left") for percent, left in ((65, 56), (72, 44), (80, 32))),
        *(("stage", f"train, {percent}%, about {left} s left") for percent, left in ((87, 20), (95, 8))),
    ]
    run.told.clear()
    assert list(told([], run, "nothing")) == []
    assert run.told == [("stage", "nothing")]


def test_a_part_of_a_run_speaks_of_itself_seldom_and_never_of_the_run_s_queries() -> None:
    now, run = [0.0], Recorder()
    part = Within(run, "CMA-ES", 300, lambda: now[0])
    tell_everything(part)
    assert run.told == [("say", "value function: 50 %"), ("warning", "UserWarning: odd")]
    run.told.clear()
    for second in range(100):
        now[0] = float(second)
        part.query(second, 0.71)
    now[0] = 100.0
    part.stage("guard")  # ten seconds after the last query that was told
    now[0] = 3 * INTERVAL + 30.0
    part.stage("the end")
    assert run.told == [
        ("stage", "CMA-ES, 30 of 300 queries"),
        ("stage", "CMA-ES, 60 of 300 queries"),
        ("stage", "CMA-ES, 90 of 300 queries"),
        ("stage", "CMA-ES, the end"),
    ]
