"""Dataclasses from parsed JSON, whose values must be of the types that the fields declare."""

import types
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, NewType, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

from metricopt_ext.errors import FileFormatError
from metricopt_ext.utils.files import read_json
from metricopt_ext.utils.words import brief, nearest

T = TypeVar("T")

# A field's type: neither NaN nor infinite, which JSON as Python reads it may hold, nor so large that a square would be.
Finite = NewType("Finite", float)
LARGEST = 1e100


def from_json(kind: type[T], content: Any) -> T:
    """Make a dataclass, or a NamedTuple, of what JSON holds of one.

    A whole number may stand for a float, which is finite if its field is `Finite`. A NamedTuple is a list, which may
    leave out defaults; a tuple is one, too. Of a TypedDict other keys are left as they are.

    Args:
        kind: The class; its fields may be of bool, int, float, str, None, lists, tuples, dicts by str, TypedDicts,
            and such classes.
        content: What was parsed.

    Raises:
        ValueError: A field is missing, unknown, or of another type, or the class rejects its value.
    """
    value: T = _typed(kind, content, kind.__name__)
    return value


def changed(made: T, content: Mapping[str, Any], but: Collection[str] = ()) -> T:
    """Return a dataclass with other values of some fields, whose types are checked as those of `from_json`.

    Args:
        made: The dataclass; of a field that holds another one, what is not given stays as it is.
        content: The values by name.
        but: Names of fields that may not be given.

    Raises:
        ValueError: A field is unknown, a value is of another type, or the class rejects it.
    """
    known = {each.name: getattr(made, each.name) for each in fields(made) if each.name not in but}  # type: ignore[arg-type]
    hints, values = get_type_hints(type(made)), {}
    for key, value in content.items():
        if key not in known:
            raise ValueError(f"there is no {key!r}{nearest(key, list(known))}")
        own = known[key]
        values[key] = changed(own, _dict(value, key)) if is_dataclass(own) else _typed(hints[key], value, key)
    return replace(made, **values)  # type: ignore[type-var]


def read_shaped(path: str | Path, shape: Any, what: str) -> dict[str, Any]:
    """Read a JSON file whose values are of the types of a TypedDict, or of another shape.

    Args:
        path: The file.
        shape: The TypedDict, or a type as a field may have.
        what: What the file should be, for messages, e.g. ``"a row of a comparison"``.

    Returns:
        What was parsed, as it is.

    Raises:
        FileFormatError: The file is not JSON, or holds something else.
    """
    content: dict[str, Any] = read_json(path)
    try:
        _typed(shape, content, Path(path).stem)
    except ValueError as error:
        raise FileFormatError(f"{path} is not {what}: {brief(error)}; delete it to regenerate it") from error
    return content


def _typed(hint: Any, value: Any, name: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if hint is Finite:
        fits = abs(_scalar(float, value, name)) <= LARGEST  # NaN is not
        return value if fits else _reject(name, value, f"a finite number of at most {LARGEST:.0e}")
    if origin in (Union, types.UnionType):
        if value is None and types.NoneType in arguments:
            return None
        (hint,) = (each for each in arguments if each is not types.NoneType)
        return _typed(hint, value, name)
    if origin is Literal:
        fits = any(value == each and type(value) is type(each) for each in arguments)
        return value if fits else _reject(name, value, f"one of {', '.join(map(repr, arguments))}")
    if origin is tuple and arguments[-1] is not ...:
        if len(_list(value, name)) != len(arguments):
            _reject(name, value, f"a list of {len(arguments)} values")
        return tuple(
            _typed(each, item, f"{name}[{i}]") for i, (each, item) in enumerate(zip(arguments, value, strict=True))
        )
    if origin in (list, tuple):
        return origin(_typed(arguments[0], each, f"{name}[{i}]") for i, each in enumerate(_list(value, name)))
    if origin is dict:
        return {key: _typed(arguments[1], each, f"{name}.{key}") for key, each in _dict(value, name).items()}
    if is_typeddict(hint):
        return _of_keys(hint, _dict(value, name), name)
    if is_dataclass(hint):
        return _of_fields(hint, _dict(value, name), name)
    if issubclass(hint, tuple):  # a NamedTuple
        types_of, given = tuple(get_type_hints(hint).values()), _list(value, name)
        left_out = list(getattr(hint, "_field_defaults", {}).values())[len(given) - len(types_of) :]
        whole = [*given, *left_out] if len(given) < len(types_of) else given
        return hint(*_typed(tuple[types_of], whole, name))  # type: ignore[valid-type]
    return _scalar(hint, value, name)


def _of_fields(kind: Any, content: Mapping[str, Any], name: str) -> Any:
    hints = get_type_hints(kind)
    known = {field.name: field for field in fields(kind)}
    for key in content:
        if key not in known:
            _reject(name, key, f"no key but {', '.join(known)}")
    values = {}
    for key, field in known.items():
        if key in content:
            values[key] = _typed(hints[key], content[key], f"{name}.{key}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{name} has no {key!r}")
    return kind(**values)


def _of_keys(kind: Any, content: dict[str, Any], name: str) -> Any:
    for key in sorted(kind.__required_keys__ - content.keys()):
        raise ValueError(f"{name} has no {key!r}")
    hints = get_type_hints(kind)
    return {key: _typed(hints[key], each, f"{name}.{key}") if key in hints else each for key, each in content.items()}


def _scalar(hint: type, value: Any, name: str) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if type(value) is not hint and not (hint is float and number):
        _reject(name, value, f"of type {hint.__name__}")
    if type(value) is int and not -(2**63) <= value < 2**63:
        _reject(name, value, "an integer of 64 bits")
    return value


def _list(value: Any, name: str) -> Any:
    return value if isinstance(value, list) else _reject(name, value, "a list")


def _dict(value: Any, name: str) -> Any:
    return value if isinstance(value, dict) else _reject(name, value, "a JSON object")


def _reject(name: str, value: Any, right: str) -> Any:
    raise ValueError(f"{name} is {brief(value)}; it must be {right}")
