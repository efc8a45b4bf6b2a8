"""A comparison as a page to hand on: what comparison.md says, its picture, and what to do with the outcome."""

import shlex
from pathlib import Path
from typing import Any

from metricopt_ext.comparison.claims import OURS, guard_blocks
from metricopt_ext.comparison.comparison_plot import PICTURE
from metricopt_ext.comparison.comparison_report import COLUMN_NOTES, computed_on, heading, notes, verdict
from metricopt_ext.comparison.comparison_tables import PAIRED, PAIRS, means_table, pair_rows
from metricopt_ext.experiment.method import METHODS
from metricopt_ext.experiment.page import Code, Figure, Page, Part, Points, Section, Table, Text
from metricopt_ext.experiment.report_page import TERMS, environment, settings

QUERIES = (
    "A column's heading is the number of queries that a method may spend, including those that choose its start. The"
    " seconds and passes of its largest budget are in the table of methods."
)
QUALITY = (
    "A comparison keeps no f. To see how well f predicts, and whether to trust it, run the finetune tool (last section)"
    " and read its report."
)


def comparison_page(content: dict[str, Any], folder: Path) -> Page:
    """Return a comparison as a page; its numbers are those of comparison.md.

    Args:
        content: What comparison.json holds.
        folder: The comparison's folder, with its picture.
    """
    said, header, rows = means_table(content)
    cells = [[row.title, row.needs, *row.cells(), row.seconds, row.passes] for row in rows]
    best = {(i, 2 + column) for i, row in enumerate(rows) for column, top in enumerate(row.best) if top}
    ours = [i for i, row in enumerate(rows) if row.title == METHODS[OURS].title]
    methods = Table(f"{said}. Marked: best in its column.", header, cells, best, ours, {0, 1})
    pairs = [Section("Differences", [Table(PAIRED, PAIRS, pair_rows(content))])] if content["pairs"] else []
    about = Figure(
        folder / PICTURE,
        "Plot: each method's mean metric on test against metric queries, left, and seconds, right; the means are in the"
        " table above.",
        "The metric on test against metric queries and seconds; bands: standard error over seeds.",
    )
    guard = [part for title, lines in guard_blocks(content["guards"]) for part in (Text(f"{title}:"), Points(lines))]
    return Page(
        heading(content),
        verdict(content),
        [
            Section("Methods", [Text(TERMS), methods, Points([*notes(content), *COLUMN_NOTES])]),
            Section("Plots", [about]),
            *pairs,
            *([Section("The guard", guard)] if content["guards"] else []),
            Section("Quality of f", [Text(QUALITY)]),
            Section("Queries", [Text(QUERIES)]),
            settings(content["config"]),
            environment(computed_on(content), content["versions"]),
            Section("What to do next", _next_steps(content)),
        ],
    )


def _next_steps(content: dict[str, Any]) -> list[Part]:
    lines = ["# More seeds: in the same folder, or in another one, e.g. on another machine, to join afterwards."]
    lines.append(f"python tools/compare.py --config-file FILE --output-dir FOLDER --seeds {_further(content['seeds'])}")
    lines.append("python tools/compare.py --join FOLDER OTHER --output-dir ALL")
    config = content["config"]
    if config.get("config"):
        tool = {"classification": "classifier", "detection": "detector"}.get(config["task"], config["task"])
        given = [config["config"], "--output-dir", "OUT", f"queries={content['budgets'][-1]}", *config["overrides"]]
        lines += ["", "# MetricOpt alone, with a tuned model, an adapter and f to keep."]
        lines.append(f"python tools/finetune_{tool}.py --config-file {shlex.join(given)}")
    return [
        Text("A comparison keeps no tuned model. Replace the words in capitals."),
        Code("Commands", "\n".join(lines)),
    ]


def _further(seeds: list[int]) -> str:
    return f"{seeds[-1] + 1}-{seeds[-1] + len(seeds)}"
