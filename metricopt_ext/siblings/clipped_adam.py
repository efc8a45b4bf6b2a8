"""Adam on gradients that are clipped by their norm before, on all parameters as one vector."""

import math
from collections.abc import Iterable, Sequence
from types import TracebackType

import torch
from torch import Tensor, nn

from metricopt_ext.errors import AdapterError
from metricopt_ext.utils.checks import check_above

BETAS, EPSILON = (0.9, 0.999), 1e-8


class ClippedAdam:
    """Adam (Kingma & Ba, 2015) after clipping the gradient's norm, as `torch.optim.Adam` after `clip_grad_norm_`.

    Small networks spend more time on visiting their parameters than on arithmetic, so these become views of one vector
    while the optimizer is in use (``with ClippedAdam(...) as optimizer``).

    Args:
        parameters: What is trained, all of one type and on one device.
        lr: Learning rate, above 0.
        clip: Largest norm of the gradient, above 0; None for no limit.

    Raises:
        ValueError: A number is out of range, or there is nothing to train.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, clip: float | None = None) -> None:
        check_above(0, lr=lr, clip=clip)
        self.parameters, self.lr, self.clip, self.steps = list(parameters), lr, clip, 0
        if not self.parameters:
            raise ValueError("there are no parameters to train")
        self.values = torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters])
        self.mean, self.square = torch.zeros_like(self.values), torch.zeros_like(self.values)

    def __enter__(self) -> "ClippedAdam":
        """Make the parameters views of one vector."""
        pieces = self.values.split([parameter.numel() for parameter in self.parameters])
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            parameter.data = piece.view_as(parameter)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give each parameter memory of its own again."""
        for parameter in self.parameters:
            parameter.data = parameter.data.clone()

    def step(self, loss: Tensor) -> None:
        """Descend a loss, a scalar, by one step.

        Raises:
            AdapterError: The loss does not depend on what is trained.
        """
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True) if loss.requires_grad else ()
        if not any(gradient is not None for gradient in gradients):
            raise AdapterError("the loss has no gradient in what is trained")
        self.descend(
            [
                torch.zeros_like(parameter) if each is None else each
                for parameter, each in zip(self.parameters, gradients, strict=True)
            ]
        )

    def descend(self, gradients: Sequence[Tensor]) -> None:
        """Take one step.

        Args:
            gradients: One for each parameter, of its shape.
        """
        gradient = torch.cat([each.reshape(-1) for each in gradients])
        if self.clip is not None:
            gradient *= (self.clip / (gradient.norm() + 1e-6)).clamp(max=1)
        self.steps += 1
        (b1, b2), correction = BETAS, 1 - BETAS[1] ** self.steps
        self.mean.lerp_(gradient, 1 - b1)
        self.square.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        spread = self.square.sqrt().div_(math.sqrt(correction)).add_(EPSILON)
        self.values.addcdiv_(self.mean, spread, value=-self.lr / (1 - b1**self.steps))
