"""Parts and halves of examples with several labels."""

import pytest
import torch

from metricopt_ext.data.label_parts import label_halves, label_parts


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
