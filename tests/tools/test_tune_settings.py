"""tools/tune_settings.py: any command with settings in it, from its switches to the last line."""

import json
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.programs import end, started, until
from metricopt_ext.tools import tune_settings

tune = partial(end, tune_settings)

ROOT = Path(__file__).resolve().parents[2]

# Best at nms 0.62 and size 480, whatever the other is; its halves are what halves of much data would be.
SCORE = """
import math, os, sys, time
nms, size, trial = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
value = 0.5 - (nms - 0.62) ** 2 + 0.1 * (size == 480)
chance = 0.001 * math.sin(1e4 * nms + size)
print(f"AP {value:.9f} even {value + chance:.9f} odd {value - chance:.9f}")
"""
HALVES = ["--halves", r"even (\S+)", r"odd (\S+)"]
PARSE = ["--parse", r"AP (\S+)"]
DEFAULT = 0.5 - 0.12**2


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which tests run."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def program(code: str, name: str = "score.py") -> str:
    """Write a program; returns its command."""
    Path(name).write_text(code)
    return f"{shlex.quote(sys.executable)} -S {name} {{nms}} {{size}} {{trial}}"


def words(command: str, *more: str, queries: int = 10, out: str = "out") -> list[str]:
    """Return the arguments of a run; a later one of a kind counts."""
    settings = ["--setting", "nms=0.3:0.9", "--setting", "size=320,480,640", "--default", "nms=0.5"]
    return ["--score", command, *settings, "--queries", str(queries), "--output-dir", out, *more]


def report(out: str = "out") -> Any:
    return json.loads(Path(out, "report.json").read_text())


def test_a_gain_is_kept_and_the_last_line_has_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tune(*words(program(SCORE), *PARSE, *HALVES))
    content, printed = report(), capsys.readouterr().out
    assert content["task"] == "settings"
    assert content["metric"] == {"name": "score", "maximize": True}
    assert content["before"] == pytest.approx(DEFAULT)
    assert content["after"] >= DEFAULT + 0.1
    assert content["guard"]["by"] == "halves"
    assert content["failed"] == 0
    assert content["assumed"] == ["size"]
    assert content["settings"]["size"] == {"before": "320", "best": "480", "after": "480"}
    assert content["settings"]["nms"]["before"] == "0.5"
    asked = content["queries"]["score"]
    assert 4 <= asked <= 10
    assert sorted(path.suffix for path in (folder / "out/trials").iterdir()) == [".log"] * asked
    command = printed.splitlines()[-1]
    assert command == content["command"]
    own = subprocess.run(shlex.split(command), capture_output=True, text=True, check=True)  # it is there to be pasted
    assert float(own.stdout.split()[1]) == content["after"]
    chosen = yaml.safe_load(Path("out/inference.yaml").read_text())
    assert chosen["size"] == {"value": 480, "default": 320, "factor": None}
    assert str(chosen["nms"]["value"]) == content["settings"]["nms"]["after"]
    assert f"score with the defaults: {DEFAULT:.6g} (" in printed
    assert f"tuned: {DEFAULT:.4f} -> {content['after']:.4f}; to use it:" in printed
    rows = [line.split() for line in printed.splitlines()]
    assert ["size", "320", "or", "480", "or", "640", "320", "(assumed)", "480"] in rows
    log = (folder / "out/log.txt").read_text()
    assert f"{asked} of 10 queries spent" in log


def test_a_limit_on_another_number_decides_what_is_kept(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Speed falls with the size: 640 - size. That of 320 less 100 is not reached by 480, which scores best."""
    code = SCORE.replace('print(f"AP', 'print(f"speed {640 - size} AP')
    also = ["--also", r"speed=speed (\d+)"]
    tune(*words(program(code), *PARSE, *HALVES, *also))
    assert report()["also"] == {"speed": {"before": 320.0, "after": 160.0}}
    tune(*words(program(code), *PARSE, *HALVES, *also, "--subject-to", "speed: >= start - 100", out="slow"))
    content, printed = report("slow"), capsys.readouterr().out
    assert content["settings"]["size"]["after"] == "320"
    assert content["after"] > DEFAULT
    assert content["also"] == {"speed": {"before": 320.0, "after": 320.0}}
    assert content["subject to"] == {"speed": ">= 220.0"}
    assert "besides: speed 320.0000 -> 320.0000 (>= 220.0000)" in printed
    tune(*words(program(code), *PARSE, *HALVES, *also, "--subject-to", "speed: >= 1", "--resume", out="slow"), status=1)
    assert "subject_to" in capsys.readouterr().err


def test_the_result_does_not_depend_on_jobs(folder: Path) -> None:
    command = program(SCORE.replace("chance =", "time.sleep(0.05 * (size == 480)); chance ="))
    for jobs in ("1", "2", "3"):
        tune(*words(command, *PARSE, *HALVES, "--jobs", jobs, out=f"out{jobs}"))
    files = [Path(f"out{jobs}/inference.yaml").read_bytes() for jobs in "123"]
    assert files[0] == files[1] == files[2]
    assert report("out1")["queries"] == report("out3")["queries"]


def without_times(out: str) -> Any:
    """Return what a run left, without what the clock says."""
    content = report(out)
    for key in ("seconds", "seconds of a trial", "config"):
        del content[key]
    scores = json.loads(Path(out, "settings.json").read_text())
    for each in (*scores["evaluations"], *scores["held_out"]):
        del each["seconds"]
    by_settings = sorted(scores["evaluations"], key=lambda each: json.dumps(each["settings"]))
    return content, by_settings, scores["held_out"], Path(out, "inference.yaml").read_bytes()


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_end(folder: Path) -> None:
    command = program(SCORE.replace("chance =", "open('ran', 'a').write('.'); time.sleep(0.1); chance ="))
    arguments = [*words(command, *PARSE, *HALVES, "--holdout", f"{command} --aside"), "--jobs", "2"]
    process = started("tune-settings", *arguments)
    until((folder / "out/trials/4.log").exists, process)
    time.sleep(0.05)  # a program that is not yet started would still hold the folder's lock
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (folder / "out/inference.yaml").exists()
    kept = len(json.loads(Path("out/settings.json").read_text())["evaluations"])
    assert kept >= 3
    (folder / "ran").unlink()
    tune(*arguments, "--resume")
    asked = sum(report()["queries"].values())
    assert len(Path("ran").read_text()) == asked - kept  # none is paid for twice
    tune(*words(command, *PARSE, *HALVES, "--holdout", f"{command} --aside", out="whole"))
    assert without_times("out") == without_times("whole")


@pytest.mark.slow
def test_a_stopped_run_says_how_to_go_on(folder: Path) -> None:
    code = SCORE.replace("chance =", "time.sleep(100 * (trial > '0')); chance =")
    process = started("tune-settings", *words(program(code), *PARSE))
    until((folder / "out/trials/1.log").exists, process)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "stopped; what is finished is kept in out. To go on:" in said


def test_a_gain_by_chance_leaves_the_defaults(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tune(*words(program(SCORE.replace("chance = 0.001", "chance = 5")), *PARSE, *HALVES))
    assert report()["after"] == report()["before"]
    printed = capsys.readouterr().out.splitlines()
    assert printed[-2] == "nothing was kept: the defaults stay"
    assert printed[-1].endswith("score.py 0.5 320 tuned")
    chosen = yaml.safe_load(Path("out/inference.yaml").read_text())
    assert all(each["value"] == each["default"] for each in chosen.values())


def test_less_is_better_where_it_is(folder: Path) -> None:
    tune(*words(program(SCORE.replace("value = 0.5", "value = -0.5")), *PARSE, *HALVES, "--minimize"))
    assert report()["metric"]["maximize"] is False
    assert report()["after"] < report()["before"]


def test_a_command_of_several_lines_can_be_pasted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = "a = {a}\nprint('AP', 1 - (a - 3) ** 2)"
    command = f"{shlex.quote(sys.executable)} -S -c {shlex.quote(code)}"
    tune("--score", command, "--setting", "a=0,1,3", *PARSE, "--queries", "3", "--output-dir", "out")
    assert report()["settings"]["a"] == {"before": "0", "best": "3", "after": "3"}
    pasted = capsys.readouterr().out.partition("to use it:\n")[2]
    own = subprocess.run(["sh", "-c", pasted], capture_output=True, text=True, check=True)
    assert own.stdout == "AP 1\n"


def test_without_a_guard_it_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tune(*words(program(SCORE), *PARSE))
    assert report()["guard"]["by"] == "none"
    assert "unguarded: a gain can't be told from chance" in capsys.readouterr().out


def test_data_held_out_have_the_last_word(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = program(SCORE)
    tune(*words(command, *PARSE, "--holdout", program(SCORE, "same.py")))
    assert report()["guard"]["by"] == "held-out"
    assert report()["queries"]["held out"] == 2
    assert report()["guard"]["held out"]["settings"] == report()["after"]
    percent = program(SCORE.replace("AP {value", "AP {100 * value"), "percent.py")
    tune(*words(command, *PARSE, "--holdout", percent, out="percent"), status=1)
    assert "as if --holdout were in percent; their gains are compared" in capsys.readouterr().err
    other = program(SCORE.replace("+ 0.1 *", "- 0.3 *"), "other.py")  # where the gain is a loss
    tune(*words(command, *PARSE, "--holdout", other, out="other"))
    assert report("other")["after"] == report("other")["before"]
    assert f"held out, start: {DEFAULT:.4f}" in capsys.readouterr().out


def test_a_number_in_a_json_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = program(SCORE + "import json; json.dump({'AP': value}, open(f'{size}-{trial}.json', 'w'))")
    tune(*words(command, "--parse-json", "{size}-{trial}.json:AP", "--jobs", "2"))
    assert report()["after"] > report()["before"]
    assert Path("320-0.json").exists()
    tune(*words(command, "--parse-json", "{size}.json:AP", "--jobs", "2"), status=2)
    assert "put {trial} in its name" in capsys.readouterr().err


def test_failures_are_allowed_or_end_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = program(SCORE.replace("chance =", "sys.exit('no memory') if size == 640 else None; chance ="))
    tune(*words(command, *PARSE, *HALVES), status=1)
    said = capsys.readouterr().err
    assert "failed: the program's exit status is 1; 0 trials may fail (--failures 0)" in said
    assert "no memory" in said
    tune(*words(command, *PARSE, *HALVES, "--resume", "--failures", "5"))
    assert report()["failed"] >= 1
    assert report()["settings"]["size"]["after"] == "480"


def test_a_command_that_fails_ends_before_anything_is_tuned(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tune(*words(program("import sys; sys.exit('no such dataset')"), *PARSE, "--failures", "5"), status=1)
    said = capsys.readouterr().err
    assert "the defaults can't be scored: the program's exit status is 1" in said
    assert "no such dataset" in said
    tune(*words(program(SCORE), *PARSE))  # the folder is free for the right command


def test_a_dry_run_says_what_would_be_and_leaves_the_folder_free(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = program(SCORE)
    tune(*words(command, *PARSE, "--dry-run"))
    said = capsys.readouterr().out
    assert f"score with the defaults: {DEFAULT:.6g} (" in said
    rows = [line.split() for line in said.splitlines()]
    assert ["nms", "a", "number", "from", "0.3", "to", "0.9", "0.5"] in rows
    assert ["size", "320", "or", "480", "or", "640", "320", "(assumed)"] in rows
    assert "10 queries would take up to about 1 s" in said
    assert not (folder / "out/run.json").exists()
    tune(*words(command, *PARSE))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--setting", "iou=0.1:0.2"], "--score has no {iou}, so --setting iou"),
        (["--score", "python score.py {nms} {size} {iou}"], "--score has {iou}, which nothing fills"),
        (["--score", "no-such-program {nms} {size}"], "program 'no-such-program'"),
        (["--holdout", "python score.py {nms}"], "--holdout has no {size}"),
        (["--score", "python score.py {nms} {size} {checkpoint}"], "--score has {checkpoint}, but there is none"),
        (["--setting", "conf=0.9:0.1"], "conf: low is 0.9 and high 0.1"),
        (["--default", "size=500"], "default is 500; it must be 320 or 480"),
        (["--default", "iou=0.5"], "--default iou=0.5: no --setting has"),
        (["--parse", "AP"], "has no group"),
        (["--queries", "0"], "--queries 0: it must be at least 1"),
        (["--jobs", "0"], "--jobs 0"),
        (["--timeout", "0"], "--timeout 0: it must be above 0"),
    ],
)
def test_switches_that_can_not_be_meant(
    folder: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tune(*words(program(SCORE), *PARSE, *more), status=2)
    assert message in capsys.readouterr().err
    assert not (folder / "out").exists()


def test_too_few_queries_are_refused_before_anything_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tune(*words(program(SCORE), *PARSE, queries=1), status=1)
    assert "--queries 1 with --repeats 1: at least 2 are needed" in capsys.readouterr().err
    assert not (folder / "out").exists()


def test_a_folder_belongs_to_one_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = program(SCORE)
    tune(*words(command, *PARSE))
    tune(*words(command, *PARSE), status=1)
    assert "holds an earlier run: add --resume" in capsys.readouterr().err
    tune(*words(command, *PARSE, "--resume", "--default", "size=640"), status=1)
    assert "default was ['nms=0.5'], now ['nms=0.5', 'size=640']" in capsys.readouterr().err
    before = without_times("out")
    tune(*words(command, *PARSE, "--resume"))  # all is there
    assert without_times("out") == before
