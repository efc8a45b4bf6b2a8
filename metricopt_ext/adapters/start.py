"""What a model may hold beyond its base, the weights that it was trained to: a phi, and tensors in place of its own."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from metricopt_ext.utils.weights import same_bits


@dataclass(frozen=True, eq=False)
class Start:
    """A state of a model that a search may begin from, and that `Adapter.apply` puts it into.

    Attributes:
        phi: ``d``.
        buffers: Buffers that replace the model's own, by their names in the bare model's state dict, e.g. BatchNorm
            statistics.
        parameters: Parameters that replace the model's own, likewise, e.g. the mean of several trainings' weights.
        settings: Settings of inference that it is used with, by name; empty for those of before. They are no part of
            the model: a task's `Settings` put them to use, `Adapter.apply` does not.
    """

    phi: Tensor
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    settings: Mapping[str, bool | int | float | str] = field(default_factory=dict)

    @property
    def replaced(self) -> dict[str, Tensor]:
        """All tensors that replace the model's own, by name."""
        return {**self.buffers, **self.parameters}

    def of_the_same(self, other: "Start") -> bool:
        """Whether two starts differ in phi alone: in neither tensors nor settings."""
        return dict(self.settings) == dict(other.settings) and self.replaces_the_same(other)

    def replaces_the_same(self, other: "Start") -> bool:
        """Whether two starts replace the same tensors, so that their models differ in phi alone."""
        mine, theirs = self.replaced, other.replaced
        return mine.keys() == theirs.keys() and all(same_bits(value, theirs[name]) for name, value in mine.items())
