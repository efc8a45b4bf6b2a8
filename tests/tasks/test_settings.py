"""Settings of inference: what they may be, on which scale, and how they are put to use."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from helpers.refusals import assert_named, assert_refused, having
from metricopt_ext.errors import FileFormatError
from metricopt_ext.tasks.inference_file import load_inference, save_inference, scalar
from metricopt_ext.tasks.settings import Setting, Settings

SIZE = Setting("size", values=(320, 400, 480), default=400, inference=lambda size: (float(size) / 400) ** 2)
FLIP = Setting("flip", values=(False, True), default=False, inference=2.0)
THRESHOLD = Setting("threshold", 0.01, 0.95, scale="logit", default=0.05)


def noting(seen: list[Any]) -> Any:
    """An `apply` that keeps what it is told, and when it ends."""

    @contextmanager
    def apply(values: dict[str, Any]) -> Iterator[None]:
        seen.append(values)
        try:
            yield
        finally:
            seen.append("back")

    return apply


# --- One setting ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "low", "high", "middle"),
    [("linear", -1.0, 3.0, 1.0), ("log", 0.01, 100.0, 1.0), ("logit", 0.1, 0.9, 0.5), ("logit", 0.2, 0.5, 1 / 3)],
)
def test_an_interval_is_even_on_its_scale(scale: Any, low: float, high: float, middle: float) -> None:
    setting = Setting("k", low, high, scale=scale, default=low)
    assert (setting.at(0.0), setting.at(1.0)) == (low, high)
    assert setting.at(0.5) == pytest.approx(middle, abs=1e-12)
    for t in (0.0, 0.17, 0.5, 1.0):
        assert setting.share(setting.at(t)) == pytest.approx(t, abs=1e-12)
        assert setting.own(setting.at(t)) == setting.at(t)


def test_between_integers_it_is_an_integer() -> None:
    k = Setting("k", 1, 100, scale="log", default=10)
    found = [k.at(t) for t in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert found == [1, 3, 10, 32, 100]
    assert all(isinstance(each, int) for each in found)
    assert_refused(lambda: k.own(10.0), ValueError, "10.0", "integer", "1", "100")
    assert k.said == "an integer from 1 to 100"
    assert Setting("k", 1, 100, default=10.0).at(0.5) == 50.5


# --- Several -------------------------------------------------------------------------------------------------------


def test_settings_are_applied_with_a_value_for_each_and_taken_back() -> None:
    seen: list[Any] = []
    settings = Settings([SIZE, FLIP], noting(seen))
    with settings.applied({"flip": True}) as values:
        assert values == {"size": 400, "flip": True}
        assert seen == [values]
    assert seen == [values, "back"]
    with pytest.raises(KeyError), settings.applied({}):
        raise KeyError
    assert seen[2:] == [{"size": 400, "flip": False}, "back"]
    assert settings.defaults == {"size": 400, "flip": False}
    assert settings.changed({"size": 400, "flip": True}) == {"flip": True}


def test_the_factor_is_the_product_of_the_settings_own() -> None:
    settings = Settings([SIZE, FLIP, THRESHOLD], noting([]))
    assert settings.factor({}) == 1.0
    assert settings.factor({"size": 480, "flip": True, "threshold": 0.5}) == pytest.approx(2.88)


@pytest.mark.parametrize("apply", [lambda values: None, lambda values: (yield)])
def test_what_applies_nothing_is_refused_with_the_remedy(apply: Any) -> None:
    settings = Settings([SIZE], apply)
    with pytest.raises(TypeError) as caught, settings.applied({}):
        pass
    assert_named(caught, "contextlib.contextmanager")


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"sise": 400}, ("sise", "size")),
        ({"size": 401}, ("size", "401", "320", "400", "480")),
        ({"flip": 1}, ("flip", "1", "False", "True")),
        ({"threshold": 0.0}, ("threshold", "0.0", "0.01", "0.95")),
        ({"threshold": "high"}, ("threshold", "high", "0.01", "0.95")),
    ],
)
def test_values_that_can_not_be_are_refused(values: dict[str, Any], names: tuple[str, ...]) -> None:
    settings, seen = Settings([SIZE, FLIP, THRESHOLD], noting([])), []
    with pytest.raises(ValueError, match=having(*names)), settings.applied(values):
        seen.append(values)
    assert not seen
    assert_refused(lambda: Settings([SIZE, FLIP, THRESHOLD], noting([]), free=values), ValueError, *names)
    assert_refused(lambda: Settings([SIZE, FLIP, THRESHOLD], noting([]), presets={"mine": values}), ValueError, *names)


# --- Some of them, within limits -----------------------------------------------------------------------------------


def test_limits_are_another_objects() -> None:
    settings = Settings([SIZE, FLIP], noting([]), free={"size": 320})
    other = settings.limited(inference=2.0, queries=4, free={}, alone=["flip"], presets={"both": {"flip": True}})
    assert (other.inference, other.queries, other.free, other.alone) == (2.0, 4, {}, ("flip",))
    assert list(other.presets) == ["both"]
    assert (settings.inference, settings.queries, settings.free) == (1.0, 10, {"size": 320})
    assert (settings.alone, settings.presets) == (("size", "flip"), {})
    assert other.affords({"flip": True})
    assert not settings.affords({"flip": True})
    assert settings.limited().free == {"size": 320}
    assert_refused(lambda: settings.limited(inference=0.5), ValueError, "inference", "0.5", "1")


def test_some_alone_leave_the_others_as_they_are() -> None:
    seen: list[Any] = []
    presets = {"both": {"size": 480, "flip": True}, "one": {"flip": True}}
    settings = Settings([SIZE, FLIP, THRESHOLD], noting(seen), presets=presets)
    alone = settings.only(["flip"])
    assert (alone.alone, alone.presets) == (("flip",), {"one": {"flip": True}})
    with alone.applied({"flip": True}) as values:
        assert values == alone.complete({"flip": True}) == {"size": 400, "flip": True, "threshold": 0.05}
    assert seen == [values, "back"]
    assert settings.only(["flip", "size"]).alone == ("flip", "size")
    assert list(settings.only(["flip", "size"]).presets) == ["both", "one"]
    assert_refused(lambda: settings.only(["flop"]), ValueError, "flop", "flip")


def test_an_apply_that_takes_the_model_gets_the_one_that_is_judged() -> None:
    seen: list[Any] = []

    @contextmanager
    def apply(values: dict[str, Any], model: Any = "mine") -> Iterator[None]:
        seen.append(model)
        yield

    settings, model = Settings([FLIP], apply), object()
    with settings.applied({}), settings.applied({}, model):  # type: ignore[arg-type]
        assert seen == ["mine", model]


def test_what_a_host_can_express_is_set_once_and_what_is_free_is_not() -> None:
    model, given = object(), list[Any]()

    def set_on(model: Any, values: dict[str, Any]) -> str:
        given.append((model, values))
        return "the rest"

    settings = Settings([SIZE, FLIP, THRESHOLD], noting([]), free={"threshold": 0.5}, set_on=set_on)
    assert settings.set_on(model, {"threshold": 0.5, "size": 400}) == ""
    said = Settings([SIZE, FLIP], noting([])).set_on(model, {"size": 320, "flip": True})
    assert "{'size': 320, 'flip': True}" in said  # what no model holds is told with code
    assert given == []
    assert settings.set_on(model, {"threshold": 0.5, "size": 320, "flip": False}) == "the rest"
    assert given == [(model, {"size": 320})]
    assert_refused(lambda: settings.set_on(model, {"size": 320}), ValueError, "settings")
    assert_refused(settings.applied({}).__enter__, ValueError, "settings")
    assert_refused(lambda: settings.set_on(model, {"sizes": 320}), ValueError, "sizes")


def test_what_is_free_must_take_no_longer_than_it_may() -> None:
    names = ("free", "size", "480", "inference", "1.44", "preset")
    assert_refused(lambda: Settings([SIZE, FLIP], noting([]), free={"size": 480}), ValueError, *names)
    settings = Settings([SIZE, FLIP], noting([]), free={"size": 480}, inference=1.5)
    assert settings.first == {"size": 480, "flip": False}
    assert_refused(lambda: settings.limited(inference=1.0), ValueError, *names)
    assert settings.limited(inference=1.0, free={}).first == {"size": 400, "flip": False}


# --- Refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "names"),
    [
        ({"low": 1.0, "high": 0.0}, ValueError, ("1.0",)),
        ({"low": 0.0, "high": 1.0, "scale": "log"}, ValueError, ("0.0", "scale")),
        ({"low": 0.0, "high": 0.4}, ValueError, ("0.5", "0.4")),
        ({"low": 0.0, "high": 1.0, "values": (0.5, 1.0)}, ValueError, ("values",)),
        ({"values": (0.5, 0.5)}, ValueError, ("values",)),
        ({"values": "0.5"}, ValueError, ("values", "0.5")),
        ({"values": (0.5, Decimal(1))}, ValueError, ("Decimal",)),
        ({"values": (0.5, math.inf)}, ValueError, ("inf",)),
        ({"values": (0.5, "a\x85")}, ValueError, ("printable",)),
        ({"low": 0.0, "high": Fraction(1)}, ValueError, ("0.0", "Fraction")),
        ({"low": -1.7e308, "high": 1.7e308}, ValueError, ("1.7e+308",)),
        ({"values": (1, 2)}, ValueError, ("default", "0.5", "1", "2")),
        ({"values": (True, False), "default": 1}, ValueError, ("1", "True", "False")),
        ({"low": 0.0, "high": 1.0, "inference": 0.0}, ValueError, ("inference", "0.0")),
    ],
)
def test_what_is_no_setting_is_refused(arguments: dict[str, Any], error: Any, names: tuple[str, ...]) -> None:
    assert_refused(lambda: Setting("k", **{"default": 0.5, **arguments}), error, *names)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"settings": [SIZE, SIZE]}, ("settings",)),
        ({"settings": []}, ("settings",)),
        ({"settings": ["size"]}, ("settings", "'size'")),
        ({"alone": ["sise"]}, ("sise", "size")),
    ],
)
def test_what_are_no_settings_is_refused(arguments: dict[str, Any], names: tuple[str, ...]) -> None:
    assert_refused(lambda: Settings(**{"settings": [SIZE, FLIP], "apply": noting([]), **arguments}), ValueError, *names)


SETTINGS = Settings(
    [
        Setting("score_thresh", 0.00001, 0.95, scale="logit", default=0.05),
        Setting("size", values=(0.71, 1.0, 1.41), default=1.0, inference=lambda value: float(value) ** 2),
        Setting("flip", values=(False, True), default=False, inference=2.0),
        Setting("detections", 1, 1000, default=100),
        Setting("distance", values=("cosine", "yes", "1e-3", "${x}", "Kröte: #1"), default="cosine"),
    ],
    apply=lambda values: nullcontext(),
)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"score_thresh": 0.00002, "size": 1.41, "flip": True, "detections": 300, "distance": "yes"},
        {"score_thresh": 0.1 + 0.2, "distance": "1e-3"},
        {"distance": "${x}"},
        {"distance": "Kröte: #1"},
    ],
)
def test_values_come_back_with_their_types(values: dict[str, Any], tmp_path: Path) -> None:
    save_inference(tmp_path, SETTINGS, values)
    assert [each.name for each in tmp_path.iterdir()] == ["inference.yaml"]
    for path in (tmp_path, tmp_path / "inference.yaml"):
        found = load_inference(path)
        assert list(found.items()) == list(SETTINGS.complete(values).items())
        assert list(map(type, found.values())) == list(map(type, SETTINGS.complete(values).values()))
    with SETTINGS.applied(found) as applied:
        assert applied == found


def test_default_and_factor_are_beside_the_value(tmp_path: Path) -> None:
    save_inference(tmp_path / "mine.yaml", SETTINGS, {"size": 1.41, "flip": True})
    content = yaml.safe_load((tmp_path / "mine.yaml").read_text())
    assert content["size"] == {"value": 1.41, "default": 1.0, "factor": pytest.approx(1.41**2)}
    assert content["flip"] == {"value": True, "default": False, "factor": 2.0}
    assert content["score_thresh"] == {"value": 0.05, "default": 0.05, "factor": 1.0}


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ("size: {value: 1, default: 1}", ("value", "default")),
        ("size: {value: .inf, default: 1, factor: 1}", ("size", "inf")),
        ("size: {value: 1, default: 1, factor: 1}\nsize: {value: 2, default: 1, factor: 1}", ("size",)),
        ("size: !!python/object/apply:os.getpid []", ()),
        ("", ()),
        (None, ("inference.yaml",)),
    ],
)
def test_what_is_no_inference_file_is_refused(content: str | None, names: tuple[str, ...], tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "inference.yaml").write_text(content)
    assert_refused(lambda: load_inference(tmp_path), FileFormatError, *names)


def test_what_a_setting_can_not_have_is_not_written_and_what_is_free_is_marked(tmp_path: Path) -> None:
    assert_refused(lambda: save_inference(tmp_path, SETTINGS, {"size": 2}), ValueError, "size", "2", "1.41")
    assert not list(tmp_path.iterdir())
    some = [SETTINGS["detections"], SETTINGS["flip"]]
    settings = Settings(some, lambda values: nullcontext(), free={"detections": 300})
    for values, marked in ((settings.first, True), ({"flip": True}, False), ({"detections": 200}, False)):
        save_inference(tmp_path / "v1.2", settings, values)
        comments = [line for line in (tmp_path / "v1.2" / "inference.yaml").read_text().splitlines() if line[0] == "#"]
        assert ('"detections"' in "".join(comments)) == marked
        assert load_inference(tmp_path / "v1.2") == settings.complete(values)


PRINTABLE = st.text(st.characters().filter(str.isprintable))


@given(value=st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), PRINTABLE))
def test_yaml_reads_a_value_as_it_was(value: bool | int | float | str) -> None:
    found = yaml.safe_load(scalar(value))
    assert found == value
    assert type(found) is type(value)
