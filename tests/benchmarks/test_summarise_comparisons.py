"""The page on several comparisons: what it states, and that the committed one is that of the committed numbers."""

import subprocess
import sys
from pathlib import Path

import numpy as np

import summarise_comparisons as tool
from helpers.comparisons import OURS, compared

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def test_a_summary_states_gains_and_losses() -> None:
    better = {"60": [0.951, 0.952, 0.953], "150": [0.991, 0.992, 0.9935]}
    page = tool.summary({"first": compared(metricopt=OURS, noisy_ei=better), "second": compared(metricopt=OURS)})
    assert "# MetricOpt over 2 tasks" in page
    difference = np.array([0.8, 0.9, 0.7]) - better["150"]
    row = next(line for line in page.splitlines() if line.startswith("| first | +0.3000"))
    assert f"| {difference.mean():+.4f} [" in row
    # Of each task the two constant differences, at 60 and at 150 queries, are clear, and the first's noisy EI at 150.
    assert "Holm's correction over all 14 comparisons, at 5%." in page
    assert "| first | 8 | 2 | 1 |" in page
    assert "| second | 6 | 2 | 0 |" in page
    assert "- first, 150 queries: -0.0922 [" in page
    assert "| first |  | yes | not BatchNorm on validation |" in page  # noisy EI is a search
    assert "| second |  | yes | not BatchNorm on validation |" in page
    assert "| at or above | 2 of 2 | 2 of 2 | 2 of 2 | 0 of 1 |" in page
    assert "- no guarded run" in page


def test_differences_are_listed_with_p_values_that_are_corrected_over_all_tasks() -> None:
    better = {"60": [0.951, 0.952, 0.953], "150": [0.991, 0.992, 0.9935]}
    contents = {"first": compared(metricopt=OURS, noisy_ei=better), "second": compared(metricopt=OURS)}
    plain = tool.summary(contents).splitlines()
    rows = [line for line in tool.summary(contents, differences=True).splitlines() if line not in plain]
    rows = [line for line in rows if line.startswith(("| first |", "| second |"))]
    assert len(rows) == 14
    (row,) = [line for line in rows if "BoTorch" in line and "| 150 |" in line]
    pairs = [each for content in contents.values() for each in tool.all_pairs(content)]
    place = next(at for at, each in enumerate(pairs) if (each.baseline, each.budget) == ("noisy_ei", 150))
    assert row.endswith(f"| {tool.holm([each.p for each in pairs])[place]:.3g} |")


def test_the_committed_page_is_that_of_the_committed_numbers(tmp_path: Path) -> None:
    page = (RESULTS / "comparison.md").read_text()
    files = sorted((RESULTS / "comparison").glob("*.json"), key=lambda path: page.index(f"\n## {path.stem}\n"))
    assert len(files) == 13
    command = [sys.executable, tool.__file__, *map(str, files), "--output-dir", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    rows = [line for line in (tmp_path / "summary.md").read_text().splitlines() if line.startswith(("|", "- "))]
    assert len(rows) > 200
    assert [row for row in rows if row not in page] == []
