"""Two processes finetune one phi, and both know what the metric said."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import distributed

pytest.importorskip("detectron2", reason="needs Detectron2, installed from source")

from detectron2.data import build_detection_train_loader
from detectron2.engine import SimpleTrainer
from detectron2.modeling import build_model
from detectron2.utils import comm
from detectron2.utils.env import seed_all_rng

from metricopt_ext.detection.detectron2.build import (
    finetuning_hooks,
    main_process_folder,
    phi_of,
    phi_optimizer,
    with_film,
)
from metricopt_ext.detection.detectron2.datasets import register
from metricopt_ext.detection.detectron2.meta_train import meta_train
from metricopt_ext.detection.detectron2.search import search
from metricopt_ext.detection.detectron2.trainer import MetricOptTrainer, trajectory_store
from metricopt_ext.detection.records import DetectionSet
from metricopt_ext.errors import MetricOptError
from metricopt_ext.runtime.distributed import left_in_order
from metricopt_ext.runtime.identity import fingerprint
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.trajectory import TrajectoryStore
from metricopt_ext.value.loading import load_value_function
from metricopt_ext.value.value_function import Quality, RidgeValueFunction

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


@left_in_order()
def finetune(rank: int, cfg: Any, folder: Path) -> None:
    join(rank, folder)
    model = with_film(build_model(cfg), dim=4, start_std=0.1)
    start = model.metricopt.phi.detach().clone()
    optimizer = phi_optimizer(phi_of(model), value_function=str(folder / "f.safetensors"), lr=0.01, steps=3)
    wrapped = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    trainer = SimpleTrainer(wrapped, build_detection_train_loader(cfg), optimizer)
    metric, store = MetricOptTrainer.build_metric(cfg), TrajectoryStore(main_process_folder(str(folder / "kept")))
    trainer.register_hooks(finetuning_hooks(wrapped, metric, store, steps=3, evals=3, output_dir=folder / "out"))
    trainer.train(0, 3)
    (trajectory,) = store
    torch.save(
        {
            "start": start,
            "phi": model.metricopt.phi.detach(),
            "recorded": trajectory.phi,
            "loss": trajectory.loss,
            "cost": trajectory.cost,
            "best": trajectory.observed_phi[trajectory.cost.argmin()],
            "sampled": torch.rand(3),
        },
        folder / f"rank{rank}.pth",
    )


def test_two_processes_end_with_one_phi(tiny_config: Any, tmp_path: Path) -> None:
    f = RidgeValueFunction(4)
    f.coefficients.copy_(torch.linspace(-1, 1, 8)[:, None])
    f.set_domain(torch.randn(50, 4, generator=torch.Generator().manual_seed(0)))
    f.quality = Quality(0.9, 0.01, 0.1, 50, 10, 0.01, 0.1)
    f.save(tmp_path / "f.safetensors")
    cfg = tiny_config(
        *("fpn", "BN", "DATASETS.TRAIN", ("pair_train",), "METRICOPT.METRIC.SET", "pair_val"),
        *("MODEL.ROI_HEADS.SCORE_THRESH_TEST", 0.0),
    )
    mp.start_processes(finetune, (cfg, tmp_path), nprocs=2, start_method="fork")
    first, second = (torch.load(tmp_path / f"rank{rank}.pth", weights_only=True) for rank in (0, 1))
    sampled = first.pop("sampled"), second.pop("sampled")
    assert not torch.equal(*sampled)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(first["recorded"][0], first["start"])
    assert not torch.equal(first["recorded"][-1], first["start"])
    assert torch.equal(first["phi"], first["best"])
    assert (tmp_path / "out" / "model_merged.pth").exists()
    assert len(TrajectoryStore(tmp_path / "kept")) == 1


@left_in_order()
def learn(rank: int, cfg: Any, folder: Path, processes: int = 2) -> None:
    if processes > 1:
        join(rank, folder)
    # The metric reacts to phi though the detector is untrained.
    metric = Metric(lambda model: float(model.metricopt.phi.sum().sigmoid()), maximize=True)
    MetricOptTrainer.build_metric = staticmethod(lambda cfg: metric)
    fit = meta_train(cfg, folder / "f.safetensors")
    torch.save({"told": fit.f(torch.eye(4))}, folder / f"rank{rank}.pth")


@left_in_order()
def refuse(rank: int, cfg: Any, folder: Path, name: str) -> None:
    join(rank, folder)
    try:
        meta_train(cfg, folder / name)
    except MetricOptError as error:
        (folder / f"rank{rank}.txt").write_text(str(error))
    distributed.barrier()  # which a process that waits for another elsewhere would not pass


@pytest.mark.parametrize(
    ("name", "message"), [("f.pth", "must end in .safetensors"), ("f.safetensors", "METRICOPT.SEED was 1, now 0")]
)
def test_what_the_main_process_refuses_ends_all(name: str, message: str, tiny_config: Any, tmp_path: Path) -> None:
    cfg = tiny_config("fpn", "BN", "DATASETS.TRAIN", ("pair_train",), "METRICOPT.METRIC.SET", "pair_val")
    cfg.MODEL.WEIGHTS = "detector.pth"
    other = cfg.clone()
    other.METRICOPT.SEED, other.METRICOPT.META.TRAJECTORIES = 1, str(tmp_path / "out" / "trajectories")
    other.METRICOPT.FINETUNE.START_STD = 0.2
    trajectory_store(other, other.METRICOPT.META.TRAJECTORIES)
    mp.start_processes(refuse, (cfg, tmp_path, name), nprocs=2, start_method="fork")
    first, second = ((tmp_path / f"rank{rank}.txt").read_text() for rank in (0, 1))
    assert message in first
    assert first == second


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


@pytest.mark.slow
def test_two_processes_learn_the_f_of_one(tiny_config: Any, tmp_path: Path) -> None:
    kept = {}
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        cfg = of_detector(tiny_config, folder)
        mp.start_processes(learn, (cfg, folder, processes), nprocs=processes, start_method="fork")
        trajectories = (folder / "out" / "trajectories").glob("round-*")
        kept[processes] = {path.name: path.read_bytes() for path in [folder / "f.safetensors", *trajectories]}
        f = load_value_function(folder / "f.safetensors", 4)
        for rank in range(processes):
            assert torch.equal(torch.load(folder / f"rank{rank}.pth", weights_only=True)["told"], f(torch.eye(4)))
        assert f.quality.trajectories > 0
        assert not (folder / "out" / "meta_train").exists()
    assert len(kept[1]) == 9
    assert kept[1] == kept[2]


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
        files = [*(out / "search").glob("*.safetensors"), out / "search" / "evaluations.json"]
        merged = torch.load(out / "model_merged.pth", weights_only=True)["model"]
        kept[processes] = {path.name: path.read_bytes() for path in files}, fingerprint(merged)
        assert len((out / "metrics.json").read_text().splitlines()) == 25  # each query, and the outcome
    assert kept[1] == kept[2]
