"""Settings of inference: what they may be, on which scale, and how they are put to use."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from helpers.refusals import assert_named, assert_refused, having
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
        assert setting.holds(setting.at(t))


def test_between_integers_it_is_an_integer() -> None:
    k = Setting("k", 1, 100, scale="log", default=10)
    found = [k.at(t) for t in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert found == [1, 3, 10, 32, 100]
    assert all(isinstance(each, int) for each in found)
    assert not k.holds(10.0)
    assert k.said == "an integer from 1 to 100"
    assert Setting("k", 1, 100, default=10.0).at(0.5) == 50.5


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"low": 1.0, "high": 0.0}, ("1.0",)),
        ({"low": 0.0}, ()),
        ({"low": 0.0, "high": math.inf}, ("inf",)),
        ({"low": 0.0, "high": 1.0, "scale": "log"}, ("0.0", "scale")),
        ({"low": 0.5, "high": 1.0, "scale": "logit"}, ("0.5", "1.0")),
        ({"low": 0.0, "high": 1.0, "scale": "cubic"}, ("cubic",)),
        ({"low": 0.0, "high": 0.4}, ("0.5", "0.4")),
        ({"low": 0.0, "high": 1.0, "values": (0.5, 1.0)}, ("values",)),
        ({"values": (0.5,)}, ("values",)),
        ({"values": "ab", "default": "a"}, ("'ab'",)),
        ({"values": {0.5, 1.0}}, ("values",)),
        ({"values": (0.5, 10**400)}, ("values",)),
        ({"low": -1.7e308, "high": 1.7e308}, ("k",)),
        ({"values": (0.5, 0.5)}, ("values",)),
        ({"values": (0.5, math.nan)}, ("values",)),
        ({"values": (1, 2)}, ("default", "0.5", "1", "2")),
        ({"values": (True, False), "default": 1}, ("1", "True", "False")),
        ({"low": 0.0, "high": 1.0, "default": True}, ("default", "True", "0", "1")),
        ({"low": 0.0, "high": 1.0, "inference": 0.0}, ("inference", "0.0")),
    ],
)
def test_what_is_no_setting_is_refused(arguments: dict[str, Any], names: tuple[str, ...]) -> None:
    assert_refused(lambda: Setting("k", **{"default": 0.5, **arguments}), ValueError, *names)


def test_a_value_is_text_or_a_number() -> None:
    assert_refused(lambda: Setting("k", values=[0, []], default=0), TypeError, "values", "True", "False")


def test_values_in_order_are_told_from_choices() -> None:
    assert SIZE.ordered
    assert not FLIP.ordered
    assert not Setting("distance", values=("cosine", "euclidean"), default="cosine").ordered
    assert not THRESHOLD.ordered


def test_factors_are_beside_the_defaults() -> None:
    assert (FLIP.factor(True), FLIP.factor(False)) == (2.0, 1.0)
    assert SIZE.factor(480) == pytest.approx(1.44)


@pytest.mark.parametrize("number", [np.int64(1), np.float32(1), Decimal(1), Fraction(1, 2), torch.tensor(1)])
def test_numbers_of_other_types_are_refused(number: Any) -> None:
    assert_refused(lambda: Setting("k", number, 50, default=5), TypeError, "k", "int", "float")
    assert_refused(lambda: Setting("k", 0, 50, default=number), ValueError, "k", "default")
    assert_refused(lambda: Setting("k", values=(number, 7), default=7), TypeError, "k", "number")


def test_the_default_is_one_of_the_values() -> None:
    assert type(Setting("size", values=(320, 400), default=400.0).default) is int


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


def test_a_factor_is_relative_to_the_defaults() -> None:
    sized = Setting("size", values=(320, 400, 480), default=480, inference=lambda size: (float(size) / 400) ** 2)
    assert Settings([sized], noting([])).factor({"size": 480}) == 1.0


@pytest.mark.parametrize(
    ("found", "names"),
    [
        (0, ("inference(400)", "0")),
        (math.nan, ("inference(400)", "nan")),
        (None, ("inference(400)", "None")),
    ],
)
def test_a_function_of_no_factor_is_refused(found: Any, names: tuple[str, ...]) -> None:
    sized = Setting("size", values=(320, 400), default=400, inference=lambda size: found)
    assert_refused(lambda: Settings([sized], noting([])), ValueError, *names)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"settings": SIZE}, ("settings", "Setting")),
        ({"settings": [SIZE, "flip"]}, ("settings", "flip", "Setting")),
        ({"alone": "size"}, ("settings", "size")),
        ({"free": [("size", 400)]}, ("free",)),
        ({"presets": [{"size": 400}]}, ("presets",)),
        ({"presets": {"mine": lambda values: None}}, ("mine", "settings", "None")),
    ],
)
def test_settings_of_another_kind_are_refused(arguments: dict[str, Any], names: tuple[str, ...]) -> None:
    assert_refused(lambda: Settings(**{"settings": [SIZE, FLIP], "apply": noting([]), **arguments}), ValueError, *names)
    assert Settings((each for each in (SIZE, FLIP)), noting([])).names == ("size", "flip")


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


def test_presets_are_put_on_the_best_so_far() -> None:
    presets = {"flip": {"flip": True}, "smaller": lambda best: {"size": 320 if best["size"] == 400 else 400}}
    settings = Settings([SIZE, FLIP], noting([]), presets=presets)
    assert settings.presets == ("flip", "smaller")
    assert settings.preset("flip", {"size": 480}) == {"size": 480, "flip": True}
    assert settings.preset("smaller", {}) == {"size": 320, "flip": False}
    assert settings.preset("smaller", {"size": 480}) == {"size": 400, "flip": False}


def test_two_of_one_name_and_none_at_all_are_refused() -> None:
    assert_refused(lambda: Settings([SIZE, SIZE], noting([])), ValueError, "settings")
    assert_refused(lambda: Settings([], noting([])), ValueError)
    assert_refused(lambda: Settings([SIZE], None), ValueError, "apply")


# --- Some of them, within limits -----------------------------------------------------------------------------------


def test_limits_are_another_objects() -> None:
    settings = Settings([SIZE, FLIP], noting([]), free={"size": 320})
    other = settings.limited(inference=2.0, queries=4, free=False)
    assert (other.inference, other.queries, other.free) == (2.0, 4, {})
    assert (settings.inference, settings.queries, settings.free) == (1.0, 10, {"size": 320})
    assert other.affords({"flip": True})
    assert not settings.affords({"flip": True})
    assert settings.limited().free == {"size": 320}
    assert_refused(lambda: settings.limited(inference=0.5), ValueError, "inference", "0.5", "1")


def test_some_alone_leave_the_others_as_they_are() -> None:
    seen: list[Any] = []
    presets = {"both": {"size": 480, "flip": True}, "one": {"flip": True}, "made": lambda best: {"size": 320}}
    settings = Settings([SIZE, FLIP, THRESHOLD], noting(seen), presets=presets, free={"threshold": 0.5})
    alone = settings.only(["flip"])
    assert (alone.names, alone.presets, alone.free) == (("flip",), ("one",), {})
    with alone.applied({"flip": True}) as values:
        assert values == {"flip": True}
    assert seen == [{"size": 400, "flip": True, "threshold": 0.05}, "back"]
    assert settings.only(["flip", "size"]).names == ("flip", "size")
    assert settings.only([]) is settings
    assert settings.without_presets().presets == ()
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
    assert given == []
    assert settings.set_on(model, {"threshold": 0.5, "size": 320, "flip": False}) == "the rest"
    assert given == [(model, {"size": 320})]
    assert_refused(lambda: settings.set_on(model, {"size": 320}), ValueError, "settings")
    assert_refused(settings.applied({}).__enter__, ValueError, "settings")
    assert_refused(lambda: settings.set_on(model, {"sizes": 320}), ValueError, "sizes")


def test_what_no_model_holds_is_told_with_code() -> None:
    settings = Settings([SIZE, FLIP], noting([]))
    said = "no model holds size, flip: call it inside `with settings.applied({'size': 320, 'flip': True}):`"
    assert settings.set_on(object(), {"size": 320, "flip": True}) == said
    assert settings.set_on(object(), {"size": 320, "flip": True}) == said  # nothing was set


def test_what_is_free_must_take_no_longer_than_it_may() -> None:
    names = ("free", "size", "480", "inference", "1.44")
    assert_refused(lambda: Settings([SIZE, FLIP], noting([]), free={"size": 480}), ValueError, *names)
    settings = Settings([SIZE, FLIP], noting([]), free={"size": 480}, inference=1.5)
    assert_refused(lambda: settings.limited(inference=1.0), ValueError, *names)
    assert settings.limited(inference=1.0, free=False).first == {"size": 400, "flip": False}


def test_limits_are_whole_numbers_of_queries() -> None:
    assert_refused(lambda: Settings([SIZE], noting([])).limited(queries=2.5), ValueError, "queries", "2.5")


def test_a_function_of_a_preset_is_refused_by_its_name_before_a_run() -> None:
    assert_refused(
        lambda: Settings([SIZE], noting([]), presets={"larger": lambda values: {"size": 2 * values["size"]}}),
        ValueError,
        "800",
        "320",
        "400",
        "480",
    )
