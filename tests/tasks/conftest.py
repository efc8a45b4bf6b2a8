"""What trajectories and folders of them are compared by."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from metricopt_ext.tasks.trajectory import Trajectory


def _same(a: Trajectory, b: Trajectory) -> bool:
    tensors = ("phi", "loss", "observed", "cost")
    return (a.round, a.index, a.signature) == (b.round, b.index, b.signature) and all(
        getattr(a, name).dtype == getattr(b, name).dtype and torch.equal(getattr(a, name), getattr(b, name))
        for name in tensors
    )


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def same() -> Callable[..., Any]:
    """Tell whether two trajectories are equal bit for bit."""
    return _same


@pytest.fixture
def files() -> Callable[..., Any]:
    """Return the content of each file of a folder by name."""
    return _files
