"""A model's modules as they were: submodules, hooks, modes and what is trained, to undo what was cut short."""

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
        modules = [module for model in models for module in model.modules()]
        # Handles of hooks refer to the dictionaries themselves, so these stay and their content is put back.
        dicts = [held for module in modules for name in HELD if (held := vars(module).get(name)) is not None]
        self._held = [(held, dict(held)) for held in dicts]
        self._trained = [(parameter, parameter.requires_grad) for model in models for parameter in model.parameters()]
        self._put_back_modes, self._with_gradients = kept_modes(*models), torch.is_grad_enabled()

    def put_back(self) -> None:
        """Make the modules hold what they held."""
        for held, content in self._held:
            if held.keys() != content.keys() or any(held[name] is not value for name, value in content.items()):
                held.clear()
                held.update(content)
        for parameter, trained in self._trained:
            parameter.requires_grad_(trained)
        self._put_back_modes()
        torch.set_grad_enabled(self._with_gradients)
