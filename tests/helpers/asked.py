"""Searches, and stages before them, driven by hand."""

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from torch import Tensor

from metricopt_ext.adapters.start import Start
from metricopt_ext.search.asking import Asking, labelled
from metricopt_ext.search.strategy import Answers, SearchResult, SearchStrategy
from metricopt_ext.tasks.cost_scale import CostScale
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.log import Log

End = TypeVar("End")
SCALE = CostScale(maximize=False, bounds=None, name="cost")


def asking_of(batches: Generator[list[Start], Answers, End]) -> Asking[End]:
    """Return the driver of a generator, which keeps the answers in memory."""
    return Asking(labelled(batches, "search", "start"), Log(None, SCALE))


def batches_of(
    batches: Generator[list[Start], Answers, Any], judge: Callable[[Start], Evaluation | None]
) -> list[list[Start]]:
    """Answer all that is asked for, the last of each batch first, and return it."""
    asking, asked = asking_of(batches), []
    while batch := asking.next_batch():
        asked.append([each.at for each in batch])
        for trial in reversed(batch):
            asking.tell(trial.id, judge(trial.at))
    return asked


def ends(
    search: SearchStrategy,
    task: Any,
    start: Tensor,
    checkpoints: Sequence[int],
    *,
    known: Sequence[tuple[Tensor, Evaluation]] = (),
    seed: int = 0,
) -> list[SearchResult]:
    """Return where one search stands at several budgets."""
    budget, found = checkpoints[0], []
    begun = search.begin(task, Start(start), lambda: budget, known=known, seed=seed)
    asking = asking_of(begun.batches())
    for budget in checkpoints:  # noqa: B007 (the search looks at it)
        while batch := asking.next_batch():
            for trial in batch:
                asking.tell(trial.id, task.evaluate(trial.at.phi, "search"))
        found.append(begun.end())
    return found
