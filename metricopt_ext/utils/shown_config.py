"""A configuration as a YAML file that says where each value comes from: what ``--show-config`` prints."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from metricopt_ext.utils.config import DEFAULT, is_optional_section, literal


def shown_config(config: Any, origins: Mapping[str, str]) -> str:
    """Return all keys with their values, as YAML that makes the same configuration.

    Args:
        config: A configuration.
        origins: Where the values of its keys come from; `DEFAULT` if they are not in it. See
            `config.load_with_origins`.
    """
    return "".join(f"{line}\n" for line in _lines(config, origins))


def _lines(config: Any, origins: Mapping[str, str], prefix: str = "", indent: str = "") -> Iterator[str]:
    for field in fields(config):
        value, key = getattr(config, field.name), f"{prefix}{field.name}"
        if is_dataclass(value):
            yield f"{indent}{field.name}:"
            yield from _lines(value, origins, f"{key}.", f"{indent}  ")
        elif not is_optional_section(field.type):
            yield f"{indent}{field.name}: {in_yaml(value)}  # {origins.get(key, DEFAULT)}"


def in_yaml(value: Any) -> str:
    """Return a value as YAML on one line, as omegaconf reads it."""
    import yaml

    made = yaml.safe_dump([_literal(value)], default_flow_style=True, width=float("inf"), sort_keys=False)[1:-2]
    return json.dumps(_literal(value)) if "\n" in made else made  # JSON is YAML, and always one line


def _literal(value: Any) -> Any:
    if isinstance(value, str):
        return literal(value)
    if isinstance(value, dict):
        return {key: _literal(each) for key, each in value.items()}
    return [_literal(each) for each in value] if isinstance(value, list) else value
