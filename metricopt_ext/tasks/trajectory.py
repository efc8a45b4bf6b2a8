"""Finetuning trajectories and the metrics observed along them: the value function's training data (Algorithm 1, 3)."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metricopt_ext.adapters.signature import Signature
from metricopt_ext.errors import FileFormatError
from metricopt_ext.runtime.identity import claim
from metricopt_ext.tasks.evaluation import Evaluation, stacked_halves
from metricopt_ext.utils.described import from_json
from metricopt_ext.utils.files import check_tensors, content_of, read_tensors, write_tensors
from metricopt_ext.utils.words import brief

FILE_FORMAT = "metricopt_ext/trajectory/3"

TRAJECTORIES = "trajectories"  # the folder of them in a run's folder


@dataclass(frozen=True)
class Trajectory:
    """One finetuning run of T steps, with its metric observed at K of its T + 1 points.

    Attributes:
        round: 0 for loss-only runs, 1, 2, ... for on-policy rounds.
        index: The task index; its start and its batches follow from it.
        phi: The points phi_0 ... phi_T, ``(T + 1) x d``.
        loss: The surrogate loss at phi_0 ... phi_{T-1}, each on its own batch, ``T``.
        observed: Steps at which the metric was evaluated, ascending, ``K``.
        evaluations: The metric's evaluations there, ``K``.
        signature: What phi means: the adapter that was finetuned; None if unknown.
    """

    round: int
    index: int
    phi: Tensor
    loss: Tensor
    observed: Tensor
    evaluations: tuple[Evaluation, ...]
    signature: Signature | None = None

    @cached_property
    def cost(self) -> Tensor:
        """The costs, float64, ``K``."""
        return torch.tensor([each.cost for each in self.evaluations], dtype=torch.float64)

    @cached_property
    def halves(self) -> Tensor | None:
        """The costs on two halves of the metric's data, float64, ``K x 2``; None if the metric reports none."""
        return stacked_halves(self.evaluations)

    @property
    def observed_phi(self) -> Tensor:
        """The points at which the metric was evaluated, ``K x d``."""
        return self.phi[self.observed]


class TrajectoryStore:
    """Append-only collection of trajectories, one file each, or kept in memory if no folder is given.

    Args:
        folder: Where the files are; None for memory only.
        identity: What the trajectories depend on (seed, layers, step count, ...). A folder with another
            identity is rejected.

    Attributes:
        check: Called before a file is written, to refuse it.

    Raises:
        FileFormatError: The folder belongs to another run, or a file in it is corrupt.
    """

    def __init__(self, folder: str | Path | None = None, identity: dict[str, Any] | None = None) -> None:
        self.folder: Path | None = None if folder is None else Path(folder)
        self.check: Callable[[], None] | None = None
        self._items: dict[tuple[int, int], Trajectory] = {}
        if self.folder is not None:
            claim(self.folder / "identity.json", identity or {})
            for trajectory in _read_all(self.folder):
                self._items[trajectory.round, trajectory.index] = trajectory

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Trajectory]:
        """Iterate in the order of (round, index), whatever the order of arrival."""
        return (self._items[key] for key in sorted(self._items))

    def get(self, round: int, index: int) -> Trajectory | None:
        """Return a stored trajectory, or None."""
        return self._items.get((round, index))

    def add(self, trajectory: Trajectory) -> None:
        """Store a finished trajectory; once this returns, it survives a kill."""
        key = trajectory.round, trajectory.index
        if key in self._items:
            raise ValueError(f"trajectory {trajectory.index} of round {trajectory.round} is already stored")
        if self.folder is not None:
            if self.check is not None:
                self.check()
            _write(self.folder / f"round-{trajectory.round}-task-{trajectory.index:05d}.safetensors", trajectory)
        self._items[key] = trajectory

    @property
    def queries(self) -> int:
        """Evaluations of the metric that the stored trajectories took."""
        return sum(len(trajectory.evaluations) for trajectory in self)


def load_trajectories(folder: str | Path) -> list[Trajectory]:
    """Read the trajectories of a run, finished or not, e.g. to fit another f to them without a query.

    Args:
        folder: The ``output_dir`` of `optimize_metric`, or the folder of a `TrajectoryStore`.

    Returns:
        The trajectories in the order of (round, index): phi ``(T + 1) x d``, costs ``K``, ...

    Raises:
        FileFormatError: There are none, or a file is corrupt.

    Examples:
        >>> trajectories = load_trajectories("out/mine")  # doctest: +SKIP
        >>> fit = fit_value_function(Observations.of(trajectories), [RidgeLearner()])  # doctest: +SKIP
    """
    folder = Path(folder)
    trajectories = _read_all(folder / TRAJECTORIES) or _read_all(folder)
    if not trajectories:
        raise FileFormatError(
            f"{folder} holds no trajectories; give the output_dir of a run that learned an f, or the folder of a"
            " TrajectoryStore"
        )
    return sorted(trajectories, key=lambda trajectory: (trajectory.round, trajectory.index))


def _read_all(folder: Path) -> list[Trajectory]:
    return [_read(path) for path in sorted(folder.glob("round-*.safetensors"))]


@dataclass(frozen=True)
class _Described:
    """What a trajectory's file says besides its tensors."""

    round: int
    index: int
    evaluations: tuple[Evaluation, ...]
    signature: Signature | None


def _write(path: Path, trajectory: Trajectory) -> None:
    tensors = {name: getattr(trajectory, name) for name in ("phi", "loss", "observed")}
    described = {name: getattr(trajectory, name) for name in ("round", "index", "evaluations")}
    signature = None if trajectory.signature is None else trajectory.signature.to_json()
    write_tensors(path, tensors, FILE_FORMAT, {**described, "signature": signature})


def _read(path: Path) -> Trajectory:
    tensors, content = read_tensors(path, FILE_FORMAT)
    with content_of(path, "trajectory"):
        described = from_json(_Described, content)
        points, dim = tensors["phi"].shape
        evaluations = described.evaluations
        check_tensors(path, tensors, {"phi": (points, dim), "loss": (points - 1,), "observed": (len(evaluations),)})
        if not all(math.isfinite(number) for each in evaluations for number in each.numbers):
            raise ValueError("an evaluation is not finite")
        observed = tensors["observed"]
        if observed.dtype != torch.int64 or not bool(((observed >= 0) & (observed < points)).all()):
            raise ValueError(f"its observed steps are {brief(observed.tolist())}, not steps from 0 to {points - 1}")
    return Trajectory(
        described.round, described.index, **tensors, evaluations=described.evaluations, signature=described.signature
    )
