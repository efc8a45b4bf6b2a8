"""Finetuning trajectories and the metric observed along them: f's training data (Algorithm 1, lines 2 and 3)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.signature import Signature
from metricopt_ext.errors import FileFormatError, MetricError
from metricopt_ext.runtime.identity import claim
from metricopt_ext.runtime.progress import Callback, told
from metricopt_ext.tasks.evaluation import Evaluation, stacked_halves
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.utils.described import from_json
from metricopt_ext.utils.files import check_tensors, content_of, parse_json, read_tensors, to_json, write_tensors
from metricopt_ext.utils.modes import evaluating
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.words import brief

FILE_FORMAT = "metricopt_ext/trajectory/3"

TRAJECTORIES = "trajectories"  # the folder of them in a run's folder

Ends = Literal["observed", "random"]


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
        self.check: Callable[[], None] = lambda: None
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
        >>> fit = fit_value_function(Observations.of(trajectories), NeuralLearner())  # doctest: +SKIP
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
        own = from_json(_Described, content)
        points, dim = tensors["phi"].shape
        check_tensors(path, tensors, {"phi": (points, dim), "loss": (points - 1,), "observed": (len(own.evaluations),)})
        for each in own.evaluations:
            each.check()
        observed = tensors["observed"]
        if observed.dtype != torch.int64 or not bool(((observed >= 0) & (observed < points)).all()):
            raise ValueError(f"its observed steps are {brief(observed.tolist())}, not steps from 0 to {points - 1}")
    return Trajectory(own.round, own.index, **tensors, evaluations=own.evaluations, signature=own.signature)


class Policy(Protocol):
    """How a population moves in one step: `optimizer.LossStep`, `optimizer.MetricOptStep`."""

    def __call__(self, phi: Tensor, history: Tensor, step: int) -> Tensor:
        """Return the next phi, ``n x d``, from phi, ``n x d``, and its loss gradients so far, ``n x k x d``."""
        ...


def rollout(
    task: FinetuneTask,
    phi: Tensor,
    policy: Policy,
    *,
    steps: int,
    seed: int,
    indices: Sequence[int],
    history: int = 3,
    callback: Callback | None = None,
) -> tuple[Tensor, Tensor]:
    """Finetune a population for T steps.

    Args:
        task: What is finetuned.
        phi: The starts, ``n x d``.
        policy: The step rule.
        steps: T.
        seed: Seed of the batches.
        indices: The n task indices.
        history: Number k of past loss gradients that the policy sees.
        callback: Told how far it is.

    Returns:
        The visited points phi_0 ... phi_T, ``n x (T + 1) x d``, and the losses, ``n x T``.

    Raises:
        ValueError: ``history`` is below 1.
    """
    check_integer(1, history=history)
    points, losses, gradients = [phi], [], phi.new_zeros(len(phi), 0, phi.shape[-1])
    for step in told(range(steps), callback or Callback(), "loss steps"):
        loss, gradient = task.loss_and_gradient(phi, seed, indices, step)
        gradients = torch.cat([gradients, gradient[:, None]], dim=1)[:, -history:]
        phi = policy(phi, gradients, step)
        points.append(phi)
        losses.append(loss)
    return torch.stack(points, 1), torch.stack(losses, 1)


def observation_steps(steps: int, evals: int, seed: int, index: int, *, ends: Ends = "observed") -> Tensor:
    """Return K ascending steps at which the metric is evaluated.

    Args:
        steps: T.
        evals: K.
        seed: The run's seed.
        index: The task's index.
        ends: ``"observed"``: steps 0 and T, and others drawn at random between them. ``"random"``: all are drawn at
            random from 1 ... T, as the paper has it.

    Raises:
        ValueError: T or K is not an integer, ``ends`` is unknown, or K is below 2 or above the number of steps that
            there are to observe.
    """
    check_integer(0, steps=steps, evals=evals)
    if ends not in get_args(Ends):
        raise ValueError(f"ends is {ends!r}; it must be 'observed' or 'random'")
    known = [0, steps] if ends == "observed" else []
    most = steps + 1 if known else steps
    if not 2 <= evals <= most:
        raise ValueError(f"evals is {evals}; it must be from 2 to {most}, as steps is {steps} and ends is {ends!r}")
    between = torch.randperm(steps - 1 if known else steps, generator=generator(seed, "observe", index)) + 1
    return torch.cat([torch.tensor(known, dtype=torch.int64), between[: evals - len(known)]]).sort().values


def collect(
    task: FinetuneTask,
    store: TrajectoryStore,
    policy_of: Callable[[Sequence[int]], Policy],
    *,
    round: int,
    indices: Sequence[int],
    start_std: float,
    steps: int,
    evals: int,
    seed: int,
    ends: Ends = "observed",
) -> list[Trajectory]:
    """Run one round of tasks and observe the metric K times along each (Algorithm 1, line 3).

    No step depends on the metric, so each chunk of ``task.at_once`` tasks runs first and is evaluated afterwards,
    task by task; each task is stored once its K queries are done. Tasks already in the store are not evaluated again.

    Args:
        task: What is finetuned.
        store: Receives the trajectories.
        policy_of: Returns the step rule of a chunk of task indices.
        round: 0 for loss-only, then 1, 2, ...
        indices: Task indices; fixed chunks of them are run together, so that a resumed run is the same bit for bit.
        start_std: Standard deviation of the starts phi_0.
        steps: T.
        evals: K.
        seed: The run's seed.
        ends: Whether both ends are observed; see `observation_steps`.

    Returns:
        The trajectories in the order of ``indices``.

    Raises:
        BudgetError: The metric's budget ran out; finished trajectories are in the store.
        MetricError: The metric failed; finished trajectories are in the store.
    """
    for at in range(0, len(indices), task.at_once):
        chunk = indices[at : at + task.at_once]
        rows = [row for row, index in enumerate(chunk) if store.get(round, index) is None]
        if not rows:
            continue
        starts = task.starts(start_std, seed, chunk)
        phi, loss = rollout(task, starts, policy_of(chunk), steps=steps, seed=seed, indices=chunk)
        for row in rows:
            observed = observation_steps(steps, evals, seed, chunk[row], ends=ends)
            where = f"{len(store)} finished trajectories are kept; round {round}, task {chunk[row]}, step"
            own = tuple(task.evaluate(phi[row, step], "collect", f"{where} {step}") for step in observed.tolist())
            run = phi[row].cpu(), loss[row].cpu(), observed, own, task.adapter.signature
            store.add(Trajectory(round, chunk[row], *run))
    return [trajectory for index in indices if (trajectory := store.get(round, index)) is not None]


@dataclass(eq=False)
class Recording:
    """Collects the first T steps of a trainer as a trajectory; the toolkits' hooks feed it.

    phi_0 is the adapter's phi at `start`; the t-th `record` adds phi_t, with the loss at phi_{t-1}. The metric is
    evaluated at K of the T + 1 points as they are reached, with the models in evaluation mode; torch's random streams
    are restored afterwards, so training is unaffected. After T steps the trajectory is in the store, and nothing more
    is recorded. A trajectory that is already in the store is not recorded again.

    Args:
        adapter: Handle to the adapter.
        metric: Evaluated on ``adapter.model``; counts the K queries as ``"collect"``.
        store: Receives the trajectory; `fitting.fit_value_function` learns f from its trajectories.
        steps: T, at least 1.
        evals: K, from 2 to T + 1.
        seed: Draws the observed steps, as in `collect`.
        round: The trajectory's round: 0 if the loss alone is followed.
        index: The trajectory's index; a different one for each run.

    Raises:
        ValueError: A number is out of range.
    """

    adapter: Adapter
    metric: Metric
    store: TrajectoryStore
    _: KW_ONLY
    steps: int
    evals: int
    seed: int = 0
    round: int = 0
    index: int = 0
    points: list[Tensor] = field(init=False, default_factory=list)
    losses: list[float] = field(init=False, default_factory=list)
    evaluations: list[Evaluation] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        """Draw the observed steps."""
        self.observed = observation_steps(self.steps, self.evals, self.seed, self.index)

    @property
    def trajectory(self) -> Trajectory | None:
        """The finished trajectory; None before T steps."""
        return self.store.get(self.round, self.index)

    def start(self) -> None:
        """Take the adapter's phi as phi_0."""
        self.points = [self._phi()]

    def record(self, loss: float, models: Iterable[nn.Module]) -> None:
        """Record that a step was taken.

        Args:
            loss: The loss before the step.
            models: What the trainer trains.

        Raises:
            MetricError: The metric failed; the message says at which step.
            BudgetError: The metric's budget is spent.
        """
        if self.trajectory is None:
            self.losses.append(loss)
            self.points.append(self._phi())
            self.observe(models)

    def observe(self, models: Iterable[nn.Module]) -> None:
        """Evaluate the metric at every point that is due, and store the trajectory once all are."""
        models = list(models)
        for step in self.observed[len(self.evaluations) :].tolist():
            if step >= len(self.points):
                break
            try:
                self.evaluations.append(self._evaluate(models, self.points[step]))
            except MetricError as error:
                raise MetricError(f"{error} (round {self.round}, task {self.index}, step {step})") from error
        self._store_if_finished()

    def state_dict(self) -> dict[str, Any]:
        """Return what has been recorded so far, for a checkpoint: tensors, and the evaluations as JSON has them."""
        return {
            "observed": self.observed,
            "phi": torch.stack(self.points),
            "loss": torch.tensor(self.losses, dtype=torch.float64),
            "evaluations": to_json(self.evaluations),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned.

        Raises:
            FileFormatError: The state observes other steps, so it belongs to another trajectory.
        """
        if not torch.equal(state["observed"].cpu(), self.observed):
            raise FileFormatError(
                f"the checkpoint's trajectory is observed at steps {state['observed'].tolist()}, this one at"
                f" {self.observed.tolist()}; create the recorder with the checkpoint's steps, evals, seed and index"
            )
        self.points = list(state["phi"].cpu())
        self.losses = state["loss"].tolist()
        self.evaluations = [from_json(Evaluation, each) for each in parse_json(state["evaluations"])]
        self._store_if_finished()

    def _phi(self) -> Tensor:
        return self.adapter.phi.detach().cpu().clone()

    def _evaluate(self, models: list[nn.Module], phi: Tensor) -> Evaluation:
        device, there = self.adapter.phi.device, replace(self.adapter.as_start(), phi=phi)
        with ExitStack() as held:
            for model in models:
                held.enter_context(evaluating(model))
            held.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
            return self.metric.evaluate(held.enter_context(self.adapter.applied(there)), "collect")

    def _store_if_finished(self) -> None:
        if self.trajectory is not None or len(self.losses) < self.steps:
            return
        points, told = torch.stack(self.points), tuple(self.evaluations)
        loss, signature = torch.tensor(self.losses, dtype=points.dtype), self.adapter.signature
        self.store.add(Trajectory(self.round, self.index, points, loss, self.observed, told, signature))
