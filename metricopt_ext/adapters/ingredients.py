"""The models that a soup is made of: checkpoints of any framework, under the names that the task's model has."""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.lora import adapted_layers
from metricopt_ext.adapters.modulation import CONTEXT_NAME
from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import AdapterError, DataError, FileFormatError
from metricopt_ext.utils.checkpoint_file import CheckpointFile, packed_in, read_checkpoint
from metricopt_ext.utils.files import content_of, parse_json
from metricopt_ext.utils.state_dict import state_dict_in
from metricopt_ext.utils.tensor_names import UNTRAINED, Names, names_in_model
from metricopt_ext.utils.weights import has_mean, same_bits
from metricopt_ext.utils.words import brief, counted, shortened

INDEX = ".index.json"
WHOLE = ("model.safetensors", "pytorch_model.bin")  # of a folder of Hugging Face's, or with INDEX if it has shards

NO_TENSOR = "is no tensor, as of a quantized layer, and has no mean; use the models before quantization"


class Ingredients:
    """Reads checkpoints as the tensors of a model without an adapter, and makes starts of such tensors.

    Args:
        model: The model, with an adapter or without.
        entry: The state dict's key in each file of torch that is not one itself; None to find it.

    Raises:
        AdapterError: The model has layers that PEFT has adapted by LoRA, of whose matrices a mean says nothing; or
            weights that are no tensors, as quantized layers have.
    """

    def __init__(self, model: nn.Module, entry: str | None = None) -> None:
        if (lora := next(adapted_layers(model), None)) is not None:
            raise AdapterError(
                f"LoRA of {lora[0]!r} is not merged, and a mean of its matrices says nothing; merge the model and each"
                " checkpoint first, model.merge_and_unload(), and save that"
            )
        self.model, self.entry = model, entry
        state = Adapter(model).base_state_dict() if hasattr(model, CONTEXT_NAME) else model.state_dict()
        if packed := packed_in(state):
            raise AdapterError(f"the model's {brief(packed[0])} {NO_TENSOR}")
        self.base = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        self._aliases = _aliases(model)
        self.floating = [name for name, each in self.base.items() if has_mean(each)]

    def read(self, path: Path) -> dict[str, Tensor]:
        """Read a file or folder: its tensors by the model's names, on the CPU.

        Raises:
            DataError: It can't be read, or lacks a tensor, has one that the model has not, or one of another shape or
                type, or with numbers that are not finite, or other weights than the model's of a type without a mean;
                the message has the file and the tensor.
        """
        return self._read(path, [self._opened(file) for file in files_of(path)])

    def _opened(self, file: Path) -> CheckpointFile:
        try:
            return read_checkpoint(file, self.entry, "entry")
        except DataError:
            with suppress(DataError):
                if (found := read_checkpoint(file)).entry is None:
                    return found  # which needs no entry
            raise

    def take(self, state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
        """Return a state dict as `read` does a file of it.

        Args:
            state: The tensors, or what a file of torch holds with them in an entry.
            name: What messages call it.

        Raises:
            DataError: As from `read`.
        """
        if not any(isinstance(value, Tensor) for value in state.values()):  # a whole file's content
            state = state_dict_in(Path(name), dict(state), self.entry, "entry")[1]
        return self._read(Path(name), [_InMemory(state)])

    def _read(self, path: Path, files: Sequence[CheckpointFile]) -> dict[str, Tensor]:
        if packed := [key for file in files for key in file.packed]:
            raise DataError(f"{path}: {brief(packed[0])} {NO_TENSOR}")
        where = {key: file for file in files for key in file.shapes}
        read = self._names(path, list(where))
        for key, name in read.names.items():
            self._check(path, key, where[key], name)
        state: dict[str, Tensor] = {}
        for key, name in read.names.items():
            value = where[key].tensor(key)
            self._check_numbers(path, key, value, self.base[name])
            self._check_mean(path, key, value, self.base[name])
            known = state.setdefault(self._aliases.get(name, [name])[0], value)
            if not same_bits(known, value):
                raise DataError(f"{path}: {brief(key)} is not the same tensor as others are that it is tied to here")
        return state

    def replaced(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what of tensors as `read` has them differs from the model's, cast to the model's types."""
        found: dict[str, Tensor] = {}
        for name, value in values.items():
            own = self.base[name]
            value = value.to(own.dtype)
            if not same_bits(own, value):
                found[name] = value
        return found

    def start(self, values: Mapping[str, Tensor]) -> Start:
        """Return the start at phi = 0 of the model's adapter with `replaced`."""
        return Start(torch.zeros_like(Adapter(self.model).phi.detach()), self.replaced(values))

    def _names(self, path: Path, keys: list[str]) -> Names:
        """Return the model's names of a file's tensors, and refuse a file that has others, or not all."""
        try:
            read = names_in_model(keys, self.base)
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
        found = set(read.names.values())
        if unknown := [key for key, name in read.names.items() if name not in self.base]:
            raise DataError(f"{path} has {shortened(unknown)}, which the model has not; leave this file out")
        missing = [
            name
            for name in self.base
            if not name.endswith(UNTRAINED) and not found.intersection(self._aliases.get(name, [name]))
        ]
        if missing:
            raise DataError(f"{path} lacks {shortened(missing)}; it is no checkpoint of the whole model")
        if read.left_out:
            what = counted(len(read.left_out), "tensor")
            warnings.warn(f"{path}: {what} beside the model left out: {shortened(read.left_out)}", stacklevel=5)
        return read

    def _check(self, path: Path, key: str, file: CheckpointFile, name: str) -> None:
        own = self.base[name]
        if file.shapes[key] != tuple(own.shape):
            raise DataError(f"{path}: {brief(key)} has shape {file.shapes[key]}, the model's {tuple(own.shape)}")
        if file.dtypes[key] != own.dtype:
            raise DataError(
                f"{path}: {brief(key)} has type {file.dtypes[key]}, the model's {own.dtype}; convert it first"
            )

    def _check_numbers(self, path: Path, key: str, value: Tensor, own: Tensor) -> None:
        if not has_mean(value) or (bool(value.isfinite().all()) and bool(own.isfinite().all())):
            return
        if bool(value.isnan().any()):
            raise DataError(f"{path}: {brief(key)} has NaN; leave this file out")
        if not torch.equal(value.where(value.isinf(), 0), own.where(own.isinf(), 0).detach().cpu()):
            raise DataError(
                f"{path}: {brief(key)} is infinite elsewhere than the model's, of which there is no mean; leave this"
                " file out"
            )

    def _check_mean(self, path: Path, key: str, value: Tensor, own: Tensor) -> None:
        """Refuse weights of a type without a mean that are not the model's; counts and indices may differ."""
        if has_mean(value) or value.dtype == torch.int64 or value.numel() <= 1 or same_bits(value, own):
            return
        raise DataError(
            f"{path}: {brief(key)} differs from the model's, and numbers of type {value.dtype} have no mean; convert"
            " the model and all files to floating numbers, as before quantization"
        )


def files_of(path: Path) -> list[Path]:
    """Return the files of a checkpoint: itself, or those of a folder that Hugging Face's libraries save.

    Raises:
        DataError: There is no such file, or the folder has none that is known.
        FileFormatError: The folder's list of files can't be read.
    """
    if not path.is_dir():
        if not path.exists():
            raise DataError(f"{path}: there is no such file or folder")
        return [path]
    for name in WHOLE:
        if (index := path / f"{name}{INDEX}").is_file():
            with content_of(index, "files by tensor in weight_map"):
                names = sorted({str(each) for each in parse_json(index.read_bytes())["weight_map"].values()})
            if any(Path(each).name != each for each in names):
                raise FileFormatError(f"{index} names files outside its folder: {shortened(names)}")
            return [path / each for each in names]
    found = [path / name for name in WHOLE if (path / name).is_file()]
    if not found:
        raise DataError(
            f"{path} is a folder without {', '.join(WHOLE)}; name the checkpoint's file, or merge PEFT's adapter into"
            " its model and save that"
        )
    return found[:1]


class _InMemory(CheckpointFile):
    """A state dict in place of a file.

    Args:
        state: Its tensors.
    """

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        self.packed = packed_in(state)
        self.shapes = {name: tuple(value.shape) for name, value in self._state.items()}
        self.dtypes = {name: value.dtype for name, value in self._state.items()}

    def tensor(self, key: str) -> Tensor:
        """Return a copy of a tensor."""
        return self._state[key].detach().cpu().clone()


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each tensor that has several."""
    every = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    names: dict[int, list[str]] = {}
    for name, tensor in every:
        names.setdefault(id(tensor), []).append(name)
    return {name: each for each in names.values() for name in each if len(each) > 1}
