"""The state dict in a checkpoint's file: how the file is read, and which of its entries it is."""

import json
import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from metricopt_ext.errors import DataError, FileFormatError
from metricopt_ext.utils.files import check_header, check_uncompressed, open_regular
from metricopt_ext.utils.words import brief, shortened

# Where training scripts put the state dict.
ENTRIES = ("state_dict", "state_dict_ema", "model", "model_state_dict")

OF_PICKLE = """\
  import pickle, torch
  content = pickle.load(open(IN, "rb"), encoding="latin1")
  state = content.get("model", content)
  torch.save({"model": {key: torch.as_tensor(value) for key, value in state.items()}}, OUT)"""

OF_TORCH = """\
  import torch
  content = torch.load(IN, map_location="cpu", weights_only=False)
  state = content.get("state_dict", content.get("model", content)) if isinstance(content, dict) else content
  state = state.state_dict() if hasattr(state, "state_dict") else state
  torch.save({"state_dict": {key: torch.as_tensor(value) for key, value in state.items()}}, OUT)"""


def exported(path: Path, lines: str) -> str:
    """Return lines of Python for a file."""
    names = {"IN": json.dumps(str(path)), "OUT": json.dumps(str(path.with_name(f"{path.stem}_state.pth")))}
    return re.sub(r"\b(IN|OUT)\b", lambda match: names[match[1]], lines)


def torch_content(path: Path) -> Any:
    """Return what a file of ``torch.save`` holds; no code in it is run.

    Raises:
        FileFormatError: It is truncated, or holds more than tensors, numbers and text; the message then has the lines
            of Python that export a state dict.
        OSError: It can't be read.
    """
    with open_regular(path) as file:
        begin = file.read(2)
    try:
        if begin[:1] != b"\x80" and begin != b"PK":
            raise ValueError("it begins as neither a zip file nor a pickle")
        _refuse_script(path)
        check_uncompressed(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        if not isinstance(error, UnpicklingError):
            raise FileFormatError(f"{path} is truncated, or no file of torch.save ({brief(error)})") from error
        lines = [line.strip() for line in str(error).splitlines()]
        why = next((line for line in lines if "GLOBAL" in line or "Unsupported" in line), lines[0])
        raise FileFormatError(
            f"{path} holds more than tensors, numbers and text ({brief(ValueError(why))}), which is not read, as it can"
            f" run any code. If you trust it, export its state dict:\n{exported(path, OF_TORCH)}"
        ) from error


def _refuse_script(path: Path) -> None:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if any(name.endswith("/constants.pkl") for name in archive.namelist()):
                raise UnpicklingError("a model with its code, of TorchScript")


def state_dict_in(path: Path, content: Any, entry: str | None) -> tuple[str | None, Mapping[str, Any]]:
    """Return the state dict of what a file holds, after its entry, which is None for the content itself.

    Args:
        path: The file, for messages.
        content: What it holds.
        entry: The state dict's key, with dots into further dictionaries; None to find it.

    Raises:
        DataError: It holds no state dict, or several.
    """
    if entry is not None:
        found = within(content, entry)
        if not _is_state_dict(found):
            raise DataError(f"--entry {brief(entry)}: {path} has no state dict there; {_there_is(content)}")
        return entry, found
    entries = [name for name in ENTRIES if isinstance(content, dict) and _is_state_dict(content.get(name))]
    if len(entries) > 1:
        raise DataError(f"{path} has {len(entries)} state dicts, {entries}; name one by --entry")
    if entries:
        return entries[0], content[entries[0]]
    if not _is_state_dict(content):
        raise DataError(f"{path} has no state dict, itself or as one of {ENTRIES}; {_there_is(content)}")
    return None, content


def _is_state_dict(content: Any) -> bool:
    return isinstance(content, dict) and any(isinstance(value, Tensor) for value in content.values())


def _there_is(content: Any) -> str:
    if not isinstance(content, dict):
        return f"it holds a {type(content).__name__}"
    inner = [str(key) for key, value in content.items() if isinstance(value, dict)]
    return f"name one by --entry, of {shortened(inner)}" if inner else f"it has {shortened(list(map(str, content)))}"


def within(content: Any, key: str) -> Any:
    """Return what nested dictionaries and lists hold under a key with dots, None if nothing; keys may have dots too.

    Example:
        >>> within({"a": {"b.c": [1, 2]}}, "a.b.c.1")
        2
    """
    if isinstance(content, list) and key.partition(".")[0].isdecimal():
        at, _, rest = key.partition(".")
        inner = content[int(at)] if int(at) < len(content) else None
        return within(inner, rest) if rest else inner
    if not isinstance(content, dict):
        return None
    if key in content:
        return content[key]
    parts = key.split(".")
    for count in range(len(parts) - 1, 0, -1):
        begin = ".".join(parts[:count])
        if begin in content and (found := within(content[begin], ".".join(parts[count:]))) is not None:
            return found
    return None


def load_checkpoint(model: nn.Module, path: Path, *, keep: Iterable[str] = ()) -> None:
    """Load a state dict into a model, from a safetensors file or a torch file without pickled code.

    A Detectron2 checkpoint works too: its state dict is the entry ``model``. Memory is bounded by the file's size for
    safetensors; a torch file is read by PyTorch's restricted unpickler, and must not be compressed.

    Args:
        model: The model.
        path: The file.
        keep: Names of weights to leave as they are in the model, whatever the file holds.

    Raises:
        DataError: The file can't be read, or its weights are not the model's.
    """
    try:
        if path.suffix == ".safetensors":
            check_header(path)
            state = safetensors.torch.load_file(path)
        else:
            check_uncompressed(path)
            loaded = torch.load(path, map_location="cpu", weights_only=True)
            state = loaded.get("model", loaded)
        own = model.state_dict()
        model.load_state_dict({**state, **{name: own[name] for name in keep}})
    except Exception as error:
        raise DataError(f"{path} holds no weights for {type(model).__name__}: {brief(error)}") from error
