"""Loaders on small files made here, splitting, and shifts of the class ratio."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from helpers.refusals import assert_refused
from metricopt_ext.classification.data import (
    divided,
    hold_out,
    imputed,
    load_cifar10,
    load_sklearn,
    single_precision,
    split,
    standardise,
    stratified_parts,
    with_positive,
)
from metricopt_ext.classification.shift import shift_class_ratio
from metricopt_ext.data.labelled import Split, Unscaled
from metricopt_ext.data.reading import Column, Reading
from metricopt_ext.data.splits import PARTS, Splits
from metricopt_ext.errors import DataError


def test_cifar10_from_images(lay: Callable[..., Path], tmp_path: Path) -> None:
    lay(tmp_path / "train", {"cat/2.png": 12, "cat/1.png": 11, "ant/7.png": 1})
    assert_refused(lambda: load_cifar10(tmp_path), DataError, "test")
    lay(tmp_path / "test", {"cat/1.png": 9, "ant/1.png": 8})
    train, test = load_cifar10(tmp_path)
    assert train.x[:, 0, 0, 0].tolist() == [1, 11, 12]
    assert test.x[:, 0, 0, 0].tolist() == [8, 9]
    lay(tmp_path / "test", {"dog/1.png": 9})
    assert_refused(lambda: load_cifar10(tmp_path), DataError, "ant", "cat")


def test_cifar10_from_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cifar10 = pytest.importorskip("torchvision.datasets").CIFAR10
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    assert_refused(lambda: load_cifar10(tmp_path), DataError)
    monkeypatch.setattr(cifar10, "train_list", [["data_batch_1", None]])
    monkeypatch.setattr(cifar10, "test_list", [["test_batch", None]])
    monkeypatch.setattr(cifar10, "meta", {"filename": "batches.meta", "key": "label_names", "md5": None})
    pixels = np.random.default_rng(0).integers(0, 256, (3, 3072), dtype=np.uint8)
    for name in ("data_batch_1", "test_batch"):
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": [1, 0, 1]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": ["airplane", "automobile"]}))
    train, test = load_cifar10(tmp_path)
    assert torch.equal(train.x, torch.from_numpy(pixels).view(3, 3, 32, 32))
    assert test.y.tolist() == [1, 0, 1]
    assert test.class_names == ("airplane", "automobile")


def test_bundled_sets() -> None:
    digits = load_sklearn("digits")
    assert digits.x.shape == (1797, 1, 8, 8)
    assert (float(digits.x.min()), float(digits.x.max())) == (0, 1)
    iris = load_sklearn("iris")
    assert iris.class_names == ("setosa", "versicolor", "virginica")
    assert np.array_equal(iris.x.numpy(), load_iris().data.astype(np.float32))
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


def test_split_depends_on_the_seed_only() -> None:
    x, y = _numbered()
    first, again, other = split(x, y, seed=3), split(x, y, seed=3), split(x, y, seed=4)
    assert torch.equal(first.test.x, again.test.x)
    assert torch.equal(first.train.x, again.train.x)
    assert not torch.equal(first.test.x, other.test.x)


def test_split_refuses_a_class_of_a_single_example() -> None:
    x, y = torch.zeros(20, 2), torch.tensor([0] * 19 + [1])
    assert_refused(lambda: split(x, y, class_names=["usual", "rare"]), DataError, "rare")


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


def test_a_part_without_room_for_each_class_says_what_to_do() -> None:
    assert_refused(
        lambda: hold_out(Split(torch.zeros(30, 2), torch.arange(30) % 3), 2), DataError, "2", "30", "data.fractions"
    )


def test_either_of_two_classes_can_be_the_positive_one() -> None:
    splits = split(*_numbered(), class_names=["no", "yes"])
    assert with_positive(splits, "yes") is splits
    turned = with_positive(splits, "no")
    assert turned.class_names == ("yes", "no")
    for part in ("train", "validation", "test"):
        assert torch.equal(getattr(turned, part).x, getattr(splits, part).x)
        assert torch.equal(getattr(turned, part).y, 1 - getattr(splits, part).y)
    assert_refused(lambda: with_positive(splits, "maybe"), DataError, "data.positive='maybe'", "'no'", "yes")
    assert_refused(lambda: with_positive(_splits([5, 5, 5], [5, 5, 5]), "a"), DataError, "data.positive='a'", "3")


@pytest.mark.parametrize("fractions", [(0.7, 0.3), (0.7, 0.3, 0.0), (0.7, 0.2, 0.2), (1.2, -0.3, 0.1)])
def test_impossible_fractions(fractions: tuple[float, ...]) -> None:
    assert_refused(lambda: split(*_numbered(), fractions), ValueError, "0", "1")


def test_sets_too_small_to_split() -> None:
    assert_refused(lambda: split(torch.zeros(4, 1), torch.tensor([0, 0, 1, 1]), (0.9, 0.05, 0.05)), DataError, "0", "4")
    assert_refused(lambda: split(torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64)), DataError)


def test_hold_out_by_count_or_share() -> None:
    x, y = _numbered()
    rest, held = hold_out(Split(x, y), 50)
    assert (len(rest), len(held)) == (150, 50)
    assert torch.equal(hold_out(Split(x, y), 0.25)[1].x, held.x)
    assert_refused(lambda: hold_out(Split(x, y), 200), DataError, "200")


def test_standardise_uses_train_only() -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(100, 3, generator=rng) * torch.tensor([1.0, 100.0, 0.0]) + torch.tensor([0.0, 1e4, 0.1])
    raw = split(x, torch.arange(100) % 2)
    scaled = standardise(raw)
    expected = (raw.test.x - raw.train.x.mean(0)) / raw.train.x.std(0, correction=0)
    assert torch.allclose(scaled.test.x[:, :2], expected[:, :2], atol=1e-3)
    assert torch.allclose(scaled.train.x.mean(0), torch.zeros(3), atol=1e-5)
    assert torch.allclose(scaled.train.x[:, :2].std(0, correction=0), torch.ones(2), atol=1e-5)
    assert scaled.test.x[:, 2].abs().max() < 1e-6
    images = split(torch.zeros(20, 3, 2, 2, dtype=torch.uint8), torch.arange(20) % 2)
    assert_refused(lambda: standardise(images), DataError, "uint8")


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


def test_a_column_without_a_number_in_train_is_named() -> None:
    x = torch.zeros(100, 3, dtype=torch.float64)
    x[:, 1] = torch.nan
    assert_refused(lambda: imputed(_table(x), "mean"), DataError, "'b'", "data.drop")


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


def test_the_positive_class_of_a_table_leaves_its_digits() -> None:
    seconds = 1_700_000_064 + torch.arange(300, dtype=torch.float64).view(100, 3)
    turned = with_positive(_table(seconds), "no")
    assert turned.train.x.dtype == torch.float64
    assert turned.class_names == ("yes", "no")


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
        ([180, 20], [0.9, 0.1], [180, 20]),  # as it is
        ([180, 20], [0.95, 0.05], [180, 9]),  # class 0 stays whole: 180 / 0.95 * 0.05 = 9.47
        ([184, 20], [0.95, 0.05], [184, 10]),  # 9.68
        ([10, 20, 30], [0.5, 0.25, 0.25], [10, 5, 5]),
        ([30, 10, 20], [0.2, 0.4, 0.4], [5, 10, 10]),
        ([7, 7, 7], [0.1, 0.2, 0.7], [1, 2, 7]),
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


def test_the_choice_for_a_class_ratio_is_random_by_seed() -> None:
    splits = _splits([90, 10], [90, 10])
    first, again, other = (shift_class_ratio(splits, [0.5, 0.5], seed) for seed in (1, 1, 2))
    assert torch.equal(first.validation.x, again.validation.x)
    assert torch.equal(first.test.x, again.test.x)
    assert not torch.equal(first.validation.x, other.validation.x)
    assert not torch.equal(first.validation.x, first.test.x)
    of_class_0 = splits.test.x[splits.test.y == 0, 0]
    often = torch.zeros(100)
    for seed in range(450):
        often[shift_class_ratio(splits, [0.5, 0.5], seed).test.x[:, 0].long()] += 1
    assert (often[splits.test.y == 1] == 450).all()
    assert 25 < often[of_class_0.long()].min() < 50 < often[of_class_0.long()].max() < 80  # each 50 times, std 6.7


@pytest.mark.parametrize(
    ("ratio", "names"),
    [
        ([], ("2",)),
        ([0.2, 0.3, 0.5], ("0.2", "0.3", "0.5")),
        ([0.5, 0.6], ("1", "0.5", "0.6")),
        ([1.0, 0.0], ("0",)),
        ([1.5, -0.5], ("0",)),
        ([0.5, float("nan")], ("0",)),
    ],
)
def test_impossible_class_ratios(ratio: list[float], names: tuple[str, ...]) -> None:
    assert_refused(lambda: shift_class_ratio(_splits([5, 5], [5, 5]), ratio), ValueError, *names)


def test_parts_too_small_for_a_class_ratio_are_named() -> None:
    assert_refused(lambda: shift_class_ratio(_splits([30, 30], [9, 9]), [0.95, 0.05]), DataError, "9", "0")
    assert_refused(lambda: shift_class_ratio(_splits([9, 0], [9, 9]), [0.5, 0.5]), DataError, "9", "0")


def test_several_labels_are_divided_by_their_shares() -> None:
    y = (torch.rand(200, 3, generator=torch.Generator().manual_seed(0)) < torch.tensor([0.5, 0.2, 0.05])).long()
    parts = split(torch.arange(200.0)[:, None], y, (0.6, 0.2, 0.2), class_names=("a", "b", "c"))
    for part, share in ((parts.train, 0.6), (parts.validation, 0.2), (parts.test, 0.2)):
        assert len(part) == 200 * share
        assert (part.y.sum(0) - share * y.sum(0)).abs().max() <= 2
    assert parts.num_classes == 3
    y[:, 2] = 0
    y[:2, 2] = 1
    assert_refused(lambda: split(torch.zeros(200, 1), y, class_names=("a", "b", "c")), DataError, "'c'", "2", "200")
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
