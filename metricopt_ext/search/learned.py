"""MetricOpt (learned): an optimizer that is a small network (supplement B, Eq. 5).

Everything takes leading batch shapes, and a population may have a set of weights per member.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metricopt_ext.search.optimizer import PhiOptimizer
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_above, check_at_least, check_finite, check_integer
from metricopt_ext.utils.files import check_tensors, content_of, read_tensors, write_tensors
from metricopt_ext.utils.seeding import generator

FILE_FORMAT = "metricopt_ext/update_rule/2"

# Least denominator of a loss or cost; the largest size of an input and of the logarithm of a rate.
FLOOR, LARGEST = 1e-3, 5.0

SMALLEST = 1e-8  # added to the length of a gradient, whose own gradient is finite at 0 then

MOMENTUM = 0.9  # share of the past in running averages

# Of a coordinate: its gradient, the running average of that, phi, the loss and the cost with their changes; and its
# rate and direction.
INPUTS, OUTPUTS = 7, 2

# cost_at(phi, step): the cost that each run knows of at a step, ``n``, given phi there, ``n x d``; NaN where unknown.
CostAt = Callable[[Tensor, int], Tensor]


# --- The optimizer m of Eq. 5 ------------------------------------------------------------------------------------


class Memory(NamedTuple):
    """What the rule remembers between steps.

    Attributes:
        gradient: Running average of the loss gradients, ``... x d``.
        first: Loss and cost when each was first known, ``... x 2``; NaN until then.
        average: Moving averages of loss and cost, ``... x 2``; NaN until they are known.
    """

    gradient: Tensor
    first: Tensor
    average: Tensor


class UpdateRule(nn.Module):
    """The optimizer m of Eq. 5: ``phi_{t+1} = phi_t + alpha_t u_t`` with ``[alpha_t, u_t] = m(...)``.

    m is an MLP with one hidden layer of ReLU units. What it is given is scaled so that it suits any loss and metric:

    - the loss gradient and its running average, each divided by its root mean square over the coordinates of phi;
    - phi itself;
    - the loss and the cost, each divided by its first value;
    - their relative changes from the moving averages of the steps before.

    Denominators are at least `FLOOR` and inputs at most `LARGEST` in size. What is unknown (NaN) or not to be seen is
    given as 0, as a change is at its first step. alpha_t is ``step * exp(o)`` of an output o within plus or minus
    `LARGEST`.

    As in the MLP optimizers of Metz et al. (2019), one small network moves every coordinate by what it knows of this
    coordinate; so alpha_t differs between coordinates, and the rule fits any phi.

    Args:
        hidden: Hidden units, at least 2.
        step: Typical change of a coordinate of phi in a step, above 0.
        sees_loss: Whether loss and its change are inputs; a trainer that only calls ``step()`` does not tell them.
        sees_metric: Whether the cost and its change are inputs: the cost last observed.
        seed: Draws the initial weights, which begin close to a descent along the averaged gradient.

    Attributes:
        weights: All weights as one vector w_opt, ``W``.

    Raises:
        ValueError: A number is out of range.
    """

    def __init__(
        self, *, hidden: int = 32, step: float = 0.02, sees_loss: bool = True, sees_metric: bool = True, seed: int = 0
    ) -> None:
        super().__init__()
        check_integer(2, hidden=hidden)
        check_above(0, step=step)
        self.hidden: int = hidden
        self.step: float = step
        self.sees_loss: bool = sees_loss
        self.sees_metric: bool = sees_metric
        self.weights: nn.Parameter = nn.Parameter(self._initial(seed))

    def _initial(self, seed: int) -> Tensor:
        """Draw weights of variance 1 / inputs, biases 0; two units pass on the averaged gradient."""
        rng = generator(seed, "update rule")
        first, second = (torch.randn(*shape, generator=rng) * (shape[0] - 1) ** -0.5 for shape in _shapes(self.hidden))
        first[-1] = second[-1] = 0
        second *= 0.1
        first[:, :2] = 0
        first[1, :2] = torch.tensor([1.0, -1.0])  # the gradient's running average is the second input
        second[:2] = torch.tensor([[0.0, -1.0], [0.0, 1.0]])
        return torch.cat([first.flatten(), second.flatten()])

    def forward(self, inputs: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the MLP's outputs, ``... x d x 2``, for inputs, ``... x d x 7``.

        Args:
            inputs: A row for each coordinate.
            weights: Other weights than its own, ``... x W``, e.g. a set for each member of a population.
        """
        shapes, w = _shapes(self.hidden), (self.weights if weights is None else weights).to(inputs)
        parts = w.split([rows * columns for rows, columns in shapes], -1)
        first, second = (part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True))
        hidden = (inputs @ first[..., :-1, :] + first[..., -1:, :]).relu()
        outputs: Tensor = hidden @ second[..., :-1, :] + second[..., -1:, :]
        return outputs

    def propose(
        self,
        phi: Tensor,
        gradient: Tensor,
        loss: Tensor,
        cost: Tensor,
        memory: Memory | None = None,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Memory]:
        """Return the change alpha_t u_t of phi, ``... x d``, and what to remember.

        Args:
            phi: phi_t, ``... x d``.
            gradient: The loss gradient there, ``... x d``.
            loss: The loss there, ``...``; NaN where unknown.
            cost: The metric's cost when it was last known, ``...``; NaN where it never was.
            memory: What the previous step returned; None at the first.
            weights: Other weights than the rule's own, ``... x W``.
        """
        unknown = phi.new_full((*gradient.shape[:-1], 2), math.nan)
        before = Memory(gradient, unknown, unknown) if memory is None else memory
        mean = MOMENTUM * before.gradient + (1 - MOMENTUM) * gradient
        told = ((loss, self.sees_loss), (cost, self.sees_metric))
        now = torch.stack([value.to(phi) if seen else unknown[..., 0] for value, seen in told], -1)
        first = now.where(before.first.isnan(), before.first)
        past = now.where(before.average.isnan(), before.average)  # nothing before the first value: no change
        columns = [_at_unit_scale(gradient), _at_unit_scale(mean), phi]
        for value, initial, usual in zip(now.unbind(-1), first.unbind(-1), past.unbind(-1), strict=True):
            for scalar in (_ratio(value, initial), _ratio(value - usual, usual)):
                columns.append(scalar[..., None].expand_as(phi))
        inputs = torch.stack(columns, -1)
        rate, u = self(inputs.clamp(-LARGEST, LARGEST), weights).unbind(-1)
        average = (MOMENTUM * past + (1 - MOMENTUM) * now).where(~now.isnan(), before.average)
        return self.step * rate.clamp(-LARGEST, LARGEST).exp() * u, Memory(mean, first, average)

    def save(self, path: str | Path) -> None:
        """Write the rule to a safetensors file, which `load_update_rule` reads."""
        settings = {name: getattr(self, name) for name in ("hidden", "step", "sees_loss", "sees_metric")}
        write_tensors(path, {"weights": self.weights}, FILE_FORMAT, settings)


def load_update_rule(path: str | Path) -> UpdateRule:
    """Read an update rule that `UpdateRule.save` wrote; its weights are the same bit for bit, and frozen.

    Args:
        path: The safetensors file.

    Raises:
        FileFormatError: The file is corrupt or holds something else.
    """
    tensors, settings = read_tensors(path, FILE_FORMAT)
    with content_of(path, "update rule"):
        # Before a rule is made, as it draws as many weights.
        numbers = sum(rows * columns for rows, columns in _shapes(settings["hidden"]))
        check_tensors(path, tensors, {"weights": [numbers]})
        rule = UpdateRule(**settings)
        rule.to(tensors["weights"].dtype).load_state_dict(tensors)
    return rule.requires_grad_(False)


def _shapes(hidden: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes of the two layers' matrices, the row of biases last in each."""
    return (INPUTS + 1, hidden), (hidden + 1, OUTPUTS)


def _ratio(value: Tensor, to: Tensor) -> Tensor:
    """Return values in units of others' size, 0 where either is unknown."""
    known = ~(value.isnan() | to.isnan())
    # 1 in place of NaN before dividing, as it would spoil the gradient behind `where`.
    ratio = value.where(known, 1.0) / to.where(known, 1.0).abs().clamp(min=FLOOR)
    return ratio.where(known, 0.0)


def _at_unit_scale(vector: Tensor) -> Tensor:
    """Return vectors, ``... x d``, divided by their root mean square; 0 where that is 0."""
    return vector / (vector.square().mean(-1, keepdim=True) + SMALLEST**2).sqrt()


# --- Its training ------------------------------------------------------------------------------------------------


def unroll(
    task: FinetuneTask,
    rule: UpdateRule,
    starts: Tensor,
    cost_at: CostAt,
    *,
    steps: int,
    seed: int,
    indices: Sequence[int],
    weights: Tensor | None = None,
    differentiable: bool = False,
) -> tuple[Tensor, Tensor]:
    """Finetune a population for T steps (Algorithm S1, lines 11-13).

    Args:
        task: What is finetuned.
        rule: Moves phi.
        starts: phi_0, ``n x d``.
        cost_at: What is known of the metric. It is called at every step, and at T too.
        steps: T.
        seed: Seed of the batches.
        indices: The n task indices; a task may occur several times.
        weights: The rule's weights in each run, ``n x W``; None for its own in all.
        differentiable: Whether points and losses can be differentiated with respect to ``weights``.

    Returns:
        The points phi_0 ... phi_T, ``n x (T + 1) x d``, and the losses at phi_0 ... phi_{T-1}, each on its own step's
        batch, ``n x T``.
    """
    phi, memory, points, losses = starts, None, [starts], []
    with torch.set_grad_enabled(differentiable):
        for step in range(steps):
            with torch.enable_grad():
                loss, gradient = task.loss_and_gradient(phi, seed, indices, step, differentiable=differentiable)
            change, memory = rule.propose(phi, gradient, loss, cost_at(phi, step), memory, weights)
            phi = phi + change
            points.append(phi)
            losses.append(loss)
        cost_at(phi, steps)
    return torch.stack(points, 1), torch.stack(losses, 1)


# --- In any trainer ----------------------------------------------------------------------------------------------


class BlindWarning(UserWarning):
    """An update rule was trained to see a loss or a metric that its optimizer is not told."""


class LearnedOptimizer(PhiOptimizer):
    """A torch optimizer whose steps an `UpdateRule` proposes (Algorithm S1, lines 10-14): no f, no query.

    It works wherever an optimizer does (see `PhiOptimizer`); learning-rate schedulers scale ``lr``, a factor on the
    rule's own steps. The state dict holds what the rule remembers, but not the rule: save it with ``rule.save(path)``.

    The loss, if the rule sees it, comes from ``step(closure)`` or from `observe`, the metric from `observe` alone. A
    trainer that only calls ``step()`` tells neither; a rule for it is learned with ``sees_loss=False`` and
    ``sees_metric=False``.

    Args:
        params: phi alone, ``adapter.parameters()``.
        rule: The update rule, from `load_update_rule` or from training.
        lr: Factor on its steps, at least 0.

    Raises:
        TypeError: ``rule`` is no `UpdateRule`.
        ValueError: ``lr`` is out of range or ``params`` is more than phi.

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

    def observe(self, *, loss: float | None = None, cost: float | None = None) -> None:
        """Tell the rule what is known before the next step.

        Args:
            loss: The loss whose gradient that step takes; it is forgotten after it.
            cost: The metric as the rule was trained on it, ``metric.normalised(metric.evaluate(model, purpose).cost)``:
                within bounds from 0, the best, to 1. It is held until the next one.

        Raises:
            ValueError: A number is not finite.
        """
        check_finite(loss=loss, cost=cost)
        state = self.state[self.param_groups[0]["params"][0]]
        state.update({name: float(each) for name, each in {"loss": loss, "cost": cost}.items() if each is not None})

    def next_phi(self, phi: Tensor, gradient: Tensor, state: dict[str, Any], loss: Any) -> Tensor:
        """Return the next phi, ``d`` (see `PhiOptimizer`)."""
        told = state.pop("loss", math.nan)
        known = {"loss": told if loss is None else float(loss), "cost": state.get("cost", math.nan)}
        sees = {"loss": self.rule.sees_loss, "cost": self.rule.sees_metric}
        missing = [name for name, seen in sees.items() if seen and math.isnan(known[name])]
        memory = Memory(*state["memory"]) if "memory" in state else None
        if missing and memory is None:
            names = " and ".join(missing)
            warnings.warn(
                f"the rule was trained to see the {names}, which nothing tells it: call"
                f" optimizer.observe({missing[0]}=...) before a step, or learn one that does not see the {names}",
                BlindWarning,
                stacklevel=5,
            )
        now, cost = map(phi.new_tensor, known.values())
        change, memory = self.rule.propose(phi, gradient, now, cost, memory)
        state["memory"] = tuple(memory)
        lr: float = self.param_groups[0]["lr"]
        return phi + lr * change
