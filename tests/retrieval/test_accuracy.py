"""The calculator in the place of pytorch-metric-learning's: beside that one, and beside definitions written out."""

import doctest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from helpers.refusals import assert_refused

pytest.importorskip("faiss")
pytest.importorskip("pytorch_metric_learning")

from pytorch_metric_learning import losses, testers, trainers
from pytorch_metric_learning.distances import CosineSimilarity, LpDistance
from pytorch_metric_learning.utils import accuracy_calculator as theirs
from pytorch_metric_learning.utils.inference import CustomKNN
from pytorch_metric_learning.utils.logging_presets import HookContainer

from metricopt_ext.retrieval import accuracy
from metricopt_ext.retrieval.accuracy import AccuracyCalculator, RecallCalculator
from metricopt_ext.retrieval.recall import recall_at_k

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


@pytest.mark.parametrize("k", [None, "max_bin_count"])
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
        lambda: ours.get_accuracy(x, 2**24 + torch.arange(80).reshape(40, 2)), ValueError, "labels", "float32", "0"
    )


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda: AccuracyCalculator(knn_func=CustomKNN(LpDistance()), distance="ip"), ("distance='ip'", "knn_func")),
        (lambda: RecallCalculator(("recall_at_5",), ks=(7,)), ("recall_at_7",)),
        (lambda: RecallCalculator().get_accuracy(*drawn(30), *drawn(30, 1), True), ("queries",)),
    ],
)
def test_what_contradicts_itself_is_refused(call: Any, names: tuple[str, ...]) -> None:
    assert_refused(call, ValueError, *names)


def test_cosine_is_pytorch_metric_learning_s() -> None:
    x, y = drawn(300)
    x *= torch.randn(300, 1, generator=torch.Generator().manual_seed(1)).exp()
    own = ("precision_at_1", "mean_average_precision_at_r")
    base = theirs.AccuracyCalculator(own, k=200, knn_func=CustomKNN(CosineSimilarity()), device=CPU)
    expected = base.get_accuracy(x[:100], y[:100], x[100:], y[100:])
    calculator = RecallCalculator(("recall_at_1", *own), ks=(1,), distance="cosine", k=200, device=CPU)
    found = calculator.get_accuracy(x[:100], y[:100], x[100:], y[100:])
    assert found.pop("recall_at_1") == pytest.approx(expected["precision_at_1"])
    assert found == pytest.approx(expected)
    assert expected["precision_at_1"] != recall_at_k(x[:100], y[:100], (1,), gallery=(x[100:], y[100:])).at[1]


def test_large_labels_are_told_apart() -> None:
    x, y = drawn(300)
    calculator = RecallCalculator(("recall_at_1", "r_precision"), ks=(1,), k="max_bin_count", device=CPU)
    for gallery in ((), (x[100:], y[100:])):
        large = (gallery[0], gallery[1] + 2**24) if gallery else ()
        expected = calculator.get_accuracy(x[:100], y[:100], *gallery)
        assert calculator.get_accuracy(x[:100], y[:100] + 2**24, *large) == expected


def test_primary_metric_of_testers_and_hooks(tmp_path: Path, records: Any) -> None:
    """Each epoch's number is that of the trunk as it then is, and the best one's is kept."""
    x, y = drawn(120)
    data = list(zip(x, (y + 2**24).tolist(), strict=True))  # neighbouring labels are the same float32
    trunk, seen = nn.Linear(4, 4), list[dict[int, float]]()
    hooks = HookContainer(records, primary_metric="recall_at_10", validation_split_name="val", log_freq=10**9)
    tester = testers.GlobalEmbeddingSpaceTester(
        end_of_testing_hook=hooks.end_of_testing_hook,
        accuracy_calculator=RecallCalculator(ks=(1, 10), device=CPU),
        dataloader_num_workers=0,
        data_device=CPU,
    )
    evaluate = hooks.end_of_epoch_hook(tester, {"val": data}, str(tmp_path))

    def end_of_epoch(trainer: Any) -> Any:
        go_on = evaluate(trainer)
        seen.append(recall_at_k(nn.functional.normalize(trunk(x)), y, (1, 10)).at)
        assert tester.all_accuracies["val"]["recall_at_1_level0"] == seen[-1][1]
        assert hooks.get_curr_primary_metric(tester, "val") == seen[-1][10]
        return go_on

    trainers.MetricLossOnly(
        models={"trunk": trunk},
        optimizers={"trunk_optimizer": torch.optim.SGD(trunk.parameters(), lr=0.3)},
        batch_size=60,
        loss_funcs={"metric_loss": losses.ContrastiveLoss()},
        dataset=data,
        data_device=CPU,
        dataloader_num_workers=0,
        end_of_epoch_hook=end_of_epoch,
    ).train(num_epochs=3)
    best = max(range(3), key=lambda epoch: seen[epoch][10])
    assert hooks.get_best_epoch_and_accuracy(tester, "val") == (best + 1, seen[best][10])
    assert (tmp_path / f"trunk_best{best + 1}.pth").is_file()


def test_examples() -> None:
    failed, attempted = doctest.testmod(accuracy)
    assert attempted > failed == 0
