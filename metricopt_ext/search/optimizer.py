"""MetricOpt: a loss optimizer that a value function steers towards the metric (paper, section 3.2, Algorithm 1)."""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import signature_of
from metricopt_ext.errors import ValueFunctionError
from metricopt_ext.search.guided_es import analytic_direction
from metricopt_ext.utils.checks import check_at_least, check_integer
from metricopt_ext.value.value_function import ValueFunction

# How boldly f is followed by default; see `MetricOptStep`.
METRIC_STEP, LOSS_WEIGHT, TRUST, HISTORY = 0.15, 0.3, 1.2, 3


@dataclass(frozen=True)
class LossStep:
    """Gradient descent on the surrogate loss alone, at rate ``lr``."""

    lr: float

    def __call__(self, phi: Tensor, history: Tensor, step: int) -> Tensor:
        """Return the next phi, ``... x d``, given its loss gradients so far, ``... x k x d``, the latest last."""
        return phi - self.lr * history[..., -1, :]


@dataclass(frozen=True)
class MetricOptStep:
    """Eq. 1's step: ``phi - w * lr * loss gradient - metric step``, kept within a trust radius.

    The metric step goes along u = 2 Sigma grad f, the expectation of Eq. 4. Sigma (Eq. 3) leans towards the last loss
    gradients, as f is best known along the trajectories that it was learned from. An f from a search, which queried
    points in all directions, needs no such guide: u is then grad f, as without any loss gradient.

    |u| differs by orders of magnitude between tasks, so the length is set separately: ``metric_step`` times f's data
    radius, linearly decayed to 0 over ``steps``, less where f is flat. An f without held-out skill is not followed at
    all: this is then the plain loss step.

    Attributes:
        f: The value function.
        lr: Rate of the loss step, a float or ``... x 1``.
        metric_step: Length of the first metric step in units of f's radius, a float or ``... x 1``.
        loss_weight: w, a float or ``... x 1``; 0 uses the loss only to guide the search (Algorithm 1 as printed).
        steps: Number of steps over which the metric step decays; None keeps it constant.
        trust: Trust radius in units of f's radius.
        even_untrusted: Follow f whatever its quality, as when trajectories are collected to correct it.
    """

    f: ValueFunction
    lr: float | Tensor
    metric_step: float | Tensor = METRIC_STEP
    loss_weight: float | Tensor = LOSS_WEIGHT
    steps: int | None = None
    trust: float = TRUST
    even_untrusted: bool = False

    def __call__(self, phi: Tensor, history: Tensor, step: int) -> Tensor:
        """Return the next phi, ``... x d``, given its loss gradients so far, ``... x k x d``, the latest last."""
        loss_gradient = history[..., -1, :]
        if not (self.f.trusted or self.even_untrusted):
            return phi - self.lr * loss_gradient
        moved = phi - self.loss_weight * self.lr * loss_gradient
        decay = 1.0 if self.steps is None else max(0.0, 1 - step / self.steps)
        moved = moved - self.metric_step * decay * self.metric_direction(phi, history)
        return clip_to_ball(moved, self.f.centre, self.trust * self.f.radius)

    def metric_direction(self, phi: Tensor, history: Tensor) -> Tensor:
        """Return u at the length of f's radius, shorter where f is flat, ``... x d``."""
        gradient = self.f.gradient(phi)
        u = gradient if self.f.all_directions else analytic_direction(gradient, history)
        tiny = torch.finfo(u.dtype).tiny
        slope = gradient.norm(dim=-1, keepdim=True) / self.f.gradient_floor.clamp(min=tiny)
        direction: Tensor = self.f.radius * slope.clamp(max=1) * u / u.norm(dim=-1, keepdim=True).clamp(min=tiny)
        return direction


def clip_to_ball(phi: Tensor, centre: Tensor, radius: Tensor) -> Tensor:
    """Move each phi, ``... x d``, that is further than ``radius`` from the centre, ``d``, straight onto the ball."""
    offset = phi - centre
    share = (radius / offset.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(phi.dtype).tiny)).clamp(max=1)
    return torch.where(share < 1, centre + share * offset, phi)


class PhiOptimizer(torch.optim.Optimizer):
    """A torch optimizer of phi.

    It works wherever an optimizer does: gradients come from ``loss.backward()``, ``GradScaler`` may skip steps,
    ``step(closure)`` is allowed.
    """

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle gets: the module that guides it, too."""
        return super().__getstate__() | {name: each for name, each in vars(self).items() if isinstance(each, nn.Module)}

    def next_phi(self, phi: Tensor, gradient: Tensor, state: dict[str, Any], loss: Any) -> Tensor:
        """Return the next phi, ``d``.

        Args:
            phi: The present one, ``d``.
            gradient: The loss gradient there, ``d``.
            state: What is kept between steps, and in the state dict.
            loss: What the closure returned; None without one.
        """
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take the first parameter group, of phi alone, and reject any other."""
        if self.param_groups:
            raise ValueError("2 parameter groups given; phi is one vector, so give one")
        super().add_param_group(param_group)
        if [each.dim() for each in param_group["params"]] != [1]:
            shapes = [tuple(each.shape) for each in param_group["params"]]
            raise ValueError(f"tensors of shapes {shapes} given; phi is one vector, so give adapter.parameters()")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step from phi's ``grad``; returns the closure's loss, if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        (phi,) = self.param_groups[0]["params"]
        if phi.grad is not None:
            phi.copy_(self.next_phi(phi, phi.grad, self.state[phi], loss))
        return loss


class UntrustedWarning(UserWarning):
    """A value function has no held-out skill, so MetricOpt does not follow it."""


class MetricOpt(PhiOptimizer):
    """A torch optimizer that finetunes phi under a loss and a value function.

    It works wherever an optimizer does (see `PhiOptimizer`); learning-rate schedulers scale ``lr`` (the loss step). The
    state dict holds the past gradients and the step count but not f: save f with ``f.save(path)``.

    A step is computed on f's device, which need not be phi's. For the few hundred numbers of a phi on a GPU, an f on
    the CPU is quicker, but each step then waits for the gradient.

    Args:
        params: phi alone, ``adapter.parameters()``.
        f: The value function, fitted for as many numbers as phi has.
        lr: Rate of the loss step, at least 0.
        metric_step: Length of the first metric step in units of f's data radius, at least 0.
        loss_weight: Weight w of the loss step, at least 0.
        steps: Number of steps over which the metric step decays linearly to 0; None keeps it constant.
        trust: Trust radius in units of f's data radius, above 0.
        history: Number k of past loss gradients that guide the search, at least 1.
        even_untrusted: Follow f whatever its quality, as when trajectories are collected to correct it.

    Raises:
        ValueFunctionError: f was fitted for another dimension or another adapter.
        ValueError: A hyper-parameter is out of range, or ``params`` is more than phi.

    Warns:
        UntrustedWarning: f has no held-out skill, so phi follows the loss alone.

    Examples:
        >>> optimizer = MetricOpt(adapter.parameters(), f, lr=0.1, steps=200)  # doctest: +SKIP
        >>> for x, y in loader:
        ...     optimizer.zero_grad()
        ...     F.cross_entropy(model(x), y).backward()
        ...     optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        f: ValueFunction,
        *,
        lr: float = 0.1,
        metric_step: float = METRIC_STEP,
        loss_weight: float = LOSS_WEIGHT,
        steps: int | None = None,
        trust: float = TRUST,
        history: int = HISTORY,
        even_untrusted: bool = False,
    ) -> None:
        if not isinstance(f, ValueFunction):
            raise TypeError(f"f is a {type(f).__name__}; it must be a ValueFunction, as load_value_function(FILE)")
        check_at_least(0, lr=lr, metric_step=metric_step, loss_weight=loss_weight)
        check_integer(1, history=history)
        check_at_least(1, steps=steps)
        if not trust > 0:  # infinite for no trust region
            raise ValueError(f"trust is {trust}; it must be above 0")
        rule = {"lr": lr, "metric_step": metric_step, "loss_weight": loss_weight, "steps": steps, "trust": trust}
        super().__init__(params, {**rule, "even_untrusted": even_untrusted, "history": history})
        (phi,) = self.param_groups[0]["params"]
        if len(phi) != f.dim:
            raise ValueFunctionError(f"phi is {len(phi)} numbers, but f was fitted for phi of dimension {f.dim}")
        f.check_fits(signature_of(phi))
        if not (f.trusted or even_untrusted):
            quality = f.quality or "of unknown quality"
            remedy = "learn f from more tasks (`meta_train`), or follow it all the same by even_untrusted=True"
            warnings.warn(f"f is {quality}: phi follows the loss alone; {remedy}", UntrustedWarning, stacklevel=2)
        self.f = f

    def next_phi(self, phi: Tensor, gradient: Tensor, state: dict[str, Any], loss: Any) -> Tensor:
        """Return the next phi, ``d`` (see `PhiOptimizer`)."""
        group = self.param_groups[0]
        past = state.get("history", gradient.new_zeros(0, len(gradient)))
        state["history"] = torch.cat([past, gradient[None]])[-group["history"] :]
        step = state.get("step", 0)
        state["step"] = step + 1
        rule = MetricOptStep(self.f, **{each.name: group[each.name] for each in fields(MetricOptStep)[1:]})
        device = self.f.radius.device
        return rule(phi.to(device), state["history"].to(device), step).to(phi.device)
