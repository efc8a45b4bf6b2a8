"""Free candidates that a search may start from, and the choice among them by one query each."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.errors import ConfigError
from metricopt_ext.tasks.metric import Evaluation
from metricopt_ext.tasks.task import FinetuneTask


class Start(NamedTuple):
    """A candidate that costs no query to make.

    Attributes:
        phi: Where the search starts, ``d``.
        buffers: Buffers of the model, by name, that replace its own, e.g. re-estimated BatchNorm statistics.
    """

    phi: Tensor
    buffers: Mapping[str, Tensor] = {}


def with_start(task: FinetuneTask, start: Start) -> FinetuneTask:
    """Return the task on a copy of its model that has the start's buffers.

    Raises:
        ConfigError: The model has no such buffer.
    """
    model = copy.deepcopy(task.adapter.model)
    own = dict(model.named_buffers())
    for name, value in start.buffers.items():
        if name not in own:
            raise ConfigError(f"the model has no buffer {name!r}")
        own[name].copy_(value)
    return replace(task, adapter=Adapter(model))


def best_start(task: FinetuneTask, starts: Mapping[str, Start]) -> tuple[str, dict[str, Evaluation]]:
    """Evaluate the metric once at each candidate and return the best one's name, the first of equals, and all values.

    Raises:
        ConfigError: There is no candidate.
    """
    if not starts:
        raise ConfigError("there is no start to choose from")
    found = {name: with_start(task, start).evaluate(start.phi, "starts") for name, start in starts.items()}
    return min(found, key=lambda name: found[name].cost), found
