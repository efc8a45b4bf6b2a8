"""Models of many kinds of layers, bare and with a tuned adapter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.ops import StochasticDepth

from helpers.tensors import rand
from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film


def _randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    rng = torch.Generator().manual_seed(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point():
            drawn = torch.rand(tensor.shape, generator=rng, dtype=torch.float64)
            tensor.data.copy_(drawn + 0.5 if "var" in name else drawn * 2 - 1)
    return model


def _cnn() -> nn.Sequential:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.GroupNorm(2, 4),
        nn.Flatten(),
        nn.Linear(4 * 4 * 4, 5),
        nn.LayerNorm(5),
    )
    return _randomise(model)  # type: ignore[return-value]


class Stochastic(nn.Module):
    """Every kind of layer whose output depends on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(6)
        self.instance = nn.InstanceNorm1d(6, affine=True, track_running_stats=True)
        self.dropouts = nn.Sequential(nn.Dropout(0.5), nn.AlphaDropout(0.5), nn.FeatureAlphaDropout(0.5))
        self.dropout1d = nn.Dropout1d(0.5)
        self.depth = StochasticDepth(0.5, "row")
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True)
        self.rnn = nn.LSTM(6, 6, num_layers=2, dropout=0.5, batch_first=True)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn(x)
        h = self.depth(self.dropout1d(self.dropouts(self.instance(h)))).mT
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.norm(self.rnn(h)[0])


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "cnn": (_cnn, (2, 3, 6, 6)),
    "stochastic": (lambda: _randomise(Stochastic()), (4, 6, 5)),
    "convnext": (
        lambda: ConvNeXt(
            [CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)], stochastic_depth_prob=0.5, num_classes=3
        ),
        (2, 3, 32, 32),
    ),
    "vit": (
        lambda: _randomise(torchvision.models.VisionTransformer(8, 4, 1, 2, 8, 16, dropout=0.3, attention_dropout=0.3)),
        (2, 3, 8, 8),
    ),
}


def _tuned(seed: int = 0, layers: Any = None, dim: int = 3) -> Adapter:
    adapter = attach_film(_cnn().eval(), layers, dim=dim, seed=seed)
    adapter.set_phi(rand(dim, seed=5, dtype=torch.float32))
    return adapter


@pytest.fixture
def randomise() -> Callable[..., Any]:
    """Give affine weights and running statistics values that no layer is born with."""
    return _randomise


@pytest.fixture
def cnn() -> Callable[..., Any]:
    """Make a small convolutional network with normalisation layers and dropout."""
    return _cnn


@pytest.fixture
def tuned() -> Callable[..., Any]:
    """Make the network with an adapter whose phi is not 0."""
    return _tuned


@pytest.fixture(params=MODELS.values(), ids=MODELS)
def model_and_shape(request: pytest.FixtureRequest) -> tuple[nn.Module, tuple[int, ...]]:
    """A model of each kind, and the shape of a batch for it."""
    make, shape = request.param
    return make(), shape
