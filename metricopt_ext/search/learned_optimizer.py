"""A learned update rule as a torch optimizer, for any trainer (supplement B, Algorithm S1, lines 10-14)."""

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from metricopt_ext.search.optimizer import flat, one_group
from metricopt_ext.search.update_rule import Memory, UpdateRule
from metricopt_ext.utils.checks import check_at_least, check_finite


class BlindWarning(UserWarning):
    """An update rule was trained to see a loss or a metric that its optimizer is not told."""


class LearnedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose steps an `UpdateRule` proposes; no value function, and no query of its own.

    It works wherever an optimizer does: gradients come from ``loss.backward()``, learning-rate schedulers scale ``lr``,
    a factor on the rule's own steps, ``GradScaler`` may skip steps. The state dict holds what the rule remembers, but
    not the rule: save it with ``rule.save(path)``.

    The loss, if the rule sees it, comes from ``step(closure)`` or from `observe`, the metric from `observe` alone. A
    trainer that only calls ``step()`` tells neither; a rule for it is learned with ``sees_loss=False`` and
    ``sees_metric=False``.

    Args:
        params: phi, e.g. ``adapter.parameters()``; several tensors count as one vector, in order.
        rule: The update rule, from `load_update_rule` or from training.
        lr: Factor on its steps, at least 0.

    Raises:
        TypeError: ``rule`` is no `UpdateRule`.
        ValueError: ``lr`` is out of range or there are several parameter groups.

    Warns:
        BlindWarning: At the first step, if the rule sees what it was not told.

    Examples:
        >>> optimizer = LearnedOptimizer(adapter.parameters(), load_update_rule("rule.safetensors"))  # doctest: +SKIP
        >>> for x, y in loader:
        ...     optimizer.zero_grad()
        ...     loss = F.cross_entropy(model(x), y)
        ...     loss.backward()
        ...     optimizer.observe(loss=loss.item())
        ...     optimizer.step()
    """

    def __init__(self, params: Iterable[Tensor], rule: UpdateRule, *, lr: float = 1.0) -> None:
        if not isinstance(rule, UpdateRule):
            raise TypeError(f"rule is a {type(rule).__name__}; it must be an UpdateRule: load_update_rule(FILE)")
        check_at_least(0, lr=lr)
        super().__init__(params, {"lr": lr})
        self.rule = rule
        self._observed = {"loss": math.nan, "cost": math.nan}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take the first parameter group and reject any other."""
        one_group(self.param_groups, "the rule")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "rule": self.rule, "_observed": self._observed}

    @property
    def _parameters(self) -> list[Tensor]:
        return self.param_groups[0]["params"]  # type: ignore[no-any-return]

    def observe(self, *, loss: float | None = None, cost: float | None = None) -> None:
        """Tell the rule what is known before the next step.

        Args:
            loss: The loss whose gradient that step takes; it is forgotten after it.
            cost: The metric as a cost (`Metric.evaluate`), lower is better; it is held until the next one.

        Raises:
            ValueError: A number is not finite.
        """
        check_finite(loss=loss, cost=cost)
        known = {"loss": loss, "cost": cost}
        self._observed.update({name: float(value) for name, value in known.items() if value is not None})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step from the parameters' ``grad``; returns the closure's loss, if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self._observed["loss"] = float(loss)
        parameters = self._parameters
        if all(parameter.grad is None for parameter in parameters):
            return loss
        phi = flat(parameters)
        gradient = flat([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
        state = self.state[parameters[0]]
        memory = Memory(*(state[name] for name in Memory._fields)) if state else None
        if memory is None:
            self._warn_if_blind()
        if math.isnan(self._observed["cost"]) and "cost" in state:
            self._observed["cost"] = float(state["cost"])  # of a run that continues from its checkpoint
        known, cost = (phi.new_tensor(self._observed[name]) for name in ("loss", "cost"))
        change, memory = self.rule.propose(phi, gradient, known, cost, memory)
        state.update(memory._asdict(), cost=self._observed["cost"])
        self._observed["loss"] = math.nan
        moved = phi + self.param_groups[0]["lr"] * change
        for parameter, values in zip(parameters, moved.split([p.numel() for p in parameters]), strict=True):
            parameter.copy_(values.view_as(parameter))
        return loss

    def _warn_if_blind(self) -> None:
        sees = {"loss": self.rule.sees_loss, "cost": self.rule.sees_metric}
        missing = [name for name, seen in sees.items() if seen and math.isnan(self._observed[name])]
        if missing:
            names = " and ".join(missing)
            warnings.warn(
                f"the rule was trained to see the {names}, which nothing tells it: call"
                f" optimizer.observe({missing[0]}=...) before a step, or learn one that does not see the {names}",
                BlindWarning,
                stacklevel=4,
            )
