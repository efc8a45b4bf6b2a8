"""Whether phi acts where it is meant to, asked of the model: by one gradient and one forward pass, or on an example."""

import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.layers import CONVOLUTIONS, may_give_logits, shared_with, unusable
from metricopt_ext.adapters.signature import Outputs
from metricopt_ext.adapters.wrappers import bare_name, is_unused
from metricopt_ext.errors import AdapterError, WeightsError
from metricopt_ext.utils.kept_modules import KeptModules
from metricopt_ext.utils.modes import evaluating
from metricopt_ext.utils.seeding import generator, seeded_streams
from metricopt_ext.utils.weights import checksums, same_bits
from metricopt_ext.utils.words import and_more, brief, nearest, shortened

MOST_TRIED = 16  # coordinates without a gradient that are moved one by one
DETACHED = "None of the inputs have requires_grad=True"  # begins what torch says of a checkpoint that keeps no gradient
MOVES = (1.0, -1.0, 1e2, -1e2, 1e4, -1e4)  # how far: a saturated output has no gradient, but moves
RTOL, ATOL = 0.01, 0.1  # of logits in half precision, to which offsets of 1 to 2 were added


class Call(NamedTuple):
    """A call of a module, what it returned, and whether no other module of the model had called it."""

    module: nn.Module
    output: Any
    outermost: bool


class Called(NamedTuple):
    """The names of the modules that a model calls on an example, and of the layer that gives the logits, if any."""

    names: set[str]
    logits: str | None


def check_effect(adapter: Adapter, loss: Callable[[nn.Module, Any], Tensor], draw: Callable[[], Any]) -> None:
    """Check on one batch that every coordinate of phi moves an output, and that offsets act on what is returned.

    It costs a forward and a backward pass, and a forward pass more if the layer of the offsets was taken by definition;
    coordinates without a gradient cost further ones. A loss that fails, or that doesn't call the model, tells nothing:
    its user finds out. Layers that are not called beside others that are get a UserWarning.

    Args:
        adapter: The model's adapter; the check is made at phi = 0.
        loss: The loss of a model on a batch.
        draw: Draws the batch.

    Raises:
        WeightsError: The loss changed the model's weights.
        AdapterError: A coordinate moves no output; or the layer of the offsets was taken by definition, and they are
            not added to anything that the model returns, as where it returns probabilities. Or phi has no gradient in
            a part of the model, by gradient checkpointing with ``use_reentrant=True``.
    """
    before, sums = KeptModules(adapter.model), checksums(adapter.model)
    try:
        _check(adapter, loss, draw, before)
    except BaseException:
        before.put_back()
        raise
    if changed := [name for name, each in checksums(adapter.model).items() if sums.get(name) != each]:
        raise WeightsError(
            f"the batches or the loss changed the model's {and_more(changed)} on the first batch. Let the loss change"
            " nothing, or compute it on a copy of the model"
        )


def _check(
    adapter: Adapter, loss: Callable[[nn.Module, Any], Tensor], draw: Callable[[], Any], before: KeptModules
) -> None:
    zero = torch.zeros_like(adapter.phi.detach())
    phi = zero.clone().requires_grad_()
    try:
        with seeded_streams(0, zero.device):
            batch = draw()
        with adapter.using(phi) as model, torch.enable_grad(), warnings.catch_warnings():
            warnings.filterwarnings("error", DETACHED)
            calls, value = recorded(model, lambda: loss(model, batch))
            outputs = _returned(calls)
            gradient = _gradient([*outputs, *_tensors(value)], phi)
    except Exception as error:
        before.put_back()
        if str(error).startswith(DETACHED):
            raise AdapterError(
                f"{type(adapter.model).__name__} uses gradient checkpointing with use_reentrant=True, in which phi"
                " would have no gradient; set use_reentrant=False, as by"
                " gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})"
            ) from error
        return
    if not any(each.numel() for each in outputs):
        return

    @torch.no_grad()
    def at(phi: Tensor) -> list[Tensor]:
        with adapter.using(phi) as model:
            calls, value = recorded(model, lambda: loss(model, batch))
        return [*_returned(calls), *_tensors(value)]

    if adapter.context.guessed and not _are_added(adapter, outputs, at):
        raise AdapterError(
            f"the outputs act on layer {adapter.layers[-1]!r}, the last linear layer by definition, but what the model"
            " returns is not its output: name the layer that gives the logits, Outputs(layer=...), or attach with"
            " example=inputs, which finds it"
        )
    if (still := _still(zero, gradient, at)) is not None:
        on_logits = adapter.outputs is not None and still >= adapter.offsets.start
        layers, remedy = (adapter.layers[-1:], "Outputs(layer=...)") if on_logits else (adapter.layers, "layers=...")
        raise AdapterError(
            f"coordinate {still} of phi moves no output on the first batch; it acts on {shortened(layers)}: name layers"
            f" whose outputs the model uses, {remedy}, or leave these out"
        )
    called = {call.module for call in calls}
    if idle := [name for name in adapter.layers if name and adapter.model.get_submodule(name) not in called]:
        warnings.warn(
            f"layers {shortened(idle)} were not called on the first batch, so phi does nothing there: name other"
            " layers, or attach with example=inputs, which leaves them out",
            stacklevel=5,
        )


def _gradient(outputs: list[Tensor], phi: Tensor) -> Tensor | None:
    """Return phi's gradient of random multiples of all outputs, ``d``; None if they have none."""
    moving, rng = [each for each in outputs if each.requires_grad], generator(0, "projection")
    multiples = [torch.randn(each.shape, generator=rng).to(each) for each in moving]
    try:
        return torch.autograd.grad(moving, phi, multiples, allow_unused=True)[0] if moving else None
    except RuntimeError:  # an operation without a backward pass
        return None


def _are_added(adapter: Adapter, outputs: list[Tensor], at: Callable[[Tensor], list[Tensor]]) -> bool:
    """Whether each offset adds itself to its class along an axis of an output; True if none has axes, as losses."""
    phi, offsets = torch.zeros_like(adapter.phi.detach()), adapter.offsets
    logits = torch.linspace(1, 2, offsets.stop - offsets.start).to(phi)
    phi[offsets] = logits / adapter.outputs.scale  # type: ignore[union-attr]
    # A further axis of size 1 is that of one logit, which models return without its own.
    pairs = [(a.detach()[..., None], b[..., None]) for a, b in zip(outputs, at(phi), strict=False) if a.dim()]
    return not pairs or any(
        a.shape == b.shape and torch.allclose(b.movedim(axis, -1), a.movedim(axis, -1) + logits.to(a), RTOL, ATOL)
        for a, b in pairs
        for axis, size in enumerate(a.shape)
        if size == len(logits)
    )


def _still(zero: Tensor, gradient: Tensor | None, at: Callable[[Tensor], list[Tensor]]) -> int | None:
    """Return the first coordinate found to move no output, None if all do; those without a gradient are tried."""
    idle = torch.arange(len(zero)) if gradient is None else (gradient == 0).nonzero().flatten().cpu()
    before = at(zero) if len(idle) else []

    def moves(rows: Tensor) -> bool:
        for step in MOVES:
            try:
                after = at(zero.index_fill(0, rows.to(zero.device), step))
            except Exception:  # of the loss, at a phi far away
                return True
            overflow = any(bool(each.isnan().any()) for each in after)  # of weights times an infinite temperature
            if len(after) != len(before) or not (overflow or all(map(same_bits, before, after))):
                return True
        return False

    alone = [] if gradient is None else idle[:MOST_TRIED].split(1)  # without any gradient all together say enough
    return next((int(rows[0]) for rows in [idle, *alone] if len(rows) and not moves(rows)), None)


def called(model: nn.Module, example: Any) -> Called:
    """Run a model on an example, in evaluation mode, and say what it calls.

    The logits' layer is the last linear layer or 1 x 1 convolution whose output is what the model returns, or else has
    its size, or else its channels, and which it was computed from. Of several tensors, the first that has one counts.

    Args:
        model: A model without an adapter.
        example: Its inputs: a tuple of arguments, a mapping of named ones, or the one argument.

    Raises:
        AdapterError: The model fails on the example.
    """
    named, args = (example, ()) if isinstance(example, Mapping) else ({}, example)
    try:
        with evaluating(model), torch.enable_grad():
            calls, _ = recorded(model, lambda: model(*(args if isinstance(args, tuple) else (args,)), **named))
    except Exception as error:
        raise AdapterError(
            f"{type(model).__name__} fails on the example, a {type(example).__name__}: {brief(error)}; give its inputs"
            " alone: a tensor, a tuple of arguments, or a dict of named ones"
        ) from error
    names = {module: name for name, module in model.named_modules()}
    heads = [
        (names[module], output, output.shape[-1 if isinstance(module, nn.Linear) else 1])
        for module, output, _ in reversed(calls)
        if isinstance(output, Tensor) and may_give_logits(module) and _is_own(names[module])
    ]
    found = (
        name
        for rank in range(3)
        for tensor in _returned(calls)
        for name, output, channels in heads
        if (tensor is output, tensor.numel() == output.numel(), channels in tensor.shape[1:])[rank]
        and tensor.dim()
        and _is_behind(output, tensor)
    )
    return Called({names[call.module] for call in calls}, next(found, None))


def _is_behind(output: Tensor, tensor: Tensor) -> bool:
    """Whether a tensor was computed from a layer's output; True where no gradient tells, as of a frozen model."""
    if not tensor.requires_grad:
        return True
    if not output.requires_grad:
        return False
    ones = torch.ones_like(tensor)
    return torch.autograd.grad(tensor, output, ones, retain_graph=True, allow_unused=True)[0] is not None


def recorded(model: nn.Module, run: Callable[[], Any]) -> tuple[list[Call], Any]:
    """Run something that calls a model or parts of it; returns the calls in the order in which they ended, and a value.

    Random numbers are the same in each run. Compiled parts run as written, as compiled code need not tell of its calls.
    """
    depth, calls = 0, list[Call]()
    device = next((each.device for each in model.parameters()), torch.device("cpu"))

    def enter(module: nn.Module, args: Any) -> None:
        nonlocal depth
        depth += 1

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal depth
        depth -= 1
        calls.append(Call(module, output, outermost=depth == 0))

    with ExitStack() as undone, seeded_streams(0, device):
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                undone.enter_context(module.register_forward_pre_hook(enter))
                undone.enter_context(module.register_forward_hook(leave, always_call=True))
        if "torch._dynamo" in sys.modules:  # which takes long to import
            undone.enter_context(torch.compiler.set_stance("force_eager"))
        return calls, run()


def _returned(calls: list[Call]) -> list[Tensor]:
    return [each for call in calls if call.outermost for each in _tensors(call.output)]


def _tensors(output: Any) -> list[Tensor]:
    """The floating numbers in an output, however nested; an object that is no container of Python's is opened once."""
    leaves = [each if isinstance(each, Tensor) else getattr(each, "__dict__", None) for each in tree_leaves(output)]
    return [each for each in tree_leaves(leaves) if isinstance(each, Tensor) and each.is_floating_point()]


def refuse_idle(names: list[str], called: Called | None) -> None:
    """Refuse layers that were not called on an example."""
    if called is not None and (idle := [name for name in names if name not in called.names]):
        raise AdapterError(f"layers {shortened(idle)} are not called on the example, so phi could do nothing there")


def logits_layer(outputs: Outputs, model: nn.Module, others: list[str], called: Called | None) -> tuple[str, nn.Module]:
    """Return the name of the layer that outputs act on, and the layer, which must be none of the others."""
    if not isinstance(outputs, Outputs):
        raise AdapterError(f"outputs is {outputs!r}; it must be Outputs(...), or None for no offsets of the logits")
    known = dict(model.named_modules())
    linear = [name for name, each in known.items() if isinstance(each, nn.Linear) and may_give_logits(each)]
    last = next(filter(_is_own, reversed(linear)), None) if called is None else called.logits
    name = last if outputs.layer is None else outputs.layer
    if name is None:
        where = "has no linear layer" if called is None else "returns what no linear layer or 1 x 1 convolution gives"
        raise AdapterError(f"{type(model).__name__} {where}; say which layer gives the logits, Outputs(layer)")
    # Wrappers of its parts may have given it another name.
    used = [each for each in known if bare_name(each) == name and not is_unused(each) and may_give_logits(known[each])]
    name = used[0] if name not in known and len(used) == 1 else name
    if name not in known:
        raise AdapterError(f"the outputs' layer {name!r} is no layer of the model{nearest(name, list(known))}")
    if (why := _why_no_offsets(model, known[name])) is not None:
        raise AdapterError(f"the outputs' layer {name!r} {why}; it must be the layer that gives the logits")
    refuse_idle([name], called)
    if name in others:
        raise AdapterError(
            f"layer {name!r} gives the logits, on which the outputs act; name other layers, or leave the outputs out"
        )
    return name, known[name]


def _is_own(name: str) -> bool:
    """Whether a layer is the model's own and in use; LoRA's matrices beside a layer are not."""
    return not {"lora_A", "lora_B"} & set(name.split(".")) and not is_unused(name)


def _why_no_offsets(model: nn.Module, layer: nn.Module) -> str | None:
    """Why a layer's output can't get offsets; None if it can: it has a bias, or can be given one."""
    if getattr(layer, "bias", None) is not None:
        return unusable(layer)
    kind = f"is a {type(layer).__name__} without a bias"
    if not may_give_logits(layer) or type(layer).forward not in [each.forward for each in (nn.Linear, *CONVOLUTIONS)]:
        return f"{kind}, whose code need not add one"
    other = shared_with(model, layer, layer.weight)
    return other and f"{kind}, and its weight is {other} too, so a saved model has no place for a bias"
