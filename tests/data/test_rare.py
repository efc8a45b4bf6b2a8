"""Groups with few examples, counted and named."""

import pytest

from metricopt_ext.data.rare import Rare, rare_groups


def test_groups_below_ten_are_rare() -> None:
    assert rare_groups("class", {"low": 30, "mid": 10}) is None
    assert rare_groups("class", {}) is None
    rare = rare_groups("class", {"low": 30, "mid": 9, "seldom": 0})
    assert rare == Rare("class", 3, 2, {"seldom": 0, "mid": 9})
    assert str(rare) == (
        "2 of 3 classes have fewer than 10 examples in the validation data, which the metric sees ('seldom' 0, 'mid'"
        " 9). Its values for them are mostly chance: add validation examples of them"
    )


@pytest.mark.parametrize(("count", "words"), [(1, "1 of 1 class has fewer"), (7, "7 of 7 classes have fewer")])
def test_the_five_rarest_are_named(count: int, words: str) -> None:
    rare = rare_groups("class", {f"c{i}": 7 - i for i in range(count)})
    assert rare is not None
    assert str(rare).startswith(words)
    assert list(rare.fewest) == [f"c{i}" for i in range(count)][::-1][:5]
    assert (", ...)" in str(rare)) == (count > 5)
