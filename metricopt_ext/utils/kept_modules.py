"""A model's modules as they were: submodules, hooks, modes and what is trained, to undo what was cut short."""

from typing import Any

import torch
from torch import nn

from metricopt_ext.utils.modes import kept_modes

HELD = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))

_NOTHING: dict[Any, Any] = {}


class KeptModules:
    """What the modules of a model hold, by reference: weights that were changed in place stay changed.

    Whether gradients are computed is put back too, as an interruption may skip the end of `torch.no_grad`.

    Args:
        models: The models.
    """

    def __init__(self, *models: nn.Module) -> None:
        # Those of TorchScript hold nothing in Python that could be changed.
        modules = {
            module: name
            for model in models
            for name, module in model.named_modules()
            if not isinstance(module, torch.jit.ScriptModule)
        }
        # Handles of hooks refer to the dictionaries themselves, so these stay and their content is put back.
        self._held = [
            (module, name, kind, held, dict(held) if held else _NOTHING)
            for module, name in modules.items()
            for kind in HELD
            if (held := vars(module).get(kind)) is not None
        ]
        self._types = [(module, type(module)) for module in modules]
        self._forwards = [(module, vars(module).get("forward")) for module in modules]  # in place of their class's
        self._trained = [
            (name, parameter, parameter.requires_grad)
            for model in models
            for name, parameter in model.named_parameters()
        ]
        self._put_back_modes, self._with_gradients = kept_modes(*models), torch.is_grad_enabled()

    def put_back(self) -> None:
        """Make the modules hold what they held."""
        self._put_back_types()
        for module, _, _, held, content in self._held:
            if held or content:
                _put_back(module, held, content)
        for module, forward in self._forwards:
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward
        for _, parameter, trained in self._trained:
            parameter.requires_grad_(trained)
        self._put_back_modes()
        torch.set_grad_enabled(self._with_gradients)

    def changed(self) -> list[str]:
        """Return the names of parameters, layers and hooks that are others now, and of what is trained."""
        changed = []
        for module, name, kind, held, content in self._held:
            if kind == "_buffers":  # `weights.Watched` compares those
                continue
            others = [key for key in {**content, **held} if held.get(key, held) is not content.get(key, held)]
            if others and kind not in ("_parameters", "_modules"):
                changed.append(f"hooks of {name or type(module).__name__}")
            else:
                changed += [f"{name}.{key}" if name else str(key) for key in others]
        changed += [
            f"requires_grad of {name}" for name, each, trained in self._trained if each.requires_grad != trained
        ]
        return list(dict.fromkeys(changed))

    def _put_back_types(self) -> None:
        for module, kind in self._types:
            if type(module) is not kind:  # as of a parametrised layer
                module.__class__ = kind


def _put_back(module: nn.Module, held: dict[Any, Any], wanted: dict[Any, Any]) -> None:
    """Have a module hold something in one of its dictionaries."""
    if len(held) == len(wanted) and all(held.get(key, held) is value for key, value in wanted.items()):
        return
    held.clear()
    held.update(wanted)
    for key in wanted:
        vars(module).pop(key, None)  # a plain attribute would hide it, as of a pruned layer
