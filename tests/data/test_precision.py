"""What float32 does not tell apart is refused by its column, and nothing else."""

import pytest
import torch
from torch import Tensor

from helpers.refusals import assert_refused
from metricopt_ext.data.precision import check_told_apart, mean_and_spread
from metricopt_ext.errors import DataError

SECONDS = 1_700_000_064 + torch.arange(400.0, dtype=torch.float64)


@pytest.mark.parametrize(
    ("x", "names"),
    [
        (SECONDS, ("'ts'", "400", "5")),
        (2.0**24 + torch.arange(99, dtype=torch.float64), ("'ts'", "99")),
        (torch.tensor([1e39, 1.0], dtype=torch.float64), ("'ts'", "float32")),
        (torch.cat([torch.zeros(400, dtype=torch.float64), SECONDS]), ("401", "6")),
    ],
)
def test_a_column_that_loses_its_values(x: Tensor, names: tuple[str, ...]) -> None:
    exact = torch.stack([torch.zeros_like(x), x], 1)
    assert_refused(lambda: check_told_apart(exact, exact.float(), ["zero", "ts"], "do so"), DataError, *names)


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(100, dtype=torch.float64) / 10,
        torch.randn(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
        1e7 + 9e4 * torch.arange(1000, dtype=torch.float64),
        torch.full((9,), 0.1, dtype=torch.float64),
        torch.tensor([1e30, 2e30], dtype=torch.float64),
        torch.zeros(0, dtype=torch.float64),
    ],
)
def test_rounding_that_does_no_harm(x: Tensor) -> None:
    check_told_apart(x[:, None], x[:, None].float())


def test_columns_of_any_scale_have_their_spread() -> None:
    scales = torch.tensor([1e300, 1.0, 1e-300, 0.0], dtype=torch.float64)
    x = torch.tensor([[0.0], [1.0], [5.0]], dtype=torch.float64) * scales
    mean, std = mean_and_spread(x)
    torch.testing.assert_close(mean, 2 * scales)
    torch.testing.assert_close(
        (x - mean) / std, (x[:, 1:2] - 2) / x[:, 1].std(correction=0) * torch.tensor([1, 1, 1, 0])
    )
