"""``--show-config``: every tool with a config file shows all of its keys, without data and without an output folder."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from helpers.programs import call
from helpers.refusals import assert_refused
from metricopt_ext.experiment.cli import experiment_of
from metricopt_ext.utils.config import leaf_keys, load_config

ROOT = Path(__file__).parents[2]
SHOWN = {
    "finetune_classifier": ("classification", "classification/a9a.yaml"),
    "finetune_detector": ("detection", "detection/voc07_torchvision.yaml"),
    "finetune_retrieval": ("retrieval", "retrieval/omniglot.yaml"),
    "evaluate_ap50": ("detection", "detection/bccd_torchvision.yaml"),
    "evaluate_recall": ("retrieval", "retrieval/sop.yaml"),
}


@pytest.mark.parametrize(("tool", "task", "config"), [(tool, *each) for tool, each in SHOWN.items()])
def test_each_tool_shows_all_keys(
    tool: str,
    task: str,
    config: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if task == "retrieval":
        pytest.importorskip("faiss")
    monkeypatch.chdir(tmp_path)
    file = ROOT / "configs" / config
    call(import_module(f"metricopt_ext.tools.{tool}"), "--config-file", str(file), "--show-config")
    text = capsys.readouterr().out
    (tmp_path / "shown.yaml").write_text(text)
    schema: Any = experiment_of(task).config_type
    assert load_config(schema, tmp_path / "shown.yaml") == (made := load_config(schema, file))
    assert len([line for line in text.splitlines() if line.endswith((" # default", " # config file"))]) == len(
        leaf_keys(made)
    )
    assert [path.name for path in tmp_path.iterdir()] == ["shown.yaml"]


@pytest.mark.parametrize("tool", ["evaluate_ap50", "evaluate_recall"])
def test_there_is_nothing_to_show_without_a_file(tool: str) -> None:
    assert_refused(
        lambda: call(import_module(f"metricopt_ext.tools.{tool}"), "--show-config"),
        SystemExit,
        "--show-config",
        "--config-file",
    )
