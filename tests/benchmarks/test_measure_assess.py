"""The tool that counts recommendations, on tiny runs."""

import json
from pathlib import Path

import pytest

import measure_assess as tool
from helpers import programs
from metricopt_ext.methods.assessment import RECOMMENDATIONS

ROOT = Path(__file__).parents[2]
TINY = ["--override", "device=cpu", "--override", "model.epochs=1", "--override", "adapter.dim=4"]


def call(folder: Path, seeds: str, *tasks: str) -> None:
    programs.call(tool, "--output-dir", folder, "--seeds", seeds, *tasks, *TINY)


@pytest.mark.slow
def test_every_seed_is_counted_once_and_asked_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(tmp_path, "4-5", "digits_plain", "noise")
    plain, noise = (json.loads((tmp_path / f"{task}.json").read_text()) for task in ("digits_plain", "noise"))
    for found, best in ((plain, tool.BEST["digits_plain"]), (noise, tool.BEST["noise"])):
        assert list(found["seeds"]) == ["4", "5"]
        assert sum(found["counts"].values()) == 2
        assert found["best"] == sum(found["counts"].get(each, 0) for each in best)
    table = capsys.readouterr().out
    assert f"{plain['best']} of 2" in table
    asked = (tmp_path / "digits_plain/4/seed-4/evaluations.json").read_bytes()
    call(tmp_path, "4-5", "digits_plain")
    assert (tmp_path / "digits_plain/4/seed-4/evaluations.json").read_bytes() == asked


def test_what_is_best_are_recommendations_of_tasks_that_exist() -> None:
    assert all(each in RECOMMENDATIONS for best in tool.BEST.values() for each in best)
    configs = {path.stem for path in tool.CONFIGS.glob("*.yaml")}
    assert set(tool.BEST) - {tool.NOISE} <= configs
