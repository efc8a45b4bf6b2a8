"""Hooks for Detectron2's trainers: record a trajectory, log and keep its best point, replay a run's random draws."""

import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from detectron2.engine import HookBase
from detectron2.engine.hooks import PeriodicWriter
from detectron2.utils import comm
from detectron2.utils.env import seed_all_rng
from detectron2.utils.events import CommonMetricPrinter
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.detection.detectron2.export import checkpoint_of, export
from metricopt_ext.errors import ConfigError, FileFormatError
from metricopt_ext.tasks.trajectories import Recording
from metricopt_ext.utils.files import write_atomically
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.words import counted

EMA_STATE = "ema_state"  # where the projects' moving averages are, in their models and in their checkpoints
AVERAGE = re.compile(r"EMA|Ema(?![a-z])|MovingAverage")  # in a class's name
LOGGER = logging.getLogger("detectron2.metricopt")  # a child of Detectron2's, which has the handlers


class TrajectoryHook(HookBase):  # type: ignore[misc]
    """Records the first T steps of a trainer as a trajectory.

    phi_0 is what the adapter holds when training starts. The trainer's checkpoints keep what was recorded, if the hook
    is registered before the one that writes them. With several processes, each must have the hook, as all of them
    compute the metric; give only the main one a store with a folder.

    Args:
        recording: What to record; see `Recording`.

    Examples:
        >>> recording = Recording(adapter, metric, TrajectoryStore(folder), steps=200, evals=10)  # doctest: +SKIP
        >>> trainer = SimpleTrainer(model, loader, optimizer)  # doctest: +SKIP
        >>> trainer.register_hooks([TrajectoryHook(recording)])  # doctest: +SKIP
        >>> trainer.train(0, 200)  # doctest: +SKIP
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    def before_train(self) -> None:
        """Take phi_0 and evaluate the metric at it; do nothing if a checkpoint restored an earlier part.

        Raises:
            ConfigError: The trainer averages weights; see `check_no_average`.
            FileFormatError: The store already has this trajectory.
        """
        check_no_average(self.recording.adapter.model, self.trainer._hooks)
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
        """Continue from a checkpoint; see `Recording.load_state_dict`."""
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


class EvaluationLog(HookBase):  # type: ignore[misc]
    """Logs each evaluation of a recorder's metric, and has Detectron2's writers write it, by the metric's name.

    The value after t steps is written at iteration t, where the loss is that of the same point.

    Register it after the recorder.

    Args:
        recording: What the recorder records.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.step = -1  # of the last evaluation
        self._pending = self._unwritten = False

    def before_train(self) -> None:
        """Log the start, or the point at which a run is resumed."""
        self._log_if_new()

    def before_step(self) -> None:
        """Hand the evaluation of this step's point to the writers, once they have written that of the last step's."""
        if self._unwritten:  # of each scalar, writers know only the latest value
            for writer in self._writers():
                writer.write()
        self._unwritten = self._pending
        self._put_if_pending()

    def after_step(self) -> None:
        """Log the evaluation of the new point, if there is one."""
        self._log_if_new()

    def after_train(self) -> None:
        """Hand the evaluation of the last point to the writers, which write once more."""
        self._put_if_pending()

    def _log_if_new(self) -> None:
        steps, values = self.recording.observed.tolist(), values_of(self.recording)
        taken = len(self.recording.losses)
        if taken == self.step or taken != steps[len(values) - 1]:
            return
        self.step, self._pending = taken, True
        best = best_of(self.recording)
        so_far = "best so far" if best == len(values) - 1 else f"best so far: {values[best]:.4f} after {steps[best]}"
        told = f"after {taken} of {self.recording.steps} steps ({so_far})" if taken else "before finetuning"
        LOGGER.info("%s: %.4f %s", self.recording.metric.name, values[-1], told)

    def _put_if_pending(self) -> None:
        if self._pending:
            name, value = self.recording.metric.name, values_of(self.recording)[-1]
            self.trainer.storage.put_scalar(name, value, smoothing_hint=False)
            self._pending = False

    def _writers(self) -> list[Any]:
        hooks = [hook for hook in self.trainer._hooks if isinstance(hook, PeriodicWriter)]
        writers = [writer for hook in hooks for writer in hook._writers]
        return [writer for writer in writers if not isinstance(writer, CommonMetricPrinter)]  # the log has it


class MergedCheckpoint(HookBase):  # type: ignore[misc]
    """Ends a run at its best evaluated point: sets phi to it, merges it into a checkpoint, and logs the verdict.

    The start is one of the points: if no other is better, it is kept. The verdict's numbers are written by the metric's
    name with ``_before``, ``_after``, ``_best`` and ``_best_step`` behind it. Register the hook before the one that
    evaluates the trained model.

    Args:
        adapter: Handle to the adapter.
        path: The file, e.g. ``OUTPUT_DIR/model_merged.pth``; see `export.export`.
        recording: What a recorder records; None keeps the last point, unjudged.
    """

    def __init__(self, adapter: Adapter, path: str | Path, recording: Recording | None = None) -> None:
        self.adapter, self.path, self.recording = adapter, Path(path), recording

    def before_train(self) -> None:
        """Check that nothing else chooses the model; see `check_no_average`."""
        check_no_average(self.adapter.model, self.trainer._hooks)

    def after_train(self) -> None:
        """Do nothing if training failed."""
        if self.trainer.iter < self.trainer.max_iter:
            return
        if self.recording is None:
            verdict = "the metric was not evaluated: the last step is kept, whether it is better or not"
        else:
            verdict = self._choose(self.recording)
        if comm.is_main_process():
            export(self.adapter.model, self.path)
        LOGGER.info("%s; merged into %s", verdict, self.path)

    def _choose(self, recording: Recording) -> str:
        """Set phi to the best point, and return the verdict in words."""
        name, steps, values = recording.metric.name, recording.observed.tolist(), values_of(recording)
        best, last = best_of(recording), len(values) - 1
        self.adapter.set_phi(recording.points[steps[best]])
        scalars = {"before": values[0], "after": values[last], "best": values[best], "best_step": steps[best]}
        scalars = {f"{name}_{key}": value for key, value in scalars.items()}
        self.trainer.storage.put_scalars(**scalars, smoothing_hint=False)
        outcome = f"{name}: {values[0]:.4f} before, {values[last]:.4f} after {steps[last]} steps"
        if not best:
            return f"{outcome}, none of {counted(last, 'evaluated step')} better than the start: the start is kept"
        change = f"{values[best] - values[0]:+.4f}"
        return f"{outcome}, best {values[best]:.4f} ({change}) after {steps[best]} steps: this step is kept"


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


def check_no_average(model: nn.Module, hooks: Iterable[HookBase] = ()) -> None:
    """Check that no moving average of weights (EMA) takes the place of the phi that was judged.

    Detectron2 has none of its own; hooks of projects keep one, or have the model keep it as ``ema_state``.

    Raises:
        ConfigError: The model or a hook keeps an average.
    """
    found = [f"the hook {type(each).__name__}" for each in hooks if _averages(each)]
    if hasattr(model, EMA_STATE):
        found.append(f"the model's {EMA_STATE}")
    if found:
        raise ConfigError(
            f"{found[0]} averages weights over steps, but the phi that was judged best is what is kept; switch it off"
            f" while phi is tuned. To tune an averaged detector, name its file as MODEL.WEIGHTS=FILE?entry={EMA_STATE}"
        )


def _averages(hook: HookBase) -> bool:
    return AVERAGE.search(type(hook).__name__) is not None or any(
        isinstance(each, AveragedModel) for each in vars(hook).values()
    )


def best_of(recording: Recording) -> int:
    """Return the index of the best evaluation, the first among equals."""
    costs = [each.cost for each in recording.evaluations]
    return costs.index(min(costs))


def values_of(recording: Recording) -> list[float]:
    """Return the evaluations so far, in the metric's own units."""
    return [each.value for each in recording.evaluations]
