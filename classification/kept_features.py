"""Classifiers whose first layers stay as trained: what those compute for an example is computed once, and kept."""

from collections import OrderedDict
from dataclasses import replace

import torch
from torch import Tensor, nn

from metricopt_ext.data.labelled import Split
from metricopt_ext.data.parts import part_size
from metricopt_ext.data.splits import Splits
from metricopt_ext.errors import ConfigError
from metricopt_ext.utils.modes import evaluating


class Rest(nn.Sequential):
    """The last layers of a sequential model, as a model of what those before them compute.

    It holds all layers of the model under their names, so that an adapter or a state dict of the one fits the other.
    The layers before are frozen, and it does not run them.

    Args:
        model: The model, whose layers it shares.
        first: Name of the first layer that it runs.

    Attributes:
        first: That name.
        before: The names of the layers that it does not run.

    Raises:
        ConfigError: The model is not sequential, or has no such layer, or it is the very first.
    """

    def __init__(self, model: nn.Module, first: str) -> None:
        super().__init__()
        if not isinstance(model, nn.Sequential):
            raise ConfigError(
                f"adapter.keep_before={first} keeps what the layers before it compute, which only a model that runs one"
                f" layer after the other allows: small_cnn or cifar_resnetN; {type(model).__name__} is none"
            )
        self.first, self._modules = first, OrderedDict(model.named_children())
        names = list(self._modules)
        if first not in names[1:]:
            raise ConfigError(f"adapter.keep_before={first} must be one of {', '.join(names[1:])}")
        self.before = tuple(names[: names.index(first)])
        for name in self.before:
            self._modules[name].requires_grad_(False)

    def forward(self, features: Tensor) -> Tensor:
        """Map what the layers before compute, ``n x ...``, to the model's logits."""
        for name, layer in self.named_children():
            if name not in self.before:
                features = layer(features)
        return features

    @torch.no_grad()
    def features(self, splits: Splits) -> Splits:
        """Return the splits with what the layers before compute, ``n x ...``, in place of the inputs.

        Args:
            splits: Inputs of the whole model, on its device.
        """
        layers = nn.Sequential(*(self._modules[name] for name in self.before))

        def computed(part: Split, name: str) -> Split:
            return replace(part, x=torch.cat([layers(x) for x in part.x.split(part_size(part.x))]))

        with evaluating(layers):
            return splits.map(computed)
