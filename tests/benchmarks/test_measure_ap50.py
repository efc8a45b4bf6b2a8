"""benchmarks/measure_ap50.py on a small set."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import measure_ap50

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "measure_ap50.py"


def measure(folder: Path) -> Any:
    options = ("--images", "20", "--detections", "30", "--classes", "4", "--repeats", "1", "--output-dir", str(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["measure_ap50.py", *options])
        measure_ap50.main()
    return json.loads((folder / "report.json").read_text())


def test_measures_against_pycocotools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pycocotools")
    result = measure(tmp_path)["results"]["coco"]
    assert result["same"]
    assert 0.05 < result["value"] < 0.95
    assert result["ratio"] == pytest.approx(result["seconds"] / result["their_seconds"])
    assert "(the same)" in capsys.readouterr().out


def test_files_are_measured_against_faster_coco_eval(tmp_path: Path) -> None:
    pytest.importorskip("pycocotools")
    pytest.importorskip("faster_coco_eval")
    results = measure(tmp_path)["results"]
    assert list(results)[-2:] == ["files", "process"]
    assert all(result["same"] and 0 < result["value"] < 0.95 for result in results.values())


@pytest.mark.detectron2
def test_measures_against_detectron2(tmp_path: Path) -> None:
    pytest.importorskip("detectron2")
    results = measure(tmp_path)["results"]
    assert list(results)[:3] == ["coco", "voc", "voc_11_point"]
    assert all(result["same"] for result in results.values())


def test_fails_if_values_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pycocotools")
    monkeypatch.setattr(measure_ap50, "pycocotools", lambda *arguments: lambda: 0.5)
    monkeypatch.setattr(measure_ap50, "detectron2", lambda *arguments: None)
    with pytest.raises(SystemExit, match="values differ"):
        measure(tmp_path)
