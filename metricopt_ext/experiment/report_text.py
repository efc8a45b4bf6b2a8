"""A run's report in Markdown and on the terminal, and its files."""

from pathlib import Path

from metricopt_ext.data.reading import HEADER as COLUMNS
from metricopt_ext.experiment.report import IN_USE, Report
from metricopt_ext.experiment.style import markdown_table, print_points, print_table
from metricopt_ext.plain import in_markdown
from metricopt_ext.utils.files import write_atomically, write_json
from metricopt_ext.utils.words import counted

GAINS = "MetricOpt's gains on test, paired by seed; positive is better"
ELSEWHERE = "What it cost elsewhere: pretrained model → what the guard kept"
QUANTITIES = ["quantity", "validation", "test", "subject to"]
OVER = ["against", "gain", "95% interval", "verdict"]
# What the terminal does not show.
MORE_NOTES = (
    "seconds: wall-clock time, mean over seeds; for a method that was interrupted, the time since it was resumed.",
    "needs: what a method uses of the validation data: the metric's scores alone, the inputs, or the labels too.",
    "needs can also be the batch metric (the metric of any scores and labels, evaluated on training batches).",
)
SPENT = "MetricOpt's queries by purpose"
GUARD_AND_F = "The guard and the value function f (means over seeds)"
PREDICTED = "How well f predicts the metric at points not used in its fit"
PREDICTORS = ["predictor", "Spearman", "mean absolute error"]
UNITS = "Spearman's rank correlation is 1 for a perfect order and 0 for none. Errors are in the metric's own unit."


def write(report: Report, folder: str | Path) -> list[Path]:
    """Write report.json and report.md; returns their paths."""
    paths = [Path(folder, "report.json"), Path(folder, "report.md")]
    write_json(paths[0], report.to_json())
    write_atomically(paths[1], markdown(report).encode())
    return paths


def markdown(report: Report) -> str:
    """Return the content of report.md."""
    lines = [
        f"# {in_markdown(report.heading)}",
        "",
        in_markdown(report.verdict()),
        "",
        *markdown_table(*report.table()),
        "",
        *(f"- {in_markdown(line)}" for line in (*report.notes(), *MORE_NOTES)),
        "",
        f"{GAINS}:",
        "",
        *(f"- {in_markdown(line)}" for line in report.on_gains()),
        "",
        *_elsewhere_in_markdown(report),
        f"{GUARD_AND_F}:",
        "",
        *(f"- {in_markdown(line)}" for line in (*report.on_outcomes(), *report.on_guard(), *report.on_f())),
        "",
        f"{SPENT}:",
        "",
        *markdown_table(*report.spent()),
        "",
        f"{in_markdown(report.evaluations())}.",
        "",
        in_markdown(report.computed_on()),
        "",
    ]
    said, columns = report.read()
    if said:
        lines += [f"{in_markdown(said)}.", "", *([*markdown_table(COLUMNS, columns), ""] if columns else [])]
    if predictors := [(f"**{name}**" if name == IN_USE else name, *row) for name, *row in report.predictors()]:
        lines += [f"{PREDICTED}:", "", *markdown_table(PREDICTORS, predictors), ""]
    return "\n".join([*lines, UNITS, ""])


def _elsewhere_in_markdown(report: Report) -> list[str]:
    rows = report.elsewhere()
    said = [f"- {in_markdown(line)}" for line in report.on_constraints()]
    return [f"{ELSEWHERE}:", "", *markdown_table(QUANTITIES, rows), "", *said, *([""] if said else [])] if rows else []


def print_report(report: Report) -> None:
    """Print the tables and the findings."""
    header, rows = report.table()
    print_table(
        header[:-2],  # seconds would not fit into 80 columns; report.md has them
        [row[:-2] for row in rows],
        title=f"{report.heading}, {counted(len(report.records), 'seed')}",
        bold=[i for i, name in enumerate(report.methods) if name == "metricopt"],
    )
    print()
    print_points(report.notes())
    print()
    said, columns = report.read()
    if said:
        print_points([f"{said}."])
        print()
    if columns:
        print_table(COLUMNS, columns, left=len(COLUMNS))
        print()
    print_table(OVER, report.gains(), title=GAINS)
    print()
    if elsewhere := report.elsewhere():
        print_table(QUANTITIES, elsewhere, title=ELSEWHERE)
        print()
    print_points(
        [*report.on_outcomes(), *report.on_constraints(), *report.on_guard(), *report.on_f(), report.evaluations()]
    )
