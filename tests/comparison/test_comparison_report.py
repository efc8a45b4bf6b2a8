"""A comparison's report on rows with known numbers: means, the best of a column, gaps, and files for all seeds."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metricopt_ext.comparison.comparison import Plan
from metricopt_ext.comparison.comparison_content import gather, load
from metricopt_ext.comparison.comparison_page import comparison_page
from metricopt_ext.comparison.comparison_report import markdown, print_report, write
from metricopt_ext.experiment.experiment import Subject

SUBJECT = Subject("classification/toy", "net on toy", "accuracy", True)
PLAN = Plan(("cma_es", "metricopt", "noisy_ei"), (5, 20, 60))


def put(folder: Path, seed: int, ours: float = 0.8, cma: float | None = 0.7) -> None:
    """Write one seed's rows: CMA-ES can't do with 5 queries and may fail with 60, noisy EI does not apply."""

    def cell(test: float, budget: int, guard: Any = None) -> dict[str, Any]:
        passes = {"metric": budget + seed % 2, "loss": 64} if guard else None  # which are not counted for all
        told = {"seconds": budget / 10, "passes": passes, "guard": guard}
        return {"queries": budget, "validation": test, "test": test, **told}

    whole = {"accepted": False, "change": 0.0, "error": 0.01, "best": 0.2, "best_error": 0.01}
    guard = {"gain": 0.1, "chance": 0.01, "accepted": True, "change": 0.05, "error": 0.01, "end": 0.15, "whole": whole}
    failed = {} if cma is not None else {"60": "MetricError: down"}
    rows = {
        "starts": {
            "seed": seed,
            "chosen": "batchnorm",
            "validation": {"pretrained": 0.4, "batchnorm": 0.6},
            "test": {"pretrained": 0.5, "batchnorm": 0.6},
            "queries": 2,
            "seconds": 0.5,
            "passes": {"metric": 2, "loss": 0},
        },
        "cma_es": {
            "least": 18,
            "cells": {"20": cell(0.65, 20), **({} if cma is None else {"60": cell(cma, 60)})},
            "errors": failed,
        },
        "metricopt": {"least": 4, "cells": {str(q): cell(ours, q, guard) for q in (5, 20, 60)}, "errors": {}},
        "noisy_ei": {"least": 19, "cells": {}, "errors": {}},
    }
    (folder / f"seed-{seed}").mkdir(parents=True)
    for name, row in rows.items():
        content = {"method": name, "seed": seed, "machine": "A processor", "budgets": [5, 20, 60], **row}
        (folder / f"seed-{seed}" / f"{name}.json").write_text(json.dumps(content))


@pytest.fixture
def content(tmp_path: Path) -> dict[str, Any]:
    put(tmp_path, 701, ours=0.9)
    put(tmp_path, 700, cma=None)
    put(tmp_path, 702, ours=0.7)
    return gather(tmp_path, PLAN, SUBJECT, {})


def table(text: str) -> dict[str, list[str]]:
    lines = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {line[0]: [cell.strip() for cell in line[1:]] for line in lines if len(line) == 7}


def test_all_seeds_are_taken_in_and_paired(content: dict[str, Any]) -> None:
    assert content["seeds"] == [700, 701, 702]
    assert content["methods"]["metricopt"]["cells"]["60"]["test"] == [0.8, 0.9, 0.7]
    assert content["methods"]["cma_es"]["cells"]["60"]["test"] == [None, 0.7, 0.7]
    assert content["best_start"]["test"] == [0.6] * 3
    assert content["best_start"]["queries"] == 2
    assert len(content["guards"]) == 9
    pairs = {(each["baseline"], each["budget"]): each for each in content["pairs"]}
    assert pairs["cma_es", 60]["mean"] == pytest.approx(0.1)
    assert (pairs["cma_es", 60]["wins"], pairs["cma_es", 60]["losses"], pairs["cma_es", 60]["seeds"]) == (1, 0, 2)
    assert ("cma_es", 5) not in pairs
    assert len(pairs) == 3 * 3 + 2
    assert all(each["p_holm"] >= each["p"] for each in pairs.values())


def test_means_over_some_of_the_seeds_are_not_ranked(tmp_path: Path) -> None:
    for seed in (700, 701, 702):
        put(tmp_path, seed, cma=0.95)
    (tmp_path / "seed-700" / "cma_es.json").unlink()
    content = gather(tmp_path, PLAN, SUBJECT, {})
    text = markdown(content)
    rows = table(text)
    assert rows["CMA-ES on the metric"][1:4] == ["", "0.6500 (2 of 3 seeds)", "0.9500 (2 of 3 seeds)"]
    assert rows["MetricOpt"][3] == "**0.8000**"
    best = "The best method on test is MetricOpt with 0.8000 (of what ran on all seeds, unlike CMA-ES on the metric)."
    assert best in text
    (tmp_path / "seed-700" / "metricopt.json").unlink()
    starts = json.loads((tmp_path / "seed-700" / "starts.json").read_text())
    starts["test"]["pretrained"] = 0.2  # which would lower the mean that MetricOpt stands beside
    (tmp_path / "seed-700" / "starts.json").write_text(json.dumps(starts))
    text = markdown(gather(tmp_path, PLAN, SUBJECT, {}))
    assert "MetricOpt: 0.5000 → 0.8000 on test and 0.4000 → 0.8000 on validation (2 of 3 seeds)." in text
    assert "The best method on test is BatchNorm on validation with 0.6000 (of what" in text
    assert table(text)["MetricOpt"][3] == "0.8000 (2 of 3 seeds)"


def test_our_search_without_its_guard_is_shown_but_no_baseline(content: dict[str, Any]) -> None:
    """As published: its end is the start's test metric, 0.6, and the change of 0.3; other rows have at most 0.8."""
    for each in content["guards"]:
        each["change"] = 0.3
        del each["end"]
    content["guards"] = [each for each in content["guards"] if each["budget"] > 5 and each["seed"] > 700]
    text = markdown(content)
    assert table(text)["MetricOpt, unguarded"] == ["inputs, training data", "", *["0.9000 (2 of 3 seeds)"] * 2, "", ""]
    assert table(text)["MetricOpt"][1:4] == ["**0.8000**"] * 3
    assert text.count("unguarded") == 2  # its row and the note
    assert list(table(text))[-2:] == ["MetricOpt", "MetricOpt, unguarded"]
    lower = {**content, "metric": {"name": "cost", "maximize": False}}
    assert table(markdown(lower))["MetricOpt, unguarded"][2].startswith("0.3000 ")


def test_a_search_that_began_elsewhere_than_at_the_best_free_start_ended_where_it_ended(
    content: dict[str, Any],
) -> None:
    """As on a line of starts, or with settings: its end is told from the model as it was trained, 0.5 on test."""
    for each in content["guards"]:
        each.update(change=0.3, end=0.42)
    assert table(markdown(content))["MetricOpt, unguarded"][2] == "0.9200"
    lower = {**content, "metric": {"name": "cost", "maximize": False}}
    assert table(markdown(lower))["MetricOpt, unguarded"][2] == "0.0800"


def test_files_are_written_and_read(
    content: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = write(content, tmp_path)
    assert [path.name for path in paths] == ["comparison.json", "comparison.md", "comparison.png"]
    assert load(tmp_path) == load(paths[0]) == content
    assert paths[2].stat().st_size > 10_000
    print_report(content)
    printed = capsys.readouterr().out
    assert "*0.8000" in printed
    assert "against each, paired by seed" in printed


def test_the_page_is_sound_and_has_the_digits_of_the_markdown(
    content: dict[str, Any], html: Callable[[str], Any], tmp_path: Path
) -> None:
    told = {"task": "classification", "config": "a b.yaml", "overrides": ["x='<script>'"]}
    content["config"] = {**content["config"], **told}
    write(content, tmp_path)
    page = html(comparison_page(content, tmp_path).html())
    page.check()
    shown = " ".join([*page.texts("p"), *page.texts("li"), *(" ".join(row) for table in page.tables for row in table)])
    digits = re.compile(r"[+-]?\d+\.\d{4}")
    assert set(digits.findall(shown)) == set(digits.findall(markdown(content)))
    assert "'a b.yaml' --output-dir OUT queries=60 'x='\"'\"'<script>'\"'\"''" in page.texts("code")[-1]
