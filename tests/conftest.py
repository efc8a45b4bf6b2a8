"""A task of closed form, a record keeper in memory, a tiny Detectron2, and its catalog of sets as it was."""

import gc
import io
import multiprocessing
import os
import runpy
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck
from PIL import Image
from torch import Tensor, nn

from metricopt_ext.adapters.attach import attach_input_bias
from metricopt_ext.tasks.ledger import Ledger
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.machine import Machine
from metricopt_ext.utils.seeding import generator

pytest.register_assert_rewrite("helpers", "testers")  # what fails there says how, as in a test


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--threads", type=int, default=1, metavar="N", help="torch's threads (the tensors are small)")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(config.getoption("--threads"))
    os.environ.setdefault("OMP_NUM_THREADS", str(config.getoption("--threads")))  # of the processes that tests start
    asked, table = os.environ.get("ATEN_CPU_CAPABILITY", ""), Path("/proc/cpuinfo")
    needed = {"avx2": "avx2", "avx512": "avx512f"}.get(asked, "")
    if table.exists() and needed not in table.read_text():  # torch would end in an illegal instruction
        pytest.exit(f"no test was run: ATEN_CPU_CAPABILITY={asked}, which this processor lacks", returncode=4)
    draw_by_day_and_night()


def draw_by_day_and_night() -> None:
    """Tell hypothesis how much to draw: by day the same each time."""
    from testers import DRAWS

    shared = [HealthCheck.differing_executors, HealthCheck.function_scoped_fixture]  # a tester's cases, tmp_path
    hypothesis.settings.register_profile(
        "drawn",
        max_examples=DRAWS,
        derandomize="METRICOPT_DRAWS" not in os.environ,
        database=None,
        deadline=None,
        suppress_health_check=[*shared, HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    hypothesis.settings.load_profile("drawn")


def pytest_collection_finish() -> None:
    gc.freeze()  # what the tests import stays, and the collector need not look through all of it time and again


def pytest_report_header() -> str:
    return f"machine: {Machine.current(torch.device('cpu'))}"


class Problem:
    """The numbers of a `Quadratic` and what was done with them."""

    def __init__(self, dim: int, noise: float, dtype: torch.dtype) -> None:
        rng = torch.Generator().manual_seed(11)
        self.curvature = torch.rand(dim, generator=rng, dtype=dtype) + 0.5
        self.centre = torch.randn(dim, generator=rng, dtype=dtype)
        self.goal = torch.randn(dim, generator=rng, dtype=dtype)
        self.dim, self.noise = dim, noise
        self.fail_after: int | None = None
        self.queries = 0
        self.layer = nn.Linear(2, 3)
        nn.init.normal_(self.layer.weight, generator=rng)  # each process of a resumed run makes the same model
        nn.init.zeros_(self.layer.bias)

    def batch(self, seed: int, task: int, step: int) -> Tensor:
        return self.noise * torch.randn(self.dim, generator=generator(seed, "batch", task, step)).to(self.centre)

    def loss(self, model: Any, batch: Tensor) -> Tensor:
        return (self.curvature * (model.metricopt.value() - self.centre - batch) ** 2).sum() / 2

    def true_cost(self, phi: Tensor) -> float:
        return float(((phi - self.goal) ** 2).sum())

    def distance(self, model: Any) -> float:
        self.queries += 1
        if self.fail_after is not None and self.queries > self.fail_after:
            raise OSError("the evaluation server is down")
        return self.true_cost(model.metricopt.phi)


@dataclass(frozen=True, eq=False)
class Quadratic(FinetuneTask):
    """loss = 1/2 sum_i h_i (phi_i - c_i - noise_i)^2 with batch = noise; metric = |phi - goal|^2, lower is better."""

    problem: Problem

    def __getattr__(self, name: str) -> Any:
        return getattr(self.problem, name)


@pytest.fixture
def quadratic() -> Callable[..., Quadratic]:
    """Make a quadratic task of a given dimension."""

    def make(
        dim: int = 4,
        *,
        population: int | None = 32,
        noise: float = 0.3,
        dtype: torch.dtype = torch.float64,
        budget: int | None = None,
    ) -> Quadratic:
        problem = Problem(dim, noise, dtype)
        return Quadratic(
            attach_input_bias(problem.layer.to(dtype), dim=dim),
            loss=problem.loss,
            batches=problem.batch,
            metric=Metric(problem.distance, maximize=False, bounds=None, name="distance", ledger=Ledger(budget)),
            population=population,
            problem=problem,
        )

    return make


class Records:
    """What HookContainer asks of a record keeper, on a table in memory for each group, written when told to."""

    def __init__(self) -> None:
        self.unsaved: list[tuple[str, dict[str, Any]]] = []
        self.hash_map: dict[str, str] = {}
        self.database = sqlite3.connect(":memory:")
        self.database.row_factory = sqlite3.Row

    def table_exists(self, name: str) -> bool:
        query = "SELECT name FROM sqlite_master WHERE type='table' AND name=?"
        return self.database.execute(query, (name,)).fetchone() is not None

    def query(self, query: str, values: Any = (), **options: Any) -> list[Any]:
        return self.database.execute(query, values).fetchall()

    def update_records(self, record: Any, iteration: int, parent_name: str = "", **options: Any) -> None:
        if "epoch" in record:
            self.unsaved.append((parent_name, dict(record)))

    def save_records(self) -> None:
        for table, record in self.unsaved:
            columns, marks = (", ".join(words) for words in (map('"{}"'.format, record), "?" * len(record)))
            self.database.execute(f'CREATE TABLE IF NOT EXISTS "{table}" ({columns})')
            self.database.execute(f'INSERT INTO "{table}" VALUES ({marks})', list(record.values()))
        self.unsaved.clear()


@pytest.fixture
def records() -> Records:
    """A record keeper for a HookContainer of pytorch-metric-learning, in place of the package record-keeper."""
    return Records()


@pytest.fixture
def lay() -> Callable[..., Path]:
    """Write a set of files into a folder, ``nested`` below one more folder; a number becomes a small PNG."""

    def picture(value: int) -> bytes:
        """A PNG, 4 x 3, the value in red and the column number in green."""
        pixels = np.zeros((3, 4, 3), dtype=np.uint8)
        pixels[..., 0] = value
        pixels[..., 1] = np.arange(4)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        return buffer.getvalue()

    def write(root: Path, files: dict[str, bytes | int], kind: str = "folder") -> Path:
        contents = {name: picture(data) if isinstance(data, int) else data for name, data in files.items()}
        if kind.startswith("nested"):
            contents = {f"images/{name}": data for name, data in contents.items()}
            contents["__MACOSX/cat/._1.png"] = b"junk"
        for name, data in contents.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(data)
        return root

    return write


@pytest.fixture
def tiny_config(tmp_path: Path) -> Callable[..., Any]:
    """Make the config of a tiny R-CNN of Detectron2, ``kind`` being "fpn" or "c4"."""
    config = pytest.importorskip("metricopt_ext.detection.detectron2.config", reason="needs Detectron2")

    def make(kind: str = "fpn", norm: str = "BN", *overrides: Any) -> Any:
        path = tmp_path / "tiny.yaml"
        path.write_text("VERSION: 2\n")
        options = {
            "MODEL.DEVICE": "cpu",
            "MODEL.WEIGHTS": "",
            "MODEL.RESNETS.DEPTH": 18,
            "MODEL.RESNETS.RES2_OUT_CHANNELS": 64,
            "MODEL.RESNETS.NORM": norm,
            "MODEL.BACKBONE.FREEZE_AT": 0,
            "MODEL.RPN.POST_NMS_TOPK_TRAIN": 50,
            "MODEL.RPN.POST_NMS_TOPK_TEST": 20,
            "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 16,
            "MODEL.ROI_HEADS.NUM_CLASSES": 2,
            "MODEL.ANCHOR_GENERATOR.SIZES": [[16, 32]],
            "INPUT.MIN_SIZE_TRAIN": (64,),
            "INPUT.MIN_SIZE_TEST": 64,
            "DATALOADER.NUM_WORKERS": 0,
            "SOLVER.IMS_PER_BATCH": 2,
            "SOLVER.MAX_ITER": 6,
            "OUTPUT_DIR": str(tmp_path / "out"),
            "METRICOPT.FILM.DIM": 4,
            "METRICOPT.FINETUNE.STEPS": 6,
            "METRICOPT.METRIC.EVALS": 3,
        }
        if kind == "fpn":
            options |= {
                "MODEL.BACKBONE.NAME": "build_resnet_fpn_backbone",
                "MODEL.RESNETS.OUT_FEATURES": ["res2", "res3", "res4", "res5"],
                "MODEL.FPN.IN_FEATURES": ["res2", "res3", "res4", "res5"],
                "MODEL.FPN.OUT_CHANNELS": 16,
                "MODEL.ANCHOR_GENERATOR.SIZES": [[8], [16], [32], [64], [128]],
                "MODEL.RPN.IN_FEATURES": ["p2", "p3", "p4", "p5", "p6"],
                "MODEL.ROI_HEADS.NAME": "StandardROIHeads",
                "MODEL.ROI_HEADS.IN_FEATURES": ["p2", "p3", "p4", "p5"],
                "MODEL.ROI_BOX_HEAD.NAME": "FastRCNNConvFCHead",
                "MODEL.ROI_BOX_HEAD.NUM_FC": 2,
                "MODEL.ROI_BOX_HEAD.FC_DIM": 32,
                "MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION": 7,
            }
        flat = [part for pair in options.items() for part in pair]
        return config.read_config(path, [*flat, *overrides])

    return make


@pytest.fixture
def double_nms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Detectron2 suppress boxes in double precision: it rounds boxes alone to single, which torchvision refuses."""
    box_ops = pytest.importorskip("torchvision.ops.boxes")
    suppress = box_ops.batched_nms
    monkeypatch.setattr(box_ops, "batched_nms", lambda boxes, scores, *rest: suppress(boxes.to(scores), scores, *rest))


Launched = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[Launched]:
    """Start a script in so many processes, as ``torchrun`` does; their output is one stream."""
    launched: list[subprocess.Popen[str]] = []

    def launch(script: str, world: int, *arguments: str, options: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
        path = tmp_path / "script.py"
        path.write_text(script)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        launched.append(
            subprocess.Popen(
                [*torchrun, *options, str(path), *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return launched[-1]

    yield launch
    for process in launched:
        if process.poll() is None:
            process.terminate()  # it ends its children
            process.communicate(timeout=300)


# What a rank has to be before its script.
RANK = """
import os, sys
os.environ |= {told!r}
sys.argv = {command!r}
sys.stdout = sys.stderr = open({printed!r}, "w", buffering=1)
"""


@pytest.fixture
def forked(tmp_path: Path) -> Callable[..., str]:
    """Run a script as so many ranks of torchrun, by processes that begin with imports; returns what they print.

    They are forked from a server: this process may have threads of autograd, after which a fork can't use it.
    """

    def launch(script: str, world: int, *arguments: str) -> str:
        context, processes, printed = multiprocessing.get_context("forkserver"), list[Any](), list[Path]()
        context.set_forkserver_preload(
            ["torch._dynamo", "torchvision", "sklearn.metrics", "metricopt_ext.methods.ask_and_tell"]
        )
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        told = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        for rank in range(world):
            own = told | {"RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_RUN_ID": "none"}
            path, output = tmp_path / f"script-{rank}.py", tmp_path / f"printed-{world}-{rank}.txt"
            begins = RANK.format(
                told={name: str(each) for name, each in own.items()},
                command=[str(path), *arguments],
                printed=str(output),
            )
            path.write_text(begins + script)
            processes.append(context.Process(target=runpy.run_path, args=(str(path), None, "__main__")))
            printed.append(output)
        try:
            for process in processes:
                process.start()
            until = time.monotonic() + 300
            for process in processes:
                process.join(timeout=max(0, until - time.monotonic()))
        finally:
            for process in processes:
                process.kill()
        said = "".join(each.read_text() for each in printed if each.exists())
        assert [process.exitcode for process in processes] == [0] * world, said
        return said

    return launch


@pytest.fixture
def catalog() -> Iterator[Any]:
    """Detectron2's catalog of sets, from which is taken out again what a test put in."""
    data = pytest.importorskip("detectron2.data", reason="needs Detectron2")
    before = set(data.DatasetCatalog.list())
    yield data.DatasetCatalog
    for name in set(data.DatasetCatalog.list()) - before:
        data.DatasetCatalog.remove(name)
        data.MetadataCatalog.remove(name)


class Html(HTMLParser):
    """What a browser would find in a page: elements with their attributes, and the texts in them."""

    EMPTY = ("meta", "img")  # without an end

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.tables: list[list[list[str]]] = []
        self._found: list[tuple[str, list[str]]] = []
        self._open: list[tuple[str, list[str]]] = []
        self.feed(text)
        self.close()
        assert not self._open

    def texts(self, name: str) -> list[str]:
        return ["".join(parts) for each, parts in self._found if each == name]

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag not in self.EMPTY:
            self._open.append((tag, []))

    def handle_endtag(self, tag: str) -> None:
        name, parts = self._open.pop()
        assert name == tag  # elements are nested
        self._found.append((name, parts))
        if tag in ("th", "td"):
            self.tables[-1][-1].append("".join(parts))

    def handle_data(self, data: str) -> None:
        for _, parts in self._open:
            parts.append(data)

    def check(self) -> None:
        """Reject scripts, whatever is loaded from elsewhere, and what a reader of the screen would miss."""
        names = [name for name, _ in self.elements]
        assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & set(names)
        for name, attributes in self.elements:
            assert not any(key.startswith("on") or key == "href" for key in attributes), name
            assert attributes.get("src", "data:image/png;base64,").startswith("data:image/png;base64,")
            assert name != "img" or attributes["alt"]
        assert not any(word in style for style in self.texts("style") for word in ("url(", "@import", "http"))
        assert self.elements[0] == ("html", {"lang": "en"})
        levels = [int(name[1]) for name in names if name in ("h1", "h2", "h3")]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(after <= before + 1 for before, after in pairwise(levels))


@pytest.fixture
def html() -> Callable[[str], Html]:
    """Read a page."""
    return Html
