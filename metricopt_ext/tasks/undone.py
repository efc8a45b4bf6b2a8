"""What a search does to a task's model and metric is undone where it is cut short."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.kept_modules import KeptModules
from metricopt_ext.utils.words import brief

Function = TypeVar("Function", bound=Callable[..., Any])


def undone_if_cut_short(function: Function) -> Function:
    """Let a function of a task leave the model as it was where it ends by an error, or is interrupted at any moment.

    Modes, hooks, which parameters are trained, phi and what a start replaced are put back, and the metric's ledger is
    its own again. A second interruption while this is under way is not caught.

    Args:
        function: Takes a `FinetuneTask` first.
    """

    @wraps(function)
    def whole(task: FinetuneTask, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(task, "adapter"):
            raise TypeError(f"task is {brief(task)}; it must be a FinetuneTask, of an adapter and a Metric")
        adapter, metric, ledger = task.adapter, task.metric, task.metric.ledger
        held, override, modules = adapter.as_start(), adapter.context.override, KeptModules(adapter.model)
        try:
            return function(task, *args, **kwargs)
        except BaseException:
            modules.put_back()
            adapter.context.use(override)
            adapter.apply(held)
            metric.ledger = ledger
            raise

    return cast(Function, whole)
