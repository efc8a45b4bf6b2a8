"""A model's modules as they were: submodules, hooks, modes and what is trained, to undo what was cut short."""

from typing import Any, NamedTuple

import torch
from torch import nn

from metricopt_ext.utils.modes import kept_modes

HELD = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))


class KeptModules:
    """What the modules of a model hold, by reference: weights that were changed in place stay changed.

    Whether gradients are computed is put back too, as an interruption may skip the end of `torch.no_grad`.

    Args:
        models: The models.
    """

    def __init__(self, *models: nn.Module) -> None:
        modules = {module: name for model in models for name, module in model.named_modules()}
        # Handles of hooks refer to the dictionaries themselves, so these stay and their content is put back.
        self._held = [
            _Held(module, name, kind, held, dict(held))
            for module, name in modules.items()
            for kind in HELD
            if (held := vars(module).get(kind)) is not None
        ]
        self._types = [(module, type(module)) for module in modules]
        self._trained = [
            (name, parameter, parameter.requires_grad)
            for model in models
            for name, parameter in model.named_parameters()
        ]
        self._put_back_modes, self._with_gradients = kept_modes(*models), torch.is_grad_enabled()

    def put_back(self) -> None:
        """Make the modules hold what they held."""
        self._put_back_types()
        for each in self._held:
            each.put_back(each.content)
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
        for each in self._held:
            wanted = each.content
            if each.kind == "_buffers":
                caches = each.module._non_persistent_buffers_set
                wanted = {name: each.held.get(name, value) for name, value in wanted.items()}
                wanted |= {name: value for name, value in each.held.items() if name in caches}
            changed += each.put_back(wanted)
        for name, parameter, trained in self._trained:
            if parameter.requires_grad != trained:
                parameter.requires_grad_(trained)
                changed.append(f"requires_grad of {name}")
        return list(dict.fromkeys(changed))

    def _put_back_types(self) -> None:
        for module, kind in self._types:
            if type(module) is not kind:  # as of a parametrised layer
                module.__class__ = kind


class _Held(NamedTuple):
    """What a module holds of one kind.

    Attributes:
        module: The module.
        name: Its name in the model.
        kind: The attribute's name.
        held: The module's own dictionary.
        content: What it held.
    """

    module: nn.Module
    name: str
    kind: str
    held: dict[Any, Any]
    content: dict[Any, Any]

    def put_back(self, wanted: dict[Any, Any]) -> list[str]:
        """Have the module hold something; returns the names of what had changed."""
        held = self.held
        changed = [key for key in {**wanted, **held} if key not in held or held[key] is not wanted.get(key, held)]
        if not changed:
            return []
        held.clear()
        held.update(wanted)
        if self.kind not in ("_parameters", "_buffers", "_modules"):
            return [f"hooks of {self.name or type(self.module).__name__}"]
        for key in wanted:
            vars(self.module).pop(key, None)  # a plain attribute would hide it, as of a pruned layer
        return [f"{self.name}.{key}" if self.name else str(key) for key in changed]
