"""Configurations: what is read arrives typed, and what is wrong is named."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from helpers.refusals import assert_refused
from metricopt_ext.errors import ConfigError
from metricopt_ext.utils.config import as_plain, known_keys, load_config, load_with_origins


@dataclass
class Inner:
    rate: float = 0.5
    names: list[str] = field(default_factory=list)
    pairs: list[list[float]] = field(default_factory=list)
    free: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


@dataclass
class Schema:
    inner: Inner = field(default_factory=Inner)
    count: int = 3
    title: str = "none"
    loud: bool = False


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def error_of(file: Path | None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(Schema, file, overrides)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_values_arrive_typed(tmp_path: Path) -> None:
    file = written(tmp_path, "inner: {rate: 2, names: [a, b]}\ncount: 7\n")
    overrides = ["title=7", "loud=true", "inner.pairs=[[0.0,1.0],[2.5,-1.0]]", "inner.rate=1e-3"]
    config = load_config(Schema, file, overrides)
    assert config == Schema(Inner(0.001, ["a", "b"], [[0.0, 1.0], [2.5, -1.0]]), 7, "7", True)
    assert type(config) is Schema
    assert type(config.inner) is Inner
    assert [type(value) for value in (config.inner.rate, config.title, *config.inner.pairs[0])] == [
        float,
        str,
        float,
        float,
    ]


PLAIN = ["yes", "007", "1.50", "null", "", ";", "|", ",", ">50K", "#1", "a: b", "a=b", "\\t"]


@pytest.mark.parametrize("text", [*PLAIN, "'80s", "'", "5'", "a${b", "${count}", "\\${count}"])
def test_text_is_taken_as_it_stands(text: str) -> None:
    assert load_config(Schema, None, [f"title={text}"]).title == text


def test_a_mapping_s_own_keys_can_be_set_one_by_one(tmp_path: Path) -> None:
    file = written(tmp_path, "inner: {free: {margin: 0.1, kind: a}}\n")
    config = load_config(Schema, file, ["inner.free.margin=2", "inner.free.flags=[1, x]"])
    assert config.inner.free == {"margin": 2, "kind": "a", "flags": [1, "x"]}
    assert error_of(None, "inner.rate.x=1") == "unknown key 'inner.rate.x'; did you mean 'inner.rate'?"
    assert error_of(None, "inner.free=3").startswith("inner.free=3: ")


def test_a_mapping_of_texts_takes_any_name_and_text(tmp_path: Path) -> None:
    file = written(tmp_path, "inner: {texts: {a: '>= 1', 'b[c]': x}}\n")
    given = ["inner.texts.b[c]=>= start - 0.5", "inner.texts.d.e:f=[1", "inner.texts.g=007", "inner.texts.h=a=b${i}"]
    config, origins = load_with_origins(Schema, file, {"command line": given})
    expected = {"a": ">= 1", "b[c]": ">= start - 0.5", "d.e:f": "[1", "g": "007", "h": "a=b${i}"}
    assert config.inner.texts == expected
    assert origins["inner.texts"] == "command line"
    assert load_config(Schema, file).inner.texts == {"a": ">= 1", "b[c]": "x"}


def test_an_unknown_key_in_the_file_names_the_nearest(tmp_path: Path) -> None:
    file = written(tmp_path, "inner: {rat: 3}\n")
    assert error_of(file) == f"{file}: unknown key 'inner.rat'; did you mean 'inner.rate'?"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("count", value) for value in ("many", "1.5", "[1, 2]", "[..]", "{a: 1}", "0..3", "18446744073709551616")),
        *(("inner.rate", value) for value in ("fast", "[0.1]", "{a: 1}")),
        *(("loud", value) for value in ("perhaps", "[true]")),
        *(("inner.names", value) for value in ("a", "{a: 1}", "[[a]]")),
        *(("inner.pairs", value) for value in ("[[a]]", "[1]", "3", "{a: 1}")),
        *(("inner.texts", value) for value in ("a", "[a]")),
        *(("inner", value) for value in ("a", "[a]")),
    ],
)
def test_a_wrong_type_names_key_and_value(tmp_path: Path, key: str, value: str) -> None:
    """In the words of what is to be written, not in those of the library that reads it."""
    message = error_of(None, f"{key}={value}")
    assert message.startswith(f"{key}={value}: ")
    assert not re.search("Config|Union|Cannot|[Ii]nvalid|structured|instance", message)
    outer, _, inner = key.partition(".")
    file = written(tmp_path, f"{outer}: {{{inner}: {value}}}\n" if inner else f"{outer}: {value}\n")
    message = error_of(file)
    assert message.startswith((f"{file}: {key}", f"{key}={value}: "))
    assert re.sub(r"\W", "", value) in re.sub(r"\W", "", message)


@pytest.mark.parametrize("override", ["count", "--count", ""])
def test_an_override_needs_a_value(override: str) -> None:
    assert error_of(None, override) == f"override {override!r} is not of the form key=value"


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    assert error_of(tmp_path / "none.yaml").startswith(f"config file {tmp_path / 'none.yaml'} does not exist, ")
    assert error_of(tmp_path).startswith(f"config file {tmp_path} does not exist, ")
    for text in ("- count\n- title\n", "count: [1\n", b"\xff\xfe\x00count", "inner: 3\n", "plain text\n"):
        file = written(tmp_path, text)
        assert str(file) in error_of(file)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("count: 3\ncount: 4\n", "duplicate key count"),
        (b"loud: 1\ncount: \xff\n", "line 2 is not UTF-8, by the byte 0xff; save it as UTF-8"),
        ("count: !!python/object/apply:os.system [x]\n", "could not determine a constructor"),
        ("count: 1e999\n", "count is '1e999'"),
        ("count: 4294967296\n", "count=4294967296"),
    ],
)
def test_what_is_no_configuration_is_refused_on_one_line(text: str | bytes, said: str, tmp_path: Path) -> None:
    file = written(tmp_path, text)
    error = error_of(file)
    assert error.startswith(f"{file}: ")
    assert said in error
    assert error.isprintable()
    assert len(error) < 500


@dataclass
class Own:
    pass


@dataclass
class Rate(Own):
    rate: float = 0.5


@dataclass
class Steps(Own):
    steps: int = 7


@dataclass
class Chooser:
    CHOICES: ClassVar[tuple[str, ...]] = ("kind", "more")
    kind: str = "rate"
    more: list[str] = field(default_factory=list)
    own: Own = field(default_factory=Rate)
    steps: Steps | None = None

    @classmethod
    def chosen(cls, choices: Mapping[str, Any]) -> "Chooser":
        if choices.get("kind") not in (None, "rate", "steps"):
            raise ConfigError(f"kind={choices['kind']}: rate or steps")
        steps = Steps() if choices.get("more") == ["steps"] else None
        return cls(own=Steps() if choices.get("kind") == "steps" else Rate(), steps=steps)

    def why_absent(self, key: str) -> str:
        return f"{key} is of more=[steps]" if key.startswith("steps") else ""


def test_what_is_chosen_brings_its_keys(tmp_path: Path) -> None:
    assert list(known_keys(load_config(Chooser, None))) == ["kind", "more", "own", "own.rate"]
    file = written(tmp_path, "kind: steps\nmore: [steps]\nown: {steps: 1}\nsteps: {steps: 2}\n")
    assert load_config(Chooser, file) == Chooser("steps", ["steps"], Steps(1), Steps(2))
    assert load_config(Chooser, None, ["steps.steps=3", "more=[steps]"]).steps == Steps(3)  # in any order
    assert as_plain(Chooser()) == {"kind": "rate", "more": [], "own": {"rate": 0.5}}


def test_origins_are_those_of_the_last_that_set_a_key(tmp_path: Path) -> None:
    file = written(tmp_path, "count: 4\ninner: {rate: 0.1, free: {a: 1}}\n")
    groups = {"first": ["count=5", "title=x"], "second": ["inner={rate: 2}", "title=y", "inner.free.b=1"]}
    config, origins = load_with_origins(Schema, file, groups)
    assert (config.count, config.inner.rate, config.title, config.inner.free) == (5, 2.0, "y", {"a": 1, "b": 1})
    assert origins == {"count": "first", "inner.rate": "second", "inner.free": "second", "title": "second"}
    _, origins = load_with_origins(Schema, file, {})
    assert origins == dict.fromkeys(["count", "inner.rate", "inner.free"], "config file")


@pytest.mark.parametrize("where", ["override", "file"])
@pytest.mark.parametrize(
    ("key", "text", "remedy"),
    [("count", "010", "write 10"), ("count", "08", "write 8"), ("inner.rate", "1:30", "base of 60")],
)
def test_numbers_that_yaml_reads_otherwise_are_refused(
    where: str, key: str, text: str, remedy: str, tmp_path: Path
) -> None:
    if where == "override":
        said = error_of(None, f"{key}={text}")
    else:
        section, _, name = key.rpartition(".")
        said = error_of(written(tmp_path, f"{section}: {{{name}: {text}}}" if section else f"{name}: {text}"))
    assert key in said
    assert text in said
    assert remedy in said
    assert "010" in error_of(None, "inner.pairs=[[1,010]]")


def test_text_in_a_file_is_taken_as_it_stands(tmp_path: Path) -> None:
    file = written(tmp_path, "title: 010\ninner: {names: [no, 1.10, yes, 'on'], free: {a: 0.5}}\nloud: yes\n")
    config = load_config(Schema, file)
    assert (config.title, config.inner.names, config.loud) == ("010", ["no", "1.10", "yes", "on"], True)
    assert load_config(Schema, written(tmp_path, "title: yes")).title == "yes"


@pytest.mark.parametrize(
    ("text", "overrides", "names"),
    [
        ("own: {steps: 1}", [], ("config.yaml", "own.steps")),
        ("{}", ["steps.steps=1"], ("steps.steps", "more")),
        ("more: [steps]\nsteps: 3", [], ("config.yaml", "3")),
        ("kind: ${nowhere}", [], ("nowhere",)),
        ("{}", ["kind=best"], ("kind=best",)),
    ],
)
def test_what_is_not_chosen_has_no_keys(
    text: str, overrides: list[str], names: tuple[str, ...], tmp_path: Path
) -> None:
    assert_refused(lambda: load_config(Chooser, written(tmp_path, text), overrides), ConfigError, *names)
