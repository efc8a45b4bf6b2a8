"""Measure how a search gets faster with more ranks, beside what to expect, and what the ranks exchange.

    torchrun --standalone --nproc-per-node=4 benchmarks/measure_scale.py --queries 150 --sleep 1
    torchrun --standalone --nproc-per-node=2 benchmarks/measure_scale.py --queries 150 --images 20000

A small network on random data is tuned for a metric that sleeps --sleep seconds, or computes on --images images, at
each evaluation. Ranks evaluate as many points at once as there are of them, so a run's evaluations take as long as its
waves; everything else, the fits of f above all, is taken as serial: its seconds are what is left of the whole. What
other numbers of ranks would take, serial seconds + waves * seconds of an evaluation, is predicted from that: by a run
of one rank, to be compared with what a run of several then measures.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.experiment.command import errors_in_one_line
from metricopt_ext.experiment.style import print_table
from metricopt_ext.methods.optimize import optimize_metric
from metricopt_ext.runtime import distributed
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.tasks.batches import TensorBatches
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.files import write_json

DIM, CLASSES = 32, 10


@dataclass
class Traffic:
    """What this process has exchanged with the other ranks.

    Attributes:
        exchanges: How many times all ranks met for it.
        sent: Bytes that this process has sent, to every other rank.
    """

    exchanges: int = 0
    sent: int = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what goes through torch.distributed's broadcasts of objects, which are the ranks' exchanges."""
        broadcast = dist.broadcast_object_list

        def broadcasting(sent: list[Any], *more: Any, **options: Any) -> None:
            self.exchanges, self.sent = self.exchanges + 1, self.sent + len(sent[0])
            broadcast(sent, *more, **options)

        with mock.patch.object(dist, "broadcast_object_list", broadcasting):
            yield


def main() -> None:
    """Parse the command line, run, and report on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=150, help="metric queries of the run")
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds that an evaluation sleeps")
    parser.add_argument("--images", type=int, default=500, help="images that an evaluation looks at")
    parser.add_argument("--output", type=Path, help="receives the figures as JSON")
    arguments = parser.parse_args()
    with errors_in_one_line(ValueError), distributed.joined(), distributed.sharing(vars(arguments)):
        torch.set_num_threads(1)
        measure(arguments.queries, arguments.sleep, arguments.images, arguments.output)


def measure(queries: int, sleep: float, images: int, output: Path | None) -> None:
    """Run once and report."""
    rng = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, CLASSES))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1, generator=rng)
    x, y = torch.randn(images, 1, 8, 8, generator=rng), torch.randint(CLASSES, (images,), generator=rng)
    spent: list[float] = []

    def value(model: nn.Module) -> float:
        began = time.perf_counter()
        time.sleep(sleep)
        likelihood = float(model(x).log_softmax(1).gather(1, y[:, None]).mean())
        spent.append(time.perf_counter() - began)
        return likelihood

    task = FinetuneTask(
        attach_film(model, "1", dim=DIM),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        batches=TensorBatches(x[:500], y[:500], batch_size=50),
        metric=Metric(value, maximize=True, bounds=None, name="log likelihood"),
    )
    traffic, began = Traffic(), time.perf_counter()
    with traffic.counted():
        optimize_metric(task, queries=queries, callback=Callback())
        seconds = time.perf_counter() - began
        asked = list(distributed.each(lambda own: (len(spent), sum(spent)), range(distributed.world())))
    evaluations = sum(number for number, _ in asked) - (distributed.world() - 1)  # all make the first

    each = sum(total for _, total in asked) / sum(number for number, _ in asked)
    serial = seconds - search_waves(queries, distributed.world()) * each
    figures = {
        "ranks": distributed.world(),
        "evaluations": evaluations,
        "waves": search_waves(queries, distributed.world()),
        "seconds of an evaluation": each,
        "seconds": seconds,
        "serial seconds": serial,
        **{
            f"predicted seconds of {world} ranks": serial + search_waves(queries, world) * each
            for world in (2, 4, 8, 64)
        },
        "exchanges": traffic.exchanges,
        "megabytes sent by the first rank": traffic.sent / 1e6,
    }
    if distributed.rank() == 0:
        rows = [(name, f"{value:.2f}" if isinstance(value, float) else str(value)) for name, value in figures.items()]
        print_table([f"{queries} queries", "measured"], rows)
        if output is not None:
            write_json(output, figures)


def search_waves(queries: int, world: int) -> int:
    """Return how many times evaluations follow each other in a guided search from one start."""
    search = GuidedTrustRegion()
    design = search.design_size(DIM)
    full, rest = divmod(queries - 2 - design, search.batch)
    return 2 + ceil(design / world) + full * ceil(search.batch / world) + ceil(rest / world)


if __name__ == "__main__":
    main()
