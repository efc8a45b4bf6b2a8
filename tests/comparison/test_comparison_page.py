"""A comparison's page has the digits of comparison.md, its picture, and commands that go on from it."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metricopt_ext.comparison.comparison_content import paired
from metricopt_ext.comparison.comparison_page import comparison_page
from metricopt_ext.comparison.comparison_report import markdown, verdict
from metricopt_ext.comparison.comparison_tables import pair_rows
from metricopt_ext.experiment.style import new_figure, save_figure

NUMBER = re.compile(r"[+-]?\d+\.\d{4}")
BUDGETS = ("20", "60")


def cells(*tests: list[float]) -> dict[str, Any]:
    columns = {"seconds": [1.25] * 3, "passes": [None] * 3}
    each = zip(BUDGETS, tests, strict=True)
    return {
        q: {"queries": [int(q)] * 3, "validation": [x + 0.01 for x in test], "test": test, **columns}
        for q, test in each
    }


def comparison(ours: list[float], *, maximize: bool = True, **change: Any) -> dict[str, Any]:
    """Of three seeds, on which the model as it was has 0.5 and CMA-ES 0.65, then 0.7."""
    start = {"validation": [0.45] * 3, "test": [0.5] * 3}
    guard = {"gain": 0.1, "chance": 0.01, "accepted": True, "change": 0.05, "error": 0.01, "end": 0.15}
    whole = {"accepted": True, "change": 0.2, "error": 0.01, "best": 0.2, "best_error": 0.01}
    refused = {**whole, "accepted": False, "change": 0.0}
    content = {
        "task": "toy",
        "title": "net on toy",
        "metric": {"name": "accuracy", "maximize": maximize},
        "budgets": [20, 60],
        "seeds": [700, 701, 702],
        "starts": {"pretrained": start},
        "best_start": {"queries": 1, "chosen": ["pretrained"] * 3, "seconds": [0.5] * 3, "passes": [None] * 3, **start},
        "methods": {
            "cma_es": {"least": 18, "cells": cells([0.65] * 3, [0.7] * 3), "errors": {}},
            "metricopt": {"least": 4, "cells": cells([0.8] * 3, ours), "errors": {}},
        },
        "guards": [
            {"seed": seed, "method": "metricopt", "budget": 60, **guard, "whole": refused if seed == 702 else whole}
            for seed in (700, 701, 702)
        ],
        "machines": ["A processor"],
        "versions": {"python": "3.12.1"},
        "config": {"task": "classification", "config": "a b.yaml", "overrides": ["x='<script>'"]},
        **change,
    }
    return paired(content)


@pytest.fixture
def read(html: Callable[[str], Any], tmp_path: Path) -> Callable[[dict[str, Any]], Any]:
    """Make a comparison's page and read it."""

    def make(content: dict[str, Any]) -> Any:
        save_figure(new_figure(10, 5)[0], tmp_path / "comparison.png")
        seen = html(comparison_page(content, tmp_path).html())
        seen.check()
        return seen

    return make


def test_the_page_has_the_digits_of_the_markdown(read: Any) -> None:
    content = comparison([0.9, 0.91, 0.92])
    seen, text = read(content), markdown(content)
    means, pairs, _ = seen.tables
    rows = [line[2:-2].replace("**", "").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert means == [row for row in rows if len(row) == 6 and row[0] != "---"]
    assert pairs[1:] == pair_rows(content)
    assert all(row in rows for row in pairs)
    shown = " ".join([*seen.texts("p"), *seen.texts("li"), *(" ".join(row) for table in seen.tables for row in table)])
    assert set(NUMBER.findall(shown)) == set(NUMBER.findall(text))
    assert seen.texts("strong") == ["0.8000", "0.9100"]
    (image,) = (attributes for name, attributes in seen.elements if name == "img")
    assert (image["width"], image["height"]) == ("1000", "500")


def test_the_verdict_is_of_the_largest_budget(read: Any) -> None:
    content = comparison([0.9, 0.91, 0.92])
    said = verdict(content)
    assert said.startswith(
        "net on toy: accuracy (higher is better), 60 queries, mean over 3 seeds. MetricOpt: 0.5000 → "
    )
    assert "0.5000 → 0.9100 on test and 0.4500 → 0.9200 on validation. The guard accepted a change in 2 of 3" in said
    assert "The gain on test, with its 95% interval, is +0.4100 [+0.3852, +0.4348], significant at 5%." in said
    assert said.endswith("The best method on test is MetricOpt with 0.9100.")
    assert read(content).texts("p")[0] == said
    assert f"\n\n{said}\n\n" in markdown(content)


def test_a_baseline_that_is_better_is_in_the_verdict() -> None:
    said = verdict(comparison([0.6, 0.65, 0.82]))
    assert "The best method on test is CMA-ES on the metric with 0.7000; MetricOpt's gain over it is -0.0100 [" in said
    assert said.endswith(", not significant at 5%.")
    lower = verdict(comparison([0.6, 0.65, 0.82], maximize=False))
    assert "a loss" not in lower
    assert "The best method on test is pretrained with 0.5000" in lower


def test_without_ours_the_best_stands_beside_the_model_as_it_was(read: Any) -> None:
    methods = {"cma_es": comparison([0.9] * 3)["methods"]["cma_es"]}
    content = comparison([0.9] * 3, methods=methods, guards=[])
    assert verdict(content).endswith("with 0.7000; the model as it was has 0.5000.")
    assert read(content).texts("h2") == [
        *("Methods", "Plots", "Quality of f", "Queries", "Settings", "Environment"),
        "What to do next",
    ]


def test_the_commands_go_on_and_are_quoted(read: Any) -> None:
    settings, commands = read(comparison([0.9] * 3)).texts("code")
    assert "x='<script>'" in settings
    assert "tools/compare.py --config-file FILE --output-dir FOLDER --seeds 703-705\n" in commands
    tuned = "python tools/finetune_classifier.py --config-file 'a b.yaml' --output-dir OUT queries=60 "
    assert commands.splitlines()[-1] == tuned + "'x='\"'\"'<script>'\"'\"''"
    assert "finetune" not in read(comparison([0.9] * 3, config={})).texts("code")[1]
