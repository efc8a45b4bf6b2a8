"""Numbers as others return them."""

from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from metricopt_ext.utils.numbers import number_of, within


@pytest.mark.parametrize(
    "value",
    [
        *(0.5, Decimal("0.5"), "0.5", np.float16(0.5), np.array([[0.5]])),
        *(torch.tensor([0.5], dtype=torch.bfloat16), torch.tensor(0.5, requires_grad=True)),
    ],
)
@pytest.mark.filterwarnings("error")
def test_one_number_in_whatever_holds_it(value: Any) -> None:
    assert number_of(value) == 0.5


def test_rounding_alone_is_taken_back() -> None:
    assert [within(value, -1, 3) for value in (-1 - 3e-6, -1, 0.3, 3 + 3e-6)] == [-1, -1, 0.3, 3]
    assert [within(value, -1, 3) for value in (-1.1, 3 + 5e-6)] == [-1.1, 3 + 5e-6]
