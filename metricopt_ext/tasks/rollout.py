"""Rollouts: finetuning a population of phi for T steps, and observing the metric along them (Algorithm 1, line 3)."""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from metricopt_ext.runtime.progress import Callback, told
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.tasks.trajectory import Trajectory, TrajectoryStore
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.utils.seeding import generator

Ends = Literal["observed", "random"]


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
    check_observations(steps, evals, ends)
    if ends == "random":
        return (torch.randperm(steps, generator=generator(seed, "observe", index))[:evals] + 1).sort().values
    inner = torch.randperm(steps - 1, generator=generator(seed, "observe", index))[: evals - 2] + 1
    return torch.cat([torch.tensor([0, steps]), inner]).sort().values


def check_observations(steps: int, evals: int, ends: str) -> None:
    """Reject a K that T steps don't allow; arguments as in `observation_steps`.

    Raises:
        ValueError: ``ends`` is unknown, or K is out of range.
    """
    if ends not in get_args(Ends):
        raise ValueError(f"ends is {ends!r}; it must be 'observed' or 'random'")
    if ends == "random" and not 2 <= evals <= steps:
        raise ValueError(f"evals is {evals}; it must be from 2 to steps = {steps} (ends is 'random')")
    if not 2 <= evals <= steps + 1:
        raise ValueError(f"evals is {evals}; it must be from 2 (both ends) to steps + 1 = {steps + 1}")


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
        if all(store.get(round, index) is not None for index in chunk):
            continue
        starts = task.starts(start_std, seed, chunk)
        phi, loss = rollout(task, starts, policy_of(chunk), steps=steps, seed=seed, indices=chunk)
        for row, index in enumerate(chunk):
            if store.get(round, index) is not None:
                continue
            observed = observation_steps(steps, evals, seed, index, ends=ends)
            kept = f"{len(store)} finished trajectories are kept"
            own = tuple(
                task.evaluate(phi[row, step], "collect", f"round {round}, task {index}, step {step}; {kept}")
                for step in observed.tolist()
            )
            signature = task.adapter.signature
            store.add(Trajectory(round, index, phi[row].cpu(), loss[row].cpu(), observed, own, signature))
    return [trajectory for index in indices if (trajectory := store.get(round, index)) is not None]
