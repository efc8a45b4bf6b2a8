"""Fingerprints of rows, and the chunks in which they are worked on."""

import numpy as np
import pytest
import torch

from metricopt_ext.retrieval import vectors


def test_fingerprints_are_those_of_the_content() -> None:
    x = np.random.default_rng(0).standard_normal((300, 16)).astype(np.float32)
    prints = vectors.fingerprints(vectors.Vectors(x))
    assert len(np.unique(prints)) == 300
    for same in (x.astype(np.float64), torch.from_numpy(x), np.asfortranarray(x)):
        assert (vectors.fingerprints(vectors.Vectors(same)) == prints).all()
    half = torch.from_numpy(x).half()
    rounded = vectors.fingerprints(vectors.Vectors(x), torch.float16)
    assert (vectors.fingerprints(vectors.Vectors(half)) == rounded).all()
    lattice = np.float32(np.stack(np.meshgrid(*[np.arange(8)] * 4), -1).reshape(-1, 4))
    assert len(np.unique(vectors.fingerprints(vectors.Vectors(lattice)))) == 8**4


@pytest.mark.parametrize("total", [1, 19, 20, 99, 100, 101, 119, 120, 150, 219, 220, 1000])
def test_chunks_cover_everything_once(total: int) -> None:
    chunks = vectors.chunks(total, 100, 20)
    assert [i for part in chunks for i in range(part.start, part.stop)] == list(range(total))
    assert len(chunks) == 1 or min(part.stop - part.start for part in chunks) >= 20
