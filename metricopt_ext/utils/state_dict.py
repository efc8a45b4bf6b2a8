"""The state dict in a checkpoint's file: how the file is read, and which of its entries it is."""

import argparse
import json
import re
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from metricopt_ext.errors import DataError, FileFormatError, MetricOptError
from metricopt_ext.utils.tensor_names import names_in_model, wrapper_of
from metricopt_ext.utils.words import and_more, brief, counted, shortened

# Where training scripts put the state dict.
ENTRIES = ("state_dict", "state_dict_ema", "model", "model_ema", "ema_state", "model_state_dict")

# Classes whose objects only hold what they are given: scripts keep their arguments beside the weights.
_PATH = type(Path())
HARMLESS: list[Any] = [
    (argparse.Namespace, "argparse.Namespace"),
    *((_PATH, f"{module}.{_PATH.__name__}") for module in ("pathlib", "pathlib._local")),
]
OF_TORCH = """\
  import torch
  content = torch.load(IN, map_location="cpu", weights_only=False)
  state = content.get("state_dict", content.get("model", content)) if isinstance(content, dict) else content
  state = state.state_dict() if hasattr(state, "state_dict") else state
  torch.save({"state_dict": {key: torch.as_tensor(value) for key, value in state.items()}}, OUT)"""


def exported(path: Path) -> str:
    """Return lines of Python that export a state dict from a file of torch."""
    names = {"IN": json.dumps(str(path)), "OUT": json.dumps(str(path.with_name(f"{path.stem}_state.pth")))}
    return re.sub(r"\b(IN|OUT)\b", lambda match: names[match[1]], OF_TORCH)


def torch_content(path: Path) -> Any:
    """Return what a file of ``torch.save`` holds; no code in it is run, and no object made but of `HARMLESS` classes.

    Raises:
        FileFormatError: It is truncated, or holds more than tensors, numbers and text; the message then has the lines
            of Python that export a state dict.
        OSError: It can't be read.
    """
    with open(path, "rb") as file:
        begin = file.read(2)
    try:
        if begin[:1] != b"\x80" and begin != b"PK":
            raise ValueError("it begins as neither a zip file nor a pickle")
        if is_script(path):
            raise UnpicklingError("a model with its code, of TorchScript")
        with torch.serialization.safe_globals(HARMLESS):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        if not isinstance(error, UnpicklingError):
            raise FileFormatError(f"{path} is truncated, or no file of torch.save ({brief(error)})") from error
        lines = [line.strip() for line in str(error).splitlines()]
        why = next((line for line in lines if "GLOBAL" in line or "Unsupported" in line), lines[0])
        raise FileFormatError(
            f"{path} holds more than tensors, numbers and text ({brief(ValueError(why))}), which is not read, as it can"
            f" run any code. If you trust it, export its state dict:\n{exported(path)}"
        ) from error


def is_script(path: Path) -> bool:
    """Whether a file holds a model with its code, of TorchScript; it is not run."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())


def state_dict_in(
    path: Path, content: Any, entry: str | None, option: str = "--entry"
) -> tuple[str | None, Mapping[str, Any]]:
    """Return the state dict of what a file holds, after its entry, which is None for the content itself.

    Args:
        path: The file, for messages.
        content: What it holds.
        entry: The state dict's key, with dots into further dictionaries; None to find it: one of `ENTRIES`, or the
            content itself.
        option: What names the entry, for messages.

    Raises:
        DataError: It holds no state dict, or several.
    """
    if entry is not None:
        found = within(content, entry)
        if not _is_state_dict(found):
            raise DataError(f"{_named(option, entry)}: {path} has no state dict there; {_there_is(content, option)}")
        return entry, found
    chosen = [key for key in ENTRIES if isinstance(content, dict) and _is_state_dict(content.get(key))]
    alone = _is_state_dict(content) and not any(map(_is_state_dict, content.values()))
    if not chosen and (alone or (_is_state_dict(content) and _has_layers(content))):
        return None, content
    if len(chosen) > 1:
        raise DataError(f"{path} has {len(chosen)} state dicts, {shortened(chosen)}; name one by {option}")
    if chosen:
        return chosen[0], content[chosen[0]]
    raise DataError(f"{path} has no state dict, itself or as one of {ENTRIES}; {_there_is(content, option)}")


def _is_state_dict(content: Any) -> bool:
    return isinstance(content, dict) and any(isinstance(value, Tensor) for value in content.values())


def _has_layers(content: Mapping[Any, Any]) -> bool:
    """Whether tensors have names as of layers, and not of what a script keeps beside its model."""
    return any(isinstance(value, Tensor) and "." in str(key) for key, value in content.items())


def _named(option: str, entry: str) -> str:
    return f"{option} {brief(entry)}" if option.startswith("-") else f"{option}={brief(entry)}"


def _there_is(content: Any, option: str) -> str:
    if not isinstance(content, dict):
        return f"it holds a {type(content).__name__}"
    inner = [str(key) for key, value in content.items() if isinstance(value, dict)]
    return f"name one by {option}, of {shortened(inner)}" if inner else f"it has {shortened(list(map(str, content)))}"


def within(content: Any, key: str) -> Any:
    """Return what nested dictionaries and lists hold under a key with dots, None if nothing; keys may have dots too.

    Examples:
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


def read_state_dict(
    path: Path, entry: str = "", *, option: str = "model.entry", what: str = "weights"
) -> dict[str, Tensor]:
    """Read the state dict of a file of safetensors or of ``torch.save``; no code in it is run.

    Args:
        path: The file.
        entry: The state dict's key in a file of torch, as in `state_dict_in`; empty to find it.
        option: What names the entry, for messages.
        what: What it should hold, for messages.

    Raises:
        DataError: The file can't be read, or holds no state dict, or several; the message has one line.
    """
    try:
        if path.suffix != ".safetensors":
            found = state_dict_in(path, torch_content(path), entry or None, option)[1]
            return {str(key): value for key, value in found.items()}
        if entry:
            raise DataError(f"{_named(option, entry)}: {path} is of safetensors, which has tensors alone; leave it out")
        return safetensors.torch.load_file(path)
    except FileFormatError as error:
        raise DataError(_in_a_line(str(error))) from error
    except MetricOptError:
        raise
    except Exception as error:
        raise DataError(f"{path} holds no {what}: {brief(error)}") from error


def _in_a_line(message: str) -> str:
    """Return a refusal that has lines of Python as one that has what they do."""
    said, line, _ = message.partition(":\n")
    return f"{said} alone, torch.save(model.state_dict(), FILE), where it was trained" if line else said


def load_checkpoint(
    model: nn.Module, path: Path, *, keep: Iterable[str] = (), entry: str = "", option: str = "model.entry"
) -> None:
    """Load a file's state dict (`read_state_dict`) into a model, under the names that the model has for it.

    Args:
        model: The model.
        path: The file.
        keep: Names of weights to leave as they are in the model, whatever the file holds.
        entry: The state dict's key in a file of torch; empty to find it.
        option: What names the entry, for messages.

    Raises:
        DataError: The file can't be read, or its weights are not the model's.
    """
    what = f"weights for {type(model).__name__}"
    load_state(model, read_state_dict(path, entry, option=option, what=what), path, keep=keep)


def load_state(model: nn.Module, state: Mapping[str, Any], path: Path, *, keep: Iterable[str] = ()) -> None:
    """Load a state dict into a model, under the names that the model has for it (`names_in_model`).

    A warning says what is left out, as it is beside the model.

    Args:
        model: The model.
        state: The state dict.
        path: The file that it is from, for messages.
        keep: Names of weights to leave as they are in the model.

    Raises:
        DataError: The weights are not the model's.
    """
    own = model.state_dict()
    read = names_in_model(state, own)
    renamed = {name: state[key] for key, name in read.names.items()}
    renamed |= {name: own[name] for name in keep}
    try:
        model.load_state_dict(renamed)
    except Exception as error:
        wrapper = wrapper_of(own)
        bare = {name: name.removeprefix(wrapper) for name in own} | {name: key for key, name in read.names.items()}
        why = _misfit(renamed, own, bare, error)
        raise DataError(f"{path} holds no weights for {type(model).__name__}: {why}") from error
    if read.left_out:
        what = counted(len(read.left_out), "tensor")
        warnings.warn(f"{path}: {what} beside the model left out: {shortened(read.left_out)}", stacklevel=2)


def _misfit(state: Mapping[str, Any], own: Mapping[str, Any], bare: Mapping[str, str], error: Exception) -> str:
    """Return in words how a state dict differs from a model's, or else what loading it raised.

    Args:
        state: The state dict, by the model's names.
        own: The model's.
        bare: The file's names by the model's; of what the file lacks, those that it would have.
        error: What loading it raised.
    """
    missing, unknown = ([bare[name] for name in a if name not in b] for a, b in ((own, state), (state, own)))
    unlike = [
        f"{brief(bare[name])} is {tuple(state[name].shape)} and should be {tuple(value.shape)}"
        for name, value in own.items()
        if isinstance(state.get(name), Tensor) and isinstance(value, Tensor) and state[name].shape != value.shape
    ]
    said = [f"it lacks {shortened(missing)}"] if missing else []
    said += [f"it has {shortened(unknown)}, which the model has not"] if unknown else []
    said += [and_more(unlike)] if unlike else []
    return "; ".join(said) or brief(error)
