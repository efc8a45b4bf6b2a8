"""Detectron2's LazyConfigs as `search` and `meta_train` take them: a trainer class, and the config beside it."""

import copy
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from detectron2.config import CfgNode, get_cfg, instantiate
from detectron2.evaluation import DatasetEvaluator
from omegaconf import OmegaConf
from torch import nn

from metricopt_ext.detection.detectron2.config import add_metricopt_config
from metricopt_ext.detection.detectron2.trainer import MetricOptTrainer
from metricopt_ext.errors import ConfigError
from metricopt_ext.utils.files import to_json
from metricopt_ext.utils.seeding import seeded_streams

# What a trainer class has of a LazyConfig, and where in it is the name of the set that something is built for.
PARTS = ("model", "dataloader")
NAMES = {"test": "dataset.names", "evaluator": "dataset_name"}


def lazy_config(lazy: Any) -> CfgNode:
    """Return a config of Detectron2 by keys, with METRICOPT's defaults and what a LazyConfig's node ``train`` says.

    Args:
        lazy: As Detectron2's ``tools/lazyconfig_train_net.py`` takes it: ``train.init_checkpoint`` is the trained
            detector, and the sets of ``dataloader.test`` are evaluated once, in the end.

    Returns:
        The config, to set METRICOPT in.

    Raises:
        ConfigError: It lacks a key.
    """
    cfg = get_cfg()
    add_metricopt_config(cfg)
    cfg.MODEL.WEIGHTS, cfg.OUTPUT_DIR = _at(lazy, "train.init_checkpoint"), _at(lazy, "train.output_dir")
    cfg.MODEL.DEVICE = OmegaConf.select(lazy, "train.device", default=cfg.MODEL.DEVICE)
    cfg.SOLVER.AMP.ENABLED = OmegaConf.select(lazy, "train.amp.enabled", default=False)
    cfg.SOLVER.IMS_PER_BATCH = _at(lazy, "dataloader.train.total_batch_size")
    for part, key in {"train": "TRAIN", "test": "TEST"}.items():
        names = _at(lazy, f"dataloader.{part}.dataset.names")
        cfg.DATASETS[key] = (names,) if isinstance(names, str) else tuple(names)
    return cfg


def lazy_trainer(lazy: Any) -> type[MetricOptTrainer]:
    """Return a trainer class that has a LazyConfig's model, training data, test loader and evaluator.

    The loader and the evaluator are built for any set of Detectron2's catalog: ``dataloader.test.dataset.names`` and
    ``dataloader.evaluator.dataset_name`` are its name then. The order of the training images is drawn by the seed, if
    ``dataloader.train`` has no sampler of its own.

    Args:
        lazy: The LazyConfig, which nothing may change afterwards.

    Raises:
        ConfigError: It lacks a key.
    """
    for part, key in NAMES.items():
        _at(lazy, f"dataloader.{part}.{key}")
    told = to_json({part: _told(OmegaConf.to_container(_at(lazy, part), resolve=True)) for part in PARTS})

    class LazyTrainer(MetricOptTrainer):
        described: ClassVar[dict[str, str]] = {"lazy": hashlib.blake2b(told.encode(), digest_size=8).hexdigest()}

        @classmethod
        def build_detector(cls, cfg: CfgNode) -> nn.Module:
            model: nn.Module = instantiate(lazy.model)
            return model.to(cfg.MODEL.DEVICE)

        @classmethod
        def build_train_loader(cls, cfg: CfgNode) -> Any:
            with seeded_streams(max(cfg.SEED, 0), torch.device("cpu")):  # a sampler draws its seed from them
                return instantiate(lazy.dataloader.train)

        @classmethod
        def build_test_loader(cls, cfg: CfgNode, dataset_name: str) -> Any:
            return _built(lazy, "test", dataset_name)

        @classmethod
        def build_evaluator(cls, cfg: CfgNode, dataset_name: str) -> DatasetEvaluator:
            return _built(lazy, "evaluator", dataset_name)

    return LazyTrainer


def _built(lazy: Any, part: str, name: str) -> Any:
    dataloader = copy.deepcopy(lazy.dataloader)
    OmegaConf.update(dataloader[part], NAMES[part], name)
    return instantiate(dataloader[part])


def _at(lazy: Any, key: str) -> Any:
    found = OmegaConf.select(lazy, key)
    if found is None:
        raise ConfigError(
            f"the LazyConfig has no {key}; give it as Detectron2's configs/common do, or subclass MetricOptTrainer"
        )
    return found


def _told(value: Any) -> Any:
    """Return what tells a value of a LazyConfig from another, whatever the process: objects by their class alone."""
    if isinstance(value, Mapping):
        return {str(key): _told(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_told(each) for each in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
