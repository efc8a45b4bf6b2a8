"""Which image or class an id in a file stands for, where it is not written as the set writes it.

One way to read ids is chosen for a whole file, the first of these by which each id stands for one image or class:
as written; by its number (``1``, ``1.0``, ``"1"`` and ``"0001"``); for images by the name of the file, with or without
folder and suffix; for classes by their names, or counted from 0, if 0 occurs and no class of the set has this id.
Where an id is not as written, and two ways give different images or classes, it is refused.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from metricopt_ext.errors import DataError
from metricopt_ext.utils.words import brief

Id = int | float | str
Places = dict[Id, int]  # of the image or class that each id of a file stands for
Way = tuple[str, Callable[[Id], Id], dict[Id, set[int]]]  # what it reads, an id's form in it, and the places of a form

NAMED = 5  # ids listed in a message
NUMBER = re.compile(r"([0-9]{1,30})(?:\.0*)?")
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
FROM_0 = "counted from 0"
FROM_1 = "counted from 1"


def number(value: Id) -> Id:
    """Return the integer that an id is, or the id if it is none.

    Examples:
        >>> number(1.0), number("0001"), number("1.0"), number("a1")
        (1, 1, 1, 'a1')
    """
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, str) and (match := NUMBER.fullmatch(value)):
        return int(match[1])
    return value


def file_name(value: Id) -> Id:
    """Return the last part of a path."""
    return value.replace("\\", "/").rsplit("/", 1)[-1] if isinstance(value, str) else value


def stem(value: Id) -> Id:
    """Return the last part of a path, without the suffix of an image.

    Examples:
        >>> stem("images/0001.JPG"), stem("v1.2"), stem(1)
        ('0001', 'v1.2', 1)
    """
    name = file_name(value)
    if not isinstance(name, str):
        return name
    start, dot, suffix = name.rpartition(".")
    return start if dot + suffix.lower() in SUFFIXES else name


def written_ways(ids: Sequence[Id]) -> list[Way]:
    """Return the ways to read ids that are written as in the set, or as another type of number."""
    return [_way(what, form, [[key] for key in ids]) for what, form in (("the id", _same), ("the number", number))]


def image_ways(ids: Sequence[Id], names: Sequence[str]) -> list[Way]:
    """Return the ways to read the id of an image, by the images' own ids and the names of their files, or empty."""
    # A string is taken for a file's name too: VOC's ids are such names without the suffix.
    files = [[name for name in each if name and isinstance(name, str)] for each in zip(ids, names, strict=True)]
    forms = (_same, file_name, stem, lambda value: number(stem(value)))
    return [*written_ways(ids), *(_way("the name of the file", form, files) for form in forms)]


def class_ways(category_ids: Sequence[int | str], classes: Sequence[str]) -> list[Way]:
    """Return the ways to read the id of a class, which may be its name."""
    return [*written_ways(category_ids), _way("the name", str, [[name] for name in classes])]


def counting(category_ids: Sequence[int | str], first: int) -> list[Way]:
    """Return the way to read ids that count the classes from 0 or 1, in the set's order; none if its own do so."""
    own = [number(key) for key in category_ids]
    taken = own == list(range(1, len(own) + 1)) if first else 0 in own
    return [] if taken else [_way((FROM_0, FROM_1)[first], number, [[place + first] for place in range(len(own))])]


def choose(ways: Sequence[Way], ids: Mapping[Id, str], key: str, hint: str) -> Places:
    """Return the places of all ids of a file.

    Args:
        ways: The ways to read them, the one as written first.
        ids: The ids, each with where it is first found.
        key: What the file calls them.
        hint: What to do, for the message about an unknown one.

    Raises:
        DataError: No way knows every id, or one that is not as written has several meanings.
    """
    readings = [(way[0], reading) for way in ways if (reading := known_of(way, ids)).keys() == ids.keys()]
    if not readings:
        raise DataError(_unknown(ways, ids, key, hint))
    (first, chosen), *others = readings
    if known_of(ways[0], ids) != chosen:
        for what, other in others:
            value = next((value for value in ids if other[value] != chosen[value]), None)
            if value is not None:
                known = _known(ways)
                raise DataError(
                    f"{ids[value]} has the {key} {brief(value)}, which is {first} of {brief(known[chosen[value]])} and"
                    f" {what} of {brief(known[other[value]])}; write it as the annotations do"
                )
    return chosen


def other_readings(ways: Sequence[Way], ids: Iterable[Id], chosen: Places) -> list[tuple[str, Places]]:
    """Return the other readings of all ids that are chosen, each with what it reads."""
    ids = set(ids)
    readings = [(way[0], known_of(way, ids)) for way in ways]
    return [(what, other) for what, other in readings if chosen.keys() <= other.keys() and other != chosen]


def known_of(way: Way, ids: Iterable[Id]) -> Places:
    """Return the places of those ids that stand for one image or class."""
    _, form, table = way
    found = {value: table.get(form(value), ()) for value in ids}
    return {value: next(iter(places)) for value, places in found.items() if len(places) == 1}


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


def _unknown(ways: Sequence[Way], ids: Mapping[Id, str], key: str, hint: str) -> str:
    """The message about the first id that has no meaning, or several, in the way that knows most."""
    best = max(ways, key=lambda way: len(known_of(way, ids)))  # the first of equals
    value = next(value for value in ids if value not in known_of(best, ids))
    known = _known(ways)
    for _, form, table in ways:
        places = sorted(table.get(form(value), ()))
        if len(places) > 1:
            meanings = " or ".join(brief(known[place]) for place in places[:NAMED])
            return f"{ids[value]} has the {key} {brief(value)}, which may be {meanings}; write it as the annotations do"
    return f"{ids[value]} has the unknown {key} {brief(value)}; known: {examples(known.values())}{hint}"


def _known(ways: Sequence[Way]) -> dict[int, Id]:
    """The ids as the set writes them, by their places."""
    return dict(sorted((place, key) for key, places in ways[0][2].items() for place in places))


def _way(what: str, form: Callable[[Id], Id], names: Sequence[Iterable[Id]]) -> Way:
    table: dict[Id, set[int]] = defaultdict(set)
    for place, each in enumerate(names):
        for name in each:
            table[form(name)].add(place)
    return what, form, dict(table)


def _same(value: Id) -> Id:
    return value
