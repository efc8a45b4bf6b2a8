"""The classifiers of configs: trained by the seed, as the settings say."""

from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import sklearn.metrics
import torch
from torch import nn

from helpers.refusals import assert_named
from metricopt_ext.classification import classifier as making
from metricopt_ext.classification.classifier import classifier
from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.classification.predictions import predict
from metricopt_ext.classification.splits import load_splits
from metricopt_ext.errors import DataError
from metricopt_ext.utils.config import load_config

DIGITS = Path(__file__).parents[2] / "configs" / "classification" / "digits.yaml"


def config_of(*overrides: str, file: Path = DIGITS) -> ClassificationConfig:
    return load_config(ClassificationConfig, file, ["model.epochs=1", "adapter.dim=3", "device=cpu", *overrides])


def test_training_depends_on_the_seed_alone_and_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("shift.kind=none", "model.epochs=4")
    splits = load_splits(config, 0)
    torch.manual_seed(123)
    state = torch.get_rng_state()
    first = classifier(config, splits, 0, tmp_path / "a")
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(456)
    second = classifier(config, splits, 0, tmp_path / "b")
    other = classifier(config, splits, 1, tmp_path / "c")
    for key, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[key])
    assert not torch.equal(first.conv1.weight, other.conv1.weight)
    assert not first.training

    monkeypatch.setattr(making, "train", lambda *_: pytest.fail("trained"))
    kept = classifier(config, splits, 0, tmp_path / "a")
    torch.save(first.state_dict(), tmp_path / "weights.pt")
    config.model.weights = str(tmp_path / "weights.pt")
    given = classifier(config, splits, 9, tmp_path / "d")
    for key, value in first.state_dict().items():
        assert torch.equal(value, kept.state_dict()[key])
        assert torch.equal(value, given.state_dict()[key])
    assert (tmp_path / "d" / "model.safetensors").exists()
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "weights.pt")
    resumed = classifier(config, splits, 9, tmp_path / "d")  # the run has a copy of what its file was
    assert torch.equal(resumed.conv1.weight, first.conv1.weight)
    with pytest.raises(DataError) as caught:
        classifier(config, splits, 0, tmp_path / "e")
    assert_named(caught, "weights.pt")
    assert len(str(caught.value).splitlines()) == 1


def test_training_is_by_the_loss_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, seen = config_of("loss.name=torch.nn:MultiMarginLoss", "loss.params={margin: 2.0}"), []
    splits = load_splits(config, 0)
    monkeypatch.setattr(
        making, "train_supervised", lambda model, loss, batches, **_: seen.append((model, loss, batches))
    )
    classifier(config, splits, 0, tmp_path)
    ((model, loss, batches),) = seen
    x, y = batches(0, 0, 0)
    assert torch.equal(loss(model, (x, y)), nn.MultiMarginLoss(margin=2.0)(model(x), y))


def test_training_has_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(making, "train_supervised", lambda model, loss, batches, **kwargs: seen.append(kwargs))
    config = config_of("model.lr=0.02", "model.augment=true")
    classifier(config, load_splits(config, 0), 0, tmp_path)
    wanted = {"lr": 0.02, "augment": True}
    assert {key: seen[0][key] for key in wanted} == wanted


def test_training_tells_the_digits_apart(tmp_path: Path) -> None:
    config, right = config_of("shift.kind=none", "model.epochs=4"), []
    for seed in range(2):
        splits = load_splits(config, seed)
        logits = predict(classifier(config, splits, seed, tmp_path / str(seed)), splits.test.x)
        right.append(sklearn.metrics.accuracy_score(splits.test.y, logits.argmax(1)))
    assert mean(right) > 0.5  # at worst 0.97 ± 0.01; a tenth is chance
