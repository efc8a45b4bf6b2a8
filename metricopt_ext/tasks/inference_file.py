"""``inference.yaml``: which settings of inference a checkpoint is used with, beside it."""

import json
from pathlib import Path
from typing import Any

from metricopt_ext.errors import ConfigError, FileFormatError
from metricopt_ext.tasks.settings import Settings, Value, Values, is_value
from metricopt_ext.utils.config import check_yaml
from metricopt_ext.utils.files import MISFITS, write_atomically
from metricopt_ext.utils.words import brief

INFERENCE = "inference.yaml"
KEYS = ["default", "factor", "value"]
HEADER = "# Settings of inference, for metricopt_ext.load_inference. A factor is on inference time; null: unknown."


def save_inference(path: str | Path, settings: Settings, values: Values, *, factors: bool = True) -> None:
    """Write which values settings have, with their defaults and factors on inference time, as YAML.

    No package is needed for it. Values that are free (`Settings`) are marked as the metric's alone.

    Args:
        path: The file, which ends in .yaml or .yml, or the folder of the checkpoint, which then has ``inference.yaml``.
        settings: The host's settings.
        values: Some of their values; the others have their defaults.
        factors: Whether the settings know their factors on inference time; those of a program do not.

    Raises:
        ValueError: There is no such setting, or it can't have this value.
        OSError: The file can't be written.
    """
    lines, changed = [HEADER], settings.changed(values)
    if free := [name for name, value in settings.free.items() if changed.get(name) == value]:
        lines.append(f"# Free, for the metric alone; for deployment keep the default: {', '.join(map(scalar, free))}")
    for name, value in settings.complete(values).items():
        factor = settings[name].factor(value) if factors else None
        row = {"value": value, "default": settings[name].default, "factor": factor}
        lines.append(f"{scalar(name)}: {{{', '.join(f'{key}: {scalar(each)}' for key, each in row.items())}}}")
    write_atomically(_file(path), "\n".join([*lines, ""]).encode())


def scalar(value: Value | None) -> str:
    """Return a value as YAML of any version reads it, in which a number with an exponent has a point too.

    Examples:
        >>> scalar(1e-05), scalar("no")
        ('1.0e-05', '"no"')
    """
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("e", ".0e") if isinstance(value, float) and "." not in text else text


def load_inference(path: str | Path) -> dict[str, Value]:
    """Return the values of settings by name that `save_inference` wrote, for ``Settings.applied``.

    Args:
        path: The file, which ends in .yaml or .yml, or the folder with ``inference.yaml``.

    Raises:
        FileFormatError: It is missing, or holds something else.
    """
    return {name: value for name, (_, value) in read_inference(path).items()}


def read_inference(path: str | Path) -> dict[str, tuple[Value, Value]]:
    """Return the default and the value of each setting in a file; see `load_inference`."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    file = _file(path)
    if not file.is_file():
        raise FileFormatError(f"{file} does not exist; save_inference writes it")
    try:
        check_yaml(file)
        content: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)  # which refuses a key that is twice
        for name, each in content.items():
            if sorted(each) != KEYS or not (is_value(each["value"]) and is_value(each["default"])):
                raise ValueError(f"{name} is {each}; it must have {', '.join(KEYS)}")
    except (ConfigError, OmegaConfBaseException, YAMLError, *MISFITS) as error:
        raise FileFormatError(f"{file} holds no settings of inference: {brief(error)}") from error
    return {name: (each["default"], each["value"]) for name, each in content.items()}


def _file(path: str | Path) -> Path:
    return Path(path) if Path(path).suffix in (".yaml", ".yml") else Path(path) / INFERENCE
