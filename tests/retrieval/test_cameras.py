"""Market-1501's rule, compared with the evaluation written out: what a query's own camera shows of it is ignored."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from metricopt_ext.data.splits import PARTS
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.experiment.cli import run_and_report
from metricopt_ext.retrieval.build import built
from metricopt_ext.retrieval.cameras import (
    CAMERA,
    Seen,
    hits_across_cameras,
    nearest_across_cameras,
    recall_across_cameras,
)
from metricopt_ext.retrieval.config import RetrievalConfig
from metricopt_ext.retrieval.data import queries_of
from metricopt_ext.retrieval.experiment import RetrievalExperiment
from metricopt_ext.retrieval.kept_features import embed
from metricopt_ext.retrieval.named_metric import build_metric
from metricopt_ext.retrieval.splits import load_splits
from metricopt_ext.tools import evaluate_recall
from metricopt_ext.utils.config import load_config
from metricopt_ext.utils.state_dict import load_checkpoint


def drawn(n: int, seed: int, identities: int = 6, cameras: int = 3) -> Seen:
    rng = np.random.default_rng(seed)
    labels = torch.from_numpy(rng.integers(0, identities, n))
    x = torch.from_numpy(rng.normal(size=(n, 4)) + labels.numpy()[:, None] * 0.3)
    return Seen(x, labels, rng.integers(0, cameras, n))


def cumulative_matches(queries: Seen, gallery: Seen, k: int) -> dict[int, bool]:
    """The cumulative matching characteristic at k of each query, one after the other, as the set's paper has it."""
    found = {}
    for i in range(len(queries.labels)):
        order = (gallery.embeddings - queries.embeddings[i]).square().sum(1).argsort(stable=True).tolist()
        same = [j for j in order if gallery.labels[j] == queries.labels[i]]
        ignored = {j for j in same if gallery.cameras[j] == queries.cameras[i]}
        if set(same) - ignored:
            left = [j for j in order if j not in ignored]
            found[i] = any(gallery.labels[j] == queries.labels[i] for j in left[:k])
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("own", [False, True])
def test_hits_are_those_of_the_set_s_own_evaluation(seed: int, own: bool) -> None:
    gallery = drawn(60, seed)
    queries = gallery if own else drawn(25, seed + 100, identities=8)  # of which two are not in the gallery
    rows, hits = hits_across_cameras(queries, gallery, (1, 3, 10))
    for column, k in enumerate((1, 3, 10)):
        expected = cumulative_matches(queries, gallery, k)
        assert dict(zip(rows.tolist(), hits[:, column].tolist(), strict=True)) == expected
    mean = np.mean([np.mean([*cumulative_matches(queries, gallery, k).values()]) for k in (1, 3, 10)])
    assert recall_across_cameras(queries, gallery, (1, 3, 10)) == pytest.approx(mean)


def test_neighbours_leave_out_what_is_ignored_and_end_where_nothing_is_left() -> None:
    x = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    gallery = Seen(x, torch.tensor([7, 7, 8, 7]), np.array([1, 2, 1, 1]))
    queries = Seen(x[:1], torch.tensor([7]), np.array([1]))
    assert nearest_across_cameras(queries, gallery, 1).tolist() == [[1]]
    assert nearest_across_cameras(queries, gallery, 4).tolist() == [[1, 2, -1, -1]]
    with pytest.raises(DataError, match=r"no query's.*shown by another camera"):
        hits_across_cameras(queries, gallery.take(torch.tensor([0, 2, 3])), (1,))


def test_a_subset_of_queries_is_one_of_those_that_can_be_hits() -> None:
    gallery, queries = drawn(60, 0), drawn(25, 100, identities=8)
    rows, hits = hits_across_cameras(queries, gallery, (1,))
    some, those = hits_across_cameras(queries, gallery, (1,), query_subset=5)
    assert len(some) == 5
    places = [rows.tolist().index(row) for row in some]
    assert hits[places].tolist() == those.tolist()


def market(root: Path, identities: int = 12) -> Path:
    """Write so many identities by three cameras, half for training, with two junk images and two distractors."""

    def picture(folder: str, identity: int, camera: int, frame: int) -> None:
        (root / folder).mkdir(parents=True, exist_ok=True)
        grey = 10 * max(identity, 0) + camera
        name = f"{identity:04d}" if identity >= 0 else "-1"
        pixels = np.random.default_rng(1000 * identity + 10 * camera + frame + 1000).integers(0, 60, (8, 8, 3)) + grey
        Image.fromarray(pixels.astype(np.uint8)).save(root / folder / f"{name}_c{camera}s1_{frame:06d}_01.png")

    for identity in range(1, identities + 1):
        for camera in (1, 2, 3):
            for frame in range(2):
                picture(
                    "bounding_box_train" if identity <= identities // 2 else "bounding_box_test",
                    identity,
                    camera,
                    frame,
                )
            if identity > identities // 2 and camera < 3:
                picture("query", identity, camera, 7)
    for camera in (1, 2):
        picture("bounding_box_test", -1, camera, 50)
        picture("bounding_box_test", 0, camera, 60)
    (root / "bounding_box_test" / "Thumbs.db").write_bytes(b"x")
    (root / "gt_bbox").mkdir()
    return root


def config_of(root: Path, *more: str) -> RetrievalConfig:
    settings = [
        *(
            "data.name=market1501",
            f"data.root={root}",
            "data.validation_share=0.5",
            "model.name=conv4",
            "model.width=4",
        ),
        *("model.embedding=4", "model.epochs=1", "loss.classes=2", "loss.samples=2", "adapter.dim=2", "queries=14"),
        *("finetune.steps=2", "best_evals=2", "seeds=1", "metric.ks=[1,2]", "device=cpu", "starts=[loss_finetune]"),
        "pictures=false",
    ]
    config = load_config(RetrievalConfig, None, [*settings, *more])
    config.check()
    return config


def test_market_s_folders_are_queries_a_gallery_and_train(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"bounding_box_test: 2.*-1\) left out"):
        splits = load_splits(config_of(market(tmp_path / "Market-1501" / "inner").parent), 0)
    assert splits.classes_of("test") == ["0000", *(f"{i:04d}" for i in range(7, 13))]
    queries = queries_of(splits)
    assert queries is not None
    assert (int(queries.sum()), int((~queries).sum())) == (12, 6 * 6 + 2)
    assert {*splits.classes_of("train"), *splits.classes_of("validation")} == {f"{i:04d}" for i in range(1, 7)}
    for name in PARTS:
        part = getattr(splits, name)
        assert len(part.columns[CAMERA]) == len(part) > 0
        greys = part.x.amin((1, 2, 3)).tolist()
        for grey, label, camera in zip(greys, part.y.tolist(), part.columns[CAMERA].tolist(), strict=True):
            identity = int(splits.class_names[label])
            assert 10 * identity + camera <= grey < 10 * identity + camera + 10
    assert splits.reading is not None
    assert "12 test queries search 38 gallery images" in splits.reading.found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*junk")
def test_the_report_s_recall_is_by_the_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(market(tmp_path / "set"))
    run_and_report(RetrievalExperiment, config, tmp_path / "run", False)
    splits = load_splits(config, 0)
    model = built(config.model, splits.test.x.shape[1:])
    load_checkpoint(model, tmp_path / "run" / "seed-0" / "tuned.safetensors")
    with torch.no_grad():
        embeddings = embed(model.eval(), splits.test.x)
    seen = Seen(embeddings, splits.test.y, splits.test.columns[CAMERA])
    expected = [np.mean([*cumulative_matches(*seen.parted(queries_of(splits)), k).values()]) for k in (1, 2)]
    recalls = json.loads((tmp_path / "run" / "seed-0" / "recalls.json").read_text())
    assert recalls["metricopt"][:2] == pytest.approx(expected)
    metric = build_metric(config.metric, splits.test, queries=queries_of(splits))
    assert metric.to_value(metric.cost(model, "test")) == pytest.approx(np.mean(expected))
    validation = splits.validation
    with torch.no_grad():
        all_others = Seen(embed(model, validation.x), validation.y, validation.columns[CAMERA])
    told = build_metric(config.metric, validation)
    by_hand = np.mean([np.mean([*cumulative_matches(all_others, all_others, k).values()]) for k in (1, 2)])
    assert told.to_value(told.cost(model, "validation")) == pytest.approx(by_hand)

    out = tmp_path / "out"
    arguments = ["--run-dir", str(tmp_path / "run"), "--ks", "1", "2", "--output-dir", str(out)]
    monkeypatch.setattr("sys.argv", ["evaluate_recall.py", *arguments])
    evaluate_recall.main()
    rows = json.loads((out / "report.json").read_text())["galleries"]
    assert rows[1]["gallery"] == "seed-0/tuned"
    assert list(rows[1]["recall"].values()) == pytest.approx(expected)
    assert "mean_average_precision" in rows[1]["metrics"]


@pytest.mark.filterwarnings("ignore:.*junk")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda root: (root / "query" / "person.png").write_bytes(b""),
            r".* got 'person.png'",
        ),
        (
            lambda root: (root / "query").rename(root / "probe"),
            r"must hold.*query, bounding_box_test",
        ),
        (
            lambda root: (root / "query" / "0007_c1s1_000007_01.png").rename(root / "query" / "0000_c1s1_1.png"),
            "is of identity 0, a distractor",
        ),
        (
            lambda root: (root / "query" / "0007_c1s1_000007_01.png").rename(root / "query" / "0001_c1s1_1.png"),
            "class '0001' is in train and in test",
        ),
    ],
)
def test_other_folders_and_names_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    root = market(tmp_path / "set")
    change(root)
    with pytest.raises(DataError, match=message):
        load_splits(config_of(root), 0)


def test_what_does_not_know_the_rule_is_refused(tmp_path: Path) -> None:
    root = market(tmp_path / "set")
    with pytest.raises(DataError, match=re.escape("say who is shown; set data.name=market1501")):
        load_splits(config_of(root, "data.name=class_folders"), 0)
    with pytest.warns(UserWarning, match="junk"):
        splits = load_splits(config_of(root), 0)
    metric = config_of(root, "metric.name=sklearn.metrics:silhouette_score").metric
    message = (
        r"silhouette_score can't ignore what a query's own camera shows .* take recall, mean_average_precision_at_r"
    )
    with pytest.raises(ConfigError, match=message):
        build_metric(metric, splits.validation)


@pytest.mark.filterwarnings("ignore:.*junk")
def test_mean_average_precision_is_by_the_rule(tmp_path: Path) -> None:
    config = config_of(market(tmp_path / "set"), "metric.name=mean_average_precision")
    splits = load_splits(config, 0)
    queries, model = queries_of(splits), torch.nn.Flatten()
    found = build_metric(config.metric, splits.test, queries=queries)
    own, gallery = Seen(embed(model, splits.test.x), splits.test.y, splits.test.columns[CAMERA]).parted(queries)
    averages = []
    for i in range(len(own.labels)):
        same, elsewhere = gallery.labels == own.labels[i], torch.from_numpy(gallery.cameras != own.cameras[i])
        order = (gallery.embeddings.double() - own.embeddings[i]).square().sum(1).argsort(stable=True)
        right = same[order[~(same & ~elsewhere)[order]]].numpy()
        if right.any():
            averages.append((right.cumsum() / np.arange(1, len(right) + 1))[right].mean())
    assert found.to_value(found.cost(model, "test")) == pytest.approx(np.mean(averages), abs=1e-12)
