"""tools/tune_settings.py: any command with settings in it, from its switches to the last line."""

import json
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.programs import end
from metricopt_ext.tools import tune_settings
from testers.tool import HALVES, CommandTester

tune = partial(end, tune_settings)


class TestSettings(CommandTester):
    """Best at nms 0.62 and size 480, whatever the other is; the halves are what halves of much data would be."""

    program = tune_settings
    code = """
nms, size = float(sys.argv[1]), int(sys.argv[2])
value = 0.5 - (nms - 0.62) ** 2 + 0.1 * (size == 480)
chance = 0.001 * math.sin(1e4 * nms + size)
"""
    given = "{nms} {size}"
    switches = ("--setting", "nms=0.3:0.9", "--setting", "size=320,480,640", "--default", "nms=0.5")
    kept = "out/inference.yaml"
    queries = 10
    another = ("--default", "size=640")
    refused = (
        (("--setting", "iou=0.1:0.2"), ["--score", "{iou}"]),
        (("--score", "echo {nms} {size} {iou}"), ["--score", "{iou}"]),
        (("--score", "echo {nms} {size} {checkpoint}"), ["{checkpoint}"]),
        (("--holdout", "echo {nms}"), ["--holdout", "{size}"]),
        (("--setting", "conf=0.9:0.1"), ["conf", "0.9", "0.1"]),
        (("--default", "size=500"), ["500", "320", "480"]),
        (("--queries", "1"), ["--queries", "1", "2"]),
    )

    def command(self, report: Any) -> list[str]:
        return shlex.split(report["command"])

    def test_the_report_says_what_became_of_each_setting(self, capsys: pytest.CaptureFixture[str]) -> None:
        report = self.tune(*self.words(self.score(), *HALVES))
        assert (report["task"], report["assumed"]) == ("settings", ["size"])
        assert report["settings"]["size"] == {"before": "320", "best": "480", "after": "480"}
        assert capsys.readouterr().out.splitlines()[-1] == report["command"]  # it is there to be pasted
        chosen = yaml.safe_load(Path("out/inference.yaml").read_text())
        assert chosen["size"] == {"value": 480, "default": 320, "factor": None}
        assert str(chosen["nms"]["value"]) == report["settings"]["nms"]["after"]


PARSE = ["--parse", r"AP (\S+)"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which tests run."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def report(out: str = "out") -> Any:
    return json.loads(Path(out, "report.json").read_text())


def test_a_command_of_several_lines_can_be_pasted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = "a = {a}\nprint('AP', 1 - (a - 3) ** 2)"
    command = f"{shlex.quote(sys.executable)} -S -c {shlex.quote(code)}"
    tune("--score", command, "--setting", "a=0,1,3", *PARSE, "--queries", "3", "--output-dir", "out")
    assert report()["settings"]["a"] == {"before": "0", "best": "3", "after": "3"}
    pasted = capsys.readouterr().out.partition("to use it:\n")[2]
    own = subprocess.run(["sh", "-c", pasted], capture_output=True, text=True, check=True)
    assert own.stdout == "AP 1\n"
