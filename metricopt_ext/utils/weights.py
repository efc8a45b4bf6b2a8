"""A model's weights as they were, to notice that something changed them and to undo it."""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn


def where_and_how_often(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor lies and how often it was changed in place: as long as both stay, so does its content.

    Some changes go unnoticed: through ``.data`` or NumPy, of a tensor that was made under ``torch.inference_mode``, and
    of BatchNorm's running statistics in training mode (of which ``num_batches_tracked`` tells).
    """
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


class KeptWeights:
    """Copies of a model's parameters and buffers.

    Parameters are copied and compared only where `where_and_how_often` tells of a change; buffers, which are small,
    always.
    """

    def __init__(self) -> None:
        self._parameters: dict[str, tuple[tuple[int, int], Tensor]] = {}
        self._buffers: dict[str, Tensor] = {}

    def update(self, model: nn.Module) -> None:
        """Keep the model as it is now."""
        kept, self._parameters = self._parameters, {}
        for name, parameter in model.named_parameters():
            state, before = where_and_how_often(parameter), kept.get(name)
            unchanged = before is not None and before[0] == state
            self._parameters[name] = before if unchanged else (state, parameter.detach().clone())  # type: ignore[assignment]
        self._buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}

    @torch.no_grad()
    def restore(self, model: nn.Module) -> list[str]:
        """Put back what changed since `update`; returns the names of it."""
        changed = []
        for name, parameter in model.named_parameters():
            state, content = self._parameters.get(name, (None, parameter))
            if state is not None and where_and_how_often(parameter) != state:
                changed.append(name)
                _put_back(parameter, content)
                self._parameters[name] = where_and_how_often(parameter), content
        for name, buffer in model.named_buffers():
            content = self._buffers.get(name, buffer)
            if not same_bits(buffer, content):
                changed.append(name)
                _put_back(buffer, content)
        return changed


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors, on whatever devices, have the same type, shape and bits: NaN equals itself."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b.to(a.device)))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _put_back(tensor: Tensor, content: Tensor) -> None:
    if tensor.shape == content.shape and tensor.dtype == content.dtype and tensor.device == content.device:
        tensor.copy_(content)
    else:
        tensor.data = content.clone()


_KEPT: WeakKeyDictionary[nn.Module, KeptWeights] = WeakKeyDictionary()


def kept_weights(model: nn.Module) -> KeptWeights:
    """Return a model's copies, shared by all that watch it, up to date."""
    kept = _KEPT.setdefault(model, KeptWeights())
    kept.update(model)
    return kept
