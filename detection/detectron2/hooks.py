"""Hooks for Detectron2's trainers: record a trajectory, save its best model, replay a run's random draws."""

import io
from pathlib import Path
from typing import Any

import torch
from detectron2.engine import HookBase
from detectron2.utils import comm
from detectron2.utils.env import seed_all_rng
from torch import Tensor

from metricopt_ext.errors import ConfigError, FileFormatError
from metricopt_ext.tasks.recording import Recording
from metricopt_ext.utils.files import write_atomically
from metricopt_ext.utils.seeding import generator


class TrajectoryRecorder(HookBase):  # type: ignore[misc]
    """Records the first T steps of a trainer as a trajectory.

    phi_0 is what the adapter holds when training starts. The trainer's checkpoints keep what was recorded, if the hook
    is registered before the one that writes them. With several processes, each must have the hook, as all of them
    compute the metric; give only the main one a store with a folder.

    Args:
        recording: What to record; see `recording.Recording`.

    Example:
        >>> recording = Recording(adapter, metric, TrajectoryStore(folder), steps=200, evals=10)  # doctest: +SKIP
        >>> trainer = SimpleTrainer(model, loader, optimizer)  # doctest: +SKIP
        >>> trainer.register_hooks([TrajectoryRecorder(recording)])  # doctest: +SKIP
        >>> trainer.train(0, 200)  # doctest: +SKIP
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    def before_train(self) -> None:
        """Take phi_0 and evaluate the metric at it; do nothing if a checkpoint restored an earlier part.

        Raises:
            FileFormatError: The store already has this trajectory.
        """
        if self.recording.points:
            return
        if self.recording.trajectory is not None:
            raise FileFormatError(
                f"trajectory {self.recording.index} of round {self.recording.round} is already stored; give this run"
                " another index"
            )
        self.recording.start()
        self.recording.observe([self.trainer.model])

    def after_step(self) -> None:
        """Record the step.

        Raises:
            MetricError: The metric failed; the message says at which step.
            ConfigError: The trainer does not write its loss at every step.
        """
        self.recording.record(self._loss(), [self.trainer.model])

    def state_dict(self) -> dict[str, Tensor]:
        """Return what has been recorded so far, for the trainer's checkpoint."""
        return self.recording.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a checkpoint; see `recording.Recording.load_state_dict`."""
        self.recording.load_state_dict(state)

    def _loss(self) -> float:
        # Only the main process writes the loss, a mean over all processes.
        latest = self.trainer.storage.latest().get("total_loss")
        (loss, iteration), *_ = comm.all_gather(latest or (None, None))
        if iteration != self.trainer.iter:
            raise ConfigError("the trainer wrote no loss at this step; it must have gather_metric_period=1")
        return float(loss)


class BestCheckpoint(HookBase):  # type: ignore[misc]
    """Saves the model at the best of the points at which a recorder evaluates the metric, including the start.

    Register it after the recorder. The file holds ``{"model": state dict}``, including phi.

    Args:
        recording: What the recorder records.
        path: The file, e.g. ``OUTPUT_DIR/model_best.pth``.
    """

    def __init__(self, recording: Recording, path: str | Path) -> None:
        self.recording, self.path = recording, Path(path)
        self.seen = 0

    def before_train(self) -> None:
        """Save the start; do nothing if a checkpoint restored an earlier part."""
        if len(self.recording.points) > 1:
            self.seen = len(self.recording.evaluations)
        self._save_if_best()

    def after_step(self) -> None:
        """Save the model if its metric is the best so far."""
        self._save_if_best()

    def _save_if_best(self) -> None:
        costs = [each.cost for each in self.recording.evaluations]
        if len(costs) == self.seen:
            return
        self.seen = len(costs)
        if comm.is_main_process() and costs[-1] < min(costs[:-1], default=float("inf")):
            write_atomically(self.path, checkpoint_of(self.recording.adapter.model.state_dict()))


class ReplayedSteps(HookBase):  # type: ignore[misc]
    """Draws what a step samples from (seed, index, step, rank), so a resumed run continues as if it had not stopped.

    Detectron2's data loader starts anew in a resumed run: used batches are read again and skipped. The run is the same
    bit for bit if no worker process reads the images (``DATALOADER.NUM_WORKERS: 0``) and the data loader's order comes
    from a seed.

    Args:
        seed: The run's seed.
        index: The trajectory's index.
    """

    def __init__(self, seed: int, index: int = 0) -> None:
        self.seed, self.index = seed, index

    def before_train(self) -> None:
        """Skip the batches of the steps before the first."""
        # A DefaultTrainer steps through another trainer, which has the batches.
        trainer: Any = getattr(self.trainer, "_trainer", self.trainer)
        for step in range(self.trainer.start_iter):
            self._seed_all(step)
            next(trainer._data_loader_iter)

    def before_step(self) -> None:
        """Seed Python's, NumPy's and torch's global streams."""
        self._seed_all(self.trainer.iter)

    def _seed_all(self, step: int) -> None:
        seed_all_rng(generator(self.seed, "step", self.index, step, comm.get_rank()).initial_seed() % 2**31)


def checkpoint_of(state: dict[str, Any]) -> bytes:
    """Return the content of a file for Detectron2's checkpointer, from a model's state dict."""
    buffer = io.BytesIO()
    torch.save({"model": {name: tensor.cpu() for name, tensor in state.items()}}, buffer)
    return buffer.getvalue()
