"""The tools under torchrun: ranks share a seed or take the seeds in turn, and what is written is the same."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

SHARED = ["queries=20", "workers=1", "device=cpu", "adapter.dim=6", "finetune.steps=4"]
DETECTION = [
    *("model.steps=4", "model.batch_size=2", "model.min_size=48", "model.max_size=48", "model.proposals=20"),
    *("scene.size=48", "scene.digits=[1,2]", "scene.scale=[24,40]", "data.images=[6,6,6]", "batch_size=2"),
]
TOOLS = {
    # Algorithm 1 runs beside the search: with three observations each, 20 queries are enough for its tasks.
    "finetune_classifier": [
        "configs/classification/digits.yaml",
        "model.epochs=2",
        "methods=[metricopt_paper]",
        "paper.evals=3",
    ],
    # Settings of inference are tuned by the detector's tool alone: ranks ask for them alike, whatever the task.
    "finetune_retrieval": ["configs/retrieval/digits.yaml", "model.epochs=1", "model.width=4", "methods=[]"],
    "finetune_detector": ["configs/detection/scenes_torchvision.yaml", *DETECTION],
}


def arguments(tool: str, folder: Path, *overrides: str) -> list[str]:
    config, *more = TOOLS[tool]
    return ["--config-file", str(ROOT / config), "--output-dir", str(folder), *SHARED, *more, *overrides]


# All tools in the same ranks, one after the other: to start a process takes longer than what these runs do.
RANKS = """
import json, runpy, sys
from metricopt_ext.runtime import distributed

with distributed.joined():
    for script, *arguments in json.loads(sys.argv[1]):
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")
"""


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
@pytest.mark.program
def test_ranks_write_what_one_process_does(forked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share one seed, and take several in turn; each of them finds a metric of the user's own in its folder."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own_score.py").write_text("def score(y, predicted):\n    return (y == predicted).mean()\n")
    monkeypatch.chdir(tmp_path)
    runs = {f"{tool} alone": (tool, ["seeds=1"]) for tool in TOOLS}
    in_turn = ["seeds=2", "metric.name=own_score:score", "metric.folder=mine"]
    runs["in turn"] = ("finetune_classifier", in_turn)

    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # what torchrun gives each of several
    for name, (tool, settings) in runs.items():
        script = str(ROOT / "tools" / f"{tool}.py")
        monkeypatch.setattr(sys, "argv", [script, *arguments(tool, tmp_path / "own" / name, *settings)])
        runpy.run_path(script, run_name="__main__")
    commands = [
        [str(ROOT / "tools" / f"{tool}.py"), *arguments(tool, tmp_path / "ranks" / name, *settings)]
        for name, (tool, settings) in runs.items()
    ]
    output = forked(RANKS, 2, json.dumps(commands))
    assert output.count("1 seed of 20 queries") == len(TOOLS)
    assert output.count("2 seeds of 20 queries") == 1
    assert output.count("wrote\n") == len(runs)

    for name in runs:
        assert kept(tmp_path / "own" / name) == kept(tmp_path / "ranks" / name) != {}
    assert len(list((tmp_path / "ranks" / "in turn").glob("seed-*/record.json"))) == 2
    report = json.loads((tmp_path / "ranks" / "in turn" / "report.json").read_text())
    assert report["metric"]["name"] == "score"
