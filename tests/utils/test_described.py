"""Dataclasses from JSON: values of the declared types come through, all others are named."""

import json
import math
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

import pytest

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
    ("change", "message"),
    [
        ({"kind": "z"}, r"Outer.kind.*'z'.*one of 'x', 'y'"),
        ({"kind": ["x"]}, r"Outer.kind.*\['x'\]; it must be one of"),
        ({"number": 3.0}, r"Outer.number.*3.0.*type int"),
        ({"number": True}, r"Outer.number.*type int"),
        ({"number": 2**63}, r"Outer.number.*integer of 64 bits"),
        ({"inner": []}, r"Outer.inner.*\[\].*JSON object"),
        ({"inner": {}}, "Outer.inner has no 'name'"),
        ({"inner": {"name": "bad"}}, "name is bad"),
        ({"inner": {"name": None}}, r"Outer.inner.name.*type str"),
        ({"many": {"k": [{"name": "j", "more": 1}]}}, r"Outer.many.k\[0\].*key but name, flag"),
        ({"pair": [1]}, r"Outer.pair.*\[1\].*list of 2 values"),
        ({"pair": [10**400, 1]}, r"Outer.pair\[0\].*integer of 64 bits"),
        ({"pair": ["1", 1]}, r"Outer.pair\[0\].*type float"),
        ({"halves": [1, 2, 3]}, r"Outer.halves.*\[1, 2.*list of 2 values"),
        ({"tuples": "ab"}, "Outer.tuples is 'ab'; it must be a list"),
    ],
)
def test_what_has_another_type_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(Outer, {**CONTENT, **change})


class Keys(TypedDict):
    size: int
    values: dict[str, list[Finite | None]]
    note: NotRequired[str]


def test_a_file_is_read_as_it_is_if_it_has_the_shape(tmp_path: Path) -> None:
    content = {"size": 3, "values": {"a": [1, 0.5, None]}, "more": [{}]}
    write_json(tmp_path / "keys.json", content)
    assert read_shaped(tmp_path / "keys.json", Keys, "keys") == content


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": "../3"}, r"keys.size is '\.\./3'.*of type int"),
        ({"size": 3.0}, "keys.size is 3.0.*of type int"),
        ({"values": [1]}, r"keys.values is \[1\].*JSON object"),
        ({"values": {"a": {}}}, r"keys.values.a is {}; it must be a list"),
        ({"values": {"a": [math.nan]}}, r"keys.*a\[0\] is nan.*1e\+100"),
        ({"values": {"a": [-math.inf]}}, r"keys.*a\[0\] is -inf.*1e\+100"),
        ({"values": {"a": [10**30]}}, r"keys.values.a\[0\] is 10*.*64 bits"),
        ({"values": {"a": ["1"]}}, r"keys.*a\[0\] is '1'.*type float"),
        ({"note": None}, "keys.note is None.*of type str"),
    ],
)
def test_a_file_of_another_shape_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    write_json(file, {"size": 3, "values": {}} | change)
    with pytest.raises(FileFormatError, match=rf"^{re.escape(str(file))} is not what it is: {message}; delete it to"):
        read_shaped(file, Keys, "what it is")
    write_json(file, {"values": {}})
    with pytest.raises(FileFormatError, match=r"keys\.json.*keys has no 'size'; delete"):
        read_shaped(file, Keys, "what it is")
