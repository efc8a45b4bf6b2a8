"""Sections of the settings that a chosen method brings: a key exists only for what a run reads."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, get_args

from metricopt_ext.utils.config import is_optional_section, known_keys

BROUGHT_BY = "brought by"  # in the metadata of a field: the methods that bring its section


def brought_by(*methods: str) -> dict[str, tuple[str, ...]]:
    """Return the metadata of a field for a section that is there if one of these is among ``methods``, or else None."""
    return {BROUGHT_BY: methods}


def bring_sections(config: Any, methods: Sequence[str]) -> None:
    """Give a config the sections, with their defaults, that these methods bring and that it lacks."""
    for each in fields(config):
        if getattr(config, each.name) is None and set(each.metadata.get(BROUGHT_BY, ())) & set(methods):
            setattr(config, each.name, section_of(each.type)())


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
            own = not rest or rest.partition(".")[0] in known_keys(section_of(each.type))
            return list(each.metadata.get(BROUGHT_BY, ())) if own else []
    return []


def either(names: Sequence[str]) -> str:
    """Return names in a list that ends in or."""
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
