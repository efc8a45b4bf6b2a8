"""The public face: what can be imported, and how light that is."""

import subprocess
import sys

import pytest

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


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="No metricopt_ext attribute optimise_metric"):
        mo.optimise_metric  # noqa: B018
