"""Batches of inputs without labels: what is refused, and by which words."""

from typing import Any

import pytest
import torch

from helpers.refusals import assert_refused
from metricopt_ext.errors import AdapterError, DataError
from metricopt_ext.tasks.inputs import each_batch


def test_each_batch_is_used_once_and_in_order() -> None:
    assert list(each_batch(torch.arange(6).split(2), lambda batch: int(batch.sum()))) == [1, 5, 9]


@pytest.mark.parametrize(
    ("inputs", "names"),
    [
        (None, ("inputs", "None")),
        ("abc", ("inputs", "abc")),
        ([], ("x.split(100)",)),
        ([torch.ones(2), torch.ones(0)], ("1",)),
        ([torch.ones(2), {}], ("1",)),
        ([torch.tensor(1.0)], ("0",)),
    ],
)
def test_what_are_no_batches_is_refused(inputs: Any, names: tuple[str, ...]) -> None:
    def use(batch: Any) -> None:
        if isinstance(batch, dict) or not batch.dim():
            raise ValueError("no sum")

    assert_refused(lambda: list(each_batch(inputs, use)), DataError, *names)


def test_what_is_said_on_purpose_stays_as_it_is() -> None:
    def use(batch: Any) -> None:
        raise AdapterError("no logits")

    assert_refused(lambda: list(each_batch([1], use)), AdapterError, "no logits")
