"""Records trajectories of phi while another toolkit's trainer finetunes it."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.errors import FileFormatError, MetricError
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.rollout import observation_steps
from metricopt_ext.tasks.trajectory import Trajectory, TrajectoryStore
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.utils.described import from_json
from metricopt_ext.utils.files import parse_json, to_json
from metricopt_ext.utils.modes import kept_modes


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
        seed: Draws the observed steps, as in `rollout.collect`.
        round: The trajectory's round: 0 if the loss alone is followed.
        index: The trajectory's index; a different one for each run.

    Raises:
        ValueError: A number is out of range.
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
    ) -> None:
        check_integer(0, round=round, index=index)
        self.adapter, self.metric, self.store = adapter, metric, store
        self.steps, self.round, self.index = steps, round, index
        self.observed = observation_steps(steps, evals, seed, index)
        self.points: list[Tensor] = []
        self.losses: list[float] = []
        self.evaluations: list[Evaluation] = []

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
        if self.trajectory is not None:
            return
        self.losses.append(loss)
        self.points.append(self._phi())
        self.observe(models)
        self._store_if_finished()

    def observe(self, models: Iterable[nn.Module]) -> None:
        """Evaluate the metric at every point that is due."""
        models = list(models)
        for step in self.observed[len(self.evaluations) :].tolist():
            if step >= len(self.points):
                break
            try:
                self.evaluations.append(self._evaluate(models, self.points[step]))
            except MetricError as error:
                raise MetricError(f"{error} (round {self.round}, task {self.index}, step {step})") from error

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
        device = self.adapter.phi.device
        before, put_back_modes = self.adapter.phi.detach().clone(), kept_modes(*models)
        try:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                for model in models:
                    model.eval()
                self.adapter.set_phi(phi)
                evaluation = self.metric.evaluate(self.adapter.model, "collect")
            self.adapter.set_phi(before)
            put_back_modes()
            return evaluation
        except BaseException:  # also one that cuts the lines before short
            self.adapter.set_phi(before)
            put_back_modes()
            raise

    def _store_if_finished(self) -> None:
        if self.trajectory is not None or len(self.losses) < self.steps:
            return
        points, told = torch.stack(self.points), tuple(self.evaluations)
        loss = torch.tensor(self.losses, dtype=points.dtype)
        signature = self.adapter.signature
        self.store.add(Trajectory(self.round, self.index, points, loss, self.observed, told, signature))
