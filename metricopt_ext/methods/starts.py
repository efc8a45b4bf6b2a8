"""Where a search may begin: what costs no query to reach, each to be judged by the metric before it is built upon."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.context import CONTEXT_NAME
from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.errors import AdapterError, DataError
from metricopt_ext.search.stages import SETTINGS
from metricopt_ext.tasks.inputs import each_batch, logits_of, refuse_probabilities
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.modes import evaluating
from metricopt_ext.utils.weights import same_bits
from metricopt_ext.utils.words import brief

# By name; or a function of the task that returns them.
Starts = Mapping[str, Start | StartLine] | Callable[[FinetuneTask], Mapping[str, Start | StartLine]]

STATISTICS = ("running_mean", "running_var")

# Weights of the deployment's statistics that are asked first: half of each, more of the deployment's, and its alone.
FIRST_WEIGHTS = (0.75, 0.5, 1.0)

# The least offset of a line of thresholds: whatever the priors, one logit and more moves what lies near the boundary.
LEAST_THRESHOLD = 1.0

# Several logits, unless of two classes, are not adjusted along a line if none moves by this much: classes are then as
# frequent within a fifth.
LEAST_OFFSET = 0.2

# How far an adjustment's strength goes to each side. It is best from 0 to 2 on nine tasks; 2.5 leaves that room.
STRONGEST = 2.5

# The strengths that are asked first: further out a metric is often ruined, and tells nothing of where it is best.
FIRST_STRENGTHS = (0.5, -0.5)

# EM has found the priors once none of them changes by more than this, or after so many rounds.
SETTLED, ROUNDS = 1e-9, 10_000


def all_starts(task: FinetuneTask, starts: Starts | None) -> dict[str, Start | StartLine]:
    """Return phi = 0, named ``"start"``, and the starts given: copies, as the model's own phi may be among them.

    Lines of starts stay what they are. A function is asked for the starts of the task.

    Raises:
        ValueError: A name is taken by a result's other ends, or a start has settings that the task has not.
        AdapterError: A start does not fit the model (see `Adapter.check`), or one at the end of a line; or it has
            numbers that are not finite where the model's are, or a variance below 0.
    """
    given = starts(task) if callable(starts) else {} if starts is None else starts
    example = "map names to starts, as {'balanced': mo.Start(phi)}"
    if not isinstance(given, Mapping):
        raise ValueError(f"starts are {brief(given)}; {example}")
    found: dict[str, Start | StartLine] = {"start": Start(task.origin())}
    for name, start in given.items():
        if not isinstance(name, str) or not name or not isinstance(start, Start | StartLine | None):
            raise ValueError(f"starts have {brief(name)}: {brief(start)}; {example}")
        if name in ("start", SETTINGS, "search", "part"):
            raise ValueError(f"a start is named {name!r}, which is an end of every search; give it another name")
        try:
            found[name] = _checked(task, start)
        except AdapterError as error:
            raise AdapterError(f"start {name!r}: {error}") from error
    return found


def _checked(task: FinetuneTask, start: Start | StartLine | None) -> Start | StartLine:
    """Return a copy of a start, or a line of which both ends and the middle are as they must be."""
    if isinstance(start, StartLine):
        start.check()
        for each in start.ends:
            _checked(task, each)
        return start
    if not isinstance(start, Start):  # None, which `batchnorm_start` returns where there is nothing to replace
        raise AdapterError(f"{brief(start)} does not apply to this model; leave it out")
    task.adapter.check(start)
    base = task.adapter.base_state_dict()
    for name, value in start.tensors.items():  # a loss that is not finite would be blamed for these
        if bool((base[name].to(value.device).isfinite() & ~value.isfinite()).any()):
            raise AdapterError(f"{brief(name)} has NaN or infinity where the model's has not; leave it out")
        if name.rpartition(".")[2] == "running_var" and bool((value < 0).any()):
            raise AdapterError(f"{brief(name)} has {float(value.min()):g}; a variance is at least 0")
    task.values_of(start.settings)  # refuses what it can't be
    tensors = {key: value.detach().clone() for key, value in start.tensors.items()}
    return Start(start.phi.detach().to(task.origin(), copy=True), tensors, dict(start.settings), start.presumed)


def divided(starts: Mapping[str, Start | StartLine]) -> tuple[dict[str, Start], dict[str, StartLine]]:
    """Return the starts that are fixed, and the lines of starts, by name."""
    lines = {name: each for name, each in starts.items() if isinstance(each, StartLine)}
    return {name: each for name, each in starts.items() if isinstance(each, Start)}, lines


def batchnorm_start(task: FinetuneTask, inputs: Iterable[Any], start: Start | None = None) -> Start | None:
    """Return a start with BatchNorm statistics of other inputs, or None if the model has no BatchNorm.

    Args:
        task: Its model's statistics are replaced in the start, not in the model.
        inputs: Batches of inputs, without labels; see `reestimate_batchnorm`.
        start: What else the start is, such as a soup; its phi is not in force meanwhile. By default phi = 0.

    Raises:
        AdapterError: The start does not fit the model.
        DataError: There is no batch, or the model can't take one.
    """
    start = Start(task.origin()) if start is None else start
    task.adapter.check(start)
    model = reestimate_batchnorm(task.adapter.model, inputs, start)
    if model is None:
        return None
    own, tensors = task.adapter.base_state_dict(), {**start.tensors, **dict(model.named_buffers())}
    changed = {name: value for name, value in tensors.items() if name in own and not same_bits(value, own[name])}
    return replace(start, tensors=changed)


@torch.no_grad()
def reestimate_batchnorm(model: nn.Module, inputs: Iterable[Any], start: Start | None = None) -> nn.Module | None:
    """Return a copy of a model with BatchNorm statistics of other inputs, or None if it keeps none.

    A norm that no input reaches, such as an auxiliary head's, keeps its statistics.

    Args:
        model: With or without an adapter; the copy is of its base, and in evaluation mode.
        inputs: Batches of inputs, without labels; each counts the same, so make them about equal in size.
        start: Its tensors replace the base's own in the copy; its phi is not in force.

    Raises:
        DataError: There is no batch, or the model can't take one.
    """
    copied = copy.deepcopy(model)
    if hasattr(copied, CONTEXT_NAME):
        Adapter(copied).remove()
    if start and start.tensors:
        copied.load_state_dict(start.tensors, strict=False)
    every = (module for module in copied.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))
    norms = [norm for norm in every if norm.running_mean is not None]  # others take each batch's own
    if not norms:
        return None
    copied.eval()  # dropout in particular must not disturb the statistics
    before = copy.deepcopy(norms)
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches
        norm.train()
    for _ in each_batch(inputs, copied):
        pass
    for norm, own in zip(norms, before, strict=True):
        norm.momentum = own.momentum
        if norm.num_batches_tracked == 0:
            norm.load_state_dict(own.state_dict())
    return copied.eval()


def batchnorm_line(task: FinetuneTask, end: Start | None) -> StartLine | None:
    """Return the line from the training's BatchNorm statistics, at 0, to other inputs', at 1.

    Mean and variance are each mixed linearly, as where the training's are prior observations of the deployment's
    (Schneider et al., 2020, eq. 1); a variance is at least the smaller of both.

    Args:
        task: Its model's statistics are those at 0; they are replaced in the starts, not in the model.
        end: What `batchnorm_start` returned, which has those at 1; all else along the line is as in it.

    Returns:
        The line; None if the model has no BatchNorm, or none whose statistics differ.
    """
    theirs = {name: value for name, value in end.tensors.items() if value.is_floating_point()} if end else {}
    rest = {name: value for name, value in theirs.items() if name.rpartition(".")[2] not in STATISTICS}
    if end is None or len(rest) == len(theirs):
        return None
    ends = replace(end, tensors=rest), replace(end, tensors=theirs)
    line = line_between(*ends, task.adapter.base_state_dict())
    return replace(line, first=FIRST_WEIGHTS)


def line_between(a: Start, b: Start, base: Mapping[str, Tensor] | None = None) -> StartLine:
    """Return the line between two starts, from the first, at 0, to the second, at 1.

    phi and all tensors with a fraction are mixed linearly, in float64, and have the first's dtype; others are the
    first's. At 0 and at 1 the mixed ones are exactly those of the starts, as these are now, and never beyond.

    Args:
        a: The first start.
        b: The second; it has the settings of inference of the first.
        base: The model's own tensors, by name, ``task.adapter.base_state_dict()``: what one start replaces and the
            other leaves. None if both replace the same.

    Raises:
        AdapterError: One is no start, or they have different settings; they replace different tensors, and ``base``
            lacks one; or a tensor has two shapes.
    """
    if strange := [each for each in (a, b) if not isinstance(each, Start)]:
        raise AdapterError(f"a line is between two starts, got {brief(strange[0])}; leave it out where one is None")
    if dict(a.settings) != dict(b.settings):
        raise AdapterError("the starts have different settings of inference, which can't be mixed; give both the same")
    own = dict(base or {})
    if lacking := sorted((a.tensors.keys() ^ b.tensors.keys()) - own.keys()):
        raise AdapterError(f"only one start replaces {lacking[0]!r}; give base=task.adapter.base_state_dict()")
    mine, theirs = ({**own, **each.tensors} for each in (a, b))
    phi = _pair("phi", a.phi, b.phi)
    tensors = {name: _pair(name, mine[name], theirs[name]) for name in {**a.tensors, **b.tensors}}

    def at(t: float) -> Start:
        return Start(_mixed(*phi, t), {name: _mixed(*pair, t) for name, pair in tensors.items()}, dict(a.settings))

    return StartLine(at, 0.0, 1.0)


def _pair(name: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return copies, as the model's own may be among them, that can be mixed."""
    if a.shape != b.shape:
        raise AdapterError(f"{name!r} has shapes {tuple(a.shape)} and {tuple(b.shape)} in the two starts")
    return a.detach().clone(), b.detach().clone()


def _mixed(a: Tensor, b: Tensor, t: float) -> Tensor:
    """Return ``(1 - t) a + t b`` of a's type, computed in float64, between the two whatever it was rounded to.

    That is a itself if it has no fractions.
    """
    if not a.is_floating_point() or t == 0:
        return a.clone()
    end = b.to(a, copy=True)
    if t == 1:
        return end
    mixed = ((1 - t) * a.cpu().double() + t * b.cpu().double()).to(a)
    return mixed.clamp(torch.minimum(a, end), torch.maximum(a, end))


def prior_offsets(counts: Tensor, *, one_logit: bool = False) -> Tensor:
    """Return the offsets -log(prior) of post-hoc logit adjustment (Menon et al. 2021), which stand in for equal priors.

    Args:
        counts: Number of train examples of each class, ``C``, each above 0; two for a single logit.
        one_logit: Whether the classifier has one logit for two classes.

    Returns:
        ``C`` numbers of mean zero, float64; for one logit a single one, class 1's less class 0's, ``1``.
    """
    return _as_offsets(-counts.double().log(), one_logit)


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
    return _as_offsets(errors.log(), one_logit) if bool((errors > 0).all()) else None


def _as_offsets(of_classes: Tensor, one_logit: bool) -> Tensor:
    """Return what is added to the logits of classes, ``C``, as numbers of mean zero, or as one logit's, ``1``."""
    return of_classes[1:] - of_classes[:1] if one_logit else of_classes - of_classes.mean()


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
    count, priors = _checked_priors(task.adapter, priors)
    return offset_line(task.adapter, prior_offsets(priors, one_logit=count == 1), two_classes=len(priors) == 2)


def offset_line(adapter: Adapter, adjustment: Tensor, *, two_classes: bool = False) -> StartLine | None:
    """Return the line of an adjustment's strengths, -2.5 to 2.5.

    A single logit, or the difference of two classes' logits, moves by `LEAST_THRESHOLD` at least for each unit: its
    threshold matters though both classes are as frequent.

    Args:
        adapter: Has the offsets.
        adjustment: Offsets of strength 1 (`prior_offsets`), ``C`` or ``1``.
        two_classes: Whether they are of two classes, of one logit or two; logits of labels or ranks are not.

    Returns:
        The line; None for other logits of which none moves by `LEAST_OFFSET`.
    """
    apart = adjustment[1:] - adjustment[:1] if two_classes and len(adjustment) == 2 else adjustment
    if len(apart) > 1 and float(apart.abs().max()) < LEAST_OFFSET:
        return None
    if len(apart) == 1 and float(apart.abs()) < LEAST_THRESHOLD:
        moved = torch.full_like(apart, -LEAST_THRESHOLD if float(apart) < 0 else LEAST_THRESHOLD)
        adjustment = moved if len(adjustment) == 1 else torch.cat([-moved, moved]) / 2
    return StartLine(lambda t: Start(moved_by(adapter, t * adjustment)), -STRONGEST, STRONGEST, FIRST_STRENGTHS)


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
    count, priors = _checked_priors(adapter, priors)
    with adapter.applied(Start(task.origin())) as model, evaluating(model):
        found = [each.detach().cpu().double() for each in each_batch(inputs, lambda x: logits_of(model(x), count))]
    logits = torch.cat(found)
    refuse_probabilities(logits)
    if count == 1:
        logits = torch.cat([torch.zeros_like(logits), logits], 1)
    trained = priors.double().cpu() / priors.double().sum().cpu()
    deployed = em_priors(logits.softmax(1), trained)
    return Start(moved_by(adapter, _as_offsets(deployed.log() - trained.log(), count == 1)))


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


def _checked_priors(adapter: Adapter, given: Tensor | Sequence[float]) -> tuple[int, Tensor]:
    """Return how many offsets of logits there are, and priors, ``C``; see `prior_line`."""
    if adapter.outputs is None:
        raise AdapterError("phi has no offsets of the logits; attach it with outputs=Outputs()")
    try:
        priors = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"priors are {brief(given)}; they must be a list of numbers, one for each class") from error
    count = len(adapter.phi[adapter.offsets])
    if priors.shape != (max(2, count),):
        raise ValueError(f"priors are {tuple(priors.shape)}; they must be {max(2, count)}, one for each class")
    if not bool(((priors > 0) & priors.isfinite()).all()):
        raise DataError(f"each class must have a share above 0 for its prior, got {priors.tolist()}")
    return count, priors
