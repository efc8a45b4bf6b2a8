"""Programs as metrics: the number that counts, failures, repeats and halves, and their settings on a command line."""

import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.refusals import assert_refused
from metricopt_ext.errors import ConfigError, MetricError
from metricopt_ext.tasks.combine import Combination
from metricopt_ext.tasks.cost_scale import CostScale
from metricopt_ext.tasks.evaluation import Outcome
from metricopt_ext.tasks.program_score import (
    Failed,
    Printed,
    PrintedByName,
    ProgramScore,
    Score,
    Written,
    WrittenByName,
)
from metricopt_ext.tasks.program_settings import ProgramSettings, check_braces
from metricopt_ext.utils.program import Ended, Programs


def ended(output: str = "", errors: str = "") -> Ended:
    return Ended(0, 1.0, output, errors)


def scored(code: str, score: Any, tmp_path: Path, **settings: object) -> Score | Failed:
    """Score a checkpoint by Python code, whose arguments are the checkpoint and the trial."""
    words = [sys.executable, "-S", "-c", code, "{checkpoint}", "{trial}"]
    one = ProgramScore(words, score, **settings)  # type: ignore[arg-type]
    return one(Programs(), tmp_path / "7.pth", "7", tmp_path / "7.log")


AP = Printed(r"AP = ([-\w.]+)", "--parse")


@pytest.mark.parametrize(
    ("output", "errors", "found"),
    [
        ("AP = 0.1\nAP = 0.25\n", "AP = 0.9", 0.25),  # the last one, of the standard output first
        ("loss 3", "AP = -1e-3 done", -0.001),
        ("AP = 7", "", 7.0),
        ("AP = 0.5\nAP = nan", "", "no finite number"),
        ("AP = n.a.", "", "'n.a.', which is no finite number"),
    ],
)
def test_the_number_that_is_printed(output: str, errors: str, found: float | str) -> None:
    if isinstance(found, float):
        assert AP.read(ended(output, errors)) == found
    else:
        assert_refused(lambda: AP.read(ended(output, errors)), MetricError, found)


def test_other_numbers_of_the_same_output(tmp_path: Path) -> None:
    code = "import sys; print('AP = 0.5 lines', len(open(sys.argv[1]).read()))"
    (tmp_path / "7.pth").write_text("four")
    also = {"lines": Printed(r"lines (\d+)", "--also lines"), "ap": AP}
    found = scored(code, AP, tmp_path, also=also, repeats=2)
    assert isinstance(found, Score)
    assert found.also == {"lines": 4.0, "ap": 0.5}
    assert (found.halves, found.noise) == (None, 0.0)
    halves = (AP, Printed(r"lines (\d+)", "--halves"))
    both = scored("print('AP = 0.5 lines 3')", AP, tmp_path, also=also, halves=halves)
    assert isinstance(both, Score)
    assert (both.halves, both.also) == ((0.5, 3.0), {"lines": 3.0, "ap": 0.5})
    missing = scored("print('AP = 0.5')", AP, tmp_path, also=also)
    assert isinstance(missing, Failed)
    assert "matches --also lines" in missing.reason


BY_NAME = PrintedByName(r"^(\w+)=(\S+)", "--parse")


def scale(combine: Any = "worst") -> CostScale:
    made = Combination(combine, -1)
    return CostScale(maximize=True, bounds=None, name="score", combination=made)


def test_outcomes_by_name_make_the_score(tmp_path: Path) -> None:
    code = "print('epoch 3: x=9'); print('b=0.1\\na=0.75\\nb=0.5')"
    found = scored(code, BY_NAME, tmp_path, scale=scale())
    assert isinstance(found, Score)
    assert (found.value, found.halves, found.noise, found.also) == (0.5, None, None, None)
    assert list((found.outcomes or {}).items()) == [("b", Outcome(0.5)), ("a", Outcome(0.75))]
    halved = PrintedByName(r"(\w+)=(\S+) of (\S+),(\S+)", "--parse")
    code = "print('b=0.5 of 0.25,0.75 a=0.625 of 0.75,0.5')"
    found = scored(code, halved, tmp_path, scale=scale(), also={"ap": Printed(r"a=(\S+)", "--also")})
    assert isinstance(found, Score)
    assert (found.value, found.halves, found.also) == (0.5, (0.25, 0.5), {"ap": 0.625})
    assert found.besides["b"] == Outcome(0.5, ((0.25, 0.75),))


def test_repeats_are_averaged_before_outcomes_are_combined(tmp_path: Path) -> None:
    lines = "print('a=0.25\\nb=0.5' if first else 'a=0.75\\nb=0.25')"
    code = f"import os; first = not os.path.exists('{tmp_path}/x'); open('{tmp_path}/x', 'w'); {lines}"
    found = scored(code, BY_NAME, tmp_path, scale=scale(), repeats=2)
    assert isinstance(found, Score)
    assert (found.value, found.noise) == (0.375, 0.0)
    assert found.outcomes == {"a": Outcome(0.5, (), 0.25), "b": Outcome(0.375, (), 0.125)}


def test_outcomes_in_a_file(tmp_path: Path) -> None:
    code = f"import json; json.dump({{'by': {{'b': 0.5, 'a': 1}}, 'n': [1]}}, open('{tmp_path}/all.json', 'w'))"
    found = scored(code, WrittenByName(f"{tmp_path}/all.json:by", "--parse-json"), tmp_path, scale=scale("mean"))
    assert isinstance(found, Score)
    assert found.value == 0.75
    for key in ("n", "by.b"):
        other = scored(code, WrittenByName(f"{tmp_path}/all.json:{key}", "--parse-json"), tmp_path, scale=scale())
        assert isinstance(other, Failed)
        assert f"'{key}'" in other.reason
        assert "object" in other.reason


@pytest.mark.parametrize(
    ("printed", "names"),
    [
        ("b=0.5\\na=nan", ("'nan'",)),
        ("nothing", ("--parse",)),
        ("a=0.5", ("'b'",)),
        ("a=0.5\\nb=0.5", ("'b', 'a'",)),
        ("b=0.5\\na=0.5\\nscore=0.5", ("'score'",)),
        ("b=0.5\\na=0.5\\nece=0.5", ("'ece'", "--also")),
    ],
)
def test_outcomes_that_make_no_score_are_a_failure(printed: str, names: tuple[str, ...], tmp_path: Path) -> None:
    of, also = scale(), {"ece": Printed("ece=(.+)", "--also")}
    assert isinstance(scored("print('b=0.5\\na=0.5')", BY_NAME, tmp_path, scale=of), Score)
    found = scored(f"print('{printed}')", BY_NAME, tmp_path, scale=of, also=also if "ece" in printed else {})
    assert isinstance(found, Failed)
    assert all(name in found.reason for name in names), found.reason


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: PrintedByName(r"AP=(\S+)", "--parse"), ("--parse", "--combine")),
        (lambda: PrintedByName(r"(\w+)=(\S+) (\S+)", "--parse"), ("--parse", "3")),
        (lambda: Printed("AP (", "--halves"), ("--halves",)),
        (lambda: Printed(r"AP \d+", "--halves"), ("--halves",)),
        (lambda: Written("metrics.json", "--parse-json"), ("FILE:KEY",)),
    ],
)
def test_places_that_hold_no_number_are_refused(make: Callable[[], object], names: tuple[str, ...]) -> None:
    assert_refused(make, ConfigError, *names)


WRITE = "import json, sys; json.dump({}, open(f'{{sys.argv[2]}}.json', 'w'))"


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("{'bbox': {'AP50': 31.5}}", 31.5),
        ("{'bbox.AP50': 2}", 2.0),
        ("{'bbox': {'AP50': float('nan')}}", "no finite number"),
        ("{'bbox': {'AP50': True}}", "no finite number"),
        ("{'bbox': {}}", "has 'bbox.AP50', None"),
    ],
)
def test_the_number_that_is_written(
    content: str, found: float | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    read = scored(WRITE.format(content), Written("{trial}.json:bbox.AP50", "--parse-json"), tmp_path)
    assert read.value == found if isinstance(read, Score) else found in read.reason  # type: ignore[operator]


def test_what_an_earlier_run_wrote_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = Written("7.json:a", "--parse-json")
    assert scored("", place, tmp_path) == Failed("the program wrote no 7.json")
    (tmp_path / "7.json").write_text(json.dumps({"a": 1}))
    assert scored("", place, tmp_path) == Failed("the program wrote no 7.json, which is of an earlier run")
    assert isinstance(scored(WRITE.format("{'a': 1}"), place, tmp_path), Score)
    assert isinstance(scored(WRITE.format("{'a': 1}"), place, tmp_path), Score)  # the same again
    broken = scored("open('7.json', 'w').write('{')", place, tmp_path)
    assert "can't be read as JSON" in getattr(broken, "reason", "")


def test_the_program_gets_checkpoint_and_trial(tmp_path: Path) -> None:
    code = "import sys; print(sys.argv[1:]); print('AP = 1')"
    found = scored(code, AP, tmp_path)
    assert isinstance(found, Score)
    assert (found.value, found.halves, found.noise) == (1.0, None, None)
    assert 0 < found.seconds < 30
    assert (tmp_path / "7.log").read_text() == f"['{tmp_path}/7.pth', '7']\nAP = 1\n"


def test_settings_are_filled_into_the_words_and_the_files_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = (
        "import json, sys; json.dump({'a:b': float(sys.argv[1][2:])}, open(f'{sys.argv[2]}-{sys.argv[3]}.json', 'w'))"
    )
    place = Written("{mode}-{trial}.json:a:b", "--parse-json")
    one = ProgramScore([sys.executable, "-S", "-c", code, "t={t}", "{mode}", "{trial}"], place)
    for t in ("0.25", "3"):
        found = replace(one, settings={"t": t, "mode": "x:y"})(Programs(), None, "7", tmp_path / "7.log")
        assert isinstance(found, Score), found
        assert found.value == float(t)
    assert (tmp_path / "x:y-7.json").exists()
    assert one.words[-3:] == ["t={t}", "{mode}", "{trial}"]


# Prints another number at each call: 1, 2, 4, ...
COUNTING = """
import os
calls = len(open("calls").read()) if os.path.exists("calls") else 0
open("calls", "a").write("x")
print("AP =", 2 ** calls, "a", calls, "b", -calls)
"""


def test_repeats_give_a_mean_and_its_standard_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    halves = (Printed(r"a (\S+)", "--halves"), Printed(r"b (\S+)", "--halves"))
    found = scored(COUNTING, AP, tmp_path, halves=halves, repeats=3)
    assert isinstance(found, Score)
    assert found.value == pytest.approx(7 / 3)
    assert found.noise == pytest.approx(statistics.stdev([1, 2, 4]) / math.sqrt(3))
    assert found.halves == (1.0, -1.0)
    assert len((tmp_path / "7.log").read_text().splitlines()) == 3
    again = scored(COUNTING, AP, tmp_path)
    assert isinstance(again, Score)
    assert again.value == 8
    assert len((tmp_path / "7.log").read_text().splitlines()) == 1  # the log of an earlier trial of that name is gone


def test_a_failure_says_in_which_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = COUNTING + "import sys; sys.exit(3 * (calls == 1))"
    assert scored(code, AP, tmp_path, repeats=3) == Failed("the program's exit status is 3 (run 2 of 3)")
    assert scored("print('AP = 1'); 1 / 0", AP, tmp_path) == Failed("the program's exit status is 1")
    slow = scored("import time; time.sleep(60)", AP, tmp_path, timeout=0.3)
    assert "time limit" in getattr(slow, "reason", "")


@pytest.mark.parametrize(
    ("pattern", "output", "found"),
    [
        # It goes on behind the group.
        (r"loss: ([0-9.]+)", "loss: 7.311e-05", "'7.311e-05'"),
        (r"loss: ([0-9.]+)", "loss: 1,234.5", "'1,234.5'"),
        (r"loss: ([0-9.]+).* time", "loss: 7.3e-05 time: 3 s", "'7.3e-05'"),  # whatever the pattern matches there
        (r"copypaste: [0-9.]+,([0-9.]+)", "copypaste: 45.1,52.25,48.0", 52.25),  # a list
        (r"epoch (\d+),", "epoch 3,85", 3.0),  # a comma that the pattern names
        # It begins before the group.
        (r"R2\D+([0-9.]+)", "R2: -0.95", "'-0.95'"),
        (r"R2\D+([0-9.]+)", "R2: \u22120.95", "'\u22120.95'"),
        (r"accuracy.*([0-9.]+)", "accuracy: 0.8731", "'0.8731'"),
        (r"([0-9.]+)", "loss 0,7311", "'0,7311'"),
        (r"([0-9.]+)", "0.5,0.6", 0.6),  # a list
        (r"val-([0-9.]+)", "val-0.93", 0.93),  # a hyphen
    ],
)
def test_a_number_is_not_cut(pattern: str, output: str, found: str | float) -> None:
    """The number that is read is the whole of what was printed, or refused as a part of what is given as text."""
    read = Printed(pattern, "--parse")
    if isinstance(found, float):
        assert read.read(ended(output)) == found
    else:
        assert_refused(lambda: read.read(ended(output)), MetricError, found, "--parse")


def test_an_interval_and_values_as_they_are_written() -> None:
    settings = ProgramSettings(["nms=0.3:0.9", "size=320,480,640", "mode=plain,cuda:0"], ["nms=.5", "mode=cuda:0"])
    assert settings.names == ("nms", "size", "mode")
    assert settings.defaults == {"nms": 0.5, "size": 320, "mode": "cuda:0"}
    assert (settings["nms"].low, settings["nms"].high, settings["nms"].scale) == (0.3, 0.9, "linear")
    assert settings["size"].values == (320, 480, 640)
    assert settings["mode"].values == ("plain", "cuda:0")
    assert settings.assumed == ("size",)
    with settings.applied({"size": 640}) as values:
        assert values == {"nms": 0.5, "size": 640, "mode": "cuda:0"}


@pytest.mark.parametrize(
    ("spec", "default", "whole"),
    [
        ("t=0.001:0.1:log", 0.01, False),
        ("t=0.1:0.9:logit", 0.5, False),
        ("t=0.2:0.5:logit", 1 / 3, False),  # odds of 1/4 and 1: the middle has 1/2
        ("t=1:100:log", 10, True),
    ],
)
def test_without_a_default_it_is_the_middle_on_the_scale(spec: str, default: float, whole: bool) -> None:
    settings = ProgramSettings([spec])
    assert settings.defaults == {"t": float(f"{default:.10g}")}  # as the program is told it
    assert settings["t"].whole is whole
    assert settings.assumed == ("t",)


def test_the_text_is_what_was_written_or_a_number_of_ten_digits() -> None:
    settings = ProgramSettings(["v=1.0,1.10,2.00", "s=010:0500", "t=1e-3:0.50", "m=a,1"], ["t=0.10", "v=1.1"])
    assert settings.texts({}) == {"v": "1.10", "s": "255", "t": "0.10", "m": "a"}
    assert settings.texts({"v": 2.0, "s": 10, "t": 0.001, "m": "1"}) == {"v": "2.00", "s": "010", "t": "1e-3", "m": "1"}
    assert settings.texts({"t": 0.30000000000000004, "s": 500})["t"] == "0.3"
    assert settings.texts({"t": 1 / 3})["t"] == "0.3333333333"
    third = (1 / 3 - 0.001) / 0.499
    assert settings["t"].at(third) == 0.3333333333  # what the program is told
    assert [settings.texts({"t": settings["t"].at(t)})["t"] for t in (0, third, 1)] == ["1e-3", "0.3333333333", "0.50"]
    assert_refused(lambda: settings.texts({"s": 501}), ValueError, "501", "10", "500")


@pytest.mark.parametrize(
    ("specs", "defaults", "names"),
    [
        (["nms"], [], ("--setting", "LOW:HIGH:SCALE")),
        (["checkpoint=a,b"], [], ("{checkpoint}",)),
        (["nms=0.5"], [], ("--setting", "LOW", "HIGH")),
        (["nms=0.3:0.9:ln"], [], ("scale", "'ln'")),
        (["nms=0.0:0.9:log"], [], ("log", "0")),
        (["nms=1,2", "nms=3,4"], [], ()),
        (["nms=0.3:0.9"], ["nms=0.2"], ("0.2", "0.3", "0.9")),
        (["nms=0.3:0.9"], ["nsm=0.5"], ("--default", "nsm=0.5", "nms")),
        (["mode=a,b"], ["mode=c"], ("'c'", "'a'", "'b'")),
        (["nms=0.3:0.9"], ["nms=0.4", "nms=0.5"], ("--default", "nms=0.4", "nms=0.5")),
        (["nms=low:0.9"], [], ("'low'", "0.9")),
        (["nms=0.3:0.9"], ["nms=low"], ("'low'", "0.3", "0.9")),
        (["nms=0:1"], [], ("integers", "0.0", "0,1")),
        (["mode=a, b"], [], ("' b'",)),
        (["mode=0.1:0.5,0.7"], [], ("'0.1:0.5'",)),
    ],
)
def test_what_is_misread_is_refused(specs: list[str], defaults: list[str], names: tuple[str, ...]) -> None:
    assert_refused(lambda: ProgramSettings(specs, defaults), ConfigError, *names)


def test_names_in_braces_are_all_filled_and_all_there() -> None:
    names = ["nms", "size"]
    words = ["run", "--nms={nms}", "{size}x{size}", "{checkpoint}", "{trial}", "{ own }"]
    check_braces(words, "--score", names, ["checkpoint", "trial"])
    assert_refused(lambda: check_braces(words, "--score", names), ConfigError, "--score", "{checkpoint}")
    check_braces(["sh", "-c", "run ${HOME} '{\"a\": 1}' {nms} {size}"], "--score", names)
    assert_refused(
        lambda: check_braces(["run", "{nms}", "{size}", "{iou}"], "--score", names),
        ConfigError,
        "--score",
        "{iou}",
        "--setting",
        "blanks",
    )
    assert_refused(lambda: check_braces(["run", "{nms}"], "--holdout", names), ConfigError, "--holdout", "{size}")
    assert_refused(lambda: check_braces(["run", "{Trail}"], "--score", []), ConfigError, "{Trail}", "trial")
