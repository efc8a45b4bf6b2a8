"""Groups of examples within classes, by the columns that a metric is given: a half or a resample keeps their shares."""

import numpy as np
import torch
from torch import Tensor

from metricopt_ext.classification.metrics import MetricSpec
from metricopt_ext.data.halves import Halves, stratified_halves
from metricopt_ext.data.label_parts import label_halves
from metricopt_ext.data.labelled import Split

MOST = 20  # values of a column that divides examples into groups; one of more is weights, amounts or ids


def groups_of(part: Split, spec: MetricSpec) -> dict[str, Tensor]:
    """Return the number of each example's group, ``n``, by each of the metric's columns that has 2 to `MOST` values.

    Args:
        part: The examples.
        spec: The metric, whose columns the part has.
    """
    found = {}
    for name in spec.columns:
        values, codes = np.unique(part.columns[name], return_inverse=True)
        if 2 <= len(values) <= MOST:
            found[name] = torch.from_numpy(codes).to(part.y.device)
    return found


def strata(part: Split, spec: MetricSpec) -> Tensor:
    """Number the examples, ``n``, by class and, within each, by the groups of the metric's columns.

    Several labels each are no classes: all examples are alike but for the columns.
    """
    classes = part.y if part.y.dim() == 1 else torch.zeros_like(part.y[:, 0])
    together = torch.stack([classes, *groups_of(part, spec).values()], 1)
    numbers: Tensor = together.unique(dim=0, return_inverse=True)[1]
    return numbers


def metric_halves(part: Split, spec: MetricSpec, seed: int) -> Halves:
    """Divide examples at random into two halves with the same number of each class, and of each group within it.

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
