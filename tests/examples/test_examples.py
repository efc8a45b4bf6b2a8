"""Each script of `examples`, run as it is on little training, and the counts of its marked lines."""

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
COMPARED = "three_ways.py"  # a comparison, and no script of a user that was changed
EXAMPLES = sorted({path.name for path in (ROOT / "examples").glob("*.py")} - {COMPARED})
LINES = 60

# What makes a run short, and the checkpoint that it leaves.
RUNS = {
    "plain_loop": (["plain_loop.py", "--epochs", "2", "--queries", "20"], "plain_loop.pth"),
    "lightning_module": (["lightning_module.py", "--epochs", "2", "--queries", "20"], "lightning_module.pth"),
    "huggingface_trainer": (["huggingface_trainer.py", "--epochs", "1", "--queries", "20"], "huggingface"),
    "generation": (["generation.py", "--epochs", "1", "--queries", "20"], "generation"),
    "accelerate_loop": (["accelerate_loop.py", "--epochs", "1", "--queries", "20"], "accelerate_loop.pth"),
    "pml_trainer": (["pml_trainer.py", "--epochs", "1", "--queries", "20"], "pml_trainer.pth"),
    "sklearn_table": (["sklearn_table.py", "--epochs", "2", "--queries", "20"], "sklearn_table.joblib"),
    **{
        f"timm_model-{name}": (["timm_model.py", "--model", name, "--epochs", "1", "--queries", "20"], "timm_model.pth")
        for name in ("test_resnet", "test_efficientnet_gn", "test_convnext")  # BatchNorm, GroupNorm, LayerNorm
    },
}


DETECTRON2 = {
    name: pytest.param([f"{name}.py", "--steps", "4", "--queries", "16"], left, marks=pytest.mark.detectron2, id=name)
    for name, left in (("detectron2_loop", "detectron2_loop.pth"), ("detectron2_trainer", "out/tuned/model_merged.pth"))
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "left"), [*(pytest.param(*run, id=name) for name, run in RUNS.items()), *DETECTRON2.values()]
)
def test_script_ends_with_an_ordinary_checkpoint(
    command: list[str],
    left: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = command[0]
    if script.startswith("detectron2"):
        request.getfixturevalue("catalog")  # both scripts register the same names
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", command)
    with torch.random.fork_rng():
        runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.search(r"-> \d\.\d{4}(, unguarded)?; kept ", printed), printed  # the result in its own words
    if left.endswith(".pth"):
        state = torch.load(tmp_path / left)
        names = {name for part in state.values() for name in (part if isinstance(part, dict) else state)}
        assert names
        assert not [name for name in names if "metricopt" in name]
    else:
        assert (tmp_path / left).exists()


def marked(script: str, mark: str) -> int:
    """How many lines of a script end in a mark."""
    return sum(line.endswith(f"  # {mark}") for line in (ROOT / "examples" / script).read_text().splitlines())


@pytest.mark.parametrize("script", EXAMPLES)
def test_the_table_states_what_changed(script: str) -> None:
    lines = len((ROOT / "examples" / script).read_text().splitlines())
    assert lines <= LINES
    (row,) = [line for line in (ROOT / "examples" / "README.md").read_text().splitlines() if f"| `{script}` |" in line]
    counts = [int(cell) for cell in row.split("|")[-4:-1] if cell.strip().isdigit()]
    searched, followed = marked(script, "+"), marked(script, "++")
    assert searched > 0
    assert counts == [lines, searched, *([searched + followed] if followed else [])]


def test_every_script_is_run() -> None:
    assert {command[0] for command, _ in RUNS.values()} | {f"{name}.py" for name in DETECTRON2} == set(EXAMPLES)


@pytest.mark.slow
def test_three_ways_do_one_job(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna", reason="the extra `optuna` is not installed")
    monkeypatch.setattr(sys, "argv", [COMPARED, "--queries", "20", "--seeds", "0"])
    with torch.random.fork_rng():
        script = runpy.run_path(str(ROOT / "examples" / COMPARED), run_name="__main__")
    printed = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    rows = {cells[0].removeprefix("| "): cells[1] for cells in printed[1:]}
    assert rows == {"the trained model": "0", **dict.fromkeys(script["WAYS"], "20")}
    table = (ROOT / "docs/scorer.md").read_text()
    assert not [name for name in rows if f"| {name} |" not in table]


def test_each_of_the_three_ways_takes_forty_lines_at_most() -> None:
    tree = ast.parse((ROOT / "examples" / COMPARED).read_text())
    lines = {node.name: node.end_lineno - node.lineno + 1 for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert lines.keys() == {"by_cma", "by_optuna", "by_tpe", "by_sampler", "by_search"}
    assert max(lines.values()) <= 40
