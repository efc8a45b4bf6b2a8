"""What a run under Detectron2 depends on, to tell it from runs with other settings."""

import hashlib
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode

# What meta-training sets for each of its runs, whose trajectories belong together all the same.
OF_ONE_RUN = {
    "METRICOPT.ENABLED",
    *(f"METRICOPT.FINETUNE.{name}" for name in ("VALUE_FUNCTION", "METRIC_STEP", "LOSS_WEIGHT")),
    *(f"METRICOPT.META.{name}" for name in ("ROUND", "INDEX")),
}
AMP = "SOLVER.AMP.ENABLED"
# Where and how long, not what: no influence on a trajectory.
WITHOUT_INFLUENCE = (
    *("MODEL.DEVICE", "METRICOPT.META.TRAJECTORIES", "METRICOPT.META.ROUNDS", "METRICOPT.SEARCH."),
    "METRICOPT.SOUP",  # a search knows its starts by what they are
)


def identity_of_run(cfg: CfgNode) -> dict[str, Any]:
    """Return the settings that a finetuning run depends on, by their keys; files by name and content."""
    settings = {
        **dict(_leaves(cfg.MODEL, "MODEL.")),
        **dict(_leaves(cfg.INPUT, "INPUT.")),
        **dict(_leaves(cfg.METRICOPT, "METRICOPT.")),
        "DATASETS.TRAIN": cfg.DATASETS.TRAIN,
        "SOLVER.IMS_PER_BATCH": cfg.SOLVER.IMS_PER_BATCH,
        AMP: cfg.SOLVER.AMP.ENABLED,
    }
    for key in ("MODEL.WEIGHTS", "METRICOPT.FINETUNE.VALUE_FUNCTION"):
        settings[key] = _described(settings[key])
    return {key: value for key, value in settings.items() if not key.startswith(WITHOUT_INFLUENCE)}


def identity_of_trajectories(cfg: CfgNode) -> dict[str, Any]:
    """Return the settings shared by all trajectories that a value function is fitted to."""
    return {key: value for key, value in identity_of_run(cfg).items() if key not in OF_ONE_RUN}


def identity_of_search(cfg: CfgNode, trainer_class: type) -> dict[str, Any]:
    """Return the settings that a search depends on; its keys, seed and weights are known without them."""
    unused = (AMP, "METRICOPT.ENABLED", "METRICOPT.FINETUNE.", "METRICOPT.META.", "METRICOPT.METRIC.EVALS")
    settings = {key: value for key, value in identity_of_run(cfg).items() if not key.startswith(unused)}
    return {**settings, **identity_of_trainer(trainer_class)}


def identity_of_trainer(trainer_class: type) -> dict[str, Any]:
    """Return a trainer class by its name, and by what it says of itself (`MetricOptTrainer`)."""
    described: dict[str, str] = getattr(trainer_class, "described", {})
    return {"trainer_class": f"{trainer_class.__module__}.{trainer_class.__qualname__}", **described}


def _leaves(node: CfgNode, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, CfgNode):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _described(name: str) -> str:
    """Return a file's name and fingerprint, to tell it from another file that takes its place."""
    file, _, query = name.partition("?")  # Detectron2 allows options after the name
    path = Path(file)
    if not path.is_file():
        return name  # from Detectron2's model zoo, or empty
    chosen = f"?{query}" if query else ""
    return f"{path.name}{chosen} ({_fingerprint(path, os.stat(path).st_mtime_ns)})"


@lru_cache
def _fingerprint(file: Path, changed: int) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=8)).hexdigest()
