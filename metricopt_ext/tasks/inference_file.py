"""``inference.yaml``: which settings of inference a checkpoint is used with, beside it."""

import math
from pathlib import Path
from typing import Any

from metricopt_ext.errors import ConfigError, FileFormatError
from metricopt_ext.tasks.settings import Settings, Value, Values
from metricopt_ext.utils.config import check_yaml
from metricopt_ext.utils.files import MISFITS, write_atomically
from metricopt_ext.utils.words import brief

NAME = "inference.yaml"
KEYS = {"value", "default", "factor"}

HEADER = """\
# Settings of inference: the value that the model is used with, its default, and the factor on inference time.
# metricopt_ext.load_inference reads them; the host's Settings put them to use.
"""


def save_inference(path: str | Path, settings: Settings, values: Values) -> None:
    """Write which values settings have, with their defaults and factors on inference time.

    Args:
        path: The file, which ends in .yaml or .yml, or the folder of the checkpoint, which then has ``inference.yaml``.
        settings: The host's settings.
        values: Some of their values; the others have their defaults.

    Raises:
        ValueError: There is no such setting, or it can't have this value.
    """
    from omegaconf import OmegaConf

    complete = settings.complete(values)
    content = {
        name: {
            "value": value,
            "default": settings[name].default,
            "factor": settings[name].factor(value) / settings[name].factor(settings[name].default),
        }
        for name, value in complete.items()
    }
    # Which quotes text that would be read as a number, as 1e-3 is by one of YAML's versions and not by the other.
    write_atomically(_file(path), (HEADER + OmegaConf.to_yaml(OmegaConf.create(content))).encode())


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
    return Path(path) if Path(path).suffix in (".yaml", ".yml") else Path(path) / NAME
