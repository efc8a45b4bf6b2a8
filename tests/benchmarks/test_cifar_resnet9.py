"""The nine-layer network of the benchmarks."""

import pytest
import torch

from cifar_resnet9 import resnet9

pytestmark = pytest.mark.slow


def test_it_has_the_published_size_and_depth() -> None:
    model = resnet9(10, (3, 32, 32))
    assert sum(p.numel() for p in model.parameters()) == 6_573_120 + 10  # the published one's head has no bias
    layers = [m for m in model.modules() if isinstance(m, (torch.nn.Conv2d, torch.nn.Linear))]
    assert len(layers) == 9


def test_layers_have_the_published_shapes() -> None:
    model = resnet9(10, (3, 32, 32), width=24).eval()
    x, shapes = torch.rand(2, 3, 32, 32), {}
    for name, layer in model.named_children():
        x = layer(x)
        shapes[name] = tuple(x.shape[1:])
    assert (shapes["relu"], shapes["block1"], shapes["halving2"]) == ((24, 32, 32), (48, 16, 16), (96, 8, 8))
    assert (shapes["block3"], shapes["flatten"], shapes["head"]) == ((192, 4, 4), (192,), (10,))
