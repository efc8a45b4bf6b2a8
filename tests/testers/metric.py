"""The contract of a metric: the value that an independent implementation finds, or a refusal; never another number.

A case of a metric of rows of scores takes `labelled_rows` as its inputs; one of a black box also says what is `told`::

    class TestAccuracy(MetricTester):
        def inputs(self, kind):
            return labelled_rows(kind, width=4, classes=4)

        def ours(self, logits, labels):
            return METRICS["accuracy"].function(logits, labels)

        def reference(self, logits, labels):
            return accuracy_score(labels, logits.argmax(1))

What rows are made of otherwise, such as lists of boxes, a case says by `chosen`, `of_type`, `with_nan` and
`laid_otherwise`.
"""

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import metricopt_ext as mo
from helpers.refusals import assert_refused

Rows = tuple[Any, ...]
"""Predictions, truth, and perhaps columns: of each, one entry for each example."""

KINDS = ("ties", "apart", "one class", "absent class", "few rows")
SCORES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LABELS = (torch.uint8, torch.int16, torch.int32, torch.int64)


@st.composite
def labelled_rows(
    draw: st.DrawFn, kind: str, *, width: int, classes: int, most: int = 40, of: Callable[..., Rows] | None = None
) -> Rows:
    """Draw scores, ``n x width`` (``n`` if it is 0), and labels, ``n``, of one of the `KINDS`.

    Args:
        draw: Hypothesis'.
        kind: ``"ties"``: scores of a few values; ``"apart"``: no two alike; ``"one class"`` and ``"absent class"``: of
            the labels; ``"few rows"``: one to four.
        width: Numbers for each row.
        classes: Labels are below this.
        most: The largest n.
        of: ``of(scores, labels, rng)`` makes the rows of them; by default they are the rows.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count = draw(st.integers(1, 4) if kind == "few rows" else st.integers(5, most))
    shape = (count, width) if width else (count,)
    scores = rng.integers(-4, 5, size=shape) / 2 if kind in ("ties", "few rows") else rng.normal(size=shape)
    if kind == "one class":
        labels = np.full(count, rng.integers(classes))
    else:
        allowed = rng.permutation(classes)[: classes - (kind == "absent class")]
        labels = rng.choice(allowed, size=count)
    rows = torch.from_numpy(scores), torch.from_numpy(labels).long()
    return of(*rows, rng) if of else rows


class MetricTester:
    """A metric agrees with its reference on all that is drawn, and refuses what it is not defined on."""

    atol = 1e-9
    bounds = (0.0, 1.0)
    kinds: Sequence[str] = KINDS
    """Those that are drawn, of `inputs`."""
    ties_by_row = False
    """Whether the order of rows decides ties, so that only rows without them may come in any order."""
    named_empty: tuple[object, ...] = ()
    named_nan: tuple[object, ...] = ("NaN",)
    """What the refusals of these name."""

    def inputs(self, kind: str) -> st.SearchStrategy[Rows]:
        """Return what draws predictions and truth of a kind."""
        raise NotImplementedError

    def ours(self, *rows: Any) -> float:
        """Return the metric of predictions and truth."""
        raise NotImplementedError

    def reference(self, *rows: Any) -> float:
        """Return the same by an independent implementation; NaN where there is no such number."""
        raise NotImplementedError

    # What rows are made of. By default each entry of the tuple is a tensor.

    def chosen(self, rows: Rows, places: Sequence[int]) -> Rows:
        """Return the rows at some places."""
        return tuple(
            each[torch.tensor(places, dtype=torch.long)] if isinstance(each, Tensor) else [each[i] for i in places]
            for each in rows
        )

    def of_type(self, rows: Rows, scores: torch.dtype, labels: torch.dtype) -> Rows:
        """Return the rows with predictions and truth of other types."""
        predictions, truth, *columns = rows
        return (predictions.to(scores), truth.to(labels), *columns)

    def with_nan(self, rows: Rows) -> Rows:
        """Return the rows, of which the last has a prediction that is NaN."""
        predictions, *rest = copy.deepcopy(rows)
        predictions[(-1,) * predictions.ndim] = torch.nan
        return (predictions, *rest)

    def laid_otherwise(self, rows: Rows) -> Rows:
        """Return the same rows, whose predictions are every other one in memory and carry a gradient."""
        predictions, *rest = rows
        spread = torch.stack([predictions, torch.full_like(predictions, 7.0)], dim=-1)[..., 0]
        return (spread.requires_grad_(), *rest)

    # The properties.

    @pytest.fixture(autouse=True)
    def _quiet(self) -> Any:
        """References warn of absent classes."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield

    def agrees(self, rows: Rows, *, like: Rows | None = None) -> None:
        """Check that a value is a number within its bounds and the reference's, or refused where there is none."""
        expected = float(self.reference(*(rows if like is None else like)))
        if math.isnan(expected):
            assert_refused(lambda: self.ours(*rows), mo.errors.MetricOptError)
            return
        value = self.ours(*rows)
        assert isinstance(value, float)
        assert self.bounds[0] <= value <= self.bounds[1]
        assert value == pytest.approx(expected, abs=self.atol, rel=self.atol)

    def drawn(self, data: st.DataObject, kind: str, least: int = 1) -> Rows:
        """Draw rows of which there is a value."""
        rows = data.draw(self.inputs(kind))
        assume(len(rows[0]) >= least and not math.isnan(float(self.reference(*rows))))
        return rows

    @given(data=st.data())
    def test_equals_the_reference(self, data: st.DataObject) -> None:
        """With ties, one class alone, a class that is absent, and few rows."""
        for kind in self.kinds:
            self.agrees(data.draw(self.inputs(kind)))

    @given(data=st.data())
    def test_equals_the_reference_in_all_types(self, data: st.DataObject) -> None:
        """Of what the types leave of the numbers."""
        rows = data.draw(self.inputs(data.draw(st.sampled_from(self.kinds))))
        for scores, labels in zip(SCORES, LABELS, strict=True):
            given = self.of_type(rows, scores, labels)
            self.agrees(given, like=self.of_type(given, torch.float64, torch.int64))

    @given(data=st.data())
    def test_the_order_of_rows_does_not_matter(self, data: st.DataObject) -> None:
        rows = self.drawn(data, "apart" if self.ties_by_row else data.draw(st.sampled_from(self.kinds)))
        order = data.draw(st.permutations(range(len(rows[0]))))
        assert self.ours(*self.chosen(rows, order)) == pytest.approx(self.ours(*rows), abs=1e-12, rel=1e-12)

    @given(data=st.data())
    def test_it_leaves_its_inputs_as_they_were(self, data: st.DataObject) -> None:
        """And finds the same of them again."""
        rows = self.drawn(data, "ties")
        before = copy.deepcopy(rows)
        value = self.ours(*rows)
        assert_same(rows, before)
        assert self.ours(*rows) == value

    @given(data=st.data())
    def test_a_gradient_and_a_place_in_memory_do_not_matter(self, data: st.DataObject) -> None:
        rows = self.drawn(data, "ties")
        assert self.ours(*self.laid_otherwise(rows)) == self.ours(*rows)

    @given(data=st.data())
    def test_nan_is_refused(self, data: st.DataObject) -> None:
        rows = self.with_nan(self.drawn(data, "apart"))
        assert_refused(lambda: self.ours(*rows), mo.errors.MetricOptError, *self.named_nan)

    @given(data=st.data())
    def test_no_rows_are_refused(self, data: st.DataObject) -> None:
        rows = self.chosen(self.drawn(data, "apart"), [])
        assert_refused(lambda: self.ours(*rows), mo.errors.MetricOptError, *self.named_empty)

    @given(data=st.data())
    def test_truth_of_other_rows_is_refused(self, data: st.DataObject) -> None:
        """Of one row fewer, which would be judged by their neighbours' predictions."""
        rows = self.drawn(data, "apart", least=2)
        predictions, truth, *columns = rows
        fewer = self.chosen(rows, range(len(truth) - 1))[1]
        assert_refused(lambda: self.ours(predictions, fewer, *columns), mo.errors.MetricOptError)


class Told(NamedTuple):
    """What a black box tells of rows at one query.

    Attributes:
        value: The metric, in its own unit.
        halves: For each pair of halves, the places of their rows and the values on them.
        queries: How many were counted.
    """

    value: float
    halves: Sequence[Sequence[tuple[Sequence[int], float]]]
    queries: int


class HalvedMetricTester(MetricTester):
    """A metric that is also a black box: one query tells its value, and those on halves of the rows."""

    apart_by_class = False
    """Whether halves have different classes, so that what differs between them differs on new ones."""

    def told(self, *rows: Any) -> Told:
        """Return what `mo.Metric` tells of a model whose predictions are these."""
        raise NotImplementedError

    @given(data=st.data())
    def test_halves_are_the_metric_on_those_rows(self, data: st.DataObject) -> None:
        """Each row is in at most one half of a pair, and no half is empty."""
        rows = self.drawn(data, data.draw(st.sampled_from(("ties", "apart"))), least=20)
        told = self.told(*rows)
        assert told.queries == 1
        assert told.value == pytest.approx(self.ours(*rows), abs=1e-12)
        for (first, value), (second, other) in told.halves:
            assert not set(first) & set(second)
            assert value == pytest.approx(self.ours(*self.chosen(rows, first)), abs=1e-12)
            assert other == pytest.approx(self.ours(*self.chosen(rows, second)), abs=1e-12)
            if self.apart_by_class:
                assert not {int(rows[1][i]) for i in first} & {int(rows[1][i]) for i in second}
        assume(told.halves)  # that none of all that is drawn has halves is an error


def assert_same(one: Any, other: Any) -> None:
    """Check that tensors, arrays and what they are in are the same to the bit, NaN included."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert_same(value, other[name])
    elif is_dataclass(one):
        assert_same(vars(one), vars(other))
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for value, its in zip(one, other, strict=True):
            assert_same(value, its)
    elif isinstance(one, Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
    elif isinstance(one, np.ndarray):
        np.testing.assert_array_equal(one, other)
    else:
        assert one == other
