"""Progress: what people who watch are shown, and messages from other processes."""

import io
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from metricopt_ext.runtime.progress import INTERVAL, Bars, Callback, QueueCallback, Several, Within, relay


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


def test_a_plain_callback_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    tell_everything(Callback())
    assert capsys.readouterr() == ("", "")


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


def test_several_callbacks_are_all_told_everything() -> None:
    first, second = Recorder(), Recorder()
    assert first.told == second.told == []
    expected = tell_everything(Several(first, second))
    assert first.told == second.told == expected


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
    first, second = (bars.watch(f"seed {seed}", 600, "accuracy") for seed in (0, 1))
    first.stage("round 1/6, loss only")
    first.query(45, 0.7100)
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
    callback = bars.watch("seed 0", 600, "accuracy")
    callback.query(597, 0.5500)
    callback.outcome(0.6000, 0.7100)
    callback.done()
    callback.stage("other methods")
    shown = on_screen(bars)
    assert "597/600 queries accuracy 0.6000 -> 0.7100" in shown
    assert "0.5500" not in shown
    assert not bars._progress.tasks[0].stop_time  # the clock runs on while something follows


@pytest.mark.parametrize("columns", [80, 120])
def test_bars_cut_no_number_off(columns: int) -> None:
    bars = Bars(terminal(columns))
    for seed in (300, 301):
        callback = bars.watch(f"seed {seed}", 1000, "mean Recall@1,2,4")
        callback.stage("round 10/12, loss only")
        callback.query(987, 0.7624)
        callback.outcome(0.7624, 0.8441)
    shown = on_screen(bars, columns)
    assert "…" not in shown
    assert all(len(line) <= columns for line in shown.splitlines())
    assert shown.count("987/1000 queries") == shown.count("0:00:00") == 2
    assert shown.count("0.7624") == shown.count("0.8441") == 2


def test_bars_stay_on_the_screen_and_lines_stand_above_them() -> None:
    console = terminal(120)
    with Bars(console) as bars:
        callback = bars.watch("seed 3", 9, "recall")
        callback.stage("guard")
        callback.query(7, 0.5)
        callback.say("value function: " + 200 * "x")  # no line is cut
        callback.done()
        bars.watch("", total=9).say("without a name")
    shown = console.file.getvalue()
    assert "seed 3  value function: " + 200 * "x" + "\n" in shown
    assert "without a name\n" in shown
    assert shown.index("value function") < shown.rindex("7/9 queries recall 0.5000")


@pytest.mark.parametrize("console", [terminal(120), Console(file=io.StringIO(), width=120)], ids=["bars", "lines"])
def test_brackets_and_colons_of_names_are_shown_as_they_are(console: Any) -> None:
    with Bars(console) as bars:
        callback = bars.watch("run [/red][a]", 9, "[/red]f[1] :key:")
        callback.query(7, 0.5)
        callback.say("value function of :key: [/c]")
        callback.outcome(0.5, 0.6)
        callback.done()
        callback.stage("guard [/b]")
    shown = console.file.getvalue()
    assert "run [/red][a]  value function of :key: [/c]\n" in shown
    assert "guard [/b]" in shown
    assert "[/red]f[1] :key: 0.5000 -> 0.6000" in shown


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


def test_without_a_terminal_each_stage_is_a_line_and_the_last_has_the_outcome() -> None:
    def tell(callback: Callback, wait: Callable[[float], None]) -> None:
        callback.stage("train the model")
        callback.stage("round 1/6, loss only")
        callback.query(1, 0.7100)
        callback.stage("guard")
        callback.outcome(0.6000, 0.7100)
        callback.done()
        callback.stage("other methods")
        callback.done()

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
    def tell(callback: Callback, wait: Callable[[float], None]) -> None:
        for spent in range(1, 200):
            wait(seconds)
            callback.query(spent, spent / 1000)

    assert [line.partition("; about")[0] for line in lines_of(tell, total)] == [
        f"seed 0  waiting; {spent} of {total} queries spent, {total - spent} left; accuracy {spent / 1000:.4f}"
        for spent in told
    ]


# --- The time that is left ---------------------------------------------------------------------------------------


def test_lines_and_bars_say_how_long_a_runs_queries_take() -> None:
    def tell(callback: Callback, wait: Callable[[float], None]) -> None:
        callback.stage("train the model")
        wait(1000)  # which is not the queries'
        callback.stage("search")
        callback.on_file(20)
        for spent in range(1, 21):  # read from files in no time, which is not the queries' either
            callback.query(spent, 0.5)
        for spent in range(21, 24):
            wait(30)
            callback.query(spent, 0.5)
        callback.outcome(0.5, 0.6)
        callback.done()

    lines = lines_of(tell, 31)
    assert lines[-4:] == [
        "seed 0  search; 21 of 31 queries spent, 10 left; accuracy 0.5000",
        "seed 0  search; 22 of 31 queries spent, 9 left; accuracy 0.5000",
        "seed 0  search; 23 of 31 queries spent, 8 left; accuracy 0.5000; about 4 min left",  # 8 of 30 seconds
        "seed 0  done; 23 of 31 queries spent, 8 left; accuracy 0.5000 -> 0.6000",
    ]
    assert not any("about" in line for line in lines[:-2])

    now = [0.0]
    bars = Bars(terminal(120), clock=lambda: now[0])
    tell(bars.watch("seed 0", 31, "accuracy"), lambda seconds: now.__setitem__(0, now[0] + seconds))
    assert "accuracy 0.5000 -> 0.6000" in on_screen(bars)
    callback = bars.watch("seed 1", 31, "accuracy")
    for spent in (1, 2, 3):
        now[0] += 10
        assert "left" not in on_screen(bars)
        callback.query(spent, 0.5)
    assert "3/31 queries accuracy 0.5000; about 5 min left" in on_screen(bars)  # 28 of 10 seconds


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


def test_several_runs_have_a_row_of_their_own_below_which_stand_theirs() -> None:
    now = [0.0]
    bars = Bars(terminal(120), clock=lambda: now[0])
    bars.expect("all seeds", 2, 10, 1)
    first = bars.watch("seed 0", 10, "accuracy")
    for spent in (1, 2, 3):
        now[0] += 60
        first.query(spent, 0.5)
    whole, one = on_screen(bars).splitlines()
    assert whole.startswith("all seeds")
    assert "3/20 queries about 17 min of queries left" in " ".join(whole.split())
    assert "3/10 queries accuracy 0.5000; about 7 min left" in one
    first.done()
    bars.watch("seed 1", 10)
    assert "about 10 min of queries left" in on_screen(bars).splitlines()[0]  # what seed 0 left unspent is not to come


@pytest.mark.parametrize("console", [terminal(120), Console(file=io.StringIO(), width=120)], ids=["bars", "lines"])
def test_a_log_has_the_lines_and_warnings_whatever_is_drawn(console: Any) -> None:
    log: list[str] = []
    with Bars(console, log=log.append) as bars:
        tell_everything(bars.watch("seed 0", 3, "accuracy"))
    assert log == [
        "seed 0  guard",
        "seed 0  guard; 3 of 3 queries spent, 0 left; accuracy 0.7100",
        "seed 0  value function: 50 %",
        "seed 0  warning: UserWarning: odd",
        "seed 0  done; 3 of 3 queries spent, 0 left; accuracy 0.6000 -> 0.7100",
    ]
    assert "UserWarning" not in console.file.getvalue()  # Python has shown it


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
