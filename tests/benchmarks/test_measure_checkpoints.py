"""The tool that averages a detector's own checkpoints, on a tiny training."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import measure_checkpoints as tool
from helpers import programs
from metricopt_ext.detection.build import build_toolkit, detector
from metricopt_ext.detection.config import DetectionConfig
from metricopt_ext.detection.data import load_splits
from metricopt_ext.utils.config import load_config

SCENES = Path(__file__).parents[2] / "configs" / "detection" / "scenes_torchvision.yaml"
TINY = [
    *("data.images=[12,6,6]", "scene.size=48", "scene.digits=[1,2]", "model.min_size=48", "model.max_size=48"),
    *("model.steps=9", "model.lr=0.05", "model.batch_size=2", "model.proposals=10"),
    *("methods=[]", "seeds=1", "workers=1", "device=cpu"),
]
call = partial(programs.call, tool, "--config-file", SCENES)


def test_the_checkpoints_are_of_the_tool_s_own_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call("--output-dir", tmp_path / "run", "--checkpoints", "3", *TINY)
    files = [tmp_path / "run" / "seed-0" / f"checkpoint_{i}.safetensors" for i in (1, 2, 3)]
    config = load_config(DetectionConfig, SCENES, TINY)
    splits = load_splits(config, 0, tmp_path)
    trained = detector(config, build_toolkit(config), splits, 0, tmp_path / "by_the_tool").state_dict()
    first, _, last = map(load_file, files)
    assert all(torch.equal(trained[name], last[name]) for name in trained)
    assert not all(torch.equal(first[name], last[name]) for name in trained)

    content = json.loads((tmp_path / "run" / "checkpoints.json").read_text())
    (row,) = content["per_seed"]
    assert row["better"] == ("soup" if row["soup"]["validation"] > row["last"]["validation"] else "last")
    assert content["gain"] == pytest.approx(row["soup"]["test"] - row["last"]["test"])
    assert "average of 3" in capsys.readouterr().out

    before = {file: file.stat().st_mtime_ns for file in files}
    call("--output-dir", tmp_path / "run", "--checkpoints", "3", *TINY)  # the same command trains nothing again
    assert {file: file.stat().st_mtime_ns for file in files} == before


@pytest.mark.parametrize("count", [1, 5])
def test_as_many_checkpoints_as_there_are_steps_for(count: int, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"--checkpoints {count} .*9 steps.*model.steps"):
        call("--output-dir", tmp_path, "--checkpoints", str(count), *TINY)
