"""Classifiers whose first layers stay as trained: what those compute for an example is computed once, and kept."""

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.sequence import attributes_of, cut_at, modules_of, run
from metricopt_ext.data.labelled import Split
from metricopt_ext.data.parts import part_size
from metricopt_ext.data.splits import Splits
from metricopt_ext.errors import AdapterError, ConfigError
from metricopt_ext.utils.modes import evaluating


class Rest(nn.Module):
    """The last layers of a model whose modules run one after the other, as a model of what those before compute.

    It holds all layers of the model under their names, so that an adapter or a state dict of the one fits the other.
    The layers before are frozen, and it does not run them. What the model's own code does between its modules is done
    as in evaluation mode.

    Args:
        model: The model, whose layers it shares.
        first: Name of the first layer that it runs, dotted if it is within another.

    Attributes:
        first: That name.
        before: The names of the layers that it does not run.

    Raises:
        ConfigError: The model has no such layer, it is the very first, or the model can't be cut there (`cut_at`).
    """

    def __init__(self, model: nn.Module, first: str) -> None:
        super().__init__()
        try:
            self.cut = cut_at(model, first)
        except AdapterError as error:
            names = [name for name, _ in model.named_children()]
            raise ConfigError(
                f"adapter.keep_before={first} keeps what the layers before it compute: {error}; it must be one of"
                f" {', '.join(names[1:])}, in a model that runs one layer after the other"
            ) from error
        self._modules = OrderedDict(model.named_children())
        self._parameters, self._buffers = dict(model._parameters), dict(model._buffers)
        self._non_persistent_buffers_set = set(model._non_persistent_buffers_set)
        self.training = model.training
        self.first, self.before = first, modules_of(self.cut.before)
        for name in self.before:
            self.get_submodule(name).requires_grad_(False)
        for name in attributes_of(self.cut.before):
            owner, _, own = name.rpartition(".")
            getattr(self.get_submodule(owner), own).requires_grad_(False)

    def runs(self, layer: str) -> bool:
        """Whether none of the layers before is a layer or holds it."""
        return not any(layer == name or layer.startswith(f"{name}.") for name in self.before)

    def forward(self, features: Tensor) -> Any:
        """Map what the layers before compute, ``n x ...``, to the model's output."""
        return run(self, self.cut.after, self.cut.kept, features)

    @torch.no_grad()
    def features(self, splits: Splits) -> Splits:
        """Return the splits with what the layers before compute, ``n x ...``, in place of the inputs.

        Args:
            splits: Inputs of the whole model, on its device.

        Raises:
            ConfigError: What they compute has no row for each example.
        """

        def computed(part: Split, name: str) -> Split:
            return replace(part, x=torch.cat([self._before(x) for x in part.x.split(part_size(part.x))]))

        with evaluating(self):
            return splits.map(computed)

    def _before(self, x: Tensor) -> Tensor:
        found = run(self, self.cut.before, self.cut.given, x, self.cut.kept)
        if not isinstance(found, Tensor) or found.dim() == 0 or len(found) != len(x):
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ConfigError(
                f"adapter.keep_before={self.first}: the layers before it give {shape} for {len(x)} examples, so nothing"
                " can be kept for each; name another layer"
            )
        return found
