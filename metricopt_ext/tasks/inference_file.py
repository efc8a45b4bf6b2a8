"""``inference.yaml``: which settings of inference a checkpoint is used with, beside it."""

import json
import math
from pathlib import Path
from typing import Any

from metricopt_ext.errors import ConfigError, FileFormatError
from metricopt_ext.tasks.settings import Settings, Value, Values
from metricopt_ext.utils.config import check_yaml
from metricopt_ext.utils.files import MISFITS, write_atomically
from metricopt_ext.utils.words import brief

INFERENCE = "inference.yaml"
KEYS = {"value", "default", "factor"}

HEADER = """\
# metricopt_ext/inference/1
# Settings of inference: the value that was chosen, the default, and the factor on inference time (null: unknown).
# metricopt_ext.load_inference reads them; the host's Settings put them to use.
"""


def save_inference(path: str | Path, settings: Settings, values: Values) -> None:
    """Write which values settings have, with their defaults and factors on inference time, as YAML.

    No package is needed for it. Values that are free (`Settings`) are marked as the metric's alone.

    Args:
        path: The file, which ends in .yaml or .yml, or the folder of the checkpoint, which then has ``inference.yaml``.
        settings: The host's settings.
        values: Some of their values; the others have their defaults.

    Raises:
        ValueError: There is no such setting, or it can't have this value.
        OSError: The file can't be written.
    """
    changed = settings.changed(values)
    free = [name for name, value in settings.free.items() if changed.get(name) == value]
    lines = [f"# Free, for the metric alone; for deployment keep the default: {', '.join(map(scalar, free))}"] * bool(
        free
    )
    for name, row in settings.rows(values).items():
        lines += [f"{scalar(name)}:", *(f"  {key}: {scalar(each)}" for key, each in row.items())]
    write_atomically(_file(path), (HEADER + "\n".join(lines) + "\n").encode())


def scalar(value: Value | None) -> str:
    """Return a value as YAML of any version reads it, in which a number with an exponent has a point too.

    Examples:
        >>> scalar(1e-05), scalar("no")
        ('1.0e-05', '"no"')
    """
    if isinstance(value, str):  # of two codes for one character, as in JSON, YAML makes two characters
        return f'"{"".join(_character(each) for each in value)}"'
    text = json.dumps(value)
    return text.replace("e", ".0e") if isinstance(value, float) and "e" in text and "." not in text else text


def _character(character: str) -> str:
    return json.dumps(character)[1:-1] if ord(character) < 2**16 else f"\\U{ord(character):08x}"


def load_inference(path: str | Path) -> dict[str, Value]:
    """Return the values of settings by name that `save_inference` wrote, for ``Settings.applied``.

    Args:
        path: The file, which ends in .yaml or .yml, or the folder with ``inference.yaml``.

    Raises:
        FileFormatError: It is missing, or holds something else.
    """
    return {name: each["value"] for name, each in _read(path).items()}


def changed_inference(path: str | Path) -> dict[str, tuple[Value, Value]]:
    """Return the settings whose values are not their defaults, by name: the default and the value.

    Raises:
        FileFormatError: As from `load_inference`, as for the argument.
    """
    pairs = {name: (each["default"], each["value"]) for name, each in _read(path).items()}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _read(path: str | Path) -> dict[str, dict[str, Any]]:
    """Return what a file holds; see `load_inference`."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    file = _file(path)
    if not file.is_file():
        raise FileFormatError(f"{file} does not exist; save_inference writes it")
    try:
        check_yaml(file)
        content: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)  # which refuses a key that is twice
    except (ConfigError, OmegaConfBaseException, YAMLError, *MISFITS) as error:
        raise FileFormatError(f"{file} holds no settings of inference: {brief(error)}") from error
    for name, each in content.items():
        if not isinstance(name, str) or not isinstance(each, dict) or set(each) != KEYS:
            raise FileFormatError(
                f"{file}: {brief(name)} is {brief(each)}; a setting must have a name, and a value, default and factor"
            )
        for key in ("value", "default"):
            if not isinstance(each[key], bool | int | float | str) or (
                isinstance(each[key], float) and not math.isfinite(each[key])
            ):
                raise FileFormatError(
                    f"{file}: {name} has the {key} {brief(each[key])}; it must be a finite number, true, false or text"
                )
    found: dict[str, dict[str, Any]] = content
    return found


def _file(path: str | Path) -> Path:
    return Path(path) if Path(path).suffix in (".yaml", ".yml") else Path(path) / INFERENCE
