"""Typed configurations: a dataclass schema, a YAML file and ``key=value`` overrides; an unknown key is an error."""

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_origin

from metricopt_ext.errors import ConfigError, MetricOptError
from metricopt_ext.utils.files import MISFITS, read_bounded
from metricopt_ext.utils.packaged import existing_config
from metricopt_ext.utils.words import brief

# Bounds on a config file, ten times what one of ours has at most. Nodes are counted with aliases replaced by what they
# stand for, which can double them with every line; so can interpolations, whose number bounds the growth to 3^4.
YAML_BYTES = 1 << 18
YAML_NODES = 20_000
YAML_LEVELS = 20
YAML_INTERPOLATIONS = 12

MISSING: Any = "???"  # omegaconf's mark of a value that has no default

Schema = TypeVar("Schema")


def load_config(
    schema: type[Schema], file: str | Path | dict[str, Any] | None, overrides: Sequence[str] = ()
) -> Schema:
    """Read a configuration.

    Args:
        schema: A dataclass whose fields, nested dataclasses included, are the keys, their types and their defaults.
        file: A YAML file, the name of one that comes with the package, or what one would hold; None for the defaults.
        overrides: ``key=value``, with dots for nested keys and for those of a mapping. Text for a key of type ``str``
            is taken as it stands, unless it is quoted; so are the items of a YAML list for one of type ``list[str]``.
            Any other value is YAML.

    Raises:
        ConfigError: A key is unknown or a value has the wrong type; the message names the nearest key.
    """
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import BaseLoader, YAMLError, load

    config = OmegaConf.structured(schema)
    known = known_keys(schema)
    in_file = where = f"{file}: " if isinstance(file, str | Path) else ""
    try:
        if isinstance(file, dict):
            config = OmegaConf.merge(config, file)
        elif file is not None:
            file = existing_config(file)
            check_yaml(file)
            content = OmegaConf.load(file)
            if not isinstance(content, DictConfig):
                raise ConfigError(f"{file} holds a list; it must hold keys with values")
            config = OmegaConf.merge(config, content)
        for override in overrides:
            key, equals, text = override.partition("=")
            if not equals:
                raise ConfigError(f"override {override!r} is not of the form key=value")
            if key not in known and get_origin(known.get(key.rpartition(".")[0])) is not dict:
                raise ConfigError(f"unknown key {key!r}{_nearest(key, known)}")
            where = f"{override}: "
            # YAML would make other text of yes or 007.
            if known.get(key) is str and not re.fullmatch(r"""'.*'|".*\"""", text):
                OmegaConf.update(config, key, _literal(text))
            elif known.get(key) == list[str]:
                OmegaConf.update(config, key, load(text, BaseLoader))
            else:
                config = OmegaConf.merge(config, OmegaConf.from_dotlist([override]))
        where = in_file
        return OmegaConf.to_object(config)  # type: ignore[return-value]
    except MetricOptError:
        raise
    except (OmegaConfBaseException, YAMLError, *MISFITS) as error:
        key = getattr(error, "full_key", None) or ""
        if key and key.partition("[")[0] not in known:
            raise ConfigError(f"{where}unknown key {key!r}{_nearest(key, known)}") from error
        named = f"{key}: " if key and where == in_file else ""
        raise ConfigError(f"{where}{named}{' '.join(str(error).partition('    full_key:')[0].split())}") from error


def check_yaml(file: str | Path) -> None:
    """Reject a YAML file that would grow when it is read: by aliases, by interpolations or by deep nesting.

    Args:
        file: The file, which exists.

    Raises:
        ConfigError: It has more than `YAML_BYTES` bytes, `YAML_INTERPOLATIONS` interpolations, `YAML_LEVELS` levels, or
            `YAML_NODES` nodes once its aliases are replaced by what they stand for; or it is no YAML.
    """
    from yaml import SafeLoader, YAMLError, parse
    from yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent, NodeEvent

    def reject(what: str, most: int) -> NoReturn:
        raise ConfigError(f"{file} has more than {most} {what}, too many for a config file")

    try:
        text = read_bounded(file, YAML_BYTES)
        if text.count(b"${") > YAML_INTERPOLATIONS:
            reject("interpolations, ${...}", YAML_INTERPOLATIONS)
        sizes: dict[str, int] = {}  # nodes below each anchor
        stack: list[tuple[str | None, int]] = [(None, 0)]  # of each collection that is open, its anchor and its nodes
        for event in parse(text, SafeLoader):
            if isinstance(event, CollectionStartEvent):
                stack.append((event.anchor, 1))
            elif isinstance(event, NodeEvent | CollectionEndEvent):
                anchor, size = getattr(event, "anchor", None), 1
                if isinstance(event, AliasEvent):
                    if event.anchor not in sizes:
                        raise ConfigError(f"{file} has an alias *{event.anchor} of a part that holds it, or of none")
                    anchor, size = None, sizes[event.anchor]
                elif isinstance(event, CollectionEndEvent):
                    anchor, size = stack.pop()
                if anchor is not None:
                    sizes[anchor] = size
                stack[-1] = stack[-1][0], stack[-1][1] + size
            if len(stack) > YAML_LEVELS:
                reject("levels", YAML_LEVELS)
            if stack[-1][1] > YAML_NODES:
                reject("nodes", YAML_NODES)
    except (YAMLError, *MISFITS) as error:
        if isinstance(error, MetricOptError):
            raise
        raise ConfigError(f"{file}: {brief(error)}") from error


def default_of(function: Callable[..., Any], argument: str) -> Any:
    """Return the default of a function's argument, for the setting that is passed to it."""
    return inspect.signature(function).parameters[argument].default


def known_keys(schema: Any, prefix: str = "") -> dict[str, Any]:
    """Return all keys of a schema, nested ones with dots, with their types."""
    keys: dict[str, Any] = {}
    for field in fields(schema):
        keys[prefix + field.name] = field.type
        if isinstance(field.type, type) and is_dataclass(field.type):
            keys |= known_keys(field.type, f"{prefix}{field.name}.")
    return keys


def _literal(text: str) -> str:
    """The text with what omegaconf would replace, ``${...}``, escaped."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def _nearest(key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    return f"; did you mean {near[0]!r}?" if near else f"; the choices are {', '.join(sorted(known))}"


@contextmanager
def config_section(section: str) -> Iterator[None]:
    """Turn a ValueError about a setting into a `ConfigError` that names its section of the config file."""
    try:
        yield
    except MetricOptError:
        raise
    except ValueError as error:
        raise ConfigError(f"{section}: {error}") from error
