"""Measure on a GPU what a finetune costs: ratios of times taken in turn, and the memory that each side takes.

    python benchmarks/gpu.py --output out/gpu.json
    python benchmarks/gpu.py --output out/gpu.json --smoke --device cpu

It prints the device, then a line for each ratio: its median, quartiles, seconds and MiB of either side, and the target
where there is one, ``met`` or ``missed`` by the median:

- a finetuning step of a classifier with MetricOpt over one with SGD, f on the CPU: at most 1.1;
- ``MetricOpt.step`` alone over SGD's, f on the CPU and on the GPU, where it is a hundred small launches of kernels;
- a finetuning step of phi over one of the bare model's first layer, which has no FiLM;
- a step of the classifier and of an R-CNN in bfloat16 (``torch.autocast``) over float32, with so many images that the
  GPU is busy and not the program that feeds it: below 1 on a GPU;
- eight phi folded into one pass over one by one: at most .5 on a GPU that is not full;
- a metric query of an embedder over its embeddings alone, the search by faiss-gpu or else on the CPU: at most 2;
- that search by FAISS on the GPU over the same on the CPU: below 1, where faiss-gpu is installed.

On the CPU, sizes are toys and the ratios mean nothing: it tells that all of it runs.
"""

import argparse
import copy
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import metricopt_ext as mo
from metricopt_ext.utils.extras import naming_extras, require
from metricopt_ext.value.value_function import NeuralValueFunction

Side = Callable[[], Any]


@dataclass(frozen=True)
class Sizes:
    """How large things are.

    Attributes:
        turns: Pairs of times.
        batch: Images in a step.
        many: The same, to fill the GPU.
        pixels: Side of an image.
        items: Embeddings that search each other.
        detector: Side of a detector's image.
    """

    turns: int
    batch: int
    many: int
    pixels: int
    items: int
    detector: int


@dataclass(frozen=True)
class Ratio:
    """How many times as long one thing takes as another.

    Attributes:
        of: What is timed.
        over: What it is compared with.
        median: Median of the paired ratios.
        quartiles: Their first and third quartile.
        seconds: Median time of either side.
        mib: What either side took of the GPU's memory at most; 0 on the CPU.
        at_most: The target; None without one.
    """

    of: str
    over: str
    median: float
    quartiles: tuple[float, float]
    seconds: tuple[float, float]
    mib: tuple[float, float]
    at_most: float | None

    def line(self) -> str:
        """Return the ratio's line."""
        target = "" if self.at_most is None else f"at most {self.at_most:g}: "
        target += "" if self.at_most is None else "met" if self.median <= self.at_most else "missed"
        (low, high), (ours, theirs), (mib, others) = self.quartiles, self.seconds, self.mib
        spread = f"[{low:.3f}, {high:.3f}]  {ours:.3g} and {theirs:.3g} s, {mib:.0f} and {others:.0f} MiB"
        return f"{self.of:40}{self.over:24}{self.median:8.3f}  {spread}  {target}".rstrip()


def main() -> None:
    """Parse the command line, measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, type=Path, help="JSON file to write")
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--smoke", action="store_true", help="toy sizes: does it run? The ratios mean nothing")
    arguments = parser.parse_args()
    with naming_extras():
        for module in ("torchvision", "faiss"):
            require(module)
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU; --smoke --device cpu tells whether the benchmark runs")
    if device.type != "cuda" and not arguments.smoke:
        parser.error(f"--device {device} is no GPU; add --smoke")
    sizes = Sizes(1, 8, 8, 32, 200, 64) if arguments.smoke else Sizes(20, 64, 256, 224, 30_000, 800)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    print(f"{name}, torch {torch.__version__}, {sizes}")
    ratios = []
    for ratio in measured(device, sizes):
        print(ratio.line(), flush=True)
        ratios.append(asdict(ratio))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    report = {"device": name, "smoke": arguments.smoke, "torch": torch.__version__, "ratios": ratios}
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")


def measured(device: torch.device, sizes: Sizes) -> Iterator[Ratio]:
    """Measure one ratio after the other."""
    yield from classifier(device, sizes)
    yield population(device, sizes)
    yield from embedder(device, sizes)
    yield detector(device, sizes)


def compared(
    device: torch.device, of: str, over: str, ours: Side, theirs: Side, turns: int, at_most: float | None = None
) -> Ratio:
    """Time both sides in turn, each twice before, which does not count."""
    for side in (ours, theirs, ours, theirs):
        side()
    pairs = np.array([(timed(device, ours), timed(device, theirs)) for _ in range(turns)])
    seconds, mib = pairs[..., 0], pairs[..., 1].max(axis=0)
    low, median, high = np.quantile(seconds[:, 0] / seconds[:, 1], [0.25, 0.5, 0.75])
    middle = np.median(seconds, axis=0)
    return Ratio(of, over, float(median), (low, high), (middle[0], middle[1]), (mib[0], mib[1]), at_most)


def timed(device: torch.device, side: Side) -> tuple[float, float]:
    """Return how many seconds a call takes until the device has done it, and the MiB that it took at most."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    side()
    if on_gpu:
        torch.cuda.synchronize(device)
    taken = time.perf_counter() - start
    return taken, torch.cuda.max_memory_allocated(device) / 2**20 if on_gpu else 0.0


def classifier(device: torch.device, sizes: Sizes, dim: int = 128) -> Iterator[Ratio]:
    """Time steps of a ResNet-18: with MetricOpt, with FiLM, and in bfloat16."""
    adapter, bare = mo.attach_film(resnet(10).to(device).eval(), dim=dim), resnet(10).to(device).eval()
    bare.requires_grad_(False).get_parameter("conv1.weight").requires_grad_(True)  # backward goes as deep as phi's
    x, y = images(device, sizes.batch, sizes.pixels)
    f = NeuralValueFunction(dim, members=8)
    f.set_domain(torch.randn(200, dim, generator=torch.Generator().manual_seed(0)))
    beside = mo.MetricOpt(adapter.parameters(), copy.deepcopy(f).to(device), lr=0.1, even_untrusted=True)
    ours = mo.MetricOpt(adapter.parameters(), f, lr=0.1, even_untrusted=True)
    plain = torch.optim.SGD(adapter.parameters(), lr=0.1)

    def step(optimizer: torch.optim.Optimizer) -> None:
        adapter.set_phi(torch.zeros(dim, device=device))
        optimizer.zero_grad()
        F.cross_entropy(adapter.model(x), y).backward()
        optimizer.step()

    def bare_step() -> None:
        bare.zero_grad()
        F.cross_entropy(bare(x), y).backward()

    step(plain)
    turns = sizes.turns
    yield compared(
        device, "classifier: step with MetricOpt", "step with SGD", lambda: step(ours), lambda: step(plain), turns, 1.1
    )
    yield compared(device, "MetricOpt.step, f on the CPU", "SGD.step", ours.step, plain.step, turns)
    yield compared(device, "MetricOpt.step, f beside phi", "SGD.step", beside.step, plain.step, turns)
    yield compared(device, "classifier: step of phi", "of the first layer", lambda: step(plain), bare_step, turns)
    x, y = images(device, sizes.many, sizes.pixels)

    def forward_and_back(half: bool) -> None:
        adapter.set_phi(torch.zeros(dim, device=device))
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            loss = F.cross_entropy(adapter.model(x), y)
        loss.backward()

    sides = (lambda: forward_and_back(True), lambda: forward_and_back(False))
    yield compared(device, f"classifier: {sizes.many} images in bfloat16", "in float32", *sides, turns, 1)


def population(device: torch.device, sizes: Sizes, count: int = 8) -> Ratio:
    """Time the losses and gradients of several phi, folded into one pass and one by one."""
    adapter = mo.attach_film(resnet(10).to(device).eval(), dim=16)
    x, y = images(device, sizes.batch, sizes.pixels)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def task(size: int) -> mo.FinetuneTask:
        batches, never = mo.TensorBatches(x, y, max(2, sizes.batch // count)), mo.Metric(lambda: 0.0, maximize=True)
        return mo.FinetuneTask(adapter, loss=loss, batches=batches, metric=never, population=size)

    many, single, tasks = task(count), task(1), list(range(count))
    phi = many.starts(0.2, 0, tasks)
    return compared(
        device,
        f"{count} phi, folded",
        "one by one",
        lambda: many.loss_and_gradient(phi, 0, tasks, 0),
        lambda: single.loss_and_gradient(phi, 0, tasks, 0),
        sizes.turns,
        0.5,
    )


def embedder(device: torch.device, sizes: Sizes) -> Iterator[Ratio]:
    """Time a query of Recall@k, its embeddings alone, and the search on either device."""
    import faiss

    from metricopt_ext.retrieval.recall import recall_at_k, recall_metric

    model = resnet(128).to(device).eval()
    x, _ = images(device, sizes.batch, sizes.pixels)
    batches = [(x, torch.arange(len(x)) % 4)] * max(1, sizes.turns // 2)
    metric = recall_metric(batches, (1,))

    def embed() -> None:
        with torch.no_grad():
            for inputs, _ in batches:
                model(inputs).cpu()

    yield compared(
        device, "embedder: a query of Recall@1", "embeddings", lambda: metric.cost(model, "x"), embed, sizes.turns, 2
    )
    if not faiss.get_num_gpus():
        print("faiss-gpu is not installed, or finds no GPU: both sides of the next search on the CPU")
    labels = torch.arange(sizes.items) % max(2, sizes.items // 5)
    found = torch.randn(sizes.items, 128, generator=torch.Generator().manual_seed(0))

    def on_cpu() -> None:
        with mock.patch.object(faiss, "get_num_gpus", return_value=0):
            recall_at_k(found, labels, (1, 10))

    yield compared(
        device,
        f"Recall@1,10 of {sizes.items}, by faiss-gpu",
        "on the CPU",
        lambda: recall_at_k(found, labels, (1, 10)),
        on_cpu,
        min(sizes.turns, 3),
        1 if faiss.get_num_gpus() else None,
    )


def detector(device: torch.device, sizes: Sizes) -> Ratio:
    """Time losses of a Faster R-CNN on ResNet-50 with FPN, and their gradients to phi, in bfloat16."""
    from torchvision.models.detection import fasterrcnn_resnet50_fpn

    side = sizes.detector
    torch.manual_seed(0)
    model = fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=3, min_size=side, max_size=side)
    adapter = mo.attach_film(model.to(device).train(), ["backbone.fpn.*"], dim=16)
    x = [
        torch.rand(3, side, side, generator=torch.Generator().manual_seed(i)).to(device)
        for i in range(max(2, sizes.many // 64))
    ]
    box = torch.tensor([[side / 8, side / 8, side / 2, side / 2]], device=device)
    targets = [{"boxes": box, "labels": torch.tensor([1], device=device)} for _ in x]

    def step(half: bool) -> None:
        adapter.set_phi(torch.zeros(16, device=device))
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            loss = sum(adapter.model(x, targets).values())
        assert isinstance(loss, Tensor)
        loss.backward()

    return compared(
        device, "R-CNN: step in bfloat16", "step in float32", lambda: step(True), lambda: step(False), sizes.turns, 1
    )


def resnet(outputs: int) -> nn.Module:
    """Return a ResNet-18 with random weights."""
    from torchvision.models import resnet18

    torch.manual_seed(0)
    model: nn.Module = resnet18(num_classes=outputs)
    return model


def images(device: torch.device, count: int, pixels: int) -> tuple[Tensor, Tensor]:
    """Return random images and labels of ten classes."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(count, 3, pixels, pixels, generator=draw)
    return x.to(device), torch.arange(count, device=device) % 10


if __name__ == "__main__":
    main()
