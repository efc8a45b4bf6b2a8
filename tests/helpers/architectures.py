"""Models of many kinds of layers, made anew with the same weights each time, and inputs for them."""

from functools import partial
from typing import Any, TypeVar

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.ops import StochasticDepth

from helpers.tensors import rand32

Model = TypeVar("Model", bound=nn.Module)


def randomise(model: Model, seed: int = 0) -> Model:
    """Give affine weights and running statistics values that no layer is born with."""
    rng = torch.Generator().manual_seed(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point():
            drawn = torch.rand(tensor.shape, generator=rng, dtype=torch.float64)
            tensor.data.copy_(drawn + 0.5 if "var" in name else drawn * 2 - 1)
    return model


def small_cnn() -> nn.Sequential:
    """A convolutional network with normalisation layers and dropout."""
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
    return randomise(model)


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
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn(x)
        h = self.depth(self.dropout1d(self.dropouts(self.instance(h)))).mT
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.head(self.norm(self.rnn(h)[0]))  # type: ignore[no-any-return]


class Tied(nn.Module):
    """A head with the embedding's weight."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 7, bias)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(x)))  # type: ignore[no-any-return]


class OwnRMSNorm(nn.Module):
    """As Llama's, Qwen's and T5's; with an offset, as Gemma's."""

    def __init__(self, size: int, offset: float = 0.0) -> None:
        super().__init__()
        self.weight, self.offset = nn.Parameter(rand32(size, seed=3)), offset

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight + self.offset) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def cnn() -> tuple[nn.Module, Any]:
    return small_cnn(), rand32(2, 3, 6, 6)


def stochastic() -> tuple[nn.Module, Any]:
    return randomise(Stochastic()), rand32(4, 6, 5)


def convnext() -> tuple[nn.Module, Any]:
    blocks = [CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)]
    return randomise(ConvNeXt(blocks, stochastic_depth_prob=0.5, num_classes=3)), rand32(2, 3, 32, 32)


def vit() -> tuple[nn.Module, Any]:
    model = torchvision.models.VisionTransformer(8, 4, 1, 2, 8, 16, dropout=0.3, attention_dropout=0.3, num_classes=5)
    return randomise(model), rand32(2, 3, 8, 8)


def tied() -> tuple[nn.Module, Any]:
    return randomise(Tied()), torch.arange(7)


def mlp(bias: bool = True) -> tuple[nn.Module, Any]:
    """Two linear layers, the last with a bias or without."""
    return randomise(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3, bias))), rand32(5, 3)


def without_shifts(offset: float = 0.0) -> tuple[nn.Module, Any]:
    """Norms that have a weight alone."""
    layers = [nn.Linear(3, 4), OwnRMSNorm(4, offset), nn.Linear(4, 4), nn.RMSNorm(4), nn.Linear(4, 3)]
    return randomise(nn.Sequential(*layers)), rand32(5, 3)


headless = partial(mlp, bias=False)
