"""A small network, bare and with a tuned adapter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers.architectures import randomise as _randomise
from helpers.architectures import small_cnn
from helpers.tensors import rand
from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film


def _tuned(seed: int = 0) -> Adapter:
    adapter = attach_film(small_cnn().eval(), dim=3, seed=seed)
    adapter.set_phi(rand(3, seed=5, dtype=torch.float32))
    return adapter


@pytest.fixture
def randomise() -> Callable[..., Any]:
    """Give affine weights and running statistics values that no layer is born with."""
    return _randomise


@pytest.fixture
def cnn() -> Callable[..., Any]:
    """Make a small convolutional network with normalisation layers and dropout."""
    return small_cnn


@pytest.fixture
def tuned() -> Callable[..., Any]:
    """Make the network with an adapter whose phi is not 0."""
    return _tuned
