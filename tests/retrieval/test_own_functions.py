"""Data and losses that a config of the retrieval tool names as MODULE:FUNCTION."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.modules import forgotten
from helpers.refusals import assert_refused

pytest.importorskip("faiss")
pytest.importorskip("pytorch_metric_learning")

from pytorch_metric_learning.losses import ContrastiveLoss

from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.retrieval.config import RetrievalConfig
from metricopt_ext.retrieval.data import queries_of
from metricopt_ext.retrieval.named_loss import build_loss
from metricopt_ext.retrieval.splits import load_splits
from metricopt_ext.tools import finetune_retrieval as tool
from metricopt_ext.utils.config import load_config

CODE = """
import numpy as np
import torch
from pytorch_metric_learning.losses import ContrastiveLoss

def images(first, last, of_each=6):
    labels = np.repeat(np.arange(first, last), of_each)
    drawn = np.random.default_rng(first)
    return (10 * labels[:, None, None, None] + drawn.integers(0, 60, (len(labels), 1, 8, 8))).astype(np.uint8), labels

def parts(names=("train", "validation", "test")):
    return {name: images(4 * place, 4 * place + 4) for place, name in enumerate(names)}

def alone(): return {"train": images(0, 12)}

def words():
    x, y = images(0, 12)
    return {"train": (torch.from_numpy(x).float() / 255, [f"word {label}" for label in y])}

def searched():
    return {"train": images(0, 8), "test": {"query": images(8, 12, 2), "gallery": images(8, 12, 5)}}

def shared(): return {"train": images(0, 8), "test": images(7, 12)}
def pair(): return images(0, 12)
def strange(): return {"train": images(0, 8), "dev": images(8, 12)}
def single(): return {"train": images(0, 12)[0]}
def gallery(): return {"train": images(0, 8), "test": {"gallery": images(8, 12)}}
def flat(): return {"train": (images(0, 12)[0][:, 0], images(0, 12)[1])}
def uneven(): return {"train": (images(0, 12)[0], [0, 1])}
def failing(): raise OSError("no disk")

def pulled(embeddings, labels, power=2):
    same = labels[:, None] == labels
    return ((embeddings[:, None] - embeddings).norm(dim=2) ** power)[same].mean()

def each(embeddings, labels): return embeddings.sum(1)
def constant(embeddings, labels): return torch.tensor(1.0)
def number(embeddings, labels): return 1.0
def broken(embeddings, labels): return embeddings @ labels
class Weighted(torch.nn.Linear):
    def __init__(self): super().__init__(2, 2)
"""
SMALL = [
    *("model.name=conv4", "model.width=4", "model.embedding=4", "model.epochs=1", "adapter.dim=2", "queries=14"),
    *("finetune.steps=2", "seeds=1", "metric.ks=[1,2]", "device=cpu"),
    *("loss.classes=2", "loss.samples=2", "starts=[loss_finetune]"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "of_a_searcher.py").write_text(CODE)
    with forgotten("of_a_searcher"):
        yield str(tmp_path)


def config_of(folder: str, *overrides: str) -> RetrievalConfig:
    sections = {each.split("=")[0].split(".")[0] for each in overrides if ":" in each}
    folders = [f"{section}.folder={folder}" for section in sorted(sections)]
    config = load_config(RetrievalConfig, None, [*SMALL, *overrides, *folders])
    config.check()
    return config


def test_parts_are_what_the_function_gives(folder: str) -> None:
    splits = load_splits(config_of(folder, "data.name=of_a_searcher:parts"), seed=0)
    for number, name in enumerate(("train", "validation", "test")):
        part = getattr(splits, name)
        assert {*splits.classes_of(name)} == {str(4 * number + i) for i in range(4)}
        assert (len(part), part.x.shape[1:]) == (24, (1, 8, 8))
        assert (part.x.amin((1, 2, 3)) // 10 >= torch.tensor([int(splits.class_names[y]) for y in part.y])).all()
    assert splits.reading is not None
    assert "of_a_searcher:parts" in splits.reading.found


@pytest.mark.parametrize(
    ("name", "counts"), [("alone", (6, 3, 3)), ("words", (6, 3, 3)), ("parts", (4, 2, 2)), ("searched", (4, 4, 4))]
)
def test_whole_classes_are_held_out_of_what_is_given(folder: str, name: str, counts: tuple[int, ...]) -> None:
    kwargs = ["data.kwargs={names: [train, validation]}"] if name == "parts" else []
    settings = [f"data.name=of_a_searcher:{name}", "data.validation_share=0.5", *kwargs]
    splits = load_splits(config_of(folder, *settings), seed=0)
    found = {part: splits.classes_of(part) for part in ("train", "validation", "test")}
    assert tuple(len(each) for each in found.values()) == counts
    assert len({name for each in found.values() for name in each}) == sum(counts)
    queries = queries_of(splits)
    assert (queries is None) == (name != "searched")
    if queries is not None:
        assert (int(queries.sum()), int((~queries).sum())) == (8, 20)


def test_the_test_classes_of_train_alone_may_be_chosen(folder: str) -> None:
    chosen = config_of(folder, "data.name=of_a_searcher:words", "data.test_classes=['word 2','word 10']")
    assert load_splits(chosen, seed=0).classes_of("test") == ["word 10", "word 2"]
    given = config_of(folder, "data.name=of_a_searcher:parts", "data.last_test=true")
    assert_refused(lambda: load_splits(given, seed=0), ConfigError, "of_a_searcher:parts", "data.last_test")


@pytest.mark.parametrize(
    ("name", "error", "names"),
    [
        ("shared", DataError, ("'7'", "train", "test")),
        ("pair", DataError, ("train", "validation", "test")),
        ("strange", DataError, ("dev", "validation")),
        ("single", DataError, ("images", "labels")),
        ("gallery", DataError, ("test", "images")),
        ("flat", DataError, ("(72, 8, 8)", "n x c x h x w")),
        ("uneven", DataError, ("72",)),
        ("failing", ConfigError, ("disk",)),
        ("nothing", ConfigError, ("nothing",)),
    ],
)
def test_what_gives_no_parts_is_refused(folder: str, name: str, error: Any, names: tuple[str, ...]) -> None:
    config = config_of(folder, f"data.name=of_a_searcher:{name}")
    assert_refused(lambda: load_splits(config, seed=0), error, *names)


def test_what_only_functions_have_is_refused_elsewhere(folder: str) -> None:
    told = "data.kwargs"
    assert_refused(lambda: config_of(folder, "data.name=of_a_searcher:parts", "data.root=x"), ConfigError, told)
    for key in ("data.kwargs.a=1", "data.folder=x", "loss.folder=x"):
        names = "MODULE:FUNCTION", key.split("=")[0]
        assert_refused(lambda key=key: config_of(folder, "data.name=digits", key), ConfigError, *names)


def test_a_loss_is_called_with_embeddings_and_labels(folder: str) -> None:
    x, y = torch.randn(6, 4), torch.tensor([0, 0, 1, 1, 2, 2])
    own = config_of(folder, "data.name=digits", "loss.name=of_a_searcher:pulled", "loss.params={power: 1}")
    expected = (x[:, None] - x).norm(dim=2)[y[:, None] == y].mean()
    torch.testing.assert_close(build_loss(own.loss)(nn.Identity(), (x, y)), expected)
    made = config_of(
        folder, "data.name=digits", "loss.name=of_a_searcher:ContrastiveLoss", "loss.params={neg_margin: 2.0}"
    )
    assert build_loss(made.loss)(nn.Identity(), (x, y)) == ContrastiveLoss(neg_margin=2.0)(x, y)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("each", ("4", "one finite number")),
        ("constant", ("gradient",)),
        ("number", ("1.0", "gradient")),
        ("broken", ("loss.params",)),
        ("Weighted", ("weights",)),
        ("nothing", ("nothing",)),
    ],
)
def test_a_loss_is_tried_before_anything_is_trained(folder: str, name: str, names: tuple[str, ...]) -> None:
    config = config_of(folder, "data.name=digits", f"loss.name=of_a_searcher:{name}")
    assert_refused(lambda: build_loss(config.loss), ConfigError, f"of_a_searcher:{name}", *names)


def test_a_run_on_both_and_its_identity(folder: str, tmp_path: Path) -> None:
    overrides = ["data.name=of_a_searcher:parts", "loss.name=of_a_searcher:pulled", "loss.params={power: 1}"]
    tool.run(config_of(folder, *overrides), tmp_path / "run", resume=False)
    kept = json.loads((tmp_path / "run" / "run.json").read_text())
    assert {*kept["own code"]} == {"of_a_searcher:parts", "of_a_searcher:pulled"}
