"""Numbers to compute with, and whether two sets of tensors are the same."""

from functools import partial

import torch
from torch import Tensor


def rand(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """Draw a tensor of normal numbers; the same seed, shape and precision draw the same."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


rand32 = partial(rand, dtype=torch.float32)
"""`rand` in the precision of models."""
