"""Training and evaluation mode come back module by module."""

import pytest
from torch import nn

from metricopt_ext.utils.modes import evaluating, in_mode


def mixed() -> nn.Module:
    """A model in training whose norm its owner keeps in evaluation, as finetuning often does."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.Dropout(), nn.ReLU()))
    model[1].eval()
    model[2].eval()
    model[2][0].train()
    return model


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def test_evaluating_nests_and_survives_an_error() -> None:
    model = mixed()
    before = modes(model)
    with evaluating(model):
        with pytest.raises(KeyError), in_mode(model, training=True):
            raise KeyError(all(modes(model)))
        assert not any(modes(model))
    assert modes(model) == before
