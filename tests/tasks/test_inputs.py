"""Batches of inputs without labels: what is refused, and by which words."""

from typing import Any

import pytest
import torch

from metricopt_ext.errors import AdapterError, DataError
from metricopt_ext.tasks.inputs import each_batch


def test_each_batch_is_used_once_and_in_order() -> None:
    assert list(each_batch(torch.arange(6).split(2), lambda batch: int(batch.sum()))) == [1, 5, 9]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (None, "inputs are None; give batches"),
        ("abc", "inputs are 'abc'; give batches"),
        ([], r"there are no inputs, or an iterator of them has ended; .*x\.split\(100\)"),
        ([torch.ones(2), torch.ones(0)], "batch 1 of the inputs has no examples"),
        ([torch.ones(2), {}], r"can't take batch 1 of the inputs, \{\}: no sum; give batches"),
        ([torch.tensor(1.0)], r"can't take batch 0 of the inputs, a tensor of shape \(\): no sum"),
    ],
)
def test_what_are_no_batches_is_refused(inputs: Any, message: str) -> None:
    def use(batch: Any) -> None:
        if isinstance(batch, dict) or not batch.dim():
            raise ValueError("no sum")

    with pytest.raises(DataError, match=message):
        list(each_batch(inputs, use))


def test_what_is_said_on_purpose_stays_as_it_is() -> None:
    def use(batch: Any) -> None:
        raise AdapterError("no logits")

    with pytest.raises(AdapterError, match=r"^no logits$"):
        list(each_batch([1], use))
