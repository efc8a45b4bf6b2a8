"""What a model may hold beyond its base, the weights that it was trained to: a phi, and tensors in place of its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from metricopt_ext.errors import AdapterError
from metricopt_ext.runtime.identity import fingerprint
from metricopt_ext.utils.checks import check_above, check_finite
from metricopt_ext.utils.weights import same_bits
from metricopt_ext.utils.words import brief


@dataclass(frozen=True, eq=False)
class Start:
    """A state of a model that a search may begin from; `Adapter.apply` puts the model into it.

    Attributes:
        phi: ``d``; integers become float32.
        tensors: Buffers and parameters that replace the model's own, by their names in the bare model's state dict,
            e.g. BatchNorm statistics, or the mean of several trainings' weights.
        settings: Settings of inference to use with it, by name; empty to leave them. They are not part of the model: a
            task's `Settings` apply them, `Adapter.apply` does not.
        presumed: Whether a search begins from it unless it is surely worse than the model as it was trained; others
            have to be surely better.
    """

    phi: Tensor
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    settings: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    presumed: bool = False

    def __post_init__(self) -> None:
        """Check the types; whether it fits a model is for `Adapter.check`.

        Raises:
            TypeError: phi is no tensor of real numbers, or the others are no dicts.
        """
        if not isinstance(self.phi, Tensor) or self.phi.is_complex() or self.phi.dtype == torch.bool:
            raise TypeError(f"phi is {brief(self.phi)}; it must be a tensor of real numbers, torch.as_tensor(phi)")
        if not self.phi.is_floating_point():
            object.__setattr__(self, "phi", self.phi.float())  # so that it can lie on a line
        if not isinstance(self.tensors, Mapping) or not isinstance(self.settings, Mapping):
            raise TypeError(f"tensors or settings are no dict by name: {brief(self.tensors)}, {brief(self.settings)}")

    def of_the_same(self, other: "Start") -> bool:
        """Whether two starts differ in phi alone: in neither tensors nor settings."""
        mine, theirs = self.tensors, other.tensors
        same = mine.keys() == theirs.keys() and all(same_bits(value, theirs[name]) for name, value in mine.items())
        return same and self.settings == other.settings

    def is_same_model(self, other: "Start", base: Mapping[str, Tensor]) -> bool:
        """Whether two starts make the same model with the same settings, whatever it counts.

        Args:
            other: The other start.
            base: What a start does not replace, by name (`Adapter.base_state_dict`).
        """
        names = [name for name in {**self.tensors, **other.tensors} if base[name].is_floating_point()]
        mine, theirs = ([each.phi, *(each.tensors.get(name, base[name]) for name in names)] for each in (self, other))
        same = all(torch.equal(a.to(b), b) for a, b in zip(mine, theirs, strict=True))
        return same and self.settings == other.settings

    @property
    def digest(self) -> str:
        """Digest of phi, the tensors that it replaces and their names."""
        return fingerprint({"phi": self.phi, **self.tensors})


@dataclass(frozen=True, eq=False)
class StartLine:
    """Starts along a line, one for each strength t: a search tries a few t and continues from the best.

    Attributes:
        at: ``at(t) -> Start``, bit for bit the same for the same t.
        low: Smallest t.
        high: Largest t, above ``low``.
        first: The t to try first; by default the middle and both quarters.

    Raises:
        ValueError: The interval is empty or infinite, or one of ``first`` is no number in it.
        TypeError: ``at`` is no function.

    Examples:
        >>> import torch
        >>> line = StartLine(lambda t: Start(t * torch.ones(2)), 0.0, 2.0)
        >>> line.at(1.5).phi
        tensor([1.5000, 1.5000])
    """

    at: Callable[[float], Start]
    low: float
    high: float
    first: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Check the interval, and set what is asked first."""
        if not callable(self.at):
            raise TypeError(f"at is {brief(self.at)}; it must be a function of t that returns a Start")
        check_finite(low=self.low, **{f"first[{index}]": t for index, t in enumerate(self.first)})
        check_above(self.low, high=self.high)
        first = tuple(self.first) or tuple(self.low + each * (self.high - self.low) / 4 for each in (2, 1, 3))
        if min(first) < self.low or max(first) > self.high:
            raise ValueError(f"first is {first}; each must be from {self.low} to {self.high}")
        object.__setattr__(self, "first", first)

    @property
    def ends(self) -> tuple[Start, Start, Start]:
        """The starts at the least t, in the middle and at the largest, by which a line is known."""
        return self.at(self.low), self.at((self.low + self.high) / 2), self.at(self.high)

    def check(self) -> None:
        """Check that ``at`` returns a start, and the same one again.

        Raises:
            AdapterError: It does not.
        """
        first, again = (self.at(self.low) for _ in range(2))
        if not isinstance(first, Start) or first.digest != again.digest or not first.of_the_same(again):
            raise AdapterError(f"at({self.low}) returned {brief(first)}; it must return a Start, the same each time")

    def through(self, start: Start) -> "StartLine":
        """Return the line from another start: its phi is added, and what the line does not replace stays as there.

        That has a meaning only for a line on which the model as it was trained lies.
        """

        def at(t: float) -> Start:
            own = self.at(t)
            return Start(start.phi + own.phi, {**start.tensors, **own.tensors}, {**start.settings, **own.settings})

        return replace(self, at=at)
