"""Reading value functions of any kind from files."""

from pathlib import Path

from metricopt_ext.adapters.signature import Signature
from metricopt_ext.errors import FileFormatError, ValueFunctionError
from metricopt_ext.utils.files import read_tensors
from metricopt_ext.value.gp import GPValueFunction
from metricopt_ext.value.value_function import (
    FILE_FORMAT,
    NeuralValueFunction,
    Quality,
    RidgeValueFunction,
    ValueFunction,
)

KINDS: dict[str, type[ValueFunction]] = {f.kind: f for f in (NeuralValueFunction, RidgeValueFunction, GPValueFunction)}


def load_value_function(path: str | Path, dim: int | None = None, signature: Signature | None = None) -> ValueFunction:
    """Read a value function that `ValueFunction.save` wrote.

    Args:
        path: The safetensors file.
        dim: The dimension of phi where f will be used; checked if given.
        signature: ``adapter.signature`` of the adapter that f will be used with; checked if given.

    Raises:
        FileFormatError: The file is corrupt or holds something else.
        ValueFunctionError: f was fitted for another dimension or another adapter.
    """
    tensors, described = read_tensors(path, FILE_FORMAT)
    if described["kind"] not in KINDS:
        raise FileFormatError(f"{path}: unknown value function {described['kind']!r}, expected one of {sorted(KINDS)}")
    f = KINDS[described["kind"]](**described["settings"])
    if dim is not None and f.dim != dim:
        raise ValueFunctionError(f"{path} was fitted for phi of dimension {f.dim}, the adapter's is {dim}")
    f.signature = Signature.from_json(described["signature"])
    f.check_fits(signature, str(path))
    f.load_state_dict(tensors)
    f.quality = None if described["quality"] is None else Quality(**described["quality"])
    return f.eval().requires_grad_(False)
