"""A search through its trials without a folder or a guard's run around it; see tests/methods/test_search.py."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.refusals import assert_refused
from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import FileFormatError
from metricopt_ext.methods.trials import Trials
from metricopt_ext.search.random_search import RandomSearch
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.kept_evaluations import KeptEvaluations, digest_of
from metricopt_ext.tasks.settings import Setting, Settings


def trials(task: Any, queries: int = 20, strategy: Any = None, path: Path | None = None, **starts: Start) -> Trials:
    every = {"start": Start(task.origin()), **starts}
    return Trials(task, strategy or GuidedTrustRegion(), every, queries, KeptEvaluations(path, task.metric))


def test_all_starts_come_first_and_the_search_begins_at_the_best(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    search = trials(task, a=Start(task.origin() + 1), b=Start(task.origin() + 2))
    batch = search.next_batch()
    assert [(trial.id, trial.start, *rest) for trial, *rest in batch] == [
        (0, "start", False, None),
        (1, "a", False, None),
        (2, "b", False, None),
    ]
    for id, cost in enumerate((3.0, 1.0, 2.0)):
        search.tell_evaluation(id, Evaluation(cost))
    design = torch.stack([trial.phi for trial, *_ in search.next_batch()])
    assert {trial.start for trial, *_ in search.next_batch()} == {"a"}
    assert torch.allclose(design.mean(0), task.origin() + 1)  # antithetic pairs around the best start


def test_a_failure_is_as_bad_as_the_worst_of_its_batch_or_before(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    search = trials(task, 6, RandomSearch())
    search.tell_evaluation(search.next_batch()[0][0].id, Evaluation(1.0))
    assert len(search.next_batch()) == 5
    search.fail(1)
    for id, cost in ((2, 0.5), (3, 7.0), (4, 2.0), (5, 3.0)):
        search.tell_evaluation(id, Evaluation(cost))
    assert search.outcome().costs == (1.0, 7.0, 0.5, 7.0, 2.0, 3.0)
    assert search.next_batch() == []


def test_what_is_given_up_is_replaced(quadratic: Callable[..., Any]) -> None:
    search = trials(quadratic(), 6, RandomSearch())
    search.tell_evaluation(search.next_batch()[0][0].id, Evaluation(1.0))
    for trial, *_ in search.next_batch():
        search.give_up(trial.id) if trial.id == 2 else search.tell_evaluation(trial.id, Evaluation(float(trial.id)))
    ((trial, *_),) = search.next_batch()
    assert trial.id == 6
    search.tell_evaluation(6, Evaluation(0.25))
    assert search.outcome().costs == (1.0, 1.0, 3.0, 4.0, 5.0, 0.25)


def test_points_of_other_tensors_are_not_told(quadratic: Callable[..., Any], tmp_path: Path) -> None:
    path, task = tmp_path / "evaluations.json", quadratic()
    search = trials(task, path=path)
    search.tell_evaluation(search.next_batch()[0][0].id, Evaluation(1.0))
    other = Start(task.origin(), {"bias": torch.ones(3, dtype=torch.float64)})
    assert digest_of(other)
    again = Trials(task, GuidedTrustRegion(), {"start": other}, 20, KeptEvaluations(path, task.metric))
    assert_refused(again.next_batch, FileFormatError, "0")


def test_a_metric_that_never_varies_has_a_result_a_query_early(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    least = GuidedTrustRegion().least_queries(task.dim)
    search = trials(task, least)
    while batch := search.next_batch():
        for trial, *_ in batch:
            search.tell_evaluation(trial.id, Evaluation(1.0))
    assert sum(search.outcome().queries.values()) == least - 1


def test_it_can_go_on_with_more_queries(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    search = trials(task, 10)

    def answer() -> int:
        count = 0
        while batch := search.next_batch():
            for trial, *_ in batch:
                search.tell_evaluation(trial.id, Evaluation(task.true_cost(trial.phi)))
                count += 1
        return count

    assert answer() == 10
    first = search.outcome()
    search.extend(30)
    assert answer() == 21  # the end's own query is not one of the visited points
    assert (sum(first.queries.values()), sum(search.outcome().queries.values())) == (10, 30)


def test_what_is_said_twice_counts_once(quadratic: Callable[..., Any]) -> None:
    search = trials(quadratic(), 6, RandomSearch())
    search.tell_evaluation(search.next_batch()[0][0].id, Evaluation(1.0))
    search.next_batch()
    for _ in range(2):
        search.fail(1)
        search.give_up(2)
        assert (search.spent, search.failed) == (2, 1)


def with_sizes(task: Any) -> Any:
    return replace(task, settings=Settings([Setting("size", values=(1.0, 2.0, 4.0), default=1.0)], nullcontext))


def tuned(task: Any, path: Path) -> None:
    """Answer the start, and the first settings."""
    search = trials(task, 40, path=path)
    for _ in range(2):
        for trial, *_ in search.next_batch():
            search.tell_evaluation(trial.id, Evaluation(1.0 + trial.id))


def test_settings_on_file_that_too_few_queries_would_ask_for_are_refused(
    quadratic: Callable[..., Any], tmp_path: Path
) -> None:
    task, path = with_sizes(quadratic()), tmp_path / "evaluations.json"
    tuned(task, path)
    least = GuidedTrustRegion().least_queries(task.dim)
    again = trials(task, least, path=path)
    again.next_batch()
    assert_refused(again.next_batch, FileFormatError, "1", "2.0", "queries")


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"settings": {"size": 3.0}}, ("evaluations.json", "size", "3")),
        ({"phi": (0.0,) * 3}, ("evaluations.json",)),
    ],
)
def test_what_no_trial_can_be_on_file_is_refused(
    change: dict[str, Any], names: tuple[str, ...], quadratic: Callable[..., Any], tmp_path: Path
) -> None:
    task, path = with_sizes(quadratic()), tmp_path / "evaluations.json"
    tuned(task, path)
    kept = KeptEvaluations(path, task.metric)
    kept.evaluations[1] = replace(kept.evaluations[1], **change)
    again = Trials(task, GuidedTrustRegion(), {"start": Start(task.origin())}, 40, kept)
    again.next_batch()
    assert_refused(again.next_batch, FileFormatError, *names)


def test_settings_on_file_are_told_instead_of_those_that_would_be_asked(
    quadratic: Callable[..., Any], tmp_path: Path
) -> None:
    """As another processor would round an interval's points in another way."""
    task, path = with_sizes(quadratic()), tmp_path / "evaluations.json"
    tuned(task, path)
    kept = KeptEvaluations(path, task.metric)
    assert kept.evaluations[1].settings == {"size": 2.0}
    kept.evaluations[1] = replace(kept.evaluations[1], settings={"size": 4.0})
    again = Trials(task, GuidedTrustRegion(), {"start": Start(task.origin())}, 40, kept)
    again.next_batch()
    assert again.next_batch()[0][0].settings == {"size": 4.0}
    assert again.moved().startswith("1 of ")
