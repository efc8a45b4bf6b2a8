"""Typed configurations: a dataclass schema, a YAML file and ``key=value`` overrides; an unknown key is an error."""

import copy
import difflib
import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from io import StringIO
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, get_args, get_origin

from metricopt_ext.errors import ConfigError, MetricOptError
from metricopt_ext.utils.files import MISFITS
from metricopt_ext.utils.packaged import existing_config
from metricopt_ext.utils.text import text_of
from metricopt_ext.utils.words import brief

MISSING: Any = "???"  # omegaconf's mark of a value that has no default

LARGEST = 2**32  # of whole numbers, seeds among them, of which NumPy takes no larger ones

# Where a value of a config comes from.
DEFAULT, FILE, COMMAND_LINE = "default", "config file", "command line"

Schema = TypeVar("Schema")


class Choosing(Protocol):
    """A schema in which the values of some keys choose which others there are.

    What is not chosen is None in a field of type ``SECTION | None``, and has no keys.

    Attributes:
        CHOICES: The keys that choose.
    """

    CHOICES: ClassVar[tuple[str, ...]]

    @classmethod
    def chosen(cls, choices: Mapping[str, Any]) -> Any:
        """Return the defaults where these choices are made.

        Args:
            choices: What is given of `CHOICES`, of any type.

        Raises:
            ConfigError: There is no such choice.
        """

    def why_absent(self, key: str) -> str:
        """Return which choice would bring a key that this one lacks; an empty text if none does."""


def load_config(
    schema: type[Schema], file: str | Path | dict[str, Any] | None, overrides: Sequence[str] = ()
) -> Schema:
    """Read a configuration.

    Args:
        schema: A dataclass whose fields, nested dataclasses included, are the keys, their types and their defaults; it
            may be a `Choosing` one.
        file: A YAML file, the name of one that comes with the package, or what one would hold; None for the defaults.
        overrides: ``key=value``, with dots for nested keys and for those of a mapping. Text for a key of type ``str``
            is taken as it stands, unless it is quoted; so are the items of a YAML list for one of type ``list[str]``.
            Any other value is YAML.

    Raises:
        ConfigError: A key is unknown or a value has the wrong type; the message names the nearest key.
    """
    return load_with_origins(schema, file, {COMMAND_LINE: overrides})[0]


def load_with_origins(
    schema: type[Schema], file: str | Path | dict[str, Any] | None, overrides: Mapping[str, Sequence[str]]
) -> tuple[Schema, dict[str, str]]:
    """Read a configuration (see `load_config`), and where its values come from.

    Args:
        schema: The keys.
        file: The file, or what one would hold.
        overrides: By what they are to be called, in the order in which they apply.

    Returns:
        The configuration, and for each key that was given `FILE` or the name of the last overrides that set it.

    Raises:
        ConfigError: As from `load_config`.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
    from yaml import BaseLoader, YAMLError, load

    in_file = where = f"{file}: " if isinstance(file, str | Path) else ""
    known = known_keys(schema)
    origins: dict[str, str] = {}
    try:
        content = _content(file)
        defaults = _defaults(schema, content, [each for group in overrides.values() for each in group])
        known = known_keys(defaults)

        def given(content: Mapping[Any, Any], origin: str) -> None:
            for key, value in _leaves(content, known):
                if key not in known:
                    raise ConfigError(f"{where}{_unknown(key, known, defaults)}")
                if is_dataclass(known[key]):
                    raise ConfigError(f"{where}{key} is {brief(value)}; it is a section, whose keys have values")
                check_shape(key, value)
                origins[key] = origin

        def check_shape(key: str, value: Any) -> None:
            if not _shaped(value, known[key]):
                named = f"{key} is {brief(value)}; " if where == in_file else ""
                raise ConfigError(f"{where}{named}it must be {_form_of(known[key])}")

        config = OmegaConf.structured(defaults)
        _read_as_written(content, _texts(file), known)
        given(OmegaConf.to_container(content), FILE)  # type: ignore[arg-type]
        config = OmegaConf.merge(config, content)
        for origin, group in overrides.items():
            for override in group:
                key, equals, text = override.partition("=")
                where = ""
                if not equals:
                    raise ConfigError(f"override {override!r} is not of the form key=value")
                texts = next(
                    (each for each in known if known[each] == dict[str, str] and key.startswith(f"{each}.")), ""
                )
                mappings = [each for each in known if get_origin(known[each]) is dict]
                if key not in known and not texts and not key.startswith(tuple(f"{each}." for each in mappings)):
                    raise ConfigError(_unknown(key, known, defaults))
                where = f"{override}: "
                if texts:  # the name may have dots and brackets, and the text what YAML reads otherwise
                    entry: dict[str, Any] = {key.removeprefix(f"{texts}."): literal(text)}
                    for section in reversed(texts.split(".")):
                        entry = {section: entry}
                    config = OmegaConf.merge(config, entry)
                    origins[texts] = origin
                    continue
                # YAML would make other text of yes or 007.
                if known.get(key) is str and not re.fullmatch(r"""'.*'|".*\"""", text):
                    OmegaConf.update(config, key, literal(text))
                    origins[key] = origin
                elif known.get(key) == list[str]:
                    check_shape(key, items := load(text, BaseLoader))
                    OmegaConf.update(config, key, items)
                    origins[key] = origin
                else:
                    if known.get(key) is not str:
                        _check_numbers(load(text, BaseLoader), override)
                    parsed = OmegaConf.from_dotlist([override])
                    given(OmegaConf.to_container(parsed), origin)  # type: ignore[arg-type]
                    config = OmegaConf.merge(config, parsed)
        where, found = in_file, OmegaConf.to_object(config)
        numbers = {key: attrgetter(key)(found) for key, kind in known.items() if kind in (int, int | None)}
        for key, number in numbers.items():
            if number is not None and abs(number) >= LARGEST:
                raise ConfigError(f"{in_file if origins[key] == FILE else ''}{key}={number}: it must be below 2^32")
        return found, origins  # type: ignore[return-value]
    except MetricOptError:
        raise
    except (OmegaConfBaseException, YAMLError, *MISFITS) as error:
        key = getattr(error, "full_key", None) or ""
        if key and key.partition("[")[0] not in known:
            raise ConfigError(f"{where}{_unknown(key, known, None)}") from error
        place = key if where == in_file else ""
        written = _within(_texts(file), place.partition("[")[0]) if place else None
        named = "" if not place else f"{place}: " if written is None else f"{place} is {brief(written)}; "
        said = " ".join(str(error).partition("    full_key:")[0].split())
        if isinstance(error, MissingMandatoryValue):
            said = "it has no value"
        elif form := _form_of(known.get(key.partition("[")[0])):
            said = f"it must be {form}"
        raise ConfigError(f"{where}{named}{said}") from error


def _shaped(value: Any, kind: Any) -> bool:
    """Whether lists and mappings are where a type has them, and single values elsewhere."""
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_shaped(each, get_args(kind)[0]) for each in value)
    return (
        isinstance(value, Mapping)
        if get_origin(kind) is dict
        else not (_form_of(kind) and isinstance(value, list | Mapping))
    )


def _form_of(kind: Any) -> str:
    """Say of which form a value of a type is written; empty where that is more than a word."""
    if get_origin(kind) is dict:
        return "names with values, in braces: {A: B}"
    if get_origin(kind) in (list, tuple):
        return f"a list, in brackets: [A, B], each {_form_of(get_args(kind)[0]) or 'a value'}"
    kinds = [each for each in get_args(kind) or (kind,) if each is not type(None)]
    named = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return " or ".join(named[each] for each in kinds) if set(kinds) <= set(named) else ""


def _content(file: str | Path | dict[str, Any] | None) -> Any:
    from omegaconf import OmegaConf

    if isinstance(file, dict) or file is None:
        return OmegaConf.create(file or {})
    file = existing_config(file)
    check_yaml(file)
    return OmegaConf.load(StringIO(text_of(Path(file).read_bytes())))


def _texts(file: str | Path | dict[str, Any] | None) -> Any:
    """Return a file's content with every scalar as the text that it is written as; empty without a file."""
    from yaml import BaseLoader, load

    if isinstance(file, dict) or file is None:
        return {}
    return load(text_of(existing_config(file).read_bytes()), BaseLoader) or {}


def _read_as_written(content: Any, texts: Any, known: Mapping[str, Any]) -> None:
    """Have text be what a file says, where YAML would make a number or a truth value of it, and check its numbers.

    Args:
        content: The file's content, of which text may be replaced.
        texts: The same from `_texts`.
        known: The type of each key.
    """
    from omegaconf import OmegaConf

    for key, value in _leaves(OmegaConf.to_container(content), known):  # type: ignore[arg-type]
        text = _within(texts, key)
        alike = isinstance(text, str) if isinstance(value, bool | int | float) else isinstance(value, list)
        if known.get(key) in (str, list[str]) and alike and type(text) in (str, list):
            OmegaConf.update(content, key, text)
        elif known.get(key) is not str:
            _check_numbers(text, key)


def _within(texts: Any, key: str) -> Any:
    """Return what nested dictionaries have under a key with dots, None if nothing."""
    for part in key.split("."):
        texts = texts.get(part) if isinstance(texts, dict) else None
    return texts


def _check_numbers(texts: Any, name: str) -> None:
    """Refuse numbers that YAML reads otherwise than they look: 010 as 8, 1:30 as 90.

    Args:
        texts: A scalar's text, or lists and dicts of them.
        name: What messages begin with.

    Raises:
        ConfigError: There is one; the message says how to write it.
    """
    if isinstance(texts, dict | list):
        for each in texts.values() if isinstance(texts, dict) else texts:
            _check_numbers(each, name)
    elif isinstance(texts, str) and re.fullmatch(r"[-+]?0[\d_]*\d", texts):
        raise ConfigError(f"{name}: {texts} begins with 0, as octal numbers do; write {int(texts)}")
    elif isinstance(texts, str) and re.fullmatch(r"[-+]?\d[\d_]*(:[0-5]?\d)+(\.\d*)?", texts):
        raise ConfigError(f"{name}: {texts} would be read to the base of 60; write a plain number")


def _defaults(schema: Any, content: Any, overrides: Sequence[str]) -> Any:
    """Return what holds the defaults: the schema, or what its choices make of it."""
    from omegaconf import OmegaConf

    keys: tuple[str, ...] = getattr(schema, "CHOICES", ())
    if not keys:
        return schema
    first = {*keys, *(key.partition(".")[0] for key in keys)}  # whole sections, in braces
    pairs = [each.partition("=") for each in overrides]
    choosing = ["".join(each) for each in pairs if each[1] and each[0] in (keys if each[2][:1] != "{" else first)]
    merged = OmegaConf.to_container(OmegaConf.merge(content, OmegaConf.from_dotlist(choosing)))
    found = {key: _within(merged, key) for key in keys}
    return schema.chosen({key: value for key, value in found.items() if value is not None})


def _leaves(content: Mapping[Any, Any], known: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of a content that hold no further ones, nested ones with dots, and their values."""
    for name, value in content.items():
        key = f"{prefix}{name}"
        inner = is_dataclass(known[key]) if key in known else bool(value)
        if inner and isinstance(value, Mapping):
            yield from _leaves(value, known, f"{key}.")
        else:
            yield key, value


def default_of(function: Callable[..., Any], argument: str) -> Any:
    """Return the default of a function's argument, for the setting that is passed to it."""
    return inspect.signature(function).parameters[argument].default


def known_keys(schema: Any, prefix: str = "") -> dict[str, Any]:
    """Return all keys of a schema, or of a configuration, nested ones with dots, with their types."""
    keys: dict[str, Any] = {}
    for field in fields(schema):
        inner = field.type if isinstance(schema, type) else getattr(schema, field.name)
        if is_dataclass(inner):
            keys[prefix + field.name] = inner if isinstance(inner, type) else type(inner)
            keys |= known_keys(inner, f"{prefix}{field.name}.")
        elif not is_optional_section(field.type):
            keys[prefix + field.name] = field.type
    return keys


def is_optional_section(kind: Any) -> bool:
    """Tell whether a field's type is that of a section that may be None."""
    return isinstance(kind, types.UnionType) and any(is_dataclass(each) for each in get_args(kind))


def as_plain(config: Any) -> dict[str, Any]:
    """Return a configuration as nested dictionaries, without the sections that are not chosen."""
    plain: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            plain[field.name] = as_plain(value)
        elif not is_optional_section(field.type):
            plain[field.name] = copy.deepcopy(value)
    return plain


def literal(text: str) -> str:
    """Return text with what omegaconf would replace, ``${...}``, escaped."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def _unknown(key: str, known: Iterable[str], defaults: Any) -> str:
    absent: Callable[[str], str] = getattr(defaults, "why_absent", lambda key: "")
    return absent(key) or f"unknown key {key!r}{nearest(key, known)}"


def nearest(key: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown key: the nearest one, or else all."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    return f"; did you mean {near[0]!r}?" if near else f"; the choices are {', '.join(sorted(known))}"


def check_yaml(file: str | Path) -> None:
    """Reject a YAML file that does not hold keys.

    Args:
        file: The file, which exists.

    Raises:
        ConfigError: It holds a single value, a list, several documents or nothing; or it is no YAML.
    """
    from yaml import MappingNode, SafeLoader, YAMLError, compose_all

    try:
        roots = list(compose_all(text_of(Path(file).read_bytes()), SafeLoader))
    except (YAMLError, *MISFITS) as error:
        raise ConfigError(f"{file}: {brief(error)}") from error
    if len(roots) != 1 or not isinstance(roots[0], MappingNode):
        raise ConfigError(f"{file} holds {_instead_of_keys(roots)}; it must hold keys with values")


def _instead_of_keys(roots: Sequence[Any]) -> str:
    """Say what a YAML file holds that has these documents."""
    if len(roots) != 1:
        return f"{len(roots)} documents" if roots else "nothing"
    return "a list" if isinstance(roots[0].value, list) else f"the single value {brief(roots[0].value)}"


@contextmanager
def config_section(section: str) -> Iterator[None]:
    """Turn a ValueError about a setting into a `ConfigError` that names its section of the config file."""
    try:
        yield
    except MetricOptError:
        raise
    except ValueError as error:
        raise ConfigError(f"{section}: {error}") from error
