"""Attaching adapters: a frozen model whose layers phi modulates."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter, read_adapter, refuse_wrapper
from metricopt_ext.adapters.check import Called, called, logits_layer, refuse_idle
from metricopt_ext.adapters.checkpoints import MOST, CheckpointReader
from metricopt_ext.adapters.context import CONTEXT_NAME, Context, Host
from metricopt_ext.adapters.layers import (
    CONVOLUTIONS,
    NORMS,
    enter_eval,
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
    AdapterKind,
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
from metricopt_ext.utils.files import check_tensors, content_of
from metricopt_ext.utils.kept_modules import KeptModules
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.words import brief, nearest, shortened


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
    model = unwrapped(model)
    _check_bare(model)
    calls = None if example is None else called(model, example)
    return _attach(model, "film", _film_layers(model, layers, calls), dim, seed, outputs, calls)


def _film_layers(model: nn.Module, layers: str | Sequence[str] | None, calls: Called | None) -> list[str]:
    """Return the names of the layers that FiLM modulates."""
    usable = {name: each for name, each in model.named_modules() if not is_unused(name) and unusable(each) is None}
    if layers is None:
        norms = {n: each for n, each in usable.items() if not isinstance(each, (*CONVOLUTIONS, nn.Linear))}
        if calls is not None:
            norms = {name: module for name, module in norms.items() if name in calls.names}
        names = [name for name, module in norms.items() if not scales_alone(module)] or list(norms)
        if not names:
            possible = shortened(list(usable)) if usable else "none of its layers has both"
            other = next((f" that phi can be folded into, as {n!r} {why}" for n, why in _unusable_norms(model)), "")
            raise AdapterError(
                f"{type(model).__name__} has no normalisation layer with a weight{other}; name layers to modulate"
                f" (possible: {possible})"
            )
    else:
        patterns = [layers] if isinstance(layers, str) else list(layers)
        if not patterns:
            raise AdapterError("layers is empty; name at least one, or leave it out for every normalisation layer")
        names = matching(patterns, model, usable)
        refuse_idle(names, calls)
    return names


def _unusable_norms(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of norms that FiLM can't modulate, and why."""
    for name, module in model.named_modules():
        if isinstance(module, NORMS) and (why := unusable(module)) is not None:
            yield name, why


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
    model = unwrapped(model)
    _check_bare(model)
    modules = model.named_modules()
    linear = [name for name, each in modules if isinstance(each, nn.Linear) and each.bias is not None]
    if not linear:
        raise AdapterError(f"{type(model).__name__} has no linear layer with a bias; use attach_film")
    if layer is not None and layer not in linear:
        raise AdapterError(f"no linear layer with a bias is named {layer!r}{nearest(layer, linear)}")
    calls = None if example is None else called(model, example)
    first = next((name for name in linear if calls is None or name in calls.names), linear[0])
    name = first if layer is None else layer
    refuse_idle([name], calls)
    return _attach(model, "input_bias", [name], dim, seed, outputs, calls)


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
    model = unwrapped(model)
    _check_bare(model)
    calls = None if example is None else called(model, example)
    return _attach(model, "outputs", [], 0, 0, Outputs() if outputs is None else outputs, calls)


def attach_lora_scales(
    model: nn.Module, *, adapter_name: str | None = None, outputs: Outputs | None = None, example: Any = None
) -> Adapter:
    """Freeze a model that PEFT has adapted by LoRA, and let phi scale the change of each layer: one factor for each.

    A layer computes ``W x + (1 + phi_i) s B A x``. `Adapter.merge` folds the factors into LoRA's matrices B, so that
    PEFT's own ``merge_and_unload`` and ``save_pretrained`` take them along.

    Args:
        model: A model of PEFT's, changed in place as by `attach_film`; its LoRA is active and not merged.
        adapter_name: PEFT's name of the adapter; by default the one that is active.
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
    model = unwrapped(model)
    _check_bare(model)
    names = lora_layers(model, adapter_name)
    calls = None if example is None else called(model, example)
    refuse_idle(names, calls)
    return _attach(model, "lora", names, len(names), 0, outputs, calls)


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
    them stay in memory: with k checkpoints k + 1 models, and one more in a forward pass. `Adapter.merge` leaves one
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
    model = unwrapped(model)
    if not isinstance(checkpoints, Sequence) or isinstance(checkpoints, str):
        raise AdapterError(f"checkpoints must be a list of files or state dicts, not {brief(checkpoints)}")
    if strange := [each for each in checkpoints if not isinstance(each, str | Path | Mapping)]:
        remedy = ": give its state_dict()" if isinstance(strange[0], nn.Module) else ""
        raise AdapterError(f"checkpoints has {brief(strange[0])}; each must be a file or a state dict{remedy}")
    if film is None and layers is not None:
        raise AdapterError(f"layers={layers!r} are for FiLM; give film=, its number of coordinates, too")
    check_integer(1, **({} if film is None else {"film": film}))
    _check_bare(model)
    states = CheckpointReader(model, entry).to_mix(checkpoints)
    calls = None if example is None else called(model, example)
    names = _film_layers(model, layers, calls) if film else []
    return _attach(model, "mixture", ["", *names], len(states) + (film or 0), seed, outputs, calls, states)


def load_adapter(model: nn.Module, path: str | Path) -> Adapter:
    """Attach an adapter that `Adapter.save` wrote to a bare model, and apply what it holds: phi, and a start's tensors.

    The model must have the weights that the adapter was tuned on, as the file holds only the differences; otherwise a
    UserWarning says so.

    Raises:
        FileFormatError: The file is corrupt or not an adapter file. The model is then as it was.
        AdapterError: The model lacks a layer or tensor that the file names, or has one of another shape or type, or has
            an adapter. The model is then as it was.
    """
    saved, model = read_adapter(path), unwrapped(model)
    signature, tensors = saved[0].signature, saved[1]
    outputs = signature.outputs
    kind: AdapterKind = signature.kind  # type: ignore[assignment]
    names, modules = list(signature.layers if outputs is None else signature.layers[:-1]), dict(model.named_modules())
    _check_bare(model)
    for name in names:
        if name not in modules:
            near = nearest(name[:100], [each for each in modules if each])
            raise AdapterError(f"{path}: {brief(name)} is no layer of the model{near}")
        why = unusable(modules[name]) if name and kind in ("film", "mixture") else None
        if why is not None or (kind == "lora" and name not in lora_layers(model)):
            raise AdapterError(f"{path}: layer {name!r} {why or 'is no matrix of an active LoRA of the model'}")
    check_tensors(path, {"phi": tensors.get("phi", torch.zeros(0))}, {"phi": [signature.dim]})
    before = KeptModules(model)
    try:
        with content_of(path, "adapter"):
            states = saved_states(floating(model), tensors) if kind == "mixture" else []
            if kind == "mixture" and not (names[:1] == [""] and 1 <= len(states) <= MOST):
                raise ValueError(f"it is a mixture, but not of 1 to {MOST} checkpoints")
            adapter = _attach(model, kind, names, signature.offsets.start, signature.seed, outputs, None, states)
        adapter.take(path, saved)
        return adapter
    except BaseException:
        if hasattr(model, CONTEXT_NAME):
            Adapter(model).remove()
        before.put_back()
        raise


def _attach(
    model: nn.Module,
    kind: AdapterKind,
    names: list[str],
    dim: int,
    seed: int,
    outputs: Outputs | None,
    calls: Called | None,
    states: Sequence[Mapping[str, Tensor]] = (),
) -> Adapter:
    check_integer(0 if kind == "outputs" else 1, MOST_SIZE, dim=dim)
    check_integer(0, seed=seed)
    classes, guessed, layers, layer = 0, False, names, ""
    if outputs is not None:
        guessed = isinstance(outputs, Outputs) and outputs.layer is None and calls is None
        layer, logits = logits_layer(outputs, model, names, calls)
        outputs, layers, classes = replace(outputs, layer=layer), [*names, layer], len(weight_of(logits))
    example = next(iter(floating(model).values())) if kind == "mixture" else weight_of(model.get_submodule(layers[0]))
    dtype = torch.float64 if example.dtype == torch.float64 else torch.float32
    moves = [
        _move(model, kind, name, index, int(dim), seed, dtype, states).to(example.device)
        for index, name in enumerate(names)
    ]
    if outputs is not None:
        moves.append(_offsets(model, layer, outputs, slice(dim, dim + classes)))
    drawn = GENERATOR
    if kind == "mixture":
        drawn += f", of checkpoints {fingerprint(dict(moves[0].named_buffers()))}"  # else phi's weights say nothing
    size = dim + classes + int(outputs is not None and outputs.temperature)
    channels = tuple(move.channels for move in moves)
    means = Signature(kind, tuple(layers), channels, int(seed), int(size), drawn, outputs)
    context = Context(model, moves, means, dtype, guessed)
    context.thawed = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    before = KeptModules(model)
    try:
        model.requires_grad_(False)
        context.pins = [pin for module in model.modules() if mode_dependent(module) for pin in pin_to_eval(module)]
        context.host_in(model)
        model.add_module(CONTEXT_NAME, context.to(example.device))
        adapter = Adapter(model)
        for parameter in model.parameters():
            parameter.grad = None  # the optimizer that trained the weights would step along what is left
        return adapter
    except BaseException:
        before.put_back()
        raise


def _move(
    model: nn.Module,
    kind: AdapterKind,
    name: str,
    index: int,
    dim: int,
    seed: int,
    dtype: torch.dtype,
    states: Sequence[Mapping[str, Tensor]],
) -> Move:
    """Return what phi does to the layer of an index among those that are modulated."""
    if name == "" and states:
        return Mixture(floating(model), states)
    layer, rng = model.get_submodule(name), generator(seed, kind if kind != "mixture" else "film", index - bool(states))
    if kind == "lora":
        keys = ["weight"] if getattr(layer, "bias", None) is None else ["weight", "bias"]
        return LoraScale(_keys(model, name, *keys), index)
    if kind == "input_bias":
        return InputBias(_keys(model, name, "bias")[0], gaussian(len(weight_of(layer)), dim, dtype, rng))
    alone = scales_alone(layer)
    matrices = [gaussian(len(weight_of(layer)), dim, dtype, rng) for _ in range(1 if alone else 2)]
    for matrix in matrices if states else ():  # of its own coordinates alone, and as large as without the others
        matrix[:, : len(states)] = 0
        matrix.mul_((dim / (dim - len(states))) ** 0.5)
    keys = _keys(model, name, *(("weight",) if alone else ("weight", "bias")))
    return Film(keys, matrices[0], None if alone else matrices[1], origin(layer) or 0.0)


def _offsets(model: nn.Module, name: str, outputs: Outputs, at: slice) -> Offsets:
    weight = _keys(model, name, "weight") if outputs.temperature else []
    bare = getattr(model.get_submodule(name), "bias", None) is None  # it gets one
    return Offsets(
        [*weight, f"{name}.bias".lstrip(".")] if bare else [*weight, *_keys(model, name, "bias")], at, outputs.scale
    )


def _keys(model: nn.Module, name: str, *tensors: str) -> list[str]:
    """Return the names of a layer's tensors, which phi is to move."""
    for own in tensors:
        if (why := unmovable(model, name, own)) is not None:
            raise AdapterError(why)
    return [f"{name}.{own}".lstrip(".") for own in tensors]


def _check_bare(model: nn.Module) -> None:
    if hasattr(model, CONTEXT_NAME) or any(map(_adapted, model.modules())):
        raise AdapterError(
            f"{type(model).__name__} has an adapter already, or is part of a model that has one; remove() or merge() it"
            " first"
        )
    refuse_wrapper(model)


def _adapted(module: nn.Module) -> bool:
    """Whether an adapter acts on a module: its phi, a host or a pinned mode is there."""
    hooks = module._forward_pre_hooks.values()
    hosted = any(each is enter_eval or isinstance(getattr(each, "__self__", None), Host) for each in hooks)
    return hosted or isinstance(module, Context)


FILM = partial(attach_film, dim=32)  # numbers that suit 60 to 300 queries
