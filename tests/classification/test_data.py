"""Loaders on small files made here, splitting, and shifts of the class ratio."""

import gzip
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris
from torch import Tensor

from metricopt_ext.classification.data import (
    hold_out,
    load_a9a,
    load_cifar10,
    load_csv,
    load_libsvm,
    load_sklearn,
    split,
    standardise,
    with_positive,
)
from metricopt_ext.classification.shift import shift_class_ratio
from metricopt_ext.data.labelled import Split
from metricopt_ext.data.splits import Splits
from metricopt_ext.errors import DataError

LIBSVM = "-1 1:0.5 3:2\n+1 2:1\n-1\n"


def test_libsvm(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(LIBSVM)
    with gzip.open(tmp_path / "b.gz", "wt") as file:
        file.write("+1 4:7\n")
    data = load_libsvm([tmp_path / "a", tmp_path / "b.gz"])
    assert data.x.tolist() == [[0.5, 0, 2, 0], [0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 7]]
    assert data.x.dtype == torch.float32
    assert data.y.tolist() == [0, 1, 0, 1]
    assert data.class_names == ("-1", "1")
    assert load_libsvm(tmp_path / "a", num_features=6).x.shape == (3, 6)


@pytest.mark.parametrize("content", ["1 1:0.5\n1 2:oops\n", "", "1 a b\n", "1 1:nan\n"])
def test_malformed_libsvm(tmp_path: Path, content: str) -> None:
    (tmp_path / "bad").write_text(content)
    with pytest.raises(DataError, match=r"bad|finite"):
        load_libsvm(tmp_path / "bad")


def test_truncated_gzip_and_too_many_features(tmp_path: Path) -> None:
    (tmp_path / "cut.gz").write_bytes(gzip.compress(LIBSVM.encode() * 99)[:40])
    with pytest.raises(DataError, match=r"cut\.gz"):
        load_libsvm(tmp_path / "cut.gz")
    (tmp_path / "a").write_text(LIBSVM)
    with pytest.raises(DataError, match="features"):
        load_libsvm(tmp_path / "a", num_features=2)


def test_a9a_takes_either_form(tmp_path: Path) -> None:
    (tmp_path / "a9a").write_text("-1 3:1 14:1\n")
    with pytest.raises(DataError, match=r"a9a\.t or .*a9a\.t\.gz not found; set data\.root=DIR"):
        load_a9a(tmp_path)
    (tmp_path / "a9a.t.gz").write_bytes(gzip.compress(b"+1 1:1\n"))
    data = load_a9a(str(tmp_path))
    assert data.x.shape == (2, 123)
    assert data.x.nonzero().tolist() == [[0, 2], [0, 13], [1, 0]]
    assert data.y.tolist() == [0, 1]


CSV = "age, job,hours ,income\n30, clerk,40,>50K\n41,none,38.5, <=50K\n\n25, clerk, 1e1,<=50K\n"


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("\ufeff" + CSV, encoding="utf-8")
    data = load_csv(path, "income")
    assert data.x.tolist() == [[30, 1, 0, 40], [41, 0, 1, 38.5], [25, 1, 0, 10]]
    assert data.y.tolist() == [1, 0, 0]
    assert data.class_names == ("<=50K", ">50K")
    assert load_csv(path, "income", drop=["job", "age"]).x.tolist() == [[40], [38.5], [10]]


def test_marks_of_missing_numbers_are_values_of_a_text_column(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(",kind,y\n0,?,b\n1,none,b\n2,red,NA\n")
    data = load_csv(tmp_path / "t.csv", "y", drop=[""])
    assert data.x.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert data.class_names == ("NA", "b")


def test_words_alone_are_values(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("kind,y\nNA,none\n,NULL\nnone,NULL\n")
    data = load_csv(tmp_path / "t.csv", "y")
    assert data.x.tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1]]
    assert data.class_names == ("NULL", "none")


def test_a_class_may_be_named_like_a_missing_number(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,y\n1,none\n2,10\n3,NA\n4,9\n")
    data = load_csv(tmp_path / "t.csv", "y")
    assert data.class_names == ("9", "10", "NA", "none")
    assert data.y.tolist() == [3, 1, 2, 0]


def test_errors_of_wide_tables_are_short(tmp_path: Path) -> None:
    names = [f"feature_{i}" for i in range(55)]
    (tmp_path / "t.csv").write_text(",".join([*names, "target"]) + "\n" + ",".join(["1"] * 55 + ["a"]) + "\n")
    with pytest.raises(DataError, match=r"'Target', got 0; nearest among 56: 'target', ") as caught:
        load_csv(tmp_path / "t.csv", "Target")
    assert str(caught.value).count("feature_") == 2
    (tmp_path / "t.csv").write_text("text,y\n" + "".join(f"{i} {'word ' * 99},a\n" for i in range(9)))
    with pytest.raises(DataError, match="got 9 such as") as caught:
        load_csv(tmp_path / "t.csv", "y", max_categories=8)
    assert len(str(caught.value).replace(str(tmp_path), "")) < 250


def test_csv_orders_numeric_classes_by_number(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("x;y\n1;10\n2;-1\n3;9\n4;2\n5;10\n")
    data = load_csv(tmp_path / "t.csv", "y", delimiter=";")
    assert data.class_names == ("-1", "2", "9", "10")
    assert data.y.tolist() == [3, 0, 2, 1, 3]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (CSV, {"target": "incme"}, "'incme', got 0; nearest among 4: 'income', "),
        (CSV, {"target": "income", "drop": ["jobs"]}, "nearest among 4: 'job', "),
        (CSV, {"target": "income", "delimiter": ";"}, r"among 1: 'age, job,hours ,income'; is data\.delimiter the"),
        ("1,2,no\n3,4,yes\n", {"target": "y"}, "'y', got 0; .*; its first row must name the columns"),
        (",a,y\n1,2,0\n2,3,1\n", {"target": "y"}, r"""column 1 of 3 has no name, .* \("data\.drop=\[''\]"\)"""),
        (CSV, {"target": "income", "delimiter": "||"}, r"data\.delimiter='\|\|' must be one character"),
        ("a,a,y\n1,2,3\n", {"target": "a"}, "one column 'a', got 2"),
        ("a,y\n1,0\n,1\n", {"target": "y"}, "'a' .* got '' in row 3"),
        ("a,y\n1,0\ninf,1\n", {"target": "y"}, "'a' .* got 'inf' in row 3"),
        ("a,y\n1,0\n?,1\n", {"target": "y"}, r"'a' .* got '\?' in row 3; fill it in, or .* \(data\.drop=\[a\]\)"),
        ("a,y\n1,0\n2,1\nNA,1\n", {"target": "y"}, "'a' .* got 'NA' in row 4"),
        ('a,y\n"1,5",0\n2,1\n', {"target": "y"}, "numbers must have a decimal point, got '1,5' in column 'a'"),
        ("a,y\n1,0\n2,\n", {"target": "y"}, "'y' must be given in each row, but is '' in row 3"),
        ("a,y\n1,no\n2,\n", {"target": "y"}, "'y' must be given in each row, but is '' in row 3"),
        ("a,y\n1,no\n2,?\n", {"target": "y"}, r"'y' must be given in each row, but is '\?' in row 3"),
        ("a,y\n?,0\n,1\n", {"target": "y"}, r"'a' .* got '\?' in row 2"),
        ("a,y\n1,0\n2\n", {"target": "y"}, "row 3 must have 2 cells"),
        ("y\n0\n1\n", {"target": "y"}, "feature column"),
        ("a,y\n", {"target": "y"}, "at least one row"),
        ("a,y\n\n\n", {"target": "y"}, "at least one row"),
        (
            "a,y\np,0\nq,1\nr,1\n",
            {"target": "y", "max_categories": 2},
            r"text column 'a' .* got 3 such as \['p', 'q', 'r'\]; leave it out \(data\.drop=\[a\]\) or raise",
        ),
        (
            "a,y\n1,0.5\n1,1.5\n2,2.5\n",
            {"target": "y", "max_categories": 2},
            "target 'y' .* got 3 .* must hold classes, not a quantity",
        ),
        ('a,y\n"1,0\n', {"target": "y"}, "as CSV"),
    ],
)
def test_bad_csv_is_named(tmp_path: Path, content: str, options: dict[str, Any], message: str) -> None:
    (tmp_path / "t.csv").write_text(content)
    with pytest.raises(DataError, match=message):
        load_csv(tmp_path / "t.csv", **options)


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_cifar10_from_images(lay: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    lay(tmp_path / "train", {"cat/2.png": 12, "cat/1.png": 11, "ant/7.png": 1}, kind)
    with pytest.raises(DataError, match=r"test or .*test\.zip not found"):
        load_cifar10(tmp_path)
    lay(tmp_path / "test", {"cat/1.png": 9, "ant/1.png": 8}, kind)
    train, test = load_cifar10(tmp_path, limit_per_class=1)
    assert train.x[:, 0, 0, 0].tolist() == [1, 11]
    assert test.x[:, 0, 0, 0].tolist() == [8, 9]
    lay(tmp_path / "test", {"dog/1.png": 9}, kind)
    with pytest.raises(DataError, match=r"classes of train \('ant', 'cat'\)"):
        load_cifar10(tmp_path)


def test_cifar10_from_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cifar10 = pytest.importorskip("torchvision.datasets").CIFAR10
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    with pytest.raises(DataError, match="incomplete or corrupt"):
        load_cifar10(tmp_path)
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
    assert load_cifar10(tmp_path, limit_per_class=1)[0].y.tolist() == [1, 0]


@pytest.mark.parametrize("load", [load_libsvm, lambda path: load_csv(path, "y")])
def test_a_missing_file_names_the_path_and_the_key(tmp_path: Path, load: Any) -> None:
    with pytest.raises(DataError, match=r"nowhere not found; set data\.root=DIR"):
        load(tmp_path / "nowhere")


def test_bundled_sets() -> None:
    digits = load_sklearn("digits")
    assert digits.x.shape == (1797, 1, 8, 8)
    assert (float(digits.x.min()), float(digits.x.max())) == (0, 1)
    iris = load_sklearn("iris")
    assert iris.class_names == ("setosa", "versicolor", "virginica")
    assert np.array_equal(iris.x.numpy(), load_iris().data.astype(np.float32))
    assert [len(load_sklearn(name).class_names) for name in ("wine", "breast_cancer")] == [3, 2]
    with pytest.raises(ValueError, match=r"digits.*'mnist'"):
        load_sklearn("mnist")


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
    with pytest.raises(DataError, match="class 'rare' has a single example"):
        split(x, y, class_names=["usual", "rare"])
    with pytest.raises(DataError, match="cannot set aside 4 of 20 examples by class"):
        hold_out(Split(x, y), 4)


def test_either_of_two_classes_can_be_the_positive_one() -> None:
    splits = split(*_numbered(), class_names=["no", "yes"])
    assert with_positive(splits, "yes") is splits
    turned = with_positive(splits, "no")
    assert turned.class_names == ("yes", "no")
    for part in ("train", "validation", "test"):
        assert torch.equal(getattr(turned, part).x, getattr(splits, part).x)
        assert torch.equal(getattr(turned, part).y, 1 - getattr(splits, part).y)
    with pytest.raises(DataError, match=r"data\.positive='maybe' must be one of the two classes, 'no' or 'yes'"):
        with_positive(splits, "maybe")
    with pytest.raises(DataError, match=r"data\.positive='a' is for two classes, but the data have 3"):
        with_positive(_splits([5, 5, 5], [5, 5, 5]), "a")


@pytest.mark.parametrize("fractions", [(0.7, 0.3), (0.7, 0.3, 0.0), (0.7, 0.2, 0.2), (1.2, -0.3, 0.1)])
def test_impossible_fractions(fractions: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="three numbers above 0 that sum to 1"):
        split(*_numbered(), fractions)


def test_sets_too_small_to_split() -> None:
    with pytest.raises(DataError, match="0 of 4 examples"):
        split(torch.zeros(4, 1), torch.tensor([0, 0, 1, 1]), (0.9, 0.05, 0.05))
    with pytest.raises(DataError, match="empty"):
        split(torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64))


def test_hold_out_by_count_or_share() -> None:
    x, y = _numbered()
    rest, held = hold_out(Split(x, y), 50)
    assert (len(rest), len(held)) == (150, 50)
    assert torch.equal(hold_out(Split(x, y), 0.25)[1].x, held.x)
    with pytest.raises(DataError, match="200 of 200"):
        hold_out(Split(x, y), 200)


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
    with pytest.raises(DataError, match="uint8"):
        standardise(images)


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
    ("ratio", "message"),
    [
        ([], r"one share for each of 2 classes, got \[\]"),
        ([0.2, 0.3, 0.5], r"one share for each of 2 classes, got \[0\.2, 0\.3, 0\.5\]"),
        ([0.5, 0.6], r"shares above 0 that sum to 1, got \[0\.5, 0\.6\]"),
        ([1.0, 0.0], "shares above 0"),
        ([1.5, -0.5], "shares above 0"),
        ([0.5, float("nan")], "shares above 0"),
    ],
)
def test_impossible_class_ratios(ratio: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shift_class_ratio(_splits([5, 5], [5, 5]), ratio)


def test_parts_too_small_for_a_class_ratio_are_named() -> None:
    with pytest.raises(DataError, match=r"the test part is too small .* of \[9, 9\] examples .* keep \[9, 0\]"):
        shift_class_ratio(_splits([30, 30], [9, 9]), [0.95, 0.05])
    with pytest.raises(DataError, match=r"the validation part is too small .* of \[9, 0\] examples .* keep \[0, 0\]"):
        shift_class_ratio(_splits([9, 0], [9, 9]), [0.5, 0.5])
