"""A run on a program's settings: what is asked once, what failures come to, what the guard and other data decide."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.refusals import assert_named, assert_refused
from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import ConfigError, FileFormatError
from metricopt_ext.experiment import settings_run
from metricopt_ext.experiment.program_switches import told_of_settings
from metricopt_ext.experiment.program_trials import TrialError
from metricopt_ext.experiment.settings_run import SettingsRun
from metricopt_ext.search.stages import Point
from metricopt_ext.search.strategy import Batches
from metricopt_ext.search.visited import ranked
from metricopt_ext.tasks.combine import Combination
from metricopt_ext.tasks.constraints import Limits
from metricopt_ext.tasks.cost_scale import CostScale
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.program_score import Printed, PrintedByName, ProgramScore
from metricopt_ext.tasks.program_settings import ProgramSettings

# Scores a, whose sign is its word's, notes that it ran, and fails where it is told to.
CODE = """
import math, os, sys, time
a, mode, trial = float(sys.argv[1]), sys.argv[2], sys.argv[3]
with open("ran", "a") as file:
    file.write(f"{trial} {a:g} {mode}\\n")
time.sleep(0.05 * (trial == "1"))
if a == 0.75 and not os.path.exists("mended"):
    sys.exit(3)
value = a if mode == "up" else -a
chance = 0.001 * math.sin(1e4 * a)
print(f"score {value} even {value + chance} odd {value - chance}")
"""


class Scripted:
    """Asks for what it is told to, and ends at what costs least; remembers what it was told."""

    scripted: Sequence[Sequence[dict[str, Any]]] = ()

    def __init__(
        self, settings: ProgramSettings, at: Start, first: Evaluation, queries: int, limits: Limits | None
    ) -> None:
        self.queries, self.told, self.limits = queries, [(settings.defaults, first)], limits
        type(self).last = self  # type: ignore[attr-defined]

    def batches(self) -> Batches:
        for batch in self.scripted:
            answers = yield [Start(torch.zeros(0), settings=values) for values in batch]
            self.told += [(each.at.settings, each.evaluation) for each in answers]

    @property
    def best(self) -> Point:
        values, evaluation = min(self.told, key=lambda each: ranked(each[1], self.limits))
        return Point("", Start(torch.zeros(0), settings=values), evaluation)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(settings_run, "SettingsStage", Scripted)
    monkeypatch.setattr(Scripted, "scripted", [[{"a": 0.6}, {"a": 0.75}, {"a": 0.9}], [{"a": 0.9, "mode": "down"}]])
    (tmp_path / "mended").touch()
    return tmp_path


HALVES = (Printed(r"even (\S+)", "--halves"), Printed(r"odd (\S+)", "--halves"))


def made(holdout: str = "", *, code: str = CODE, subject_to: dict[str, str] | None = None, **more: Any) -> SettingsRun:
    settings = ProgramSettings(["a=0.0:1.0", "mode=up,down"], ["a=0.5"])
    words = [sys.executable, "-S", "-c", code, "{a}", "{mode}", "{trial}"]
    score = ProgramScore(words, Printed(r"score (\S+)", "--parse"), **more)
    other = holdout and ProgramScore([*words[:3], holdout, *words[4:]], Printed(r"score (\S+)", "--parse"))
    return SettingsRun(settings, score, Path("out"), holdout=other or None, subject_to=subject_to)


def ran() -> list[str]:
    return sorted(Path("ran").read_text().splitlines())


ROOM = {"room": Printed(r"room (\S+)", "--also room")}
WITH_ROOM = CODE.replace('print(f"score', 'print(f"room {1 - a:.3f} score')


def test_the_best_that_satisfies_a_constraint_is_kept() -> None:
    """Without it 0.9 is; the room is one less a, of which a half is there by default."""
    one = made(code=WITH_ROOM, halves=HALVES, also=ROOM, subject_to={"room": ">= start - 0.15"})
    tuned = one.tune(8)
    assert tuned.values == tuned.best_values == {"a": 0.6, "mode": "up"}
    assert tuned.also == {"room": (0.5, 0.4)}
    assert tuned.constrained is not None
    assert (tuned.constrained.holding, tuned.constrained.evaluated) == (2, 5)
    assert made(code=WITH_ROOM, halves=HALVES, also=ROOM, subject_to={"room": ">= start - 0.15"}).tune(8) == tuned
    assert len(ran()) == 5


BY_CLASS = CODE.replace('print(f"score', 'print(f"zebra={a:.3f} {a:.3f} {0.9 * a:.3f}\\nape={1 - a:.3f} 1 1\\nscore')


def test_a_score_is_made_of_outcomes_and_resumes_with_them() -> None:
    def one(combine: Any) -> SettingsRun:
        of = Combination(combine, -1)
        scale = CostScale(maximize=True, bounds=None, name="score", combination=of)
        run = made(code=BY_CLASS, scale=scale)
        by_name = PrintedByName(r"^(zebra|ape)=(\S+) (\S+) (\S+)$", "--parse")
        return SettingsRun(run.settings, replace(run.score, score=by_name), Path("out"))

    tuned = one("worst").tune(8)
    assert (tuned.before.value, tuned.before.halves) == (0.5, (0.5, 0.45))
    assert tuned.made_of == {"zebra": (0.5, 0.5), "ape": (0.5, 0.5)}  # one gains what the other loses
    assert [*tuned.made_of] == ["zebra", "ape"]
    assert "lowest of 2" in tuned.lines(made().settings)[0]
    assert told_of_settings(made().settings, tuned)["outcomes"]["ape"] == {"before": 0.5, "after": 0.5}
    times = len(ran())
    assert one("worst").tune(8) == tuned
    assert len(ran()) == times
    assert_refused(lambda: one("mean").tune(8), FileFormatError, "make")


def test_the_search_is_told_costs_in_the_batchs_order() -> None:
    made().tune(8, jobs=3)
    told = [(values.get("a"), e.cost) for values, e in Scripted.last.told]  # type: ignore[attr-defined]
    assert told == [(0.5, -0.5), (0.6, -0.6), (0.75, -0.75), (0.9, -0.9), (0.9, 0.9)]
    one = made()
    lower = SettingsRun(one.settings, one.score, Path("down"), maximize=False).tune(8)
    assert (lower.after.value, lower.values["mode"]) == (-0.9, "down")


def test_the_worst_stands_in_for_failures_whatever_their_order(folder: Path) -> None:
    (folder / "mended").unlink()
    with pytest.raises(TrialError) as caught:
        made().tune(8)
    assert_named(caught, "2", "3", "0", "--failures")
    assert caught.value.log == Path("out/trials/2.log")
    tuned = made().tune(8, failures=1)  # goes on where it ended
    assert ran().count("1 0.6 up") == 1
    assert ran().count("2 0.75 up") == 2
    assert tuned.failed == 1
    told = Scripted.last.told  # type: ignore[attr-defined]
    assert told[2][1] == told[0][1]._replace(failed=True)  # the worst by the end of its batch
    assert tuned.after.value == 0.9
    assert made().tune(8).failed == 1  # what failed stays so
    assert len(ran()) == 6


def test_what_is_asked_twice_is_scored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    again = [[{"a": 0.6}, {"a": 0.6 + 1e-13}, {"a": 0.9}], [{"a": 0.5}, {"a": 0.9, "mode": "up"}]]
    monkeypatch.setattr(Scripted, "scripted", again)
    tuned = made().tune(8, jobs=3)
    assert [line.split()[1] for line in ran()] == ["0.5", "0.6", "0.9"]
    assert tuned.queries == {"score": 3}
    costs = [evaluation.cost for _, evaluation in Scripted.last.told]  # type: ignore[attr-defined]
    assert costs == [-0.5, -0.6, -0.6, -0.9, -0.5, -0.9]


def test_repeats_are_counted(folder: Path) -> None:
    noisy = CODE.replace("value = a", "value = a + 0.001 * len(open('ran').read().splitlines()) if mode else a")
    one = made(code=noisy, repeats=2)
    assert_refused(lambda: one.tune(3), ConfigError, "--queries", "3", "2", "4")
    assert not Path("ran").exists()
    tuned = one.tune(11)
    assert Scripted.last.queries == 4  # type: ignore[attr-defined]
    assert tuned.queries == {"score": 10}
    assert tuned.before.noise == pytest.approx(0.0005)
    assert tuned.guard == "repeats"


@pytest.mark.parametrize(
    ("key", "value", "names"),
    [("value", float("nan"), ()), ("settings", {"b": "0.5"}, ("b",)), ("more", 1, ())],
)
def test_a_damaged_file_is_refused(key: str, value: Any, names: tuple[str, ...]) -> None:
    made().tune(8)
    path = Path("out/settings.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    lines[2] = json.dumps({**json.loads(lines[2]), key: value}) + "\n"
    path.write_text("".join(lines))
    assert_refused(lambda: made().tune(8), FileFormatError, "settings.jsonl", *names)
