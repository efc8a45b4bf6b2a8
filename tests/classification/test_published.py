"""Torchvision's published weights in the classification tool, drawn here, with the preprocessing that they bring."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torchvision.models import SqueezeNet1_1_Weights

from metricopt_ext.classification.classifier import classifier
from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.classification.splits import load_splits
from metricopt_ext.data.splits import Splits

NAME = "SqueezeNet1_1_Weights.IMAGENET1K_V1"
WEIGHTS = SqueezeNet1_1_Weights.IMAGENET1K_V1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (tmp_path / "images" / label).mkdir(parents=True)
        for i in range(4):
            pixels = rng.integers(0, 256, (30 + 2 * i, 40, 3), dtype=np.uint8)  # of several sizes
            Image.fromarray(pixels).save(tmp_path / "images" / label / f"{i}.png")
    return tmp_path / "images"


def config_for(folder: Path, weights: str = NAME, **data: Any) -> ClassificationConfig:
    config = ClassificationConfig()
    config.data.name, config.data.root, config.data.fractions = "image_folder", str(folder), [0.5, 0.25, 0.25]
    config.model.name, config.model.weights = "squeezenet1_1", weights
    for key, value in data.items():
        setattr(config.data, key, value)
    return config


def all_images(splits: Splits) -> torch.Tensor:
    return torch.cat([splits.train.x, splits.validation.x, splits.test.x])


def test_images_of_all_parts_are_what_the_weights_transforms_make_of_them(folder: Path) -> None:
    x = all_images(load_splits(config_for(folder), seed=0))
    transform = WEIGHTS.transforms()
    theirs = torch.stack([transform(Image.open(path)) for path in sorted(folder.glob("*/*.png"))])
    assert x.shape == theirs.shape == (8, 3, 224, 224)
    nearest = (x[:, None] - theirs).abs().amax((2, 3, 4)).min(dim=1)
    assert nearest.values.max() < 1e-5
    assert sorted(nearest.indices.tolist()) == list(range(8))


def test_they_are_loaded_into_the_classifier(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    state = torchvision.models.squeezenet1_1(weights=None, num_classes=2).state_dict()
    monkeypatch.setattr(type(WEIGHTS), "get_state_dict", lambda self, *args, **kwargs: state)
    config = config_for(folder)
    config.adapter.layers = ["features.0"]
    (tmp_path / "seed").mkdir()
    model = classifier(config, load_splits(config, seed=0), 0, tmp_path / "seed")
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
