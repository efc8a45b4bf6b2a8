"""A LazyConfig's model, data and evaluator, as a trainer class that a search and meta-training take."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("detectron2", reason="needs Detectron2, installed from source")

from detectron2.config import LazyCall, instantiate
from detectron2.data import (
    DatasetMapper,
    build_detection_test_loader,
    build_detection_train_loader,
    get_detection_dataset_dicts,
)
from detectron2.evaluation import COCOEvaluator
from detectron2.modeling import build_model
from omegaconf import OmegaConf

from metricopt_ext.detection.detectron2.datasets import register
from metricopt_ext.detection.detectron2.identity import identity_of_trainer
from metricopt_ext.detection.detectron2.lazy import lazy_config, lazy_trainer
from metricopt_ext.detection.records import DetectionSet
from metricopt_ext.errors import ConfigError

pytestmark = pytest.mark.detectron2


@pytest.fixture
def lazy(catalog: Any, squares: Callable[..., DetectionSet], tiny_config: Any, tmp_path: Path) -> Any:
    """A LazyConfig of a tiny detector, in the form of Detectron2's configs/common."""
    for seed, name in enumerate(("squares_train", "squares_val", "squares_test")):
        register(name, squares(4, seed=seed))
    records = LazyCall(get_detection_dataset_dicts)
    made = OmegaConf.create({"model": LazyCall(build_model)(cfg=tiny_config())}, flags={"allow_objects": True})
    made.train = {"init_checkpoint": "trained.pth", "output_dir": "out", "device": "cpu", "amp": {"enabled": True}}
    made.dataloader = {}
    made.dataloader.train = LazyCall(build_detection_train_loader)(
        dataset=records(names="squares_train"),
        mapper=LazyCall(DatasetMapper)(is_train=True, augmentations=[], image_format="BGR"),
        total_batch_size=2,
    )
    made.dataloader.test = LazyCall(build_detection_test_loader)(
        dataset=records(names="squares_test", filter_empty=False),
        mapper=LazyCall(DatasetMapper)(is_train=False, augmentations=[], image_format="BGR"),
    )
    name, folder = "${..test.dataset.names}", str(tmp_path / "coco")
    made.dataloader.evaluator = LazyCall(COCOEvaluator)(dataset_name=name, output_dir=folder)
    return made


def test_the_parts_are_the_lazyconfig_s(lazy: Any) -> None:
    cfg, trainer = lazy_config(lazy), lazy_trainer(lazy)
    assert (cfg.MODEL.WEIGHTS, cfg.OUTPUT_DIR, cfg.MODEL.DEVICE) == ("trained.pth", "out", "cpu")
    assert (cfg.DATASETS.TRAIN, cfg.DATASETS.TEST) == (("squares_train",), ("squares_test",))
    assert (cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.AMP.ENABLED) == (2, True)
    plain = instantiate(lazy.model).state_dict()
    assert {*trainer.build_model(cfg).state_dict()} == {*plain}
    cfg.METRICOPT.ENABLED, cfg.METRICOPT.FILM.DIM, cfg.METRICOPT.FINETUNE.START_STD = True, 3, 0.5
    model = trainer.build_model(cfg)
    assert {*plain} < {*model.state_dict()}
    assert model.metricopt.phi.shape == (3,)
    assert model.metricopt.phi.detach().any()

    for name, seed in (("squares_val", 1), ("squares_test", 2)):
        images = [each["image_id"] for batch in trainer.build_test_loader(cfg, name) for each in batch]
        assert images == [f"{seed}-{at}" for at in range(4)]
        assert trainer.build_evaluator(cfg, name)._metadata.name == name
    assert lazy.dataloader.test.dataset.names == "squares_test"  # as it was

    orders = {}
    for seed, stream in ((1, 7), (1, 8), (2, 7), (3, 7)):
        torch.manual_seed(stream)
        cfg.SEED = seed
        batches = iter(trainer.build_train_loader(cfg))
        orders[seed, stream] = [each["image_id"] for _ in range(6) for each in next(batches)]
    assert orders[1, 7] == orders[1, 8]
    assert len({tuple(each) for each in orders.values()}) == 3


def test_another_lazyconfig_is_another_trainer(lazy: Any) -> None:
    first = identity_of_trainer(lazy_trainer(lazy))
    assert identity_of_trainer(lazy_trainer(copy.deepcopy(lazy))) == first
    for change in ("dataloader.train.total_batch_size", "dataloader.train.mapper.image_format"):
        other = copy.deepcopy(lazy)
        OmegaConf.update(other, change, 1)
        assert identity_of_trainer(lazy_trainer(other)) != first
    other = copy.deepcopy(lazy)
    other.model.cfg.MODEL.RESNETS.DEPTH = 34  # within a config by keys
    assert identity_of_trainer(lazy_trainer(other)) != first


@pytest.mark.parametrize(
    ("key", "of"),
    [
        ("train.init_checkpoint", lazy_config),
        ("dataloader.test.dataset.names", lazy_trainer),
        ("dataloader.evaluator.dataset_name", lazy_trainer),
        ("model", lazy_trainer),
    ],
)
def test_a_lazyconfig_that_lacks_a_key_is_refused(key: str, of: Callable[[Any], Any], lazy: Any) -> None:
    above, _, last = key.rpartition(".")
    lazy.dataloader.evaluator.dataset_name = "squares_test"  # which would not be found without the test's
    del (OmegaConf.select(lazy, above) if above else lazy)[last]
    with pytest.raises(ConfigError, match=rf"the LazyConfig.*{key}.*configs/common do"):
        of(lazy)
