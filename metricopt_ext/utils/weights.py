"""What a model's weights are, told at little cost, to notice that something changed them; none is copied whole."""

import math
import zlib
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor, nn

ENTRIES = 1024  # of each parameter, that are compared at each query

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


def where_and_how_often(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor lies and how often it was changed in place: as long as both stay, so does its content.

    Some changes go unnoticed: through ``.data`` or NumPy, of a tensor that was made under ``torch.inference_mode``, and
    of BatchNorm's running statistics in training mode (of which ``num_batches_tracked`` tells).
    """
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


class Watched:
    """What a model's parameters and buffers are, to be compared with what they are later.

    A parameter that was written to shows by `where_and_how_often`, and one that was changed without such a trace, as
    through ``.data``, in some of its entries; `checksums` look at all. Buffers, which are small, are copied.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._states = {name: where_and_how_often(each) for name, each in model.named_parameters()}
        live = {name: some_entries(each) for name, each in model.named_parameters()}
        self._entries = {name: (each, None if each is None else each.clone()) for name, each in live.items()}
        self._buffers = {name: each.detach().clone() for name, each in model.named_buffers()}
        self._persistent = _persistent(model)

    @torch.no_grad()
    def changed(self, model: nn.Module) -> list[str]:
        """Return the names of parameters and persistent buffers that are others now; other buffers are put back."""
        now = {name: where_and_how_often(each) for name, each in model.named_parameters()}
        written = [name for name, each in self._states.items() if now.get(name) != each]
        changed = [*written, *(name for name in differing(self._entries) if name not in written)]
        buffers, persistent = dict(model.named_buffers()), _persistent(model)
        changed += sorted(persistent ^ self._persistent)
        for name, content in self._buffers.items():
            buffer = buffers.get(name, content)
            if same_bits(buffer, content):
                continue
            if name in persistent:
                changed.append(name)
            elif buffer.shape == content.shape and buffer.dtype == content.dtype:
                buffer.copy_(content)
        return changed


def _persistent(model: nn.Module) -> set[str]:
    """Return the names of the buffers that a state dict has."""
    return {
        f"{name}.{each}".removeprefix(".")
        for name, module in model.named_modules()
        for each in module._buffers.keys() - module._non_persistent_buffers_set
    }


@torch.no_grad()
def checksums(model: nn.Module) -> dict[str, int]:
    """Return a checksum of all entries of each parameter, by name, of those that have entries of their own."""
    sums = {}
    for name, each in model.named_parameters():
        if each.numel() and _comparable(each):
            sums[name] = zlib.crc32(_bits(each).cpu().numpy().data)
    return sums


def differing(pairs: Mapping[str, tuple[Tensor | None, Tensor | None]]) -> list[str]:
    """Return the names of the tensors of which the entries that are looked at differ from those of before.

    Args:
        pairs: By name what `some_entries` returns, and a copy from before; None where there is nothing to look at.
    """
    alike = defaultdict[tuple[torch.dtype, torch.device], list[tuple[str, Tensor, Tensor]]](list)
    for name, (live, entries) in pairs.items():
        if live is not None and entries is not None:
            alike[live.dtype, live.device].append((name, live, entries))
    changed = []
    for each in alike.values():  # all at once, as there may be hundreds of tensors
        names, live_ones, copies = zip(*each, strict=True)
        if not torch.equal(torch.cat(live_ones), torch.cat(copies)):
            changed += [name for name, a, b in zip(names, live_ones, copies, strict=True) if not torch.equal(a, b)]
    return changed


def some_entries(tensor: Tensor, most: int = ENTRIES) -> Tensor | None:
    """Return a view of entries of a tensor as integers, evenly spaced and at most ``most``; None if there is none.

    The step has no divisor in common with any of the tensor's sizes, so that no row, column or channel is left out.
    """
    count = tensor.numel()
    if not count or not _comparable(tensor):
        return None
    step = -(-count // most)
    while math.gcd(step, count) > 1:
        step += 1
    flat = tensor.detach().permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    try:
        return flat.view(-1)[::step].view(INTEGERS[tensor.element_size()])
    except (RuntimeError, KeyError):  # gaps between its entries, or no integers of that size
        return None


def _comparable(tensor: Tensor) -> bool:
    """Whether a tensor's own memory has its entries; not that of a wrapper, for one."""
    strided = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
    return strided and not hasattr(tensor, "__tensor_flatten__")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors, on whatever devices, have the same type, shape and bits: NaN equals itself."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b.to(a.device)))


def has_mean(tensor: Tensor) -> bool:
    """Whether the mean of several such tensors is one: of floating numbers, but not of 8 bits, which need scales."""
    return tensor.is_floating_point() and tensor.element_size() > 1


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
