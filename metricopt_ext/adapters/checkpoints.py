"""Checkpoints of any framework as tensors under the names that a model has, for soups and mixtures of them."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.context import CONTEXT_NAME
from metricopt_ext.adapters.lora import adapted_layers
from metricopt_ext.errors import AdapterError, DataError, FileFormatError
from metricopt_ext.utils.checkpoint_file import CheckpointFile, packed_in, read_checkpoint
from metricopt_ext.utils.files import content_of, parse_json
from metricopt_ext.utils.tensor_names import UNTRAINED, names_in_model
from metricopt_ext.utils.weights import has_mean, same_bits
from metricopt_ext.utils.words import brief, counted, shortened

WHOLE = ("model.safetensors", "pytorch_model.bin")  # of a folder of Hugging Face's

MOST = 8  # checkpoints of a mixture


class CheckpointReader:
    """Reads checkpoints as the tensors of a model without an adapter.

    Args:
        model: The model, with an adapter or without, or a checkpoint of it.
        entry: The state dict's key in each file of torch that is not one itself; None to find it.

    Attributes:
        base: The model's tensors, by name.
        floating: Names of those that have a mean; of tied ones the first alone.

    Raises:
        AdapterError: The model has layers that PEFT has adapted by LoRA, of whose matrices a mean says nothing; or
            weights that are no tensors, as quantized layers have.
    """

    def __init__(self, model: nn.Module | CheckpointFile, entry: str | None = None) -> None:
        self.entry = entry
        state: Mapping[str, Any]
        if isinstance(model, CheckpointFile):
            state, packed = {key: model.tensor(key) for key in model.shapes}, model.packed
            self._first = {key: model.aliases(key)[0] for key in state}
        else:
            if (lora := next(adapted_layers(model), None)) is not None:
                raise AdapterError(f"LoRA of {lora[0]!r} has no mean; merge_and_unload() the model and all checkpoints")
            state = Adapter(model).base_state_dict() if hasattr(model, CONTEXT_NAME) else model.state_dict()
            packed, names = packed_in(state), dict[int, str]()
            every = model.state_dict(keep_vars=True)
            self._first = {name: names.setdefault(id(each), name) for name, each in every.items()}
        if packed:
            raise AdapterError(f"the model's {brief(packed[0])} has no mean; use the models before quantization")
        self.base = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        self.floating = [name for name, each in self.base.items() if has_mean(each) and self._first[name] == name]

    def read(self, checkpoint: Path | Mapping[str, Any], name: str = "") -> dict[str, Tensor]:
        """Return copies of a checkpoint's tensors, by the model's names, on the CPU; of tied ones the first alone.

        Args:
            checkpoint: A file, a folder or a state dict.
            name: What messages call a state dict.

        Raises:
            DataError: It can't be read, or lacks a tensor, has one that the model has not, or one of another shape or
                type, or with numbers that are not finite, or other weights than the model's of a type without a mean;
                the message has the file and the tensor.
            FileFormatError: It is damaged, or holds more than tensors, numbers and text.
        """
        if isinstance(checkpoint, Mapping):
            packed = packed_in(checkpoint)
            given = {key: each.detach().cpu().clone() for key, each in checkpoint.items() if isinstance(each, Tensor)}
        else:
            name, files = str(checkpoint), [self._opened(file) for file in files_of(checkpoint)]
            packed = [key for file in files for key in file.packed]
            given = {key: file.tensor(key) for file in files for key in file.shapes}
        if packed:
            raise DataError(f"{name}: {brief(packed[0])} is of a quantized layer; use the models before quantization")
        state: dict[str, Tensor] = {}
        for key, own in self._names(name, given).items():
            value = given[key]
            if misfit := _misfit(value, self.base[own]):
                raise DataError(f"{name}: {brief(key)} {misfit}")
            if not same_bits(state.setdefault(self._first[own], value), value):
                raise DataError(f"{name}: {brief(key)} is not the same tensor as others are that it is tied to here")
        return state

    def _opened(self, file: Path) -> CheckpointFile:
        try:
            return read_checkpoint(file, self.entry, "entry")
        except DataError:
            with suppress(DataError):
                if (found := read_checkpoint(file)).entry is None:
                    return found  # which needs no entry
            raise

    def _names(self, file: str, keys: Collection[str]) -> dict[str, str]:
        """Return the model's names of a file's tensors, and refuse a file that has others, or not all."""
        read = names_in_model(keys, self.base)
        if unknown := [key for key, name in read.names.items() if name not in self.base]:
            raise DataError(f"{file} has {shortened(unknown)}, which the model has not; leave this file out")
        found = {self._first[name] for name in read.names.values()}
        if missing := [each for each in self.base if self._first[each] not in found and not each.endswith(UNTRAINED)]:
            raise DataError(f"{file} lacks {shortened(missing)}; it is no checkpoint of the whole, unquantized model")
        if read.left_out:
            what = counted(len(read.left_out), "tensor")
            warnings.warn(f"{file}: {what} beside the model left out: {shortened(read.left_out)}", stacklevel=4)
        return read.names

    def replaced(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what of tensors as `read` has them differs from the model's, cast to the model's types."""
        cast = ((name, value.to(self.base[name].dtype)) for name, value in values.items())
        return {name: value for name, value in cast if not same_bits(self.base[name], value)}

    def to_mix(self, checkpoints: Sequence[str | Path | Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Return what of checkpoints, files or state dicts, a mixture takes: floating tensors other than the model's.

        Raises:
            AdapterError: There are none or more than eight, or two are of one model, or of this one.
            DataError: As from `read`.
        """
        if not 1 <= len(checkpoints) <= MOST:
            raise AdapterError(f"{counted(len(checkpoints), 'checkpoint')} can't be mixed in; give 1 to {MOST}")
        known: dict[str, dict[str, Tensor]] = {"the model": {}}
        for number, each in enumerate(checkpoints):
            name = f"checkpoint {number}" if isinstance(each, Mapping) else str(each)
            read = self.read(each if isinstance(each, Mapping) else Path(each), name)
            state = {key: value for key, value in self.replaced(read).items() if has_mean(value)}
            for other, theirs in known.items():
                if state.keys() == theirs.keys() and all(same_bits(value, theirs[key]) for key, value in state.items()):
                    raise AdapterError(f"{name} has the same weights as {other}, so it would add nothing; leave it out")
            known[name] = state
        return list(known.values())[1:]


def files_of(path: Path) -> list[Path]:
    """Return the files of a checkpoint: itself, or those of a folder that Hugging Face's libraries save.

    Raises:
        DataError: There is no such file, or the folder has none that is known.
        FileFormatError: The folder's list of files can't be read.
    """
    for name in WHOLE:
        if (index := path / f"{name}.index.json").is_file():  # of shards
            with content_of(index, "files by tensor in weight_map"):
                names = sorted({str(each) for each in parse_json(index.read_bytes())["weight_map"].values()})
            if any(Path(each).name != each for each in names):
                raise FileFormatError(f"{index} names files outside its folder: {shortened(names)}")
            return [path / each for each in names]
    found = [file for file in (path, *(path / name for name in WHOLE)) if file.is_file()]
    if not found:
        raise DataError(
            f"{path} is neither a file nor a folder with {' or '.join(WHOLE)}; name the checkpoint's file, or merge"
            " PEFT's adapter into its model and save that"
        )
    return found[:1]


def _misfit(value: Tensor, own: Tensor) -> str:
    """Return why a tensor can't be averaged with the model's own; empty if it can, or if it is a count or an index."""
    if value.shape != own.shape or value.dtype != own.dtype:
        return f"is {tuple(value.shape)}, {value.dtype}; it must be {tuple(own.shape)}, {own.dtype}"
    if not has_mean(value):
        free = value.dtype == torch.int64 or value.numel() <= 1 or same_bits(value, own)
        return "" if free else f"differs from the model's, and {value.dtype} has no mean; use floating numbers"
    if not torch.equal(value.where(~value.isfinite(), 0), own.where(own.isinf(), 0).detach().cpu()):
        return "has NaN, or is infinite elsewhere than the model's; leave this file out"
    return ""
