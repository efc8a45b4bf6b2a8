"""Measure what must not get slower, each a ratio of two times taken in turn in one process.

    python benchmarks/ratios.py --output out/ratios.json

PYTHONPATH chooses the tree that is measured, so one file compares two commits. Run it on an idle machine. A ratio is
the median over paired turns; its spread is their quartiles.
"""

import argparse
import contextlib
import io
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import metricopt_ext as mo
from metricopt_ext.detection.ap50 import average_precision
from metricopt_ext.detection.records import Annotated, Detections, DetectionSet
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.utils.extras import naming_extras, require
from metricopt_ext.utils.kept_outputs import KeptOutputs
from metricopt_ext.value.value_function import NeuralValueFunction

QUERIES, FEW = 60, 20  # of each search, and of one of toy size
Side = Callable[[], Any]


@dataclass(frozen=True)
class Ratio:
    """How many times as long one thing takes as another.

    Attributes:
        of: What is timed.
        over: What it is compared with.
        median: Median of the paired ratios.
        quartiles: Their first and third quartile.
        seconds: Median time of either side.
        turns: How many pairs were timed.
    """

    of: str
    over: str
    median: float
    quartiles: tuple[float, float]
    seconds: tuple[float, float]
    turns: int


def main() -> None:
    """Parse the command line, measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, type=Path, help="JSON file to write")
    parser.add_argument("--smoke", action="store_true", help="toy sizes: does it run? The ratios mean nothing")
    arguments = parser.parse_args()
    with naming_extras():
        for module in ("torchvision", "faiss", "pycocotools"):
            require(module)
    torch.set_num_threads(1)
    ratios = []
    print(f"{'time of':34}{'over':28}{'ratio':>9}  {'quartiles':20}{'seconds of either'}")
    for ratio in measured(arguments.smoke):
        low, high = ratio.quartiles
        ours, theirs = ratio.seconds
        spread = f"[{low:.3f}, {high:.3f}]"
        print(f"{ratio.of:34}{ratio.over:28}{ratio.median:9.3f}  {spread:20}{ours:.3g}, {theirs:.3g}", flush=True)
        ratios.append(asdict(ratio))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    report = {"smoke": arguments.smoke, "torch": torch.__version__, "tree": mo.__file__, "ratios": ratios}
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")


def measured(smoke: bool) -> Iterator[Ratio]:
    """Measure one ratio after the other."""
    yield step(turns=5 if smoke else 300)
    yield recall(turns=1 if smoke else 5, size=500 if smoke else 8000)
    yield ap50(turns=1 if smoke else 5, images=20 if smoke else 300)
    yield population(turns=2 if smoke else 30)
    queries = FEW if smoke else QUERIES
    yield search("MLP", mlp, queries, turns=1 if smoke else 5, size=100 if smoke else 20000)
    yield search("ResNet-20", resnet, queries, turns=1 if smoke else 3, size=4 if smoke else 300)
    yield search("detector", detector, queries, turns=1 if smoke else 3, size=1 if smoke else 8, population=1)
    yield setting("ResNet-20", resnet, logits_kept, turns=1 if smoke else 30, size=4 if smoke else 300)
    yield setting("detector", detector, boxes_kept, turns=1 if smoke else 30, size=1 if smoke else 8)
    yield features(turns=1 if smoke else 30, size=8 if smoke else 300)


def compared(of: str, over: str, ours: Side, theirs: Side, turns: int) -> Ratio:
    """Time both sides in turn, each once before, which does not count."""
    ours(), theirs()
    return summed_up(of, over, [(timed(ours), timed(theirs)) for _ in range(turns)])


def timed(side: Side) -> float:
    """Return how many seconds a call takes."""
    start = time.perf_counter()
    side()
    return time.perf_counter() - start


def summed_up(of: str, over: str, pairs: list[tuple[float, float]]) -> Ratio:
    """Return the ratio of pairs of times."""
    ours, theirs = np.array(pairs).T
    low, median, high = np.quantile(ours / theirs, [0.25, 0.5, 0.75])
    return Ratio(of, over, median, (low, high), (float(np.median(ours)), float(np.median(theirs))), len(pairs))


def step(turns: int, dim: int = 128) -> Ratio:
    """Time `MetricOpt.step` that follows a neural value function, and torch's SGD on the same phi."""
    f = NeuralValueFunction(dim, members=2)
    f.set_domain(torch.randn(200, dim, generator=torch.Generator().manual_seed(0)))
    phi = nn.Parameter(torch.zeros(dim))
    phi.grad = torch.full((dim,), 1e-3)
    ours = mo.MetricOpt([phi], f.eval(), even_untrusted=True)
    theirs = torch.optim.SGD([phi], lr=0.1)
    return compared("MetricOpt.step", "SGD.step", ours.step, theirs.step, turns)


def recall(turns: int, size: int, dim: int = 128, k: int = 10) -> Ratio:
    """Time Recall@k, and the search of a flat FAISS index for the same neighbours."""
    import faiss

    from metricopt_ext.retrieval.recall import recall_at_k

    rng = np.random.default_rng(0)
    labels = np.arange(size) % (size // 5)
    spread = rng.standard_normal((size // 5, dim))[labels] + rng.standard_normal((size, dim))
    items = spread.astype(np.float32)

    def raw() -> None:
        index = faiss.IndexFlatL2(dim)
        index.add(items)
        index.search(items, k + 1)

    faiss.omp_set_num_threads(1)
    return compared(f"Recall@{k}", "raw FAISS", lambda: recall_at_k(items, labels, (1, k)), raw, turns)


def ap50(turns: int, images: int, found: int = 50, objects: int = 5, classes: int = 10) -> Ratio:
    """Time COCO's AP50 of random detections, and pycocotools at the one IoU.

    Raises:
        RuntimeError: The two values differ.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    rng = torch.Generator().manual_seed(0)
    truth, detections = list[Annotated](), list[Detections]()
    annotations, results = list[dict[str, Any]](), list[dict[str, Any]]()
    for image in range(images):
        boxes, labels = random_boxes(objects, rng), torch.randint(classes, (objects,), generator=rng)
        none = torch.zeros(objects, dtype=torch.bool)
        truth.append(Annotated(f"{image}", Path(f"{image}.png"), 300, 300, boxes, labels, none, none))
        near = torch.randint(objects, (found,), generator=rng)
        guesses = boxes[near] + torch.randint(-8, 9, (found, 4), generator=rng)
        scores = torch.rand(found, generator=rng)
        detections.append(Detections(guesses, scores, labels[near]))
        for box, label in zip(boxes.tolist(), labels.tolist(), strict=True):
            of = {"id": len(annotations) + 1, "image_id": image, "category_id": label, "iscrowd": 0}
            annotations.append({**of, "bbox": as_coco(box), "area": (box[2] - box[0]) * (box[3] - box[1])})
        for box, score, label in zip(guesses.tolist(), scores.tolist(), labels[near].tolist(), strict=True):
            results.append({"image_id": image, "category_id": label, "bbox": as_coco(box), "score": score})
    ours_set = DetectionSet(tuple(f"class {label}" for label in range(classes)), truth)
    coco = COCO()
    coco.dataset = {
        "images": [{"id": image, "width": 300, "height": 300} for image in range(images)],
        "categories": [{"id": label, "name": f"{label}"} for label in range(classes)],
        "annotations": annotations,
    }
    with contextlib.redirect_stdout(io.StringIO()):
        coco.createIndex()

    def ours() -> float:
        return average_precision(detections, ours_set, "coco").mean

    def theirs() -> float:
        with contextlib.redirect_stdout(io.StringIO()):
            evaluation = COCOeval(coco, coco.loadRes([dict(each) for each in results]), "bbox")
            evaluation.params.iouThrs = np.array([0.5])
            evaluation.params.areaRng, evaluation.params.areaRngLbl = [[0, 1e10]], ["all"]
            evaluation.params.maxDets = [100]
            evaluation.evaluate()
            evaluation.accumulate()
        precision = evaluation.eval["precision"]
        return float(precision[precision > -1].mean())

    if abs(ours() - theirs()) > 1e-9:
        raise RuntimeError(f"AP50 is {ours()}, and {theirs()} by pycocotools")
    return compared("AP50", "pycocotools", ours, theirs, turns)


def random_boxes(count: int, rng: torch.Generator) -> Tensor:
    """Draw boxes with whole edges, ``count x 4``: corners in [20, 200), sides in [20, 80)."""
    corners = torch.randint(20, 200, (count, 2), generator=rng)
    return torch.cat([corners, corners + torch.randint(20, 80, (count, 2), generator=rng)], dim=1).float()


def as_coco(box: list[float]) -> list[float]:
    """Return left, top, width and height of a box."""
    left, top, right, bottom = box
    return [left, top, right - left, bottom - top]


def population(turns: int, size: int = 32, batch_size: int = 32) -> Ratio:
    """Time loss and gradient of a population of phi at once, and one after the other."""
    adapter, _, loss, batches = mlp(1000, batch_size)
    task = mo.FinetuneTask(
        adapter, loss=loss, batches=batches, metric=mo.Metric(lambda: 0.0, maximize=True), population=size
    )
    phi = 0.1 * torch.randn(size, adapter.dim, generator=torch.Generator().manual_seed(0))

    def single() -> None:
        for index in range(size):
            task.loss_and_gradient(phi[index, None], 0, [index], 0)

    together = partial(task.loss_and_gradient, phi, 0, list(range(size)), 0)
    return compared(f"{size} folded tasks", "one by one", together, single, turns)


Searched = tuple[mo.Adapter, Callable[..., float], Any, Any]  # an adapter, its metric, loss and batches


def search(
    name: str, make: Callable[[int], Searched], queries: int, turns: int, size: int, population: int = 32
) -> Ratio:
    """Time a query of a guided search, all that the search does besides included, and a plain evaluation."""
    pairs = []
    for turn in range(turns + (turns > 1)):
        adapter, metric, loss, batches = make(size)
        task = mo.FinetuneTask(
            adapter, loss=loss, batches=batches, metric=mo.Metric(metric, maximize=True), population=population
        )
        evaluate = partial(metric, adapter.model)
        evaluate()
        before = [timed(evaluate) for _ in range(5)]
        query = timed(partial(mo.optimize_metric, task, queries=queries, callback=mo.Callback())) / queries
        plain = float(np.median(before + [timed(evaluate) for _ in range(5)]))
        if turn or turns == 1:  # the first search also imports, so it counts where it is alone
            pairs.append((query, plain))
    return summed_up(f"a query of a search, {name}", "a plain evaluation", pairs)


def setting(
    name: str, make: Callable[[int], Searched], kept: Callable[[nn.Module], mo.Settings], turns: int, size: int
) -> Ratio:
    """Time a query of a setting on kept outputs, a new value each time, and a plain evaluation."""
    adapter, metric, _, _ = make(size)
    model, settings = adapter.model.eval(), kept(adapter.model)
    values = iter(np.linspace(0.05, 0.95, turns + 1))
    last = settings[settings.names[-1]]

    def query() -> float:
        with settings.applied({last.name: last.at(next(values))}), torch.no_grad():
            return metric(model)

    with settings.applied({}), torch.no_grad():
        metric(model)  # whose outputs are kept
    return compared(f"a query of a setting, {name}", "a plain evaluation", query, partial(metric, model), turns)


def features(turns: int, size: int) -> Ratio:
    """Time Recall@1 of an embedder by another phi in its last norm, on kept features and by whole passes."""
    from metricopt_ext.data.labelled import Split
    from metricopt_ext.retrieval.config import MetricConfig
    from metricopt_ext.retrieval.models import build_model
    from metricopt_ext.retrieval.named_metric import build_metric

    torch.manual_seed(0)
    images = torch.randint(256, (size, 3, 32, 32), dtype=torch.uint8)
    adapter = mo.attach_film(build_model("conv4", images.shape[1:], 64).eval(), ["trunk.norm4"], dim=16)
    part = Split(images, torch.arange(size) % (size // 2))

    def query(metric: mo.Metric) -> float:
        with adapter.using(torch.randn(16)) as model, torch.no_grad():
            return metric.judge(model).cost

    kept, whole = (partial(query, build_metric(MetricConfig(ks=[1]), part, keep_gib=gib)) for gib in (1.0, 0.0))
    return compared("a query on kept features, conv4", "a plain evaluation", kept, whole, turns)


def logits_kept(model: nn.Module) -> mo.Settings:
    """Return a classifier's settings, the temperature last."""
    from metricopt_ext.classification.settings import classification_settings

    return classification_settings(model, temperature=True)


def boxes_kept(model: nn.Module) -> mo.Settings:
    """Return a detector's settings, the IoU of NMS alone."""
    from metricopt_ext.detection.settings import detection_settings

    return detection_settings(model, names=["nms"], kept=KeptOutputs(), boxes_only=True)


def of_classifier(model: nn.Module, x: Tensor, y: Tensor, batch_size: int) -> Searched:
    """Return a search of the likelihood that a classifier gives to labels y, ``n``, of inputs x, ``n x ...``."""

    def metric(model: nn.Module) -> float:
        with torch.no_grad():
            return float(model(x).softmax(1).gather(1, y[:, None]).mean())

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return mo.attach_film(model.eval(), dim=16), metric, loss, mo.TensorBatches(x, y, batch_size)


def mlp(size: int, batch_size: int = 32) -> Searched:
    """Return a search on ``size`` rows of a table."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    return of_classifier(model, torch.randn(size, 64), torch.arange(size) % 10, batch_size)


def resnet(size: int) -> Searched:
    """Return a search on ``size`` images of 16 x 16 pixels."""
    torch.manual_seed(0)
    widths = [16] * 3 + [32] * 3 + [64] * 3
    blocks = [Block(a, b) for a, b in zip([16, *widths], widths, strict=False)]
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return of_classifier(model, torch.randn(size, 3, 16, 16), torch.arange(size) % 10, min(size, 32))


class Block(nn.Module):
    """Two convolutions beside a shortcut, which halves the image where the width grows (He et al. 2016)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stride, self.grown = outputs // inputs, outputs - inputs
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, self.stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, ``n x outputs x h x w``."""
        shortcut = F.pad(x[..., :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.grown))
        return F.relu(self.body(x) + shortcut)


def detector(size: int, pixels: int = 64) -> Searched:
    """Return a search of the mean score of a small Faster R-CNN on ``size`` images, phi in its head."""
    from metricopt_ext.detection.task import detection_loss
    from metricopt_ext.detection.torchvision_toolkit import PLACEMENTS, TorchvisionToolkit

    toolkit = TorchvisionToolkit(min_size=pixels, max_size=pixels, width=16, head=32)
    rng = torch.Generator().manual_seed(0)
    box, label = torch.tensor([[10.0, 10.0, 40.0, 40.0]]), torch.tensor([0])
    none = torch.zeros(1, dtype=torch.bool)
    examples = [
        Example(
            torch.randint(256, (3, pixels, pixels), generator=rng, dtype=torch.uint8),
            Annotated(f"{image}", Path("none"), pixels, pixels, box, label, none, none),
        )
        for image in range(size)
    ]
    model = toolkit.build(3, seed=0)

    def metric(model: nn.Module) -> float:
        scores = torch.cat([each.scores for each in toolkit.detect(model, examples)])
        return float(scores.sum() / max(1, len(scores)))

    adapter = mo.attach_film(model, PLACEMENTS["roi_head"], dim=16)
    return adapter, metric, detection_loss(toolkit), lambda seed, task, step: examples[:2]


if __name__ == "__main__":
    main()
