"""What a method costs the model: passes over the metric's data, and batches of the loss; a query may cost neither.

A query is a call of the metric, also on scores that are kept: a threshold tuned on them costs one pass, however many
queries. A search that moves phi costs a pass for each query, and what its loss gradients cost besides.
"""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask


@dataclass(frozen=True)
class Passes:
    """What the model was run for.

    Attributes:
        metric: Evaluations of the metric during which a model was run: passes over the metric's data.
        loss: Batches whose loss was computed, with its gradient: n for a population of n phi. Passes that look at
            outputs alone are not counted.
    """

    metric: int = 0
    loss: int = 0

    def __add__(self, other: "Passes") -> "Passes":
        """Return the sum."""
        return Passes(self.metric + other.metric, self.loss + other.loss)

    def __sub__(self, other: "Passes") -> "Passes":
        """Return the difference."""
        return Passes(self.metric - other.metric, self.loss - other.loss)


class Noticing:
    """A metric's function that notices whether a model runs meanwhile: any module that has parameters of its own.

    So it does not matter which model is judged: the task's, a copy with phi merged, or only its last layers, on
    features that are kept.

    Args:
        function: The metric's function.

    Attributes:
        runs: Calls during which a model ran.
        last: Whether one ran during the last call.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = self.__wrapped__ = function  # whose signature says whether it takes the model
        self.runs, self.last = 0, False

    def __call__(self, *model: nn.Module) -> Any:
        """Call the function."""
        self.last = False
        hook = register_module_forward_pre_hook(self._notice)
        try:
            return self.function(*model)
        finally:
            hook.remove()
            self.runs += self.last

    def _notice(self, module: nn.Module, inputs: Any) -> None:
        self.last = self.last or next(module.parameters(recurse=False), None) is not None


@dataclass
class Counter:
    """Counts something.

    Attributes:
        count: How much there was of it so far.
    """

    count: int = 0


@dataclass(frozen=True, eq=False)
class CountedTask(FinetuneTask):
    """A task that counts the batches whose loss it computes with its gradient, n for n phi.

    Attributes:
        losses: The count, which the tasks that are made of this one share.
    """

    _: KW_ONLY
    losses: Counter = field(default_factory=Counter, repr=False)

    def loss_and_gradient(
        self, phi: Tensor, seed: int, indices: Sequence[int], step: int, *, differentiable: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Compute and count; see `FinetuneTask.loss_and_gradient`."""
        self.losses.count += len(indices)
        return super().loss_and_gradient(phi, seed, indices, step, differentiable=differentiable)


def counting(task: FinetuneTask) -> CountedTask:
    """Return the same task, with all that it has, which counts the batches of its loss from now on."""
    counted = object.__new__(CountedTask)
    vars(counted).update({**vars(task), "losses": Counter()})  # its first batch was tried before
    return counted


def noticing(task: FinetuneTask) -> CountedTask:
    """Return the same task with an empty ledger and its passes counted from now on; see `passes_of`."""
    metric = Metric(Noticing(task.metric.function), **task.metric.settings)
    return counting(task.judged_by(metric.with_callbacks(*task.metric.callbacks)))


def passes_of(task: FinetuneTask) -> Passes | None:
    """Return what was counted of a task that `noticing` made, or of one made from that; None of any other."""
    function = task.metric.function
    if not isinstance(task, CountedTask) or not isinstance(function, Noticing):
        return None
    return Passes(function.runs, task.losses.count)


def queries_cost(task: FinetuneTask, queries: int) -> Passes:
    """Return what so many queries of such a task cost, if each cost what the last one did."""
    function = task.metric.function
    return Passes(metric=queries * int(isinstance(function, Noticing) and function.last))
