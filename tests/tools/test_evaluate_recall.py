"""tools/evaluate_recall.py on small files."""

import json
import subprocess
import sys
import warnings
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

pytest.importorskip("faiss")
pytest.importorskip("pytorch_metric_learning")

from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN

from helpers.programs import call
from helpers.refusals import assert_refused
from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.experiment.cli import run_and_report
from metricopt_ext.retrieval.build import built
from metricopt_ext.retrieval.config import RetrievalConfig
from metricopt_ext.retrieval.data import load_digits
from metricopt_ext.retrieval.experiment import RetrievalExperiment
from metricopt_ext.retrieval.intervals import interval
from metricopt_ext.retrieval.models import build_model
from metricopt_ext.retrieval.named_metric import build_metric
from metricopt_ext.retrieval.ranking import RANKED, ranking_metrics
from metricopt_ext.retrieval.recall import hits_at_k, recall_at_k
from metricopt_ext.retrieval.searched_runs import read_run
from metricopt_ext.retrieval.settings import retrieval_settings
from metricopt_ext.retrieval.splits import load_splits
from metricopt_ext.tasks.inference_file import save_inference
from metricopt_ext.tools import evaluate_recall
from metricopt_ext.utils.config import load_config
from metricopt_ext.utils.state_dict import load_checkpoint

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Queries q (40), galleries a (60) and b (30) of 3-d clusters, each as .npy files and as one .safetensors file."""
    rng = np.random.default_rng(0)
    for name, n in (("q", 40), ("a", 60), ("b", 30)):
        labels = rng.integers(6, size=n) + 2**24
        embeddings = (labels[:, None] % 6 + rng.standard_normal((n, 3)) * 2).astype(np.float32)
        np.save(tmp_path / f"{name}.npy", embeddings)
        np.save(tmp_path / f"{name}_labels.npy", labels)
        tensors = {"embeddings": torch.from_numpy(embeddings), "labels": torch.from_numpy(labels)}
        save_file(tensors, tmp_path / f"{name}.safetensors")
    return tmp_path


def evaluate(folder: Path, *arguments: str) -> Any:
    """Run the tool in this process, in the folder; returns its report."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        call(evaluate_recall, *arguments, "--output-dir", "out")
    return json.loads((folder / "out" / "report.json").read_text())


def items(folder: Path, name: str) -> tuple[Any, Any]:
    return np.load(folder / f"{name}.npy"), np.load(folder / f"{name}_labels.npy")


def as_json(recalls: dict[int, float]) -> dict[str, float]:
    return {str(k): value for k, value in recalls.items()}


QUERIES = ("--embeddings", "q.npy", "--labels", "q_labels.npy")
A_LABELS = ("--gallery-labels", "a_labels.npy")


def test_on_the_command_line(folder: Path) -> None:
    command = [sys.executable, TOOLS / "evaluate_recall.py", *QUERIES, "--ks", "1", "10", "100", "--output-dir", "out"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    expected = recall_at_k(*items(folder, "q"), (1, 10, 100))
    assert f"{expected.at[1]:.4f}" in result.stdout

    report = json.loads((folder / "out" / "report.json").read_text())
    (row,) = report["galleries"]
    assert row.pop("seconds") >= 0
    hits = hits_at_k(*items(folder, "q"), (1, 10, 100))[1].astype(float)
    intervals = {f"recall_at_{k}": interval(hits[:, i]) for i, k in enumerate((1, 10, 100))}
    intervals["mean"] = interval(hits.mean(axis=1))
    assert row.pop("intervals") == {name: pytest.approx([*ends]) for name, ends in intervals.items()}
    assert row == {
        "gallery": "the queries",
        "size": 40,
        "queries": 40,
        "without_match": 0,
        "recall": as_json(expected.at),
        "mean": expected.mean,
        "metrics": {},
        "doubles": expected.doubles,
        "copies": 0,
    }
    assert report["task"] == "retrieval/recall"
    assert report["config"]["ks"] == [1, 10, 100]
    assert report["config"]["embeddings"] == "q.npy"
    assert "pytorch-metric-learning" in report["versions"]


def test_several_galleries(folder: Path) -> None:
    galleries = [("--gallery-embeddings", f"{name}.npy", "--gallery-labels", f"{name}_labels.npy") for name in "ab"]
    report = evaluate(folder, *QUERIES, *galleries[0], *galleries[1], "--ks", "1", "3", "--distance", "ip")
    assert [row["gallery"] for row in report["galleries"]] == ["a.npy", "b.npy"]
    for row, name in zip(report["galleries"], "ab", strict=True):
        expected = recall_at_k(*items(folder, "q"), (1, 3), gallery=items(folder, name), distance="ip")
        assert row["recall"] == as_json(expected.at)
        assert row["size"] == expected.gallery
    assert report["config"]["gallery_labels"] == ["a_labels.npy", "b_labels.npy"]


def test_gallery_of_the_queries_is_searched_without_themselves(folder: Path) -> None:
    alone = evaluate(folder, *QUERIES, "--ks", "1")["galleries"][0]["recall"]
    same = str(folder / "q.npy")  # spelled in another way
    report = evaluate(folder, *QUERIES, "--gallery-embeddings", same, "--gallery-labels", "q_labels.npy", "--ks", "1")
    assert report["galleries"][0]["recall"] == alone
    assert alone["1"] < 1


def test_a_copy_of_the_queries_is_searched_without_themselves(folder: Path) -> None:
    alone = evaluate(folder, *QUERIES, "--ks", "1")["galleries"][0]["recall"]
    x, y = items(folder, "q")
    np.save(folder / "copy.npy", x.astype(np.float64))
    np.save(folder / "copy_labels.npy", y[:, None])
    gallery = ("--gallery-embeddings", "copy.npy", "--gallery-labels", "copy_labels.npy", "--ks", "1")
    assert evaluate(folder, *QUERIES, *gallery)["galleries"][0]["recall"] == alone
    np.save(folder / "copy.npy", x[::-1])
    np.save(folder / "copy_labels.npy", y[::-1])
    twice = (*gallery, *gallery[:4])
    assert [each["copies"] for each in evaluate(folder, *QUERIES, *twice)["galleries"]] == [40, 40]


def test_safetensors_hold_their_labels(folder: Path) -> None:
    plain = evaluate(folder, *QUERIES, "--gallery-embeddings", "a.npy", "--gallery-labels", "a_labels.npy")
    packed = evaluate(folder, "--embeddings", "q.safetensors", "--gallery-embeddings", "a.safetensors")
    assert packed["galleries"][0]["recall"] == plain["galleries"][0]["recall"]
    half = {"embeddings": torch.from_numpy(items(folder, "q")[0]).bfloat16()}
    save_file(half, folder / "half.safetensors")
    mixed = evaluate(folder, "--embeddings", "half.safetensors", "--labels", "q.safetensors", "--ks", "5")
    assert mixed["galleries"][0]["recall"] == as_json(recall_at_k(half["embeddings"], items(folder, "q")[1], (5,)).at)


def test_cosine_is_that_of_pytorch_metric_learning(folder: Path) -> None:
    x, y = items(folder, "q")
    base = AccuracyCalculator(("precision_at_1",), k=1, knn_func=CustomKNN(CosineSimilarity()))
    theirs = base.get_accuracy(x, y - 2**24)  # which it would take for one class
    found = evaluate(folder, *QUERIES, "--ks", "1", "--distance", "cosine")["galleries"][0]["recall"]["1"]
    assert found == pytest.approx(theirs["precision_at_1"])


def test_what_a_search_warns_of_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def warning(*arguments: Any, **options: Any) -> Any:
        warnings.warn("overflow encountered", RuntimeWarning, stacklevel=1)
        warnings.warn("of a package", DeprecationWarning, stacklevel=1)
        return recall_at_k(*arguments, **options)

    monkeypatch.setattr("metricopt_ext.retrieval.evaluation.recall_at_k", warning)
    evaluate(folder, *QUERIES, "--ks", "1")
    said = capsys.readouterr().out
    assert "overflow encountered" in said
    assert "of a package" not in said


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny run of the retrieval tool with two seeds, searching for digits of its own choice."""
    out = tmp_path_factory.mktemp("runs") / "run"
    settings = [
        *("finetune.steps=3", "method.evals=2", "method.rounds=1", "method.folds=2", "method.trials=0", "queries=16"),
        *("method.name=recipe", "methods=[]"),
        *("model.epochs=1", "model.width=4", "model.embedding=6", "adapter.dim=3"),
        *("workers=1", "seeds=2", "device=cpu", "data.test_classes=[2,5,7]"),
    ]
    config = load_config(RetrievalConfig, TOOLS.parent / "configs" / "retrieval" / "digits.yaml", settings)
    run_and_report(RetrievalExperiment, config, out, resume=False)
    return out


@pytest.mark.slow
def test_a_run_is_evaluated_on_its_test_classes(run: Path, folder: Path) -> None:
    report = evaluate(folder, "--run-dir", str(run), "--ks", "1", "2", "4")
    rows = {row["gallery"]: row for row in report["galleries"]}
    assert list(rows) == ["seed-0/model", "seed-0/tuned", "seed-1/model", "seed-1/tuned"]
    methods = json.loads((run / "report.json").read_text())["methods"]
    for seed in (0, 1):
        assert json.loads((run / f"seed-{seed}" / "classes.json").read_text())["test"] == ["2", "5", "7"]
        for name, method in (("model", "pretrained"), ("tuned", "metricopt")):
            assert rows[f"seed-{seed}/{name}"]["mean"] == pytest.approx(methods[method]["test"][seed], abs=1e-3)
    assert rows["seed-0/model"]["size"] == sum(int(label in (2, 5, 7)) for label in load_digits().y.tolist())
    other = evaluate(folder, "--run-dir", str(run), "--part", "validation", "--ks", "1", "2", "4")["galleries"]
    assert other[0]["mean"] == pytest.approx(methods["pretrained"]["validation"][0])


@pytest.mark.slow
def test_a_kept_augmentation_leaves_each_query_out(run: Path, tmp_path: Path) -> None:
    folder = copytree(run, tmp_path / "run")
    config, _ = read_run(folder)
    splits = load_splits(config, 0)
    metric = build_metric(config.metric, splits.test)
    settings = retrieval_settings(metric, whiten_on=splits.validation.x)
    save_inference(folder / "seed-0" / "inference.yaml", settings, {"augmentation": 4})
    found = evaluate(tmp_path, "--run-dir", "run", "--ks", *map(str, config.metric.ks))["galleries"][1]
    model = built(config.model, splits.test.x.shape[1:]).eval()
    load_checkpoint(model, folder / "seed-0" / "tuned.safetensors")
    with settings.applied({"augmentation": 4}):
        expected = metric.evaluate(model, "test").value
    assert found["mean"] == pytest.approx(expected, abs=1e-6)
    assert expected != pytest.approx(metric.evaluate(model, "test").value, abs=1e-3)
    with pytest.raises(SystemExit, match=r"seed-0/tuned .*leave --metrics out"):
        evaluate(tmp_path, "--run-dir", "run", "--metrics", "ndcg")


def test_other_folders_are_no_runs(run: Path, folder: Path) -> None:
    (folder / "begun").mkdir()
    (folder / "begun" / "run.json").write_text((run / "run.json").read_text())
    settings = json.loads((run / "run.json").read_text())
    classifier = {"format": settings["format"], **ClassificationConfig().as_dict()}
    for name, content in (("old", {**settings, "format": 1}), ("classifier", classifier)):
        (folder / name).mkdir()
        (folder / name / "run.json").write_text(json.dumps(content))
    for arguments, message in (
        ((str(run / "seed-0"),), "seed-0 has no run.json; name the whole output folder of tools/finetune_retrieval.py"),
        (("begun",), "begun has no seed-N/tuned.safetensors, which is written once a seed has finished"),
        (("old",), f"old/run.json is of another version of this library: its format is 1, not {settings['format']}"),
        (("classifier",), "classifier/run.json is not of a run of tools/finetune_retrieval.py: unknown key"),
        ((str(run), "--weights", "model.safetensors"), "--weights can't be used with --run-dir"),
    ):
        with pytest.raises(SystemExit) as stopped:
            evaluate(folder, "--run-dir", *arguments)
        assert message in str(stopped.value)


def write_images(folder: Path, classes: tuple[str, ...], seed: int) -> None:
    """Write 8 x 8 images of some classes, bright to a degree of the class's own."""
    rng = np.random.default_rng(seed)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for i in range(4):
            pixels = 40 * int(name[-1]) + rng.integers(60, size=(8, 8, 3))
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{i}.png")


@pytest.fixture
def embedder(folder: Path) -> Path:
    """Images of the classes c0..c3 and, as a gallery, c1..c4; a model's config and weights."""
    write_images(folder / "images", ("c0", "c1", "c2", "c3"), 0)
    write_images(folder / "gallery", ("c1", "c2", "c3", "c4"), 1)
    (folder / "model.yaml").write_text("data: {name: class_folders}\nmodel: {name: conv4, embedding: 4, width: 4}")
    torch.manual_seed(0)
    model = build_model("conv4", torch.Size([3, 8, 8]), 4, 4)
    save_file(model.state_dict(), folder / "model.safetensors")
    return folder


IMAGES = ("--images", "images", "--config-file", "model.yaml")
MODEL = (*IMAGES, "--weights", "model.safetensors", "--ks", "1", "2")


def test_a_model_and_folders_of_images(embedder: Path) -> None:
    both = ("--gallery-images", "gallery", "--gallery-images", "images")
    report = evaluate(embedder, *MODEL, *both)
    model = build_model("conv4", torch.Size([3, 8, 8]), 4, 4)
    model.load_state_dict(load_file(embedder / "model.safetensors"))
    parts = []
    for name in ("images", "gallery"):
        files = sorted((embedder / name).glob("*/*.png"))
        x = torch.stack([torch.from_numpy(np.array(Image.open(file))) for file in files]).movedim(-1, 1)
        with torch.no_grad():
            parts.append((model.eval()(x), [int(file.parent.name[1:]) for file in files]))
    for row, gallery in zip(report["galleries"], (parts[1], None), strict=True):
        assert row["recall"] == as_json(recall_at_k(*parts[0], (1, 2), gallery=gallery).at)
    assert report["galleries"][0]["without_match"] == 4  # c0 is not in the gallery


A = ("--gallery-embeddings", "a.npy", *A_LABELS)


def test_other_metrics_stand_beside_recall(folder: Path) -> None:
    options = ("--ks", "1", "3", "--distance", "cosine", "--query-subset", "30", "--seed", "5")
    (row,) = evaluate(folder, *QUERIES, *A, *options, "--metrics", *RANKED)["galleries"]
    drawn: Any = {"gallery": items(folder, "a"), "distance": "cosine", "query_subset": 30, "seed": 5}
    found = ranking_metrics(*items(folder, "q"), ["recall", *RANKED], (1, 3), **drawn)
    recalls = {f"recall_at_{k}": value for k, value in row["recall"].items()}
    assert recalls | row["metrics"] == found.values
    assert row["intervals"].pop("mean")[0] < row["mean"]
    assert row["intervals"] == {name: pytest.approx([*ends]) for name, ends in found.intervals.items()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--embeddings", "q.npy"), "labels; name their file with --labels"),
        (("--embeddings", "q.txt", "--labels", "q_labels.npy"), ".npy, .npz, .safetensors, .pt, .pth"),
        (("--embeddings", "short.npy", "--labels", "q_labels.npy"), "short.npy is not a .npy file of numbers"),
        (("--embeddings", "q.npy", "--labels", "a_labels.npy"), "must match in number, got 40 and 60"),
        ((*QUERIES, "--gallery-labels", "a_labels.npy"), "got 0 and 1 of them"),
        (
            (*QUERIES, "--gallery-embeddings", "q.npy", "--gallery-labels", "other.npy"),
            "queries' own file, but its labels are",
        ),
        ((*QUERIES, "--ks", "0"), "neighbours of at least 1, got [0]"),
        (("--images", "x", *A), "--gallery-embeddings and --gallery-labels can't"),
    ],
)
def test_bad_input_ends_with_one_line(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    (folder / "q.txt").write_text("1 2 3")
    np.save(folder / "other.npy", np.arange(40))
    (folder / "short.npy").write_bytes((folder / "q.npy").read_bytes()[:-40])
    with pytest.raises(SystemExit) as caught:
        evaluate(folder, *arguments)
    assert isinstance(caught.value.code, str)
    assert caught.value.code.startswith("error: ")
    assert message in caught.value.code
    assert "\n" not in caught.value.code
    assert not (folder / "out").exists()


@pytest.mark.parametrize("kind", ["npz", "pt", "parquet", "csv"])
def test_names_of_queries_and_galleries_are_one(folder: Path, kind: str) -> None:
    """The recall is that of numbers, whatever file the embeddings and the names are in."""
    for name in ("q", "a"):
        x, y = np.load(folder / f"{name}.npy"), np.load(folder / f"{name}_labels.npy")
        names = [f"id_{label}" for label in y.tolist()]
        if kind == "npz":
            np.savez(folder / f"{name}.npz", embeddings=x, labels=np.array(names))
        elif kind == "pt":
            torch.save({"embeddings": torch.from_numpy(x), "labels": names}, folder / f"{name}.pt")
        elif kind == "csv":
            rows = [[*(repr(float(each)) for each in row), own] for row, own in zip(x, names, strict=True)]
            header = [*(f"f{i}" for i in range(x.shape[1])), "labels"]
            (folder / f"{name}.csv").write_text("\n".join(map(",".join, [header, *rows])))
        else:
            arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
            parquet.write_table(arrow.table({"embeddings": list(x), "labels": names}), folder / f"{name}.parquet")
    found = evaluate(folder, "--embeddings", f"q.{kind}", "--gallery-embeddings", f"a.{kind}", "--ks", "1", "3")
    expected = evaluate(folder, *QUERIES, "--gallery-embeddings", "a.npy", *A_LABELS, "--ks", "1", "3")
    assert found["galleries"][0]["recall"] == expected["galleries"][0]["recall"]


def test_names_and_numbers_are_not_compared(folder: Path) -> None:
    np.save(folder / "names.npy", np.array([f"id_{i % 6}" for i in range(40)]))
    assert_refused(
        lambda: evaluate(folder, *QUERIES[:2], "--labels", "names.npy", "--gallery-embeddings", "a.npy", *A_LABELS),
        SystemExit,
        "a_labels.npy",
    )


PARTS = """
import torch
from sklearn.datasets import load_digits

def parts():
    digits, generator = load_digits(), torch.Generator().manual_seed(0)
    y = torch.tensor(digits.target)
    x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    x = (x + 0.15 * torch.randn(x.shape, generator=generator)).clamp(0, 1)
    of = lambda *classes: (x[torch.isin(y, torch.tensor(classes))], y[torch.isin(y, torch.tensor(classes))])
    images, labels = of(7, 8, 9)
    test = {"query": (images[:200], labels[:200]), "gallery": (images[200:], labels[200:])}
    return {"train": of(0, 1, 2, 3), "validation": of(4, 5, 6), "test": test}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    [
        ["shift.kind=image", "data.test_classes=[2,5,7]"],
        ["data.name=noisy:parts", "shift.kind=none"],
    ],
    ids=["digits", "queries and a gallery"],
)
def test_a_run_with_settings_has_one_number(data: list[str], tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(PARTS)
    small = ["model.epochs=4", "model.width=8", "model.embedding=16", "adapter.dim=3", "queries=24", "seeds=1"]
    own = [f"data.folder={tmp_path}", "data.last_test=false"] if "noisy" in data[0] else []
    settings = ["methods=[settings]", "workers=1", "device=cpu", "metric.ks=[1,2,4]", *small, *data, *own]
    config = load_config(RetrievalConfig, TOOLS.parent / "configs" / "retrieval" / "digits.yaml", settings)
    run_and_report(RetrievalExperiment, config, tmp_path / "run", resume=False)
    assert (tmp_path / "run" / "seed-0" / "inference.yaml").exists()  # a whitening was kept
    methods = json.loads((tmp_path / "run" / "report.json").read_text())["methods"]
    curves = json.loads((tmp_path / "run" / "seed-0" / "recalls.json").read_text())
    places = [curves["ks"].index(k) for k in (1, 2, 4)]
    for part in ("test", "validation"):
        rows = evaluate(tmp_path, "--run-dir", "run", "--part", part, "--ks", "1", "2", "4")["galleries"]
        for row, method in zip(rows, ("pretrained", "metricopt"), strict=True):
            assert row["mean"] == pytest.approx(methods[method][part][0], abs=1e-6)
            if part == "test":
                assert np.mean([curves[method][place] for place in places]) == pytest.approx(row["mean"], abs=1e-6)
    assert methods["metricopt"]["test"][0] != methods["pretrained"]["test"][0]
