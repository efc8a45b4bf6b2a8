"""The surrogate loss of Learning Surrogate Losses (Grabocka et al., 2019): a network of a set of scores and labels."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metricopt_ext.errors import DataError
from metricopt_ext.runtime.progress import Callback, told
from metricopt_ext.siblings.batch_metric import BatchMetric
from metricopt_ext.siblings.class_labels import class_labels
from metricopt_ext.siblings.clipped_adam import ClippedAdam
from metricopt_ext.siblings.learned_metric import metric_identity
from metricopt_ext.siblings.random_batches import first_defined
from metricopt_ext.siblings.sl.best_threshold import check_thresholds, lowest_cost
from metricopt_ext.siblings.sl.set_network import EPSILON, NETWORKS, Network, SetNetwork, forward, to_weights
from metricopt_ext.siblings.training import History
from metricopt_ext.utils.checks import check_above, check_finite, check_integer
from metricopt_ext.utils.files import content_of, module_of, read_tensors, write_tensors
from metricopt_ext.utils.seeding import generator

FILE_FORMAT = "metricopt_ext/set_loss/1"
G, H = (30, 30), (10, 10, 1)  # neurons (section 4.1)
DESCRIBED = ("outputs", "metric", "network", "identity")  # what a file says besides
BLOCK = 1000  # universal batches that are drawn together


class SetLoss(nn.Module):
    """A loss of a whole batch, in any order: h(1/N sum_i g(y_i, yhat_i)) (Eq. 2), with g 30-30 and h 10-10-1.

    A label and its score enter as (y, yhat) with y in {0, 1} and yhat the logit as it is; one of C classes as its
    one-hot vector with the C logits.

    Args:
        outputs: Logits per example: 1, or the number C of classes.
        metric: Name of the metric whose cost it stands for; a file keeps it.
        network: ``"plain"`` or ``"published"``, see `set_network`; the paper states no activation for g and h.
        identity: The metric's `BatchMetric.identity`; a file keeps it. None if it is not known.

    Raises:
        ValueError: A value is rejected; the message gives it.
    """

    def __init__(
        self,
        outputs: int = 1,
        metric: str = "",
        network: Network = "published",
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        check_integer(1, outputs=outputs)
        check_network(network)
        self.outputs, self.metric, self.network, self.identity = outputs, metric, network, identity
        self.g = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise((2 * outputs, *G)))
        self.h = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise((G[-1], *H)))
        self.norm = nn.BatchNorm1d(G[0], EPSILON, track_running_stats=False) if network == "published" else None
        self.layers = (*self.g, *self.h)  # a tuple: no other way to the same parameters

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Return the surrogate of the cost, a scalar.

        Args:
            scores: Logits, ``N``, or ``N x C`` for more outputs than one.
            labels: ``N`` in 0..C-1, 0 and 1 for a single output.

        Raises:
            DataError: The scores have another shape, or a label is no class's number.
        """
        loss: Tensor = SetNetwork.apply(self._inputs(scores, labels), *self._weights())
        return loss

    @torch.no_grad()
    def distance(self, scores: Tensor, labels: Tensor, true: float) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the distance |true - surrogate| to a cost, the meta-loss of Eq. 3 and 5, with its gradient.

        Args:
            scores: As in `forward`.
            labels: As in `forward`.
            true: The cost.

        Returns:
            The distance, a scalar, and its gradients in the order of ``parameters()``, without a graph.

        Raises:
            DataError: The scores have another shape.
        """
        loss, kept = forward(self._inputs(scores, labels), self._weights())
        error = loss - true
        return error.abs(), to_weights(kept, error.sign())[1]

    def _inputs(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Return (y, yhat) of each example, ``N x 2`` or ``N x 2C``."""
        if scores.shape[1:] != ((self.outputs,) if self.outputs > 1 else ()):
            expected = "N" if self.outputs == 1 else f"N x {self.outputs}"
            raise DataError(f"scores have shape {tuple(scores.shape)}; this surrogate loss takes {expected}")
        labels = class_labels(scores, labels)
        if self.outputs == 1:
            return torch.stack([labels.to(scores.dtype), scores], 1)
        return torch.cat([F.one_hot(labels, self.outputs).to(scores.dtype), scores], 1)

    def _weights(self) -> list[Tensor]:
        parts = self.layers if self.norm is None else (*self.layers, self.norm)
        return [tensor for part in parts for tensor in (part.weight, part.bias)]

    def save(self, path: str | Path) -> None:
        """Write it to a safetensors file; `load_set_loss` reads it."""
        write_tensors(path, self.state_dict(), FILE_FORMAT, {name: getattr(self, name) for name in DESCRIBED})


def load_set_loss(path: str | Path) -> SetLoss:
    """Read a surrogate loss that `SetLoss.save` wrote.

    Raises:
        FileFormatError: The file is corrupt or holds something else.
    """
    tensors, described = read_tensors(path, FILE_FORMAT)
    with content_of(path, "surrogate loss that it describes"):
        outputs, metric, network = (described[name] for name in ("outputs", "metric", "network"))
        identity = metric_identity(described)
        return module_of(path, tensors, lambda: SetLoss(outputs, metric, network, identity))


def check_network(network: str) -> None:
    """Reject a network that is not in `set_network.NETWORKS`.

    Raises:
        ValueError: It is rejected.
    """
    if network not in NETWORKS:
        raise ValueError(f"network is {network!r}; it must be one of {', '.join(NETWORKS)}")


@dataclass(frozen=True)
class UniversalTraining:
    """How a surrogate is learned on random labels and scores, without any data (Eq. 3).

    Attributes:
        steps: Number of batches, each a query and a step. The paper does not give it: as many as Algorithm 1 takes.
        positive: p, the probability of label 1; labels of more than two classes are uniform.
        mean: mu of the scores' normal distribution.
        std: sigma of it.
        lr: Adam's rate.
        clip: Largest norm of a gradient.
        thresholds: See `best_threshold.lowest_cost`; each is a query.
        records: About how many points of its history are kept.
    """

    steps: int = 3_000_000
    positive: float = 0.5
    mean: float = 0.0
    std: float = 1.0
    lr: float = 1e-5
    clip: float | None = 1e-5
    thresholds: int = 0
    records: int = 200

    def __post_init__(self) -> None:
        """Reject what is out of range.

        Raises:
            ValueError: A value is rejected; the message gives it.
        """
        check_integer(1, steps=self.steps, records=self.records)
        check_thresholds(self.thresholds)
        check_above(0, std=self.std, lr=self.lr, clip=self.clip)
        check_finite(mean=self.mean, positive=self.positive)
        if not 0 < self.positive < 1:
            raise ValueError(f"positive is {self.positive}; it must be above 0 and below 1")

    def learn(
        self,
        surrogate: SetLoss,
        metric: BatchMetric,
        size: int,
        *,
        seed: int = 0,
        callback: Callback | None = None,
    ) -> History:
        """Train a surrogate in place, ``steps`` queries of the batch metric, or ``thresholds`` times as many.

        Args:
            surrogate: The network.
            metric: What it is to predict the cost of.
            size: N, labels in a batch.
            seed: Seed of the batches.
            callback: Notified of progress.

        A batch on which the metric fails, as a class is missing, is drawn again.

        Returns:
            ``"universal"``: the distance |loss - surrogate|.

        Raises:
            FloatingPointError: The distance is no longer finite.
            MetricError: The metric failed where no class is missing, or on too many batches in a row.
        """
        callback, every = callback or Callback(), max(1, self.steps // self.records)
        history: list[tuple[int, float]] = []
        with ClippedAdam(surrogate.parameters(), self.lr, self.clip) as optimizer:
            steps = told(range(self.steps), callback, "SL, universal")
            for step, (scores, labels) in zip(steps, self.batches(surrogate, size, seed), strict=True):
                scores, labels, true = first_defined(
                    chain([(scores, labels)], self._again(surrogate, size, seed, step)),
                    lambda drawn, of_drawn: lowest_cost(metric, drawn, of_drawn, self.thresholds, "universal"),
                    classes=max(2, surrogate.outputs),
                    ledger=metric.ledger,
                )
                distance, gradients = surrogate.distance(scores, labels, true)
                optimizer.descend(gradients)
                if step % every == 0 or step == self.steps - 1:
                    history.append((step, finite(distance, step)))
        return {"universal": history}

    def batches(self, surrogate: SetLoss, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Draw scores, ``N`` or ``N x C``, and labels, ``N``, for each step."""
        for at in range(0, self.steps, BLOCK):
            rng, n = generator(seed, "universal", at), min(BLOCK, self.steps - at)
            yield from self._drawn(surrogate, n, size, rng)

    def _again(self, surrogate: SetLoss, size: int, seed: int, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Draw further batches for a step, one by one, from a stream of their own."""
        rng = generator(seed, "universal again", step)
        while True:
            yield from self._drawn(surrogate, 1, size, rng)

    def _drawn(self, surrogate: SetLoss, n: int, size: int, rng: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        like, c = next(surrogate.parameters()), surrogate.outputs
        if c > 2:
            labels = torch.randint(c, (n, size), generator=rng)
        else:
            labels = (torch.rand(n, size, generator=rng) < self.positive).long()
        scores = torch.randn((n, size, c) if c > 1 else (n, size), generator=rng) * self.std + self.mean
        yield from zip(scores.to(like), labels.to(like.device), strict=True)


def finite(value: Tensor, at: int) -> float:
    """Return a scalar as a float.

    Raises:
        FloatingPointError: It is not finite.
    """
    number = float(value.detach())
    if not torch.isfinite(value.detach()):
        raise FloatingPointError(f"the surrogate loss is {number} at step {at}; lower the rates")
    return number
