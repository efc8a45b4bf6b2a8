"""What a vector phi means: which layers of a model it modulates, and by which random matrices."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Signature:
    """All that the effect of phi depends on, the model's weights apart.

    Attributes:
        kind: ``"film"`` or ``"input_bias"``.
        layers: Names of the modulated layers.
        channels: How many channels (features) of each layer are modulated.
        seed: Seed of the matrices.
        dim: Dimension d of phi.
        generator: How the matrices were drawn.
    """

    kind: str
    layers: tuple[str, ...]
    channels: tuple[int, ...]
    seed: int
    dim: int
    generator: str

    @classmethod
    def from_json(cls, content: Mapping[str, Any] | None) -> "Signature | None":
        """Return what `to_json` described."""
        if content is None:
            return None
        return cls(**{**content, "layers": tuple(content["layers"]), "channels": tuple(content["channels"])})

    def to_json(self) -> dict[str, Any]:
        """Return the attributes as JSON."""
        return {**asdict(self), "layers": list(self.layers), "channels": list(self.channels)}

    def differences(self, other: "Signature") -> Iterator[tuple[str, Any, Any]]:
        """Yield the name of each attribute that differs, and its two values."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                yield field.name, mine, theirs
