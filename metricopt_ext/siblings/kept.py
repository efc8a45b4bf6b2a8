"""What a sibling method returned, on disk, so that an interrupted run need not train again."""

from dataclasses import fields
from pathlib import Path
from typing import Any, TypedDict

from torch import nn

from metricopt_ext.errors import FileFormatError
from metricopt_ext.siblings.sibling import Trained
from metricopt_ext.siblings.training import Trains
from metricopt_ext.utils.described import Finite, read_shaped
from metricopt_ext.utils.files import save_checkpoint, write_json
from metricopt_ext.utils.state_dict import load_checkpoint

NUMBERS = [field.name for field in fields(Trained) if field.name not in ("model", "product")]


class Measured(TypedDict):
    """What was measured on the way: by name, iterations with values."""

    history: dict[str, list[tuple[Finite, float]]]


class Numbers(Measured):
    """What ``<name>.json`` holds; see `Trained`."""

    trained: Trains
    queries: dict[str, int]
    batch_queries: dict[str, int]
    seconds: float


def keep(trained: Trained, folder: Path, name: str) -> None:
    """Write ``<name>.json``, ``<name>_model.safetensors`` and, if there is a product, ``<name>.safetensors``."""
    save_checkpoint(folder / f"{name}_model.safetensors", trained.model.state_dict())
    if trained.product is not None:
        trained.product.save(folder / f"{name}.safetensors")
    # Written last: it says that all is there.
    write_json(folder / f"{name}.json", {key: getattr(trained, key) for key in NUMBERS})


def read_numbers(file: Path) -> dict[str, Any]:
    """Read ``<name>.json`` of what `keep` wrote.

    Raises:
        FileFormatError: The file holds something else.
    """
    content = read_shaped(file, Numbers, "what a sibling method left")
    if sorted(content) != sorted(NUMBERS):
        raise FileFormatError(f"{file} is not what a sibling method left; delete it to run the method again")
    return content


def load_trained(model: nn.Module, folder: Path, name: str) -> Trained | None:
    """Return what `keep` wrote, without its product, or None if it did not finish.

    Args:
        model: Takes the weights; of the same kind as the one that was trained.
        folder: Where it was kept.
        name: The method's name.

    Raises:
        FileFormatError: The files hold something else.
        DataError: The weights are not the model's.
    """
    file = folder / f"{name}.json"
    if not file.exists():
        return None
    content = read_numbers(file)
    history = {key: [(int(step), float(value)) for step, value in points] for key, points in content["history"].items()}
    load_checkpoint(model, folder / f"{name}_model.safetensors")
    return Trained(model.eval(), product=None, **{**content, "history": history})
