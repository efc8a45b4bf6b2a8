"""Whether phi acts on what it is meant to act on, as a first batch shows it before anything is spent on a search."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.calls import Calls, projected, recorded, shape_of, tensors_in
from metricopt_ext.errors import AdapterError, WeightsError
from metricopt_ext.utils.kept_modules import KeptModules
from metricopt_ext.utils.seeding import seeded_streams
from metricopt_ext.utils.weights import checksums, same_bits
from metricopt_ext.utils.words import and_more, shortened

MOST_TRIED = 16  # coordinates without a gradient that are moved one by one
DETACHED = "None of the inputs have requires_grad=True"  # begins what torch says of a checkpoint that keeps no gradient
MOVES = (1.0, -1.0, 1e2, -1e2, 1e4, -1e4)  # how far: a saturated output has no gradient, but moves


def check_effect(adapter: Adapter, loss: Callable[[nn.Module, Any], Tensor], draw: Callable[[], Any]) -> None:
    """Check on one batch that every coordinate of phi moves an output, and that offsets act on what is returned.

    It costs a forward and a backward pass, and one more of each unless the logits are returned as their layer gives
    them; coordinates without a gradient cost further forward passes. A loss that fails, or that doesn't call the model,
    tells nothing: its user finds out. Layers that are not called
    beside others that are get a UserWarning.

    Args:
        adapter: The model's adapter; the check is made at phi = 0.
        loss: The loss of a model on a batch.
        draw: Draws the batch.

    Raises:
        WeightsError: The loss changed the model's weights.
        AdapterError: A coordinate moves no output; or the layer of the offsets was taken by definition, and its output
            is not what the model returns. The message names both layers. Or phi has no gradient in a part of the
            model, by gradient checkpointing with ``use_reentrant=True``.
    """
    model, before, sums = adapter.model, KeptModules(adapter.model), checksums(adapter.model)
    try:
        _check(adapter, loss, draw, before)
    except BaseException:
        before.put_back()
        raise
    if changed := [name for name, each in checksums(model).items() if sums.get(name) != each]:
        raise WeightsError(
            f"the batches or the loss changed the model's {and_more(changed)} on the first batch. Let the loss change"
            " nothing, or compute it on a copy of the model"
        )


def _check(
    adapter: Adapter, loss: Callable[[nn.Module, Any], Tensor], draw: Callable[[], Any], before: KeptModules
) -> None:
    model, layers = adapter.model, adapter.layers
    phi = torch.zeros_like(adapter.phi.detach()).requires_grad_(True)

    @functools.cache
    def batch() -> Any:
        with seeded_streams(0, phi.device):
            return draw()

    def run(phi: Tensor) -> Tensor:
        given = batch()
        with adapter.using(phi), seeded_streams(0, phi.device):
            return loss(model, given)

    def watched(probing: bool) -> tuple[Calls, Tensor] | None:
        """Run with gradients; None of a loss that fails, which the search says in its own words."""
        with recorded(model, layers, probing=probing) as calls, torch.enable_grad(), warnings.catch_warnings():
            warnings.filterwarnings("error", DETACHED)
            try:
                return calls, run(phi)
            except Exception as error:
                before.put_back()
                if isinstance(error, UserWarning) and str(error).startswith(DETACHED):
                    raise AdapterError(
                        f"{type(model).__name__} uses gradient checkpointing with use_reentrant=True, in which phi"
                        " would have no gradient; set use_reentrant=False, as by"
                        " gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})"
                    ) from error
                return None

    plain = watched(probing=False)
    if plain is None or not any(each.numel() for each in _tensors(plain[0])):
        return
    calls, value = plain
    still = _still(phi, [*_tensors(calls), value], run, model)
    if adapter.outputs is not None and not calls.is_returned(layers[-1]) and (probed := watched(probing=True)):
        calls, _ = probed
        _check_layer(layers[-1], calls, adapter.context.guessed)
    if still is not None:
        raise AdapterError(_why(adapter, calls, still))
    if idle := [name for name in layers if name not in calls.outputs]:
        warnings.warn(
            f"layers {shortened(idle)} were not called on the first batch, so phi does nothing there: name other"
            " layers, or attach with example=inputs, which leaves them out",
            stacklevel=5,
        )


def _check_layer(layer: str, calls: Calls, guessed: bool) -> None:
    """Refuse a layer that was taken by definition if another gives the logits, or its output fits none.

    A layer that was named is its user's to choose, but one whose channels are nowhere in what another layer gives is
    warned of.
    """
    giving, called, fits = calls.giving()[0], layer in calls.outputs, calls.fits(layer)
    if called and (giving == layer or not calls.logits()):
        return
    if called and fits and (giving is None or not guessed or calls.alike(layer, giving)):
        return
    if guessed:
        gives = f"whose output is {calls.shape(layer)}" if called else "which was not called on the first batch"
        raise AdapterError(_wrong_layer(f"layer {layer!r}, the last linear layer by definition, {gives}", calls))
    if called and giving is not None:
        warnings.warn(_wrong_layer(f"layer {layer!r}, whose output is {calls.shape(layer)}", calls), stacklevel=6)


def _wrong_layer(what: str, calls: Calls) -> str:
    giving, logits = calls.giving()
    shown = logits if logits is not None else next(iter(calls.logits()), None)
    returned = "" if shown is None else f"; the model returns {shape_of(shown)}"
    if giving is None:
        return f"the outputs act on {what}{returned}: name the layer that gives the logits, Outputs(layer=...)"
    return (
        f"the outputs act on {what}{returned}, from layer {giving!r}: attach with Outputs(layer={giving!r}), or with"
        " example=inputs, which finds it"
    )


def _tensors(calls: Calls) -> list[Tensor]:
    return [each for _, each in tensors_in(calls.returned)]


def _still(phi: Tensor, outputs: list[Tensor], run: Callable[[Tensor], Tensor], model: nn.Module) -> list[int] | None:
    """Return coordinates that move no output: all, or the first that was found; None if all move one."""
    floats = [each for each in outputs if isinstance(each, Tensor) and each.is_floating_point()]
    moving = [each for each in floats if each.requires_grad]
    try:
        (gradient,) = torch.autograd.grad(projected(moving), phi, allow_unused=True) if moving else (None,)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # an operation without a backward pass
        gradient = None
    idle = torch.arange(len(phi)) if gradient is None else (gradient == 0).nonzero().flatten().cpu()
    if not len(idle):
        return None

    @torch.no_grad()
    def returned(at: Tensor) -> list[Tensor]:
        with recorded(model) as calls:
            value = run(at)
        return [*_tensors(calls), *([value] if isinstance(value, Tensor) else [])]

    before = returned(phi.detach())

    def moves(rows: Tensor) -> bool:
        for step in MOVES:
            at = phi.detach().clone()
            at[rows.to(at.device)] = step
            try:
                after = returned(at)
            except Exception:  # of the loss, at a phi far away
                return True
            if len(after) != len(before) or not all(map(same_bits, before, after)):
                return True
        return False

    if not moves(idle):
        return idle.tolist()
    if gradient is None:
        return None  # of outputs that are not differentiable
    return next(([int(row)] for row in idle[:MOST_TRIED] if not moves(row[None])), None)


def _why(adapter: Adapter, calls: Calls, still: list[int]) -> str:
    """Say why coordinates move no output, and what to do."""
    layers, offsets, outputs = adapter.layers, adapter.offsets, adapter.outputs
    on_logits = [row for row in still if row >= offsets.start] if outputs is not None else []
    first = still[0] if len(on_logits) < len(still) else on_logits[0]
    what = "phi moves no output" if len(still) == adapter.dim else f"coordinate {first} of phi moves no output"
    if on_logits and len(on_logits) == len(still):
        layer = layers[-1]
        if layer not in calls.outputs:
            return _wrong_layer(f"layer {layer!r}, which was not called on the first batch", calls)
        if len(still) == adapter.dim - offsets.start or len(still) > 1:
            return _wrong_layer(
                f"layer {layer!r}, whose output of {calls.shape(layer)} moves nothing that the model returns", calls
            )
        which = f"the offset of class {first - offsets.start}" if first < offsets.stop else "the temperature"
        return (
            f"{what} on the first batch: it is {which}, on layer {layer!r}, whose output is {calls.shape(layer)}; name"
            " the layer that gives the logits, Outputs(layer=...), or leave the outputs out"
        )
    acting = layers[:-1] if outputs is not None else layers
    if idle := [name for name in acting if name not in calls.outputs]:
        done = f"layers {shortened(idle)} were not called"
    else:
        done = f"what layers {shortened(acting)} give is used in nothing that the model returns"
    return f"{what} on the first batch: {done}; name layers to modulate that the model uses"
