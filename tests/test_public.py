"""The public face: what can be imported, how light that is, and what became of earlier names."""

import subprocess
import sys

import pytest
from torch import nn

import metricopt_ext as mo
from metricopt_ext import errors


def test_every_public_name_is_there_in_order() -> None:
    assert list(mo.__all__) == sorted(set(mo.__all__))
    assert {"FinetuneTask", "errors", "optimize_metric"} <= set(mo.__all__) <= set(dir(mo))
    assert all(getattr(mo, name).__name__.endswith(name) for name in mo.__all__ if name != "OutputLoss")
    assert all(issubclass(getattr(errors, name), errors.MetricOptError) for name in errors.__all__)


def test_importing_it_is_light() -> None:
    code = (
        "import sys, metricopt_ext;"
        " heavy = {'torch', 'gpytorch', 'matplotlib', 'rich', 'omegaconf', 'torchvision', 'cma'};"
        " sys.exit(' '.join(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.stderr.strip() == ""


@pytest.mark.parametrize("name", errors.__all__)
def test_errors_are_in_their_module(name: str) -> None:
    with pytest.raises(ImportError, match=f"metricopt_ext.{name} is now metricopt_ext.errors.{name}"):
        exec(f"from metricopt_ext import {name}")
    with pytest.raises(ImportError, match=f"metricopt_ext.{name} is now metricopt_ext.errors.{name}"):
        getattr(mo, name)


def test_an_unknown_name_is_an_ordinary_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'metricopt_ext' has no attribute 'optimise_metric'"):
        mo.optimise_metric  # noqa: B018


@pytest.mark.parametrize(
    ("owner", "old", "new"),
    [
        (mo.Metric, "ask", "evaluate"),
        (mo.FinetuneTask, "ask", "evaluate"),
        (mo.FinetuneTask, "answers_at", "evaluate_at"),
        (mo.Tuned, "answers", "evaluations"),
    ],
)
def test_renamed_attributes_say_their_new_name(owner: type, old: str, new: str) -> None:
    with pytest.raises(AttributeError, match=f"{owner.__name__}.{old} is now {owner.__name__}.{new}"):
        getattr(owner, old)
    assert hasattr(owner, new) or new in owner.__dataclass_fields__  # type: ignore[attr-defined]


def test_a_metric_that_overrides_a_former_name_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Mine\.ask overrides a former name: Metric\.ask is now Metric\.evaluate"):
        type("Mine", (mo.Metric,), {"ask": lambda self, model, purpose: None})


def test_a_metric_says_so_too() -> None:
    with pytest.raises(AttributeError, match=r"Metric\.ask is now Metric\.evaluate"):
        mo.Metric(lambda: 0.5, maximize=True).ask(nn.Identity(), "x")  # type: ignore[operator]
