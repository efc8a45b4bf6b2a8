"""What a classifier predicts: the logits of inputs, in parts."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.data.parts import part_size
from metricopt_ext.data.streamed import StreamedImages, is_streamed
from metricopt_ext.errors import ConfigError
from metricopt_ext.utils.modes import evaluating


def predict(model: nn.Module, x: Tensor) -> Tensor:
    """Return the logits of inputs ``n x ...``, in batches; the caller sets evaluation mode and disables gradients.

    Images on disk are not read if the model keeps what it made of all of them (``model.recalled``).
    """
    size = part_size(x)
    recalled: Callable[[tuple[int, ...]], Tensor | None] | None = getattr(model, "recalled", None)
    if recalled is not None and is_streamed(x):
        images = cast(StreamedImages, x)
        parts = (images.take(slice(start, start + size)) for start in range(0, len(x), size))
        found = [recalled(part.streamed_rows) for part in parts]
        if all(each is not None for each in found):
            return torch.cat(cast(list[Tensor], found))
    return torch.cat([output_of(model(part)) for part in x.split(size)])


def output_of(found: Any) -> Tensor:
    """Return a model's logits.

    Raises:
        ConfigError: It gives something else than a tensor.
    """
    if not isinstance(found, Tensor):
        raise ConfigError(
            f"the model gives {type(found).__name__}, and not logits alone; have its forward() return one tensor, in"
            " training as well"
        )
    return found


@torch.no_grad()
def scores_at(adapter: Adapter, phi: Tensor, x: Tensor) -> Tensor:
    """Return the logits of the model with phi, ``d``, for inputs ``n x ...``."""
    with adapter.using(phi) as model, evaluating(model):
        return predict(model, x)
