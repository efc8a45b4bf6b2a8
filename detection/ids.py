"""Which image or class an id in a file stands for: as it is written, and of a float such as 1.0, its integer."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from metricopt_ext.errors import DataError
from metricopt_ext.utils.words import brief

Id = int | float | str

NAMED = 5  # ids listed in a message


def number(value: Id) -> Id:
    """Return the integer that an id is, or the id if it is none.

    Examples:
        >>> number(1.0), number(1.5), number("1")
        (1, 1.5, '1')
    """
    return int(value) if isinstance(value, float) and value.is_integer() else value


def places_of(known: Sequence[Id], ids: Iterable[Id]) -> dict[Id, int]:
    """Return the place among those that are known of each id of a file, of those that are."""
    table = {number(key): place for place, key in enumerate(known)}
    return {value: table[number(value)] for value in ids if number(value) in table}


def all_places_of(known: Sequence[Id], ids: Mapping[Id, str], key: str, hint: str = "") -> dict[Id, int]:
    """Return the place of each id of a file.

    Args:
        known: The ids that there are.
        ids: Those of the file, each with where it is first found.
        key: What the file calls them.
        hint: What to do, for the message about an unknown one.

    Raises:
        DataError: An id is unknown.
    """
    found = places_of(known, ids)
    unknown = next((value for value in ids if value not in found), None)
    if unknown is not None:
        raise DataError(f"{ids[unknown]} has the unknown {key} {brief(unknown)}; known: {examples(known)}{hint}")
    return found


def checked_id(entry: Any, key: str, where: str) -> Id:
    """Return an entry's id under a key.

    Raises:
        DataError: It is missing, or no number or text.
    """
    value = entry.get(key) if isinstance(entry, dict) else None
    if value is None:
        raise DataError(f"{where} has no {key!r}")
    if type(value) not in (int, float, str):
        raise DataError(f"{where} has the unknown {key} {brief(value)}; it must be a number or text")
    found: Id = value
    return found


def distinct(entries: Iterable[tuple[Any, str]], key: str) -> dict[Id, str]:
    """Return the different ids of entries under a key, each with where it is first found.

    Args:
        entries: The entries, each with where it is.
        key: The key.

    Raises:
        DataError: An id is missing, or no number or text.
    """
    found: dict[Id, str] = {}
    for entry, where in entries:
        found.setdefault(checked_id(entry, key, where), where)
    return found


def examples(known: Iterable[Any]) -> str:
    """Return a few known ids for a message."""
    known = list(known)
    return ", ".join(map(brief, known[:NAMED])) + ", ..." * (len(known) > NAMED)
