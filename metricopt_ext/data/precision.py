"""Numbers of tables as float32 inputs: refused where rounding takes away what tells the values of a column apart."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from metricopt_ext.data.labelled import Labelled, Table
from metricopt_ext.errors import DataError
from metricopt_ext.utils.words import brief

LEAST = 0.9  # share of a column's different values that must stay different
ENOUGH = 1 << 20  # different values with which a column is fine even so: among more, some always meet


def check_told_apart(
    exact: Tensor, rounded: Tensor, names: Sequence[str] = (), remedy: str = "", distinct: bool = True
) -> None:
    """Reject columns whose values are no longer finite, or no longer different, as float32.

    Args:
        exact: The numbers, ``n x d``, finite.
        rounded: What they became, ``n x d`` float32: rounded, or standardised before.
        names: Names of the columns, for the message; numbers from 1 if there are none.
        remedy: What to do, for the message.
        distinct: Whether values must stay different, too.

    Raises:
        DataError: Fewer than `LEAST` of the different values of a column are left, or one is infinite or NaN.
    """

    def named(column: int) -> str:
        return f"column {brief(names[column]) if names else column + 1}"

    bad = ~rounded.isfinite()
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        raise DataError(f"{named(column)} has {exact[row, column]:g}, too large for float32; {remedy}")
    if len(exact) == 0 or not distinct:
        return
    same = (rounded == exact).all(0)  # compared as float64
    low, high = exact.amin(0), exact.amax(0)
    two = ((exact == low) | (exact == high)).all(0) & (rounded.amin(0) < rounded.amax(0)) | (low == high)
    for column in (~(same | two)).nonzero().flatten().tolist():
        before, after = (len(torch.unique(x[:, column])) for x in (exact, rounded))
        if after < min(LEAST * before, ENOUGH):
            raise DataError(
                f"float32 can't tell the values of {named(column)} apart: of {before} different ones, from"
                f" {low[column]:.10g} to {high[column]:.10g}, {after} are left; {remedy}"
            )


def mean_and_spread(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation of each column, ``d`` each, float64; the latter is 1 of constant ones.

    Columns of ``n x d`` finite numbers are first divided by a power of 2, which is exact: squares of numbers such as
    1e200 or 1e-200 are beyond float64.
    """
    x = x.double()
    _, exponent = torch.frexp(x.abs().amax(0))
    unit = torch.tensor([math.ldexp(1.0, each) for each in exponent.clamp(-1000, 1000).tolist()], dtype=x.dtype)
    mean, std = (x / unit).mean(0) * unit, (x / unit).std(0, correction=0) * unit
    return mean, torch.where(x.amax(0) > x.amin(0), std, 1)


def in_single_precision(table: Table) -> Labelled:
    """Return a table with float32 inputs.

    Raises:
        DataError: As from `check_told_apart`.
    """
    x = table.x.float()
    check_told_apart(table.x, x, table.reading.inputs, "standardise it in float64, or leave it out")
    return Labelled(x, table.y, table.class_names)
