"""Modules whose mode is pinned; see tests/adapters/test_attach.py for what they compute."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from metricopt_ext.adapters.attach import attach_film


def test_mode_is_restored_when_a_pinned_layer_raises(cnn: Callable[[], nn.Sequential]) -> None:
    model = cnn().train()
    attach_film(model, dim=3)
    with pytest.raises(RuntimeError):
        model[1](torch.zeros(2, 9, 3, 3))  # 9 channels, BatchNorm has 4
    assert model[1].training
