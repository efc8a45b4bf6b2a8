"""Draws depend on seed, purpose and indices, and stay what they are."""

import random
import zlib
from typing import Any

import numpy as np
import pytest
import torch

from helpers.refusals import assert_refused
from metricopt_ext.utils.seeding import generator, seeded_streams


@pytest.mark.parametrize("words", [(0,), (3, 1, 2), (2**32 - 1, 7), (2**32, 7), (1, 2**40), (5, 0, 0)])
def test_the_state_is_that_of_a_seed_sequence_of_all_words(words: tuple[int, ...]) -> None:
    seed, *indices = words
    entropy = [seed, zlib.crc32(b"batch"), len(indices), *indices]
    state = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]) & (2**63 - 1)
    assert generator(seed, "batch", *indices).initial_seed() == state


@pytest.mark.parametrize("seed", [-1, 1.5, True])
def test_a_seed_that_is_no_integer_of_at_least_zero_is_refused(seed: Any) -> None:
    assert_refused(lambda: generator(seed, "start"), ValueError, "seed", repr(seed))


def test_global_streams_are_seeded_and_put_back() -> None:
    before = torch.random.get_rng_state()
    random.seed(8)
    np.random.seed(8)
    untouched = random.random(), np.random.rand()
    random.seed(8)
    np.random.seed(8)
    drawn, others = [], []
    for _ in range(2):
        with seeded_streams(3, torch.device("cpu")):
            drawn.append(torch.rand(4))
            others.append((random.random(), np.random.rand()))
    with seeded_streams(2**40, torch.device("cpu")):
        others.append((random.random(), np.random.rand()))
    assert (random.random(), np.random.rand()) == untouched
    assert others[0] == others[1] != others[2]
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], torch.rand(4, generator=torch.Generator().manual_seed(3)))
    assert torch.equal(torch.random.get_rng_state(), before)
