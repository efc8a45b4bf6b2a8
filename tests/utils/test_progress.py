"""Progress: what people who watch are shown, and messages from other processes."""

import io
import queue
import threading

import pytest

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

    def done(self) -> None:
        self.told.append(("done",))


def tell_everything(watcher: Watcher) -> list[tuple[object, ...]]:
    watcher.stage("guard")
    watcher.query(3, "accuracy 0.71")
    watcher.say("value function: 50 %")
    watcher.done()
    return [("stage", "guard"), ("query", 3, "accuracy 0.71"), ("say", "value function: 50 %"), ("done",)]


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


def on_screen(bars: Bars) -> str:
    """What the bars' console draws of them now, on a terminal of 120 columns."""
    from rich.console import Console

    console = Console(file=(file := io.StringIO()), width=120)
    console.print(bars._progress.get_renderable())
    return file.getvalue()


def test_each_run_has_a_bar_with_stage_queries_and_metric() -> None:
    bars = Bars()
    first, second = bars.watch("seed 0", total=600), bars.watch("seed 1", total=600)
    first.stage("round 1/6, loss only")
    first.query(45, "accuracy 0.7100")
    one, two = on_screen(bars).splitlines()
    assert one.split()[:6] == ["seed", "0", "round", "1/6,", "loss", "only"]
    assert "45/600 queries  accuracy 0.7100" in one
    assert two.split()[:3] == ["seed", "1", "waiting"]
    assert "0/600" in two
    first.done()
    second.stage("guard")
    one, two = on_screen(bars).splitlines()
    assert one.split()[:3] == ["seed", "0", "done"]
    assert "45/600" in one  # what was left unspent stays unspent
    assert "guard" in two


def test_bars_stay_on_the_screen_and_lines_stand_above_them(capsys: pytest.CaptureFixture[str]) -> None:
    with Bars() as bars:
        watcher = bars.watch("seed 3", total=9)
        watcher.stage("guard")
        watcher.query(7, "recall 0.50")
        watcher.say("value function: " + 200 * "x")  # no line is cut
        watcher.done()
        bars.watch("", total=9).say("without a name")
    shown = capsys.readouterr().out
    assert "seed 3  value function: " + 200 * "x" + "\n" in shown
    assert "\nwithout a name\n" in shown
    assert shown.index("value function") < shown.index("7/9 queries  recall 0.50")


def test_brackets_and_colons_of_names_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    with Bars() as bars:
        watcher = bars.watch("run [a]", total=9)
        watcher.stage("guard [b]")
        watcher.query(7, "recall[k] 0.50")
        watcher.say("value function of :key: [/c]")
    shown = capsys.readouterr().out
    assert "run [a]  value function of :key: [/c]\n" in shown
    assert "run [a] guard [b]" in shown
    assert "recall[k] 0.50" in shown
