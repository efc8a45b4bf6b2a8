"""Where a search may begin: what costs no query to reach, each to be judged by the metric before it is built upon."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.context import CONTEXT_NAME
from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.errors import AdapterError
from metricopt_ext.search.stages import SETTINGS
from metricopt_ext.tasks.inputs import each_batch
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.weights import same_bits
from metricopt_ext.utils.words import brief


def all_starts(task: FinetuneTask, starts: Mapping[str, Start | StartLine]) -> dict[str, Start | StartLine]:
    """Return phi = 0, named ``"start"``, and the starts given: copies, as the model's own phi may be among them.

    Lines of starts stay what they are.

    Raises:
        ValueError: A name is taken by a result's other ends, or a start has settings that the task has not.
        AdapterError: A start does not fit the model (see `Adapter.check`), or one at the end of a line; or it has
            numbers that are not finite where the model's are, or a variance below 0.
    """
    check_starts(starts)
    found: dict[str, Start | StartLine] = {"start": Start(task.origin())}
    for name, start in starts.items():
        if name in ("start", SETTINGS, "search", "part"):
            raise ValueError(f"a start is named {name!r}, which is an end of every search; give it another name")
        if not isinstance(start, StartLine):
            found[name] = _checked(task, name, start)
            continue
        try:
            start.check()
        except AdapterError as error:
            raise AdapterError(f"start {name!r}: {error}") from error
        for each in start.ends:
            _checked(task, name, each)
        found[name] = start
    return found


def check_starts(starts: Any) -> None:
    """Refuse what does not map names to starts, or to None for one that does not apply.

    Raises:
        ValueError: The message says what they must be.
    """
    example = "map names to starts, as {'balanced': mo.Start(phi)}"
    if not isinstance(starts, Mapping):
        raise ValueError(f"starts are {brief(starts)}; they must {example}")
    for name, start in starts.items():
        if not isinstance(name, str) or not name or not isinstance(start, Start | StartLine | None):
            raise ValueError(f"starts have {brief(name)}: {brief(start)}; they must {example}")


def _checked(task: FinetuneTask, name: str, start: Start | None) -> Start:
    if start is None:  # what `batchnorm_start` and the like return where there is nothing to replace
        raise AdapterError(f"start {name!r} is None: it does not apply to this model; leave it out")
    try:
        task.adapter.check(start)
        _check_numbers(start, task.adapter)
    except AdapterError as error:
        raise AdapterError(f"start {name!r}: {error}") from error
    tensors = {key: value.detach().clone() for key, value in start.tensors.items()}
    task.values_of(start.settings)  # refuses what it can't be
    return Start(start.phi.detach().to(task.origin(), copy=True), tensors, dict(start.settings), start.presumed)


def _check_numbers(start: Start, adapter: Adapter) -> None:
    """Refuse numbers by which the model computes none: a loss that is not finite would be blamed for them."""
    base = adapter.base_state_dict()
    for name, value in start.tensors.items():
        if not value.is_floating_point():
            continue
        if bool((base[name].to(value.device).isfinite() & ~value.isfinite()).any()):
            raise AdapterError(f"{brief(name)} has NaN or infinity where the model's has not; leave it out")
        if name.rpartition(".")[2] == "running_var" and bool((value < 0).any()):
            raise AdapterError(f"{brief(name)} has {float(value.min()):g}; a variance is at least 0")


def divided(starts: Mapping[str, Start | StartLine]) -> tuple[dict[str, Start], dict[str, StartLine]]:
    """Return the starts that are fixed, and the lines of starts, by name."""
    lines = {name: each for name, each in starts.items() if isinstance(each, StartLine)}
    return {name: each for name, each in starts.items() if isinstance(each, Start)}, lines


def batchnorm_start(task: FinetuneTask, inputs: Iterable[Any]) -> Start | None:
    """Return phi = 0 with BatchNorm statistics of other inputs, or None if the model has no BatchNorm.

    Args:
        task: Its model's statistics are replaced in the start, not in the model.
        inputs: Batches of inputs, without labels; see `reestimate_batchnorm`.

    Raises:
        DataError: There is no batch, or the model can't take one.
    """
    model = reestimate_batchnorm(task.adapter.model, inputs)
    if model is None:
        return None
    own = task.adapter.base_state_dict()
    changed = {name: value for name, value in model.named_buffers() if name in own and not same_bits(value, own[name])}
    return Start(task.origin(), changed)


@torch.no_grad()
def reestimate_batchnorm(model: nn.Module, inputs: Iterable[Any]) -> nn.Module | None:
    """Return a copy of a model with BatchNorm statistics of other inputs, or None if it keeps none.

    A norm that no input reaches, such as an auxiliary head's, keeps its statistics.

    Args:
        model: With or without an adapter; the copy is of its base, and in evaluation mode.
        inputs: Batches of inputs, without labels; each counts the same, so make them about equal in size.

    Raises:
        DataError: There is no batch, or the model can't take one.
    """
    copied = copy.deepcopy(model)
    if hasattr(copied, CONTEXT_NAME):
        Adapter(copied).remove()
    norms = _norms(copied)
    if not norms:
        return None
    copied.eval()  # dropout in particular must not disturb the statistics
    before = [(norm.momentum, copy.deepcopy(norm.state_dict())) for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches
        norm.train()
    for _ in each_batch(inputs, copied):
        pass
    for norm, (momentum, state) in zip(norms, before, strict=True):
        norm.momentum = momentum
        if norm.num_batches_tracked == 0:
            norm.load_state_dict(state)
    return copied.eval()


def has_batchnorm(model: nn.Module) -> bool:
    """Whether a model has BatchNorm, whose statistics could be others."""
    return bool(_norms(model))


def _norms(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    every = (module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))
    return [norm for norm in every if norm.running_mean is not None]  # others take each batch's own


def line_between(a: Start, b: Start, base: Mapping[str, Tensor] | None = None) -> StartLine:
    """Return the line between two starts, from the first, at 0, to the second, at 1.

    phi and all tensors with a fraction are mixed linearly, in float64, and have the first's dtype; others are the
    first's. At 0 and at 1 the mixed ones are exactly those of the starts, as these are now.

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
    for name in sorted(a.tensors.keys() ^ b.tensors.keys()):
        if name not in own:
            raise AdapterError(
                f"only one of the starts replaces {name!r}; say what the other has, by"
                " line_between(a, b, task.adapter.base_state_dict())"
            )
    tensors = {
        name: (_copied(a.tensors, own, name), _copied(b.tensors, own, name)) for name in {**a.tensors, **b.tensors}
    }
    phi = a.phi.detach().clone(), b.phi.detach().clone()  # copies, as the model's own may be among all these
    for name, (mine, theirs) in {"phi": phi, **tensors}.items():
        if mine.shape != theirs.shape:
            raise AdapterError(f"{name!r} has shapes {tuple(mine.shape)} and {tuple(theirs.shape)} in the two starts")

    def at(t: float) -> Start:
        return Start(mixed(*phi, t), {name: mixed(*pair, t) for name, pair in tensors.items()}, dict(a.settings))

    return StartLine(at, 0.0, 1.0)


def _copied(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], name: str) -> Tensor:
    return (tensors if name in tensors else own)[name].detach().clone()


@torch.no_grad()
def mixed(a: Tensor, b: Tensor, t: float) -> Tensor:
    """Return ``(1 - t) a + t b`` of a's type, computed in float64; a itself if it has no fractions."""
    if not a.is_floating_point() or t == 0:
        return a.detach().clone()
    if t == 1:
        return b.detach().to(a, copy=True)
    return ((1 - t) * a.detach().cpu().double() + t * b.detach().cpu().double()).to(a)
