"""What was public under another name: it works, with a warning that says what it is now."""

import importlib

import pytest

import metricopt_ext as mo
from metricopt_ext.moved import MOVED, moved, renamed_arguments


@pytest.mark.parametrize("name", sorted(MOVED))
def test_each_name_stands_for_what_its_new_one_does(name: str) -> None:
    module, _, new = MOVED[name].rpartition(".")
    with pytest.warns(DeprecationWarning, match=rf"metricopt_ext\.{name} is now {MOVED[name]}"):
        assert getattr(mo, name) is getattr(importlib.import_module(module), new)
    assert name not in mo.__all__


def test_what_was_never_public_is_none_of_them() -> None:
    with pytest.raises(KeyError):
        moved("optimize")


@renamed_arguments(old="new")
def half(value: float, *, new: float = 1.0) -> float:
    """Half of it."""
    return value * new / 2


def test_an_argument_by_its_former_name_is_taken_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="old is now called new"):
        assert half(3.0, old=4.0) == 6.0  # type: ignore[call-arg]
    assert half(3.0, new=4.0) == 6.0
    assert half.__doc__ == "Half of it."


def test_an_argument_under_both_names_is_refused() -> None:
    with pytest.raises(TypeError, match=r"got new and old.*leave old out"):
        half(3.0, old=4.0, new=4.0)  # type: ignore[call-arg]
