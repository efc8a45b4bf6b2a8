"""The tools under torchrun: ranks share a seed or take the seeds in turn, and what is written is the same."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

SHARED = ["queries=20", "pictures=false", "workers=1", "device=cpu", "adapter.dim=6"]
DETECTION = [
    *("model.steps=4", "model.batch_size=2", "model.min_size=48", "model.max_size=48", "model.proposals=20"),
    *("scene.size=48", "scene.digits=[1,2]", "scene.scale=[24,40]", "data.images=[6,6,6]", "batch_size=2"),
]
TOOLS = {
    # Algorithm 1 runs beside the search: with three observations each, 20 queries are enough for its tasks.
    "finetune_classifier": [
        *("configs/classification/digits.yaml", "model.epochs=2", "methods=[metricopt_paper]"),
        *("recipe.steps=4", "recipe.evals=3"),
    ],
    "finetune_retrieval": ["configs/retrieval/digits.yaml", "model.epochs=1", "model.width=4"],
    "finetune_detector": ["configs/detection/scenes_torchvision.yaml", *DETECTION],
}


def command(tool: str, folder: Path, *overrides: str) -> list[str]:
    config, *more = TOOLS[tool]
    script = [str(ROOT / "tools" / f"{tool}.py"), "--config-file", str(ROOT / config), "--output-dir", str(folder)]
    return [*script, *SHARED, *more, *overrides]


def finished(arguments: list[str], *, ranks: int = 1) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    run = subprocess.run(
        [sys.executable, *launcher, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # what torchrun gives each of several
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def kept(folder: Path) -> dict[str, Any]:
    """Return what a run wrote that does not depend on when, and how fast, it ran."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}
    for path in folder.glob("seed-*/record.json"):
        record = json.loads(path.read_text())
        for outcomes in record["outcomes"].values():
            for each in outcomes:
                del each["seconds"]
        files[str(path.relative_to(folder))] = record
    return files


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
def test_ranks_that_share_a_seed_write_what_one_process_does(tool: str, tmp_path: Path) -> None:
    finished(command(tool, tmp_path / "1", "seeds=1"))
    output = finished(command(tool, tmp_path / "2", "seeds=1"), ranks=2)
    assert kept(tmp_path / "1") == kept(tmp_path / "2") != {}
    assert output.count("1 seed of 20 queries") == output.count("wrote\n") == 1


@pytest.mark.slow
def test_ranks_take_seeds_in_turn(tmp_path: Path) -> None:
    finished(command("finetune_classifier", tmp_path / "1", "seeds=3"))
    output = finished(command("finetune_classifier", tmp_path / "2", "seeds=3"), ranks=2)
    assert kept(tmp_path / "1") == kept(tmp_path / "2") != {}
    assert output.count("3 seeds of 20 queries") == output.count("wrote\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "workers"), [(2, 1), (1, 2)])
def test_a_metric_in_a_folder_is_found_by_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, workers: int
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own_score.py").write_text("def score(y, predicted):\n    return (y == predicted).mean()\n")
    monkeypatch.chdir(tmp_path)
    own = ["metric.name=own_score:score", "metric.folder=mine"]
    finished(command("finetune_classifier", tmp_path / "run", "seeds=2", f"workers={workers}", *own), ranks=ranks)
    assert json.loads((tmp_path / "run" / "report.json").read_text())["metric"]["name"] == "score"
    assert len(list((tmp_path / "run").glob("seed-*/record.json"))) == 2
