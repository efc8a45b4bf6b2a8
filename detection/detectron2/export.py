"""Tuned detectors as ordinary checkpoints of Detectron2."""

import io
from pathlib import Path
from typing import Any

import torch
from torch import nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.utils.files import write_atomically


def export(model: nn.Module, path: str | Path) -> None:
    """Merge phi into a copy of a model and write it as a checkpoint for Detectron2's own trainer and predictor.

    The model itself is unchanged. Load the file with the config that the model was built from, as ``MODEL.WEIGHTS``.

    Args:
        model: A detector with an adapter.
        path: The file, ``{"model": state dict}``; ends in ``.pth``.

    Raises:
        AdapterError: The model has no adapter, or phi can't be merged.
    """
    write_atomically(path, checkpoint_of(Adapter(model).merged_state_dict()))


def checkpoint_of(state: dict[str, Any]) -> bytes:
    """Return the content of a file for Detectron2's checkpointer, from a model's state dict."""
    buffer = io.BytesIO()
    torch.save({"model": {name: tensor.cpu() for name, tensor in state.items()}}, buffer)
    return buffer.getvalue()
