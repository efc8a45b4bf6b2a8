"""The tool that measures how well losses rank outputs as the metric does, on a tiny run."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import measure_correlation as tool
from helpers import programs
from metricopt_ext.classification.classifier import untrained
from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.runtime.identity import sole_writer
from metricopt_ext.siblings.reloss.relational_loss import load_relational_loss
from metricopt_ext.utils.config import load_config

call = partial(programs.call, tool)

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "measure_correlation.py"
CONFIGS = ROOT / "configs" / "siblings"
SETTINGS = {"training": 12, "heldout": 4, "checkpoints": 3, "checkpoint_steps": 4, "loss_steps": 2, "loss_batches": 6}
TINY = [*(f"siblings.reloss.{key}={value}" for key, value in SETTINGS.items()), "device=cpu", "workers=1"]


def test_it_reports_all_losses_for_each_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call("--config-file", CONFIGS / "reloss_digits.yaml", "--output-dir", tmp_path, *TINY, "seeds=2")
    content = json.loads((tmp_path / "correlation.json").read_text())
    assert content["seeds"] == [0, 1]
    gains = []
    for row in content["per_seed"]:
        assert row["batch_queries"] == 16
        assert row["outputs"] == 3 * 6  # three checkpoints, six batches of the 629 test images
        assert list(row["correlations"]) == ["cross-entropy", "1 - p", "ReLoss"]
        gains.append(row["correlations"]["ReLoss"]["spearman"] - row["correlations"]["cross-entropy"]["spearman"])
    gain = content["gains"]["cross-entropy"]
    assert gain["mean"] == pytest.approx(sum(gains) / 2)
    assert gain["low"] <= gain["mean"] <= gain["high"]
    table = (tmp_path / "correlation.md").read_text()
    assert "| ReLoss |" in table
    assert f"{gain['mean']:+.4f}" in table
    assert f"{gain['mean']:+.4f}" in capsys.readouterr().out
    for seed in (0, 1):
        assert load_relational_loss(tmp_path / f"seed-{seed}.safetensors").metric == "accuracy"
        assert (tmp_path / f"seed-{seed}.png").stat().st_size > 1000


def test_bad_settings_end_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        call(
            *("--config-file", CONFIGS / "reloss_digits.yaml", "--output-dir", tmp_path),
            "siblings.reloss.random=2",
        )
    assert caught.value.code == "error: siblings.reloss: random is 2.0; it must be in [0, 1]"


@pytest.mark.parametrize("name", ["digits", "cifar10"])
def test_the_committed_settings_are_usable(name: str) -> None:
    config = load_config(ClassificationConfig, CONFIGS / f"reloss_{name}.yaml", ["data.root=FOLDER"])
    config.check()
    assert config.seeds == 5
    assert (config.siblings.reloss.loss_lr, config.siblings.reloss.penalty) == (0.01, 10)
    shape, classes = (torch.Size((1, 8, 8)) if name == "digits" else torch.Size((3, 32, 32))), 10
    splits = type("Splits", (), {"train": type("Part", (), {"x": torch.zeros(1, *shape)}), "num_classes": classes})
    assert untrained(config, splits, 0).eval()(torch.zeros(2, *shape)).shape == (2, classes)


def test_the_expected_error_is_the_mean_of_1_minus_p() -> None:
    scores, labels = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]]), torch.tensor([0, 1])
    assert float(tool.expected_error(scores, labels)) == pytest.approx((0.5 + 0.75) / 2)
    assert float(tool.expected_error(torch.tensor([0.0, math.log(4)]), labels)) == pytest.approx((0.5 + 0.2) / 2)


def test_a_folder_that_another_run_writes_is_refused(tmp_path: Path) -> None:
    with sole_writer(tmp_path), pytest.raises(SystemExit, match="is being written by another process"):
        call("--config-file", CONFIGS / "reloss_digits.yaml", "--output-dir", tmp_path, *TINY)


def test_a_seed_on_file_is_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--config-file", CONFIGS / "reloss_digits.yaml", "--output-dir", tmp_path, *TINY]
    call(*given, "seeds=1")
    (first,) = json.loads((tmp_path / "correlation.json").read_text())["per_seed"]
    original, computed = tool.learn_and_judge, []

    def spy(config: Any, folder: Path, seed: int, callback: Any) -> dict[str, Any]:
        computed.append(seed)
        return original(config, folder, seed, callback)

    monkeypatch.setattr(tool, "learn_and_judge", spy)
    call(*given, "seeds=2")
    rows = json.loads((tmp_path / "correlation.json").read_text())["per_seed"]
    assert computed == [1]
    assert rows[0] == first != rows[1]
    with pytest.raises(SystemExit, match=r"holds.*siblings\.reloss\.lr.*now 0\.5;"):
        call(*given, "seeds=2", "siblings.reloss.lr=0.5")
    (tmp_path / "seed-1.json").write_text('{"correlations": 3}')
    with pytest.raises(SystemExit, match=r"seed-1\.json holds.*outputs.*delete it"):
        call(*given, "seeds=2")
