"""Finetuning trajectories and the metrics observed along them: the value function's training data (Algorithm 1, 3)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metricopt_ext.adapters.signature import Signature
from metricopt_ext.errors import FileFormatError
from metricopt_ext.runtime.identity import claim
from metricopt_ext.tasks.evaluation import Evaluation, stacked_halves, stacked_noise
from metricopt_ext.utils.described import from_json
from metricopt_ext.utils.files import check_tensors, content_of, read_tensors, write_tensors
from metricopt_ext.utils.words import brief

FILE_FORMAT = "metricopt_ext/trajectory/2"

OPTIONAL = ("halves", "noise")  # tensors that not every file has

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
        cost: The metric there as a cost, float64, ``K``.
        halves: The costs on two halves of the metric's data, float64, ``K x 2``; None if the metric reports none.
        signature: What phi means: the adapter that was finetuned; None if unknown.
        noise: Standard errors of the costs, float64, ``K``; None if no evaluation is repeated.
    """

    round: int
    index: int
    phi: Tensor
    loss: Tensor
    observed: Tensor
    cost: Tensor
    halves: Tensor | None = None
    signature: Signature | None = None
    noise: Tensor | None = None

    @classmethod
    def of(
        cls,
        round: int,
        index: int,
        phi: Tensor,
        loss: Tensor,
        observed: Tensor,
        evaluations: Sequence[Evaluation],
        signature: Signature,
    ) -> "Trajectory":
        """Make one of the metric's evaluations at the observed steps; the others are as in the attributes."""
        cost = torch.tensor([each.cost for each in evaluations], dtype=torch.float64)
        halves, noise = stacked_halves(evaluations), stacked_noise(evaluations)
        return cls(round, index, phi, loss, observed, cost, halves, signature, noise)

    @property
    def evaluations(self) -> list[Evaluation]:
        """The metric's evaluations at the observed steps, ``K``."""
        unknown = [None] * len(self.cost)
        halves = unknown if self.halves is None else [(a, b) for a, b in self.halves.tolist()]
        noise = unknown if self.noise is None else self.noise.tolist()
        return [Evaluation(*each) for each in zip(self.cost.tolist(), halves, noise, strict=True)]

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
        return sum(len(trajectory.cost) for trajectory in self)


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
    signature: Signature | None


def _write(path: Path, trajectory: Trajectory) -> None:
    tensors = {name: getattr(trajectory, name) for name in ("phi", "loss", "observed", "cost")}
    tensors |= {name: each for name in OPTIONAL if (each := getattr(trajectory, name)) is not None}
    signature = None if trajectory.signature is None else trajectory.signature.to_json()
    described = {"round": trajectory.round, "index": trajectory.index, "signature": signature}
    write_tensors(path, tensors, FILE_FORMAT, described)


def _read(path: Path) -> Trajectory:
    tensors, content = read_tensors(path, FILE_FORMAT)
    with content_of(path, "trajectory"):
        described = from_json(_Described, content)
        points, dim = tensors["phi"].shape
        evaluations = len(tensors["observed"])
        shapes = {"phi": (points, dim), "loss": (points - 1,), "observed": (evaluations,), "cost": (evaluations,)}
        more = {"halves": (evaluations, 2), "noise": (evaluations,)}
        check_tensors(path, tensors, shapes | {name: more[name] for name in OPTIONAL if name in tensors})
        observed = tensors["observed"]
        if observed.dtype != torch.int64 or not bool(((observed >= 0) & (observed < points)).all()):
            raise ValueError(f"its observed steps are {brief(observed.tolist())}, not steps from 0 to {points - 1}")
    return Trajectory(described.round, described.index, **tensors, signature=described.signature)
