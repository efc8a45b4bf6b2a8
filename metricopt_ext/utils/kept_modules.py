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
        for module, name, kind, held, content in self._held:
            if held or content:
                _put_back(module, name, kind, held, content)
        for module, forward in self._forwards:
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward
        for _, parameter, trained in self._trained:
            parameter.requires_grad_(trained)
        self._put_back_modes()
        torch.set_grad_enabled(self._with_gradients)

    def put_back_changed(self) -> list[str]:
        """Put back what is held and what is trained, but no modes; returns the names of what had changed.

        Buffers that are others now stay, as a forward pass may replace its caches, and so do new ones that are no part
        of the state dict.
        """
        self._put_back_types()
        changed = []
        for module, name, kind, held, content in self._held:
            if not (held or content):
                continue  # most are empty
            wanted = content
            if kind == "_buffers":
                caches = module._non_persistent_buffers_set
                wanted = {key: held.get(key, value) for key, value in content.items()}
                wanted |= {key: value for key, value in held.items() if key in caches}
            changed += _put_back(module, name, kind, held, wanted)
        for name, parameter, trained in self._trained:
            if parameter.requires_grad != trained:
                parameter.requires_grad_(trained)
                changed.append(f"requires_grad of {name}")
        return list(dict.fromkeys(changed))

    def _put_back_types(self) -> None:
        for module, kind in self._types:
            if type(module) is not kind:  # as of a parametrised layer
                module.__class__ = kind


def _put_back(module: nn.Module, name: str, kind: str, held: dict[Any, Any], wanted: dict[Any, Any]) -> list[str]:
    """Have a module hold something in one of its dictionaries; returns the names of what had changed."""
    if len(held) == len(wanted) and all(held.get(key, held) is value for key, value in wanted.items()):
        return []
    changed = [key for key in {**wanted, **held} if key not in held or held[key] is not wanted.get(key, held)]
    held.clear()
    held.update(wanted)
    if kind not in ("_parameters", "_buffers", "_modules"):
        return [f"hooks of {name or type(module).__name__}"]
    for key in wanted:
        vars(module).pop(key, None)  # a plain attribute would hide it, as of a pruned layer
    return [f"{name}.{key}" if name else str(key) for key in changed]
