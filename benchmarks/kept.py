"""What an interrupted benchmark goes on from."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from metricopt_ext.errors import FileFormatError
from metricopt_ext.utils.files import read_json, write_json


def kept_json(path: Path, kinds: Mapping[str, type], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a JSON object from a file, or make it and write it there, so that an interrupted run has it once only.

    Args:
        path: The file.
        kinds: Types of its values by key; it may have others.
        make: Makes the object.

    Raises:
        FileFormatError: The file holds something else.
    """
    if path.exists():
        kept: dict[str, Any] = read_json(path)
        if not all(isinstance(kept.get(key), kind) for key, kind in kinds.items()):
            raise FileFormatError(f"{path} holds no {path.stem} with {', '.join(kinds)}; delete it to make it anew")
        return kept
    made = make()
    write_json(path, made)
    return made
