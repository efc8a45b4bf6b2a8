"""What is stated about a run: numbers against numpy and definitions, words against the intervals they name."""

import json
import math
import re
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from metricopt_ext.experiment.method import METHODS
from metricopt_ext.experiment.plots import plot_outcomes
from metricopt_ext.experiment.report import Report
from metricopt_ext.experiment.report_text import markdown, write

ROOT = Path(__file__).resolve().parents[2]


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def test_report_json(report: Callable[..., Report], tmp_path: Path) -> None:
    made = report()
    assert write(made, tmp_path) == [tmp_path / "report.json", tmp_path / "report.md"]
    content = json.loads((tmp_path / "report.json").read_text(), parse_constant=refuse)
    assert content["task"] == "classification/toy"
    assert content["metric"] == {"name": "accuracy", "maximize": True}
    assert content["seeds"] == [4, 5, 6]
    assert list(content["methods"]) == list(METHODS)
    for column, (name, method) in enumerate(content["methods"].items()):
        numbers = {"queries_total", "queries_per_start", "seconds", "batch_queries"}
        assert set(method) == {"validation", "test", *numbers}
        assert method["validation"] == [record.outcomes[name][-1].validation for record in made.records]
        assert method["test"] == [record.outcomes[name][-1].test for record in made.records]
        assert (method["queries_total"], method["queries_per_start"]) == (10 * column, column)
        assert method["seconds"] == pytest.approx(1 + column)
    f = content["value_function"]
    assert f["heldout_spearman"] == pytest.approx((0.1 + 0.9 + 0.9) / 3)
    assert f["heldout_mae"] == pytest.approx((0.2 + 0.01 + 0.01) / 3)
    assert f["constant_mae"] == pytest.approx(0.1)
    assert f["trusted"] == [False, True, True]
    assert [quality["spearman"] for quality in f["per_seed"]] == [0.1, 0.9, 0.9]
    assert content["kept"] == ["start", "metricopt", "metricopt"]
    machine = {"processor": "A processor", "capability": "AVX2", "threads": 1, "device": "cpu"}
    assert content["machines"] == [machine] * 3
    assert content["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert content["queries"] == [{}] * 3
    assert content["config"] == {"queries": 600, "guard": {"confidence": 0.84}}


def test_the_page_explains_each_key_of_report_json(report: Callable[..., Report]) -> None:
    page = (ROOT / "docs/report.md").read_text().partition("## report.json")[2]
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", "".join(rows))) == sorted(report().to_json())


@pytest.mark.parametrize("maximize", [True, False])
def test_a_gain_is_positive_where_metricopt_is_better(report: Callable[..., Report], maximize: bool) -> None:
    tests = {"pretrained": [0.5, 0.6, 0.7], "metricopt": [0.6, 0.8, 0.9]}
    mean, low, high = report(tests, maximize=maximize).gain("pretrained")
    sign = 1 if maximize else -1
    assert mean == pytest.approx(sign * 0.5 / 3)
    assert (low > 0, high < 0) == (maximize, not maximize)
    made = report(tests, maximize=maximize)
    ours, theirs = (np.array(made.values(name, "validation")) for name in ("metricopt", "pretrained"))
    assert made.gain("pretrained", "validation")[0] == pytest.approx(sign * float((ours - theirs).mean()))


@pytest.mark.parametrize("maximize", [True, False])
@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.1, 0.12, 0.11], "a gain"),
        ([-0.1, -0.12, -0.11], "a loss"),
        ([0.2, 0.1, -0.02], "no gain shown"),
        ([0.0, 0.0, 0.0], "no gain shown"),
    ],
)
def test_words_follow_the_interval(
    report: Callable[..., Report], differences: list[float], verdict: str, maximize: bool
) -> None:
    sign = 1 if maximize else -1
    tests = {"pretrained": [0.5] * 3, "metricopt": [0.5 + sign * difference for difference in differences]}
    made = report(tests, maximize=maximize)
    (line,) = (line for line in made.findings() if "against pretrained:" in line)
    mean, half = statistics.mean(differences), 4.302652729911275 * statistics.stdev(differences) / math.sqrt(3)
    assert line.endswith(f": {verdict}")
    assert f"95% interval [{mean - half:+.4f}, {mean + half:+.4f}]" in line.replace("-0.0000", "+0.0000")
    assert f"- {line}" in markdown(made)


def test_a_start_without_a_verdict_is_named(report: Callable[..., Report]) -> None:
    made = report(seeds=3)
    assert not any("verdict" in line for line in made.on_guard())
    records = [replace(each, against="whitening", settings={"whitening": (0.0, 0.5)}) for each in made.records[:2]]
    (line,) = (line for line in replace(made, records=[*records, made.records[2]]).on_guard() if "no verdict" in line)
    assert "2 of 3 seeds whitened embeddings" in line


# --- What the metric is made of ------------------------------------------------------------------------------------


@pytest.mark.parametrize("maximize", [True, False])
def test_outcomes_stand_in_the_report_and_in_a_picture(
    maximize: bool, report: Callable[..., Report], tmp_path: Path
) -> None:
    made = report(seeds=2, maximize=maximize)
    assert made.to_json()["outcomes"] == {}
    assert made.on_outcomes() == []
    records = [replace(made.records[0], made_of={"b": (0.5, 0.75), "a": (0.25, 0.5)}, promised=0.375)]
    records.append(replace(made.records[1], made_of={"b": (0.3, None), "c": (0.4, None)}))  # none was asked for its end
    made = replace(made, records=records)
    assert made.to_json()["outcomes"] == {
        "b": {"before": [0.5, 0.3], "after": [0.75, None]},
        "a": {"before": [0.25, None], "after": [0.5, None]},
        "c": {"before": [None, 0.4], "after": [None, None]},
    }
    first, second = made.on_outcomes()
    worst = ("4", "'a' 0.2500", "'a' 0.5000") if maximize else ("4", "'b' 0.5000", "'b' 0.7500")
    assert all(each in first for each in (*worst, "38%"))
    assert "%" not in second
    assert ("'b' 0.3000" if maximize else "'c' 0.4000") in second
    assert "after" not in second
    assert first in markdown(made).replace("\\", "")
    assert plot_outcomes(made, tmp_path / "outcomes.png").stat().st_size > 1000


# --- What it cost elsewhere ----------------------------------------------------------------------------------------


def elsewhere(made: Report, holding: list[int | None]) -> Report:
    """Give each record another quantity, and the number of points that satisfy the constraints."""
    records = [
        replace(
            record,
            also={"recall[a]": {"validation": (0.5, 0.6 + row / 10), "test": (0.4, 0.3)}, "ece": ECE},
            holding=holding[row],
        )
        for row, record in enumerate(made.records)
    ]
    bounds = {} if holding[0] is None else {"recall[a]": ">= start"}
    return replace(made, records=records, config={**made.config, "metric": {"subject_to": bounds}})


ECE = {"validation": (0.02, 0.04), "test": (0.03, 0.05)}


def test_other_quantities_stand_beside_the_gain(report: Callable[..., Report]) -> None:
    made = elsewhere(report(), [None, None, None])
    content = made.to_json()
    assert content["also"]["recall[a]"] == {
        "validation": {"before": [0.5] * 3, "after": [0.6, 0.7, 0.8]},
        "test": {"before": [0.4] * 3, "after": [0.3] * 3},
    }
    assert content["holding"] == [None] * 3
    assert made.on_constraints() == []
