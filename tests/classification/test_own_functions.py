"""Data and losses that a config names as MODULE:FUNCTION."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.modules import forgotten
from helpers.refusals import assert_refused
from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.classification.named_loss import named_loss, try_loss
from metricopt_ext.classification.targets import Target
from metricopt_ext.data.labelled import Split
from metricopt_ext.errors import AdapterError, ConfigError
from metricopt_ext.tools import finetune_classifier as tool
from metricopt_ext.utils.config import load_config

CODE = """
import numpy as np
import torch
import torch.nn.functional as F

def rows(seed):
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] + x[:, 1] > 0).long()

def parts():
    return {name: rows(seed) for seed, name in enumerate(("train", "validation", "test"))}

def focal(logits, labels, gamma=2.0):
    each = F.binary_cross_entropy_with_logits(logits, labels.float(), reduction="none") if logits.dim() == 1 else (
        F.cross_entropy(logits, labels, reduction="none"))
    return ((1 - (-each).exp()) ** gamma * each).mean()

class Ending(torch.nn.Sequential):
    def __init__(self, last, count, inputs):
        super().__init__(torch.nn.Linear(inputs, 4), torch.nn.LayerNorm(4), torch.nn.ReLU(), torch.nn.Linear(4, count))
        self.append(last)

def softmax(count, shape): return Ending(torch.nn.Softmax(1), count, *shape)
def sigmoids(count, shape): return Ending(torch.nn.Sigmoid(), count, *shape)
def one_sigmoid(count, shape): return Ending(torch.nn.Sequential(torch.nn.Sigmoid(), torch.nn.Flatten(0)), 1, *shape)
def log_softmax(count, shape): return Ending(torch.nn.LogSoftmax(1), count, *shape)

def each(logits, labels): return F.cross_entropy(logits, labels, reduction="none")
def constant(logits, labels): return torch.tensor(1.0)
def unordered(logits, labels): return F.cross_entropy(labels, logits)
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


LABELS = ["data.kind=multilabel", "data.targets=[first,second]", "metric.name=macro_f1"]
SMALL = ["queries=12", "model.epochs=1", "adapter.dim=2", "population=4", "finetune.steps=3", "seeds=1", "device=cpu"]


@pytest.mark.parametrize(
    ("name", "target", "refused"),
    [
        ("softmax", ["data.target=first", "data.drop=[second]"], True),
        ("sigmoids", ["data.target=first", "data.drop=[second]"], True),
        ("one_sigmoid", ["data.target=first", "data.drop=[second]"], True),
        ("softmax", LABELS, True),
        ("sigmoids", LABELS, True),
        ("log_softmax", ["data.target=first", "data.drop=[second]"], False),  # log-probabilities are logits
    ],
)
def test_an_own_model_returns_logits(name: str, target: list[str], refused: bool, folder: str, tmp_path: Path) -> None:
    rows = [[*row, int(row[0] > 0), int(row[1] > 0)] for row in torch.randn(60, 4).tolist()]
    (tmp_path / "rows.csv").write_text("\n".join(["a,b,c,d,first,second", *(",".join(map(str, row)) for row in rows)]))
    data = ["data.name=csv", f"data.root={tmp_path / 'rows.csv'}", *target]
    config = config_of(folder, f"model.name=of_a_user:{name}", *data, *SMALL)
    call = lambda: tool.run(config, tmp_path / "run", resume=False)  # noqa: E731
    if refused:
        assert_refused(call, AdapterError, "probabilities", "softmax or sigmoid")
        assert not list((tmp_path / "run").rglob("*.safetensors"))  # nothing was trained
    else:
        call()
