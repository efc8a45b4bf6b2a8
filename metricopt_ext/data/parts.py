"""Inputs in parts, as many of them at once as a model evaluates fastest."""

import math
from collections.abc import Sequence

from torch import Tensor

FLOAT_BYTES = 4  # a model computes with floats, whatever the images are stored as
CPU_BYTES = 2**20  # of a part: what the layers make of it then stays in the processor's caches
GPU_BYTES = 2**26
LARGEST = 2048


def part_size(x: Tensor) -> int:
    """Return how many inputs, ``n x ...``, a model should be given at once on their device, 1 to 2,048.

    On a CPU about 1 MiB of them, on other devices 64 MiB.
    """
    return _within(x, CPU_BYTES if x.device.type == "cpu" else GPU_BYTES)


def large_parts(x: Tensor, largest: int = LARGEST) -> Sequence[Tensor]:
    """Divide inputs, ``n x ...``, into parts of about equal size, at most ``largest`` examples and 64 MiB each.

    BatchNorm's statistics of a part should be of many examples.
    """
    return x.tensor_split(math.ceil(len(x) / min(largest, _within(x, GPU_BYTES))))


def _within(x: Tensor, size: int) -> int:
    """Return how many inputs take at most ``size`` bytes as floats, 1 to 2,048."""
    return max(1, min(LARGEST, size // (FLOAT_BYTES * max(1, x.shape[1:].numel()))))
