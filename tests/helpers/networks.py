"""Small networks with a norm between two layers."""

from collections import Counter

import torch
from torch import Tensor, nn


class BatchNormNet(nn.Module):
    """3 inputs, 2 outputs; the seed draws its weights."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm, self.last = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu())  # type: ignore[no-any-return]


class LayerNormNet(nn.Module):
    """4 inputs, 3 outputs, always of the same weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x)).relu())  # type: ignore[no-any-return]


class Counted(nn.Module):
    """Counts runs: a network that derives from it calls `count` in its ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = Counter[str]()  # a number would be told apart from the model as it was

    def count(self) -> None:
        self.counted["runs"] += 1

    @property
    def runs(self) -> int:
        return self.counted["runs"]
