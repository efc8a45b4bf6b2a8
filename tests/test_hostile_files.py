"""Whatever a file holds, a loader returns or raises one of our errors, and takes no more memory than is stated."""

import gzip
import importlib.util
import json
import math
import os
import struct
import subprocess
import sys
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from metricopt_ext.adapters.attach import attach_film, attach_outputs, load_adapter
from metricopt_ext.adapters.skeleton import attach_checkpoint, chosen, moved_tensors
from metricopt_ext.adapters.start import Start
from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.classification.labelled_images import read_labels
from metricopt_ext.classification.libsvm import load_libsvm
from metricopt_ext.classification.tables import load_csv
from metricopt_ext.comparison import comparison, comparison_content, comparison_report
from metricopt_ext.comparison.joined import joined
from metricopt_ext.data.arrays import read_array
from metricopt_ext.data.decoding import MAX_PIXELS
from metricopt_ext.data.images import Limits, load_image_folder
from metricopt_ext.data.parquet import parquet_cells
from metricopt_ext.data.training_state import TrainingState
from metricopt_ext.detection.coco import read_coco, read_detections
from metricopt_ext.detection.records import Annotated
from metricopt_ext.detection.voc import read_voc
from metricopt_ext.detection.yolo import read_yolo, read_yolo_file
from metricopt_ext.errors import DataError, MetricOptError
from metricopt_ext.experiment.record import Outcome, SeedRecord
from metricopt_ext.retrieval.data import load_stanford_online_products
from metricopt_ext.runtime.identity import claim
from metricopt_ext.search.update_rule import UpdateRule, load_update_rule
from metricopt_ext.siblings.ala.loss_policy import LossPolicy, load_loss_policy
from metricopt_ext.siblings.kept import NUMBERS, load_trained
from metricopt_ext.siblings.reloss.relational_loss import RelationalLoss, load_relational_loss
from metricopt_ext.siblings.sl.set_loss import SetLoss, load_set_loss
from metricopt_ext.siblings.training import TrainingTask
from metricopt_ext.siblings.unfinished import Unfinished
from metricopt_ext.tasks import kept_evaluations
from metricopt_ext.tasks.batch_metric import BatchMetric
from metricopt_ext.tasks.cached_metric import CachedMetric
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.trajectory import Trajectory, TrajectoryStore, load_trajectories
from metricopt_ext.utils import files
from metricopt_ext.utils.checkpoint_file import read_checkpoint
from metricopt_ext.utils.config import load_config
from metricopt_ext.utils.files import save_checkpoint, write_json
from metricopt_ext.utils.machine import Machine
from metricopt_ext.utils.state_dict import load_checkpoint
from metricopt_ext.value.gp import GPValueFunction
from metricopt_ext.value.loading import load_value_function
from metricopt_ext.value.value_function import NeuralValueFunction, Quality, RidgeValueFunction

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = int(os.environ.get("METRICOPT_EXAMPLES", 40))  # mutations of each kind of file
ALLOWED = 400  # MiB that a loader may take for the small files of these tests; the attacks below took up to 15 GB


def script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"hostile_{Path(path).stem}", ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks its module up
    spec.loader.exec_module(module)
    return module


tabulate_runs = script("benchmarks/tabulate_runs.py")


def status(key: str) -> int:
    """Return a size of this process in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) // 1024


@contextmanager
def little_memory(allowed: int = ALLOWED) -> Iterator[None]:
    """Check the peak of what is resident meanwhile, where the system tells it."""
    if not Path("/proc/self/clear_refs").exists():
        yield
        return
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = status("VmRSS")
    yield
    assert status("VmHWM") - before < allowed


def model() -> nn.Module:
    torch.manual_seed(0)  # an adapter's file is for the same weights
    return nn.Sequential(nn.Linear(4, 512), nn.BatchNorm1d(512), nn.Linear(512, 3))


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, rows: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


SMALL = png(4, 4, bytes(20))


def picture(kind: str) -> bytes:
    encoded = BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (4, 4, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(encoded, format=kind)
    return encoded.getvalue()


@pytest.fixture(autouse=True)
def right_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let checksums fit whatever a file holds: who makes a hostile one makes them fit."""
    monkeypatch.setattr(files, "_checksum", lambda *_: "right")
    monkeypatch.setattr(kept_evaluations, "_checksum", lambda *_: "right")


def described(path: Path) -> tuple[dict[str, torch.Tensor], str, Any]:
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    return tensors, metadata["format"], json.loads(metadata["described"])


def rewrite(path: Path, tensors: dict[str, torch.Tensor], kind: str, content: Any) -> None:
    metadata = {"format": kind, "described": json.dumps(content), "checksum": "right"}
    path.write_bytes(safetensors.torch.save(tensors, metadata=metadata))


def edited(path: Path, content: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """Change entries of a file's description, and some of its tensors."""
    theirs, kind, old = described(path)
    new = {
        **old,
        **{key: {**old[key], **v} if isinstance(v, dict) and old.get(key) else v for key, v in content.items()},
    }
    rewrite(path, {**theirs, **(tensors or {})}, kind, new)
    return path


# ----- each loader with a small file that it reads


@dataclass
class Loader:
    """How a loader is tried.

    Attributes:
        write: Writes a folder's files; returns the one that is mutated.
        read: Reads that file.
    """

    write: Callable[[Path], Path]
    read: Callable[[Path], Any]


def saved(make: Callable[[], Any]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / "file.safetensors"
        make().save(path)
        return path

    return write


def text(name: str, content: str | bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def parsed(name: str, content: Any) -> Callable[[Path], Path]:
    return text(name, json.dumps(content))


def gp() -> GPValueFunction:
    phi = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    return GPValueFunction.conditioned(phi, phi.sum(1), torch.eye(2), 0.1)


def ridge() -> RidgeValueFunction:
    f = RidgeValueFunction(4, 2)
    f.quality = Quality(0.5, 0.1, 0.2, 10, 5)
    f.signature = attach_film(model(), dim=4).signature
    return f


def trajectory() -> Trajectory:
    phi, signature = torch.zeros(3, 2), attach_film(model(), "1", dim=2).signature
    observed = torch.tensor([0, 2])
    return Trajectory(0, 0, phi, torch.zeros(2), observed, torch.zeros(2).double(), None, signature)


def write_trajectory(folder: Path) -> Path:
    TrajectoryStore(folder).add(trajectory())
    return next(folder.glob("round-*"))


def checkpoint(suffix: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path, state = folder / f"model{suffix}", nn.Linear(2, 2).state_dict()
        save_checkpoint(path, state) if suffix == ".safetensors" else torch.save(state, path)
        return path

    return write


def with_norms(suffix: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path, state = folder / f"model{suffix}", nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)).state_dict()
        save_checkpoint(path, state) if suffix == ".safetensors" else torch.save({"model": state}, path)
        return path

    return write


def write_moved(path: Path) -> None:
    """Read a checkpoint, and write it again with moved norms."""
    file = read_checkpoint(path)
    moved = chosen(file)
    adapter = attach_checkpoint(file, moved, dim=2)
    file.write(path.with_stem("moved"), moved_tensors(adapter, torch.ones(2), file, moved))


def write_kept(folder: Path) -> Path:
    save_checkpoint(folder / "x_model.safetensors", nn.Linear(2, 2).state_dict())
    numbers = {"trained": "phi", "queries": {"a": 1}, "batch_queries": {}, "seconds": 1.0, "history": {"a": [[0, 0.5]]}}
    assert sorted(numbers) == sorted(NUMBERS)
    return parsed("x.json", numbers)(folder)


def seed_record() -> SeedRecord:
    quality = Quality(0.5, 0.1, 0.2, 10, 5)
    outcomes = {name: [Outcome(0.5, 0.5, 20, 1, 1.0)] for name in ("pretrained", "metricopt")}
    machine = Machine("a", "b", 1, "cpu")
    return SeedRecord(
        seed=0, outcomes=outcomes, quality=quality, candidates={"gp": quality}, kept="start", setting=None,
        split_half=0.5, chance=0.1, guard="halves", curves={"a": [0.5]}, true=[0.1], predicted=[0.2], machine=machine,
    )  # fmt: skip


def write_record(folder: Path) -> Path:
    seed_record().save(folder / "record.json")
    return folder / "record.json"


COCO = {
    "images": [{"id": 1, "file_name": "i.png", "width": 4, "height": 4}],
    "annotations": [{"image_id": 1, "category_id": 1, "bbox": [0, 0, 1, 1], "iscrowd": 0}],
    "categories": [{"id": 1, "name": "a"}],
}
FOUND = [{"image_id": 1, "category_id": 1, "bbox": [0, 0, 1, 1], "score": 0.5}]
OBJECT = "<object><name>a</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax></bndbox></object>"
XML = f"<annotation><size><width>4</width><height>4</height></size>{OBJECT}</annotation>"


def write_coco(folder: Path) -> Path:
    (folder / "i.png").write_bytes(SMALL)
    return parsed("coco.json", COCO)(folder)


def write_found(folder: Path) -> Path:
    parsed("coco.json", COCO)(folder)
    return parsed("found.json", FOUND)(folder)


LARGE_MASK = {"size": [100_000, 100_000], "counts": [10**10]}
MASK = {"size": [4, 4], "counts": "02;1"}  # runs of 0, 2, 11 and 3 pixels
POLYGONS = [[0, 0, 3, 0, 3, 3], [1, 1, 2, 2, 1, 3]]
SHAPES = COCO | {
    "annotations": [
        {**COCO["annotations"][0], "area": 2, "segmentation": shape, "keypoints": [1, 2, 2] * 17, "num_keypoints": 17}
        for shape in (MASK, POLYGONS, {"size": [4, 4], "counts": [2, 5, 9]})
    ]
}


def write_masks(folder: Path) -> Path:
    parsed("coco.json", COCO)(folder)
    return parsed("found.json", [{**FOUND[0], "bbox": [], "segmentation": each} for each in (MASK, POLYGONS)])(folder)


def write_voc(folder: Path) -> Path:
    text("JPEGImages/i.png", SMALL)(folder)
    text("ImageSets/Main/all.txt", "i\n")(folder)
    return text("Annotations/i.xml", XML)(folder)


def write_voc_zip(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "voc.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("Annotations/i.xml", XML)
        archive.writestr("JPEGImages/i.png", SMALL)
    return folder / "voc.zip"


def read_voc_zip(path: Path) -> None:
    for image in read_voc(path).images:
        image.load()


def annotated(path: Path) -> Annotated:
    none = torch.zeros(0)
    return Annotated("0", path, 4, 4, none.reshape(-1, 4), none.long(), none.bool(), none.bool())


def write_zip(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "images.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("a/0.png", "a/1.png", "b/0.png"):
            archive.writestr(name, SMALL)
    return folder / "images.zip"


def write_npy(folder: Path) -> Path:
    np.save(folder / "x.npy", np.zeros((3, 2), np.float32))
    return folder / "x.npy"


XY: dict[str, Any] = {"embeddings": np.zeros((3, 2), np.float32), "labels": np.array(["a", "bc", "a"])}


def write_npz(folder: Path) -> Path:
    np.savez_compressed(folder / "x.npz", **XY)
    return folder / "x.npz"


def write_pt(folder: Path) -> Path:
    torch.save({"embeddings": torch.zeros(3, 2), "labels": ["a", "bc", "a"]}, folder / "x.pt")
    return folder / "x.pt"


def write_h5(folder: Path) -> Path:
    h5py = pytest.importorskip("h5py")
    with h5py.File(folder / "x.h5", "w") as file:
        file["embeddings"], file["labels"] = XY["embeddings"], XY["labels"].tolist()
    return folder / "x.h5"


def write_parquet(folder: Path) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    content = {"embeddings": [[0.0, 1.0]] * 3, "labels": ["a", "bc", "a"], "y": [1, 2, 1]}
    parquet.write_table(arrow.table(content), folder / "x.parquet")
    return folder / "x.parquet"


def write_table(folder: Path) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"a": [0.5, 1.0], "b": ["a", None], "y": [1, 2]}), folder / "x.parquet")
    return folder / "x.parquet"


def read_both(path: Path) -> None:
    for name in ("embeddings", "labels"):
        read_array(path, name)


def write_yolo(folder: Path) -> Path:
    text("images/a.png", SMALL)(folder)
    return text("labels/a.txt", "0 0.5 0.5 0.5 0.25\n1 0.1 0.1 0.2 0.1 0.2 0.9\n")(folder)


LIMITS = Limits(max_bytes=10**8, max_pixels=10**6)
LABELS = {
    "images": [{"id": 1, "file_name": "a.png"}, {"id": 2, "file_name": "b.png"}],
    "annotations": [{"image_id": 1, "category_id": 3}, {"image_id": 2, "category_id": 4}],
    "categories": [{"id": 3, "name": "cat"}, {"id": 4, "name": "dog"}],
}


def with_images(name: str, content: str) -> Callable[[Path], Path]:
    """Return what writes a file of labels beside the two images that it names."""

    def write(folder: Path) -> Path:
        for image in "ab":
            text(f"{image}.png", SMALL)(folder)
        return text(name, content)(folder)

    return write


def write_list(folder: Path) -> Path:
    for part, name in (("test", "a/y.png"), ("train", "a/x.png")):
        text(name, SMALL)(folder)
        path = text(f"Ebay_{part}.txt", f"image_id class_id super_class_id path\n1 1 1 {name}\n")(folder)
    return path


def write_training(folder: Path) -> Path:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = TrainingState(net, optimizer, 2, {"seed": 0})
    state.losses.append(0.5)
    state._save(folder / "training.safetensors")
    return folder / "training.safetensors"


def read_training(path: Path) -> None:
    net = nn.Linear(2, 2)
    TrainingState(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), 2, {"seed": 0}, path)


def sibling_task() -> TrainingTask:
    torch.manual_seed(0)
    return TrainingTask(
        nn.Linear(2, 2),
        trains="model",
        batches=lambda *_: None,
        predict=lambda net, batch: (torch.zeros(2), torch.zeros(2)),
        batch_metric=BatchMetric(lambda scores, labels: 0.5, maximize=False),
        metric=Metric(lambda net: 0.5, maximize=False),
        loss=lambda net, batch: torch.zeros(()),
    )


def write_sibling_training(folder: Path) -> Path:
    left = Unfinished(sibling_task(), {"seed": 0}, folder / "training.safetensors")
    left._kept = -math.inf
    left.keep("stage", 2, {"loss": [(0, 0.5), (1, 0.25)]}, surrogate=SetLoss())
    return folder / "training.safetensors"


def read_sibling_training(path: Path) -> tuple[int, Any]:
    return Unfinished(sibling_task(), {"seed": 0}, path).go_on("stage", surrogate=SetLoss())


ASKED = {"id": 1, "phi": [0.5, -0.25], "replaced": ""}
TOLD = {"id": 0, "cost": 0.5, "halves": [0.4, 0.6], "noise": 0.1, "failed": False, "given_up": False, "asked": 2}
FAILED = TOLD | {"id": 2, "cost": None, "halves": None, "noise": None, "failed": True}


def evaluations(path: Path) -> CachedMetric:
    return CachedMetric(Metric(lambda net: 0.5, maximize=True, bounds=(0, 1), name="m"), path)


COLUMN = {"validation": [0.5], "test": [0.5]}
CELL = {**COLUMN, "queries": [5], "seconds": [0.5], "passes": [None]}
COMPARISON = {
    "task": "classification/toy",
    "title": "net on toy",
    "metric": {"name": "accuracy", "maximize": True},
    "budgets": [5],
    "seeds": [700],
    "starts": {"pretrained": COLUMN},
    "best_start": {**CELL, "queries": 2, "chosen": ["pretrained"]},
    "methods": {"metricopt": {"least": 3, "cells": {"5": CELL}, "errors": {}}},
    "guards": [{"seed": 700, "method": "ours", "budget": 5, "accepted": True, "change": 0.1, "error": None}],
    "machines": ["A processor"],
    "versions": {"torch": "2.6"},
    "config": {"task": "classification", "config": "a.yaml", "overrides": []},
}
REPORT = {
    "task": "a",
    "metric": {"name": "m", "maximize": True},
    "seeds": [0],
    "methods": {"metricopt": {"test": [0.5], "queries_total": 5, "batch_queries": 0, "seconds": 1.0}},
}


def read_comparison(path: Path) -> None:
    """Read a comparison, and make of it what tools make."""
    content = comparison_content.load(path)
    with files.content_of(path, "comparison"):
        whole = comparison_content.paired(joined([content], ["a"]))
        comparison_report.markdown(whole)


CONFIG = (
    "seed: 3\ndata: &d {name: digits}\nmodel: {name: tabular_mlp}\nmetric: {name: scorer:f1, kwargs: {a: [1, 2]}}\n"
)
LOADERS: dict[str, Loader] = {
    "adapter": Loader(saved(lambda: attach_film(model(), dim=4)), lambda path: load_adapter(model(), path)),
    "start": Loader(saved(lambda: started()), lambda path: load_adapter(model(), path)),
    "outputs": Loader(saved(lambda: attach_outputs(model())), lambda path: load_adapter(model(), path)),
    "attached": Loader(saved(lambda: attach_film(model(), dim=4)), lambda path: attach_film(model(), dim=4).load(path)),
    "ridge": Loader(saved(ridge), load_value_function),
    "neural": Loader(saved(lambda: NeuralValueFunction(2, 2)), load_value_function),
    "gp": Loader(saved(gp), load_value_function),
    "update rule": Loader(saved(lambda: UpdateRule(dim=2, hidden=3)), load_update_rule),
    "loss policy": Loader(saved(lambda: LossPolicy("a", 2)), load_loss_policy),
    "relational loss": Loader(saved(RelationalLoss), load_relational_loss),
    "set loss": Loader(saved(lambda: SetLoss(2)), load_set_loss),
    "trajectories": Loader(write_trajectory, lambda path: load_trajectories(path.parent)),
    "training": Loader(write_training, read_training),
    "sibling_training": Loader(write_sibling_training, read_sibling_training),
    "checkpoint": Loader(checkpoint(".safetensors"), lambda path: load_checkpoint(nn.Linear(2, 2), path)),
    "torch checkpoint": Loader(checkpoint(".pt"), lambda path: load_checkpoint(nn.Linear(2, 2), path)),
    "checkpoint to tune": Loader(with_norms(".safetensors"), write_moved),
    "torch checkpoint to tune": Loader(with_norms(".pt"), write_moved),
    "evaluations": Loader(
        parsed("e.json", {"checksum": "right", "open": [ASKED], "evaluations": [ASKED | TOLD, ASKED | FAILED]}),
        evaluations,
    ),
    "identity": Loader(parsed("run.json", {"seed": 1}), lambda path: claim(path, {"seed": 1})),
    "record": Loader(write_record, SeedRecord.load),
    "sibling": Loader(write_kept, lambda path: load_trained(nn.Linear(2, 2), path.parent, "x")),
    "row": Loader(
        parsed(
            "r.json", {"seed": 0, "method": "a", "cells": {}, "errors": {}, "least": 1, "budgets": [9], "machine": "m"}
        ),
        lambda path: comparison.finished(path, [20]),
    ),
    "comparison": Loader(parsed("comparison.json", COMPARISON), read_comparison),
    "report": Loader(
        parsed("report.json", REPORT),
        lambda path: tabulate_runs.tabulate([path.parent]),
    ),
    "coco": Loader(write_coco, lambda path: read_coco(path, path.parent)),
    "detections": Loader(write_found, lambda path: read_detections(path, read_coco(path.parent / "coco.json"))),
    **{
        f"coco's {kind}": Loader(parsed("coco.json", SHAPES), lambda path, kind=kind: read_coco(path, kind=kind))
        for kind in ("segm", "keypoints")
    },
    "detected masks": Loader(
        write_masks, lambda path: read_detections(path, read_coco(path.parent / "coco.json"), kind="segm")
    ),
    "voc": Loader(write_voc, lambda path: read_voc(path.parents[1], "all")),
    "voc zip": Loader(write_voc_zip, read_voc_zip),
    "image": Loader(text("i.png", SMALL), lambda path: annotated(path).load()),
    "image zip": Loader(write_zip, load_image_folder),
    **{
        kind: Loader(text(f"a/x.{kind}", picture(kind)), lambda path: load_image_folder(path.parents[1]))
        for kind in ("bmp", "gif", "jpeg", "png", "ppm", "tiff", "webp")
    },
    "libsvm": Loader(text("x.txt", "1 1:0.5 3:2\n-1 2:1\n"), load_libsvm),
    "libsvm gz": Loader(text("x.gz", gzip.compress(b"1 1:0.5 3:2\n-1 2:1\n", mtime=0)), load_libsvm),
    "csv": Loader(text("x.csv", "a,b,y\n1,x,0\n2,z,1\n"), lambda path: load_csv(path, "y")),
    "labels": Loader(
        with_images("_classes.csv", "filename, cat, dog\na.png, 1, 0\nb.png, 0, 1\n"),
        lambda path: read_labels(path, LIMITS),
    ),
    "lists of labels": Loader(
        with_images("tags.csv", "image_name,tags\na,cat dog\nb,dog\n"), lambda path: read_labels(path, LIMITS)
    ),
    "coco's labels": Loader(with_images("x.json", json.dumps(LABELS)), lambda path: read_labels(path, LIMITS)),
    "csv of embeddings": Loader(text("x.csv", "f0,f1,label\n0.5,1,cat\n2,-3e1,dog\n"), read_both),
    "npz": Loader(write_npz, read_both),
    "pt": Loader(write_pt, read_both),
    "h5": Loader(write_h5, read_both),
    "parquet": Loader(write_parquet, read_both),
    "parquet table": Loader(write_table, lambda path: parquet_cells(path, 10**6)),
    "yolo": Loader(write_yolo, lambda path: read_yolo(path.parents[1] / "images", ("cat", "dog"))),
    "data.yaml": Loader(text("data.yaml", "train: a\nval: [b, c]\nnc: 2\nnames: {0: cat, 1: dog}\n"), read_yolo_file),
    "npy": Loader(write_npy, lambda path: read_array(path, "embeddings")),
    "embeddings": Loader(checkpoint(".safetensors"), lambda path: read_array(path, "weight")),
    "products": Loader(write_list, lambda path: load_stanford_online_products(path.parent, 4)),
    "config": Loader(text("c.yaml", CONFIG), lambda path: load_config(ClassificationConfig, path)),
}


# ----- mutations

VALUES = st.sampled_from(
    [0, -1, 1, 2**31, 10**9, 2**63, 10**30, 10**400, 0.5, -0.5, 1e308, float("nan"), float("inf"), True, None, "", "x",
     "\0", "x" * 300, [], {}, [None], [[1]], {"x": 1}, [0] * 300, json.loads("[" * 60 + "]" * 60)]
)  # fmt: skip


def places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the way to each value in parsed JSON."""
    items: Any = (
        content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    )
    return [path, *(place for key, value in items for place in places(value, (*path, key)))]


def replaced(content: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    copied = content.copy()
    copied[place[0]] = replaced(content[place[0]], place[1:], value)
    return copied


def mutate(data: st.DataObject, path: Path) -> None:
    """Change a file: a value in its JSON or its description, or any of its bytes."""
    content = path.read_bytes()
    has_json = path.suffix == ".json" or b'"described"' in content[:3000]
    if has_json and data.draw(st.booleans()):
        tensors, kind, tree = (None, "", json.loads(content)) if path.suffix == ".json" else described(path)
        place = data.draw(st.sampled_from(places(tree)))
        tree = replaced(tree, place, data.draw(VALUES))
        if tensors is None:
            path.write_text(json.dumps(tree))
        else:
            rewrite(path, tensors, kind, tree)
        return
    at = data.draw(st.integers(0, len(content) - 1))
    how = data.draw(st.sampled_from(["flip", "flip", "cut", "insert", "repeat"]))
    if how == "flip":
        changed = bytearray(content)
        for offset, byte in data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 255)), min_size=1)):
            changed[(at + offset) % len(changed)] = byte
        content = bytes(changed)
    elif how == "cut":
        content = content[:at]
    elif how == "insert":
        content = content[:at] + data.draw(st.binary(min_size=1, max_size=20)) + content[at:]
    else:
        content = content[:at] + content[at : at + 10] * data.draw(st.sampled_from([2, 100, 10_000])) + content[at:]
    path.write_bytes(content)


@pytest.mark.parametrize("name", LOADERS)
def test_the_files_that_are_mutated_can_be_read(name: str, tmp_path: Path) -> None:
    LOADERS[name].read(LOADERS[name].write(tmp_path))


@pytest.mark.parametrize("name", LOADERS)
def test_mutated_files_are_read_or_refused(name: str, tmp_path: Path) -> None:
    loader = LOADERS[name]
    path = loader.write(tmp_path)
    content = path.read_bytes()

    @settings(
        derandomize=True, database=None, deadline=None, max_examples=EXAMPLES, suppress_health_check=list(HealthCheck)
    )
    @given(st.data())
    def check(data: st.DataObject) -> None:
        path.write_bytes(content)
        mutate(data, path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                loader.read(path)
            except MetricOptError as error:
                assert len(str(error)) < 2000  # noqa: PT017 (most files can be read)

    # A mutated header may declare the largest image.
    with little_memory(ALLOWED + (12 * MAX_PIXELS >> 20)):
        check()


# ----- attacks that a mutation would hardly find


def attack_file(change: dict[str, Any], make: Callable[[], Any]) -> Callable[[Path], Path]:
    return lambda folder: edited(saved(make)(folder), change)


def adapter() -> Any:
    return attach_film(model(), dim=4)


def started() -> Any:
    """An adapter with a start that replaces a buffer and a parameter."""
    made = adapter()
    made.apply(Start(torch.ones(4), {"1.running_mean": torch.ones(512)}, {"2.bias": torch.ones(3)}))
    return made


def with_tensors(**tensors: torch.Tensor) -> Callable[[Path], Path]:
    return lambda folder: edited(saved(started)(folder), {}, tensors)


def zipped(name: str, size: int, *others: tuple[str, bytes]) -> Callable[[Path], Path]:
    """Write a zip file with a member of zeros, which shrinks a thousandfold."""

    def write(folder: Path) -> Path:
        with zipfile.ZipFile(folder / "x.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for other, content in others:
                archive.writestr(other, content)
            with archive.open(name, "w") as member:
                for _ in range(size >> 20):
                    member.write(bytes(1 << 20))
        return folder / "x.zip"

    return write


def many_tensors(folder: Path) -> Path:
    rewrite(folder / "x.safetensors", {f"a{i:050d}": torch.zeros(0) for i in range(200_000)}, "any", {})
    return folder / "x.safetensors"


def deflated(folder: Path) -> Path:
    """Write a torch file whose parts are compressed, as torch never does."""
    path, plain = folder / "x.pt", BytesIO()
    torch.save(nn.Linear(2, 2).state_dict(), plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    return path


def npy_of(shape: tuple[int, ...]) -> bytes:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header.encode() + bytes(16)


LAUGHS = "seed: 1\nmetric:\n  name: scorer:f1\n  kwargs:\n    a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"    a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(7)
)
GROWING = "metric:\n  name: scorer:f1\n  kwargs:\n    a0: aaaaaaaaaa\n" + "".join(
    f"    a{i + 1}: {f'${{metric.kwargs.a{i}}}' * 10}\n" for i in range(8)
)
WIDE = "a,y\n" + "x" * 130_000 + ",1\n" + "z,2\n" * 10_000
FEATURES = "a,b,c,y\n" + "".join(f"x{i % 5000},x{i % 5000},x{i % 5000},1\n" for i in range(100_000))
big = {"dim": 10**9, "matrix_dim": 10**9}

ATTACKS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], Any], str]] = {
    "an adapter's dim": (attack_file(big, adapter), lambda p: load_adapter(model(), p), "tensor .* has shape"),
    "an adapter's matrices": (
        attack_file({"matrix_dim": 10**6}, adapter),
        lambda p: load_adapter(model(), p),
        r"tensor 'matrices.1.A' has shape \(512, 4\), but should have \(512, 1000000\)",
    ),
    "an adapter's pattern": (
        attack_file({"layers": ["*"]}, adapter),
        lambda p: load_adapter(model(), p),
        r"'\*' is no layer of the model",
    ),
    "a start's unknown tensor": (
        with_tensors(**{"buffers.1.x": torch.zeros(1)}),
        lambda p: load_adapter(model(), p),
        r"the model has no buffer '1\.x'",
    ),
    "a start's matrix": (
        with_tensors(**{"buffers.1.metricopt_modulation.A": torch.zeros(512, 4)}),
        lambda p: load_adapter(model(), p),
        r"the model has no buffer '1\.metricopt_modulation\.A'",
    ),
    "a start's shape": (
        with_tensors(**{"parameters.2.bias": torch.zeros(0, 10**9)}),
        lambda p: load_adapter(model(), p),
        r"parameter '2\.bias' has shape \(0, 1000000000\), the model's \(3,\)",
    ),
    "a start's type": (
        with_tensors(**{"parameters.2.bias": torch.zeros(3, dtype=torch.complex64)}),
        lambda p: load_adapter(model(), p),
        r"parameter '2\.bias' has type torch\.complex64, the model's torch\.float32",
    ),
    "a value function's dim": (
        attack_file({"settings": {"dim": 10**9}}, ridge),
        load_value_function,
        r"tensor 'centre' has shape \(4,\), but should have \(1000000000,\)",
    ),
    "a value function's members": (
        attack_file({"settings": {"members": 2**36}}, lambda: NeuralValueFunction(4, 2)),
        load_value_function,
        "tensor .* has shape",
    ),
    "an update rule's dim": (
        attack_file({"dim": 10**7}, lambda: UpdateRule(dim=2, hidden=4)),
        load_update_rule,
        "tensor 'weights' has shape",
    ),
    "a policy's statistics": (
        attack_file({"observed": 10**7}, lambda: LossPolicy("a", 2)),
        load_loss_policy,
        "tensor .* has shape",
    ),
    "a set loss's outputs": (attack_file({"outputs": 10**8}, lambda: SetLoss(2)), load_set_loss, "tensor .* has shape"),
    "a header": (many_tensors, load_value_function, "its header should have"),
    "nested JSON": (
        text("x.json", '{"evaluations": ' + "[" * 100_000),
        evaluations,
        "is not valid JSON .it is nested more deeply than 50 levels",
    ),
    "nested COCO": (text("x.json", "[" * 100_000), read_coco, "nested more deeply than 50 levels"),
    "large numbers in COCO": (
        parsed("x.json", {**COCO, "annotations": [{"image_id": 1, "category_id": 1, "bbox": [0, 0, 10**400, 1]}]}),
        read_coco,
        "it must be 4 finite numbers",
    ),
    "a large mask in COCO": (
        parsed(
            "x.json",
            {**COCO, "annotations": [{**COCO["annotations"][0], "bbox": [], "segmentation": LARGE_MASK}]},
        ),
        read_coco,
        "segmentation of 100000 x 100000 pixels; at most 50000000 are read",
    ),
    "a long outline in COCO": (
        parsed(
            "x.json",
            {**COCO, "annotations": [{**COCO["annotations"][0], "segmentation": [[0, 0, 1e7, 0] * 999]}]},
        ),
        lambda path: read_coco(path, kind="segm"),
        "has polygons with an outline of .* pixels; at most 1048576 are read",
    ),
    "a description of another type": (
        lambda folder: edited(write_trajectory(folder), {"round": "a"}),
        lambda p: load_trajectories(p.parent),
        "round is 'a'; it must be of type int",
    ),
    "steps that are not there": (
        lambda folder: edited(write_trajectory(folder), {}, {"observed": torch.tensor([0, 99])}),
        lambda p: load_trajectories(p.parent),
        r"its observed steps are \[0, 99\], not steps from 0 to 2",
    ),
    "a zipped XML file": (zipped("Annotations/i.xml", 1 << 29), read_voc, "at most 268435456 are read"),
    "a name of many folders": (
        zipped("a/" * 30_000 + "x", 0, ("Annotations/i.xml", XML.encode())),
        read_voc,
        "a name must have at most 1000 characters",
    ),
    "a folder without a name": (
        zipped("//a", 0, ("Annotations/i.xml", XML.encode())),  # Python's zipfile.Path never returned
        read_voc,
        "none of its folders an empty name",
    ),
    "a zipped image": (zipped("a/0.png", 1 << 29), load_image_folder, "at most 268435456 are read"),
    "an image's size": (
        text("a/0.png", png(10_000, 6_000, b"")),
        lambda p: load_image_folder(p.parents[1]),
        "it has 10000 x 6000 pixels, more than 50000000; if that is right, raise max_pixels",
    ),
    "an annotated image's size": (
        text("0.png", png(10_000, 6_000, b"")),
        lambda p: annotated(p).load(),
        "10000 x 6000 pixels, more than 50000000",
    ),
    "a program": (  # PIL would run Ghostscript
        text("a/0.png", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"),
        lambda p: load_image_folder(p.parents[1]),
        "it is none of BMP",
    ),
    "a LIBSVM index": (
        text("x.txt", "1 2000000000:1\n-1 1:1\n"),
        load_libsvm,
        "2 rows and 2000000000 features, would take 16000000000 bytes of memory, more than 4294967296; if that is"
        " right, raise max_bytes",
    ),
    "a LIBSVM index of no integer": (text("x.txt", "1 3000000000:1\n"), load_libsvm, "cannot read .*x.txt"),
    "gzipped text": (
        text("x.gz", gzip.compress(b"1\n" * 50_000_000)),
        lambda p: load_libsvm(p, max_bytes=1 << 27),
        "has more than 4194304 bytes of text; all text may have max_bytes / 32",
    ),
    "a long cell": (text("x.csv", WIDE), lambda p: load_csv(p, "y", max_categories=1), "must have at most 1 distinct"),
    "categories": (
        text("x.csv", FEATURES),
        lambda p: load_csv(p, "y", max_categories=10_000, max_bytes=1 << 30),
        "100000 rows and at least 5000 features, would take 2000000000 bytes",
    ),
    "an array's shape": (
        text("x.npy", npy_of((10**9, 3))),
        lambda p: read_array(p, "x"),
        "x.npy is not a .npy file of numbers",
    ),
    "an array's impossible shape": (
        text("x.npy", npy_of((10**30,))),
        lambda p: read_array(p, "x"),
        "x.npy is not a .npy file of numbers",
    ),
    "nested YAML": (
        text("x.yaml", "metric: {kwargs: {a: " + "[" * 100_000),
        lambda p: load_config(ClassificationConfig, p),
        "x.yaml has more than 20 levels",
    ),
    "aliases in YAML": (
        text("x.yaml", LAUGHS),
        lambda p: load_config(ClassificationConfig, p),
        "x.yaml has more than 20000 nodes",
    ),
    "interpolations in YAML": (
        text("x.yaml", GROWING),
        lambda p: load_config(ClassificationConfig, p),
        "x.yaml has more than 12 interpolations",
    ),
    "YAML that holds itself": (
        text("x.yaml", "metric: &a\n  kwargs: {x: *a}\n"),
        lambda p: load_config(ClassificationConfig, p),
        r"x.yaml has an alias \*a of a part that holds it",
    ),
    "a long integer in YAML": (
        text("x.yaml", "seed: " + "9" * 5000),
        lambda p: load_config(ClassificationConfig, p),
        "x.yaml: Exceeds the limit",
    ),
    "a compressed torch file": (deflated, lambda p: load_checkpoint(nn.Linear(2, 2), p), "it is compressed"),
    "a compressed torch file to tune": (deflated, read_checkpoint, "it is compressed"),
    "a class's number": (
        text("Ebay_train.txt", "image_id class_id super_class_id path\n1 " + "9" * 30 + " 1 a.png\n"),
        lambda p: load_stanford_online_products(p.parent),
        "line 2 must be image_id class_id",
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused_in_little_memory(name: str, tmp_path: Path) -> None:
    write, read, message = ATTACKS[name]
    path = write(tmp_path)
    with little_memory(), pytest.raises(MetricOptError, match=message) as caught:
        read(path)
    assert len(str(caught.value).splitlines()) == 1


def test_what_a_user_needs_can_be_allowed(tmp_path: Path) -> None:
    """The bounds are arguments, and keys of the tools' configs."""
    images = write_zip(tmp_path)
    with pytest.raises(DataError, match=r"would take 144.*143; .* raise max_bytes"):
        load_image_folder(images, max_bytes=143)
    with pytest.raises(DataError, match=r"4 x 4.*15; if.*right, raise max_pixels"):
        load_image_folder(images, max_pixels=15)
    zipped_bytes = 3 * len(SMALL)
    assert len(load_image_folder(images, max_bytes=max(144, zipped_bytes + len(SMALL)), max_pixels=16)) == 3
    config = load_config(ClassificationConfig, text("c.yaml", CONFIG)(tmp_path), ["max_bytes=7", "max_pixels=8"])
    assert config.limits == {"max_bytes": 7, "max_pixels": 8}


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 10**30},
        {"layers": ["*"]},
        {"kind": "input_bias"},
        {"outputs": {"scale": 1.0}},
        {"outputs": {"layer": "2", "scale": 1.0, "temperature": False}},
        {"dim": 5},
        {"seed": "a"},
    ],
)
def test_a_model_is_as_it_was_after_an_adapter_that_can_not_be_loaded(change: dict[str, Any], tmp_path: Path) -> None:
    path = attack_file(change, adapter)(tmp_path)
    net = model()
    net[2].bias.requires_grad_(False)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    trained = [parameter.requires_grad for parameter in net.parameters()]
    with pytest.raises(MetricOptError):
        load_adapter(net, path)
    assert [name for name, _ in net.named_modules()] == ["", "0", "1", "2"]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    assert [parameter.requires_grad for parameter in net.parameters()] == trained
    assert before.keys() == net.state_dict().keys()
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in before.items())


@pytest.mark.parametrize("missing", ["phi", "matrices.1.A"])
def test_an_attached_adapter_is_as_it_was_after_a_file_that_lacks_a_tensor(missing: str, tmp_path: Path) -> None:
    path = saved(adapter)(tmp_path)
    tensors, kind, content = described(path)
    tensors = {name: value + 1 for name, value in tensors.items() if name != missing}
    rewrite(path, tensors, kind, content)
    attached = adapter()
    before = {name: value.clone() for name, value in attached.model.named_buffers()}
    with pytest.raises(MetricOptError, match=f"it has no tensor '{missing}'"):
        attached.load(path)
    assert not attached.phi.any()
    assert all(torch.equal(value, before[name]) for name, value in attached.model.named_buffers())


# ----- writing


def write_all(folder: Path) -> None:
    """Write a file of each kind, always of the same content."""
    folder.mkdir()
    torch.manual_seed(0)
    adapter().save(folder / "adapter.safetensors")
    ridge().save(folder / "ridge.safetensors")
    gp().save(folder / "gp.safetensors")
    UpdateRule(dim=2, hidden=3).save(folder / "rule.safetensors")
    TrajectoryStore(folder / "trajectories", {"seed": 1}).add(trajectory())
    write_json(folder / "x.json", {"b": 1, "a": [0.1, None], "c": {"z": "ä"}})
    seed_record().save(folder / "record.json")
    save_checkpoint(folder / "model.safetensors", {"b": torch.ones(2), "a": torch.zeros(3)})


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_same_content_is_the_same_file_in_any_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # with the checksums that are written
    write_all(tmp_path / "a")
    write_all(tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert len(contents(tmp_path / "a")) == 9
    code = (
        "import importlib.util, pathlib, sys; "
        f"spec = importlib.util.spec_from_file_location('written', {__file__!r}); "
        "module = importlib.util.module_from_spec(spec); sys.modules['written'] = module; "
        f"spec.loader.exec_module(module); module.write_all(pathlib.Path({str(tmp_path / 'c')!r}))"
    )
    # Of the hashes of text, on which the order of a set depends.
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONHASHSEED": seed})
    assert contents(tmp_path / "c") == contents(tmp_path / "a")


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_files_have_the_mode_of_the_umask(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_all(tmp_path / "a")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()} == {mode}
