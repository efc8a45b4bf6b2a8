"""Dataclasses from JSON: values of the declared types come through, all others are named."""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

import pytest

from helpers.refusals import assert_refused
from metricopt_ext.errors import FileFormatError
from metricopt_ext.utils.described import Finite, from_json, read_shaped
from metricopt_ext.utils.files import write_json


class Pair(NamedTuple):
    a: float
    b: float | None


@dataclass(frozen=True)
class Inner:
    name: str
    flag: bool = False

    def __post_init__(self) -> None:
        if self.name == "bad":
            raise ValueError("name is bad")


@dataclass(frozen=True)
class Outer:
    kind: Literal["x", "y"]
    number: int
    inner: Inner | None
    many: dict[str, list[Inner]]
    pair: Pair
    tuples: tuple[str, ...]
    halves: tuple[float, float] | None = None
    rest: list[Any] = field(default_factory=list)


OUTER = Outer("x", 3, Inner("i"), {"k": [Inner("j", True)]}, Pair(1.5, None), ("a", "b"), (0.5, 1.0), [None, {}])
CONTENT = json.loads(json.dumps(asdict(OUTER)))


def test_what_was_written_comes_back() -> None:
    assert from_json(Outer, CONTENT) == OUTER


def test_what_has_a_default_may_be_missing_and_a_whole_number_may_be_a_float() -> None:
    content = {key: value for key, value in CONTENT.items() if key not in ("halves", "rest")}
    found = from_json(Outer, {**content, "inner": None, "pair": [1, 2]})
    assert (found.halves, found.rest, found.inner, found.pair) == (None, [], None, Pair(1, 2))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"kind": "z"}, ("Outer.kind", "'z'", "'x'", "'y'")),
        ({"number": 3.0}, ("Outer.number", "3.0")),
        ({"number": 2**63}, ("Outer.number", "64")),
        ({"inner": {"name": "bad"}}, ("name is bad",)),
        ({"many": {"k": [{"name": "j", "more": 1}]}}, ("Outer.many.k[0]", "name")),
    ],
)
def test_what_has_another_type_is_named(change: dict[str, Any], names: tuple[str, ...]) -> None:
    assert_refused(lambda: from_json(Outer, {**CONTENT, **change}), ValueError, *names)


class Keys(TypedDict):
    size: int
    values: dict[str, list[Finite | None]]
    note: NotRequired[str]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"size": "../3"}, ("keys.size", "../3")),
        ({"values": {"a": [math.nan]}}, ("keys", "a", "nan", "1e+100")),
        ({"values": {"a": [10**30]}}, ("keys.values.a[0]", "64")),
    ],
)
def test_a_file_of_another_shape_is_named(change: dict[str, Any], names: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    write_json(file, {"size": 3, "values": {}} | change)
    assert_refused(lambda: read_shaped(file, Keys, "what it is"), FileFormatError, file, *names)
    write_json(file, {"values": {}})
    assert_refused(lambda: read_shaped(file, Keys, "what it is"), FileFormatError, "keys.json", "size")
