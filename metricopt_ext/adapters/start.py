"""What a model may hold beyond what it was trained to: a phi, and what replaces its own buffers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Start:
    """A candidate to begin from.

    Attributes:
        phi: ``d``.
        buffers: Buffers of the model that replace its own, by their names in its state dict, e.g. BatchNorm statistics.
    """

    phi: Tensor
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
