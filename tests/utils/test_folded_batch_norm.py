"""BatchNorm as a scale and a shift, against torch's own."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from metricopt_ext.utils.folded_batch_norm import FoldedBatchNorm


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False), nn.BatchNorm2d(3, eps=0.1)])
@pytest.mark.parametrize("training", [False, True])
def test_folded_batchnorm_is_batchnorm(norm: Any, training: bool) -> None:
    norm = copy.deepcopy(norm).double()
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    if norm.affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    norm.train(training)
    for shape in [(5, 3), (5, 3, 4)] if isinstance(norm, nn.BatchNorm1d) else [(5, 3, 4, 2)]:
        x = torch.randn(shape, dtype=torch.float64)
        expected = copy.deepcopy(norm)(x)
        with FoldedBatchNorm():
            torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=1e-12)


def test_folded_batchnorm_leaves_norms_without_running_statistics_alone() -> None:
    norm, x = nn.BatchNorm1d(3, track_running_stats=False).eval(), torch.randn(6, 3)
    with FoldedBatchNorm():
        assert torch.equal(norm(x), nn.functional.batch_norm(x, None, None, norm.weight, norm.bias, training=True))
