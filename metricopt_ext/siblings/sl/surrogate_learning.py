"""Learning Surrogate Losses (Grabocka et al., 2019): the model descends a loss that is learned beside it."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.runtime.progress import Callback, told
from metricopt_ext.siblings.class_labels import class_labels
from metricopt_ext.siblings.clipped_adam import ClippedAdam
from metricopt_ext.siblings.learned_metric import check_metric
from metricopt_ext.siblings.sibling import Sibling
from metricopt_ext.siblings.sl.best_threshold import check_thresholds, lowest_cost
from metricopt_ext.siblings.sl.set_loss import SetLoss, UniversalTraining, check_network, finite
from metricopt_ext.siblings.sl.set_network import Network
from metricopt_ext.siblings.training import History, TrainingTask
from metricopt_ext.utils.checks import check_above, check_integer
from metricopt_ext.utils.modes import evaluating
from metricopt_ext.utils.words import counted

Surrogate = Literal["universal", "scratch", "refined"]
Judged = Literal["training", "evaluation"]
First = Literal["model", "surrogate"]
SURROGATES: tuple[Surrogate, ...] = ("universal", "scratch", "refined")
JUDGED: tuple[Judged, ...] = ("training", "evaluation")
FIRST: tuple[First, ...] = ("model", "surrogate")


@dataclass(frozen=True)
class SurrogateLearning(Sibling):
    """Algorithm 1: in turn, the model descends the surrogate (Eq. 4), which then learns the loss anew (Eq. 5).

    The defaults are the paper's (section 4.1): Adam at 1e-5 with the gradients' norm clipped to 1e-5 before, so that
    Adam, which is all but indifferent to a gradient's scale, normalises what clipping left.
    While the surrogate learns, it sees the model's scores in training mode.
    Four of the settings are readings of the paper; ``network="published"``, ``thresholds=100``, ``judged="evaluation"``
    and ``first="surrogate"`` are those of its first author's code. The first of them alone is a default: with the plain
    network one of five seeds did not learn.

    Attributes:
        surrogate: ``"universal"`` (SL-U) learns it on random scores alone (Eq. 3) and trains the model on it as it is;
            ``"scratch"`` (SL-S) begins with random weights; ``"refined"`` (SL-R) with the universal surrogate.
        iterations: T.
        model_steps: K_alpha, steps of the model in an iteration.
        surrogate_steps: K_beta, steps of the surrogate in an iteration, one query of the batch metric each.
        model_lr: Adam's rate for the model.
        surrogate_lr: Adam's rate for the surrogate.
        clip: Largest norm of a gradient, of the model and of the surrogate; None for no limit.
        universal: How the universal surrogate is learned, one query of the batch metric for each of its steps.
        begin: A universal surrogate that was learned before, instead of learning one; it is not changed.
        network: The surrogate's; see `set_network`.
        thresholds: How many percentiles of each batch's logits are tried as a threshold, one query each, for the lowest
            cost (`best_threshold.lowest_cost`), in the universal training too; 0 for the threshold 0, and the only
            choice for several logits, of which the largest decides.
        judged: What the true cost is of: the ``"training"`` mode's scores, which the surrogate sees too, or those of
            the ``"evaluation"`` mode, without dropout, while the surrogate sees the training mode's.
        first: What comes first in an iteration, the ``"model"``'s steps, as in the paper, or the ``"surrogate"``'s.
        evals: Queries of the metric of the model, spread evenly over the iterations, the last at their end; they
            decide nothing.
        records: About how many points of the history are kept.
    """

    surrogate: Surrogate = "refined"
    iterations: int = 300_000
    model_steps: int = 3
    surrogate_steps: int = 10
    model_lr: float = 1e-5
    surrogate_lr: float = 1e-5
    clip: float | None = 1e-5
    universal: UniversalTraining = field(default_factory=UniversalTraining)
    begin: SetLoss | None = field(default=None, compare=False, repr=False)
    network: Network = "published"
    thresholds: int = 0
    judged: Judged = "training"
    first: First = "model"
    evals: int = 0
    records: int = 200

    def __post_init__(self) -> None:
        """Reject what is out of range.

        Raises:
            ValueError: A value is rejected; the message gives it.
        """
        if self.surrogate not in SURROGATES:
            raise ValueError(f"surrogate is {self.surrogate!r}; it must be one of {', '.join(SURROGATES)}")
        for name, value, known in (("judged", self.judged, JUDGED), ("first", self.first, FIRST)):
            if value not in known:
                raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
        check_network(self.network)
        check_integer(1, iterations=self.iterations, model_steps=self.model_steps, records=self.records)
        check_integer(1, surrogate_steps=self.surrogate_steps)
        check_integer(0, evals=self.evals)
        check_thresholds(self.thresholds)
        check_above(0, model_lr=self.model_lr, surrogate_lr=self.surrogate_lr, clip=self.clip)
        if self.evals > self.iterations:
            raise ValueError(f"evals is {self.evals}; it must be at most iterations = {self.iterations}")
        if self.begin is not None and self.surrogate == "scratch":
            raise ValueError("begin is a surrogate, but surrogate is 'scratch', which begins with random weights")

    def check(self, task: TrainingTask) -> None:
        """Refuse scores that are no logits, and a surrogate of other logits or of another metric.

        Raises:
            DataError: The scores are neither ``n`` nor ``n x c``, a label is no class's number, or a batch is of one
                example, which the published network can't learn from.
            ConfigError: ``begin`` does not fit the task, or there are thresholds for several logits.
            AdapterError: The weights are of float16.
        """
        task.check_precision()
        outputs, size = _shape(task)
        if size < 2 and self.network == "published":  # BatchNorm over the batch takes away all there is of one
            raise DataError(
                f"a batch has {counted(size, 'example')}, by which network='published' never moves the model; give"
                " batches of at least 2, or network='plain'"
            )
        if self.thresholds and outputs > 1:
            raise ConfigError(
                f"thresholds is {self.thresholds}, but the model has {outputs} logits, of which the largest decides;"
                " thresholds are for a single logit: give 0 (siblings.sl.thresholds)"
            )
        if self.begin is None:
            return
        if self.begin.outputs != outputs:
            raise ConfigError(f"the surrogate to begin with takes {self.begin.outputs} logits, the model has {outputs}")
        if self.begin.network != self.network:
            raise ConfigError(
                f"the surrogate to begin with has network={self.begin.network!r}, the settings have {self.network!r};"
                " give the same (siblings.sl.network)"
            )
        check_metric("the surrogate to begin with stands for", self.begin, task.batch_metric)

    def run(self, task: TrainingTask, seed: int, callback: Callback) -> tuple[SetLoss, History]:
        """Train the model and, but for a universal one, the surrogate; returns the surrogate and the history.

        Returns:
            The surrogate, and the history: ``"universal"``, the distance of Eq. 3; ``"surrogate"``, the loss that the
            model descends; ``"distance"``, that of Eq. 5; ``"metric"``, the ``evals`` values of the model's metric.
        """
        outputs, size = _shape(task)
        metric = task.batch_metric
        surrogate = SetLoss(outputs, metric.name, self.network, metric.identity).to(task.parameters()[0])
        history: History = {}
        if self.begin is not None:
            surrogate.load_state_dict(self.begin.state_dict())
        elif self.surrogate != "scratch":
            universal = replace(self.universal, thresholds=self.thresholds)
            history = universal.learn(surrogate, metric, size, seed=seed, callback=callback)
        return surrogate, history | self.alternate(task, surrogate, seed, callback)

    def alternate(self, task: TrainingTask, surrogate: SetLoss, seed: int, callback: Callback) -> History:
        """Run Algorithm 1 on the task's model and a surrogate, both in place; a universal one stays as it is."""
        every, step = max(1, self.iterations // self.records), 0
        history: History = {"surrogate": [], "distance": [], "metric": []}
        judged = {self.iterations * (i + 1) // self.evals - 1 for i in range(self.evals)}
        with (
            ClippedAdam(task.parameters(), self.model_lr, self.clip) as alpha,
            ClippedAdam(surrogate.parameters(), self.surrogate_lr, self.clip) as beta,
        ):
            surrogate.requires_grad_(False)  # autograd is for the model's steps; the surrogate's have their gradients

            def batch() -> Any:
                nonlocal step
                step += 1
                return task.batches(seed, 0, step - 1)

            def descend() -> Tensor:  # lines 3-7
                for _ in range(self.model_steps):
                    loss: Tensor = surrogate(*task.predicted(batch()))
                    alpha.step(loss)
                return loss

            def learn() -> Tensor:  # lines 8-13
                for _ in range(self.surrogate_steps):
                    scores, labels, true = self._judged(task, batch())
                    distance, gradients = surrogate.distance(scores, labels, true)
                    beta.descend(gradients)
                return distance

            turns = (
                {"surrogate": descend} if self.surrogate == "universal" else {"surrogate": descend, "distance": learn}
            )
            if self.first == "surrogate":
                turns = dict(reversed(turns.items()))
            for iteration in told(range(self.iterations), callback, "SL"):
                kept = iteration % every == 0 or iteration == self.iterations - 1
                for name, turn in turns.items():
                    reached = turn()
                    if kept:
                        history[name].append((iteration, finite(reached, iteration)))
                if iteration in judged:
                    value = task.metric.evaluate(task.model, "history").value
                    history["metric"].append((iteration, value))
        surrogate.requires_grad_(True)
        return {name: points for name, points in history.items() if points}

    @torch.no_grad()
    def _judged(self, task: TrainingTask, batch: Any) -> tuple[Tensor, Tensor, float]:
        """Return what the surrogate sees of a batch, scores and labels, and the true cost."""
        scores, labels = task.predicted(batch)
        judged = scores
        if self.judged == "evaluation":
            with evaluating(task.model):
                judged, _ = task.predict(task.model, batch)
        return scores, labels, lowest_cost(task.batch_metric, judged, labels, self.thresholds, "surrogate")


def _shape(task: TrainingTask) -> tuple[int, int]:
    """Return the number of logits for each example, and of examples in a batch.

    Raises:
        DataError: The scores are neither ``n`` nor ``n x c``, or NaN, or a label is no class's number.
    """
    with evaluating(task.model), torch.no_grad():
        scores, labels = task.predicted(task.batches(0, 0, 0))
    class_labels(scores, labels)
    return (1 if scores.dim() == 1 else scores.shape[1]), len(labels)
