"""Put several comparisons into one page: what they show together, and the table of each.

    python benchmarks/summarise_comparisons.py out/digits_shifted out/a9a_f1 --output-dir out
    python benchmarks/summarise_comparisons.py benchmarks/results/comparison/*.json

Reads what tools/compare.py left in each folder, or its comparison.json by any name. The page has MetricOpt with few
queries against each baseline with many, all comparisons at equal queries under one correction by Holm, and what the
guards did. Writes summary.md, or prints it alone.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from metricopt_ext.comparison.claims import OURS, all_pairs, baselines_of, entry_of, guard_blocks, holm, pair, shown
from metricopt_ext.comparison.comparison_content import load
from metricopt_ext.comparison.comparison_report import heading, means_in_markdown
from metricopt_ext.experiment.command import errors_in_one_line
from metricopt_ext.experiment.method import METHODS, Entry
from metricopt_ext.experiment.style import markdown_table
from metricopt_ext.plain import in_markdown
from metricopt_ext.utils.files import content_of, write_atomically
from metricopt_ext.utils.words import counted

FEW, MANY = 60, 150
LEVEL = 0.05

# Baselines that search as ours does; the others set a threshold or offsets, follow a loss, or are free.
SEARCHES = (
    *(name for name, entry in METHODS.items() if entry.factory and not entry.trains and name != "metricopt"),
    "turbo",
)


def main() -> None:
    """Parse the command line and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparisons", type=Path, nargs="+", metavar="FOLDER", help="output folder of tools/compare.py")
    parser.add_argument("--output-dir", type=Path, help="receives summary.md")
    parser.add_argument("--differences", action="store_true", help="list every difference at equal queries too")
    arguments = parser.parse_args()
    with errors_in_one_line():
        summarise(arguments.comparisons, arguments.output_dir, differences=arguments.differences)


def summarise(folders: Sequence[Path], output: Path | None = None, *, differences: bool = False) -> str:
    """Print what several comparisons show together, and their tables; write it to summary.md if there is a folder.

    Args:
        folders: Output folders of `tools/compare.py`, or files of their content.
        output: Receives summary.md.
        differences: Whether every difference at equal queries is listed.

    Returns:
        The page, in Markdown.

    Raises:
        FileFormatError: A folder holds no comparison.
    """
    names = [folder.stem if folder.is_file() else folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = list(map(str, folders))
    contents = {name: load(folder) for name, folder in zip(names, folders, strict=True)}
    with content_of(", ".join(names), "comparisons"):
        page = "\n".join(
            [
                summary(contents, differences=differences),
                *(section(name, content) for name, content in contents.items()),
            ]
        )
    print(page)
    if output is not None:
        write_atomically(output / "summary.md", page.encode())
    return page


def summary(contents: Mapping[str, Mapping[str, Any]], *, differences: bool = False) -> str:
    """Return a page in Markdown on what several comparisons show together.

    Args:
        contents: What comparison.json of each task holds, by the task's name.
        differences: See `summarise`.
    """
    ours = METHODS[OURS].title
    lines = [f"# {ours} over {counted(len(contents), 'task')}", ""]
    lines += [f"## {ours} with {FEW} queries against each baseline with {MANY}", ""]
    lines += ["Mean difference on test, positive if ours is better, and its 95% interval, paired by seed.", ""]
    lines += [*_fewer_queries(contents), "", "## At equal queries", ""]
    lines += [
        *_equal_queries(contents, differences),
        "",
        "## Above all but the searches, each 95% interval above 0",
        "",
    ]
    lines += ["Free starts, the best of them, thresholds, offsets, and finetuning on the loss or on labels.", ""]
    lines += [*_above_all_but_searches(contents), "", "## The guard", ""]
    for title, points in guard_blocks([guard for each in contents.values() for guard in each["guards"]]):
        lines += [f"{title}:", "", *(f"- {point}" for point in points), ""]
    return "\n".join(lines)


def _fewer_queries(contents: Mapping[str, Mapping[str, Any]]) -> list[str]:
    baselines = list(dict.fromkeys(baseline for content in contents.values() for baseline in baselines_of(content)))
    rows, means = [], []
    for name, content in contents.items():
        pairs = [pair(content, baseline, MANY, FEW) for baseline in baselines]
        means.append([None if each is None else each.interval.mean for each in pairs])
        rows.append([name, *("" if each is None else shown(each.interval) for each in pairs)])
    known = [[mean for mean in column if mean is not None] for column in zip(*means, strict=True)]
    rows.append(["at or above", *(f"{sum(mean >= 0 for mean in column)} of {len(column)}" for column in known)])
    return markdown_table(["task", *(entry_of(baseline).title for baseline in baselines)], rows)


def _equal_queries(contents: Mapping[str, Mapping[str, Any]], differences: bool) -> list[str]:
    pairs = [(name, each) for name, content in contents.items() for each in all_pairs(content)]
    corrected = list(zip(pairs, holm([each.p for _, each in pairs]), strict=True))
    rows, below = [], []
    for task in contents:
        own = [(each, p) for (name, each), p in corrected if name == task]
        clear = [each for each, p in own if p < LEVEL]
        worse = [each for each in clear if each.interval.mean < 0]
        rows.append([task, str(len(own)), str(len(clear) - len(worse)), str(len(worse))])
        below += [
            in_markdown(
                f"- {task}, {each.budget} queries: {shown(each.interval)} below {entry_of(each.baseline).title}"
            )
            for each in worse
        ]
    table = markdown_table(["task", "comparisons", "above", "below"], rows)
    said = f"Holm's correction over all {len(pairs)} comparisons, at {LEVEL:.0%}."
    cells = [
        [task, entry_of(each.baseline).title, str(each.budget), shown(each.interval), f"{p:.3g}"]
        for (task, each), p in corrected
    ]
    listed = ["", *markdown_table(["task", "against", "queries", "difference", "p, Holm"], cells)]
    return [said, "", *table, *(["", *below] if below else []), *(listed if differences else [])]


def _above_all_but_searches(contents: Mapping[str, Mapping[str, Any]]) -> list[str]:
    budgets = sorted({budget for content in contents.values() for budget in content["budgets"]})
    rows = []
    for name, content in contents.items():
        baselines = [baseline for baseline in baselines_of(content) if baseline not in SEARCHES]
        row = [name]
        for budget in budgets:
            found = [pair(content, baseline, budget) for baseline in baselines] if budget in content["budgets"] else []
            pairs = [each for each in found if each is not None]
            others = [entry_of(each.baseline).title for each in pairs if not each.interval.low > 0]
            missed = ", ".join(others) if len(others) <= 3 else f"{len(others)} of {len(pairs)}"
            row.append("" if not pairs else f"not {missed}" if others else "yes")
        rows.append(row)
    return markdown_table(["task", *map(str, budgets)], rows)


def section(name: str, content: dict[str, Any]) -> str:
    """Return a comparison's table in Markdown under a heading, for a page of several."""
    lines = [f"## {in_markdown(name)}", "", f"{in_markdown(heading(content))}.", ""]
    return "\n".join([*lines, *means_in_markdown(content), ""])


if __name__ == "__main__":
    # The comparisons in results/comparison have it, and nothing runs it any more.
    METHODS["turbo"] = Entry("TuRBO on the metric", "#8fbf8f", "queries")
    main()
