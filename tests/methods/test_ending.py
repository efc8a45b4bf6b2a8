"""What the guard keeps of a search, by hand; for its step and the whole run see tests/comparison/test_guarded.py."""

import pytest
import torch

from metricopt_ext.adapters.start import Start
from metricopt_ext.methods.ending import Began, found, path_of
from metricopt_ext.methods.start_lines import Point
from metricopt_ext.methods.tuned_settings import SETTINGS
from metricopt_ext.search.strategy import SearchResult
from metricopt_ext.tasks.evaluation import Evaluation


def ended(*costs: float) -> SearchResult:
    """A search that visited (1, 1), (2, 2), ... with these costs, and ended at (9, 9) with a cost of 0."""
    return SearchResult(
        phi=torch.full((2,), 9.0),
        curve=(),
        queries=len(costs) + 1,
        evaluation=Evaluation(0.0),
        points=torch.arange(1.0, len(costs) + 1)[:, None].expand(-1, 2),
        evaluations=tuple(map(Evaluation, costs)),
        predicted=torch.zeros(0, 2),
        widened=1.0,
    )


def test_a_path_is_where_it_began_each_best_so_far_and_its_end() -> None:
    path = path_of(torch.zeros(2), ended(5.0, 7.0, 4.0, 4.0, 3.0))
    assert path.tolist() == [[x, x] for x in (0.0, 1.0, 3.0, 5.0, 9.0)]  # a second one at the best cost is no better


@pytest.mark.parametrize(
    ("name", "lines", "candidates"),
    [
        ("a", {}, {"start", "a", "search"}),
        ("start", {}, {"start", "search"}),
        (SETTINGS, {}, {"start", "a", SETTINGS, "search"}),  # and where they were tuned
        ("line", {"line": 0.5}, {"start", "a", "line", "search"}),  # and the best that is on no line
    ],
)
def test_the_guard_chooses_from_where_it_began_and_the_end(
    name: str, lines: dict[str, float], candidates: set[str]
) -> None:
    costs = {"start": 4.0, "a": 2.0, "b": 3.0, "line" if lines else SETTINGS: 1.0}
    evaluated = {each: Evaluation(cost) for each, cost in costs.items()}
    starts = {each: Start(torch.full((2,), cost)) for each, cost in costs.items()}
    points = [Point(each, start, evaluated[each]) for each, start in starts.items()]
    chosen, ends = found(Began(starts, evaluated, name, points, lines), ended(5.0))
    assert chosen == {each: evaluated[each] for each in candidates - {"search"}} | {"search": Evaluation(0.0)}
    assert {each: phi.tolist() for each, phi in ends.items()} == {
        **{each: [cost, cost] for each, cost in costs.items()},
        "search": [9.0, 9.0],
    }
