"""The number of CPU threads that torch computes on."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def num_threads(number: int) -> Iterator[None]:
    """Compute on this many CPU threads, and restore the number afterwards; works as a decorator too.

    One thread is fastest for tensors so small that several threads would only wait for each other.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
