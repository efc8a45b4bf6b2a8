"""A report made up of known numbers, and a reader of pages."""

from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from metricopt_ext.evidence.method import METHODS
from metricopt_ext.evidence.record import Outcome, SeedRecord
from metricopt_ext.evidence.report import Report
from metricopt_ext.methods.recipe_settings import StepWeights
from metricopt_ext.utils.machine import Machine
from metricopt_ext.value.value_function import Quality

GOOD = Quality(spearman=0.9, mae=0.01, constant_mae=0.1, points=100, trajectories=40, near_mae=0.01, headroom=0.1)

POOR = Quality(spearman=0.1, mae=0.2, constant_mae=0.1, points=100, trajectories=40, near_mae=0.2, headroom=0.1)

MACHINE = Machine("A processor", "AVX2", 1, "cpu")

BASE = {name: 0.5 + 0.05 * i for i, name in enumerate(METHODS)}


def _report(tests: dict[str, list[float]] | None = None, *, seeds: int = 3, maximize: bool = True) -> Report:
    rng, records = np.random.default_rng(0), []
    noise = rng.normal(size=(seeds, len(METHODS), 2)) / 100
    for row in range(seeds):
        outcomes = {}
        for column, (name, value) in enumerate(BASE.items()):
            validation, test = (value + noise[row, column]).tolist()
            if tests and name in tests:
                test = tests[name][row]
            outcomes[name] = [Outcome(validation, test, 10 * column, column, seconds=float(row + column))]
        records.append(
            SeedRecord(
                seed=row + 4,
                outcomes=outcomes,
                quality=GOOD if row else POOR,
                candidates={"neural": POOR, "ridge": GOOD if row else POOR},
                kept="metricopt" if row else "start",
                setting=StepWeights(0.3, 0.15),
                split_half=0.75,
                chance=0.01,
                guard="halves",
                curves={name: (0.5 + noise[row, :3, 0]).tolist() for name in ("loss_finetune", "metricopt")},
                true=noise[row, :, 0].tolist(),
                predicted=noise[row, :, 1].tolist(),
                machine=MACHINE,
            )
        )
    return Report("classification/toy", "accuracy", maximize, records, {"queries": 600, "guard": {"confidence": 0.84}})


@pytest.fixture
def report() -> Callable[..., Report]:
    """Make a report; ``tests`` gives methods' test metrics by seed, in place of a trend with some noise."""
    return _report


class Html(HTMLParser):
    """What a browser would find in a page: elements with their attributes, and the texts in them."""

    EMPTY = ("meta", "img")  # without an end

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.tables: list[list[list[str]]] = []
        self._found: list[tuple[str, list[str]]] = []
        self._open: list[tuple[str, list[str]]] = []
        self.feed(text)
        self.close()
        assert not self._open

    def texts(self, name: str) -> list[str]:
        return ["".join(parts) for each, parts in self._found if each == name]

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag not in self.EMPTY:
            self._open.append((tag, []))

    def handle_endtag(self, tag: str) -> None:
        name, parts = self._open.pop()
        assert name == tag  # elements are nested
        self._found.append((name, parts))
        if tag in ("th", "td"):
            self.tables[-1][-1].append("".join(parts))

    def handle_data(self, data: str) -> None:
        for _, parts in self._open:
            parts.append(data)

    def check(self) -> None:
        """Reject scripts, whatever is loaded from elsewhere, and what a reader of the screen would miss."""
        names = [name for name, _ in self.elements]
        assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & set(names)
        for name, attributes in self.elements:
            assert not any(key.startswith("on") or key == "href" for key in attributes), name
            assert attributes.get("src", "data:image/png;base64,").startswith("data:image/png;base64,")
            assert name != "img" or attributes["alt"]
        assert not any(word in style for style in self.texts("style") for word in ("url(", "@import", "http"))
        assert self.elements[0] == ("html", {"lang": "en"})
        levels = [int(name[1]) for name in names if name in ("h1", "h2", "h3")]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(after <= before + 1 for before, after in pairwise(levels))


@pytest.fixture
def html() -> Callable[[str], Html]:
    """Read a page."""
    return Html
