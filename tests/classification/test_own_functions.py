"""Data and losses that a config names as MODULE:FUNCTION."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.modules import forgotten
from helpers.refusals import assert_refused
from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.classification.named_loss import named_loss, try_loss
from metricopt_ext.classification.splits import load_splits
from metricopt_ext.classification.targets import Target
from metricopt_ext.data.labelled import Split
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.tools import finetune_classifier as tool
from metricopt_ext.utils.config import load_config

CODE = """
import numpy as np
import torch
import torch.nn.functional as F

def rows(count, seed, several=False):
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=drawn)
    y = (x[:, 0] + x[:, 1] > 0).long()
    return (x, torch.stack([y, (x[:, 2] > 0).long()], 1)) if several else (x, y)

def parts(names=("train", "validation", "test"), several=False):
    return {name: rows(60, seed, several) for seed, name in enumerate(names)}

def words():
    x, y = rows(60, 0)
    return {"train": (x.numpy(), np.array(["no", "yes"])[y])}

def images():
    drawn = np.random.default_rng(0)
    return {"train": (drawn.integers(0, 256, (40, 8, 8, 3), dtype=np.uint8), np.arange(40) % 2)}

def pair(): return rows(60, 0)
def untrained(): return {"test": rows(60, 0)}
def strange(): return {"train": rows(60, 0), "dev": rows(60, 1)}
def alone(): return {"train": rows(60, 0)[0]}
def uneven(): return {"train": (rows(60, 0)[0], [0, 1])}
def failing(): raise OSError("no disk")

def focal(logits, labels, gamma=2.0):
    each = F.binary_cross_entropy_with_logits(logits, labels.float(), reduction="none") if logits.dim() == 1 else (
        F.cross_entropy(logits, labels, reduction="none"))
    return ((1 - (-each).exp()) ** gamma * each).mean()

def several(logits, labels): return F.multilabel_soft_margin_loss(logits, labels.float())
def each(logits, labels): return F.cross_entropy(logits, labels, reduction="none")
def constant(logits, labels): return torch.tensor(1.0)
def unordered(logits, labels): return F.cross_entropy(labels, logits)
class Weighted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
"""
TABLE = ["model.name=tabular_mlp"]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "of_a_user.py").write_text(CODE)
    with forgotten("of_a_user"):
        yield str(tmp_path)


def config_of(folder: str, *overrides: str) -> ClassificationConfig:
    sections = {each.split("=")[0].split(".")[0] for each in overrides if ":" in each}
    folders = [f"{section}.folder={folder}" for section in sorted(sections)]
    config = load_config(ClassificationConfig, None, [*TABLE, *overrides, *folders])
    config.check()
    return config


def test_parts_are_what_the_function_gives(folder: str) -> None:
    splits = load_splits(config_of(folder, "data.name=of_a_user:parts"), seed=0)
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [60, 60, 60]
    assert splits.class_names == ("0", "1")
    assert not torch.equal(splits.validation.x, splits.test.x)
    assert splits.reading is not None
    assert "of_a_user:parts" in splits.reading.found


@pytest.mark.parametrize(
    ("names", "sizes"),
    [("[train]", (42, 6, 12)), ("[train,validation]", (60, 20, 40)), ("[train,test]", (52, 8, 60))],
)
def test_what_is_missing_is_held_out(folder: str, names: str, sizes: tuple[int, ...]) -> None:
    splits = load_splits(config_of(folder, "data.name=of_a_user:parts", f"data.kwargs={{names: {names}}}"), seed=0)
    assert (len(splits.train), len(splits.validation), len(splits.test)) == sizes
    rows = torch.cat([splits.train.x, splits.validation.x, splits.test.x])
    assert len(rows.unique(dim=0)) == sum(sizes)


def test_labels_may_be_text_and_inputs_images(folder: str) -> None:
    assert load_splits(config_of(folder, "data.name=of_a_user:words"), seed=0).class_names == ("no", "yes")
    images = load_splits(config_of(folder, "data.name=of_a_user:images", "model.name=small_cnn"), seed=0)
    assert images.train.x.shape == (28, 3, 8, 8)
    assert images.train.x.max() <= 1


def test_several_labels_each(folder: str) -> None:
    overrides = ["data.name=of_a_user:parts", "data.kind=multilabel", "metric.name=macro_f1"]
    config = config_of(folder, *overrides, "data.kwargs={several: true}")
    splits = load_splits(config, seed=0)
    assert splits.train.y.shape == (60, 2)
    assert splits.num_classes == 2
    wrong = config_of(folder, *overrides)
    assert_refused(lambda: load_splits(wrong, seed=0), DataError, "of_a_user:parts", "data.kind=multilabel", "60")


@pytest.mark.parametrize(
    ("name", "error", "names"),
    [
        ("pair", DataError, ("train", "validation", "test")),
        ("untrained", DataError, ("train",)),
        ("strange", DataError, ("dev", "validation")),
        ("alone", DataError, ("train", "inputs", "labels")),
        ("uneven", DataError, ("60",)),
        ("failing", ConfigError, ("OSError", "disk")),
        ("nothing", ConfigError, ("nothing",)),
    ],
)
def test_what_gives_no_parts_is_refused(folder: str, name: str, error: Any, names: tuple[str, ...]) -> None:
    config = config_of(folder, f"data.name=of_a_user:{name}")
    assert_refused(lambda: load_splits(config, seed=0), error, f"of_a_user:{name}", *names)


def test_what_only_functions_have_is_refused_elsewhere(folder: str) -> None:
    assert_refused(lambda: config_of(folder, "data.name=of_a_user:parts", "data.root=x"), ConfigError, "data.kwargs")
    digits = ["data.name=digits", "loss.name=cross_entropy"]
    for key in ("data.kwargs.a=1", "data.folder=x", "loss.folder=x"):
        told = "MODULE:FUNCTION", key.split("=")[0]
        assert_refused(lambda key=key: config_of(folder, *digits, key), ConfigError, *told)


def test_a_loss_is_called_with_logits_and_labels(folder: str) -> None:
    config = config_of(folder, "data.name=digits", "loss.name=of_a_user:focal", "loss.params={gamma: 0.0}")
    model, x, y = nn.Linear(4, 3), torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    expected = nn.functional.cross_entropy(model(x), y)
    target = Target("classes", 3)
    torch.testing.assert_close(named_loss(config, target)(model, (x, y)), expected)
    made = config_of(folder, "data.name=digits", "loss.name=torch.nn:MultiMarginLoss", "loss.params={margin: 2.0}")
    assert named_loss(made, target)(model, (x, y)) == nn.MultiMarginLoss(margin=2.0)(model(x), y)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("each", ("(10, 3)", "one finite number")),
        ("constant", ("gradient",)),
        ("unordered", ("loss.params",)),
        ("Weighted", ("weights",)),
        ("nothing", ("nothing",)),
    ],
)
def test_a_loss_is_tried_on_the_model_before_it_is_trained(folder: str, name: str, names: tuple[str, ...]) -> None:
    part = Split(torch.randn(10, 4), torch.arange(10) % 3)
    config = config_of(folder, "data.name=digits", f"loss.name=of_a_user:{name}")
    assert_refused(lambda: try_loss(config, nn.Linear(4, 3), part), ConfigError, f"of_a_user:{name}", *names)


def test_a_run_on_both_and_its_identity(folder: str, tmp_path: Path) -> None:
    overrides = ["data.name=of_a_user:parts", "loss.name=of_a_user:focal", "loss.params={gamma: 1.0}"]
    sizes = ["queries=40", "model.epochs=1", "adapter.dim=2", "population=4"]
    config = config_of(folder, *overrides, *sizes, "finetune.steps=3", "seeds=1", "device=cpu")
    tool.run(config, tmp_path / "run", resume=False)
    kept = json.loads((tmp_path / "run" / "run.json").read_text())
    assert {*kept["own code"]} == {"of_a_user:parts", "of_a_user:focal"}
    bad = config_of(folder, "data.name=of_a_user:parts", "loss.name=of_a_user:each")
    assert_refused(lambda: tool.run(bad, tmp_path / "bad", resume=False), ConfigError, "of_a_user:each")
    assert not list((tmp_path / "bad").rglob("model.safetensors"))


def test_a_loss_of_ones_own_may_be_of_several_labels(folder: str) -> None:
    overrides = ["data.name=of_a_user:parts", "data.kind=multilabel", "data.kwargs={several: true}"]
    config = config_of(folder, *overrides, "metric.name=macro_f1", "loss.name=of_a_user:several")
    splits = load_splits(config, seed=0)
    try_loss(config, nn.Linear(4, 2), splits.train)
