"""The configs of the repository: each can be read, checked and built as far as no data are needed."""

import importlib.util
from contextlib import nullcontext
from pathlib import Path

import pytest

from helpers.programs import refused
from metricopt_ext.detection.build import build_metric, build_toolkit
from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.cli import experiment_of
from metricopt_ext.tools import evaluate_ap50, evaluate_recall
from metricopt_ext.utils.config import load_config

ROOT = Path(__file__).parents[2]
TASKS = ("classification", "detection", "retrieval")
FILES = [(task, file) for task in TASKS for file in sorted((ROOT / "configs" / task).glob("*.yaml"))]


@pytest.mark.parametrize(("task", "file"), FILES, ids=lambda each: each.stem if isinstance(each, Path) else each)
def test_each_is_sound(task: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    experiment = experiment_of(task)
    config = load_config(experiment.config_type, file)
    config.check()
    if task == "detection":
        build_metric(config.metric)
        there = config.toolkit == "torchvision" or importlib.util.find_spec("detectron2")
        with nullcontext() if there else pytest.raises(ConfigError):
            build_toolkit(config)
        if not there:
            return
    assert experiment.describe(config).metric


@pytest.mark.parametrize("tool", [evaluate_ap50, evaluate_recall])
def test_there_is_nothing_to_show_without_a_file(tool: object) -> None:
    assert "--config-file" in refused(tool, "--show-config")
