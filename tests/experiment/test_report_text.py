"""A run's report as it is laid out: the tables in Markdown and on the terminal."""

import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from metricopt_ext.experiment.method import METHODS
from metricopt_ext.experiment.plots import plot_methods
from metricopt_ext.experiment.report import Report
from metricopt_ext.experiment.report_text import markdown, print_report, write
from metricopt_ext.experiment.seeds import paired_interval, spread


@pytest.mark.parametrize("maximize", [True, False])
def test_the_markdown_table_has_a_row_per_method(report: Callable[..., Report], maximize: bool, tmp_path: Path) -> None:
    made = report(maximize=maximize)
    write(made, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert text == markdown(made)
    assert text.startswith(f"# classification/toy: accuracy ({'higher' if maximize else 'lower'} is better)\n")
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    header, rule, *rows = table[: len(METHODS) + 2]
    assert header[:4] == ["method", "validation", "test", "queries"]
    assert len(rule) == len(header) == 7
    assert [row[0] for row in rows] == [entry.title for entry in METHODS.values()]
    for name, row in zip(METHODS, rows, strict=True):
        for part, cell in (("validation", row[1]), ("test", row[2])):
            values = made.values(name, part)
            assert cell == f"{statistics.mean(values):.4f} ±{statistics.stdev(values):.4f}"
        assert row[3] == str(10 * list(METHODS).index(name))
        assert row[4] == str(list(METHODS).index(name))
        assert row[6] == METHODS[name].needs
    assert "Computed on A processor (AVX2, 1 thread). Training amplifies rounding, so other processors" in text


def test_methods_that_did_not_run_are_left_out(report: Callable[..., Report]) -> None:
    made = report()
    for record in made.records:
        del record.outcomes["batchnorm_validation"]
    assert made.methods == [name for name in METHODS if name != "batchnorm_validation"]
    assert METHODS["batchnorm_validation"].title not in markdown(made)


def test_a_method_that_some_seeds_lack_is_shown_as_such(report: Callable[..., Report], tmp_path: Path) -> None:
    made = report()
    del made.records[1].outcomes["cma_es"]
    ours = made.values("metricopt", "test")
    theirs = [record.outcomes["cma_es"][-1].test for record in (made.records[0], made.records[2])]
    assert made.values("cma_es", "test") == theirs
    assert made.gain("cma_es") == paired_interval([ours[0] - theirs[0], ours[2] - theirs[1]])
    assert made.title("cma_es") == "CMA-ES on the metric (2 of 3 seeds)"
    assert made.title("metricopt") == "MetricOpt"
    assert made.to_json()["methods"]["cma_es"]["test"] == [theirs[0], None, theirs[1]]
    assert f"| CMA-ES on the metric (2 of 3 seeds) | {spread(made.values('cma_es', 'validation'))} |" in markdown(made)
    assert any("against CMA-ES on the metric (2 of 3 seeds): " in line for line in made.findings())
    assert plot_methods(made, tmp_path / "methods.png").stat().st_size > 1000


@pytest.mark.parametrize("columns", ["80", "40"])
def test_the_table_never_cuts_a_number(
    report: Callable[..., Report], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    made = report()
    del made.records[1].outcomes["cma_es"]  # its title becomes long
    print_report(made)
    shown = capsys.readouterr().out
    for name in made.methods:
        assert spread(made.values(name, "validation")) in shown
        assert spread(made.values(name, "test")) in shown
    assert "per start" in shown


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_the_table_fits_into_80_columns(
    report: Callable[..., Report], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, scale: float
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    made = report({name: [scale * (0.5 + i / 20) * f for f in (1, 1.2, 1.4)] for i, name in enumerate(METHODS)})
    print_report(made)
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert "classification/toy: accuracy (higher is better), 3 seeds" in shown
    for name, entry in METHODS.items():
        (line,) = (line for line in shown.splitlines() if line.startswith(f"{entry.title} ") and "±" in line)
        assert len(line) <= 80
        assert line.count("±") == 2
        assert spread(made.values(name, "test")) in line
        assert spread(made.values(name, "validation")) in line
        assert line.split()[-2:] == [str(10 * list(METHODS).index(name)), str(list(METHODS).index(name))]
    gains = [line.split(": ")[0].removeprefix("MetricOpt against ") for line in made.findings()[:-4]]
    assert len(gains) == len(METHODS) - 1
    for title in gains:
        mean, low, high = made.gain(next(name for name in METHODS if METHODS[name].title == title))
        (line,) = (line for line in shown.splitlines() if line.startswith(f"{title} ") and "±" not in line)
        assert line.split()[-5:-2] == [f"{mean:+.4f}", f"[{low:+.4f},", f"{high:+.4f}]"]
        assert line.endswith(("a gain", "a loss"))
    assert all(len(line) <= 80 for line in shown.splitlines())
    sentences = " ".join(shown.split())
    for line in made.findings()[-2:]:
        assert line in sentences
    assert "Mean ± standard deviation over 3 seeds" in sentences
    assert "positive is better" in sentences


def test_batch_queries_have_a_column_if_there_are_any(report: Callable[..., Report]) -> None:
    made = report()
    assert "batch queries" not in markdown(made)
    assert made.to_json()["methods"]["sl_s"]["batch_queries"] == 0
    for record in made.records:
        record.outcomes["sl_s"] = [replace(outcome, batch_queries=4321) for outcome in record.outcomes["sl_s"]]
    assert made.to_json()["methods"]["sl_s"]["batch_queries"] == 4321
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown(made).splitlines()]
    header = next(row for row in table if row[0] == "method")
    asked = {row[0]: row[header.index("batch queries")] for row in table if len(row) == len(header)}
    assert header.index("batch queries") == header.index("seconds") - 1
    assert (asked["SL, surrogate from scratch"], asked["MetricOpt"]) == ("4321", "0")
    assert "- batch queries: further evaluations of the metric, on batches of scores and labels." in markdown(made)
