"""The learned optimizer of MetricOpt (learned): an MLP that proposes each step of phi (supplement B, Eq. 5).

Everything takes leading batch shapes, and a population may have a set of weights per member.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metricopt_ext.utils.checks import check_above, check_at_least, check_integer
from metricopt_ext.utils.files import check_tensors, content_of, read_tensors, write_tensors
from metricopt_ext.utils.seeding import generator

FILE_FORMAT = "metricopt_ext/update_rule/1"

# Least denominator of a loss or cost, and the largest size of an input and of the logarithm of a rate.
FLOOR, LARGEST = 1e-3, 5.0

SMALLEST = 1e-8  # added to the length of a gradient, whose own gradient is finite at 0 then

# Of a coordinate: its gradient, the running average of that, phi, the loss and the cost with their changes; and its
# rate and direction.
INPUTS, OUTPUTS = 7, 2


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

    Denominators are at least `FLOOR` and inputs at most `LARGEST` in size. What is unknown (NaN) is given as 0, as a
    change is at its first step. alpha_t is ``step * exp(o)`` of an output o within plus or minus `LARGEST`.

    As in the MLP optimizers of Metz et al. (2019), one small network moves every coordinate by what it knows of this
    coordinate; so alpha_t differs between coordinates, and the rule fits any phi.

    Args:
        hidden: Hidden units, at least 2.
        step: Typical change of a coordinate of phi in a step, above 0.
        momentum: Share of the past in running averages, at least 0 and below 1.
        sees_loss: Whether loss and its change are inputs; a trainer that only calls ``step()`` does not tell them.
        sees_metric: Whether the cost and its change are inputs: the cost last observed.
        seed: Draws the initial weights, which begin close to a descent along the averaged gradient.

    Attributes:
        weights: All weights as one vector w_opt, ``W``.

    Raises:
        ValueError: A number is out of range.
    """

    def __init__(
        self,
        *,
        hidden: int = 32,
        step: float = 0.02,
        momentum: float = 0.9,
        sees_loss: bool = True,
        sees_metric: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_integer(2, hidden=hidden)
        check_above(0, step=step)
        check_at_least(0, momentum=momentum)
        if not momentum < 1:
            raise ValueError(f"momentum is {momentum}; it must be below 1")
        self.hidden, self.step, self.momentum = int(hidden), float(step), float(momentum)
        self.sees_loss, self.sees_metric = bool(sees_loss), bool(sees_metric)
        self.weights = nn.Parameter(self._initial(seed))

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Shapes of the two layers' matrices, the row of biases last in each."""
        return _shapes(self.hidden)

    def _initial(self, seed: int) -> Tensor:
        """Draw weights of variance 1 / inputs, biases 0; two units pass on the averaged gradient."""
        rng = generator(seed, "update rule")
        layers = [torch.randn(rows, columns, generator=rng) * (rows - 1) ** -0.5 for rows, columns in self.shapes]
        for layer in layers:
            layer[-1] = 0
        first, second = layers
        second *= 0.1
        average = 1  # the place of the gradient's running average among the inputs
        first[:, :2] = 0
        first[average, 0], first[average, 1] = 1, -1
        second[:2] = torch.tensor([[0.0, -1.0], [0.0, 1.0]])
        return torch.cat([layer.reshape(-1) for layer in layers])

    def forward(self, inputs: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the MLP's outputs, ``... x d x 2``, for inputs, ``... x d x 7``.

        Args:
            inputs: A row for each coordinate; see `inputs_of`.
            weights: Other weights than its own, ``... x W``, e.g. a set for each member of a population.
        """
        w = (self.weights if weights is None else weights).to(inputs)
        sizes = [rows * columns for rows, columns in self.shapes]
        first, second = (part.unflatten(-1, shape) for part, shape in zip(w.split(sizes, -1), self.shapes, strict=True))
        hidden = (inputs @ first[..., :-1, :] + first[..., -1:, :]).relu()
        outputs: Tensor = hidden @ second[..., :-1, :] + second[..., -1:, :]
        return outputs

    def inputs_of(self, phi: Tensor, gradient: Tensor, loss: Tensor, cost: Tensor, memory: Memory) -> Tensor:
        """Return what the MLP is given, ``... x d x 7``; arguments as in `propose`."""
        scalars = []
        for seen, value, first, average in zip(
            (self.sees_loss, self.sees_metric),
            (loss, cost),
            memory.first.unbind(-1),
            memory.average.unbind(-1),
            strict=True,
        ):
            scalars += [_ratio(value, first, seen), _ratio(value - average, average, seen)]
        vectors = [_at_unit_scale(gradient), _at_unit_scale(memory.gradient), phi]
        columns = [*vectors, *(scalar[..., None].expand_as(phi) for scalar in scalars)]
        return torch.stack(columns, -1).clamp(-LARGEST, LARGEST)

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
        unknown = torch.full((*gradient.shape[:-1], 2), math.nan, dtype=phi.dtype, device=phi.device)
        before = Memory(gradient, unknown, unknown) if memory is None else memory
        mean = self.momentum * before.gradient + (1 - self.momentum) * gradient
        now = torch.stack([loss.to(phi), cost.to(phi)], -1).expand_as(unknown)
        first = now.where(before.first.isnan(), before.first)
        past = now.where(before.average.isnan(), before.average)  # nothing before the first value: no change
        outputs = self(self.inputs_of(phi, gradient, now[..., 0], now[..., 1], Memory(mean, first, past)), weights)
        rate, u = outputs.unbind(-1)
        average = self.momentum * past + (1 - self.momentum) * now
        known = Memory(mean, first, average.where(~now.isnan(), before.average))
        return self.step * rate.clamp(-LARGEST, LARGEST).exp() * u, known

    def settings(self) -> dict[str, Any]:
        """Return the constructor's arguments but the seed, as JSON."""
        names = ("hidden", "step", "momentum", "sees_loss", "sees_metric")
        return {name: getattr(self, name) for name in names}

    def save(self, path: str | Path) -> None:
        """Write the rule to a safetensors file, which `load_update_rule` reads."""
        write_tensors(path, {"weights": self.weights}, FILE_FORMAT, self.settings())


def load_update_rule(path: str | Path) -> UpdateRule:
    """Read an update rule that `UpdateRule.save` wrote; its weights are the same bit for bit, and frozen.

    Args:
        path: The safetensors file.

    Raises:
        FileFormatError: The file is corrupt or holds something else.
    """
    tensors, described = read_tensors(path, FILE_FORMAT)
    with content_of(path, "update rule"):
        # Before a rule is made, as it draws weights of these shapes.
        (rows, hidden), (_, outputs) = _shapes(described["hidden"])
        check_tensors(path, tensors, {"weights": [rows * hidden + (hidden + 1) * outputs]})
        rule = UpdateRule(**described)
        rule.to(tensors["weights"].dtype).load_state_dict(tensors)
    return rule.requires_grad_(False)


def _shapes(hidden: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (INPUTS + 1, hidden), (hidden + 1, OUTPUTS)


def _ratio(value: Tensor, to: Tensor, seen: bool) -> Tensor:
    """Return the value in units of another's size, 0 where either is unknown or it is not to be seen."""
    if not seen:
        return torch.zeros_like(value)
    known = ~(value.isnan() | to.isnan())
    one = torch.ones_like(value)  # in place of NaN before dividing, as it would spoil the gradient behind `where`
    ratio = value.where(known, one) / to.where(known, one).abs().clamp(min=FLOOR)
    return ratio.where(known, torch.zeros_like(ratio))


def _at_unit_scale(vector: Tensor) -> Tensor:
    """Return vectors, ``... x d``, divided by their root mean square; 0 where that is 0."""
    return vector / (vector.square().mean(-1, keepdim=True) + SMALLEST**2).sqrt()
