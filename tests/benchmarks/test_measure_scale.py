"""The tool that measures how runs scale: its waves are those of the library."""

import json
from collections.abc import Callable
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import pytest

import measure_scale as tool
from metricopt_ext.methods.recipe import Recipe
from metricopt_ext.value.learners import RidgeLearner

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "measure_scale.py"


@pytest.mark.parametrize(("strategy", "queries"), [("search", 45), ("recipe", 160)])
def test_one_rank_evaluates_in_as_many_waves_as_evaluations(
    strategy: str, queries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "Recipe", partial(Recipe, learners=(RidgeLearner(),)))  # the others take seconds to fit
    tool.measure(strategy, queries, sleep=0.0, images=60, output=tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["ranks"] == 1
    assert figures["waves"] == figures["evaluations"] <= queries
    assert figures["exchanges"] == 0
    assert figures["seconds"] >= figures["predicted seconds of 8 ranks"] >= figures["serial seconds"] > 0


@pytest.mark.slow
def test_what_two_ranks_exchange_is_counted(torchrun: Callable[..., Any], tmp_path: Path) -> None:
    """Each wave of evaluations is an exchange; what is computed once goes to the other rank besides."""
    arguments = ("--queries", "20", "--images", "60", "--output", str(tmp_path / "figures.json"))
    launched = torchrun(SCRIPT.read_text(), 2, *arguments)
    said, _ = launched.communicate(timeout=120)
    assert launched.returncode == 0, said
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["ranks"] == 2
    assert figures["exchanges"] > figures["waves"]
    assert 0.001 < figures["megabytes sent by the first rank"] < 1


@pytest.mark.parametrize(("world", "waves"), [(1, 45), (2, 24), (4, 14), (8, 13), (64, 13)])
def test_waves_of_a_search(world: int, waves: int) -> None:
    # The start, a design of 6, nine batches of 4 and one of 1, and the end.
    assert waves == 1 + ceil(6 / world) + 9 * ceil(4 / world) + 1 + 1
    assert tool.search_waves(45, world) == waves


def test_waves_of_a_recipe() -> None:
    recipe = Recipe(rounds=2, evals=5)  # 3 tasks: 15 points a round, 12 trials to choose by, and 3 of the guard
    assert [tool.recipe_waves(recipe, 3, 45, world) for world in (1, 4, 16)] == [45, 5 + 4 + 3 + 3, 2 + 1 + 1 + 3]
