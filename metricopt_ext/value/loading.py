"""Reading value functions of any kind from files."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from metricopt_ext.adapters.signature import Signature
from metricopt_ext.errors import ValueFunctionError
from metricopt_ext.tasks.combine import Combination
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.utils.described import from_json
from metricopt_ext.utils.files import content_of, module_of, read_tensors
from metricopt_ext.value.gp import GPValueFunction
from metricopt_ext.value.value_function import FILE_FORMAT, NeuralValueFunction, Quality, ValueFunction

KINDS: dict[str, type[ValueFunction]] = {f.kind: f for f in (NeuralValueFunction, GPValueFunction)}


def load_value_function(path: str | Path, combine: Callable[[Tensor], Tensor] | None = None) -> ValueFunction:
    """Read a value function that `ValueFunction.save` wrote; who follows it checks that it is of the same adapter.

    Args:
        path: The safetensors file.
        combine: How its outcomes make the metric where that was a function, which no file holds; else None.

    Raises:
        FileFormatError: The file is corrupt or holds something else.
        ValueFunctionError: ``combine`` is needed and not given, or given and not needed.
    """
    tensors, described = read_tensors(path, FILE_FORMAT)
    with content_of(path, "value function"):
        kind, settings = KINDS[described["kind"]], described["settings"]
        check_integer(1, **settings)
        f = module_of(path, tensors, lambda: kind(**settings))
        f.signature = Signature.from_json(described["signature"])
        if (made := described["combination"]) is None and combine is not None:
            raise ValueFunctionError("f is of the metric itself, and combines no outcomes; leave combine out")
        f.combination = None if made is None else Combination.from_json(made, combine)
        f.quality = None if described["quality"] is None else from_json(Quality, described["quality"])
    return f.eval().requires_grad_(False)
