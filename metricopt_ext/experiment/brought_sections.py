"""Sections of the settings that a chosen method brings: a key exists only for what a run reads."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, get_args

from metricopt_ext.errors import ConfigError
from metricopt_ext.utils.config import is_optional_section, known_keys

BROUGHT_BY = "brought by"  # in the metadata of a field: the methods that bring its section
READ_BY = "read by"  # likewise: of those that bring a section, the methods that read this key of it


def brought_by(*methods: str) -> dict[str, tuple[str, ...]]:
    """Return the metadata of a field for a section that is there if one of these is among ``methods``, or else None."""
    return {BROUGHT_BY: methods}


def read_by(*methods: str) -> dict[str, tuple[str, ...]]:
    """Return the metadata of a key that only these read of the methods that bring its section."""
    return {READ_BY: methods}


def refuse_unread(section: Any, name: str, methods: Sequence[str]) -> None:
    """Refuse a key of a section that is set to something else than its default, and that no chosen method reads.

    Args:
        section: The section; None where it is not there.
        name: Its name.
        methods: The chosen methods.

    Raises:
        ConfigError: There is one; the message names the methods that read it.
    """
    for each in fields(section) if section is not None else ():
        readers, value = each.metadata.get(READ_BY, methods), getattr(section, each.name)
        if value != each.default and not {*readers} & {*methods}:
            raise ConfigError(
                f"{name}.{each.name}={value} is a key of {either(readers)} among methods; this run has"
                f" methods=[{','.join(methods)}]: leave it out"
            )


def bring_sections(config: Any, methods: Sequence[str]) -> None:
    """Give a config the sections, with their defaults, that these methods bring and that it lacks."""
    for each in fields(config):
        if BROUGHT_BY in each.metadata:
            if getattr(config, each.name) is None and set(each.metadata[BROUGHT_BY]) & set(methods):
                setattr(config, each.name, section_of(each.type)())
            if (section := getattr(config, each.name)) is not None:
                bring_sections(section, methods)


def section_of(kind: Any) -> Any:
    """Return the class of a section that may be None."""
    return next(each for each in get_args(kind) if each is not type(None))


def methods_with_sections(config: Any) -> list[str]:
    """Return the methods that bring a section of a config's class, each once."""
    return list(dict.fromkeys(name for each in fields(config) for name in each.metadata.get(BROUGHT_BY, ())))


def methods_bringing(config: Any, key: str) -> list[str]:
    """Return the methods that bring a key to a config's class; none if no method does."""
    head, _, rest = key.partition(".")
    for each in fields(config):
        if each.name == head and is_optional_section(each.type):
            section, methods = section_of(each.type), list(each.metadata.get(BROUGHT_BY, ()))
            if not rest or rest in known_keys(section):
                return methods
            return [name for name in methods_bringing(section, rest) if name in methods]
    return []


def either(names: Sequence[str]) -> str:
    """Return names in a list that ends in or."""
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
