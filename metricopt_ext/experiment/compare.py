"""Methods side by side on one task: each with its own ledger, each end judged once on the test data.

On the validation data an end is judged only where its method asks queries of its own: what MetricOpt's queries say of
the others' is known, or nothing is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.method import METHODS, End, Method, Reached, check_known
from metricopt_ext.experiment.record import Outcome
from metricopt_ext.runtime import distributed
from metricopt_ext.runtime.progress import Callback, told
from metricopt_ext.tasks.log import Log
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.words import counted


@dataclass(frozen=True)
class Comparison:
    """The outcomes of the methods in a comparison, by name.

    Attributes:
        results: Where each stood; those that do not apply are left out.
        outcomes: The outcome of each end, one for each number of queries that the method reports.
        curves: Validation metric along a method's path, ``T + 1`` numbers, if it has one and curves were asked for. No
            method sees them.
    """

    results: dict[str, tuple[Reached, ...]]
    outcomes: dict[str, list[Outcome]]
    curves: dict[str, list[float]]


def compare(
    task: FinetuneTask,
    test_metric: Metric,
    methods: Mapping[str, Method],
    curves: bool = False,
    callback: Callback | None = None,
    folder: Path | None = None,
) -> Comparison:
    """Run methods one after another, then judge all of their ends.

    Of ranks that share the work, the first alone runs the methods that can't be shared, and judges.

    Args:
        task: The task; its metric looks at the validation data.
        test_metric: The same metric on the test data.
        methods: By name, ordered so that each finds where those stood that it continues from.
        curves: Whether to evaluate the metric along the methods' paths.
        callback: Told what follows MetricOpt's own run.
        folder: Keeps the queries of the others, which a run that goes on does not ask again; None keeps none.

    Raises:
        ConfigError: A method has no entry in `METHODS`; none was run.
    """
    check_known(methods)
    callback = callback or Callback()
    results: dict[str, tuple[Reached, ...]] = {}
    for name, method in methods.items():
        entry, own = METHODS[name], task.judged_by(task.metric.with_settings())
        if "metricopt" in results:
            callback.stage(entry.title)
        if folder is not None and not entry.shared:
            own.metric.log = Log(folder / f"{name}_queries.jsonl", own.metric)
        run = partial(_run, method, own, results)
        reached = run() if entry.shared else distributed.only_first(run)
        if not reached:
            continue
        if entry.kind == "free" and reached[-1].queries:
            spent = counted(reached[-1].queries, "query")
            raise ConfigError(f"method {name!r} is free in METHODS, but spent {spent}")
        before = results[entry.after][-1] if entry.after else None
        results[name] = tuple(each.after(before) if before else each for each in reached)
    judged = distributed.only_first(lambda: _judged(task, test_metric, results, curves, callback, folder))
    return judged or Comparison(results, {}, {})


def _run(method: Method, task: FinetuneTask, earlier: Mapping[str, tuple[Reached, ...]]) -> tuple[Reached, ...]:
    return method(earlier).run(task)


def _judged(
    task: FinetuneTask,
    test_metric: Metric,
    results: dict[str, tuple[Reached, ...]],
    curves: bool,
    callback: Callback,
    folder: Path | None,
) -> Comparison:
    validation, test = (
        task.judged_by(each if folder is None else each.logged(Log(folder / f"{part}_ends.jsonl", each)))
        for part, each in (("validation", task.metric.with_settings()), ("test", test_metric))
    )
    answers = known(results)

    def outcome(name: str, each: Reached) -> Outcome:
        value = answers.get(name)
        if value is None and METHODS[name].kind == "queries":
            value = judge(validation, each.end)
        tested = judge(test, each.end)
        return Outcome(value, tested, each.queries, each.queries_per_start, each.seconds, each.batch_queries)

    outcomes: dict[str, list[Outcome]] = {name: [] for name in results}
    ends = [(name, each) for name, reached in results.items() for each in reached]
    for method, end in told(ends, callback, "judge the ends"):
        outcomes[method].append(outcome(method, end))
    paths = {name: reached[-1].path for name, reached in results.items() if curves}
    along = {
        name: [judge(validation, phi) for phi in told(list(path), callback, f"curve of {METHODS[name].title}")]
        for name, path in paths.items()
        if path is not None
    }
    return Comparison(results, outcomes, along)


def known(results: Mapping[str, tuple[Reached, ...]]) -> dict[str, float]:
    """Return the validation metric of the methods' ends as far as the queries of guarded runs tell, by method.

    Args:
        results: Where the methods stood. MetricOpt's own run tells of its starts too.
    """
    ends = {name: reached[-1].result for name, reached in results.items()}
    found = {name: result.after for name, result in ends.items() if result is not None}
    if (ours := ends.get("metricopt")) is not None:
        asked = {**{name: each.value for name, each in ours.evaluations.items()}, **ours.starts}
        for name, reached in results.items():
            start, end = METHODS[name].start, reached[-1].end
            if start in asked and (not isinstance(end, Tensor) or torch.equal(end, ours.ends[start])):
                found[name] = asked[start]
        if "settings" in results:
            found["settings"] = asked[ours.started_at]
    return found


def judge(task: FinetuneTask, end: End) -> float:
    """Return the task's metric, in its own units, of a phi of its model, another model, or a start; one query."""
    if isinstance(end, nn.Module):
        with task.in_force({}, end) as values:
            return task.metric.evaluate(end, "judge", values).value
    return task.evaluate(end if isinstance(end, Start) else Start(end), "judge").value
