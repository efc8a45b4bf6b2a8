"""Progress: what people who watch are shown, and messages from other processes."""

import io
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from metricopt_ext.utils.progress import Bars, QueueWatcher, Watcher, relay


class Recorder(Watcher):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def stage(self, description: str) -> None:
        self.told.append(("stage", description))

    def query(self, spent: int, seen: str) -> None:
        self.told.append(("query", spent, seen))

    def say(self, line: str) -> None:
        self.told.append(("say", line))

    def outcome(self, seen: str) -> None:
        self.told.append(("outcome", seen))

    def done(self) -> None:
        self.told.append(("done",))


def tell_everything(watcher: Watcher) -> list[tuple[object, ...]]:
    watcher.stage("guard")
    watcher.query(3, "accuracy 0.71")
    watcher.say("value function: 50 %")
    watcher.outcome("accuracy 0.60 -> 0.71")
    watcher.done()
    return [
        ("stage", "guard"),
        ("query", 3, "accuracy 0.71"),
        ("say", "value function: 50 %"),
        ("outcome", "accuracy 0.60 -> 0.71"),
        ("done",),
    ]


def test_a_plain_watcher_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    tell_everything(Watcher())
    assert capsys.readouterr() == ("", "")


def test_everything_goes_through_a_queue_to_the_watcher_of_its_name() -> None:
    messages: queue.Queue[object] = queue.Queue()
    watchers: dict[str, Watcher] = {"seed 0": Recorder(), "seed 1": Recorder()}
    expected = tell_everything(QueueWatcher(messages, "seed 1"))
    QueueWatcher(messages, "seed 0").stage("train the model")
    messages.put(None)
    QueueWatcher(messages, "seed 0").stage("never heard of")
    relaying = threading.Thread(target=relay, args=(messages, watchers), daemon=True)
    relaying.start()
    relaying.join(10)
    assert not relaying.is_alive()
    assert watchers["seed 1"].told == expected  # type: ignore[attr-defined]
    assert watchers["seed 0"].told == [("stage", "train the model")]  # type: ignore[attr-defined]


def terminal(columns: int) -> Any:
    """A console that takes itself for a terminal."""
    return Console(file=io.StringIO(), width=columns, force_terminal=True, force_interactive=True, color_system=None)


def on_screen(bars: Bars, columns: int = 120) -> str:
    """What is drawn of the bars now."""
    console = Console(file=(file := io.StringIO()), width=columns)
    console.print(bars._progress.get_renderable())
    return file.getvalue()


def test_each_run_has_a_bar_with_stage_queries_and_metric() -> None:
    bars = Bars(terminal(120))
    first, second = bars.watch("seed 0", total=600), bars.watch("seed 1", total=600)
    first.stage("round 1/6, loss only")
    first.query(45, "accuracy 0.7100")
    one, two = on_screen(bars).splitlines()
    assert one.split()[:6] == ["seed", "0", "round", "1/6,", "loss", "only"]
    assert "45/600 queries accuracy 0.7100" in one
    assert two.split()[:3] == ["seed", "1", "waiting"]
    assert "0/600" in two
    first.done()
    second.stage("guard")
    one, two = on_screen(bars).splitlines()
    assert one.split()[:3] == ["seed", "0", "done"]
    assert "45/600" in one  # what was left unspent stays unspent
    assert "guard" in two


def test_a_bar_ends_with_the_outcome_whatever_the_last_query_returned() -> None:
    bars = Bars(terminal(120))
    watcher = bars.watch("seed 0", total=600)
    watcher.query(597, "accuracy 0.5500")
    watcher.outcome("accuracy 0.6000 -> 0.7100")
    watcher.done()
    watcher.stage("other methods")
    shown = on_screen(bars)
    assert "597/600 queries accuracy 0.6000 -> 0.7100" in shown
    assert "0.5500" not in shown
    assert not bars._progress.tasks[0].stop_time  # the clock runs on while something follows


@pytest.mark.parametrize("columns", [80, 120])
def test_bars_cut_no_number_off(columns: int) -> None:
    bars = Bars(terminal(columns))
    for seed in (300, 301):
        watcher = bars.watch(f"seed {seed}", total=1000)
        watcher.stage("round 10/12, loss only")
        watcher.query(987, "mean Recall@1,2,4 0.7624")
        watcher.outcome("mean Recall@1,2,4 0.7624 -> 0.8441")
    shown = on_screen(bars, columns)
    assert "…" not in shown
    assert all(len(line) <= columns for line in shown.splitlines())
    assert shown.count("987/1000 queries") == shown.count("0:00:00") == 2
    assert shown.count("0.7624") == shown.count("0.8441") == 2


def test_bars_stay_on_the_screen_and_lines_stand_above_them() -> None:
    console = terminal(120)
    with Bars(console) as bars:
        watcher = bars.watch("seed 3", total=9)
        watcher.stage("guard")
        watcher.query(7, "recall 0.50")
        watcher.say("value function: " + 200 * "x")  # no line is cut
        watcher.done()
        bars.watch("", total=9).say("without a name")
    shown = console.file.getvalue()
    assert "seed 3  value function: " + 200 * "x" + "\n" in shown
    assert "without a name\n" in shown
    assert shown.index("value function") < shown.rindex("7/9 queries recall 0.50")


@pytest.mark.parametrize("console", [terminal(120), Console(file=io.StringIO(), width=120)], ids=["bars", "lines"])
def test_brackets_and_colons_of_names_are_shown_as_they_are(console: Any) -> None:
    with Bars(console) as bars:
        watcher = bars.watch("run [/red][a]", total=9)
        watcher.query(7, "recall[/k] 0.50")
        watcher.say("value function of :key: [/c]")
        watcher.outcome("[/red]f[1] :key: 0.50 -> 0.60")
        watcher.done()
        watcher.stage("guard [/b]")
    shown = console.file.getvalue()
    assert "run [/red][a]  value function of :key: [/c]\n" in shown
    assert "guard [/b]" in shown
    assert "[/red]f[1] :key: 0.50 -> 0.60" in shown


# --- Without a terminal ------------------------------------------------------------------------------------------


def lines_of(tell: Callable[[Watcher, Callable[[float], None]], None], total: int) -> list[str]:
    """What is printed where there is no terminal; ``tell`` is given the watcher and what lets seconds pass."""
    now = 0.0

    def wait(seconds: float) -> None:
        nonlocal now
        now += seconds

    with Bars(Console(file=(file := io.StringIO()), width=40), clock=lambda: now) as bars:
        tell(bars.watch("seed 0", total), wait)
    return file.getvalue().splitlines()


def test_without_a_terminal_each_stage_is_a_line_and_the_last_has_the_outcome() -> None:
    def tell(watcher: Watcher, wait: Callable[[float], None]) -> None:
        watcher.stage("train the model")
        watcher.stage("round 1/6, loss only")
        watcher.query(1, "accuracy 0.7100")
        watcher.stage("guard")
        watcher.outcome("accuracy 0.6000 -> 0.7100")
        watcher.done()
        watcher.stage("other methods")
        watcher.done()

    assert lines_of(tell, 600) == [
        "seed 0  train the model",
        "seed 0  round 1/6, loss only",
        "seed 0  guard; 1 of 600 queries spent, 599 left; accuracy 0.7100",
        "seed 0  done; 1 of 600 queries spent, 599 left; accuracy 0.6000 -> 0.7100",
        "seed 0  other methods",
        "seed 0  done; 1 of 600 queries spent, 599 left; accuracy 0.6000 -> 0.7100",
    ]


@pytest.mark.parametrize(
    ("total", "seconds", "told"),
    [
        (600, 0.0, [60, 120, 180]),  # a line for each tenth
        (600, 1.0, [30, 60, 90, 120, 150, 180]),  # or for each 30 seconds
        (600, 40.0, list(range(1, 200))),  # of a metric that takes longer, every query
        (5, 0.0, list(range(1, 200))),
    ],
)
def test_without_a_terminal_queries_are_told_now_and_then(total: int, seconds: float, told: list[int]) -> None:
    def tell(watcher: Watcher, wait: Callable[[float], None]) -> None:
        for spent in range(1, 200):
            wait(seconds)
            watcher.query(spent, f"accuracy 0.{spent:03d}")

    assert lines_of(tell, total) == [
        f"seed 0  waiting; {spent} of {total} queries spent, {total - spent} left; accuracy 0.{spent:03d}"
        for spent in told
    ]
