"""Loading a detector's weights, and rejecting those of another detector."""

import pickle
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode

from detectron2.checkpoint import DetectionCheckpointer
from torch import Tensor, nn

from metricopt_ext.adapters.context import CONTEXT_NAME
from metricopt_ext.errors import DataError, MetricOptError
from metricopt_ext.utils.words import shortened

MODEL = "model"  # Detectron2's own entry of a checkpoint

# What Detectron2's checkpointer raises on a file that is not a checkpoint.
LOAD_ERRORS = (
    *(AssertionError, AttributeError, EOFError, ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError),
    pickle.UnpicklingError,
)


def load_weights(model: nn.Module, path: str, *, strict: bool = True, tuned: bool = False) -> None:
    """Load what ``MODEL.WEIGHTS`` names into a detector, like Detectron2's checkpointer.

    Args:
        model: The detector; it may have an adapter and be wrapped for several processes.
        path: The file, or a name in Detectron2's model zoo; files that end in ``.pkl`` are unpickled. ``?entry=NAME``
            behind it says which weights of a file are meant that has the model's several times, e.g. ``ema_state``, a
            moving average of them. Tensors that an average lacks, such as BatchNorm's statistics, are the model's.
        strict: Reject weights that lack a parameter, have it in another shape, or have extra ones in a part that the
            detector has; parts that only they have, e.g. a mask head, are left out. False is for detectors that will be
            trained, e.g. from a backbone's weights.
        tuned: Whether the weights may hold a phi.

    Raises:
        DataError: The weights can't be read, belong to another detector, or hold a phi; or the file has them several
            times and none is named, or has none by that name.
    """
    file, entry = divided(path)
    try:
        _Checkpointer(model, strict, tuned, entry).load(file)
    except MetricOptError as error:
        raise DataError(f"MODEL.WEIGHTS={path} {error}") from error
    except LOAD_ERRORS as error:
        raise DataError(f"MODEL.WEIGHTS={path} can't be loaded: {error}") from error


def divided(path: str) -> tuple[str, str | None]:
    """Return what Detectron2 reads of ``MODEL.WEIGHTS``, and the entry that it names, if any."""
    file, _, query = path.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    entry = options.pop("entry", None)
    return (f"{file}?{urlencode(options)}" if options else file), entry


class _Checkpointer(DetectionCheckpointer):  # type: ignore[misc]
    """Detectron2's checkpointer, which by itself only warns about weights that don't fit."""

    def __init__(self, model: nn.Module, strict: bool, tuned: bool, entry: str | None) -> None:
        super().__init__(model)
        self.strict, self.tuned, self.entry = strict, tuned, entry

    def _load_model(self, checkpoint: Any) -> Any:
        checkpoint["model"] = _chosen(checkpoint, self.entry)
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


def _chosen(checkpoint: dict[str, Any], entry: str | None) -> Mapping[str, Any]:
    """Return the weights that are meant of a file's."""
    own: Mapping[str, Any] = checkpoint[MODEL]
    others = dict(_copies(checkpoint, {name for name, value in own.items() if isinstance(value, Tensor)}))
    if entry is None and others:
        choices = " or ".join(f"?entry={name}" for name in (*others, MODEL))
        raise DataError(
            f"has the weights of the model, and others of the same names in {shortened(list(others))}, such as a moving"
            f" average: say which are meant by {choices} behind the file's name"
        )
    if entry in (None, MODEL):
        return own
    if entry not in others:
        raise DataError(f"has no weights as entry={entry}, but as {shortened([MODEL, *others])}")
    return {**own, **others[entry]}


def _copies(content: Mapping[Any, Any], names: set[str], above: str = "") -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Find what has most of a model's names in a checkpoint, by the keys that lead there, with dots between."""
    for key, value in content.items():
        if not isinstance(value, Mapping) or (not above and key == MODEL):
            continue
        tensors = {str(name).removeprefix("module."): each for name, each in value.items() if isinstance(each, Tensor)}
        if 2 * len(names & tensors.keys()) > len(names):
            yield f"{above}{key}", tensors
        else:
            yield from _copies(value, names, f"{above}{key}.")


def _part(name: str) -> str:
    """Return the part of a detector that a module or weight belongs to, e.g. ``backbone.bottom_up``."""
    return ".".join(name.split(".")[:2])


def _counts(name: str) -> bool:
    return not name.endswith("num_batches_tracked")  # which frozen norms don't have
