"""What float32 does not tell apart is refused by its column, and nothing else."""

import pytest
import torch
from torch import Tensor

from metricopt_ext.data.precision import check_told_apart, mean_and_spread
from metricopt_ext.errors import DataError

SECONDS = 1_700_000_064 + torch.arange(400.0, dtype=torch.float64)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (SECONDS, r"column 'ts'.*of 400.*5 are left; do so"),
        (2.0**24 + torch.arange(99, dtype=torch.float64), "column 'ts' apart: of 99 different ones"),
        (torch.tensor([1e39, 1.0], dtype=torch.float64), r"column 'ts'.*large for float32; do so"),
        (torch.cat([torch.zeros(400, dtype=torch.float64), SECONDS]), "of 401 different ones, .* 6 are left"),
    ],
)
def test_a_column_that_loses_its_values(x: Tensor, message: str) -> None:
    exact = torch.stack([torch.zeros_like(x), x], 1)
    with pytest.raises(DataError, match=message):
        check_told_apart(exact, exact.float(), ["zero", "ts"], "do so")


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


def test_only_what_is_finite_matters_beside_train() -> None:
    check_told_apart(SECONDS[:, None], SECONDS[:, None].float(), distinct=False)
    with pytest.raises(DataError, match="column 1 has"):
        check_told_apart(1e30 * SECONDS[:, None], 1e30 * SECONDS[:, None].float(), distinct=False)


def test_columns_of_any_scale_have_their_spread() -> None:
    scales = torch.tensor([1e300, 1.0, 1e-300, 0.0], dtype=torch.float64)
    x = torch.tensor([[0.0], [1.0], [5.0]], dtype=torch.float64) * scales
    mean, std = mean_and_spread(x)
    torch.testing.assert_close(mean, 2 * scales)
    torch.testing.assert_close(
        (x - mean) / std, (x[:, 1:2] - 2) / x[:, 1].std(correction=0) * torch.tensor([1, 1, 1, 0])
    )
