"""A model's weights are put back as they were, and copied only where they changed."""

import gc
from typing import Any

import torch
from torch import nn

from metricopt_ext.utils import weights
from metricopt_ext.utils.weights import KeptWeights, kept_weights


def test_only_changed_parameters_are_copied_again() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    kept = KeptWeights()
    kept.update(model)
    first = {name: copy.data_ptr() for name, (_, copy) in kept._parameters.items()}
    with torch.no_grad():
        model[1].bias.add_(1)
    kept.update(model)
    second = {name: copy.data_ptr() for name, (_, copy) in kept._parameters.items()}
    assert {name for name in first if first[name] != second[name]} == {"1.bias"}
    assert kept.restore(model) == []


def test_nan_is_equal_to_itself() -> None:
    model: Any = nn.BatchNorm1d(2)
    with torch.no_grad():
        model.weight.fill_(float("nan"))
        model.running_mean.fill_(float("nan"))
    kept = KeptWeights()
    kept.update(model)
    assert kept.restore(model) == []
    model.running_mean.zero_()
    assert kept.restore(model) == ["running_mean"]
    assert model.running_mean.isnan().all()


def test_a_model_that_is_gone_leaves_no_copy() -> None:
    model = nn.Linear(2, 2)
    before = len(weights._KEPT)
    kept_weights(model)
    assert len(weights._KEPT) == before + 1
    del model
    gc.collect()
    assert len(weights._KEPT) == before
