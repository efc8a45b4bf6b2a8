"""Algorithm 1 as printed, with parts of it changed: by name, the fields of `Algorithm1` that differ."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from linear_labels import LinearLabels
from metricopt_ext.methods.paper.recipe import GuidedESSteps, Recipe
from metricopt_ext.tasks.trajectories import Trajectory
from metricopt_ext.value.interpolation import GaussianProcessLabels
from metricopt_ext.value.learning import NeuralLearner
from metricopt_ext.value.observations import Labeller, Observations
from metricopt_ext.value.reptile import ReptileLearner

PAPER = ReptileLearner.paper()
OBSERVED: dict[str, Any] = {"labels": Recipe().labels}


@dataclass(frozen=True)
class WithoutSigma:
    """Labels as another labeller makes them, all equally certain: the paper's Fig. 3b without uncertainties.

    Attributes:
        labels: The other labeller.
    """

    labels: Labeller

    def __call__(self, trajectories: Sequence[Trajectory]) -> Observations:
        """Return its labels, each with a sigma of 1."""
        labelled = self.labels(trajectories)
        return replace(labelled, sigma=torch.ones_like(labelled.sigma))


def objective(**change: Any) -> dict[str, Any]:
    """Return the learner with another objective."""
    return {"learner": replace(PAPER, objective=replace(PAPER.objective, **change))}


# What the paper's Fig. 3 and Fig. S4 change, and Adam.
PARTS: dict[str, dict[str, Any]] = {
    "Adam": {"optimizer": "adam"},
    "f trained offline": {
        "learner": replace(NeuralLearner.offline(), objective=replace(PAPER.objective, hardest=False))
    },
    "Reptile, mixed batches": {"learner": ReptileLearner(objective=PAPER.objective)},
    "no sigma": {"labels": WithoutSigma(GaussianProcessLabels())},
    "no ordinal term": objective(beta=0.0),
    "gamma 1": objective(gamma=1.0),
    "labels: linear": {"labels": LinearLabels()},
    "labels: observed": OBSERVED,
    "P = 12": {"follow": GuidedESSteps(count=12)},
    "k = 1": {"follow": GuidedESSteps(history=1)},
    "s^2 = 0.1": {"follow": GuidedESSteps(variance=0.1)},
}

# The literal alternatives of how the paper is read.
LITERAL: dict[str, dict[str, Any]] = {
    "kernel: RBF alone": {"labels": GaussianProcessLabels(levels=False)},
    "sigma of the posterior": {"labels": GaussianProcessLabels(noisy=False)},
    "k from the first step": {"follow": GuidedESSteps(history_grows=False)},
    "ends at random": {"ends": "random"},
}
