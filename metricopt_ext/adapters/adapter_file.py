"""An adapter's file: what it says, what it holds, and how it is read."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from metricopt_ext.adapters.modulation import AdapterKind
from metricopt_ext.adapters.signature import Outputs
from metricopt_ext.errors import FileFormatError
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.utils.described import from_json
from metricopt_ext.utils.files import content_of, read_tensors
from metricopt_ext.utils.words import brief

FILE_FORMAT = "metricopt_ext/adapter/3"

MATRIX, REPLACED = "matrices.", "replaced."  # begin the names of matrices in a file, and of what a start replaces

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # what phi and matrices are kept in


@dataclass(frozen=True)
class Described:
    """What an adapter's file says besides its tensors.

    Attributes:
        kind: What the matrices do.
        dim: Dimension d of phi.
        layers: Names of the modulated layers, that of the logits last.
        outputs: How phi acts on the logits; None if it doesn't.
        matrix_dim: Number of phi's coordinates that the matrices multiply.
        seed: Seed of the matrices.
        generator: How the matrices were drawn.
        base: Fingerprint of the base.
    """

    kind: AdapterKind
    dim: int
    layers: list[str]
    outputs: Outputs | None
    matrix_dim: int
    seed: int
    generator: str
    base: str


class Saved(NamedTuple):
    """What an adapter's file holds.

    Attributes:
        described: What it says.
        tensors: Phi and the matrices, by their names in the file.
        replaced: What replaces the model's own tensors, by name.
    """

    described: Described
    tensors: dict[str, Tensor]
    replaced: dict[str, Tensor]


def read_adapter(path: str | Path) -> Saved:
    """Read what `Adapter.save` wrote.

    Raises:
        FileFormatError: The file is corrupt or not an adapter file.
    """
    tensors, described = read_tensors(path, FILE_FORMAT)
    with content_of(path, "adapter"):
        if described["kind"] not in get_args(AdapterKind):
            kinds = ", ".join(map(repr, get_args(AdapterKind)))
            raise FileFormatError(f"{path}: unknown adapter kind {brief(described['kind'])}, expected one of {kinds}")
        content = from_json(Described, described)
        check_integer(0, dim=content.dim, matrix_dim=content.matrix_dim, seed=content.seed)
    names = [name for name in tensors if name.startswith(REPLACED)]
    replaced = {name.removeprefix(REPLACED): tensors.pop(name) for name in names}
    for name, value in tensors.items():
        if value.dtype not in FLOATS:
            raise FileFormatError(f"{path} is corrupt: tensor {brief(name)} has type {value.dtype}, not a float's")
    return Saved(content, tensors, replaced)
