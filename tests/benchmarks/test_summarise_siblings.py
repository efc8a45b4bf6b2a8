"""The summary of what sibling methods measured, against figures by hand."""

from pathlib import Path

import pytest
import torch

import summarise_siblings as tool
from metricopt_ext.experiment.record import Outcome, SeedRecord
from metricopt_ext.utils.files import write_json
from metricopt_ext.utils.machine import Machine

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "summarise_siblings.py"


def write_run(folder: Path, finals: list[float], rewards: list[list[float]]) -> Path:
    """Write what the summary reads of a run, one seed for each final metric."""
    for seed, (final, reward) in enumerate(zip(finals, rewards, strict=True)):
        outcome = Outcome(0.5, final, 7, 7, 1.0)
        SeedRecord(
            seed=seed,
            outcomes={"pretrained": [outcome], "metricopt": [outcome], "ala": [Outcome(0.1, 0.2, 0, 0, 0.0), outcome]},
            quality=None,
            candidates={},
            kept="",
            setting=None,
            split_half=None,
            chance=0.0,
            guard="halves",
            curves={},
            true=[],
            predicted=[],
            machine=Machine.current(torch.device("cpu")),
        ).save(folder / f"seed-{seed}" / "record.json")
        kept = {"history": {"reward": list(enumerate(reward))}, "queries": {"reward": 7}, "batch_queries": {}}
        kept["trained"] = "phi"
        write_json(folder / f"seed-{seed}" / "ala.json", {**kept, "seconds": 3.0})
    return folder


def test_rows_are_means_over_seeds_with_their_errors(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.7, 0.9], [[1.0, 0.5, 0.0, 0.25], [-1.0, 0.5, 0.5, 0.75]])
    assert tool.rows_of(run, "ala") == [
        ["reward", "0.0000 (se 1.0000)", "0.5000 (se 0.2500)", "0.3750 (se 0.2500)", "2"],
        ["test metric", "", "0.8000 (se 0.1000)", "", "2"],
        ["queries", "", "7.0000 (se 0.0000)", "", "2"],
        ["batch queries", "", "0.0000 (se 0.0000)", "", "2"],
        ["seconds", "", "3.0000 (se 0.0000)", "", "2"],
    ]


def test_two_runs_are_compared_by_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_run(tmp_path / "one", [0.7, 0.9, 0.8], [[1.0]] * 3)
    other = write_run(tmp_path / "other", [0.6, 0.6], [[1.0]] * 2)
    tool.main(["--run-dir", str(one), "--against", str(other)])
    # Differences 0.1 and 0.3; t of one degree of freedom is 12.706 at 95%, and the error 0.1.
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.endswith("+0.2000 [-1.0706, +1.4706], 2 seeds")


def test_runs_without_what_it_needs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"error: .* holds no finished seed"):
        tool.main(["--run-dir", str(tmp_path)])
    run = write_run(tmp_path / "run", [0.5], [[1.0]])
    (run / "seed-0" / "ala.json").unlink()
    with pytest.raises(SystemExit, match=r"error: .* ran no sibling method"):
        tool.main(["--run-dir", str(run)])
