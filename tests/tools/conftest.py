"""What a run of any tool is held to, whichever strategy it follows."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from metricopt_ext.value.loading import load_value_function

# Of 20 queries; paper: the three ends, and tasks of two observations.
SPENT = {"search": 20, "paper": 3 + 2 * 8}
KIND = {"search": "gp", "paper": "neural"}
PICTURE = {"search": "search.png", "paper": "methods.png"}


def _check(folder: Path, strategy: str) -> None:
    content = json.loads((folder / "report.json").read_text())
    assert content["methods"]["metricopt"]["queries_total"] == SPENT[strategy]
    (seed,) = folder.glob("seed-*")
    assert load_value_function(seed / "value_function.safetensors").kind == KIND[strategy]
    (kept,) = content["kept"]
    before, after = (content["methods"][name]["validation"][0] for name in ("pretrained", "metricopt"))
    assert after > before if kept != "start" else after == before
    assert (folder / PICTURE[strategy]).stat().st_size > 1000


@pytest.fixture
def check_strategy() -> Callable[[Path, str], None]:
    """Check what a run of 20 queries left in its folder: what it spent, its f, what the guard kept, its picture."""
    return _check


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run on one thread, whatever the tests are told: the models are tiny."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
