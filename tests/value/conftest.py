"""Costs that are known, trajectories on which they were observed, and curves drawn from Gaussian processes."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.evaluations import told
from helpers.tensors import rand32
from metricopt_ext.tasks.trajectories import Trajectory, observation_steps


def _smooth(phi: Tensor) -> Tensor:
    return torch.tanh(phi[..., 0] + 2 * phi[..., 1] * phi[..., 2]) + 0.3 * phi[..., 3] ** 2


def _diagonal(phi: Tensor) -> Tensor:
    i = torch.arange(phi.shape[-1])
    return 0.7 + phi @ (0.5 - i / 4).to(phi) + phi**2 @ (0.3 * (-1.0) ** i).to(phi)


def _trajectories(
    cost: Any, n: int = 24, d: int = 6, evals: int = 5, rounds: int = 1, dtype: torch.dtype = torch.float32
) -> list[Trajectory]:
    made = []
    for index in range(n):
        walk = 0.5 * rand32(1, d, seed=2 * index) + 0.1 * rand32(21, d, seed=2 * index + 1).cumsum(0)
        observed = observation_steps(20, evals, 0, index)
        values = cost(walk[observed].double())
        made.append(Trajectory(index * rounds // n, index, walk.to(dtype), torch.zeros(20), observed, told(values)))
    return made


def _along(steps: int, observed: Sequence[int], cost: Any, *, index: int = 0, round: int = 0) -> Trajectory:
    phi = torch.randn(steps + 1, 3, generator=torch.Generator().manual_seed(index))
    costs = torch.as_tensor(np.asarray(cost, dtype=np.float64))
    return Trajectory(round, index, phi, torch.zeros(steps), torch.tensor(list(observed)), told(costs))


def _mixed(seed: int = 0) -> list[Trajectory]:
    rng = np.random.default_rng(seed)
    shapes = [(20, 5), (7, 2), (20, 5), (30, 9), (6, 7), (7, 5), (20, 5)]
    return [
        _along(steps, observation_steps(steps, evals, seed, i).tolist(), 0.4 + 0.1 * rng.normal(size=evals), index=i)
        for i, (steps, evals) in enumerate(shapes)
    ]


def _sampled(
    count: int, evals: int, *, length_scale: float, noise: float, level: float, seed: int = 0
) -> list[Trajectory]:
    """Draw trajectories of 40 steps from a Gaussian process of output scale 1; noise and level are deviations."""
    rng = np.random.default_rng(seed)
    t = np.arange(41) / 40
    root = np.linalg.cholesky(np.exp(-((t[:, None] - t) ** 2) / (2 * length_scale**2)) + 1e-9 * np.eye(41))
    made = []
    for i in range(count):
        observed = observation_steps(40, evals, seed, i)
        curve = root @ rng.normal(size=41) + level * rng.normal()
        made.append(_along(40, observed.tolist(), curve[observed] + noise * rng.normal(size=evals), index=i))
    return made


@pytest.fixture
def smooth() -> Callable[..., Any]:
    """A cost that no diagonal quadratic follows."""
    return _smooth


@pytest.fixture
def diagonal() -> Callable[..., Any]:
    """A cost that is a diagonal quadratic."""
    return _diagonal


@pytest.fixture
def trajectories() -> Callable[..., Any]:
    """Make trajectories of 20 steps on which a cost was observed."""
    return _trajectories


@pytest.fixture
def along() -> Callable[..., Any]:
    """Make a trajectory with given costs at given steps."""
    return _along


@pytest.fixture
def mixed() -> Callable[..., Any]:
    """Make trajectories of various K and T, in no order."""
    return _mixed


@pytest.fixture
def sampled() -> Callable[..., Any]:
    """Draw trajectories of 40 steps from a Gaussian process of output scale 1."""
    return _sampled
