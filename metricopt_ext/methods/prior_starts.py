"""Starts of a classifier that adjust its logits by how frequent classes are, in training or in the deployment."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.errors import AdapterError, DataError
from metricopt_ext.tasks.inputs import each_batch, logits_of, refuse_probabilities
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.modes import evaluating
from metricopt_ext.utils.words import brief

# The least offset of a line of thresholds: whatever the priors, one logit and more moves what lies near the boundary.
LEAST_THRESHOLD = 1.0

# Several logits, unless of two classes, are not adjusted along a line if none moves by this much: classes are then as
# frequent within a fifth.
LEAST_OFFSET = 0.2


# How far an adjustment's strength goes to each side. It is best from 0 to 2 on nine tasks; 2.5 leaves that room.
STRONGEST = 2.5

# The strengths that are asked first: further out a metric is often ruined, and tells nothing of where it is best.
FIRST = (0.5, -0.5)

# EM has found the priors once none of them changes by more than this, or after so many rounds.
SETTLED, ROUNDS = 1e-9, 10_000


def prior_offsets(counts: Tensor, *, one_logit: bool = False) -> Tensor:
    """Return the offsets -log(prior) of post-hoc logit adjustment (Menon et al. 2021), which stand in for equal priors.

    Args:
        counts: Number of train examples of each class, ``C``, each above 0.
        one_logit: Whether the classifier has one logit for two classes.

    Returns:
        ``C`` numbers of mean zero, float64; for one logit a single one, class 1's less class 0's, ``1``.

    Raises:
        DataError: A class has no examples.
        ValueError: The classes of one logit are not two.
    """
    if not bool((counts > 0).all()):
        raise DataError(f"each class must have train examples for its prior, got counts of {counts.tolist()}")
    if one_logit and len(counts) != 2:
        raise ValueError(f"one logit is for 2 classes, got counts of {len(counts)}")
    offsets = -counts.double().log()
    return offsets[1:] - offsets[:1] if one_logit else offsets - offsets.mean()


def cost_offsets(costs: Tensor, *, one_logit: bool = False) -> Tensor | None:
    """Return the offsets by which decisions have the least expected cost, if the probabilities are right (Elkan, 2001).

    Of two classes it is Bayes' threshold, log of the ratio of what an error of each costs. Of more, each class counts
    by the mean of what its errors cost, which is Bayes' decision where they cost the same.

    Args:
        costs: ``C x C``, a row for each true class, a column for each predicted one.
        one_logit: Whether the classifier has one logit for two classes.

    Returns:
        ``C`` numbers of mean zero, float64, or ``1``; None if an error of some class costs nothing more.
    """
    costs, count = costs.double(), len(costs)
    errors = (costs.sum(1) - costs.diagonal()) / (count - 1) - costs.diagonal()
    if not bool((errors > 0).all()):
        return None
    offsets = errors.log()
    return offsets[1:] - offsets[:1] if one_logit else offsets - offsets.mean()


def moved_by(adapter: Adapter, offsets: Tensor) -> Tensor:
    """Return the phi, ``d``, that adds offsets to the outputs, ``c``, and nothing else."""
    assert adapter.outputs is not None
    phi = torch.zeros_like(adapter.phi.detach())
    phi[adapter.offsets] = offsets.to(phi) / adapter.outputs.scale
    return phi


def prior_line(task: FinetuneTask, priors: Tensor | Sequence[float]) -> StartLine | None:
    """Return the line of logit adjustment by the classes' priors (Menon et al., 2021): its strength, -2.5 to 2.5.

    At 0 the model is as it was trained; at 1 all classes are taken for equally frequent. A threshold of two classes is
    moved by one logit at least for each unit.

    Args:
        task: Its phi has offsets of the logits (`Outputs`).
        priors: Number of train examples of each class, or its share, ``C``, each above 0; two for a single logit.

    Returns:
        The line; None for more than two classes that are all about as frequent.

    Raises:
        AdapterError: phi has no offsets of the logits.
        DataError: A class has no share.
        ValueError: There are not as many as classes.
    """
    count, priors = _checked(task.adapter, priors)
    return offset_line(task.adapter, prior_offsets(priors, one_logit=count == 1), two_classes=len(priors) == 2)


def offset_line(adapter: Adapter, adjustment: Tensor, *, two_classes: bool = False) -> StartLine | None:
    """Return the line of an adjustment's strengths, -2.5 to 2.5; None if it moves little (`line_offsets`).

    Args:
        adapter: Has the offsets.
        adjustment: Offsets of strength 1 (`prior_offsets`), ``C`` or ``1``.
        two_classes: Whether they are of two classes, of one logit or two.
    """
    along = line_offsets(adjustment, two_classes=two_classes)
    if along is None:
        return None
    return StartLine(lambda t: Start(moved_by(adapter, t * along)), -STRONGEST, STRONGEST, FIRST)


@torch.no_grad()
def em_prior_start(task: FinetuneTask, inputs: Iterable[Any], priors: Tensor | Sequence[float]) -> Start:
    """Return logits adjusted to the deployment's priors, which EM finds from its inputs alone (Saerens et al., 2002).

    Each round takes the predicted probabilities at the priors so far, and their means for the next (their eq. 2.10).
    The classes' own inputs must look as in training, and the probabilities be about right.

    Args:
        task: Its model is taken at phi = 0; its phi has offsets of the logits (`Outputs`).
        inputs: Batches of inputs, without labels.
        priors: Number of train examples of each class, or its share, ``C``, each above 0; two for a single logit.

    Raises:
        AdapterError: phi has no offsets of the logits, or the model's output is no logits.
        DataError: There is no batch, or the model can't take one, or a class has no share.
        ValueError: There are not as many priors as classes.
    """
    adapter = task.adapter
    count, priors = _checked(adapter, priors)
    with adapter.applied(Start(task.origin())) as model, evaluating(model):
        found = [each.detach().cpu().double() for each in each_batch(inputs, lambda x: logits_of(model(x), count))]
    logits = torch.cat(found)
    refuse_probabilities(logits)
    if count == 1:
        logits = torch.cat([torch.zeros_like(logits), logits], 1)
    trained = priors.double().cpu() / priors.double().sum().cpu()
    deployed = em_priors(logits.softmax(1), trained)
    adjustment = deployed.log() - trained.log()
    adjustment = adjustment[1:] - adjustment[:1] if count == 1 else adjustment - adjustment.mean()
    return Start(moved_by(adapter, adjustment))


def em_priors(probabilities: Tensor, priors: Tensor) -> Tensor:
    """Return the priors, ``C``, that are most likely of what probabilities, ``n x C``, were predicted by others, ``C``.

    A class that none of them shows keeps half an example, as its logit could not be moved back otherwise.
    """
    least, found = 1 / (2 * len(probabilities)), priors
    for _ in range(ROUNDS):
        weighted = probabilities * (found / priors)
        before, found = found, (weighted / weighted.sum(1, keepdim=True)).mean(0)
        if (found - before).abs().max() <= SETTLED:
            break
    found = found.clamp(min=least)
    return found / found.sum()


def _checked(adapter: Adapter, given: Tensor | Sequence[float]) -> tuple[int, Tensor]:
    """Return how many offsets of logits there are, and priors, ``C``; see `prior_line`."""
    if adapter.outputs is None:
        raise AdapterError("phi has no offsets of the logits; attach it with outputs=Outputs()")
    try:
        priors = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"priors are {brief(given)}; they must be a list of numbers, one for each class") from error
    count = len(adapter.phi[adapter.offsets])
    if priors.shape != (2 if count == 1 else count,):
        wanted = "2 for a single logit" if count == 1 else f"{count}, one for each class"
        raise ValueError(f"priors are {tuple(priors.shape)}; they must be {wanted}")
    if not bool((priors > 0).all()) or not bool(priors.isfinite().all()):
        raise DataError(f"each class must have a share above 0 for its prior, got {priors.tolist()}")
    return count, priors


def line_offsets(adjustment: Tensor, *, two_classes: bool = False) -> Tensor | None:
    """Return the offsets along which a search looks first, ``C`` or ``1``: those of an adjustment by the priors.

    A single logit's move by `LEAST_THRESHOLD` at least, in their direction: its threshold matters though both classes
    are as frequent. So does the difference of two classes' logits. None for several logits if none of their offsets
    reaches `LEAST_OFFSET`.

    Args:
        adjustment: Offsets of strength 1 (`prior_offsets`), ``C`` or ``1``.
        two_classes: Whether they are of two classes, of one logit or two; logits of labels or ranks are not.
    """
    if two_classes and len(adjustment) == 2:
        apart = adjustment[1:] - adjustment[:1]
        moved = _least_threshold(apart)
        return adjustment if torch.equal(moved, apart) else torch.cat([-moved, moved]) / 2
    if len(adjustment) == 1:
        return _least_threshold(adjustment)
    return adjustment if float(adjustment.abs().max()) >= LEAST_OFFSET else None


def _least_threshold(offset: Tensor) -> Tensor:
    """Return an offset, ``1``, or one of `LEAST_THRESHOLD` in its direction if it is smaller."""
    least = torch.full_like(offset, LEAST_THRESHOLD)
    return torch.where(offset.abs() < least, torch.where(offset < 0, -least, least), offset)
