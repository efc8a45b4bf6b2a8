"""The Python blocks of each page run, one after another, as one script.

What a page takes as given (a model, its data) is made here first, small enough for a second or two. Where a comment
behind a `print` says what it prints, it does.
"""

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from metricopt_ext.__main__ import main

ROOT = Path(__file__).resolve().parents[1]


def blocks(page: Path, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


# A network for digits, trained for a moment, as `model` of README and first steps.
DIGITS = """
from collections import OrderedDict
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
import metricopt_ext as mo

x, y = (torch.from_numpy(each) for each in load_digits(return_X_y=True))
x, first = x.float() / 16, torch.arange(len(y)) < 500
common = first & ((y < 5) | (torch.arange(len(y)) % 3 == 0))  # digits from 5 on are rarer
x_train, y_train, x_val, y_val = x[common], y[common], x[900:1300], y[900:1300]
block = nn.Sequential(OrderedDict(fc2=nn.Linear(16, 16), bn2=nn.BatchNorm1d(16), relu=nn.ReLU()))
model = nn.Sequential(
    OrderedDict(fc1=nn.Linear(64, 16), relu=nn.ReLU(), layer4=nn.Sequential(block), fc=nn.Linear(16, 10))
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(20):
    optimizer.zero_grad()
    F.cross_entropy(model(x_train), y_train).backward()
    optimizer.step()


def accuracy(model):
    return float((model(x_val).argmax(1) == y_val).double().mean())


def validation_f1(model):
    right = (model(x_val).argmax(1) == y_val).double()
    return float(right.mean()), (float(right[::2].mean()), float(right[1::2].mean()))
"""

TASK = """
loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
batches = mo.TensorBatches(x_train, y_train, batch_size=64)
metric = mo.Metric(validation_f1, maximize=True)
adapter = mo.attach_film(model, dim=8, outputs=mo.Outputs())
task = mo.FinetuneTask(adapter, loss=loss, batches=batches, metric=metric)
"""

SEARCH = """
from pathlib import Path

x, counts, f1, balanced_batches, augment = x_val, y_train.bincount(), validation_f1, None, None
ece = accuracy
recall_of_persons = lambda model: float((model(x_val).argmax(1) == y_val)[y_val == 1].double().mean())
evaluate = lambda model: {"f1": validation_f1(model), "accuracy": accuracy(model)}
Path("out").mkdir()
for number in (1, 2):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state[next(iter(state))] *= 1 + number / 100
    torch.save(state, f"out/model_0{number}.pth")
"""

SETTINGS = """
from types import SimpleNamespace

import torch
import metricopt_ext as mo
from metricopt_ext.retrieval.recall import recall_metric
from sklearn.datasets import load_digits
from torch import nn

x, y = (torch.from_numpy(each) for each in load_digits(return_X_y=True))
x = x.float() / 16
model = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
adapter = mo.attach_film(model, dim=8)
metric = recall_metric([(x[:400], y[:400])], ks=(1,))
loss = lambda model, batch: model(batch[0]).square().mean()
batches = mo.TensorBatches(x[900:], y[900:], batch_size=64)
task = mo.FinetuneTask(adapter, loss=loss, batches=batches, metric=metric)
deployment_loader = [x[400:800]]


class Search(SimpleNamespace):
    def __call__(self, model):
        return model(x[:4])


search = Search(k=10)
"""

SIBLINGS = """
from metricopt_ext.siblings.batch_metric import BatchMetric

loader, loss_fn = [(x_train[:64], y_train[:64])], loss
metric = BatchMetric(lambda scores, labels: (scores.argmax(1) == labels).double().mean(), maximize=True)
outputs = [(model(part).detach(), labels) for part, labels in zip(x_val.split(100), y_val.split(100), strict=True)]
"""

CLASSIFICATION = """
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import torchvision
import metricopt_ext as mo
from sklearn.datasets import load_iris

classes = 3
Path("out/mine/seed-0").mkdir(parents=True)
tuned = torchvision.models.resnet18(num_classes=classes).state_dict()
safetensors.torch.save_file(tuned, "out/mine/seed-0/tuned.safetensors")
pictures, labels = torch.rand(4, 3, 64, 64), torch.tensor([0, 1, 2, 0])
metric = mo.Metric(lambda model: float((model.eval()(pictures).argmax(1) == labels).double().mean()), maximize=True)
X, y = load_iris(return_X_y=True)
"""

RETRIEVAL = """
import torch
from pytorch_metric_learning import losses, miners, samplers, testers, trainers
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

x, y = (torch.from_numpy(each) for each in load_digits(return_X_y=True))
x, y = x.float() / 16, 2 * y + torch.arange(len(y)) % 2  # twenty classes
embeddings, labels = x[:200], y[:200]
x_train, y_train = x[y < 12], y[y < 12]
x_val, y_val = x[y >= 12][:160], y[y >= 12][:160]
train_dataset, val_dataset = TensorDataset(x_train, y_train), TensorDataset(x_val, y_val)
validation_loader, deployment_loader, example = [(x_val, y_val)], [x_val], x_val[:8]
trunk, embedder = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU()), nn.Linear(32, 8)
loss, miner = losses.TripletMarginLoss(), miners.MultiSimilarityMiner()
tester = testers.GlobalEmbeddingSpaceTester(
    accuracy_calculator=AccuracyCalculator(include=("precision_at_1",), k=1), dataloader_num_workers=0
)
trainer = trainers.MetricLossOnly(
    models={"trunk": trunk, "embedder": embedder},
    optimizers={},
    batch_size=64,
    loss_funcs={"metric_loss": loss},
    dataset=train_dataset,
    mining_funcs={"tuple_miner": miner},
    sampler=samplers.MPerClassSampler(y_train, 5, length_before_new_iter=192),
    dataloader_num_workers=0,
)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
"""

DETECTION = """
import torch
from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

box, label = torch.tensor([[1.0, 2, 30, 40]]), torch.tensor([1])
batches = [([{"boxes": box, "scores": torch.tensor([0.9]), "labels": label}], [{"boxes": box, "labels": label}])]
model = fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, num_classes=2).eval()
images = [torch.rand(3, 64, 64)]
"""

REPORT = """
import json
from pathlib import Path

Path("out/first").mkdir(parents=True)
methods = {"metricopt": {"test": [0.5], "queries_total": 60}}
Path("out/first/report.json").write_text(
    json.dumps({"methods": methods, "kept": ["start"], "value_function": {"trusted": [False]}})
)
"""

# The own scorer's model, data, score and task: what the pages after it go on from.
own_model, own_score, *_ = blocks(ROOT / "docs/scorer.md")
SCORER = own_model + own_score.partition("print(")[0]

# By page: what it takes as given.
GIVEN = {
    "README.md": DIGITS,
    "docs/adapters.md": "",
    "docs/assess.md": SCORER,
    "docs/classification.md": CLASSIFICATION,
    "docs/detection.md": DETECTION,
    "docs/first_steps.md": DIGITS,
    "docs/guard.md": SCORER,
    "docs/model.md": "",
    "docs/queries.md": SCORER,
    "docs/report.md": REPORT,
    "docs/retrieval.md": RETRIEVAL,
    "docs/scale.md": DIGITS + TASK,
    "docs/search.md": DIGITS + SEARCH + TASK,
    "docs/settings.md": SETTINGS,
    "docs/siblings.md": DIGITS + TASK + SIBLINGS,
}
# Blocks that need a folder of the reader's own, or the 20 seconds of learning f by rounds of finetuning.
LEFT_OUT = ("TransformersToolkit(", "meta_train(")

# Pages whose comments behind a `print` are what it prints; of the others, searches are run with fewer queries.
SAYING = {"docs/adapters.md", "docs/assess.md", "docs/guard.md", "docs/model.md", "docs/queries.md"}
SHORTER = {
    "queries=1500": "queries=60",
    "queries=150": "queries=20",
    "queries=60": "queries=20",
    "steps=2000": "steps=20",
    ").fit(X, y)": ", queries=20, epochs=2).fit(X, y)",
}


@pytest.mark.parametrize("name", GIVEN)
def test_the_blocks_of_a_page_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script = "\n".join(block for block in blocks(ROOT / name) if not any(each in block for each in LEFT_OUT))
    assert script
    if name not in SAYING:
        script = re.sub("|".join(map(re.escape, SHORTER)), lambda found: SHORTER[found[0]], script)
    names: dict[str, Any] = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        exec(compile(GIVEN[name], f"given to {name}", "exec"), names)
        exec(compile(script, name, "exec"), names)
    printed = capsys.readouterr().out
    for said in re.findall(r"^print\(.*\)  # ([^:\n]*)", script, re.MULTILINE) if name in SAYING else ():
        assert said in printed


def test_every_page_with_python_is_run() -> None:
    """All but the one below, whose last block is a file of its own."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    assert {str(page.relative_to(ROOT)) for page in pages if blocks(page)} == {*GIVEN, "docs/scorer.md"}


def test_the_scorers_of_their_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its blocks are one script after another, the last one but in a file of its own, which the command starts."""
    page = ROOT / "docs/scorer.md"
    *scripts, evaluate = blocks(page, "python")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    (tmp_path / "evaluate.py").write_text(evaluate)
    assert len(scripts) == 5
    names: dict[str, Any] = {}
    with torch.random.fork_rng():
        for script in scripts:
            exec(compile(script.replace("queries=60", "queries=30"), page, "exec"), names)
    assert len(list(tmp_path.glob("trial-*.safetensors"))) == 30
    (block,) = blocks(page, "sh")
    (_, *words) = shlex.split(block.replace("\\\n", " ").replace("--queries 60", "--queries 20"))
    monkeypatch.setattr(sys, "argv", ["metricopt", *words])
    main()
    assert (tmp_path / "tuned.safetensors").is_file()
    assert "unguarded" not in capfd.readouterr().out
