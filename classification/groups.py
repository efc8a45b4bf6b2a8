"""Groups of examples within classes, by the columns that a metric is given: a half or a resample keeps their shares.

By ``metric.by`` they are groups that the metric is judged in, and each must have examples enough.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from metricopt_ext.classification.metrics import MetricSpec
from metricopt_ext.data.halves import Halves, stratified_halves
from metricopt_ext.data.label_parts import label_halves
from metricopt_ext.data.labelled import Split
from metricopt_ext.data.rare import Rare, rare_groups
from metricopt_ext.data.reading import Reading, warn_of_near_names
from metricopt_ext.data.splits import Splits
from metricopt_ext.errors import DataError
from metricopt_ext.utils.words import brief, counted

MOST = 20  # values of a column that divides examples into groups; one of more is weights, amounts or ids
MOST_JUDGED = 1000  # groups that a metric is judged in
LEAST, FEW = (
    2,
    20,
)  # examples of a group that it is judged in: below the first it is refused, below the second warned of
SHOWN = 20  # groups that a line names


def groups_of(part: Split, spec: MetricSpec) -> dict[str, Tensor]:
    """Return the number of each example's group, ``n``, by each of the metric's columns that has 2 to `MOST` values.

    Args:
        part: The examples.
        spec: The metric, whose columns the part has; the one that it is judged by may have any number of values.
    """
    found = {}
    for name in spec.columns:
        values, codes = np.unique(part.columns[name], return_inverse=True)
        if 2 <= len(values) <= (MOST_JUDGED if spec.outcomes else MOST):
            found[name] = torch.from_numpy(codes).to(part.y.device)
    return found


def strata(part: Split, spec: MetricSpec) -> Tensor:
    """Number the examples, ``n``, by class and, within each, by the groups of the metric's columns.

    Several labels each are no classes: all examples are alike but for the columns.
    """
    classes = part.y if part.y.dim() == 1 else torch.zeros_like(part.y[:, 0])
    groups = [*groups_of(part, spec).values()]
    # Neighbours are dealt to both halves. Of a group that is judged, both need examples, be they of different classes.
    together = torch.stack([*groups, classes] if spec.outcomes else [classes, *groups], 1)
    numbers: Tensor = together.unique(dim=0, return_inverse=True)[1]
    return numbers


def metric_halves(part: Split, spec: MetricSpec, seed: int) -> Halves:
    """Divide examples at random into two halves with the same number of each class, and of each group within it.

    By ``metric.by`` it is the other way round: of each group, and of each class within it.

    Args:
        part: The examples.
        spec: The metric, whose columns the part has.
        seed: Seed of the division.

    Returns:
        The halves; none if a class, or label, has a single example, as one half would lack it.
    """
    if part.y.dim() == 2:
        return label_halves(part.y, seed)
    return stratified_halves(part.y, seed, strata(part, spec) if spec.columns else None)


@dataclass(frozen=True)
class RowBatches:
    """Batches ``(x, y)`` of some rows of a part, in their order, each read when it is asked for.

    Attributes:
        part: The examples.
        rows: Their places, ``n``.
        size: Rows in a batch; the last one may have fewer.
    """

    part: Split
    rows: Tensor
    size: int

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each batch."""
        for rows in self.rows.split(self.size):
            yield self.part.x[rows], self.part.y[rows]


def batches_of_outcomes(spec: MetricSpec, splits: Splits, size: int) -> dict[str, RowBatches]:
    """Return the train batches of what a metric is made of, by name; none of what train has no examples of.

    Args:
        spec: The metric, which is made of outcomes.
        splits: The data; what is judged is what validation has.
        size: Rows in a batch.
    """
    assert spec.outcomes is not None
    rows = spec.outcomes.rows(splits.train.y, *(splits.train.columns[name] for name in spec.columns))
    judged, none = sizes_of(spec, splits.validation), torch.arange(0)
    return {name: RowBatches(splits.train, rows.get(name, none), size) for name, count in judged.items() if count}


def values_of(splits: Splits, by: str) -> npt.NDArray[Any]:
    """Return the values of the column by which a metric is judged, in order: those in validation and test.

    Args:
        splits: The data; both parts have the column.
        by: Its name.

    Raises:
        DataError: Rows have no value, all have one, or there are too many.
    """
    for column in splits.reading.columns if splits.reading else ():
        if column.name == by and column.bad:
            raise DataError(
                f"metric.by={by}: {counted(column.bad, 'row')} without a value ({', '.join(column.which)}); fill them"
                " in, or leave the rows out"
            )
    values = np.unique(np.concatenate([part.columns[by] for part in (splits.validation, splits.test)]))
    if not 2 <= len(values) <= MOST_JUDGED:
        shown = ", ".join(brief(str(value)) for value in values[:3])
        raise DataError(
            f"metric.by={by}: the column has {counted(len(values), 'value')} ({shown}{', ...' * (len(values) > 3)}),"
            f" each a group; give one of 2 to {MOST_JUDGED} values, such as ranges of numbers"
        )
    warn_of_near_names(f"values of metric.by={by}", map(str, values))
    return values


def sizes_of(spec: MetricSpec, part: Split) -> dict[str, int]:
    """Return how many examples that count each group has, or class, by whose worst a metric judges."""
    assert spec.outcomes is not None
    return spec.outcomes.sizes(part.y, *(part.columns[name] for name in spec.columns))


def check_groups(spec: MetricSpec, part: Split, where: str) -> None:
    """Refuse groups that a metric can't be judged in.

    Args:
        spec: The metric, which is the worst in groups by a column.
        part: The examples.
        where: What they are called in the message.

    Raises:
        DataError: A group has too few examples that count.
    """
    sizes = sizes_of(spec, part)
    if few := {name: size for name, size in sizes.items() if size < LEAST}:
        raise DataError(
            f"metric.by={spec.columns[0]}: {len(few)} of {counted(len(sizes), 'group')}"
            f" {'has' if len(few) == 1 else 'have'} fewer than {LEAST} {_counting(spec)} in the {where} part"
            f" ({_shown(few)}); merge values in the table, or leave their rows out"
        )


def rare_judged(spec: MetricSpec, part: Split) -> Rare | None:
    """Return the groups by a column of which the metric sees few examples; None if nothing is rare."""
    sizes = sizes_of(spec, part)
    of = "positives of " if spec.outcomes and spec.outcomes.ratio.positives else ""
    return rare_groups("group", {of + name: size for name, size in sizes.items()}, FEW)


def with_sizes(reading: Reading, spec: MetricSpec, splits: Splits) -> Reading:
    """Return how a table was read, with the sizes of the groups by a column."""
    parts = {"validation": splits.validation, "test": splits.test}
    said = "; ".join(f"in {name} {_shown(sizes_of(spec, part))}" for name, part in parts.items())
    note = f"{_counting(spec)} of its groups: {said}"
    columns = [replace(each, note=note) if each.name in spec.columns else each for each in reading.columns]
    return replace(reading, columns=columns)


def _counting(spec: MetricSpec) -> str:
    return "examples of the positive class" if spec.outcomes and spec.outcomes.ratio.positives else "examples"


def _shown(sizes: dict[str, int]) -> str:
    named = [f"{brief(name)} {size}" for name, size in sizes.items()]
    return ", ".join([*named[:SHOWN], *(["..."] if len(named) > SHOWN else [])])
