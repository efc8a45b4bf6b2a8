"""A hook that records trajectories of phi while a trainer of pytorch-metric-learning finetunes it."""

from collections.abc import Callable
from typing import Any

from metricopt_ext.tasks.trajectories import Recording


class TrajectoryRecorder(Recording):
    """Records the first T steps of a trainer as a trajectory; an ``end_of_iteration_hook``.

    phi_0 is the adapter's phi when the recorder is created. All the trainer's models are in evaluation mode while the
    metric is evaluated. With ``trainer.recorders = {"recorder": recorder}`` and ``"recorders"`` among its
    ``saveable_trainer_objects``, a ``HookContainer`` saves what was recorded in its checkpoints and restores it from
    them.

    Args:
        arguments: Those of `Recording`: adapter, metric, store, steps, evals, seed, round and index. Create
            the recorder once phi is at its start.
        then: A hook to call afterwards, e.g. ``HookContainer.end_of_iteration_hook``.

    Raises:
        ValueError: K is out of range.

    Examples:
        >>> recorder = TrajectoryRecorder(adapter, metric, store, steps=50, evals=5, index=3)  # doctest: +SKIP
        >>> trainer = trainers.MetricLossOnly(..., end_of_iteration_hook=recorder)  # doctest: +SKIP
        >>> trainer.train(num_epochs=2)  # doctest: +SKIP
    """

    def __init__(self, *arguments: Any, then: Callable[[Any], Any] | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.then = then
        self.start()

    def __call__(self, trainer: Any) -> None:
        """Record an iteration of a trainer; see `Recording.record`."""
        self.record(trainer.losses["total_loss"].item(), trainer.models.values())
        if self.then is not None:
            self.then(trainer)
