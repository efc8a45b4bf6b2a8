"""Two processes find one phi, and both know what the metric said."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import distributed

pytest.importorskip("detectron2", reason="needs Detectron2, installed from source")

from detectron2.modeling import build_model
from detectron2.utils import comm
from detectron2.utils.env import seed_all_rng

from metricopt_ext.detection.detectron2.datasets import register
from metricopt_ext.detection.detectron2.search import search
from metricopt_ext.detection.detectron2.trainer import MetricOptTrainer
from metricopt_ext.detection.records import DetectionSet
from metricopt_ext.runtime.distributed import left_in_order
from metricopt_ext.runtime.identity import fingerprint
from metricopt_ext.tasks.metric import Metric

pytestmark = pytest.mark.detectron2


@pytest.fixture(autouse=True)
def _pair_in_catalog(catalog: Any, squares: Callable[..., DetectionSet]) -> None:
    for seed, name in enumerate(("pair_train", "pair_val")):
        register(name, squares(5, seed=seed))


def join(rank: int, folder: Path) -> None:
    """Become one of two processes of Detectron2."""
    torch.set_num_threads(1)
    meeting, patience = f"file://{folder / 'meeting'}", timedelta(minutes=10)
    distributed.init_process_group("gloo", init_method=meeting, world_size=2, rank=rank, timeout=patience)
    comm._LOCAL_PROCESS_GROUP = distributed.new_group()  # as Detectron2's launch does in any release
    seed_all_rng(rank)  # as Detectron2 does: the global streams differ


def of_detector(tiny_config: Any, folder: Path, *overrides: Any) -> Any:
    """Return the config of an untrained detector on disk, with a folder of its own for what is written."""
    folder.mkdir()
    cfg = tiny_config(
        *("fpn", "BN", "DATASETS.TRAIN", ("pair_train",), "METRICOPT.METRIC.SET", "pair_val"),
        *("METRICOPT.METRIC.EVALS", 2, "METRICOPT.FINETUNE.STEPS", 2, "METRICOPT.META.ROUNDS", 2),
        *("SOLVER.CHECKPOINT_PERIOD", 100, "OUTPUT_DIR", str(folder / "out"), *overrides),
    )
    cfg.MODEL.WEIGHTS = str(folder / "detector.pth")
    seed_all_rng(0)
    torch.save({"model": build_model(cfg).state_dict()}, cfg.MODEL.WEIGHTS)
    return cfg


@left_in_order()
def look(rank: int, cfg: Any, folder: Path, processes: int) -> None:
    if processes > 1:
        join(rank, folder)
    seen: list[int] = []

    def value(model: Any) -> float:
        assert comm.get_world_size() == 1  # each evaluates by itself
        seen.append(rank)
        return float(model.metricopt.phi.sum().sigmoid())

    metric = Metric(value, maximize=True)
    MetricOptTrainer.build_metric = staticmethod(lambda cfg: metric)
    run = search(cfg)
    torch.save({"phi": run.ends[run.chosen], "after": run.after, "seen": len(seen)}, folder / f"rank{rank}.pth")


@pytest.mark.slow
def test_two_processes_find_the_phi_of_one(tiny_config: Any, tmp_path: Path) -> None:
    kept = {}
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        cfg = of_detector(tiny_config, folder, "METRICOPT.SEARCH.QUERIES", 24)
        mp.start_processes(look, (cfg, folder, processes), nprocs=processes, start_method="fork")
        out = folder / "out"
        ends = [torch.load(folder / f"rank{rank}.pth", weights_only=True) for rank in range(processes)]
        seen = [each.pop("seen") for each in ends]
        assert sum(seen) == 24 + (len(seen) > 1)  # both evaluate the first: what they find must be the same
        assert min(seen) >= 24 // processes - 3
        assert all(torch.equal(each["phi"], ends[0]["phi"]) and each["after"] == ends[0]["after"] for each in ends)
        files = [*(out / "search").glob("*.safetensors"), out / "search" / "log.jsonl"]
        merged = torch.load(out / "model_merged.pth", weights_only=True)["model"]
        kept[processes] = {path.name: path.read_bytes() for path in files}, fingerprint(merged)
        assert len((out / "metrics.json").read_text().splitlines()) == 25  # each query, and the outcome
    assert kept[1] == kept[2]
