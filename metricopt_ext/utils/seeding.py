"""Random numbers from (seed, purpose, indices), never from a global stream: any draw can be replayed alone."""

import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from metricopt_ext.utils.checks import check_integer


def generator(seed: int, purpose: str, *indices: int) -> torch.Generator:
    """Return a CPU generator that depends on all arguments and on nothing else.

    Args:
        seed: The run's seed, at least 0.
        purpose: What is drawn, e.g. ``"batch"``; different purposes are independent streams.
        indices: Task index, step, ..., each at least 0.

    Raises:
        ValueError: The seed is not an integer of at least 0.
    """
    check_integer(0, seed=seed)
    # The number of indices is hashed too: SeedSequence ignores trailing zeros.
    words = [int(seed), zlib.crc32(purpose.encode()), len(indices), *indices]
    # The same entropy as the list, which SeedSequence takes several times longer to convert; large seeds need the list.
    entropy = np.array(words, dtype=np.uint32) if min(words) >= 0 and max(words) < 2**32 else words
    state = np.random.SeedSequence(entropy).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]) & (2**63 - 1))


@contextmanager
def seeded_streams(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the global streams of torch, NumPy and Python for code that draws from them, and restore them.

    Args:
        seed: The streams' seed, at least 0.
        device: Where the code runs: a GPU has its own stream besides the CPU's.
    """
    gpus = [device] if device.type == "cuda" else []
    others = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=gpus):
        torch.default_generator.manual_seed(seed)
        for gpu in gpus:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(others[0])
            random.setstate(others[1])
