"""Five whole programs, each started as a user starts it."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.program]

SMALL = ["device=cpu", "seeds=1", "workers=1", "adapter.dim=6", "finetune.steps=4"]
FINETUNE = {
    "classifier": ["configs/classification/digits.yaml", "model.epochs=2"],
    "retrieval": ["configs/retrieval/digits.yaml", "model.epochs=1", "model.width=4"],
    "detector": [
        *("configs/detection/scenes_torchvision.yaml", "model.steps=4", "model.batch_size=2", "batch_size=2"),
        *("model.min_size=48", "model.max_size=48", "model.proposals=20", "data.images=[6,6,6]"),
        *("scene.size=48", "scene.digits=[1,2]", "scene.scale=[24,40]"),
    ],
}
EVALUATE = """
import sys
from safetensors.numpy import load_file

weight = load_file(sys.argv[1])["1.weight"]
for name, part in (("score", weight), ("even", weight[::2]), ("odd", weight[1::2])):
    print(name, 1 / (1 + ((part - 1.5) ** 2).mean()))
"""


def score(state: dict[str, Tensor]) -> float:
    """Return what EVALUATE prints as the score."""
    return float(1 / (1 + (state["1.weight"] - 1.5).square().mean()))


def run(tool: str, *arguments: object, cwd: Path = ROOT) -> str:
    """Return what a tool prints; it must end with success."""
    command = [sys.executable, str(ROOT / "tools" / f"{tool}.py"), *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("host", FINETUNE)
def test_a_model_is_finetuned(host: str, tmp_path: Path) -> None:
    config, *settings = FINETUNE[host]
    printed = run(
        f"finetune_{host}", "--config-file", config, "--output-dir", tmp_path, *SMALL, *settings, "queries=20"
    )
    report = json.loads((tmp_path / "report.json").read_text())
    found, (kept,) = report["methods"]["metricopt"], report["kept"]
    assert 10 < found["queries_total"] <= 20
    assert all(0 <= each <= 1 for part in ("validation", "test") for each in found[part])
    assert str(tmp_path) in printed  # where it wrote
    if kept == "start":
        assert found["test"] == report["methods"]["pretrained"]["test"]
    else:
        assert load_file(tmp_path / "seed-0" / "adapter.safetensors")


def test_methods_are_compared(tmp_path: Path) -> None:
    methods = ["random_search", "cma_es", "metricopt"]
    settings = [*SMALL, "model.epochs=2", "budgets=[20]", f"methods=[{','.join(methods)}]"]
    run("compare", "--config-file", "configs/compare/digits_shifted.yaml", "--output-dir", tmp_path, *settings)
    cells = json.loads((tmp_path / "comparison.json").read_text())["methods"]
    assert {name: cells[name]["cells"]["20"]["queries"] for name in methods} == {name: [20] for name in methods}


def test_a_checkpoint_is_tuned(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "evaluate.py").write_text(EVALUATE)
    options = {
        "--checkpoint": "model.safetensors",
        "--score": f"{shlex.quote(sys.executable)} evaluate.py {{checkpoint}}",
        "--parse": "score ([0-9.]+)",
        "--queries": 20,
        "--dim": 4,
        "--output": "tuned.safetensors",
        "--output-dir": "out",
    }
    halves = ["--halves", "even ([0-9.]+)", "odd ([0-9.]+)"]
    run("tune_checkpoint", *(each for pair in options.items() for each in pair), *halves, cwd=tmp_path)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["queries"]["score"], report["kept"]) == (20, "search")
    tuned = load_file(tmp_path / "tuned.safetensors")
    assert score(tuned) > score(model.state_dict())
    assert score(tuned) == pytest.approx(report["after"], abs=1e-6)
