"""What a vector phi means: which layers of a model it modulates, by which random matrices, and how the logits."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from metricopt_ext.errors import AdapterError
from metricopt_ext.utils.checks import check_above
from metricopt_ext.utils.described import from_json


@dataclass(frozen=True)
class Outputs:
    """Coordinates of phi that act on a model's logits h, as ``h * exp(t) + scale * o``.

    o has a coordinate for each class, the offsets, and follows phi's other coordinates; t, the logarithm of a
    temperature's inverse, is the last if there is one.

    Attributes:
        layer: Name of the layer whose outputs are the logits; None for the model's last linear layer.
        scale: Logits per unit of an offset's coordinate, above 0.
        temperature: Whether there is a t.

    Raises:
        AdapterError: ``layer`` is no name, or ``temperature`` no bool.
        ValueError: ``scale`` is no number above 0.
    """

    layer: str | None = None
    scale: float = 1.0
    temperature: bool = False

    def __post_init__(self) -> None:
        """Check the attributes."""
        if not isinstance(self.layer, str | None):
            raise AdapterError(f"layer is {self.layer!r}; it must be the name of the layer that gives the logits")
        if not isinstance(self.temperature, bool):
            raise AdapterError(f"temperature is {self.temperature!r}; it must be True or False")
        if self.scale is None:
            raise AdapterError("scale is None; it must be a number above 0")
        check_above(0, scale=self.scale)
        object.__setattr__(self, "scale", float(self.scale))  # 1 and 1.0 are one signature


@dataclass(frozen=True)
class Signature:
    """All that the effect of phi depends on, the model's weights apart.

    Attributes:
        kind: ``"film"``, ``"input_bias"``, ``"outputs"``, ``"lora"`` or ``"mixture"``.
        layers: Names of the modulated layers, that of the logits last.
        channels: How many channels (features) of each layer are modulated.
        seed: Seed of the matrices.
        dim: Dimension d of phi.
        generator: How the matrices were drawn.
        outputs: How the last coordinates act on the logits; None if all belong to the matrices.
    """

    kind: str
    layers: tuple[str, ...]
    channels: tuple[int, ...]
    seed: int
    dim: int
    generator: str
    outputs: Outputs | None

    @property
    def offsets(self) -> slice:
        """Which coordinates of phi are the logits' offsets; those before are the matrices', one after a temperature."""
        if self.outputs is None:
            return slice(self.dim, self.dim)
        end = self.dim - int(self.outputs.temperature)
        return slice(end - self.channels[-1], end)

    @classmethod
    def from_json(cls, content: Any) -> "Signature | None":
        """Return what `to_json` described; None of None.

        Raises:
            ValueError: It is something else.
        """
        return None if content is None else from_json(cls, content)

    def to_json(self) -> dict[str, Any]:
        """Return the attributes as JSON."""
        return {**asdict(self), "layers": list(self.layers), "channels": list(self.channels)}

    def differences(self, other: "Signature") -> Iterator[tuple[str, Any, Any]]:
        """Yield the name of each attribute that differs, and its two values."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                yield field.name, mine, theirs
