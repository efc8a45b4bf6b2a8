"""A hook that records trajectories of phi while a trainer of pytorch-metric-learning finetunes it."""

from collections.abc import Callable
from typing import Any

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.recording import Recording
from metricopt_ext.tasks.trajectory import TrajectoryStore


class TrajectoryRecorder(Recording):
    """Records the first T steps of a trainer as a trajectory; an ``end_of_iteration_hook``.

    phi_0 is the adapter's phi when the recorder is made. All of the trainer's models are in evaluation mode while the
    metric is evaluated. With ``trainer.recorders = {"recorder": recorder}`` and ``"recorders"`` among its
    ``saveable_trainer_objects``, a ``HookContainer`` keeps what was recorded in its checkpoints and brings it back from
    them.

    Args:
        adapter: Handle on the trunk's adapter; make the recorder after phi is at its start.
        metric: Is evaluated on ``adapter.model`` and counts the K queries as ``"collect"``.
        store: Receives the trajectory; `fitting.fit_value_function` learns f from what it holds.
        steps: T, at least 1.
        evals: K, from 2 to T + 1.
        seed: Draws the observed steps, as in `trajectory.collect`.
        round: The trajectory's round: 0 where the loss alone is followed.
        index: The trajectory's index; another one for each run.
        then: A hook to call afterwards, e.g. ``HookContainer.end_of_iteration_hook``.

    Raises:
        ValueError: K is out of range.

    Example:
        >>> recorder = TrajectoryRecorder(adapter, metric, store, steps=50, evals=5, index=3)  # doctest: +SKIP
        >>> trainer = trainers.MetricLossOnly(..., end_of_iteration_hook=recorder)  # doctest: +SKIP
        >>> trainer.train(num_epochs=2)  # doctest: +SKIP
    """

    def __init__(
        self,
        adapter: Adapter,
        metric: Metric,
        store: TrajectoryStore,
        *,
        steps: int,
        evals: int,
        seed: int = 0,
        round: int = 0,
        index: int = 0,
        then: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(adapter, metric, store, steps=steps, evals=evals, seed=seed, round=round, index=index)
        self.then = then
        self.start()

    def __call__(self, trainer: Any) -> None:
        """Record what an iteration of a trainer did; see `recording.Recording.record`."""
        self.record(trainer.losses["total_loss"].item(), trainer.models.values())
        if self.then is not None:
            self.then(trainer)
