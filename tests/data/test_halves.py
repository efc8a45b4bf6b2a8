"""Halves and parts of examples by class and by label, and groups that are rare."""

import pytest
import torch

from metricopt_ext.data.halves import class_draws, class_halves, stratified_halves
from metricopt_ext.data.label_parts import label_halves, label_parts
from metricopt_ext.data.rare import Rare, rare_groups


def test_halves_are_of_classes() -> None:
    y = torch.arange(7).repeat_interleave(3)[torch.randperm(21, generator=torch.Generator().manual_seed(0))]
    a, b = class_halves(y, seed=2)
    assert sorted([*a.tolist(), *b.tolist()]) == list(range(21))
    assert not {*y[a].tolist()} & {*y[b].tolist()}
    assert {len(y[a].unique()), len(y[b].unique())} == {3, 4}
    assert any(not torch.equal(class_halves(y, seed)[0], a) for seed in range(3, 6))
    few = "one of two halves of its classes would have fewer than two classes with two examples"
    assert class_halves(torch.tensor([0, 0, 1, 1, 2, 2]), seed=0) == few
    assert class_halves(torch.tensor([0, 0, 1, 1, 2, 2, 3]), seed=0) == few  # one half would have no two pairs
    assert class_halves(torch.tensor([], dtype=torch.long), seed=0) == few
    assert class_halves(torch.arange(40), seed=0) == few


@pytest.mark.parametrize("seed", range(8))
def test_halves_of_classes_have_two_at_each_level(seed: int) -> None:
    y = torch.arange(240) % 4
    labels = torch.stack([y, y // 2], 1)
    halves = class_halves(labels, seed)
    assert len(halves) == 2
    for half in halves:
        assert [len(labels[half, level].unique()) for level in (0, 1)] == [2, 2]
    assert torch.equal(torch.cat(list(halves)).sort().values, torch.arange(240))
    alone = class_halves(y, seed)
    assert all(torch.equal(a, b) for a, b in zip(class_halves(y[:, None], seed), alone, strict=True))


def test_halves_of_classes_at_many_levels() -> None:
    """24 classes of 6 families of 2 orders, labelled in no order: both families and orders are divided evenly."""
    rng = torch.Generator().manual_seed(0)
    names = [torch.randperm(count, generator=rng) for count in (24, 6, 2)]
    y = torch.arange(24).repeat_interleave(2)
    labels = torch.stack([names[0][y], names[1][y // 4], names[2][y // 12]], 1)
    found = [class_halves(labels, seed) for seed in range(4)]
    for first, second in found:
        for level in (1, 2):
            assert torch.equal(labels[first, level].bincount(), labels[second, level].bincount())
    assert not all(torch.equal(halves[0], found[0][0]) for halves in found)


@pytest.mark.parametrize(("classes", "pairs"), [(20, 8), (4, 3)])
def test_classes_are_divided_several_times_each_time_otherwise(classes: int, pairs: int) -> None:
    """Four classes have three divisions, which 32 draws miss by chance once in 100,000 seeds."""
    y = torch.arange(classes).repeat(5)
    draws = class_draws(y, seed=1)
    assert isinstance(draws, list)
    assert len(draws) == pairs
    assert all(torch.equal(a, b) for a, b in zip(draws[0], class_halves(y, seed=1), strict=True))
    assert len({frozenset((tuple(a.tolist()), tuple(b.tolist()))) for a, b in draws}) == pairs
    for a, b in draws:
        assert sorted([*a.tolist(), *b.tolist()]) == list(range(len(y)))
        assert not {*y[a].tolist()} & {*y[b].tolist()}
    again, other = class_draws(y, seed=1), class_draws(y, seed=2)
    assert all(torch.equal(a, b) for x, z in zip(draws, again, strict=True) for a, b in zip(x, z, strict=True))
    assert classes == 4 or not torch.equal(draws[0][0], other[0][0])  # type: ignore[arg-type]
    assert len(class_draws(torch.arange(20).repeat(5), seed=1, draws=3)) == 3


def test_halves_have_the_same_make_up() -> None:
    y = torch.tensor([0] * 7 + [1] * 4 + [2] * 2)[torch.randperm(13, generator=torch.Generator().manual_seed(0))]
    a, b = stratified_halves(y, seed=3)
    assert sorted([*a.tolist(), *b.tolist()]) == list(range(13))
    for kind in range(3):
        assert abs(int((y[a] == kind).sum()) - int((y[b] == kind).sum())) <= 1
    assert not torch.equal(stratified_halves(y, seed=4)[0], a)
    why = "a single example, and both need one"
    assert stratified_halves(torch.tensor([0, 0, 1]), seed=0) == f"1 of 2 classes has {why}"
    assert stratified_halves(torch.tensor([0, 0, 1, 5]), seed=0) == f"2 of 3 classes have {why}"
    assert stratified_halves(y[:0], seed=0) == "there are no examples"


def test_halves_have_the_same_make_up_within_classes() -> None:
    y = torch.tensor([0, 1]).repeat(20)
    groups = 3 * y + torch.arange(40) % 3
    halves = stratified_halves(y, 2, groups)
    assert not isinstance(halves, str)
    first, second = (torch.bincount(groups[half], minlength=6) for half in halves)
    assert (first - second).abs().max() <= 1
    assert torch.bincount(y[halves[0]]).tolist() == [10, 10]


def labels(rows: int = 200) -> torch.Tensor:
    shares = torch.tensor([0.5, 0.2, 0.03, 0.1])
    return (torch.rand(rows, 4, generator=torch.Generator().manual_seed(1)) < shares).long()


@pytest.mark.parametrize("sizes", [[140, 20, 40], [100, 100], [1, 199]])
def test_each_part_has_its_share_of_each_label(sizes: list[int]) -> None:
    y = labels()
    parts = label_parts(y, sizes, seed=0)
    assert [len(part) for part in parts] == sizes
    assert sorted(torch.cat(parts).tolist()) == list(range(200))
    for part in parts:
        expected = y.sum(0) * len(part) / 200
        assert (y[part].sum(0) - expected).abs().max() <= 2
        assert part.tolist() == sorted(part.tolist())
    assert not torch.equal(label_parts(y, sizes, seed=1)[0], parts[0])


def test_halves_have_each_label() -> None:
    halves = label_halves(labels(), seed=0)
    assert not isinstance(halves, str)
    first, second = (labels()[half].sum(0) for half in halves)
    assert (first - second).abs().max() <= 2
    assert min(first.min(), second.min()) >= 1


def test_a_label_of_one_example_leaves_no_halves() -> None:
    y = labels()
    y[:, 2] = 0
    y[3, 2] = 1
    assert label_halves(y, 0) == "1 of 4 labels has a single example with or without it, and both need one"
    y[:, 1] = 1
    y[4, 1] = 0
    assert str(label_halves(y, 0)).startswith("2 of 4 labels have a single example")
    assert label_halves(y[:1], 0) == "there are fewer than two examples"


def test_groups_below_ten_are_rare() -> None:
    assert rare_groups("class", {"low": 30, "mid": 10}) is None
    assert rare_groups("class", {}) is None
    rare = rare_groups("class", {"low": 30, "mid": 9, "seldom": 0})
    assert rare == Rare("class", 3, 2, {"seldom": 0, "mid": 9})
    assert str(rare) == (
        "2 of 3 classes have fewer than 10 examples in the validation data, which the metric sees ('seldom' 0, 'mid'"
        " 9). Its values for them are mostly chance: add validation examples of them"
    )
