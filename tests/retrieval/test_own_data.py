"""A retrieval set in parts of one's own, with queries that search a gallery."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.refusals import assert_named, assert_refused, assert_warned

pytest.importorskip("torchvision")
pytest.importorskip("pytorch_metric_learning")

from torch import nn

from metricopt_ext.data.labelled import Split
from metricopt_ext.data.splits import Splits
from metricopt_ext.data.streamed import is_streamed
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.retrieval.config import MetricConfig, OwnEmbedderMetricConfig, RetrievalConfig
from metricopt_ext.retrieval.data import queries_of
from metricopt_ext.retrieval.models import build_model
from metricopt_ext.retrieval.named_metric import build_metric
from metricopt_ext.retrieval.splits import load_splits
from metricopt_ext.tasks.batches import ClassBatches
from metricopt_ext.utils.config import load_config

Write = Callable[[str, range], None]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write classes of three images, named by numbers, into a folder; an image has its class's number in its pixels."""

    def classes(folder: str, numbers: range) -> None:
        for number in numbers:
            (tmp_path / folder / f"c{number}").mkdir(parents=True)
            for i in range(3):
                pixels = np.full((5, 5, 3), number, np.uint8)
                pixels[0, 0] = [i, len(folder), 7]  # no two images are the same
                Image.fromarray(pixels).save(tmp_path / folder / f"c{number}" / f"{i}.png")

    return classes


def splits_of(*overrides: str) -> Splits:
    config = load_config(RetrievalConfig, None, ["data.name=class_folders", "model.name=conv4", *overrides])
    config.check()
    assert all(file.exists() for file in config.data_files())
    return load_splits(config, 0)


def numbers(splits: Splits, part: str) -> set[int]:
    """Return the classes' numbers in a part, after a look at their labels."""
    images = getattr(splits, part)
    found = images.x[:, 0, 2, 2].tolist()
    assert [splits.class_names[label] for label in images.y.tolist()] == [f"c{number}" for number in found]
    return {*found}


def test_each_part_has_its_own_classes(write: Write, tmp_path: Path) -> None:
    for folder, own in (("a", range(4)), ("b", range(4, 7)), ("c", range(7, 9))):
        write(folder, own)
    splits = splits_of(*(f"data.{name}={tmp_path / folder}" for name, folder in zip(("train", "val", "test"), "abc")))  # noqa: B905
    assert [numbers(splits, part) for part in ("train", "validation", "test")] == [
        {0, 1, 2, 3},
        {4, 5, 6},
        {7, 8},
    ]
    assert queries_of(splits) is None
    assert splits.reading is not None
    assert "validation: 9 images" in splits.reading.found


def test_a_root_of_parts_is_read_as_such(write: Write, tmp_path: Path) -> None:
    for folder, own in (("train", range(5)), ("test", range(5, 8))):
        write(f"set/{folder}", own)
    splits = splits_of(f"data.root={tmp_path / 'set'}", "data.validation_share=0.4")
    assert numbers(splits, "test") == {5, 6, 7}
    assert numbers(splits, "train") | numbers(splits, "validation") == set(range(5))
    assert len(numbers(splits, "validation")) == 2


def test_half_of_validation_s_classes_are_the_test_where_there_is_none(write: Write, tmp_path: Path) -> None:
    write("a", range(3))
    write("b", range(3, 8))
    splits = splits_of(f"data.train={tmp_path / 'a'}", f"data.val={tmp_path / 'b'}")
    assert numbers(splits, "train") == {0, 1, 2}
    assert (len(numbers(splits, "validation")), len(numbers(splits, "test"))) == (3, 2)
    assert numbers(splits, "validation") | numbers(splits, "test") == set(range(3, 8))


def test_a_class_in_two_parts_is_named(write: Write, tmp_path: Path) -> None:
    write("a", range(4))
    write("b", range(3, 6))
    assert_refused(
        lambda: splits_of(f"data.train={tmp_path / 'a'}", f"data.test={tmp_path / 'b'}"),
        DataError,
        "'c3'",
        "train",
        "test",
    )


def test_an_image_in_two_parts_is_found_by_content(write: Write, tmp_path: Path) -> None:
    write("a", range(5))
    write("b", range(5, 8))
    (tmp_path / "b/c6/again.png").write_bytes((tmp_path / "a/c2/0.png").read_bytes())
    assert_warned(
        lambda: splits_of(f"data.train={tmp_path / 'a'}", f"data.test={tmp_path / 'b'}", "data.validation_share=0.4"),
        "1",
        "test",
        "0.png",
        "train",
    )


@pytest.mark.parametrize("beside", [True, False])
def test_queries_search_their_gallery(write: Write, tmp_path: Path, beside: bool) -> None:
    inner = "" if beside else "test/"
    for folder, own in (("train", range(5)), (f"{inner}query", range(5, 8)), (f"{inner}gallery", range(5, 9))):
        write(f"set/{folder}", own)
    where = {"train": "train", "test": "test"}
    settings = [f"data.root={tmp_path / 'set'}"]
    if not beside:
        settings = [f"data.{name}={tmp_path / 'set' / folder}" for name, folder in where.items()]
    splits = splits_of(*settings, "data.validation_share=0.4")
    queries = queries_of(splits)
    assert queries is not None
    assert queries.tolist() == [True] * 9 + [False] * 12
    assert numbers(splits, "test") == {5, 6, 7, 8}
    assert splits.reading is not None
    assert "9 test queries search 12 gallery images" in splits.reading.found
    assert queries_of(splits.to(torch.device("cpu"))) is queries  # it stays with the splits


def test_queries_without_classes_to_train_on_are_refused(write: Write, tmp_path: Path) -> None:
    for folder in ("query", "gallery"):
        write(f"set/{folder}", range(3))
    assert_refused(lambda: splits_of(f"data.root={tmp_path / 'set'}"), DataError)


class Pixels(nn.Module):
    """Embeds an image by two of its pixels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1)[:, :2].float()


def test_the_metric_is_of_queries_against_the_gallery() -> None:
    rng = torch.Generator().manual_seed(3)
    x = torch.randint(0, 256, (60, 1, 2, 2), generator=rng, dtype=torch.uint8)
    y = torch.randint(0, 6, (60,), generator=rng)
    queries = torch.rand(60, generator=rng) < 0.4
    points = x.flatten(1)[:, :2].double()
    distances = torch.cdist(points[queries], points[~queries])
    hits = [int(y[~queries][row.argmin()]) == int(label) for row, label in zip(distances, y[queries], strict=True)]
    metric = build_metric(MetricConfig(ks=[1]), Split(x, y), queries=queries)
    assert 1 - metric.cost(Pixels(), "test") == pytest.approx(sum(hits) / len(hits))
    assert 0.05 < sum(hits) / len(hits) < 0.95
    precision = build_metric(MetricConfig("r_precision"), Split(x, y), queries=queries)
    expected = []
    for row, label in zip(distances, y[queries], strict=True):
        same = y[~queries] == label
        expected.append(float(same[row.argsort()[: int(same.sum())]].double().mean()))
    assert 1 - precision.cost(Pixels(), "test") == pytest.approx(np.mean(expected), abs=1e-6)
    own = OwnEmbedderMetricConfig("sklearn.metrics:silhouette_score", bounds=[-1.0, 1.0])
    assert_refused(lambda: build_metric(own, Split(x, y), queries=queries), ConfigError, "queries", "gallery")


def test_settings_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    parts = [f"data.train={tmp_path}", f"data.test={tmp_path}"]
    for more, names in (
        ("data.name=omniglot", ("data.train", "data.val", "data.test", "data.name=class_folders")),
        ("data.last_test=true", ("data.last_test=true", "data.root")),
        ("data.test_classes=[a]", ("data.test_classes",)),
        (f"data.root={tmp_path}", ()),
    ):
        with pytest.raises(ConfigError) as caught:
            splits_of(*parts, more)
        assert_named(caught, *names)


def test_the_metric_and_the_batches_are_the_same_from_disk(write: Write, tmp_path: Path) -> None:
    for folder, own in (("train", range(6)), ("query", range(6, 9)), ("gallery", range(6, 10))):
        write(f"set/{folder}", own)
    settings = [f"data.root={tmp_path / 'set'}", "data.validation_share=0.4", "data.image_size=8"]
    settings += ["shift.kind=image", "shift.contrast=0.6", "shift.noise_std=0.05", "shift.rotation_degrees=9"]
    memory, disk = (splits_of(*settings, f"data.stream={each}") for each in ("false", "true"))
    assert is_streamed(disk.test.x)
    assert is_streamed(disk.train.x)
    torch.manual_seed(0)
    model = build_model("conv4", disk.train.x.shape[1:], 4, 3).eval()
    for name in ("validation", "test"):
        both = [(getattr(each, name), queries_of(each, name)) for each in (memory, disk)]
        assert torch.equal(both[0][0].x, both[1][0].x[:])
        with torch.no_grad():
            first, second = (
                build_metric(MetricConfig(ks=[1]), part, queries=own).cost(model, "") for part, own in both
            )
        assert first == second
    for one, other in zip(
        *(ClassBatches(each.train.x, each.train.y, 2, 2)(0, 1, 2) for each in (memory, disk)), strict=True
    ):
        assert torch.equal(one, other)
