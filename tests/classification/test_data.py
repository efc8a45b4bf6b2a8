"""The data of configs: divided, held out, filled in, standardised, shifted and thinned out."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from helpers.refusals import assert_refused
from measure_correlation import stratified_parts
from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.classification.data import (
    divided,
    hold_out,
    imputed,
    load_sklearn,
    single_precision,
    standardise,
    with_positive,
)
from metricopt_ext.classification.shift import long_tail, shift_class_ratio
from metricopt_ext.classification.splits import load_splits
from metricopt_ext.data.labelled import Split, Unscaled
from metricopt_ext.data.reading import Column, Reading
from metricopt_ext.data.splits import PARTS, Splits
from metricopt_ext.errors import DataError
from metricopt_ext.utils.config import load_config


def split(x: Tensor, y: Tensor, fractions: Sequence[float] = (0.7, 0.1, 0.2), seed: int = 0, names: Any = "") -> Splits:
    return divided(Split(x, y), tuple(names or map(str, range(len(y.bincount())))), fractions, seed)


def test_bundled_sets() -> None:
    digits = load_sklearn("digits")
    assert digits.x.shape == (1797, 1, 8, 8)
    assert (float(digits.x.min()), float(digits.x.max())) == (0, 1)
    assert load_sklearn("iris").class_names == ("setosa", "versicolor", "virginica")
    assert [len(load_sklearn(name).class_names) for name in ("wine", "breast_cancer")] == [3, 2]
    assert_refused(lambda: load_sklearn("mnist"), ValueError, "digits", "mnist")


def _numbered(n: int = 200) -> tuple[Tensor, Tensor]:
    return torch.arange(n, dtype=torch.float32).unsqueeze(1), (torch.arange(n) % 10 == 0).long()


def test_split_partitions_in_the_proportions() -> None:
    x, y = _numbered()
    parts = split(x, y)
    sizes = [len(part) for part in (parts.train, parts.validation, parts.test)]
    assert sizes == [140, 20, 40]
    assert [int(part.y.sum()) for part in (parts.train, parts.validation, parts.test)] == [14, 2, 4]
    rows = torch.cat([parts.train.x, parts.validation.x, parts.test.x]).flatten()
    assert torch.equal(rows.sort().values, x.flatten())
    for part in (parts.train, parts.validation, parts.test):
        assert torch.equal(part.y, y[part.x.flatten().long()])
    assert (parts.num_classes, parts.class_names) == (2, ("0", "1"))


def test_the_only_example_of_a_class_is_not_held_out() -> None:
    y = torch.tensor([0] * 10 + [1] * 9 + [2])
    for seed in range(5):
        rest, held = hold_out(Split(torch.arange(20.0)[:, None], y), 4, seed)
        assert (len(rest), len(held)) == (16, 4)
        assert sorted(torch.cat([rest.x, held.x]).flatten().tolist()) == list(range(20))
        assert 2 in rest.y
    for seed in range(5):
        parts = split(torch.zeros(60, 1), torch.tensor([0] * 30 + [1] * 28 + [2] * 2), seed=seed)
        assert 2 in parts.train.y


def test_either_of_two_classes_can_be_the_positive_one() -> None:
    splits = split(*_numbered(), names=["no", "yes"])
    assert with_positive(splits, "yes") is splits
    turned = with_positive(splits, "no")
    assert turned.class_names == ("yes", "no")
    for part in ("train", "validation", "test"):
        assert torch.equal(getattr(turned, part).x, getattr(splits, part).x)
        assert torch.equal(getattr(turned, part).y, 1 - getattr(splits, part).y)
    assert_refused(lambda: with_positive(splits, "maybe"), DataError, "data.positive='maybe'", "'no'", "yes")
    assert_refused(lambda: with_positive(_splits([5, 5, 5], [5, 5, 5]), "a"), DataError, "data.positive='a'", "3")


def _table(x: Tensor) -> Splits:
    """Parts of 60, 20 and 20 rows of a table."""
    names = ("no", "yes")
    splits = divided(Unscaled(x, torch.arange(100) % 2), names, (0.6, 0.2, 0.2), seed=0)
    columns = [Column(name, "number", 1) for name in "abc"]
    return replace(splits, reading=Reading("utf-8", columns))


@pytest.mark.parametrize("how", ["mean", "median", "indicator"])
@pytest.mark.parametrize("scaled", [False, True])
def test_missing_numbers_are_filled_in_as_by_scikit_learn(how: str, scaled: bool) -> None:
    x = torch.randn(100, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 3
    x[::7, 0] = x[::5, 2] = torch.nan
    splits = _table(x)
    steps = [SimpleImputer(strategy="median" if how == "median" else "mean", add_indicator=how == "indicator")]
    reference = make_pipeline(*steps, *([StandardScaler()] if scaled else [])).fit(splits.train.x.numpy())
    filled = imputed(splits, how)
    done = standardise(filled) if scaled else single_precision(filled)
    for name in ("train", "validation", "test"):
        expected = reference.transform(getattr(splits, name).x.numpy())
        assert getattr(done, name).x.dtype == torch.float32
        np.testing.assert_allclose(getattr(done, name).x.numpy(), expected, rtol=1e-6, atol=1e-6)
    assert done.reading is not None
    counts = ", ".join(f"{int(getattr(splits, name).x.isnan().sum())} in {name}" for name in PARTS)
    by = "median" if how == "median" else "mean"
    more = "; inputs that say where: 2" if how == "indicator" else ""
    assert done.reading.filled == f"missing numbers are filled in by train's {by}: {counts}{more}"
    assert done.reading.inputs == [*"abc", *(["a is missing", "c is missing"] if how == "indicator" else [])]


def test_standardising_happens_in_float64() -> None:
    seconds = 1_700_000_064 + torch.arange(100, dtype=torch.float64)
    splits = _table(torch.stack([seconds, seconds / 7, torch.zeros(100, dtype=torch.float64)], 1))
    scaled = standardise(splits)
    reference = StandardScaler().fit(splits.train.x.numpy())
    np.testing.assert_allclose(scaled.test.x.numpy(), reference.transform(splits.test.x.numpy()), rtol=1e-6, atol=1e-6)
    assert len(scaled.train.x[:, 0].unique()) == 60
    assert_refused(lambda: single_precision(splits), DataError, "float32", "data.standardise=true")
    far = splits.train.x.clone()
    far[3, 2] = 1e30
    far[:, 2] += seconds[:60]
    assert_refused(lambda: standardise(replace(splits, train=Unscaled(far, splits.train.y))), DataError, "'c'")


def _labels(counts: list[int]) -> Split:
    """Shuffled labels, so many of each class; each input names its row and its label."""
    y = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    y = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(len(y)))]
    return Split(torch.stack([torch.arange(len(y)), y], 1).float(), y)


def _splits(validation: list[int], test: list[int]) -> Splits:
    names = tuple("abc"[: len(test)])
    return Splits(_labels([9] * len(test)), _labels(validation), _labels(test), names)


@pytest.mark.parametrize(
    ("counts", "ratio", "kept"),
    [
        ([180, 20], [0.5, 0.5], [20, 20]),  # class 1 is scarce and stays whole
        ([180, 20], [0.95, 0.05], [180, 9]),  # class 0 stays whole: 180 / 0.95 * 0.05 = 9.47
        ([10, 20, 30], [0.5, 0.25, 0.25], [10, 5, 5]),
    ],
)
def test_a_class_ratio_is_met_by_dropping_as_few_as_possible(
    counts: list[int], ratio: list[float], kept: list[int]
) -> None:
    splits = _splits(counts, [2 * count for count in counts])
    shifted = shift_class_ratio(splits, ratio)
    assert shifted.validation.y.bincount().tolist() == kept
    assert shifted.train is splits.train
    for before, after in ((splits.validation, shifted.validation), (splits.test, shifted.test)):
        rows = after.x[:, 0].long()
        assert (rows.diff() > 0).all()  # none twice, in their order
        assert torch.equal(before.x[rows], after.x)
        assert torch.equal(before.y[rows], after.y)
        of_class = after.y.bincount()
        missed = (of_class - len(after) * torch.tensor(ratio, dtype=torch.float64)).abs()
        assert missed.max() < 1
        assert (of_class == before.y.bincount()).any()  # nothing could be added to this class


def test_several_labels_are_divided_by_their_shares() -> None:
    y = (torch.rand(200, 3, generator=torch.Generator().manual_seed(0)) < torch.tensor([0.5, 0.2, 0.05])).long()
    parts = split(torch.arange(200.0)[:, None], y, (0.6, 0.2, 0.2), names="abc")
    for part, share in ((parts.train, 0.6), (parts.validation, 0.2), (parts.test, 0.2)):
        assert len(part) == 200 * share
        assert (part.y.sum(0) - share * y.sum(0)).abs().max() <= 2
    assert parts.num_classes == 3
    y[:, 2] = 0
    y[:2, 2] = 1
    assert_refused(lambda: split(torch.zeros(200, 1), y, names="abc"), DataError, "'c'", "2", "200")
    assert_refused(lambda: Split(torch.zeros(200, 1), y + 1), DataError, "0", "1")


@pytest.mark.parametrize(("counts", "size", "sizes"), [((9, 6), 5, [5, 5, 5]), ((9, 2), 3, [6, 5]), ((3, 1), 9, [4])])
def test_parts_have_every_class(counts: tuple[int, int], size: int, sizes: list[int]) -> None:
    y = torch.arange(2).repeat_interleave(torch.tensor(counts))
    parts = stratified_parts(y, size, 0)
    assert [len(part) for part in parts] == sizes
    assert sorted(torch.cat(parts).tolist()) == list(range(len(y)))
    for label, count in enumerate(counts):
        shares = [int((y[part] == label).sum()) for part in parts]
        assert max(shares) - min(shares) <= 1
        assert min(shares) >= count // len(parts) >= 1


def splits_of(*counts: int) -> Splits:
    """Each example's input is its place, classes one after another."""

    def part(counts: tuple[int, ...]) -> Split:
        y = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        return Split(torch.arange(len(y), dtype=torch.float32)[:, None], y)

    names = tuple(map(str, range(len(counts))))
    return Splits(part(counts), part((2,) * len(counts)), part((3,) * len(counts)), names)


@pytest.mark.parametrize(
    ("counts", "imbalance", "largest", "kept"),
    [
        ((100, 100, 100), 100, 0, [100, 10, 1]),
        ((100, 100, 100, 100), 8, 80, [80, 40, 20, 10]),
        ((100, 20, 100), 4, 0, [40, 20, 10]),  # the second class has the fewest for its share
        ((100, 100, 100), 1, 30, [30, 30, 30]),
        ((81, 82, 81, 82, 81, 82, 82, 81, 79, 81), 15, 60, [60, 44, 33, 24, 18, 13, 10, 7, 5, 4]),
    ],
)
def test_counts_fall_geometrically(counts: tuple[int, ...], imbalance: float, largest: int, kept: list[int]) -> None:
    whole = splits_of(*counts)
    tail = long_tail(whole, imbalance, largest, seed=3)
    assert torch.bincount(tail.train.y).tolist() == kept
    places = tail.train.x[:, 0].long()
    assert torch.equal(tail.train.y, whole.train.y[places])
    assert (places.diff() > 0).all()  # each once, in the order that they had
    assert tail.validation is whole.validation
    assert tail.test is whole.test


DIGITS = Path(__file__).parents[2] / "configs" / "classification" / "digits.yaml"


def config_of(*overrides: str, file: Path = DIGITS) -> ClassificationConfig:
    return load_config(ClassificationConfig, file, ["model.epochs=1", "adapter.dim=3", "device=cpu", *overrides])


def test_only_validation_and_test_are_shifted_and_always_in_the_same_way() -> None:
    clean, shifted, again = (load_splits(config_of(*more), 5) for more in (["shift.kind=none"], [], []))
    assert torch.equal(clean.train.x, shifted.train.x)
    for name in ("validation", "test"):
        a, b, c = (getattr(splits, name) for splits in (clean, shifted, again))
        assert torch.equal(a.y, b.y)
        assert torch.equal(b.x, c.x)
        assert ((a.x - b.x).abs().flatten(1).amax(1) > 0.05).all()
    other = load_splits(config_of(), 6)
    assert not torch.equal(other.train.y, shifted.train.y)
    sizes = [len(getattr(shifted, name)) for name in ("train", "validation", "test")]
    assert sizes == [1797 - 359 - 629, 359, 629]
