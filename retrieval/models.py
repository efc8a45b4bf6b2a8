"""Networks that embed images on the unit sphere: a small convolutional net, and any torchvision classifier by name."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

from metricopt_ext.data.named_model import is_folder, named_model, preprocessing_of
from metricopt_ext.errors import ConfigError
from metricopt_ext.utils.state_dict import load_checkpoint

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@torch.fx.wrap  # a step of a traced forward pass, whatever the images' type
def normalised(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return images ``n x c x h x w``, floats in [0, 1] or uint8, less a mean of each channel and by its deviation."""
    if x.dtype == torch.uint8:
        x = x.to(mean.dtype) / 255
    return (x - mean) / std


class Conv4(nn.Module):
    """Four 3x3 convolutions with BatchNorm and a linear layer, for small images.

    Each convolution halves the resolution while it is above 4 pixels. The norms are named ``norm1`` to ``norm4``.

    Args:
        channels: Input channels.
        side: Pixels on the longer side of the images it is made for.
        outputs: Dimension of its output.
        width: Channels of each convolution.
    """

    def __init__(self, channels: int, side: int, outputs: int, width: int = 48) -> None:
        super().__init__()
        for i in range(1, 5):
            stride = 2 if side > 4 else 1
            self.add_module(f"conv{i}", nn.Conv2d(channels, width, 3, stride, padding=1, bias=False))
            self.add_module(f"norm{i}", nn.BatchNorm2d(width))
            channels, side = width, -(-side // stride)
        self.head = nn.Linear(16 * width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``n x channels x h x w`` to ``n x outputs``."""
        for i in range(1, 5):
            x = self.get_submodule(f"norm{i}")(self.get_submodule(f"conv{i}")(x)).relu()
        return self.head(F.adaptive_avg_pool2d(x, 4).flatten(1))  # type: ignore[no-any-return]


class Embedder(nn.Module):
    """Embeds images on the unit sphere.

    Args:
        trunk: Maps ``n x c x h x w`` to ``n x d``.
        mean: What each channel of pixels in [0, 1] is reduced by before the trunk, one number or ``c`` ...
        std: ... and divided by, as many.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, trunk: nn.Module, mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,)) -> None:
        super().__init__()
        self.trunk, self.scales = trunk, True
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``n x c x h x w``, floats in [0, 1] or uint8, to embeddings of length 1, ``n x d``."""
        embeddings: Tensor = self.trunk(normalised(x, self.mean, self.std))
        return F.normalize(embeddings) if self.scales else embeddings


def embedders(model: nn.Module) -> list[Embedder]:
    """Return the embedders among a model's modules."""
    return [each for each in model.modules() if isinstance(each, Embedder)]


@contextmanager
def unscaled(model: nn.Module) -> Iterator[None]:
    """Have an `Embedder` leave its embeddings as its trunk gives them: a whitening of these can be merged into it."""
    before = {each: each.scales for each in embedders(model)}
    try:
        for each in before:
            each.scales = False
        yield
    finally:
        for each, scales in before.items():
            each.scales = scales


def build_model(
    name: str,
    input_shape: torch.Size,
    embedding: int,
    width: int = 48,
    trunk_weights: str = "",
    entry: str = "",
    *,
    folder: str = "",
    kwargs: Mapping[str, Any] | None = None,
) -> Embedder:
    """Build an embedder.

    Args:
        name: ``conv4``, the name of a torchvision or timm classifier, e.g. ``resnet50``, whose last layer is replaced,
            a Hugging Face folder, whose pooled output is taken, or ``MODULE:FUNCTION`` (`named_model`). Pixels are
            normalised as for ImageNet, or as timm or the folder says, and not at all for a function's.
        input_shape: Shape of one image, ``c x h x w``.
        embedding: Dimension of the embedding.
        width: Channels of each of conv4's convolutions.
        trunk_weights: File of the classifier's weights to start from, e.g. ImageNet's; its last layer is left out.
        entry: The state dict's key in that file; empty to find it.
        folder: Where the function's module is, if it is not installed.
        kwargs: Further arguments of what `named_model` builds.

    Raises:
        ConfigError: There is no such model, or it doesn't take images of this shape.
        DataError: The weights don't fit the model.
    """
    if name == "conv4":
        if trunk_weights:
            raise ConfigError("model.trunk_weights is for torchvision's classifiers; conv4's go to model.weights")
        return Embedder(Conv4(input_shape[0], max(input_shape[1:]), embedding, width))
    given: dict[str, Any] = {"folder": folder, "kwargs": kwargs}
    trunk = named_model(name, input_shape, embedding, others="conv4", embeds=True, **given)
    if trunk_weights:
        names = list(trunk.state_dict())
        last = names[-1].rpartition(".")[0]
        kept = [name for name in names if name.rpartition(".")[0] == last]
        load_checkpoint(trunk, Path(trunk_weights), keep=kept, entry=entry)
    return Embedder(trunk, *_normalised_by(name, trunk))


def _normalised_by(name: str, trunk: nn.Module) -> tuple[Sequence[float], Sequence[float]]:
    """Return the mean and the standard deviation of pixels that a named model was published for."""
    if ":" in name or is_folder(name):
        return preprocessing_of(name) or ((0.0,), (1.0,))
    published = getattr(trunk, "pretrained_cfg", {})  # timm's
    return published.get("mean", IMAGENET_MEAN), published.get("std", IMAGENET_STD)
