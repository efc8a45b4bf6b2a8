"""Settings of inference: what they may be, on which scale, and how they are put to use."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

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
    ("arguments", "message"),
    [
        ({"low": 1.0, "high": 0.0}, r"k.*1.0.*lower must be below the upper"),
        ({"low": 0.0}, r"k has neither.*both ends of an interval"),
        ({"low": 0.0, "high": math.inf}, r"k.*inf; it must be a finite number"),
        ({"low": 0.0, "high": 1.0, "scale": "log"}, r"k.*0.0.*scale it must be above 0"),
        ({"low": 0.5, "high": 1.0, "scale": "logit"}, r"k.*0.5.*1.0.*both must be between 0"),
        ({"low": 0.0, "high": 1.0, "scale": "cubic"}, r"k.*'cubic'.*linear, log or logit"),
        ({"low": 0.0, "high": 0.4}, r"k.*0.5.*number from 0 to 0.4"),
        ({"low": 0.0, "high": 1.0, "values": (0.5, 1.0)}, r"k has values.*give one of the two"),
        ({"values": (0.5,)}, r"k: values.*they must be two at least"),
        ({"values": "ab", "default": "a"}, r"k.*'ab'; they must be a list, in order"),
        ({"values": {0.5, 1.0}}, r"k: values are .*; they must be a list, in order"),
        ({"values": (0.5, 10**400)}, r"k: values.*; numbers must be finite"),
        ({"low": -1.7e308, "high": 1.7e308}, r"k is from.*too wide for a float; narrow it"),
        ({"values": (0.5, 0.5)}, "k: values are .*; one is there twice"),
        ({"values": (0.5, math.nan)}, r"k: values.*; numbers must be finite"),
        ({"values": (1, 2)}, r"k: the default.*0.5; it must be 1 or 2"),
        ({"values": (True, False), "default": 1}, r"k.*1; it must be True or False"),
        ({"low": 0.0, "high": 1.0, "default": True}, r"k: the default is True.*0 to 1"),
        ({"low": 0.0, "high": 1.0, "inference": 0.0}, "k: inference is 0.0; it must be above 0"),
    ],
)
def test_what_is_no_setting_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Setting("k", **{"default": 0.5, **arguments})


def test_a_value_is_text_or_a_number() -> None:
    with pytest.raises(TypeError, match=r"k: values.*\[\].*True, False or text"):
        Setting("k", values=[0, []], default=0)  # type: ignore[list-item]


def test_values_in_order_are_told_from_choices() -> None:
    assert SIZE.ordered
    assert not FLIP.ordered
    assert not Setting("distance", values=("cosine", "euclidean"), default="cosine").ordered
    assert not THRESHOLD.ordered


def test_factors_are_beside_the_defaults() -> None:
    assert (FLIP.factor(True), FLIP.factor(False)) == (2.0, 1.0)
    assert SIZE.factor(480) == pytest.approx(1.44)


@pytest.mark.parametrize("kind", [np.int64, torch.tensor])
def test_integers_of_other_types_are_integers(kind: Any) -> None:
    k = Setting("k", kind(1), kind(50), default=kind(5))
    assert [k.at(t) for t in (0.0, 0.5, 1.0)] == [1, 26, 50]
    assert all(type(each) is int for each in (k.at(0.5), k.low, k.default))
    assert k.said == "an integer from 1 to 50"


def test_numbers_of_other_types_are_floats() -> None:
    for low, default in ((np.float32(0.25), Decimal("0.5")), (Fraction(1, 4), torch.tensor(0.5))):
        k = Setting("k", low, 1.0, default=default)
        assert (k.low, k.default, k.at(1 / 3)) == (0.25, 0.5, 0.5)
        assert type(k.default) is float


def test_values_are_python_s_own_and_so_is_the_default() -> None:
    size = Setting("size", values=np.array([320, 400]), default=400.0)
    assert size.values == (320, 400)
    assert type(size.default) is int
    flip = Setting("flip", values=[np.False_, np.True_], default=np.False_)
    assert flip.values == (False, True)
    seen: list[Any] = []
    settings = Settings([size, flip], noting(seen))
    with settings.applied({"size": np.float64(320), "flip": np.True_}):
        assert [type(each) for each in seen[0].values()] == [int, bool]


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
    ("found", "message"),
    [
        (0, r"size: inference\(400\) is 0; it must be above 0"),
        (math.nan, r"size: inference\(400\) is nan; it must be a finite number"),
        (None, r"size: inference\(400\) is None; it must be a number"),
    ],
)
def test_a_function_of_no_factor_is_refused(found: Any, message: str) -> None:
    sized = Setting("size", values=(320, 400), default=400, inference=lambda size: found)
    with pytest.raises(ValueError, match=message):
        Settings([sized], noting([]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"settings": SIZE}, r"settings are Setting.*list of Setting"),
        ({"settings": [SIZE, "flip"]}, r"settings have 'flip'; each must be a Setting"),
        ({"alone": "size"}, r"names of settings are 'size'; they must be a list, \['size'\]"),
        ({"free": [("size", 400)]}, r"free is .*; it must be a dict by name"),
        ({"presets": [{"size": 400}]}, r"presets is .*; it must be a dict by name"),
        ({"presets": {"mine": lambda values: None}}, r"preset 'mine': values of settings are None.*dict by name"),
    ],
)
def test_settings_of_another_kind_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**{"settings": [SIZE, FLIP], "apply": noting([]), **arguments})
    assert Settings((each for each in (SIZE, FLIP)), noting([])).names == ("size", "flip")


@pytest.mark.parametrize("apply", [lambda values: None, lambda values: (yield)])
def test_what_applies_nothing_is_refused_with_the_remedy(apply: Any) -> None:
    settings = Settings([SIZE], apply)
    with pytest.raises(TypeError, match=r"apply returned .*contextlib.contextmanager"), settings.applied({}):
        pass


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sise": 400}, r"'sise'.*you mean \['size'\]\?"),
        ({"size": 401}, r"size is 401.*320 or 400 or 480"),
        ({"flip": 1}, "flip is 1; it must be False or True"),
        ({"threshold": 0.0}, r"threshold.*0.0.*0.01 to 0.95"),
        ({"threshold": "high"}, r"threshold.*'high'.*0.01 to 0.95"),
    ],
)
def test_values_that_can_not_be_are_refused(values: dict[str, Any], message: str) -> None:
    settings, seen = Settings([SIZE, FLIP, THRESHOLD], noting([])), []
    with pytest.raises(ValueError, match=message), settings.applied(values):
        seen.append(values)
    assert not seen
    with pytest.raises(ValueError, match=message):
        Settings([SIZE, FLIP, THRESHOLD], noting([]), free=values)
    with pytest.raises(ValueError, match=message):
        Settings([SIZE, FLIP, THRESHOLD], noting([]), presets={"mine": values})


def test_presets_are_put_on_the_best_so_far() -> None:
    presets = {"flip": {"flip": True}, "smaller": lambda best: {"size": 320 if best["size"] == 400 else 400}}
    settings = Settings([SIZE, FLIP], noting([]), presets=presets)
    assert settings.presets == ("flip", "smaller")
    assert settings.preset("flip", {"size": 480}) == {"size": 480, "flip": True}
    assert settings.preset("smaller", {}) == {"size": 320, "flip": False}
    assert settings.preset("smaller", {"size": 480}) == {"size": 400, "flip": False}


def test_two_of_one_name_and_none_at_all_are_refused() -> None:
    with pytest.raises(ValueError, match=r"settings are size.*two have one name"):
        Settings([SIZE, SIZE], noting([]))
    with pytest.raises(ValueError, match="settings; give one at least"):
        Settings([], noting([]))
    with pytest.raises(ValueError, match=r"apply.*function of the values"):
        Settings([SIZE], None)  # type: ignore[arg-type]


# --- Some of them, within limits -----------------------------------------------------------------------------------


def test_limits_are_another_objects() -> None:
    settings = Settings([SIZE, FLIP], noting([]), free={"size": 320})
    other = settings.limited(inference=2.0, queries=4, free=False)
    assert (other.inference, other.queries, other.free) == (2.0, 4, {})
    assert (settings.inference, settings.queries, settings.free) == (1.0, 10, {"size": 320})
    assert other.affords({"flip": True})
    assert not settings.affords({"flip": True})
    assert settings.limited().free == {"size": 320}
    with pytest.raises(ValueError, match=r"inference.*0\.5; it must be at least 1"):
        settings.limited(inference=0.5)


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
    with pytest.raises(ValueError, match=r"'flop'.*you mean \['flip'\]"):
        settings.only(["flop"])


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
    for again in (lambda: settings.set_on(model, {"size": 320}), lambda: settings.applied({}).__enter__()):
        with pytest.raises(ValueError, match=r"these settings.*make new ones"):
            again()
    with pytest.raises(ValueError, match="there is no setting 'sizes'"):
        settings.set_on(model, {"sizes": 320})


def test_what_no_model_holds_is_told_with_code() -> None:
    settings = Settings([SIZE, FLIP], noting([]))
    said = "no model holds size, flip: call it inside `with settings.applied({'size': 320, 'flip': True}):`"
    assert settings.set_on(object(), {"size": 320, "flip": True}) == said
    assert settings.set_on(object(), {"size": 320, "flip": True}) == said  # nothing was set


def test_what_is_free_must_take_no_longer_than_it_may() -> None:
    said = r"free is \{'size': 480\}, by which inference takes 1\.44 times as long, and it may take 1 times"
    with pytest.raises(ValueError, match=said):
        Settings([SIZE, FLIP], noting([]), free={"size": 480})
    settings = Settings([SIZE, FLIP], noting([]), free={"size": 480}, inference=1.5)
    with pytest.raises(ValueError, match=said):
        settings.limited(inference=1.0)
    assert settings.limited(inference=1.0, free=False).first == {"size": 400, "flip": False}


def test_limits_are_whole_numbers_of_queries() -> None:
    with pytest.raises(ValueError, match=r"queries is 2\.5; it must be an integer"):
        Settings([SIZE], noting([])).limited(queries=2.5)  # type: ignore[arg-type]


def test_a_function_of_a_preset_is_refused_by_its_name_before_a_run() -> None:
    with pytest.raises(ValueError, match="800; it must be 320 or 400 or 480"):
        Settings([SIZE], noting([]), presets={"larger": lambda values: {"size": 2 * values["size"]}})


@pytest.mark.parametrize("default", [np.int64(1), torch.tensor(1)])
def test_a_value_is_what_plain_text_holds(default: Any) -> None:
    settings = Settings([Setting("k", values=(1, 2), default=default)], noting([]), free={"k": default})
    assert json.loads(json.dumps(settings.identity()))["free"] == {"k": 1}
