"""The cheapest baselines of a classifier: constants added to its logits, a decision threshold among them."""

import copy
import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.start import StartLine
from metricopt_ext.classification.predictions import output_of, predict
from metricopt_ext.classification.targets import Target
from metricopt_ext.errors import MetricError
from metricopt_ext.methods.starts import offset_line, prior_offsets
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.utils.words import shortened

REACH = 4.0  # logits, to each side, of the first round
RAISED = 0.5  # logits, by which the offset of the worst class is raised at first
STRONGEST = 2.0  # strength of logit adjustment


class WithOffsets(nn.Module):
    """A classifier with a constant added to each logit; a threshold t of a single logit is the offset -t.

    Args:
        model: Maps inputs, ``n x ...``, to logits, ``n x C`` or ``n``.
        offsets: ``C``, or ``1`` for a single logit.
    """

    offsets: Tensor

    def __init__(self, model: nn.Module, offsets: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("offsets", offsets)

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs, ``n x ...``, to the model's logits with the offsets."""
        return self._moved(output_of(self.model(x)))

    def recalled(self, rows: tuple[int, ...]) -> Tensor | None:
        """Return the logits of images on disk if the model keeps its own, None if not; see `Remembered.recalled`."""
        recalled = getattr(self.model, "recalled", None)
        logits = None if recalled is None else recalled(rows)
        return None if logits is None else self._moved(logits)

    def _moved(self, logits: Tensor) -> Tensor:
        return logits + self.offsets.to(logits)


class Remembered(nn.Module):
    """A model that keeps its outputs, so that it runs once on each tensor in memory; its weights must not change.

    Args:
        model: Maps a tensor to a tensor.

    Attributes:
        keeps: Whether the outputs for further tensors are kept too. One pass over the data sees all that are worth it:
            a loader makes new ones each time.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.keeps = model, True
        # The inputs are kept too: while they are, no other tensor has their address.
        self.kept: dict[Any, tuple[Tensor, Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        """Return the model's output for ``x``, computed or kept."""
        streamed = getattr(x, "streamed_rows", None)  # of images on disk, which are read anew each time
        key = streamed or (x.data_ptr(), x.shape, x.stride(), x.dtype, x.device, x._version)
        if key in self.kept:
            return self.kept[key][1]
        output = output_of(self.model(x))
        if self.keeps:
            self.kept[key] = x if streamed is None else x[:0].clone(), output
        return output

    def recalled(self, rows: tuple[int, ...]) -> Tensor | None:
        """Return the kept output for images on disk, so that they need not be read; None if there is none.

        Args:
            rows: Their ``streamed_rows``.
        """
        kept = self.kept.get(rows)
        return None if kept is None else kept[1]


@torch.no_grad()
def tune_threshold(
    task: FinetuneTask, x: Tensor, evals: int = 101, *, start: Tensor | None = None
) -> WithOffsets | None:
    """Return the original model with the threshold that is best for the metric, or None if it has several logits.

    The metric sees scores that are kept: the model runs once on data in memory.

    Args:
        task: Its model, at phi = 0, is judged by its metric.
        x: Inputs, ``n x ...``, whose logits' quantiles are the candidates.
        evals: Number of thresholds tried, one query each; the model's own, 0, is the first.
        start: Another phi, ``d``, that is merged into the model.
    """
    return threshold_of(merged(task, start), task.metric, x, evals)


@torch.no_grad()
def threshold_of(model: nn.Module, metric: Metric, x: Tensor, evals: int = 101) -> WithOffsets | None:
    """Return a model with the threshold that is best for a metric, or None if it has several logits.

    Args:
        model: Maps inputs to logits; in evaluation mode.
        metric: Sees scores that are kept: the model runs once on data in memory.
        x: Inputs, ``n x ...``, whose logits' quantiles are the candidates.
        evals: Number of thresholds tried, one query each; the model's own, 0, is the first.
    """
    model = Remembered(model)
    if model.model(x[:1]).dim() != 1:
        return None

    def cost(threshold: float) -> float:
        return metric.cost(WithOffsets(model, torch.tensor([-threshold])), "threshold")

    costs = {0.0: cost(0.0)}
    model.keeps = False
    quantiles = torch.linspace(0, 1, evals + 1, device=x.device)[1:-1]
    for threshold in predict(model, x).quantile(quantiles).tolist():
        costs.setdefault(threshold, cost(threshold))
    return WithOffsets(model.model, torch.tensor([-min(costs, key=lambda each: costs[each])]))


@torch.no_grad()
def tune_offsets(
    task: FinetuneTask,
    x: Tensor,
    rounds: int = 3,
    points: int = 21,
    budget: int | None = None,
    *,
    start: Tensor | None = None,
) -> WithOffsets | None:
    """Return the original model with offsets found class by class, or None if it has a single logit.

    In each round each class's offset in turn takes the best of evenly spaced values around its own, up to 4 logits away
    in the first round and half as far in each further one. Each value tried is one query, the model as it is the first;
    an offset's own value, the middle one if ``points`` is odd, is not tried again. The metric sees scores that are
    kept: the model runs once on data in memory.

    Args:
        task: Its model, at phi = 0, is judged by its metric.
        x: Inputs, ``n x ...``; one shows how many logits there are.
        rounds: Number of rounds, at least 1.
        points: Values around each offset, at least 2.
        budget: Most queries, at least 1, after which the best so far is returned; None for no limit.
        start: Another phi, ``d``, that is merged into the model.

    Raises:
        ValueError: A number is out of range.
    """
    check_integer(1, rounds=rounds, budget=1 if budget is None else budget)
    check_integer(2, points=points)
    original = merged(task, start)
    logits = output_of(original(x[:1]))
    if logits.dim() == 1:
        return None
    model = Remembered(original)
    steps = [REACH * (2 * i / (points - 1) - 1) for i in range(points) if 2 * i != points - 1]

    def cost(offsets: Tensor) -> float:
        return task.metric.cost(WithOffsets(model, offsets), "offsets")

    kept = logits.new_zeros(logits.shape[1])
    lowest, left = cost(kept), math.inf if budget is None else budget - 1
    model.keeps = False
    for round, label in product(range(rounds), range(len(kept))):
        before = kept
        for step in steps:
            if left == 0:
                return WithOffsets(original, kept)
            left -= 1
            candidate = before.clone()
            candidate[label] += step / 2**round
            if (value := cost(candidate)) < lowest:
                kept, lowest = candidate, value
    return WithOffsets(original, kept)


@torch.no_grad()
def raise_worst(
    task: FinetuneTask, x: Tensor, classes: Sequence[str], budget: int, *, start: Tensor | None = None
) -> WithOffsets | None:
    """Return the original model with the offset of whatever class is worst raised, again and again.

    A raise is kept unless the metric loses, and then that class's step is halved. Each raise is one query, the model as
    it is the first. The metric sees scores that are kept, as in `tune_offsets`.

    Args:
        task: Its model, at phi = 0, is judged by its metric, which is made of a value for each class.
        x: Inputs, ``n x ...``; one shows how many logits there are.
        classes: Names of the classes, in the order of the logits.
        budget: Queries, at least 1.
        start: Another phi, ``d``, that is merged into the model.

    Returns:
        The model, or None if it has a single logit.

    Raises:
        MetricError: The metric is not made of outcomes of the classes.
    """
    check_integer(1, budget=budget)
    original, combination = merged(task, start), task.metric.combination
    logits = output_of(original(x[:1]))
    if logits.dim() == 1:
        return None
    model = Remembered(original)
    kept, steps = logits.new_zeros(logits.shape[1]), [RAISED] * logits.shape[1]
    best = task.metric.evaluate(WithOffsets(model, kept), "offsets")
    model.keeps = False
    names = () if combination is None else combination.names(best.outcomes)
    if combination is None or not {*names} <= {*classes}:
        made = f"it is made of {shortened(list(names))}" if names else "it is told as one number"
        raise MetricError(
            f"metric {task.metric.name!r}: {made}, and not of a value for each class, the worst of which is raised;"
            " leave out raise_worst, or judge by worst_recall"
        )
    for _ in range(budget - 1):
        worst = classes.index(names[int(combination.costs([best]).argmax())])
        candidate = kept.clone()
        candidate[worst] += steps[worst]
        found = task.metric.evaluate(WithOffsets(model, candidate), "offsets")
        if found.cost <= best.cost:  # a recall of 0 stays 0 until it has been raised far enough
            kept, best = candidate, found
        else:
            steps[worst] /= 2
    return WithOffsets(original, kept)


def prior_adjustment(adapter: Adapter, target: Target, labels: Tensor) -> Tensor | None:
    """Return what adjusts the outputs by the priors, ``c``; None if phi has no offsets, or there are no priors.

    Of labels it is minus the log-odds of each logit's share.

    Args:
        adapter: Has the offsets.
        target: What is predicted.
        labels: The train examples', as `targets` has them.
    """
    if adapter.outputs is None:
        return None
    if target.kind == "classes":
        counts = labels.bincount(minlength=target.count)
        if not counts.min() > 0:
            return None  # a class without examples has no prior
        return prior_offsets(counts, one_logit=len(adapter.phi[adapter.offsets]) == 1)
    shares = target.shares(labels)
    return None if not len(shares) or bool(((shares == 0) | (shares == 1)).any()) else -shares.logit()


def target_line(adapter: Adapter, target: Target, labels: Tensor) -> StartLine | None:
    """Return the line of an adjustment's strengths that fits a target (`offset_line`).

    None if there is none, or it moves little.

    Args:
        adapter: See `prior_adjustment`, as for the others.
        target: What is predicted.
        labels: The train examples'.
    """
    adjustment = prior_adjustment(adapter, target, labels)
    two = target.kind == "classes" and target.count == 2
    return None if adjustment is None else offset_line(adapter, adjustment, two_classes=two)


@torch.no_grad()
def adjust_logits(task: FinetuneTask, x: Tensor, counts: Tensor, strength: float = 1.0) -> nn.Module:
    """Return the original model with `prior_offsets`, times a strength (Menon et al.'s tau); no query.

    Args:
        task: Its model is taken at phi = 0.
        x: Inputs, ``n x ...``; one shows how many logits there are.
        counts: Number of train examples of each class, ``C``.
        strength: Factor on the offsets.
    """
    model = merged(task)
    return WithOffsets(model, strength * prior_offsets(counts, one_logit=model(x[:1]).dim() == 1))


def tune_adjustment(task: FinetuneTask, x: Tensor, counts: Tensor, evals: int = 21) -> nn.Module:
    """Return the logit adjustment whose strength, in [0, 2], is best for the metric.

    The metric sees scores that are kept: the model runs once on data in memory.

    Args:
        task: Its model, at phi = 0, is judged by its metric.
        x: Inputs, ``n x ...``; one shows how many logits there are.
        counts: Number of train examples of each class, ``C``.
        evals: Number of strengths tried, at least 1, one query each; evenly spaced, 0 (the model as it is) the first.

    Raises:
        ValueError: ``evals`` is out of range.
    """
    check_integer(1, evals=evals)
    full = adjust_logits(task, x, counts)
    assert isinstance(full, WithOffsets)
    strengths = torch.linspace(0, STRONGEST, evals, dtype=torch.float64).tolist()
    model, costs = Remembered(full.model), []
    for strength in strengths:
        costs.append(task.metric.cost(WithOffsets(model, strength * full.offsets), "logit adjustment"))
        model.keeps = False
    return WithOffsets(full.model, strengths[costs.index(min(costs))] * full.offsets)


def merged(task: FinetuneTask, start: Tensor | None = None) -> nn.Module:
    """Return a copy of the task's model at phi = 0, or with another phi, ``d``, merged into it."""
    adapter = Adapter(copy.deepcopy(task.adapter.model))
    if start is None:
        return adapter.remove().eval()
    adapter.set_phi(start)
    return adapter.merge().eval()
