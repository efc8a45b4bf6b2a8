"""A guided search from the best of its starts, and what the guard keeps of it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

from metricopt_ext.adapters.start import Start
from metricopt_ext.methods.guard import CONFIDENCE, decide
from metricopt_ext.methods.result import SearchRun, outcome
from metricopt_ext.methods.starts import all_starts, with_start
from metricopt_ext.methods.tuning import evaluate, query_callback
from metricopt_ext.search.trust_region import GuidedTrustRegion, SearchEnd
from metricopt_ext.tasks.metric import Evaluation, stacked_halves
from metricopt_ext.tasks.split_half import correlation_of_halves
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.progress import Watcher
from metricopt_ext.value.fitting import Fit


def guided_results(
    task: FinetuneTask,
    checkpoints: Sequence[int],
    search: GuidedTrustRegion | None = None,
    *,
    starts: Mapping[str, Start] | None = None,
    confidence: float = CONFIDENCE,
    seed: int = 0,
    watcher: Watcher | None = None,
) -> Iterator[SearchRun]:
    """Run a guided search once, and yield the guarded result that each number of queries would have had.

    Each checkpoint before the last costs a query more, that of its own end; see `GuidedTrustRegion.ends`. The model is
    left unchanged.

    Args:
        task: Model, loss, batches and metric.
        checkpoints: Numbers of queries, ascending; those of the starts count among them.
        search: The search.
        starts: What it may begin from besides phi = 0, by name; each costs a query.
        confidence: How sure the guard must be, at least 0.5 and below 1.
        seed: Seed of all draws.
        watcher: Notified of progress.

    Raises:
        WeightsError: As from `FinetuneTask.keeping_weights`.
        ValueError, BudgetError, AdapterError, MetricError: As from `GuidedTrustRegion.ends` and `all_starts`.
    """
    search, watcher = search or GuidedTrustRegion(), watcher or Watcher()
    candidates = all_starts(task, starts or {})
    task.check_loss(seed, 2)
    tasks = {name: with_start(task, start) for name, start in candidates.items()}
    with ExitStack() as kept:
        for model_task in {id(each.adapter.model): each for each in tasks.values()}.values():
            kept.enter_context(model_task.keeping_weights())
        watcher.stage("starts")
        asked = {
            name: evaluate(tasks[name], start.phi, "starts", f"start {name!r}", watcher)
            for name, start in candidates.items()
        }
        begun = min(asked, key=lambda name: asked[name].cost)
        known = [name for name in candidates if candidates[name].replaces_the_same(candidates[begun])]
        elsewhere = len(candidates) - len(known)
        watcher.stage("search")
        ends = search.ends(
            tasks[begun],
            candidates[begun].phi,
            [queries // task.metric.repeats - elsewhere for queries in checkpoints],
            known=[(candidates[name].phi, asked[name]) for name in known],
            seed=seed,
            on_query=query_callback(task, watcher),
            on_quality=lambda spearman: watcher.quality(task.metric.ledger.spent, spearman),
        )
        for end in ends:
            yield _guarded(task, elsewhere + end.queries, candidates, asked, begun, end, confidence)


def _guarded(
    task: FinetuneTask,
    evaluations: int,
    starts: Mapping[str, Start],
    asked: Mapping[str, Evaluation],
    begun: str,
    end: SearchEnd,
    confidence: float,
) -> SearchRun:
    """Keep the start that the search began from if it gains on phi = 0, and the end if it gains on what was kept."""

    def gain_by_f(kept: str) -> float:
        known = starts[kept].replaces_the_same(starts[begun])  # f is of the model with its tensors
        return end.gain_over(starts[kept].phi) if known else math.inf

    candidates = {"start": asked["start"], begun: asked[begun], "search": end.evaluation}
    decision = decide(candidates, end.evaluations, confidence, gain_by_f)
    value, repeats = task.metric.to_value, task.metric.repeats
    predicted = end.predicted
    ends = {**{name: start.phi for name, start in starts.items()}, "search": end.phi}
    fit = None if end.f is None else Fit(end.f, {}, predicted[:, 0], predicted[:, 1])
    return SearchRun(
        **outcome(task.metric, candidates, decision, ends),
        queries={"starts": len(starts) * repeats, "search": (evaluations - len(starts)) * repeats},
        queries_per_start=evaluations * repeats,
        starts={name: value(each.cost) for name, each in asked.items()},
        begun_at=begun,
        fit=fit,
        verdict=decision.verdict,
        points=end.points,
        split_half=correlation_of_halves(stacked_halves(end.evaluations)),
        costs=tuple(each.cost for each in end.evaluations),
        widened=end.widened,
        candidates=starts,
    )
