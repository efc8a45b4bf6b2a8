"""The tables of a comparison, cell by cell; see tests/comparison/test_comparison_report.py for whole ones."""

from typing import Any

from metricopt_ext.comparison.comparison_tables import Row, pair_rows


def test_the_best_of_a_column_is_marked_and_failures_stand_beside() -> None:
    row = Row("a", "scores", ["", "0.5000", "0.6000"], [False, True, False], ["(2 of 2 failed)", "", "(1 of 2 failed)"])
    assert row.cells("*{}".format) == ["(2 of 2 failed)", "*0.5000", "0.6000 (1 of 2 failed)"]


def test_a_pair_without_an_interval_leaves_its_cells_empty() -> None:
    cells = {"60": {"seconds": [1.0, 2.0, None]}}
    known = {"baseline": "cma_es", "budget": 60, "mean": -0.1, "low": -0.25, "high": 0.05, "wins": 1, "losses": 2}
    unknown = {**known, "baseline": "pretrained", "low": None, "high": None}
    content: dict[str, Any] = {
        "starts": {"pretrained": {}},
        "methods": {"metricopt": {"cells": cells}, "cma_es": {"cells": cells}},
        "pairs": [{**known, "p": 0.0004, "p_holm": 0.0123}, {**unknown, "p": None, "p_holm": None}],
    }
    interval = ["-0.1000", "[-0.2500, +0.0500]", "1", "2"]
    first, second = (row[1:] for row in pair_rows(content))
    assert first == ["60", *interval, "<0.001", "0.012", "1.5 / 1.5"]
    assert second == ["60", "-0.1000", "", "1", "2", "", "", "1.5 / 0"]
