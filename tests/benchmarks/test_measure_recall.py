"""benchmarks/measure_recall.py on small sets."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import measure_recall

pytest.importorskip("faiss")
pytest.importorskip("pytorch_metric_learning")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "measure_recall.py"


def test_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All sides in this process: the recalls are right, the times and sizes only there."""
    started: list[str] = []

    def start(name: str, arguments: argparse.Namespace, folder: str) -> Any:
        started.append(name)
        return measure_recall.measure_one(name, argparse.Namespace(**{**vars(arguments), "output_dir": Path(folder)}))

    monkeypatch.setattr(measure_recall, "start", start)
    arguments = ["--size", "600", "--dim", "16", "--k", "120", "--repeats", "2", "--output-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["measure_recall.py", *arguments])
    measure_recall.main()
    assert started == ["make data", *["ours", "raw FAISS", "pytorch-metric-learning"] * 2]
    report = json.loads((tmp_path / "report.json").read_text())
    ours, raw, theirs = report["sides"].values()
    assert list(ours["recall"]) == ["1", "10", "100", "120"]
    assert ours["recall"] == raw["recall"]
    assert 0.01 < ours["recall"]["1"] < ours["recall"]["120"] <= 1
    assert theirs["recall"]["1"] == pytest.approx(ours["recall"]["1"], abs=1e-6)
    assert report["same_recalls"] is True
    assert report["time_ratio"] == ours["seconds"] / raw["seconds"]
    assert "same recalls as raw FAISS: yes" in capsys.readouterr().out


def test_measurement_starts_processes(tmp_path: Path) -> None:
    arguments = argparse.Namespace(size=50, dim=4, k=10, per_class=5.0, seed=0, output_dir=tmp_path)
    assert measure_recall.start("make data", arguments, str(tmp_path)) == {}
    assert np.load(tmp_path / "embeddings.npy").shape == (50, 4)
    assert np.bincount(np.load(tmp_path / "labels.npy")).min() >= 2
