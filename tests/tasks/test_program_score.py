"""Scores of programs: which number counts, what is a failure, and what repeats and halves give."""

import json
import math
import statistics
import sys
from pathlib import Path

import pytest

from helpers.refusals import assert_refused
from metricopt_ext.errors import ConfigError
from metricopt_ext.tasks.program_score import Failed, Printed, ProgramScore, Score, Written
from metricopt_ext.utils.program import Ended, Programs


def ended(output: str = "", errors: str = "") -> Ended:
    return Ended(0, 1.0, output, errors)


def scored(code: str, score: Printed | Written, tmp_path: Path, **settings: object) -> Score | Failed:
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
        ("", "", "the program printed nothing that matches --parse"),
        ("AP = 0.5\nAP = nan", "", "the program printed 'nan', which is no finite number"),
        ("AP = inf", "", "no finite number"),
        ("AP = n.a.", "", "the program printed 'n.a.', which is no number"),
    ],
)
def test_the_number_that_is_printed(output: str, errors: str, found: float | str) -> None:
    read = AP.read(ended(output, errors))
    assert read == found if isinstance(found, float) else found in getattr(read, "reason", "")


@pytest.mark.parametrize("text", ["50%", "0,5"])
def test_a_percent_sign_or_a_decimal_comma_is_named(text: str) -> None:
    found = Printed(r"AP = (\S+)", "--parse").read(ended(f"AP = {text}"))
    assert isinstance(found, Failed)
    assert found.reason.endswith("no number; it must have a decimal point, and no % in the group of --parse")


def test_a_group_that_did_not_match_and_lines() -> None:
    assert isinstance(Printed("(x)?AP", "--parse").read(ended("AP")), Failed)
    assert Printed(r"^(\d+)$", "--parse").read(ended("a 1\n2\nb")) == 2  # a line's begin and end


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


@pytest.mark.parametrize("pattern", ["AP (", r"AP \d+"])
def test_patterns_that_read_no_number_are_refused(pattern: str) -> None:
    assert_refused(lambda: Printed(pattern, "--halves"), ConfigError, "--halves")


@pytest.mark.parametrize("place", ["metrics.json", ":key", "metrics.json:"])
def test_places_that_are_none_are_refused(place: str) -> None:
    assert_refused(lambda: Written(place, "--parse-json"), ConfigError, "FILE:KEY")


WRITE = "import json, sys; json.dump({}, open(f'{{sys.argv[2]}}.json', 'w'))"


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("{'bbox': {'AP50': 31.5}}", 31.5),
        ("{'bbox.AP50': 2}", 2.0),
        ("{'bbox': {'AP50': float('nan')}}", "no finite number"),
        ("{'bbox': {'AP50': True}}", "no finite number"),
        ("{'bbox': {'AP50': [1]}}", "which is no number"),
        ("{'bbox': {'AP50': 10**400}}", "which is no number"),
        ("{'bbox': {}}", "has no 'bbox.AP50'"),
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
    assert place.shared
    assert not Written("{trial}.json:a", "--parse-json").shared
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
        found = one.at({"t": t, "mode": "x:y"})(Programs(), None, "7", tmp_path / "7.log")
        assert isinstance(found, Score), found
        assert found.value == float(t)
    assert (tmp_path / "x:y-7.json").exists()
    assert one.words[-3:] == ["t={t}", "{mode}", "{trial}"]


def test_without_a_checkpoint_its_name_in_braces_stays(tmp_path: Path) -> None:
    one = ProgramScore(["echo", "AP = 1", "{checkpoint}", "{trial}"], AP)
    assert isinstance(one(Programs(), None, "7", tmp_path / "7.log"), Score)
    assert (tmp_path / "7.log").read_text() == "AP = 1 {checkpoint} 7\n"


def test_halves_are_read_from_the_same_output(tmp_path: Path) -> None:
    halves = (Printed(r"a (\S+)", "--halves"), Printed(r"b (\S+)", "--halves"))
    found = scored("print('a 1 b 2'); print('AP = 1.5')", AP, tmp_path, halves=halves)
    assert isinstance(found, Score)
    assert found.halves == (1.0, 2.0)
    without = scored("print('a 1'); print('AP = 1.5')", AP, tmp_path, halves=halves)
    assert "matches --halves" in getattr(without, "reason", "")


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


def check_whole(pattern: str, output: str, found: str | float) -> None:
    """Check that a pattern reads a number, or that it is refused as a part of the one given as text."""
    read = Printed(pattern, "--parse").read(ended(output))
    if isinstance(found, float):
        assert read == found
    else:
        assert isinstance(read, Failed)
        assert f"printed {found}, of which" in read.reason
        assert r"(\S+)" in read.reason


@pytest.mark.parametrize(
    ("pattern", "output", "found"),
    [
        (r"loss: ([0-9.]+)", "loss: 7.311e-05", "'7.311e-05'"),
        (r"loss: ([0-9.]+)", "loss: 0,7311 nats", "'0,7311'"),
        (r"loss: ([0-9.]+)", "loss: 1,234.5", "'1,234.5'"),
        (r"loss: (\d+)", "loss: 0.73", "'0.73'"),
        (r"loss: (\d)", "loss: 73", "'73'"),
        (r"copypaste: [0-9.]+,([0-9.]+)", "copypaste: 45.1,52.25,48.0", 52.25),  # a list
        (r"epoch (\d+),", "epoch 3,85", 3.0),  # a comma that the pattern names
        (r"AP ([0-9]\.[0-9]+)", "AP 0.5.", 0.5),
        (r"AP ([0-9.]+)", "AP 85.3% eager", 85.3),
        (r"loss: ([0-9.]+).* time", "loss: 7.3e-05 time: 3 s", "'7.3e-05'"),  # whatever the pattern matches there
        (r"loss: ([0-9.]+).* time", "loss: 0,7311 time: 3 s", "'0,7311'"),
        (r"AP (\d\.\d)\d*", "AP 0.512", "'0.512'"),
        (r"AP ([0-9.]+).*", "AP 0.5 1e5", 0.5),
        (r"copypaste: ([0-9]+),([0-9]+)", "copypaste: 45,52", 45.0),
    ],
)
def test_a_number_that_goes_on_behind_the_group_is_not_cut(pattern: str, output: str, found: str | float) -> None:
    check_whole(pattern, output, found)


@pytest.mark.parametrize(
    ("pattern", "output", "found"),
    [
        (r"R2\D+([0-9.]+)", "R2: -0.95", "'-0.95'"),
        (r"R2\D+([0-9.]+)", "R2:-0.95", "'-0.95'"),
        (r"R2=-([0-9.]+)", "R2=-0.95", "'-0.95'"),  # a sign counts even where the pattern names it
        (r"R2\D+([0-9.]+)", "R2: \u22120.95", "'\u22120.95'"),
        (r"R2\D+([0-9.]+)", "R2: -.95", "'-.95'"),
        (r"accuracy.*([0-9.]+)", "accuracy: 0.8731", "'0.8731'"),
        (r"([0-9.]+)", "loss 1,234.5", "'1,234.5'"),
        (r"([0-9.]+)", "loss 0,7311", "'0,7311'"),
        (r"\.(\d+)", "loss 0.7311", "'0.7311'"),
        (r"\.(\d+)", "loss .7311", "'.7311'"),
        (r"e([-\d]+)", "7.3e-05", "'7.3e-05'"),
        (r"\D(\d+)$", "7e+05", "'7e+05'"),
        (r"([0-9.]+)", "0.5,0.6", 0.6),  # a list
        (r"\d,(\d+)", "45,52", 52.0),  # a comma that the pattern names
        (r"val-([0-9.]+)", "val-0.93", 0.93),  # a hyphen
        (r"epoch(\d+)", "epoch5", 5.0),
        (r"accuracy\.+([0-9.]+)", "accuracy....0.93", 0.93),
        (r"accuracy -+([0-9.]+)", "accuracy ---0.93", 0.93),
        (r"AP50:([0-9.]+)", "AP50:0.93", 0.93),
        (r"([-0-9.]+)$", "0.5 -0.95", -0.95),
        (r"R2 \+?([0-9.]+)", "R2 +0.95", 0.95),
    ],
)
def test_a_number_that_begins_before_the_group_is_not_cut(pattern: str, output: str, found: str | float) -> None:
    check_whole(pattern, output, found)
