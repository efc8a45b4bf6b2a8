"""Halves of a metric's data: with the same make-up, or of classes of their own."""

import torch

from metricopt_ext.data.halves import class_halves, stratified_halves


def test_halves_are_of_classes() -> None:
    y = torch.arange(7).repeat_interleave(3)[torch.randperm(21, generator=torch.Generator().manual_seed(0))]
    a, b = class_halves(y, seed=2)
    assert sorted([*a.tolist(), *b.tolist()]) == list(range(21))
    assert not {*y[a].tolist()} & {*y[b].tolist()}
    assert {len(y[a].unique()), len(y[b].unique())} == {3, 4}
    assert any(not torch.equal(class_halves(y, seed)[0], a) for seed in range(3, 6))
    assert class_halves(torch.tensor([0, 0, 1, 1, 2, 2]), seed=0) == ()
    assert class_halves(torch.tensor([0, 0, 1, 1, 2, 2, 3]), seed=0) == ()  # one half would have no two pairs


def test_halves_have_the_same_make_up() -> None:
    y = torch.tensor([0] * 7 + [1] * 4 + [2] * 2)[torch.randperm(13, generator=torch.Generator().manual_seed(0))]
    a, b = stratified_halves(y, seed=3)
    assert sorted([*a.tolist(), *b.tolist()]) == list(range(13))
    for kind in range(3):
        assert abs(int((y[a] == kind).sum()) - int((y[b] == kind).sum())) <= 1
    assert not torch.equal(stratified_halves(y, seed=4)[0], a)
    assert stratified_halves(torch.tensor([0, 0, 1]), seed=0) == ()
