"""What tells a run from others, and a folder that is claimed for it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.refusals import assert_refused
from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.errors import FileFormatError
from metricopt_ext.methods.pipeline import optimize_metric
from metricopt_ext.methods.recipe import Recipe
from metricopt_ext.methods.run_identity import claim_open, identity_of
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.direct import CMAES
from metricopt_ext.search.trust_region import GuidedTrustRegion


def test_an_assessment_leaves_the_number_of_queries_open(tmp_path: Path) -> None:
    file, settings = tmp_path / "identity.json", {"search": "guided", "seed": 3}
    claim_open(file, settings)
    assert json.loads(file.read_text()) == settings
    assert_refused(
        lambda: claim_open(file, {"search": "guided", "queries": 60, "seed": 4}), FileFormatError, "seed", "3", "4"
    )
    claim_open(file, {"search": "guided", "queries": 60, "seed": 3})
    claim_open(tmp_path / "alone.json", {"search": "guided", "queries": 60, "seed": 3})
    assert file.read_bytes() == (tmp_path / "alone.json").read_bytes()
    claim_open(file, settings)  # another assessment needs no number, and changes none
    assert_refused(
        lambda: claim_open(file, {"search": "guided", "queries": 61, "seed": 3}), FileFormatError, "queries", "60", "61"
    )
    assert_refused(lambda: claim_open(file, {"search": "guided", "seed": 4}), FileFormatError, "seed", "3", "4")
    assert file.read_bytes() == (tmp_path / "alone.json").read_bytes()


@pytest.mark.parametrize("strategy", [CMAES(), Recipe(steps=5, evals=3), GuidedTrustRegion()])
def test_identity_does_not_depend_on_where_code_is(quadratic: Callable[..., Any], strategy: Any) -> None:
    text = str(identity_of(strategy, quadratic(), {}, seed=0, size={}))
    assert "metricopt_ext." not in text
    assert "0x" not in text


def test_another_line_is_another_run(quadratic: Callable[..., Any], tmp_path: Path) -> None:
    """What it is at both ends and in the middle counts, and where it ends."""
    way = torch.tensor([1.0, 0, 0, 0]).double()

    def line(power: int = 1, scale: float = 1.0, high: float = 1.0) -> StartLine:
        return StartLine(lambda t: Start(scale * t**power * way), 0.0, high)

    lines = [line(), line(), line(power=2), line(scale=2.0), line(high=2.0)]
    found = [str(identity_of(GuidedTrustRegion(), quadratic(), {"along": each}, seed=0, size={})) for each in lines]
    assert found[0] == found[1]
    assert len(set(found)) == 4
    task, again = quadratic(), quadratic()
    optimize_metric(task, queries=20, starts={"along": lines[0]}, output_dir=tmp_path, callback=Callback())
    assert_refused(
        lambda: optimize_metric(
            again, queries=20, starts={"along": lines[2]}, output_dir=tmp_path, resume=True, callback=Callback()
        ),
        FileFormatError,
        "starts.along",
    )
    assert again.queries == 0
