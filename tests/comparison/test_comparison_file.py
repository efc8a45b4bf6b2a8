"""The files of a comparison: what has another shape is refused before a page is made of it."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metricopt_ext.comparison.comparison_file import read_comparison
from metricopt_ext.errors import FileFormatError

COLUMN = {"validation": [0.5, None], "test": [0.5, 0.25]}
CELL = {**COLUMN, "queries": [5, 5], "seconds": [0.5, 1], "passes": [{"metric": 5, "loss": 0}, None]}
WHOLE = {"accepted": True, "change": 0.1, "error": None, "best": 0.1, "best_error": None}
COMPARISON: dict[str, Any] = {
    "task": "classification/toy",
    "title": "net on toy",
    "metric": {"name": "accuracy", "maximize": True},
    "budgets": [5],
    "seeds": [700, 701],
    "starts": {"pretrained": COLUMN},
    "best_start": {**CELL, "queries": 2, "chosen": ["pretrained", "pretrained"]},
    "methods": {"metricopt": {"least": 3, "cells": {"5": CELL}, "errors": {}}},
    "guards": [
        {
            "seed": 700,
            "method": "metricopt",
            "budget": 5,
            "accepted": True,
            "change": 0.1,
            "error": None,
            "whole": WHOLE,
        }
    ],
    "machines": ["A processor"],
    "versions": {"torch": "2.6"},
    "config": {"task": "classification", "config": "a.yaml", "overrides": []},
}


def changed(content: dict[str, Any], at: str, value: Any) -> dict[str, Any]:
    """A copy with another value at a path of keys, or without the last of them."""
    whole = copy.deepcopy(content)
    *path, last = at.split("/")
    inner: Any = whole
    for key in path:
        inner = inner[int(key) if isinstance(inner, list) else key]
    if value is ...:
        del inner[last]
    else:
        inner[int(last) if isinstance(inner, list) else last] = value
    return whole


def refused(read: Callable[[Path], Any], file: Path, content: dict[str, Any]) -> str:
    file.write_text(json.dumps(content))
    with pytest.raises(FileFormatError) as caught:
        read(file)
    error = str(caught.value)
    assert error.startswith(f"{file} ")
    assert error.endswith("; delete it to regenerate it")
    return error


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        ("guards", ..., "has no 'guards'"),
        ("seeds", ["../1", "2"], "of type int"),
        ("seeds", [700], "2 values of validation, there are 1"),
        ("budgets", [0], "budgets[0] is 0"),
        ("metric/maximize", "yes", "of type bool"),
        ("starts", {}, "no start 'pretrained'"),
        ("starts/pretrained/test/0", math.nan, "a finite number"),
        ("methods/../x", {"least": 1, "cells": {}, "errors": {}}, ""),
        ("config/task", "x; rm -rf ~", "one of 'classification', 'detection'"),
    ],
)
def test_another_shape_of_a_comparison_is_refused(at: str, value: Any, said: str, tmp_path: Path) -> None:
    file = tmp_path / "comparison.json"
    file.write_text(json.dumps(COMPARISON))
    assert read_comparison(file) == COMPARISON
    whole = changed(COMPARISON, at, value) if said else {**COMPARISON, "methods": {"../x": value}}
    assert (said or "the method '../x', which does not exist") in refused(read_comparison, file, whole)
