"""Put several runs of the finetune tools into one page: every method's test metric beside what it cost.

    python benchmarks/tabulate_runs.py out/a9a_mcr out/a9a_f1 out/omniglot --output-dir out

Reads each folder's report.json. A run's table has a row for each method: mean and standard deviation of the test
metric over seeds; the paired difference from the best of the other methods with its 95% interval, positive if this one
is better; queries of the metric, evaluations of it on batches, and seconds. Writes table.md, or prints it alone.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

from metricopt_ext.comparison.claims import shown
from metricopt_ext.errors import FileFormatError
from metricopt_ext.experiment.command import errors_in_one_line
from metricopt_ext.experiment.method import METHODS
from metricopt_ext.experiment.seeds import paired_interval, spread
from metricopt_ext.experiment.style import direction, markdown_table
from metricopt_ext.plain import in_markdown
from metricopt_ext.utils.described import Finite, read_shaped
from metricopt_ext.utils.files import content_of, write_atomically
from metricopt_ext.utils.words import brief, counted


class MetricName(TypedDict):
    """A metric, and whether higher is better."""

    name: str
    maximize: bool


class MethodNumbers(TypedDict):
    """What report.json has of a method: its test metric by seed, None where a seed lacks it, and what it cost."""

    test: list[Finite | None]
    queries_total: int
    batch_queries: NotRequired[int | None]
    seconds: Finite | None


class ReportFile(TypedDict):
    """What is read of report.json."""

    task: str
    metric: MetricName
    seeds: list[int]
    methods: dict[str, MethodNumbers]


HEADER = ["method", "test", "against the best other", "queries", "batch queries", "seconds"]


def main() -> None:
    """Parse the command line and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="FOLDER", help="output folder of a finetune tool")
    parser.add_argument("--output-dir", type=Path, help="receives table.md")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), help="leave out all others")
    arguments = parser.parse_args()
    with errors_in_one_line():
        page = tabulate(arguments.runs, arguments.methods)
        print(page)
        if arguments.output_dir is not None:
            write_atomically(arguments.output_dir / "table.md", page.encode())


def tabulate(runs: Sequence[Path], methods: Sequence[str] | None = None) -> str:
    """Return the page, in Markdown.

    Args:
        runs: Folders of finished runs.
        methods: The methods to show; all if None.

    Raises:
        FileFormatError: A folder holds no report.
    """
    sections = []
    for run in runs:
        content = load(run)
        with content_of(run / "report.json", "report of a finetune tool"):
            sections.append(section(run.resolve().name, content, methods))
    return "\n".join(sections)


def load(run: Path) -> dict[str, Any]:
    """Read a run's report.json.

    Raises:
        FileFormatError: It is missing or holds something else.
    """
    file = run / "report.json"
    if not file.exists():
        raise FileFormatError(f"{file} does not exist; run a finetune tool into {run} first")
    return read_shaped(file, ReportFile, "a report of a finetune tool")


def section(run: str, content: dict[str, Any], methods: Sequence[str] | None = None) -> str:
    """Return a run's table under its heading.

    Args:
        run: What to call it.
        content: What its report.json holds.
        methods: The methods to show; all if None.
    """
    for name, own in content["methods"].items():
        if name not in METHODS or len(own["test"]) != len(content["seeds"]) or not present(own["test"]):
            raise ValueError(f"{brief(name)} is no method, or has other than a value for each seed")
    metric, sign = content["metric"], 1 if content["metric"]["maximize"] else -1
    known = {name: own for name, own in content["methods"].items() if methods is None or name in methods}
    means = {name: sign * float(np.mean(present(own["test"]))) for name, own in known.items()}
    best, rows = max(means, key=means.__getitem__, default=None), []
    for name, own in known.items():
        others = {other: mean for other, mean in means.items() if other != name}
        against = ""
        if others:
            baseline = max(others, key=others.__getitem__)
            pairs = zip(own["test"], known[baseline]["test"], strict=True)
            gains = [sign * (a - b) for a, b in pairs if a is not None and b is not None]
            against = f"{shown(paired_interval(gains))} {METHODS[baseline].title}" if gains else ""
        value = spread(present(own["test"]))
        rows.append(
            [
                METHODS[name].title,
                f"**{value}**" if name == best else value,
                against,
                str(own["queries_total"]),
                str(own.get("batch_queries") or ""),
                f"{own['seconds']:.0f}" if own["seconds"] else "",
            ]
        )
    title = f"## {run}: {content['task']}, {metric['name']} ({direction(metric['maximize'])})"
    return "\n".join(
        [in_markdown(title), "", f"{counted(len(content['seeds']), 'seed')}.", "", *markdown_table(HEADER, rows), ""]
    )


def present(values: Sequence[float | None]) -> list[float]:
    """Return the values of the seeds that have one."""
    return [value for value in values if value is not None]


if __name__ == "__main__":
    main()
