"""Torchvision's published weights in the classification tool, drawn here, with the preprocessing that they bring."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch import nn
from torchvision.models import ResNet18_Weights, SqueezeNet1_1_Weights

from helpers.refusals import assert_refused
from metricopt_ext.classification.classifier import classifier
from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.classification.published import load_published, published
from metricopt_ext.classification.splits import load_splits
from metricopt_ext.data.splits import Splits
from metricopt_ext.errors import ConfigError, DataError

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


@pytest.mark.parametrize(("mean", "std"), [([], []), ([0.5, 0.4, 0.3], [0.2, 0.25, 0.5])])
def test_images_of_an_own_checkpoint_get_what_the_settings_say(
    folder: Path, mean: list[float], std: list[float]
) -> None:
    config = config_for(folder, "", image_size=8, mean=mean, std=std)
    found = all_images(load_splits(config, seed=0))
    plain = all_images(load_splits(config_for(folder, "", image_size=8), seed=0))
    assert 0 <= plain.min() < 0.4 < 0.6 < plain.max() <= 1
    for channel, (centre, spread) in enumerate(zip(mean or [0] * 3, std or [1] * 3, strict=True)):
        torch.testing.assert_close(found[:, channel], (plain[:, channel] - centre) / spread)


def test_they_are_loaded_into_the_classifier(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    state = torchvision.models.squeezenet1_1(weights=None, num_classes=2).state_dict()
    monkeypatch.setattr(type(WEIGHTS), "get_state_dict", lambda self, *args, **kwargs: state)
    config = config_for(folder)
    config.adapter.layers = ["features.0"]
    (tmp_path / "seed").mkdir()
    model = classifier(config, load_splits(config, seed=0), 0, tmp_path / "seed")
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())

    thousand = torchvision.models.squeezenet1_1(weights=None)
    monkeypatch.setattr(type(WEIGHTS), "get_state_dict", lambda self, *args, **kwargs: thousand.state_dict())
    assert_refused(lambda: load_published(model, WEIGHTS), DataError, "1000")


def test_inception_normalises_once_more_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1, 1)
    model.transform_input = False  # type: ignore[assignment]
    monkeypatch.setattr(type(WEIGHTS), "get_state_dict", lambda self, *args, **kwargs: model.state_dict())
    load_published(model, WEIGHTS)
    assert model.transform_input is True


def test_names_and_files_are_told_apart() -> None:
    assert published("resnet18", "ResNet18_Weights.IMAGENET1K_V1") is ResNet18_Weights.IMAGENET1K_V1
    assert published("resnet18", "") is None
    assert published("resnet18", "folder/ResNet18_Weights.pt") is None


@pytest.mark.parametrize(
    ("model", "weights", "name"),
    [
        ("resnet18", "ResNet18_Weights.IMAGENET21K", "ResNet18_Weights.IMAGENET1K_V1"),
        ("resnet18", NAME, "model.name=resnet18"),
        ("resnet18", "Resnet_Weights.IMAGENET1K_V1", "model.name=resnet18"),
        ("small_cnn", NAME, "model.name=small_cnn"),
    ],
)
def test_unknown_names_are_refused(model: str, weights: str, name: str) -> None:
    assert_refused(lambda: published(model, weights), ConfigError, name)


@pytest.mark.parametrize(
    ("data", "names"),
    [
        ({"name": "cifar10"}, ("data.name=image_folder",)),
        ({"image_size": 64}, ("data.image_size",)),
        ({"mean": [0.5], "std": [0.5]}, ("leave", "data.image_size", "data.std")),
        ({"mean": [0.5], "std": []}, ("both",)),
        ({"mean": [0.5], "std": [0.0]}, ("data.std", "0")),
    ],
)
def test_settings_that_contradict_them_are_refused(folder: Path, data: dict[str, Any], names: tuple[str, ...]) -> None:
    assert_refused(lambda: config_for(folder, **data).check(), ConfigError, *names)


def test_as_many_numbers_as_channels(folder: Path) -> None:
    assert_refused(
        lambda: load_splits(config_for(folder, "", image_size=8, mean=[0.5], std=[0.5]), seed=0),
        ConfigError,
        "1",
        "(3, 8, 8)",
    )
