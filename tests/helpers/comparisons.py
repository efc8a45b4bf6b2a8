"""What a comparison left, in small numbers."""

from typing import Any

OURS: dict[str, list[float | None]] = {"60": [0.8, 0.9, 0.7], "150": [0.9, 0.9, 0.9]}


def compared(maximize: bool = True, **methods: dict[str, list[float | None]]) -> dict[str, Any]:
    """Return the content of a comparison's file: each method's test metrics of three seeds by budget."""
    return {
        "metric": {"name": "m", "maximize": maximize},
        "budgets": [20, 60, 150],
        "seeds": [0, 1, 2],
        "starts": {"pretrained": {"test": [0.5, 0.5, 0.5]}, "batchnorm": {"test": [0.5, 0.6, None]}},
        "best_start": {"queries": 2, "test": [0.5, 0.6, 0.5]},
        "methods": {
            name: {"cells": {q: {"test": test} for q, test in cells.items()}} for name, cells in methods.items()
        },
        "guards": [],
    }
