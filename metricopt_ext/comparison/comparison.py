"""One seed of a comparison: every baseline from the same start, each with its own file of what it reached.

What choosing the start took is on the account of each: queries, seconds, and passes of the model (`passes`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.comparison.comparison_file import STARTS, read_row
from metricopt_ext.comparison.guarded import TRAINED, Change, record_of
from metricopt_ext.errors import BudgetError, ConfigError
from metricopt_ext.experiment.compare import judge
from metricopt_ext.experiment.experiment import Experiment
from metricopt_ext.experiment.method import (
    METHODS,
    STANDING,
    TUNES_SETTINGS,
    Baseline,
    End,
    Reached,
    Started,
    now,
)
from metricopt_ext.experiment.passes import CountedTask, Passes, counting, noticing, passes_of
from metricopt_ext.experiment.run_config import STARTS as OFFERED
from metricopt_ext.experiment.run_config import RunConfig
from metricopt_ext.experiment.traced import Spent
from metricopt_ext.methods.guard import chosen_start
from metricopt_ext.methods.result import Result
from metricopt_ext.methods.starts import all_starts, divided
from metricopt_ext.plain import MESSAGE, plain
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.tasks.constraints import Limits
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.files import write_json
from metricopt_ext.utils.machine import Machine
from metricopt_ext.utils.weights import same_bits


@dataclass(frozen=True)
class Plan:
    """What a comparison runs.

    Attributes:
        methods: Names of baselines, in any order.
        budgets: Metric queries, ascending.
        starts: Names of the starts to choose from, besides the model as it was trained: the experiment's, or those of
            `STANDING`; empty for all that the experiment's settings name.
        most: Largest budget of methods that take too long for larger ones, by name.
    """

    methods: tuple[str, ...]
    budgets: tuple[int, ...]
    starts: tuple[str, ...] = ()
    most: Mapping[str, int] = field(default_factory=dict)

    def check(self, known: Iterable[str]) -> None:
        """Reject what can't be run.

        Args:
            known: Names of the baselines.

        Raises:
            ConfigError: A method is unknown or named twice, or the budgets do not ascend from at least 1.
        """
        known = sorted(known)
        for name in (*self.methods, *self.most):
            if name not in known:
                raise ConfigError(f"methods={list(self.methods)}: {name!r} is none of {', '.join(known)}")
        if not self.methods or len(set(self.methods)) < len(self.methods):
            raise ConfigError(f"methods={list(self.methods)}: it must name one or more, each once")
        ascending = all(a < b for a, b in zip(self.budgets, self.budgets[1:], strict=False))
        if not self.budgets or self.budgets[0] < 1 or not ascending:
            raise ConfigError(f"budgets={list(self.budgets)}: they must be integers of at least 1, ascending")

    def budgets_of(self, method: str) -> list[int]:
        """Return the budgets that a method is run at."""
        return [budget for budget in self.budgets if budget <= self.most.get(method, budget)]


@dataclass(frozen=True)
class Opening:
    """Where all methods of a seed begin, and what it took.

    Attributes:
        started: The starts, ``"start"`` among them, each with its evaluation: one query, beside what making it asked.
        seconds: What making and choosing them took.
        passes: What that cost the model.
    """

    started: Started
    seconds: float
    passes: Passes

    def record(self, task: FinetuneTask, test_metric: Metric) -> dict[str, Any]:
        """Return what is kept of it: every start's metric on the data that the metric sees and on the test data."""
        started, test = self.started, task.judged_by(test_metric)
        return {
            "chosen": shown(started.chosen),
            "queries": started.spent,
            "validation": {shown(name): each.value for name, each in started.evaluated.items()},
            "test": {shown(name): judge(test, start) for name, start in started.starts.items()},
            "seconds": self.seconds,
            "passes": asdict(self.passes),
        }


def shown(start: str) -> str:
    """Return what files and tables call a start."""
    return TRAINED if start == "start" else start


def run_seed(
    experiment_type: type[Experiment[Any]], config: RunConfig, plan: Plan, folder: Path, seed: int, callback: Callback
) -> None:
    """Run one seed and keep its starts and each method's row in ``folder/seed-N``.

    A method whose row is on file without errors is not run again, unless it is to run at further budgets.

    Args:
        experiment_type: What to run.
        config: The task's settings.
        plan: What to run on it.
        folder: The comparison's folder.
        seed: The seed.
        callback: Notified of progress.

    Raises:
        MetricOptError: Data, settings or metric are not usable; the message says which.
    """
    folder = folder / f"seed-{seed}"
    missing = [name for name in plan.methods if not finished(folder / f"{name}.json", plan.budgets_of(name))]
    if missing or not (folder / STARTS).exists():
        callback.stage("data and model")
        experiment = experiment_type(config, folder, seed, callback)
        experiment.task = made = counting(experiment.task.with_settings(experiment.in_force))  # some rows tune more
        before = made.metric.ledger.spent
        spent = Spent(callback)
        callback.stage("starts")
        began = now()
        known = chosen_starts(all_starts(made, offered(experiment, plan.starts)), plan.starts)
        asking = made.metric.ledger.spent - before
        (starts, lines), fresh = divided(known), _fresh(experiment.task, spent)
        evaluations = {name: fresh.evaluate(start, "starts") for name, start in starts.items()}
        limits = Limits.of(experiment.task.metric.constraints, evaluations["start"])
        chosen = chosen_start(starts, evaluations, limits, config.guard.confidence)
        started = Started(starts, chosen, len(starts) + asking, evaluations, lines)
        opening = Opening(started, now() - began, _passes(made, fresh, known))
        write_json(folder / STARTS, {"seed": seed, **opening.record(experiment.task, experiment.test_metric)})
        if limits is not None:  # as numbers, as a method may begin from another start than what they are relative to
            metric = experiment.task.metric.with_settings(subject_to=limits.texts())
            experiment.task = experiment.task.judged_by(metric)
        baselines = experiment.baselines(config, experiment)
        for name in missing:
            callback.stage(METHODS[name].title)
            begins = Opening(Started.at(made.origin()), 0.0, Passes()) if METHODS[name].standing else opening
            row = _Row(experiment, begins, spent)
            write_json(
                folder / f"{name}.json",
                {"method": name, **row.run(baselines[name], plan.budgets_of(name), name in TUNES_SETTINGS)},
            )
    callback.done()


def finished(file: Path, budgets: Sequence[int]) -> bool:
    """Tell whether a method's row is on file, has no errors, and was run at all budgets that it can do with."""
    if not file.exists():
        return False
    row = read_row(file)
    return not row["errors"] and {budget for budget in budgets if budget >= row["least"]} <= {*row["budgets"]}


def offered(experiment: Experiment[Any], wanted: Sequence[str]) -> dict[str, Start | StartLine]:
    """Return the starts that the experiment's settings name, and any others that are wanted, if they apply."""
    found, known = experiment.starts(), {*OFFERED, *STANDING}
    more = {name: experiment.start(name) for name in wanted if name not in found and name in known}
    return found | {name: start for name, start in more.items() if start is not None}


def chosen_starts(found: Mapping[str, Start | StartLine], wanted: Sequence[str]) -> dict[str, Start | StartLine]:
    """Return the wanted starts, or all if none is named; the model as it was trained is always among them.

    Raises:
        ConfigError: There is no such start.
    """
    names = {shown(name): name for name in found}
    for name in wanted:
        if name not in names:
            raise ConfigError(f"starts={list(wanted)}: {name!r} is none of {', '.join(names)}")
    return {name: start for name, start in found.items() if not wanted or shown(name) in (TRAINED, *wanted)}


def _fresh(task: FinetuneTask, spent: Spent) -> FinetuneTask:
    fresh = noticing(task)
    return fresh.judged_by(fresh.metric.with_callbacks(spent))


def _passes(made: CountedTask, fresh: FinetuneTask, starts: Mapping[str, Start | StartLine]) -> Passes:
    """Return what making and choosing the starts cost the model.

    Args:
        made: The task that they were made of, which counted the batches of a loss-only finetune.
        fresh: The task that judged them.
        starts: The starts, and lines of them; buffers are estimated anew in a pass over the metric's inputs, once for a
            start and the line that leads to it.
    """
    fixed, lines = divided(starts)
    names = {name for name, _ in made.adapter.model.named_buffers()}

    def buffers(start: Start) -> dict[str, Tensor]:
        return {name: value for name, value in start.tensors.items() if name in names}

    looked = [each for each in map(buffers, fixed.values()) if each]
    for line in lines.values():
        end = buffers(line.ends[-1])
        if end and not any(_has(each, end) for each in looked):
            looked.append(end)
    judged = passes_of(fresh)
    assert judged is not None
    return judged + Passes(len(looked), made.losses.count)


def _has(buffers: Mapping[str, Tensor], some: Mapping[str, Tensor]) -> bool:
    return all(name in buffers and same_bits(value, buffers[name]) for name, value in some.items())


class _Row:
    """One method on one seed.

    Args:
        experiment: The seed's.
        opening: Where it begins; what choosing that took counts as its own.
        spent: Told of each query.
    """

    def __init__(self, experiment: Experiment[Any], opening: Opening, spent: Spent) -> None:
        self.experiment, self.opening, self.spent = experiment, opening, spent
        self.task, self.started = experiment.task, opening.started
        # Where a method tunes settings of inference, what it compared had the free ones, and so have all its ends
        self.judging = self.task
        self.validation_metric = self.task.metric.with_settings()

    def run(self, baseline: Baseline, budgets: Sequence[int], tunes_settings: bool = False) -> dict[str, Any]:
        """Run a baseline at all budgets and return its row; an error marks its budget and those that depend on it.

        Args:
            baseline: The baseline.
            budgets: The budgets.
            tunes_settings: Whether its ends have settings of inference.
        """
        if tunes_settings:
            self.judging = self.task.with_settings(self.experiment.settings)
        seed, least = self.experiment.seed, baseline.least(self.task.dim) + self.started.spent
        possible = [budget for budget in budgets if budget >= least]
        cells: dict[str, Any] = {}
        errors: dict[str, str] = {}
        for group in [possible] if baseline.anytime and possible else [[budget] for budget in possible]:
            left = list(group)
            try:
                own = [budget - self.started.spent for budget in group]
                for reached in baseline.run(_fresh(self.task, self.spent), self.started, own, seed):
                    cells[str(left[0])] = self.cell(reached.after_choice(self.started.spent), left[0])
                    left.pop(0)
            except Exception as error:
                message = plain(" ".join(f"{type(error).__name__}: {error}".split()), MESSAGE)
                errors |= {str(budget): message for budget in left}
        machine = str(Machine.current(self.task.adapter.phi.device))
        asked = {"least": least, "budgets": possible}
        return {"seed": seed, **asked, "cells": cells, "errors": errors, "machine": machine}

    def cell(self, reached: Reached, budget: int) -> dict[str, Any]:
        """Return what is kept of where a method stood.

        Raises:
            BudgetError: It spent more than its budget.
        """
        if reached.queries > budget:
            raise BudgetError(f"{reached.queries} queries were spent of a budget of {budget}")
        return {
            "queries": reached.queries,
            "validation": judge(self.judging.judged_by(self.validation_metric), reached.end),
            "test": self.tested(self.judging, reached.end),
            "seconds": reached.seconds + self.opening.seconds,
            "passes": None if reached.passes is None else asdict(reached.passes + self.opening.passes),
            "guard": None if reached.result is None else self.guard(reached.result),
        }

    def guard(self, result: Result) -> dict[str, Any]:
        """Return a record of what the guard decided, and of what that came to on test."""
        tested = cache(lambda name: self.tested(self.judging, result.start_of(name)))
        metric, resampled = self.task.metric, not self.experiment.config.own_metric
        sign = 1 if self.experiment.test_metric.maximize else -1

        def change(before: str, after: str) -> Change:
            ends = result.start_of(before), result.start_of(after)
            error = self.experiment.test_error(*ends) if resampled else None  # by hundreds of calls
            return Change(sign * (tested(after) - tested(before)), error)

        return record_of(result, maximize=metric.maximize, change=change)

    def tested(self, task: FinetuneTask, end: End) -> float:
        """Return the test metric of a phi of a task's model, or of another model."""
        return judge(task.judged_by(self.experiment.test_metric), end)
