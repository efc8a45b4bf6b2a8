"""Loading a detector's weights, and rejecting those of another detector."""

import pickle
from typing import Any

from detectron2.checkpoint import DetectionCheckpointer
from torch import nn

from metricopt_ext.adapters.modulation import CONTEXT_NAME
from metricopt_ext.errors import DataError, MetricOptError

# What Detectron2's checkpointer raises on a file that is not a checkpoint.
LOAD_ERRORS = (
    *(AssertionError, AttributeError, EOFError, ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError),
    pickle.UnpicklingError,
)


def load_weights(model: nn.Module, path: str, *, strict: bool = True, tuned: bool = False) -> None:
    """Load what ``MODEL.WEIGHTS`` names into a detector, like Detectron2's checkpointer.

    Args:
        model: The detector; it may have an adapter and be wrapped for several processes.
        path: The file, or a name in Detectron2's model zoo; files that end in ``.pkl`` are unpickled.
        strict: Reject weights that lack a parameter, have it in another shape, or have extra ones in a part that the
            detector has; parts that only they have, e.g. a mask head, are left out. False is for detectors that will be
            trained, e.g. from a backbone's weights.
        tuned: Whether the weights may hold a phi.

    Raises:
        DataError: The weights can't be read, belong to another detector, or hold a phi.
    """
    try:
        _Checkpointer(model, strict, tuned).load(path)
    except MetricOptError as error:
        raise DataError(f"MODEL.WEIGHTS={path} {error}") from error
    except LOAD_ERRORS as error:
        raise DataError(f"MODEL.WEIGHTS={path} can't be loaded: {error}") from error


class _Checkpointer(DetectionCheckpointer):  # type: ignore[misc]
    """Detectron2's checkpointer, which by itself only warns about weights that don't fit."""

    def __init__(self, model: nn.Module, strict: bool, tuned: bool) -> None:
        super().__init__(model)
        self.strict, self.tuned = strict, tuned

    def _load_model(self, checkpoint: Any) -> Any:
        if not self.tuned and any(name.endswith(f"{CONTEXT_NAME}.phi") for name in checkpoint["model"]):
            raise DataError(
                "holds a phi, so it is a detector partway through finetuning: give model_merged.pth, which has phi in"
                " its weights, or the original detector; --eval-only accepts it with METRICOPT.ENABLED True"
            )
        incompatible = super()._load_model(checkpoint)
        parts = {_part(name) for name, _ in self.model.named_modules()}
        unlike = [
            *(f"{name} has shape {tuple(a)} instead of {tuple(b)}" for name, a, b in incompatible.incorrect_shapes),
            *(f"{name} is missing" for name in incompatible.missing_keys),
            *(f"{name} is unknown" for name in incompatible.unexpected_keys if _part(name) in parts and _counts(name)),
        ]
        if self.strict and unlike:
            more = f", and {len(unlike) - 1} more do not fit" if len(unlike) > 1 else ""
            raise DataError(f"belongs to another detector: {unlike[0]}{more}; give the config that it was trained with")
        return incompatible


def _part(name: str) -> str:
    """Return the part of a detector that a module or weight belongs to, e.g. ``backbone.bottom_up``."""
    return ".".join(name.split(".")[:2])


def _counts(name: str) -> bool:
    return not name.endswith("num_batches_tracked")  # which frozen norms don't have
