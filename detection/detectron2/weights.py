"""Weights of a detector, which are refused where they are another detector's."""

import pickle
from typing import Any

from detectron2.checkpoint import DetectionCheckpointer
from torch import nn

from metricopt_ext.errors import DataError, MetricOptError
from metricopt_ext.film import CONTEXT_NAME

UNREADABLE = (AssertionError, AttributeError, EOFError, KeyError, OSError, RuntimeError, ValueError)


def load_weights(model: nn.Module, path: str, *, whole: bool = True, tuned: bool = False) -> None:
    """Load what ``MODEL.WEIGHTS`` names into a detector, as Detectron2's checkpointer does.

    Args:
        model: The detector; may have an adapter, and may be wrapped for several processes.
        path: The file, or a name in Detectron2's model zoo; files that end in ``.pkl`` are unpickled.
        whole: Refuse weights that lack a parameter or have it in another shape. False is for detectors that will be
            trained, e.g. from a backbone's weights.
        tuned: Whether the weights may hold a phi.

    Raises:
        DataError: The weights can't be read, are not whole, or hold a phi.
    """
    try:
        _Checkpointer(model, whole, tuned).load(path)
    except MetricOptError as error:
        raise DataError(f"MODEL.WEIGHTS={path} {error}") from error
    except (*UNREADABLE, pickle.UnpicklingError) as error:
        raise DataError(f"MODEL.WEIGHTS={path} can't be loaded: {error}") from error


class _Checkpointer(DetectionCheckpointer):  # type: ignore[misc]
    """Detectron2's, which only warns of weights that don't fit."""

    def __init__(self, model: nn.Module, whole: bool, tuned: bool) -> None:
        super().__init__(model)
        self.whole, self.tuned = whole, tuned

    def _load_model(self, checkpoint: Any) -> Any:
        if not self.tuned and f"{CONTEXT_NAME}.phi" in checkpoint["model"]:
            raise DataError(
                "holds a phi, so it is a detector in the middle of finetuning: give model_merged.pth, which has phi in"
                " its weights, or the detector before; --eval-only takes it with METRICOPT.ENABLED True"
            )
        incompatible = super()._load_model(checkpoint)
        unlike = [
            f"{name} has shape {tuple(theirs)} in place of {tuple(ours)}"
            for name, theirs, ours in incompatible.incorrect_shapes
        ] + [f"{name} is missing" for name in incompatible.missing_keys]
        if self.whole and unlike:
            more = f", and {len(unlike) - 1} more do not fit" if len(unlike) > 1 else ""
            raise DataError(f"is another detector's: {unlike[0]}{more}; give the config that it was trained with")
        return incompatible
