"""BatchNorm in evaluation mode as one scale and one shift per channel."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class FoldedBatchNorm(TorchFunctionMode):
    """Computes BatchNorm in evaluation mode, which is affine, as one scale and one shift per channel.

    `torch.func.vmap` has no such shortcut: its BatchNorm transposes and copies the whole population.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace calls of ``torch.nn.functional.batch_norm`` that use running statistics."""
        if func is F.batch_norm and not (kwargs or {}).get("training"):
            return _affine_batch_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _affine_batch_norm(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training or mean is None or var is None:
        return F.batch_norm(x, mean, var, weight, bias, training, momentum, eps)
    scale = (var + eps).rsqrt() if weight is None else weight * (var + eps).rsqrt()
    shift = -mean * scale if bias is None else bias - mean * scale
    channels = (-1, *[1] * (x.dim() - 2))
    # Statistics may have higher precision than x, as under autocast: like F.batch_norm, compute in theirs, return x's.
    return torch.addcmul(shift.view(channels), x, scale.view(channels)).to(x.dtype)
