"""The tool that measures what a search leaves behind, on a tiny run."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import measure_search as tool
from helpers import programs
from metricopt_ext.runtime.identity import sole_writer

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "configs" / "classification" / "digits.yaml"
TINY = [
    *(
        "data.name=breast_cancer",
        "data.standardise=true",
        "shift.kind=none",
        "model.name=tabular_mlp",
        "metric.name=f1",
    ),
    *("adapter.kind=input_bias", "adapter.layers=[]", "adapter.dim=4", "model.epochs=1", "finetune.steps=5"),
    *("seeds=2", "workers=1", "device=cpu", "queries=30"),
]
call = partial(programs.call, tool, "--task", "classification", "--config-file", DIGITS)


def test_both_models_are_searched_and_f_is_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call("--output-dir", tmp_path, "--budgets", "25,20", *TINY)
    content = json.loads((tmp_path / "search.json").read_text())
    rows = content["per_seed"]
    assert [row["seed"] for row in rows] == [content["config"]["seed"] + i for i in range(2)]
    for row in rows:
        assert set(row["second"]) == {"alone", "previous"}
        for runs in row["second"].values():
            assert list(runs) == ["20", "25"]
            assert all(0 <= run["test"] <= 1 for run in runs.values())
        assert all(run["started_at"] != "previous" for run in row["second"]["alone"].values())
    gaps = [row["followed"] - row["search"] for row in rows if row["followed"] is not None]
    assert content["followed"]["seeds"] == len(gaps)
    if gaps:
        assert content["followed"]["mean"] == pytest.approx(sum(gaps) / len(gaps))
    started = sum(row["second"]["previous"]["20"]["started_at"] == "previous" for row in rows)
    table = (tmp_path / "search.md").read_text()
    (line,) = [line for line in table.splitlines() if line.startswith("| 20 queries")]
    assert line.endswith(f"| {started} of 2 |")
    assert line.split(" | ")[1] in capsys.readouterr().out


def test_the_second_model_is_offered_where_the_first_one_s_search_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, asked = tool.search_results, []

    def spy(task: Any, budgets: Any, **options: Any) -> Any:
        runs = list(original(task, budgets, **options))
        asked.append((options["starts"], options["seed"], runs))
        return iter(runs)

    monkeypatch.setattr(tool, "search_results", spy)
    call("--output-dir", tmp_path, "--budgets", "25", *TINY, "seeds=1")
    (first, seed, (run,)), (alone, other, _), (too, again, _) = asked
    assert other == again == seed + tool.OTHER
    assert list(first) == list(alone)
    assert set(too) == {*alone, "previous"}
    assert torch.equal(too["previous"].phi, run.ends["search"])


def test_what_is_no_guided_search_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"method\.name=paper.*guided search"):
        call("--output-dir", tmp_path, "method.name=paper", *TINY)


def test_a_folder_that_another_run_writes_is_refused(tmp_path: Path) -> None:
    with sole_writer(tmp_path), pytest.raises(SystemExit, match="is being written by another process"):
        call("--output-dir", tmp_path, "--budgets", "25", *TINY)


def test_a_seed_on_file_is_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call("--output-dir", tmp_path, "--budgets", "20", *TINY, "seeds=1")
    before = (tmp_path / "search.json").read_bytes()
    monkeypatch.setattr(tool, "search_both", lambda *_: pytest.fail("was computed again"))
    (tmp_path / "search.json").unlink()
    call("--output-dir", tmp_path, "--budgets", "20", *TINY, "seeds=1")
    assert (tmp_path / "search.json").read_bytes() == before
    with pytest.raises(SystemExit, match="budgets"):
        call("--output-dir", tmp_path, "--budgets", "25", *TINY, "seeds=1")
