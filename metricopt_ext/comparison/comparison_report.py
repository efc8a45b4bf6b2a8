"""A comparison's report: the test metric by method and budget, our method against each other, and curves."""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

from metricopt_ext.comparison.claims import (
    OURS,
    all_pairs,
    baselines_of,
    entry_of,
    guard_blocks,
    holm,
    pair,
    shown,
    tests,
)
from metricopt_ext.comparison.comparison import Plan
from metricopt_ext.comparison.comparison_file import FILE_FORMAT, STARTS, read_comparison, read_row, read_starts
from metricopt_ext.comparison.guarded import TRAINED
from metricopt_ext.errors import DataError, FileFormatError
from metricopt_ext.experiment.experiment import Subject
from metricopt_ext.experiment.method import METHODS, Needs
from metricopt_ext.experiment.seeds import chance_in_words, standard_error
from metricopt_ext.experiment.style import direction, markdown_table, new_figure, print_points, print_table, save_figure
from metricopt_ext.plain import in_markdown
from metricopt_ext.utils.files import content_of, write_atomically, write_json
from metricopt_ext.utils.versions import versions
from metricopt_ext.utils.words import counted

FILE = "comparison.json"
PICTURE = "comparison.png"
LABELLED = "whole_network_labels"
UNGUARDED = "the same, unguarded"
PAIRED = (
    "Difference on test, paired by seed; positive is better for ours. p: Student's t, two-sided; Holm: corrected for"
    " all rows. seconds: ours and theirs."
)
PAIRS = ["against", "queries", "difference", "95% interval", "wins", "losses", "p", "p, Holm", "seconds"]


def gather(folder: Path, plan: Plan, subject: Subject, config: dict[str, Any]) -> dict[str, Any]:
    """Return the content of comparison.json from all seeds in a folder, whichever run made them.

    Args:
        folder: The comparison's folder.
        plan: What it runs.
        subject: What it is about.
        config: The task's settings.

    Raises:
        DataError: There is no finished seed.
    """
    names = [path.parent.name for path in folder.glob(f"seed-*/{STARTS}")]
    seeds = sorted(int(name.removeprefix("seed-")) for name in names if re.fullmatch("seed-(0|[1-9][0-9]{0,17})", name))
    if not seeds:
        raise DataError(f"{folder} holds no seed of a comparison")
    started = [read_starts(folder / f"seed-{seed}" / STARTS) for seed in seeds]
    with content_of(folder, "comparison"):
        return _gathered(folder, plan, subject, config, seeds, started)


def _gathered(
    folder: Path, plan: Plan, subject: Subject, config: dict[str, Any], seeds: list[int], started: list[dict[str, Any]]
) -> dict[str, Any]:
    names = list(dict.fromkeys(name for each in started for name in each["test"]))
    present = [name for name in METHODS if any((folder / f"seed-{seed}" / f"{name}.json").exists() for seed in seeds)]
    rows = {name: [_row(folder / f"seed-{seed}" / f"{name}.json") for seed in seeds] for name in present}
    guards = [
        {"seed": row["seed"], "method": name, "budget": int(budget), **cell["guard"]}
        for name, own in rows.items()
        for row in own
        if row is not None
        for budget, cell in row["cells"].items()
        if cell["guard"] is not None
    ]
    machines = dict.fromkeys(row["machine"] for own in rows.values() for row in own if row is not None)
    content = {
        "format": FILE_FORMAT,
        "task": subject.task,
        "title": subject.title,
        "metric": {"name": subject.metric, "maximize": subject.maximize},
        "budgets": list(plan.budgets),
        "seeds": seeds,
        "starts": {
            name: {part: [each[part].get(name) for each in started] for part in ("validation", "test")}
            for name in names
        },
        "best_start": {
            "queries": max(each.get("queries", len(each["test"])) for each in started),
            "chosen": [each["chosen"] for each in started],
            "seconds": [each["seconds"] for each in started],
            "passes": [each.get("passes") for each in started],
            **{part: [each[part][each["chosen"]] for each in started] for part in ("validation", "test")},
        },
        "methods": {name: _method(own, plan.budgets) for name, own in rows.items()},
        "guards": guards,
        "machines": list(machines),
        "versions": versions(),
        "config": config,
    }
    if bounds := config.get("of_task", {}).get("metric", {}).get("subject_to"):
        content["subject_to"] = bounds
    return paired(content)


def paired(content: dict[str, Any]) -> dict[str, Any]:
    """Return a comparison's content with ours paired with each baseline, at each budget."""
    return content | {"pairs": _pairs(content)}


def load(path: Path) -> dict[str, Any]:
    """Read a folder's comparison.json, or such a file.

    Raises:
        FileFormatError: It is missing or holds something else.
    """
    file = path if path.is_file() else path / FILE
    if not file.exists():
        raise FileFormatError(f"{file} does not exist; run the comparison into {path} first")
    return read_comparison(file)


def write(content: dict[str, Any], folder: Path) -> list[Path]:
    """Write comparison.json, .md and .png; returns their paths."""
    paths = [folder / FILE, folder / "comparison.md", folder / PICTURE]
    write_json(paths[0], content)
    write_atomically(paths[1], markdown(content).encode())
    plot(content, paths[2])
    return paths


def markdown(content: dict[str, Any]) -> str:
    """Return the content of comparison.md."""
    lines = [
        f"# {in_markdown(heading(content))}",
        "",
        in_markdown(verdict(content)),
        "",
        *means_in_markdown(content),
        "",
        *(f"- {in_markdown(line)}" for line in notes(content)),
        "",
    ]
    if content["pairs"]:
        lines += [
            f"## {METHODS[OURS].title} against each",
            "",
            PAIRED,
            "",
            *markdown_table(PAIRS, pair_rows(content)),
            "",
        ]
    if content["guards"]:
        lines += ["## The guard", ""]
        for title, points in guard_blocks(content["guards"]):
            lines += [f"{title}:", "", *(f"- {point}" for point in points), ""]
    return "\n".join([*lines, in_markdown(computed_on(content)), ""])


def computed_on(content: dict[str, Any]) -> str:
    """Say which machines the digits are of."""
    return f"Computed on {'; '.join(content['machines'])}; other processors give other digits."


def heading(content: dict[str, Any]) -> str:
    """Return what a comparison is about."""
    metric = content["metric"]
    return f"{content['title']}: {metric['name']} ({direction(metric['maximize'])})"


def verdict(content: dict[str, Any]) -> str:
    """Say in one sentence what came out at the largest number of queries, and whether it may be chance."""
    budget, titles = content["budgets"][-1], {name: entry_of(name).title for name in (*baselines_of(content), OURS)}
    values = {name: tests(content, name, budget) for name in titles}
    means = {name: float(np.mean(_known(each))) for name, each in values.items() if each and _known(each)}
    top = (max if content["metric"]["maximize"] else min)(means, key=means.__getitem__)
    best = f"the best on test is {titles[top]} with {means[top]:.4f}"
    said = f"{heading(content)}, {counted(budget, 'query')}, mean over {counted(len(content['seeds']), 'seed')}"
    if OURS not in means:
        return f"{said}: {best}, where the model as it was has {means[TRAINED]:.4f}."
    seen = (content["starts"][TRAINED], content["methods"][OURS]["cells"][str(budget)])
    before, after = (float(np.mean(_known(each["validation"]))) for each in seen)
    on_test, on_validation = (
        f"{a:.4f} → {b:.4f} on {part}"
        for a, b, part in ((means[TRAINED], means[OURS], "test"), (before, after, "validation"))
    )
    judged = [
        each["whole"]
        for each in content["guards"]
        if (each["method"], each["budget"]) == (OURS, budget) and each.get("whole")
    ]
    guard = (
        f" the guard accepted a change in {sum(each['accepted'] for each in judged)} of {len(judged)} seeds;"
        if judged
        else ""
    )
    over = f"the gain on test (with its 95% interval), {_difference(content, TRAINED, budget)}"
    baseline = (
        f"{best}, and MetricOpt's difference from it, {_difference(content, top, budget)}"
        if top != OURS
        else f"{best} itself"
    )
    return f"{said}: MetricOpt {on_test} and {on_validation};{guard} {over}; {baseline}."


def _difference(content: dict[str, Any], baseline: str, budget: int) -> str:
    """Say by how much ours is better than a baseline, and whether that may be chance."""
    found = pair(content, baseline, budget)
    return "is unknown" if found is None else f"{shown(found.interval)}, {chance_in_words(found.interval)}"


def means_table(content: dict[str, Any]) -> tuple[str, list[str], list["Row"]]:
    """Return the table of means: what it is of, the titles of its columns, and its rows."""
    seeds, header = content["seeds"], ["method", "needs", *map(str, content["budgets"]), "seconds", "passes"]
    said = f"Mean on test over {counted(len(seeds), 'seed')} ({seeds[0]} to {seeds[-1]}), by metric queries"
    return said, header, _rows(content)


def means_in_markdown(content: dict[str, Any]) -> list[str]:
    """Return the table of means in Markdown, with what it is of."""
    said, header, rows = means_table(content)
    cells = [[row.title, row.needs, *row.cells("**{}**".format), row.seconds, row.passes] for row in rows]
    return [f"{said}; bold: the best of a column.", "", *markdown_table(header, cells)]


def print_report(content: dict[str, Any]) -> None:
    """Print the table of means, what it leaves out, and our differences."""
    metric = content["metric"]
    print_table(
        ["method", *map(str, content["budgets"])],
        [[row.title, *row.cells("*{}".format)] for row in _rows(content)],
        title=f"{content['title']}: test {metric['name']} ({direction(metric['maximize'])}),"
        f" {counted(len(content['seeds']), 'seed')}, by queries; *: best of a column",
    )
    print()
    print_points(notes(content))
    if content["pairs"]:
        print()
        print_table(PAIRS, pair_rows(content), title=f"{METHODS[OURS].title} against each, paired by seed")
    for title, points in guard_blocks(content["guards"]) if content["guards"] else ():
        print(f"\n{title}:")
        print_points(points)


def notes(content: dict[str, Any]) -> list[str]:
    """Say what the numbers count, which cells are impossible and which failed."""
    best = content["best_start"]
    often = {name: best["chosen"].count(name) for name in content["starts"]}
    chosen = ", ".join(f"{entry_of(name).title} in {count}" for name, count in often.items() if count)
    lines = [
        "every call of the metric is a query: the budget of each method that goes on from the best start includes the"
        f" {counted(best['queries'], 'query')} that choose it ({chosen})",
        "needs: of the data that the metric sees, the metric's scores alone, the inputs, or the labels too; and whether"
        " examples of the training data, whose class shares alone do not count; a method inherits the needs of its"
        " starts",
        "seconds and passes are those of a method's largest budget; passes: evaluations of the metric that ran the"
        " model, each a pass over its data, + batches whose loss was computed with its gradient, what the starts took"
        " included",
    ]
    if any(each["method"] == OURS for each in content["guards"]):
        lines.append(
            f"{UNGUARDED}: where the same search ended, kept or not; it is no baseline, nor marked as the best"
        )
    if bounds := content.get("subject_to"):
        limits = " and ".join(f"{name} {limit}" for name, limit in bounds.items())
        lines.append(
            f"each method ends at the best that it asked subject to {limits}, on the data that the metric sees, if"
            " anything that it asked satisfies that; free starts stand as they are"
        )
    if LABELLED in content["methods"] or LABELLED in content["starts"]:
        lines.append(
            f"{METHODS[LABELLED].title}: when to stop is told by the metric on a third of the labels, which is no query"
            " of the metric on all; then it is finetuned on all"
        )
    for name, method in content["methods"].items():
        title, seeds = METHODS[name].title, len(content["seeds"])
        if any(budget < method["least"] for budget in content["budgets"]):
            lines.append(f"{title} needs at least {counted(method['least'], 'query')}, the start's choice included")
        for budget, errors in method["errors"].items():
            lines.append(f"{title} failed with {budget} queries on {len(errors)} of {seeds} seeds: {errors[0]}")
        if not method["cells"] and not method["errors"] and method["least"] <= content["budgets"][-1]:
            lines.append(f"{title} does not apply")
    return lines


def plot(content: dict[str, Any], path: Path) -> Path:
    """Draw the test metric against queries and against seconds, mean and standard error over seeds."""
    figure, ((by_queries, by_seconds),) = new_figure(10.4, 5.0, columns=2, sharey=True)
    low, high = _axis(content)
    for name in content["starts"]:
        entry, height = entry_of(name), float(np.mean(_known(content["starts"][name]["test"])))
        beyond = "" if low <= height <= high else f" ({height:.4f}, beyond the axis)"
        by_queries.axhline(height, color=entry.colour, linestyle="--", linewidth=1.2, label=entry.title + beyond)
    by_queries.set_ylim(low, high)
    best = content["best_start"]
    dot = {"fmt": "s", "color": METHODS["best_start"].colour, "capsize": 3, "zorder": 5}
    error = standard_error(_known(best["test"]))
    mean = np.mean(_known(best["test"]))
    by_queries.errorbar(best["queries"], mean, error, label=METHODS["best_start"].title, **dot)
    by_seconds.errorbar(max(float(np.mean(best["seconds"])), 1e-3), mean, error, **dot)
    for name, method in content["methods"].items():
        cells = [cell for cell in method["cells"].values() if _known(cell["test"])]
        if not cells:
            continue
        entry = METHODS[name]
        means = np.array([np.mean(_known(cell["test"])) for cell in cells])
        errors = np.array([standard_error(_known(cell["test"])) for cell in cells])
        for axes, column in ((by_queries, "queries"), (by_seconds, "seconds")):
            x = [max(float(np.mean(_known(cell[column]))), 1e-3) for cell in cells]
            width = 2.4 if name == OURS else 1.4
            label = entry.title if axes is by_queries else None
            axes.plot(x, means, "o-", color=entry.colour, linewidth=width, markersize=4, label=label)
            axes.fill_between(x, means - errors, means + errors, color=entry.colour, alpha=0.15, linewidth=0)
    metric = content["metric"]
    by_queries.set_ylabel(f"test {metric['name']}\n({direction(metric['maximize'])})")
    for axes, label in ((by_queries, "metric queries"), (by_seconds, "seconds")):
        axes.set_xscale("log")
        axes.set_xlabel(label)
        axes.grid(alpha=0.25)
    by_queries.set_xticks(content["budgets"], content["budgets"])
    by_queries.minorticks_off()
    figure.suptitle(
        f"{content['title']}, {counted(len(content['seeds']), 'seed')}; bands: standard error over seeds;"
        " dashed: free starts",
        fontsize=9,
    )
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return save_figure(figure, path)


def _axis(content: dict[str, Any]) -> tuple[float, float]:
    """Return the ends of the metric's axis: of all searches, and of free starts unless they would double it."""
    cells = [cell["test"] for method in content["methods"].values() for cell in method["cells"].values()]
    columns = [_known(values) for values in (content["best_start"]["test"], *cells) if _known(values)]
    low = min(float(np.mean(each)) - standard_error(each) for each in columns)
    high = max(float(np.mean(each)) + standard_error(each) for each in columns)
    span = high - low or 0.01
    free = [float(np.mean(_known(start["test"]))) for start in content["starts"].values()]
    near = [height for height in free if low - span <= height <= high + span]
    return min([low, *near]) - span / 20, max([high, *near]) + span / 20


def _row(file: Path) -> dict[str, Any] | None:
    return read_row(file) if file.exists() else None


def _method(rows: Sequence[dict[str, Any] | None], budgets: Sequence[int]) -> dict[str, Any]:
    known = [row for row in rows if row is not None]
    cells = {}
    for budget in map(str, budgets):
        own = [None if row is None else row["cells"].get(budget) for row in rows]
        if any(cell is not None for cell in own):
            columns = ("queries", "validation", "test", "seconds", "passes")
            cells[budget] = {column: [cell and cell[column] for cell in own] for column in columns}
    errors: dict[str, list[str]] = {}
    for row in known:
        for budget, message in row["errors"].items():
            errors.setdefault(budget, []).append(f"seed {row['seed']}: {message}")
    return {"least": max(row["least"] for row in known), "cells": cells, "errors": errors}


def _pairs(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return our differences as plain data; what a single seed leaves open is null."""
    pairs = all_pairs(content)

    def plain(value: float) -> float | None:
        return None if math.isnan(value) else value

    return [
        {
            "baseline": each.baseline,
            "budget": each.budget,
            **{name: plain(value) for name, value in each.interval._asdict().items()},
            "p": plain(each.p),
            "p_holm": plain(corrected),
            "wins": each.wins,
            "losses": each.losses,
            "seeds": each.seeds,
        }
        for each, corrected in zip(pairs, holm([each.p for each in pairs]), strict=True)
    ]


def pair_rows(content: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the table of pairs."""

    def small(p: float | None) -> str:
        return "" if p is None else f"{p:.3f}" if p >= 0.001 else "<0.001"

    return [
        [
            entry_of(each["baseline"]).title,
            str(each["budget"]),
            f"{each['mean']:+.4f}",
            "" if each["low"] is None else f"[{each['low']:+.4f}, {each['high']:+.4f}]",
            str(each["wins"]),
            str(each["losses"]),
            small(each["p"]),
            small(each["p_holm"]),
            f"{_seconds(content, OURS, each['budget'])} / {_seconds(content, each['baseline'], each['budget']) or '0'}",
        ]
        for each in content["pairs"]
    ]


class Row(NamedTuple):
    """What a row of the table of means shows; of several budgets, seconds and passes are of the largest.

    Attributes:
        title: The method's.
        needs: What it needs of the data that the metric sees.
        means: Its mean at each budget, empty where it has none.
        best: Whether that is the best of its column.
        failed: On how many seeds it failed, empty where it didn't.
        seconds: What it took.
        passes: What that cost the model.
    """

    title: str
    needs: str
    means: list[str]
    best: list[bool]
    failed: list[str]
    seconds: str = ""
    passes: str = ""

    def cells(self, mark: Callable[[str], str] = str) -> list[str]:
        """Return what stands under the budgets, the best marked."""
        marked = [mark(mean) if top else mean for mean, top in zip(self.means, self.best, strict=True)]
        return [" ".join(filter(None, each)) for each in zip(marked, self.failed, strict=True)]


def _rows(content: dict[str, Any]) -> list[Row]:
    """Return all rows, that of our search without its guard last."""
    names = [*baselines_of(content), *([OURS] if OURS in content["methods"] else [])]
    sign, seeds = (1 if content["metric"]["maximize"] else -1), len(content["seeds"])
    means: dict[str, list[float | None]] = {}
    for name in names:
        values = [tests(content, name, budget) for budget in content["budgets"]]
        means[name] = [None if column is None else float(np.mean(_known(column))) for column in values]
    highest = [
        max((sign * mean for mean in column if mean is not None), default=math.nan)
        for column in zip(*means.values(), strict=True)
    ]
    rows: list[Row] = []
    for name in names:
        failed = content["methods"].get(name, {"errors": {}})["errors"]
        counts = [len(failed.get(str(budget), [])) for budget in content["budgets"]]
        best = [mean is not None and sign * mean == top for mean, top in zip(means[name], highest, strict=True)]
        cells = ["" if mean is None else f"{mean:.4f}" for mean in means[name]]
        failures = [f"({count} of {seeds} failed)" if count else "" for count in counts]
        title, needs = entry_of(name).title, _needs(content, name)
        if name == "best_start":
            title += f" ({counted(content['best_start']['queries'], 'query')})"
        rows.append(Row(title, needs, cells, best, failures, _seconds(content, name), _passes(content, name)))
    ends = [_unguarded(content, budget) for budget in content["budgets"]]
    if any(values is not None for values in ends):
        cells = ["" if values is None else f"{np.mean(_known(values)):.4f}" for values in ends]
        rows.append(Row(UNGUARDED, _needs(content, OURS), cells, [False] * len(cells), [""] * len(cells)))
    return rows


def _unguarded(content: dict[str, Any], budget: int) -> list[float | None] | None:
    """Return the test metric of our search's end by seed, kept or not, or None if no guard judged one."""
    sign = 1 if content["metric"]["maximize"] else -1
    changes = {
        each["seed"]: sign * each["change"]
        for each in content["guards"]
        if each["method"] == OURS and each["budget"] == budget
    }
    started = zip(content["seeds"], content["best_start"]["test"], strict=True)
    return [start + changes[seed] if seed in changes else None for seed, start in started] if changes else None


def _seconds(content: dict[str, Any], name: str, budget: int | None = None) -> str:
    """Format the mean seconds of a method at a budget, by default its largest; empty for a free start."""
    if name in content["starts"]:
        return ""
    if name == "best_start":
        return f"{np.mean(content['best_start']['seconds']):.1f}"
    cells = content["methods"][name]["cells"]
    if not cells:
        return ""
    cell = list(cells.values())[-1] if budget is None else cells[str(budget)]
    return f"{np.mean(_known(cell['seconds'])):.1f}"


def _passes(content: dict[str, Any], name: str) -> str:
    """Format the mean passes of a method at its largest budget; empty where none were counted."""
    if name in content["starts"]:
        return ""
    columns = [cell.get("passes", []) for cell in content["methods"].get(name, {"cells": {}})["cells"].values()]
    last = content["best_start"].get("passes", []) if name == "best_start" else columns[-1] if columns else []
    known = [each for each in last if each is not None]
    return " + ".join(f"{np.mean([each[part] for each in known]):.0f}" for part in ("metric", "loss")) if known else ""


def _needs(content: dict[str, Any], name: str) -> str:
    """Return what a row needs of the data; a method needs what the starts need that it may begin from."""
    alone = name in content["starts"] or entry_of(name).standing
    entries = [entry_of(each) for each in ([name] if alone else [name, *content["starts"]])]
    most: str = max((each.needs for each in entries), key=get_args(Needs).index)
    return f"{most}, training data" if any(each.training for each in entries) else most


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]
