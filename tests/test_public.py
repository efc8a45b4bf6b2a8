"""The public face: what can be imported, and how light that is."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import metricopt_ext as mo
from metricopt_ext import errors

ROOT = Path(__file__).resolve().parents[1]
NAMES = ROOT / "tests" / "public_names.txt"


def test_every_public_name_is_there_in_order() -> None:
    assert list(mo.__all__) == sorted(set(mo.__all__))
    assert {"FinetuneTask", "errors", "optimize_metric"} <= set(mo.__all__) <= set(dir(mo))
    assert all(getattr(mo, name).__name__.endswith(name) for name in mo.__all__ if name != "OutputLoss")
    assert all(issubclass(getattr(errors, name), errors.MetricOptError) for name in errors.__all__)


def test_the_public_names_are_those_on_file() -> None:
    """A name that goes or comes is a decision: change public_names.txt, docs/api.md and the changelog with it."""
    frozen = set(NAMES.read_text().split())
    gone, new = frozen - set(mo.__all__), set(mo.__all__) - frozen
    assert not gone, f"no longer public: {', '.join(sorted(gone))}"
    assert not new, f"newly public: {', '.join(sorted(new))}"
    assert len(frozen) <= 28, "about 25: what a user calls; the rest is imported from its module"


@pytest.mark.parametrize("name", mo.__all__)
def test_each_public_name_is_used_where_people_learn(name: str) -> None:
    """In a code block of the README or the docs, in a notebook or in an example."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    blocks = [block for page in pages for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M)]
    scripts = [*(ROOT / "examples").glob("*.py"), *(ROOT / "docs").rglob("*.ipynb")]
    assert any(re.search(rf"\bmo\.{name}\b", code) for code in [*blocks, *(each.read_text() for each in scripts)])


def test_importing_it_is_light() -> None:
    code = (
        "import sys, metricopt_ext;"
        " heavy = {'torch', 'gpytorch', 'matplotlib', 'rich', 'omegaconf', 'torchvision', 'cma'};"
        " sys.exit(' '.join(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.stderr.strip() == ""
