"""A metric that tells its value on two halves of its data."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from metricopt_ext.tasks.metric import Metric


def _halved(task: Any, apart: float) -> Any:
    """Let the metric tell halves that differ by up to ``apart``, whose mean is the metric."""

    def metric(model: Any) -> Any:
        value = task.distance(model)
        luck = apart * math.sin(float(model.metricopt.phi.sum()))
        return value, (value + luck, value - luck)

    task = replace(task, metric=Metric(metric, maximize=False, bounds=None, name="distance"))
    return task


@pytest.fixture
def halved() -> Callable[..., Any]:
    """Let a task's metric tell halves that differ by up to so much, whose mean is the metric."""
    return _halved
