"""What a config names as MODULE:NAME: functions with their arguments, objects of classes, and what is refused."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from helpers.modules import forgotten
from helpers.refusals import assert_refused
from metricopt_ext.errors import ConfigError
from metricopt_ext.utils.named import named

CODE = """
NUMBER = 3

def scaled(x, by=1):
    return x * by

class Scaled:
    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return x * self.by
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "of_my_own.py").write_text(CODE)
    (tmp_path / "broken_of_mine.py").write_text("raise RuntimeError('no licence')\n")
    with forgotten("of_my_own", "broken_of_mine"):
        yield str(tmp_path)


def test_a_function_gets_further_arguments(folder: str) -> None:
    assert named("loss.name", "of_my_own:scaled", folder)(2) == 2
    assert named("loss.name", "of_my_own:scaled", folder, {"by": 3})(2) == 6


def test_of_a_class_an_object_is_made_unless_it_is_to_be_called_itself(folder: str) -> None:
    assert named("loss.name", "of_my_own:Scaled", folder, {"by": 3})(2) == 6
    assert isinstance(named("loss.name", "torch.nn:MultiMarginLoss", kwargs={"margin": 2.0}), nn.MultiMarginLoss)
    itself = named("model.name", "of_my_own:Scaled", folder, {"by": 3}, made=False)
    assert isinstance(itself, partial)
    assert itself()(2) == 6


@pytest.mark.parametrize(
    ("name", "options", "names"),
    [
        ("of_my_own:NUMBER", {}, ("3", "function")),
        ("of_my_own:Scaled", {"kwargs": {"b": 1}}, ("TypeError", "b")),
        ("broken_of_mine:f", {}, ("RuntimeError", "licence")),
        ("of_my_own:scaled", {"folder": ""}, ("loss.folder",)),
        (":scaled", {}, ("MODULE:FUNCTION",)),
    ],
)
def test_the_rest_is_refused_by_key(name: str, options: dict[str, Any], names: tuple[str, ...], folder: str) -> None:
    given = {"folder": folder, **options}
    assert_refused(lambda: named("loss.name", name, **given), ConfigError, f"loss.name={name}", *names)
