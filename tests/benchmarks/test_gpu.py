"""The benchmark for GPUs: its verdicts, and where it can't run. `make benchmarks-smoke` runs it on the CPU."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

for needed in ("faiss", "torchvision"):
    pytest.importorskip(needed)

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def test_targets_are_met_by_the_median() -> None:
    ratio = runpy.run_path(str(SCRIPT))["Ratio"]
    numbers = (1.05, (1.0, 1.2), (0.2, 0.1), (30.0, 20.0))
    assert ratio("ours", "theirs", *numbers, 1.1).line().endswith("at most 1.1: met")
    assert ratio("ours", "theirs", *numbers, 1.0).line().endswith("at most 1: missed")
    assert ratio("ours", "theirs", *numbers, None).line().endswith("30 and 20 MiB")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(SCRIPT))["main"]
    for more, message in (
        ([], "there is no GPU; --smoke"),
        (["--device", "cpu"], "--device cpu is no GPU; add --smoke"),
    ):
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--output", "gpu.json", *more])
        with pytest.raises(SystemExit):
            main()
        assert message in capsys.readouterr().err
