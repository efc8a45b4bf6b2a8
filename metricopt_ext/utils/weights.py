"""A model's weights as they were, to notice that something changed them and to undo it."""

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

# Of each tensor so many entries are compared at most, and by halves fewer where that takes longer than a share of the
# query or a time in seconds, whichever is more.
ENTRIES, LEAST_ENTRIES = 4096, 64
SHARE, SECONDS = 0.01, 1e-3

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


def where_and_how_often(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor lies and how often it was changed in place: as long as both stay, so does its content.

    Some changes go unnoticed: through ``.data`` or NumPy, of a tensor that was made under ``torch.inference_mode``, and
    of BatchNorm's running statistics in training mode (of which ``num_batches_tracked`` tells).
    """
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


class _Kept(NamedTuple):
    """A parameter as it was.

    Attributes:
        state: What `where_and_how_often` told.
        content: A copy.
        live: Some entries of the parameter itself, a view; None where there can be none.
        entries: The same of the copy.
    """

    state: tuple[int, int]
    content: Tensor
    live: Tensor | None
    entries: Tensor | None


class KeptWeights:
    """Copies of a model's parameters and buffers.

    Parameters are copied and compared only where `where_and_how_often` tells of a change; buffers, which are small,
    always. What leaves no such trace shows in some entries of each parameter (`unnoticed`), or in all (`different`).

    Attributes:
        held: Whether nothing but what is watched may change the model, as in a run: `update` does not look for changes
            that leave no trace then.
    """

    def __init__(self) -> None:
        self.held = False
        self._parameters: dict[str, _Kept] = {}
        self._buffers: dict[str, Tensor] = {}
        self._most = ENTRIES

    def update(self, model: nn.Module, *, every: bool = False) -> None:
        """Keep the model as it is now.

        Args:
            model: The model.
            every: Whether every entry of what was kept before is compared, for changes without a trace.
        """
        kept, self._parameters = self._parameters, {}
        changed = set() if self.held or every else set(_changed(kept))
        for name, parameter in model.named_parameters():
            before = kept.get(name)
            same = before is not None and before.state == where_and_how_often(parameter) and name not in changed
            if same and every and _comparable(parameter):
                same = same_bits(parameter, before.content)  # type: ignore[union-attr]
            self._parameters[name] = before if same else self._copied(parameter)  # type: ignore[assignment]
        self._buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}

    def contents(self) -> dict[str, Tensor]:
        """Return the copies of the parameters, by name; not to be changed."""
        return {name: kept.content for name, kept in self._parameters.items()}

    @torch.no_grad()
    def restore(self, model: nn.Module) -> list[str]:
        """Put back what changed since `update`, where there is a trace of it; returns the names of it."""
        changed = []
        for name, parameter in model.named_parameters():
            kept = self._parameters.get(name)
            if kept is not None and where_and_how_often(parameter) != kept.state:
                changed.append(name)
                self._put_back(name, parameter)
        for name, buffer in model.named_buffers():
            content = self._buffers.get(name, buffer)
            if not same_bits(buffer, content):
                changed.append(name)
                _put_back(buffer, content)
        return changed

    @torch.no_grad()
    def unnoticed(self, model: nn.Module, query: float) -> list[str]:
        """Put back the parameters of which some entries changed since `update` without a trace; returns their names.

        Args:
            model: The model, after `restore`.
            query: Seconds that the query took, which tell how many entries may be compared.
        """
        began = time.perf_counter()
        changed = _changed(self._parameters)
        took = time.perf_counter() - began
        for name, parameter in model.named_parameters():
            if name in changed:
                self._put_back(name, parameter)
        if took > max(SECONDS, SHARE * query) and self._most > LEAST_ENTRIES:
            self._most //= 2
            for name, parameter in model.named_parameters():
                if name in self._parameters:
                    self._parameters[name] = self._sampled(parameter, self._parameters[name].content)
        return changed

    def _put_back(self, name: str, parameter: nn.Parameter) -> None:
        content = self._parameters[name].content
        _put_back(parameter, content)
        self._parameters[name] = self._sampled(parameter, content)

    def _copied(self, parameter: nn.Parameter) -> _Kept:
        return self._sampled(parameter, parameter.detach().clone())

    def _sampled(self, parameter: nn.Parameter, content: Tensor) -> _Kept:
        live, entries = some_entries(parameter, self._most), some_entries(content, self._most)
        return _Kept(where_and_how_often(parameter), content, live, None if entries is None else entries.clone())


@torch.no_grad()
def put_back_different(model: nn.Module, contents: dict[str, Tensor]) -> list[str]:
    """Put back the parameters of which any entry differs from what it was; returns their names.

    Args:
        model: The model.
        contents: What its parameters were, by name; others are left alone.
    """
    changed = []
    for name, parameter in model.named_parameters():
        content = contents.get(name)
        if content is not None and _comparable(parameter) and not same_bits(parameter, content):
            changed.append(name)
            _put_back(parameter, content)
    return changed


def _changed(kept: dict[str, _Kept]) -> list[str]:
    return differing({name: (each.live, each.entries) for name, each in kept.items()})


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


def _put_back(tensor: Tensor, content: Tensor) -> None:
    if tensor.shape == content.shape and tensor.dtype == content.dtype and tensor.device == content.device:
        with torch.inference_mode() if tensor.is_inference() else nullcontext():  # outside it can't be changed
            tensor.copy_(content)
    else:
        tensor.data = content.clone()


_KEPT: WeakKeyDictionary[nn.Module, KeptWeights] = WeakKeyDictionary()


def kept_weights(model: nn.Module) -> KeptWeights:
    """Return a model's copies, shared by all that watch it, up to date."""
    kept = _KEPT.setdefault(model, KeptWeights())
    kept.update(model)
    return kept


@contextmanager
def held_weights(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Keep a model as it is now, and have nothing but what is watched change it meanwhile (`KeptWeights.held`).

    Yields:
        Copies of its parameters, by name; not to be changed.
    """
    kept = _KEPT.setdefault(model, KeptWeights())
    kept.update(model, every=not kept.held)
    before, kept.held = kept.held, True
    try:
        yield kept.contents()
    finally:
        kept.held = before
