"""The tables of a comparison: means by method and budget, and our difference from each baseline."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np

from metricopt_ext.comparison.claims import OURS, baselines_of, entry_of, tests
from metricopt_ext.comparison.comparison_content import known
from metricopt_ext.experiment.method import Needs
from metricopt_ext.utils.words import counted

LABELLED = "whole_network_labels"
UNGUARDED = "MetricOpt, unguarded"
PAIRED = (
    "Difference on test, paired by seed; positive favours MetricOpt. wins, losses: seeds on which MetricOpt is better,"
    " worse. p: two-sided t-test; p, Holm: corrected for the number of rows. seconds: MetricOpt's / the other's."
)
PAIRS = ["against", "queries", "difference", "95% interval", "wins", "losses", "p", "p, Holm", "seconds"]


def means_table(content: dict[str, Any]) -> tuple[str, list[str], list["Row"]]:
    """Return the table of means: what it is of, the titles of its columns, and its rows."""
    seeds, header = content["seeds"], ["method", "needs", *map(str, content["budgets"]), "seconds", "passes"]
    said = f"Mean on test over {counted(len(seeds), 'seed')} ({seeds[0]} to {seeds[-1]}), by metric queries"
    return said, header, rows_of(content)


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
        best: Whether that is the best of its column, of the rows that have every seed.
        failed: On how many seeds it failed, and how many it has if more are missing; empty where it has all.
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


def rows_of(content: dict[str, Any]) -> list[Row]:
    """Return all rows, that of our search without its guard last."""
    names = [*baselines_of(content), *([OURS] if OURS in content["methods"] else [])]
    sign, seeds = (1 if content["metric"]["maximize"] else -1), len(content["seeds"])
    columns = {name: [tests(content, name, budget) for budget in content["budgets"]] for name in names}
    # Means over other seeds can't be compared
    ranked = {name: [column and on_all_seeds(column) for column in own] for name, own in columns.items()}
    highest = [
        max((sign * mean for mean in column if mean is not None), default=math.nan)
        for column in zip(*ranked.values(), strict=True)
    ]
    rows: list[Row] = []
    for name in names:
        failed = content["methods"].get(name, {"errors": {}})["errors"]
        counts = [len(failed.get(str(budget), [])) for budget in content["budgets"]]
        best = [mean is not None and sign * mean == top for mean, top in zip(ranked[name], highest, strict=True)]
        cells = ["" if column is None else f"{np.mean(known(column)):.4f}" for column in columns[name]]
        failures = [
            " ".join(filter(None, [f"({count} of {seeds} failed)" if count else "", of_seeds(column, count)]))
            for column, count in zip(columns[name], counts, strict=True)
        ]
        title, needs = entry_of(name).title, _needs(content, name)
        if name == "best_start":
            title += f" ({counted(content['best_start']['queries'], 'query')})"
        rows.append(Row(title, needs, cells, best, failures, _seconds(content, name), _passes(content, name)))
    ends = [_unguarded(content, budget) for budget in content["budgets"]]
    if any(values is not None for values in ends):
        cells = ["" if values is None else f"{np.mean(known(values)):.4f}" for values in ends]
        few = [of_seeds(values) for values in ends]
        rows.append(Row(UNGUARDED, _needs(content, OURS), cells, [False] * len(cells), few))
    return rows


def on_all_seeds(column: Sequence[float | None]) -> float | None:
    """Return the mean of values by seed; None if a seed has none."""
    values = known(column)
    return float(np.mean(values)) if values and len(values) == len(column) else None


def of_seeds(column: Sequence[float | None] | None, failed: int = 0) -> str:
    """Say on how many seeds a mean is, empty if on all but those that failed."""
    if column is None or len(values := known(column)) + failed >= len(column):
        return ""
    return f"({len(values)} of {counted(len(column), 'seed')})"


def _unguarded(content: dict[str, Any], budget: int) -> list[float | None] | None:
    """Return the test metric of our search's end by seed, kept or not, or None if no guard judged one."""
    sign = 1 if content["metric"]["maximize"] else -1
    guards = {each["seed"]: each for each in content["guards"] if each["method"] == OURS and each["budget"] == budget}
    trained, best = content["starts"]["pretrained"]["test"], content["best_start"]["test"]

    def ended(seed: int, trained: float, best: float) -> float | None:
        if seed not in guards:
            return None
        guard = guards[
            seed
        ]  # what is published lacks the end; the best free start, where most searches began, tells it
        return trained + sign * float(guard["end"]) if "end" in guard else best + sign * float(guard["change"])

    return list(map(ended, content["seeds"], trained, best)) if guards else None


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
    return f"{np.mean(known(cell['seconds'])):.1f}"


def _passes(content: dict[str, Any], name: str) -> str:
    """Format the mean passes of a method at its largest budget; empty where none were counted."""
    if name in content["starts"]:
        return ""
    columns = [cell["passes"] for cell in content["methods"].get(name, {"cells": {}})["cells"].values()]
    last = content["best_start"]["passes"] if name == "best_start" else columns[-1] if columns else []
    known = [each for each in last if each is not None]
    return " + ".join(f"{np.mean([each[part] for each in known]):.0f}" for part in ("metric", "loss")) if known else ""


def _needs(content: dict[str, Any], name: str) -> str:
    """Return what a row needs of the data; a method needs what the starts need that it may begin from."""
    alone = name in content["starts"] or entry_of(name).standing
    entries = [entry_of(each) for each in ([name] if alone else [name, *content["starts"]])]
    most: str = max((each.needs for each in entries), key=get_args(Needs).index)
    return f"{most}, training data" if any(each.training for each in entries) else most
