"""Comparisons of the same methods on different seeds, joined into one."""

from collections.abc import Mapping, Sequence
from typing import Any

from metricopt_ext.errors import DataError

# What must be the same, besides the settings; machines and versions may differ.
SAME = ("task", "metric", "budgets")

# Settings that say on which seeds, where and how far something ran, not what.
ELSEWHERE = ("seed", "seeds", "workers", "threads", "device", "root", "methods", "most")
PER_METHOD = ("queries", "validation", "test", "seconds", "passes")


def joined(contents: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Return what one comparison of all their seeds would hold, but for the pairs.

    A method or a start that some of them lack has None there.

    Args:
        contents: What their comparison.json hold.
        names: What to call them in an error.

    Raises:
        DataError: They differ in task, metric, budgets or settings, or share a seed.
    """
    first = contents[0]
    for content, name in zip(contents, names, strict=True):
        for key in SAME:
            if content.get(key) != first.get(key):
                raise DataError(f"{name} has {key} {content.get(key)}, {names[0]} has {first.get(key)}: no join")
        ours, theirs = (_settings(each.get("config", {})) for each in (first, content))
        for key in ours | theirs:  # in the order of the files, whatever the hash seed
            if ours.get(key) != theirs.get(key):
                raise DataError(f"{name} ran with {key}={theirs.get(key)}, {names[0]} with {ours.get(key)}: no join")
    seeds = [seed for content in contents for seed in content["seeds"]]
    twice = sorted({seed for seed in seeds if seeds.count(seed) > 1})
    if twice:
        raise DataError(f"seeds {twice} are in more than one of {', '.join(names)}: join each once")
    order = sorted(range(len(seeds)), key=seeds.__getitem__)

    def column(of_each: Sequence[Sequence[Any] | None]) -> list[Any]:
        """Return a list by seed of those of each comparison, None where one has none."""
        parts = zip(contents, of_each, strict=True)
        values = [value for each, own in parts for value in (own or [None] * len(each["seeds"]))]
        return [values[i] for i in order]

    def start(name: str) -> dict[str, list[Any]]:
        own = [content["starts"].get(name, {}) for content in contents]
        return {part: column([each.get(part) for each in own]) for part in ("validation", "test")}

    def method(name: str) -> dict[str, Any]:
        own = [content["methods"].get(name, {"least": 0, "cells": {}, "errors": {}}) for content in contents]
        errors: dict[str, list[str]] = {}
        for each in own:
            for budget, messages in each["errors"].items():
                errors.setdefault(budget, []).extend(messages)
        cells = {
            budget: {part: column([each["cells"].get(budget, {}).get(part) for each in own]) for part in PER_METHOD}
            for budget in map(str, first["budgets"])
            if any(budget in each["cells"] for each in own)
        }
        return {"least": max(each["least"] for each in own), "cells": cells, "errors": errors}

    limits = [content.get("config", {}).get("most", {}) for content in contents]
    most = {name: max(each[name] for each in limits) for name in limits[0] if all(name in each for each in limits)}
    best = [content["best_start"] for content in contents]
    parts = [key for key in best[0] if key != "queries"]
    guards = [guard for content in contents for guard in content["guards"]]
    return {
        **first,
        **({"config": {**first["config"], "most": most}} if any(limits) else {}),
        "seeds": sorted(seeds),
        "starts": {name: start(name) for name in _names(contents, "starts")},
        "best_start": {
            "queries": max(each["queries"] for each in best),
            **{part: column([each.get(part) for each in best]) for part in parts},
        },
        "methods": {name: method(name) for name in _names(contents, "methods")},
        "guards": sorted(guards, key=lambda guard: guard["seed"]),
        "machines": list(dict.fromkeys(machine for content in contents for machine in content["machines"])),
    }


def _names(contents: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    return list(dict.fromkeys(name for content in contents for name in content[key]))


def _settings(config: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Return the settings that decide what ran, each by its key with dots."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if key not in ELSEWHERE:
            found |= _settings(value, f"{section}{key}.") if isinstance(value, Mapping) else {section + key: value}
    return found
