"""The ratios are measured on toy sizes, and a ratio is what its pairs of times say."""

import json
import runpy
import sys
from pathlib import Path

import pytest

for needed in ("faiss", "pycocotools", "torchvision"):
    pytest.importorskip(needed)

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ratios.py"


def test_a_ratio_is_the_median_of_paired_ratios() -> None:
    summed_up = runpy.run_path(str(SCRIPT))["summed_up"]
    ratio = summed_up("ours", "theirs", [(2.0, 1.0), (30.0, 10.0), (4.0, 1.0), (10.0, 10.0), (5.0, 1.0)])
    assert (ratio.median, ratio.quartiles, ratio.seconds, ratio.turns) == (3.0, (2.0, 4.0), (5.0, 1.0), 5)


@pytest.mark.slow
def test_the_command_measures_every_ratio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out" / "ratios.json"
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, "--smoke", "--output", str(output)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    shown = capsys.readouterr().out
    ratios = json.loads(output.read_text())["ratios"]
    assert [each["of"] for each in ratios] == [
        *("MetricOpt.step", "Recall@10", "AP50", "32 folded tasks"),
        *(f"a query of a search, {model}" for model in ("MLP", "ResNet-20", "detector")),
        *(f"a query of a setting, {model}" for model in ("ResNet-20", "detector")),
        "a query on kept features, conv4",
    ]
    for each in ratios:
        low, high = each["quartiles"]
        assert 0 < low <= each["median"] <= high
        assert min(each["seconds"]) > 0
        assert each["of"] in shown
