"""Using the earlier name of an attribute is an error that tells the present one."""

import doctest

import pytest

from metricopt_ext.utils import renamed
from metricopt_ext.utils.renamed import Renamed


class Meter:
    ask = Renamed("evaluate")

    def evaluate(self) -> int:
        return 1


class Thermometer(Meter):
    pass


@pytest.mark.parametrize("of", [Meter, Meter(), Thermometer, Thermometer()])
def test_classes_and_instances_say_the_new_name(of: object) -> None:
    with pytest.raises(AttributeError, match=r"^Meter\.ask is now Meter\.evaluate$"):
        of.ask  # type: ignore[attr-defined]  # noqa: B018


def test_who_looks_first_finds_nothing() -> None:
    assert not hasattr(Meter(), "ask")
    assert getattr(Meter, "ask", None) is None
    assert Meter().evaluate() == 1


def test_examples() -> None:
    failed, attempted = doctest.testmod(renamed)
    assert attempted > 0
    assert failed == 0
