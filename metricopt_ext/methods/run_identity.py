"""What a run depends on, to tell it from other runs."""

from collections.abc import Mapping
from typing import Any, Protocol

from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.runtime.identity import fingerprint, fingerprint_of_code
from metricopt_ext.tasks.combine import Combination
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask

FORMAT = 9  # of what is kept: a folder of another format is not resumed


class Described(Protocol):
    """A strategy that tells what a run of it depends on."""

    def identity(self) -> dict[str, Any]:
        """Return that as JSON."""
        ...


def identity_of(
    strategy: Described,
    task: FinetuneTask,
    starts: Mapping[str, Start | StartLine],
    *,
    seed: int,
    size: dict[str, int],
) -> dict[str, Any]:
    """Return what a run depends on, to tell it from other runs.

    Args:
        strategy: The learner or search.
        task: Its model's weights count, so a retrained model makes another run.
        starts: What a guided search may begin from.
        seed: The run's seed.
        size: Sizes that follow from the budget: the tasks of a round, or the queries of a search.
    """
    settings = strategy.identity()
    if starts:
        settings["starts"] = {name: _identity_of_start(each) for name, each in starts.items()}
    return {**settings, **size, **identity_of_task(task, seed)}


def _identity_of_start(start: Start | StartLine) -> Any:
    if isinstance(start, StartLine):
        return [start.low, start.high, *start.first, *(each.digest for each in start.ends)]
    return [start.digest, dict(start.settings)] if start.settings else start.digest


def identity_of_task(task: FinetuneTask, seed: int) -> dict[str, Any]:
    """Return what any run on a task depends on, whatever its method.

    It is the format of what is kept, seed, metric, adapter and weights; of loss, labels and batches it is the loss of
    the first one, and of the metric's function its own code. Data that the metric alone sees is not looked at.
    """
    metric = task.metric
    with task.keeping_weights():
        first_loss = task.first_loss(seed)
    return {
        "format": FORMAT,
        "seed": seed,
        "metric": [metric.name, metric.maximize, metric.bounds],  # stored costs depend on the last two
        "repeats": metric.repeats,
        **({"classes are new": True} if metric.new_classes else {}),
        "code of the metric": fingerprint_of_code(metric.function),
        "adapter": task.adapter.signature.to_json(),
        "weights": fingerprint(task.adapter.base_state_dict()),
        "loss of the first batch": first_loss,
        "population": task.at_once,
        **({} if metric.combination is None else {"made of outcomes": _made_of(metric.combination)}),
        **({} if not metric.subject_to else {"subject to": bounded(metric)}),
        **({} if task.gradients is None else {"gradients": fingerprint({"gradients": task.gradients})}),
        **({} if task.settings is None else {"settings of inference": task.settings.identity()}),
    }


def _made_of(combination: Combination) -> list[Any]:
    how, told = combination.combine, sorted(combination.directions.items())
    return [fingerprint_of_code(how) if callable(how) else how, combination.combined, told]


def bounded(metric: Metric) -> dict[str, list[str]]:
    """Return what a metric is subject to by name, each with the digest of the function that tells it, if one does."""
    return {
        name: [text, *([fingerprint_of_code(metric.also[name])] if name in metric.also else [])]
        for name, text in metric.subject_to.items()
    }
