"""A metric that tells its value on two halves of its data, and a learner whose f ranks everything backwards."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from metricopt_ext import Metric
from metricopt_ext.value.learners import RidgeLearner
from metricopt_ext.value.observations import Observations
from metricopt_ext.value.value_function import RidgeValueFunction


@pytest.fixture
def halved() -> Callable[..., Any]:
    """Let a task's metric tell halves that differ by up to so much, whose mean is the metric."""

    def make(task: Any, apart: float) -> Any:
        def metric(model: Any) -> Any:
            value = task.distance(model)
            luck = apart * math.sin(float(model.metricopt.phi.sum()))
            return value, (value + luck, value - luck)

        return task.judged_by(Metric(metric, maximize=False, bounds=None, name="distance"))

    return make


@pytest.fixture
def backwards() -> Callable[..., RidgeValueFunction]:
    """A learner whose f is never trusted on a `Quadratic`, without luck: it predicts the negative of its metric."""

    def learner(data: Observations, fold: Tensor, folds: int, seed: int) -> RidgeValueFunction:
        return RidgeLearner()(replace(data, cost=-data.cost), fold, folds, seed)

    return learner
