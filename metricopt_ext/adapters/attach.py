"""Attaching adapters: a frozen model whose layers phi modulates."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter, read_adapter, refuse_wrapper
from metricopt_ext.adapters.check import Called, called, logits_layer, refuse_idle
from metricopt_ext.adapters.checkpoints import CheckpointReader
from metricopt_ext.adapters.context import CONTEXT_NAME, Context, Host
from metricopt_ext.adapters.layers import (
    enter_eval,
    is_norm,
    matching,
    mode_dependent,
    origin,
    pin_to_eval,
    scales_alone,
    unmovable,
    unusable,
    weight_of,
)
from metricopt_ext.adapters.lora import lora_layers
from metricopt_ext.adapters.moves import (
    GENERATOR,
    Film,
    InputBias,
    LoraScale,
    Mixture,
    Move,
    Offsets,
    floating,
    gaussian,
    saved_states,
)
from metricopt_ext.adapters.signature import Outputs, Signature
from metricopt_ext.adapters.wrappers import is_unused, unwrapped
from metricopt_ext.errors import AdapterError
from metricopt_ext.runtime.identity import fingerprint
from metricopt_ext.utils.checks import MOST_SIZE, check_integer
from metricopt_ext.utils.files import content_of
from metricopt_ext.utils.kept_modules import KeptModules
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.words import brief, nearest, shortened

States = Sequence[Mapping[str, Tensor]]  # of checkpoints


def attach_film(
    model: nn.Module,
    layers: str | Sequence[str] | None = None,
    *,
    dim: int = 128,
    seed: int = 0,
    outputs: Outputs | None = None,
    example: Any = None,
) -> Adapter:
    """Freeze a model and modulate some of its layers by FiLM (paper, Fig. S1b).

    The output is unchanged until phi moves from 0. Every parameter is frozen; normalisation and dropout layers compute
    as in evaluation whatever ``model.training`` says (functional dropout in the model's own code is out of reach).

    Args:
        model: Any module. It is changed in place. Inside DataParallel, DistributedDataParallel or torch.compile, the
            wrapped model is changed, and its own layer names count.
        layers: Patterns of module names, e.g. ``"layer4.*.bn2"``; prefixes from wrappers inside the model, such as
            ``module.`` and PEFT's ``base_model.model.``, may be left out. By default every normalisation layer with a
            weight and a bias. If there is none, every one without a bias, such as RMSNorm, of which only the scale is
            modulated. Both torch's own layers count and, by their names, a model's own (``LlamaRMSNorm``,
            ``T5LayerNorm``). Convolutions and linear layers with a bias can be named as well.
        dim: Number of phi's coordinates that A and B multiply, at least 1: all of phi without ``outputs``.
        seed: Seed of A and B; ``outputs`` make no difference to them.
        outputs: Gives phi further coordinates, which act on the logits; their layer can't be among ``layers``.
        example: Inputs to run the model on once: a tensor, a tuple of arguments, or a dict of named ones. The logits'
            layer is then the last linear layer or 1 x 1 convolution that was called and whose output has the shape of
            what the model returns, and layers that aren't called are left out, or refused if named.

    Returns:
        The handle for tuning, saving, merging or removing the adapter.

    Raises:
        AdapterError: A pattern matches no layer that FiLM can modulate, an adapter acts on the model already, the model
            is an average's wrapper (EMA), the logits' layer can't be found or modulated, or the model fails on the
            example. The model is then as it was.
        ValueError: ``dim`` or ``seed`` is out of range.

    Examples:
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        >>> attach_film(model, dim=8).layers
        ['1']
    """
    model, calls = _opened(model, example)
    return _attach(model, Signature("film", _film_layers(model, layers, calls), (), seed, dim, "", outputs), calls)


def _film_layers(model: nn.Module, layers: str | Sequence[str] | None, calls: Called | None) -> tuple[str, ...]:
    """Return the names of the layers that FiLM modulates."""
    usable = {name: each for name, each in model.named_modules() if not is_unused(name) and unusable(each) is None}
    if layers is None:
        norms = [n for n, each in usable.items() if is_norm(each) and (calls is None or n in calls.names)]
        names = [name for name in norms if not scales_alone(usable[name])] or norms
    else:
        names = matching([layers] if isinstance(layers, str) else list(layers), model, usable)
    if not names:
        raise AdapterError(f"layers={layers!r} finds no norm with a weight; name some of {shortened(list(usable))}")
    return tuple(names)


def attach_input_bias(
    model: nn.Module,
    layer: str | None = None,
    *,
    dim: int = 16,
    seed: int = 0,
    outputs: Outputs | None = None,
    example: Any = None,
) -> Adapter:
    """Freeze a fully connected network and give a linear layer a dynamic bias ``C phi`` (paper, section 4.2).

    Args:
        model: Any module with a linear layer. It is changed in place, as by `attach_film`.
        layer: Name of the linear layer; by default the first.
        dim: Number of phi's coordinates that C multiplies, at least 1: all of phi without ``outputs``.
        seed: Seed of C; ``outputs`` make no difference to it.
        outputs: Give phi further coordinates, which act on the logits; their layer can't be ``layer``.
        example: As in `attach_film`; the first linear layer is then the first that was called.

    Raises:
        AdapterError, ValueError: As in `attach_film`, for linear layers with a bias.
    """
    model, calls = _opened(model, example)
    modules = model.named_modules()
    linear = [name for name, each in modules if isinstance(each, nn.Linear) and each.bias is not None]
    name = next((each for each in linear if calls is None or each in calls.names), "") if layer is None else layer
    if name not in linear:
        raise AdapterError(f"no linear layer with a bias is {layer or 'called'}{nearest(name, linear)}, or attach_film")
    return _attach(model, Signature("input_bias", (name,), (), seed, dim, "", outputs), calls)


def attach_outputs(model: nn.Module, outputs: Outputs | None = None, *, example: Any = None) -> Adapter:
    """Freeze a classifier and let phi be only the offsets of its logits and, if requested, their temperature.

    Args:
        model: Any module whose logits are the output of a layer with a weight and a bias; changed in place, as by
            `attach_film`.
        outputs: Which layer, and logits per unit of phi; by default the last linear layer, 1, and no temperature.
        example: As in `attach_film`.

    Raises:
        AdapterError: As in `attach_film`.

    Examples:
        >>> adapter = attach_outputs(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
        >>> adapter.dim, adapter.layers
        (3, ['2'])
    """
    model, calls = _opened(model, example)
    outputs = Outputs() if outputs is None else outputs
    return _attach(model, Signature("outputs", (), (), 0, 0, "", outputs), calls)


def attach_lora_scales(model: nn.Module, *, outputs: Outputs | None = None, example: Any = None) -> Adapter:
    """Freeze a model that PEFT has adapted by LoRA, and let phi scale the change of each layer: one factor for each.

    A layer computes ``W x + (1 + phi_i) s B A x``. `Adapter.merge` folds the factors into LoRA's matrices B, so that
    PEFT's own ``merge_and_unload`` and ``save_pretrained`` take them along.

    Args:
        model: A model of PEFT's, changed in place as by `attach_film`; one LoRA is active, and it is not merged.
        outputs: As in `attach_film`.
        example: As in `attach_film`.

    Raises:
        AdapterError: The model has no layer that LoRA acts on, several adapters are active, or a factor could not be
            merged, as with DoRA; or as in `attach_film`. The model is then as it was.

    Examples:
        >>> model = peft.get_peft_model(base, peft.LoraConfig())  # doctest: +SKIP
        >>> attach_lora_scales(model).dim  # doctest: +SKIP
        24
    """
    model, calls = _opened(model, example)
    names = lora_layers(model)
    return _attach(model, Signature("lora", tuple(names), (), 0, len(names), "", outputs), calls)


def attach_mixture(
    model: nn.Module,
    checkpoints: Sequence[str | Path | Mapping[str, Tensor]],
    *,
    film: int | None = None,
    layers: str | Sequence[str] | None = None,
    outputs: Outputs | None = None,
    entry: str | None = None,
    seed: int = 0,
    example: Any = None,
) -> Adapter:
    """Freeze a model and let phi say how much of each of a few checkpoints goes into its weights (`Mixture`).

    phi = 0 is the model, and a unit vector is a checkpoint; the search moves between and a little beyond them. All of
    them stay in memory: with k checkpoints k + 1 models, and two more in a query or a pass. `Adapter.merge` leaves one
    model.

    Args:
        model: Any module, changed in place as by `attach_film`. Its weights are the base, of which the checkpoints are
            finetunes: there is nothing useful between models trained from scratch.
        checkpoints: One to eight: files of safetensors or ``torch.save``, folders that Hugging Face's libraries save,
            or state dicts. Each has all tensors of the model, in its shapes and types.
        film: Number of further coordinates, which modulate layers by FiLM as in `attach_film`; None for none.
        layers: With ``film``, the layers, as in `attach_film`.
        outputs: As in `attach_film`.
        entry: The state dict's key in each file of torch that is not one itself; None to find it.
        seed: Seed of FiLM's matrices.
        example: As in `attach_film`.

    Raises:
        AdapterError: As from `attach_film`; or there are no checkpoints, or more than eight, or two of one model.
        DataError: A checkpoint can't be read, or has not the model's tensors; the message has the file and the tensor.
        ValueError: A number is out of range.

    Examples:
        >>> model, other = nn.Linear(3, 2), nn.Linear(3, 2)
        >>> adapter = attach_mixture(model, [other.state_dict()])
        >>> adapter.set_phi(torch.ones(1))
        >>> bool((adapter.merge().weight == other.weight).all())
        True
    """
    listed = isinstance(checkpoints, Sequence) and not isinstance(checkpoints, str)
    if not listed or not all(isinstance(each, str | Path | Mapping) for each in checkpoints):
        raise AdapterError(f"checkpoints is {brief(checkpoints)}; it must be a list of files or model.state_dict()")
    if film is None and layers is not None:
        raise AdapterError(f"layers={layers!r} are for FiLM; give film=, its number of coordinates, too")
    check_integer(1, film=1 if film is None else film)
    model, calls = _opened(model, example)
    states = CheckpointReader(model, entry).to_mix(checkpoints)
    names, dim = _film_layers(model, layers, calls) if film else (), len(states) + (film or 0)
    return _attach(model, Signature("mixture", ("", *names), (), seed, dim, "", outputs), calls, states)


def load_adapter(model: nn.Module, path: str | Path) -> Adapter:
    """Attach an adapter that `Adapter.save` wrote to a bare model, and apply what it holds: phi, and a start's tensors.

    The model must have the weights that the adapter was tuned on, as the file holds only the differences; otherwise a
    UserWarning says so.

    Raises:
        FileFormatError: The file is corrupt or not an adapter file. The model is then as it was.
        AdapterError: The model lacks a layer or tensor that the file names, or has one of another shape or type, or has
            an adapter. The model is then as it was.
    """
    saved, (model, _) = read_adapter(path), _opened(model, None)
    signature, modules = saved[0].signature, dict(model.named_modules())
    names = signature.layers if signature.outputs is None else signature.layers[:-1]
    known = lora_layers(model) if signature.kind == "lora" else list(modules)
    for name in names:
        if name not in known:
            raise AdapterError(f"{path}: {brief(name)} is no layer that phi can move here{nearest(name[:100], known)}")
        if name and signature.kind in ("film", "mixture") and (why := unusable(modules[name])) is not None:
            raise AdapterError(f"{path}: layer {name!r} {why}")
    try:
        with content_of(path, "adapter"):
            states = saved_states(floating(model), saved[1]) if signature.kind == "mixture" else []
            adapter = _attach(model, replace(signature, layers=names, dim=signature.offsets.start), None, states)
        adapter.take(path, saved)
        return adapter
    except BaseException:
        if hasattr(model, CONTEXT_NAME):
            Adapter(model).remove()
        raise


def _opened(model: nn.Module, example: Any) -> tuple[nn.Module, Called | None]:
    """Return the model within its wrappers, which must be bare, and what it calls on an example."""
    inner = unwrapped(model)
    if any(isinstance(each, nn.parallel.DistributedDataParallel) for each in model.modules()):
        # It averages the gradients of those parameters alone that it has found. A search needs none.
        warnings.warn("to train phi in a loop of your own, attach before DistributedDataParallel", stacklevel=3)
    hooks = [hook for module in inner.modules() for hook in module._forward_pre_hooks.values()]
    adapted = any(hook is enter_eval or isinstance(getattr(hook, "__self__", None), Host) for hook in hooks)
    if adapted or hasattr(inner, CONTEXT_NAME):
        raise AdapterError(f"{type(inner).__name__} or a model around it has an adapter; remove() or merge() it first")
    refuse_wrapper(inner)
    return inner, None if example is None else called(inner, example)


def _attach(model: nn.Module, asked: Signature, calls: Called | None, states: States = ()) -> Adapter:
    """Freeze a bare model, and attach moves of its layers and of its logits; what fails is undone.

    Args:
        model: The model.
        asked: What phi is to mean, but for the channels, the generator, the logits' layer and its coordinates.
        calls: What the model calls on an example; None without one.
        states: The checkpoints of a mixture.
    """
    check_integer(0 if asked.kind == "outputs" else 1, MOST_SIZE, dim=asked.dim)
    check_integer(0, seed=asked.seed)
    layers, dim, outputs, guessed = asked.layers, int(asked.dim), asked.outputs, False
    refuse_idle(list(layers), calls)
    if outputs is not None:
        layer, logits = logits_layer(outputs, model, list(layers), calls)
        guessed = outputs.layer is None and calls is None
        layers, outputs = (*layers, layer), replace(outputs, layer=layer)
    like = next(iter(floating(model).values())) if states else weight_of(model.get_submodule(layers[0]))
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    moves = [_move(model, asked, index, dtype, states) for index in range(len(asked.layers))]
    # Without its checkpoints, the weights of a mixture mean nothing.
    drawn = f"{GENERATOR}, of checkpoints {fingerprint(dict(moves[0].named_buffers()))}" if states else GENERATOR
    if outputs is not None:
        classes, keys = len(weight_of(logits)), _keys(model, layer, *["weight"] * outputs.temperature, "bias")
        if getattr(logits, "bias", None) is None:
            keys.append(f"{layer}.bias".lstrip("."))  # which it gets
        moves.append(Offsets(keys, slice(dim, dim + classes), outputs.scale))
        dim += classes + outputs.temperature
    means = Signature(asked.kind, layers, tuple(move.channels for move in moves), int(asked.seed), dim, drawn, outputs)
    context = Context(model, moves, means, dtype, guessed)
    context.thawed = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    before = KeptModules(model)
    try:
        model.requires_grad_(False)
        context.pins = [pin for module in model.modules() if mode_dependent(module) for pin in pin_to_eval(module)]
        context.host_in(model)
        model.add_module(CONTEXT_NAME, context.to(like.device))
        adapter = Adapter(model)
        for parameter in model.parameters():
            parameter.grad = None  # the optimizer that trained the weights would step along what is left
        return adapter
    except BaseException:
        before.put_back()
        raise


def _move(model: nn.Module, asked: Signature, index: int, dtype: torch.dtype, states: States) -> Move:
    """Return what phi does to the layer of an index among those that are modulated."""
    if index == 0 and states:
        return Mixture(floating(model), states)
    name, kind, dim = asked.layers[index], asked.kind, int(asked.dim)
    keys = _keys(model, name, *(["bias"] if kind == "input_bias" else ["weight", "bias"]))
    if kind == "lora":
        return LoraScale(keys, index)
    layer, rng = model.get_submodule(name), generator(asked.seed, "film" if states else kind, index - bool(states))
    matrices = [gaussian(len(weight_of(layer)), dim, dtype, rng) for _ in keys]
    if kind == "input_bias":
        return InputBias(keys[0], matrices[0])
    for matrix in matrices:  # of its own coordinates alone, and as large as without a mixture's
        matrix[:, : len(states)] = 0
        matrix.mul_((dim / (dim - len(states))) ** 0.5)
    return Film(keys, matrices[0], matrices[1] if len(keys) > 1 else None, origin(layer) or 0.0)


def _keys(model: nn.Module, name: str, *tensors: str) -> list[str]:
    """Return the names of those of a layer's tensors that it has, which phi is to move."""
    found = [own for own in tensors if getattr(model.get_submodule(name), own, None) is not None]
    for own in found:
        if (why := unmovable(model, name, own)) is not None:
            raise AdapterError(why)
    return [f"{name}.{own}".lstrip(".") for own in found]


FILM = partial(attach_film, dim=32)  # numbers that suit 60 to 300 queries
