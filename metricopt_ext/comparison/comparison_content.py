"""The content of a comparison, as comparison.json has it: gathered from all seeds, ours paired with each baseline."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from metricopt_ext.comparison.claims import all_pairs, holm
from metricopt_ext.comparison.comparison import Plan
from metricopt_ext.comparison.comparison_file import FILE_FORMAT, STARTS, read_comparison, read_row, read_starts
from metricopt_ext.errors import DataError, FileFormatError
from metricopt_ext.experiment.experiment import Subject
from metricopt_ext.experiment.method import METHODS
from metricopt_ext.utils.files import content_of
from metricopt_ext.utils.versions import versions

FILE = "comparison.json"


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
            "queries": max(each["queries"] for each in started),
            "chosen": [each["chosen"] for each in started],
            "seconds": [each["seconds"] for each in started],
            "passes": [each["passes"] for each in started],
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


def known(values: Sequence[float | None]) -> list[float]:
    """Return the values without those of seeds that have none."""
    return [value for value in values if value is not None]
