"""Typed configurations: a dataclass schema, a YAML file and ``key=value`` overrides; an unknown key is an error."""

import difflib
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from .errors import ConfigError

Schema = TypeVar("Schema")


def load_config(schema: type[Schema], file: str | Path | None, overrides: Sequence[str] = ()) -> Schema:
    """Read a configuration.

    Args:
        schema: A dataclass whose fields, nested dataclasses included, are the keys, their types and their defaults.
        file: A YAML file; None for the defaults.
        overrides: ``key=value``, with dots for nested keys.

    Raises:
        ConfigError: A key is unknown or a value has the wrong type; the message names the nearest key.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    config = OmegaConf.structured(schema)
    known = known_keys(schema)
    try:
        if file is not None:
            if not Path(file).is_file():
                raise ConfigError(f"config file {file} does not exist")
            config = OmegaConf.merge(config, OmegaConf.load(file))
        for override in overrides:
            key, equals, _ = override.partition("=")
            if not equals:
                raise ConfigError(f"override {override!r} is not of the form key=value")
            if key not in known:
                raise ConfigError(f"unknown key {key!r}{_nearest(key, known)}")
            config = OmegaConf.merge(config, OmegaConf.from_dotlist([override]))
        return OmegaConf.to_object(config)  # type: ignore[return-value]
    except (OmegaConfBaseException, YAMLError) as error:
        key = getattr(error, "full_key", None) or ""
        hint = _nearest(key, known) if key and key not in known else ""
        where = f"{file}: " if file is not None else ""
        raise ConfigError(f"{where}{str(error).splitlines()[0]}{hint}") from error


def known_keys(schema: Any, prefix: str = "") -> list[str]:
    """List all keys of a schema, nested ones with dots."""
    keys = []
    for field in fields(schema):
        keys.append(prefix + field.name)
        if isinstance(field.type, type) and is_dataclass(field.type):
            keys += known_keys(field.type, f"{prefix}{field.name}.")
    return keys


def _nearest(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(sorted(known))}"
