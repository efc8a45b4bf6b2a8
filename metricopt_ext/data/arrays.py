"""Arrays from files: .npy, and tensors of a name from .safetensors."""

from pathlib import Path
from typing import Any

import numpy as np

from metricopt_ext.errors import DataError
from metricopt_ext.utils.words import brief


def read_shape(path: Path, name: str) -> tuple[int, ...]:
    """Return the shape of what `read_array` reads; errors are the same."""
    return tuple(read_array(path, name, shape=True))


def read_array(path: Path, name: str, *, shape: bool = False) -> Any:
    """Read an array from a .npy file, or the tensor of this name from a .safetensors file; or its shape alone.

    Raises:
        DataError: The file is missing, of another kind, corrupt, or has no such tensor.
    """
    if not path.is_file():
        raise DataError(f"{path} does not exist")
    if path.suffix == ".npy":
        try:
            # Mapped, as then no more memory is taken than the file has, whatever shape it declares.
            mapped = np.lib.format.open_memmap(path, mode="r")
            return mapped.shape if shape else np.array(mapped)
        except Exception as error:  # its header is parsed as Python, with errors of many types
            raise DataError(f"{path} is not a .npy file of numbers ({brief(error)})") from error
    if path.suffix != ".safetensors":
        raise DataError(f"{path} must be a .npy or .safetensors file")

    from safetensors import safe_open

    from metricopt_ext.utils.files import check_header

    try:
        check_header(path)
        with safe_open(path, framework="pt") as file:
            if name not in (names := list(file.keys())):
                raise DataError(f"{path} has no tensor {name!r}, only {', '.join(map(repr, names))}")
            return file.get_slice(name).get_shape() if shape else file.get_tensor(name)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{path} is truncated or not a safetensors file ({brief(error)})") from error
