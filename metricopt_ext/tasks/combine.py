"""What a metric is made of: outcomes, as each class's recall, and how they make its value.

The lowest of 26 recalls is a kinked function of phi, but each recall is smooth: a value function of the outcomes knows
more than one of their combination (Astudillo & Frazier, 2019, "Bayesian Optimization of Composite Functions").
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from metricopt_ext.errors import MetricError, ValueFunctionError
from metricopt_ext.tasks.evaluation import Evaluation, Outcome, Pairs, stacked_pairs
from metricopt_ext.utils.words import brief

# "worst": the least outcome if higher is better, else the largest. A function takes a tensor, ``... x m``, in the order
# of the names, to ``...``, differentiable by torch.
Combine = Literal["worst", "mean"] | Callable[[Tensor], Tensor]
FUNCTION = "a function of a tensor, ... x m, in the order of the names, to ..., as lambda x: x.mean(-1)"


@dataclass(frozen=True)
class Combination:
    """How a metric's outcomes make its value.

    Attributes:
        combine: "worst", "mean", or a function.
        sign: What turns a value into a cost: 1 if lower is better, -1 if higher is.
        combined: The names of what is combined, in order; None for all outcomes but those in ``bounded``.
        bounded: What ``subject_to`` names.
        directions: Whether higher is better, by name, of what a function combines.

    Raises:
        ValueError: It is something else.
    """

    combine: Combine
    sign: int
    combined: tuple[str, ...] | None = None
    bounded: tuple[str, ...] = ()
    directions: Mapping[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check what a user gives."""
        if self.combine not in ("worst", "mean") and not callable(self.combine):
            raise ValueError(f"combine is {brief(self.combine)}; it must be 'worst', 'mean', or {FUNCTION}")
        names: object = self.combined
        if names is not None and not (isinstance(names, tuple) and names and {*map(type, names)} == {str}):
            raise ValueError(f"combined is {brief(names)}; it must be a list of names, or None for all")
        if names is not None and len({*names}) < len(names):
            raise ValueError(f"combined is {brief(names)}; give each name once")
        if not isinstance(self.directions, Mapping) or not {*map(type, self.directions.values())} <= {bool}:
            raise ValueError(f"directions are {brief(self.directions)}; give {{NAME: whether higher is better}}")
        if self.directions and not callable(self.combine):
            raise ValueError(f"directions are for a combine that is a function; {self.combine!r} has the metric's own")

    def names(self, outcomes: Mapping[str, Outcome]) -> tuple[str, ...]:
        """Return the names of the m outcomes that are combined, in order."""
        return self.combined or tuple(filter(self.combines, outcomes))

    def combines(self, name: str) -> bool:
        """Whether an outcome is combined, if it is told."""
        return name not in self.bounded if self.combined is None else name in self.combined

    def value(self, outcomes: Tensor) -> Tensor:
        """Return values, ``...``, of outcomes, ``... x m``, all in their own units."""
        if self.combine == "mean":
            return outcomes.mean(-1)
        if self.combine == "worst":
            return outcomes.amax(-1) if self.sign > 0 else outcomes.amin(-1)
        return self.combine(outcomes)

    def cost(self, costs: Tensor) -> Tensor:
        """Return costs, ``...``, of the outcomes' costs, ``... x m``: both times the sign."""
        return self.sign * self.value(self.sign * costs)

    def check(self, outcomes: Mapping[str, Outcome]) -> None:
        """Refuse outcomes that can't be combined, and a function that combines none like these.

        Raises:
            MetricError: A name is not told, nothing is combined, or the function's values or gradients are none.
        """
        if missing := [name for name in (*(self.combined or ()), *self.directions) if name not in outcomes]:
            raise MetricError(f"combined or directions name {missing[0]!r}; told are {brief(list(outcomes))}")
        if not (names := self.names(outcomes)):
            raise MetricError(
                f"told are {brief(list(outcomes))}, and none is combined; tell at least one {{NAME: VALUE}}"
            )
        if not callable(self.combine):
            return
        with torch.inference_mode(False), torch.enable_grad():
            values = torch.tensor([outcomes[name].value for name in names], dtype=torch.float64)
            # What f predicts of outcomes may lie beyond their range, as a recall below 0.
            off = torch.linspace(-1, 1, 6, dtype=torch.float64)[:, None] * (1.05 * values.abs() + 1e-3)
            rows = (values + off).requires_grad_()
            try:
                self._check_function(rows)
            except Exception as error:
                raise MetricError(f"combine: {brief(error)}; it must be {FUNCTION}") from error

    def _check_function(self, rows: Tensor) -> None:
        """Refuse a function by what it makes of outcomes, ``6 x m``."""
        alone = torch.stack([self.value(row) for row in rows])
        for shape in ((6,), (3, 2)):
            together = self.value(rows.reshape(*shape, -1))
            if together.shape != shape:
                raise ValueError(f"of {(*shape, rows.shape[-1])} it makes {tuple(together.shape)}, not {shape}")
            if not torch.allclose(together.reshape(-1), alone, equal_nan=True):
                raise ValueError("a row alone has another value than the same among others")
        if not alone.requires_grad:
            raise ValueError("torch finds no gradient of it; leave out what is not differentiable, as .item() or >")
        (gradients,) = torch.autograd.grad(alone.sum(), rows)
        if not (alone.isfinite().all() and gradients.isfinite().all()):
            raise ValueError(
                "it is not finite, or its gradient, up to twice the values told and a little below 0, as f may predict"
                " them; clamp them to what it is for"
            )
        if not gradients.any():
            raise ValueError("its gradient is 0 wherever it was looked at, as that of round() or of a constant")

    def value_of(self, outcomes: Mapping[str, Outcome]) -> tuple[float, Pairs]:
        """Return the value of named outcomes, and on pairs of halves if all of them have these.

        Raises:
            MetricError: They have different numbers of pairs.
        """
        parts = [outcomes[name] for name in self.names(outcomes)]
        if len(several := {len(each.pairs) for each in parts} - {0}) > 1:
            raise MetricError(f"outcomes have {brief(sorted(several))} pairs of halves; divide the data alike for all")
        pairs = zip(*(each.pairs for each in parts), strict=True) if all(each.pairs for each in parts) else ()
        of_pairs = tuple((self._of([a for a, _ in each]), self._of([b for _, b in each])) for each in pairs)
        return self._of([each.value for each in parts]), of_pairs

    def _of(self, numbers: Sequence[float]) -> float:
        return float(self.value(torch.tensor(numbers, dtype=torch.float64)))

    def costs(self, evaluations: Sequence[Evaluation]) -> Tensor:
        """Return the outcomes' costs, ``n x m``, of evaluations, the first of which says what is combined."""
        names = self.names(evaluations[0].outcomes)
        rows = [[each.outcomes[name].value for name in names] for each in evaluations]
        return self.sign * torch.tensor(rows, dtype=torch.float64)

    def costs_on_pairs(self, evaluations: Sequence[Evaluation]) -> Tensor | None:
        """Return the outcomes' costs on p pairs of halves, ``n x p x 2 x m``; None if an evaluation lacks them."""
        names = self.names(evaluations[0].outcomes)
        pairs = [[each.outcomes[name].pairs for name in names] for each in evaluations]
        if not all(chain(*pairs)):
            return None
        return self.sign * torch.tensor(pairs, dtype=torch.float64).permute(0, 2, 3, 1)

    def to_json(self) -> dict[str, Any]:
        """Return its JSON, which holds no function (see `from_json`)."""
        names = self.combined and list(self.combined)
        return {"combine": None if callable(self.combine) else self.combine, "sign": self.sign, "combined": names}

    @classmethod
    def from_json(cls, described: Mapping[str, Any], function: Callable[[Tensor], Tensor] | None) -> "Combination":
        """Make it of what `to_json` returned, and of the function that combines, where one does.

        Raises:
            ValueFunctionError: The function is missing, or given where none combines.
        """
        combine = described["combine"]
        if (combine is None) != (function is not None):
            remedy = "a function; give combine=FUNCTION" if combine is None else f"{combine!r}; leave combine out"
            raise ValueFunctionError(f"the outcomes are combined by {remedy}")
        return cls(function or combine, int(described["sign"]), described["combined"] and tuple(described["combined"]))


def costs_on_pairs(evaluations: Sequence[Evaluation], combination: Combination | None) -> Tensor | None:
    """Return the outcomes' costs on p pairs of halves, ``n x p x 2 x m``; None if an evaluation lacks them.

    Args:
        evaluations: At least one.
        combination: Which outcomes make the metric; None if it is a number, the only outcome then.
    """
    if combination is not None:
        return combination.costs_on_pairs(evaluations)
    pairs = stacked_pairs(evaluations)
    return None if pairs is None else pairs[..., None]
