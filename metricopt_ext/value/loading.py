"""Reading value functions of any kind from files."""

from pathlib import Path

from metricopt_ext.adapters.signature import Signature
from metricopt_ext.errors import FileFormatError, ValueFunctionError
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.utils.described import from_json
from metricopt_ext.utils.files import content_of, module_of, read_tensors
from metricopt_ext.utils.words import brief
from metricopt_ext.value.gp import GPValueFunction
from metricopt_ext.value.value_function import FILE_FORMAT, NeuralValueFunction, Quality, ValueFunction

KINDS: dict[str, type[ValueFunction]] = {f.kind: f for f in (NeuralValueFunction, GPValueFunction)}


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
    with content_of(path, "value function"):
        kind, settings = described["kind"], described["settings"]
        if not isinstance(kind, str) or kind not in KINDS:
            raise FileFormatError(f"{path}: unknown value function {brief(kind)}, expected one of {sorted(KINDS)}")
        check_integer(1, **settings)
        f = module_of(path, tensors, lambda: KINDS[kind](**settings))
        f.signature = Signature.from_json(described["signature"])
        f.quality = None if described["quality"] is None else from_json(Quality, described["quality"])
    if dim is not None and f.dim != dim:
        raise ValueFunctionError(f"{path} was fitted for phi of dimension {f.dim}, the adapter's is {dim}")
    f.check_fits(signature, str(path))
    return f.eval().requires_grad_(False)
