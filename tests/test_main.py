"""The command `metricopt`: what it lists, whom it calls, and how fast it answers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from metricopt_ext.__main__ import main, summary, tools

ROOT = Path(__file__).parents[1]
DIGITS = "configs/classification/digits.yaml"


def ended(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "argv", ["metricopt", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code


def test_every_tool_is_a_subcommand() -> None:
    files = {path.stem for path in (ROOT / "tools").glob("*.py")} - {"__init__"}
    assert {name.replace("-", "_") for name in tools()} == files
    assert len(files) == 10


def test_the_version_comes_with_those_that_numbers_depend_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended("--version", monkeypatch=monkeypatch) == 0
    shown = capsys.readouterr().out
    assert all(f"{name} " in shown for name in ("python", "torch", "numpy"))


def test_help_has_each_with_its_line_and_imports_nothing_for_it() -> None:
    code = """
import json, sys
from metricopt_ext.__main__ import main
sys.argv = ["metricopt"]
try:
    main()
except SystemExit as error:
    print(json.dumps([error.code, sorted(sys.modules)]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    shown, last = done.stdout.rstrip("\n").rsplit("\n", 1)
    status, modules = json.loads(last)
    assert status == 0
    assert not {"numpy", "torch", "matplotlib", "omegaconf", "rich"} & set(modules)
    words = " ".join(shown.split())
    for name, path in tools().items():
        assert f" {name} {summary(path)}" in words
    assert " configs list the configs that come with the package" in words


@pytest.mark.parametrize("name", sorted(set(tools()) - {"train-detector"}))
def test_a_tools_own_help_has_the_commands_name(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(name, "--help", monkeypatch=monkeypatch) == 0
    assert capsys.readouterr().out.startswith(f"usage: metricopt {name} [-h]")


def test_arguments_reach_the_tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("evaluate-ap50", "--definition", "odd", monkeypatch=monkeypatch) == 2
    assert "metricopt evaluate-ap50: error: argument --definition: invalid choice: 'odd'" in capsys.readouterr().err


def test_a_wrong_command_is_told_what_there_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended("finetune-clasifier", monkeypatch=monkeypatch) == 2
    said = capsys.readouterr().err
    assert "invalid choice: 'finetune-clasifier'" in said
    assert "finetune-classifier" in said


def test_configs_are_listed_and_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["metricopt", "configs"])
    main()
    assert DIGITS in capsys.readouterr().out.splitlines()
    monkeypatch.setattr(sys, "argv", ["metricopt", "configs", DIGITS])
    main()
    assert capsys.readouterr().out == (ROOT / DIGITS).read_text()
    assert "the nearest is configs/classification/digits.yaml" in ended(
        "configs", "digits.yaml", monkeypatch=monkeypatch
    )


def test_a_file_that_is_no_text_is_no_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.pth"
    path.write_bytes(b"PK\x80\xff")
    said = ended("configs", str(path), monkeypatch=monkeypatch)
    assert said == f"error: {path} is no config: it is not text in UTF-8"
