"""The calculator in the place of pytorch-metric-learning's: beside that one, and beside definitions written out."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from helpers.refusals import assert_refused

pytest.importorskip("faiss")
pytest.importorskip("pytorch_metric_learning")

from pytorch_metric_learning import testers
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.utils import accuracy_calculator as theirs
from pytorch_metric_learning.utils.inference import CustomKNN

from metricopt_ext.errors import DataError
from metricopt_ext.retrieval.accuracy import AccuracyCalculator, RecallCalculator

OWN = ("precision_at_1", "r_precision", "mean_average_precision", "mean_average_precision_at_r", "mean_reciprocal_rank")
CPU = torch.device("cpu")


def drawn(n: int, seed: int = 0, classes: int = 7) -> tuple[Any, Any]:
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (n,), generator=draw)
    x = torch.randn(n, 4, generator=draw) + torch.eye(4)[y % 4]
    y[:2] = torch.tensor([100 + seed, 200 + seed])  # which no other item has
    return x, y


def found_in_order(x: Any, y: Any, items: Any, labels: Any, own: bool, match: Any) -> dict[int, Any]:
    """For each query with a match, whether the items are ones, nearest first."""
    found = {}
    for i in range(len(x)):
        order = ((items - x[i]) ** 2).sum(1).argsort(stable=True)
        order = order[order != i] if own else order
        same = match(y[i], labels[order])
        if same.any():
            found[i] = same.numpy()
    return found


@pytest.mark.parametrize("k", [None, 6, "max_bin_count"])
@pytest.mark.parametrize("averages", [{}, {"avg_of_avgs": True}, {"return_per_class": True}])
def test_its_metrics_are_theirs_and_recalls_their_definition(k: Any, averages: Any) -> None:
    x, y = drawn(90)
    items, labels = drawn(50, 1)
    both = torch.cat([x, items]), torch.cat([y, labels])
    options = {"k": k, "device": CPU, **averages}
    ours = AccuracyCalculator(exclude=("AMI", "NMI"), ks=(1, 4), **options)
    other = theirs.AccuracyCalculator(exclude=("AMI", "NMI"), **options)
    for gallery, own in (((x, y), True), ((items, labels), False), (both, True)):
        values = ours.get_accuracy(x, y, *gallery, own)
        expected = other.get_accuracy(x, y, *gallery, own)
        assert {name: values[name] for name in OWN} == {name: pytest.approx(expected[name], abs=1e-9) for name in OWN}
        assert values["recall_at_1"] == pytest.approx(expected["precision_at_1"], abs=1e-9)
        hits = {i: same[:4].any() for i, same in found_in_order(x, y, *gallery, own, torch.eq).items()}
        means = [np.mean([hits[i] for i in hits if y[i] == each]) for each in y[list(hits)].unique()]
        of_4 = means if "return_per_class" in averages else np.mean(means if averages else list(hits.values()))
        assert values["recall_at_4"] == pytest.approx(of_4, abs=1e-9)
        assert list(values) == list(ours.get_function_dict())
    assert ours.get_accuracy(x, y) == ours.get_accuracy(x, y, x, y, True)


def test_a_search_of_ones_own_finds_the_recalls_too() -> None:
    x, y = drawn(90)
    knn = CustomKNN(LpDistance(normalize_embeddings=False, p=1))
    recalls = ("recall_at_1", "recall_at_60", "recall_at_500")
    ours = RecallCalculator((*recalls, *OWN), ks=(1, 60, 500), knn_func=knn, k=5, device=CPU)
    values = ours.get_accuracy(x, y)
    expected = theirs.AccuracyCalculator(OWN, k=5, knn_func=knn, device=CPU).get_accuracy(x, y)
    assert {name: values[name] for name in OWN} == expected
    assert values["recall_at_1"] == pytest.approx(expected["precision_at_1"])
    far = [(x - x[i]).abs().sum(1).argsort() for i in range(len(x)) if (y == y[i]).sum() > 1]
    assert values["recall_at_60"] == np.mean([(y[order[1:61]] == y[order[0]]).any().item() for order in far])
    assert ours.get_accuracy(x, y, include=("recall_at_500",)) == {"recall_at_500": 1.0}


@pytest.mark.parametrize("averages", [{}, {"avg_of_avgs": True}])
def test_labels_may_be_compared_by_ones_own_function(averages: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    x, items = torch.randn(40, 3, generator=draw), torch.randn(60, 3, generator=draw)
    y, labels = (torch.randint(3, (n, 2), generator=draw) for n in (40, 60))  # identity and camera

    def elsewhere(a: Any, b: Any) -> Any:
        return (a[..., 0] == b[..., 0]) & (a[..., 1] != b[..., 1])

    ours = RecallCalculator(ks=(1, 3), label_comparison_fn=elsewhere, device=CPU, **averages)
    values = ours.get_accuracy(x, y, items, labels)
    found = found_in_order(x, y, items, labels, False, elsewhere)
    for k in (1, 3):
        hits = {i: same[:k].any() for i, same in found.items()}
        means = [np.mean([hits[i] for i in hits if (y[i] == each).all()]) for each in y.unique(dim=0)]
        assert values[f"recall_at_{k}"] == pytest.approx(np.mean(means if averages else list(hits.values())))

    heights = torch.rand(40, generator=draw, dtype=torch.float64)
    values = RecallCalculator(ks=(2,), label_comparison_fn=lambda a, b: (a - b).abs() < 0.05).get_accuracy(x, heights)
    near = found_in_order(x, heights, x, heights, True, lambda a, b: (a.float() - b.float()).abs() < 0.05)
    assert values == {"recall_at_2": pytest.approx(np.mean([same[:2].any() for same in near.values()]))}
    assert_refused(
        lambda: ours.get_accuracy(x, 2**24 + torch.arange(80).reshape(40, 2)), DataError, "labels", "float32", "0"
    )


class Views(torch.utils.data.Dataset[Any]):
    """Two views of each example, and its label."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.x[i].flip(0), self.y[i]


@pytest.mark.parametrize("kind", ["GlobalEmbeddingSpaceTester", "WithSameParentLabelTester", "two streams"])
def test_each_tester_has_the_same_of_both(kind: str) -> None:
    (x, y), (items, labels) = drawn(60, classes=5), drawn(40, 1, classes=5)
    y[:2], labels[:2] = 0, 1
    two = kind == "two streams"
    data = {
        name: Views(*each) if two else torch.utils.data.TensorDataset(each[0], torch.stack([each[1], each[1] % 2], 1))
        for name, each in {"train": (x, y), "val": (items, labels)}.items()
    }
    splits = None if two else [("train", ["train", "val"]), ("val", ["train"])]
    found = []
    for calculator in (theirs.AccuracyCalculator(device=CPU), AccuracyCalculator(ks=(1,), device=CPU)):
        tester = getattr(testers, "GlobalTwoStreamEmbeddingSpaceTester" if two else kind)(
            accuracy_calculator=calculator, dataloader_num_workers=0, data_device=CPU
        )
        copied = None if splits is None else [(query, list(names)) for query, names in splits]
        found.append(tester.test(data, 0, nn.Identity(), splits_to_eval=copied))
    for split, values in found[0].items():
        assert found[1][split].pop("recall_at_1_level0") == pytest.approx(values["precision_at_1_level0"])
        assert found[1][split] == {name: pytest.approx(value, abs=1e-9) for name, value in values.items()}


def test_the_reciprocal_rank_alone_has_neighbours() -> None:
    x, y = drawn(30)  # with theirs, it has none unless another metric asks for them
    alone = RecallCalculator(("mean_reciprocal_rank",), device=CPU).get_accuracy(x, y)
    both = theirs.AccuracyCalculator(("mean_reciprocal_rank", "precision_at_1"), device=CPU).get_accuracy(x, y)
    assert alone == {"mean_reciprocal_rank": both["mean_reciprocal_rank"]}


def test_what_contradicts_itself_is_refused() -> None:
    assert_refused(
        lambda: AccuracyCalculator(knn_func=CustomKNN(LpDistance()), distance="ip"),
        DataError,
        "distance='ip'",
        "knn_func",
    )
    assert_refused(
        lambda: RecallCalculator(ks=(1,)).get_accuracy(*drawn(30), include=("recall_at_3",)),
        DataError,
        "include",
        "recall_at_3",
    )
    assert_refused(lambda: AccuracyCalculator(avg_of_avgs=True, return_per_class=True), ValueError)


def test_embeddings_may_lie_anyhow_in_memory() -> None:
    """Every other row of a tensor, and an array of another byte order; FAISS ended in an AssertionError."""
    x, y = drawn(60)
    calculator = AccuracyCalculator(("mean_average_precision", "recall_at_1"), ks=(1,), device=CPU)
    expected = calculator.get_accuracy(x[::2].clone(), y[::2], x[1::2].clone(), y[1::2])
    assert calculator.get_accuracy(x[::2], y[::2], x[1::2], y[1::2]) == expected
    swapped = x.numpy().astype(">f4")
    assert calculator.get_accuracy(swapped[::2], y[::2], swapped[1::2], y[1::2]) == expected
