"""Images varied for training, against loops over all that can be."""

import numpy as np
import pytest
import torch

from metricopt_ext.data.variation import flip_and_shift, jitter


def test_flips_and_shifts_are_those_of_a_loop_over_all_that_can_be() -> None:
    x = torch.rand(400, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    out = flip_and_shift(x, torch.Generator().manual_seed(1), pixels=2)
    assert out.shape == x.shape
    drawn = []
    for before, after in zip(x, out, strict=True):
        found = []
        for flipped in (False, True):
            source = before.flip(-1) if flipped else before
            for down in range(-2, 3):
                for right in range(-2, 3):
                    expected = torch.zeros_like(source)
                    for row in range(5):
                        for column in range(4):
                            if 0 <= row + down < 5 and 0 <= column + right < 4:
                                expected[:, row, column] = source[:, row + down, column + right]
                    if torch.equal(after, expected):
                        found.append((flipped, down, right))
        (only,) = found  # exactly one way to come to it
        drawn.append(only)
    mirrored = sum(flipped for flipped, _, _ in drawn)
    assert abs(mirrored - 200) < 40  # std 10
    for axis in (1, 2):
        counts = np.bincount([each[axis] + 2 for each in drawn], minlength=5)
        assert np.abs(counts - 80).max() < 32  # std 8


@pytest.mark.parametrize("white", [1.0, 3.0, 255.0])
def test_jitter_scales_with_the_images_and_keeps_their_mean_and_order(white: float) -> None:
    x = white * torch.rand(40, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    y = torch.arange(40)
    found, labels = jitter((x, y), torch.Generator().manual_seed(1))
    assert torch.equal(labels, y)
    assert (found.shape, found.dtype) == (x.shape, x.dtype)
    relative, _ = jitter((x / white, y), torch.Generator().manual_seed(1))
    torch.testing.assert_close(found / white, relative, rtol=1e-4, atol=1e-5)
    assert (found.mean((1, 2, 3)) - x.mean((1, 2, 3))).abs().max() < 0.1 * white
    contrast = found.flatten(1).std(1) / x.flatten(1).std(1)
    assert 0.65 < float(contrast.min()) < 0.85 < 1.15 < float(contrast.max()) < 1.4
    moved = [(dy, dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)]
    like = [torch.corrcoef(torch.stack([found[0].flatten(), x[0].roll(by, (1, 2)).flatten()]))[0, 1] for by in moved]
    assert sum(float(each) > 0.9 for each in like) == 1
