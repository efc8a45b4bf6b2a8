"""The config files build what they say, by YAML and by LazyConfig, and the tool runs them."""

import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("detectron2", reason="needs Detectron2, installed from source")

from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import LazyConfig, instantiate
from detectron2.data import DatasetCatalog, DatasetMapper, MetadataCatalog, build_detection_test_loader
from detectron2.data.datasets import register_coco_instances
from detectron2.engine import SimpleTrainer, hooks
from detectron2.evaluation import COCOEvaluator, inference_on_dataset
from detectron2.modeling import build_model
from detectron2.solver import LRMultiplier
from detectron2.utils.logger import setup_logger

import metricopt_ext as mo
from helpers.own_detectors import write_discs
from helpers.programs import call
from metricopt_ext.detection.detectron2.config import ScenesNode, metricopt_settings, read_config
from metricopt_ext.detection.detectron2.placements import film_layers
from metricopt_ext.detection.detectron2.registered import ENTRY
from metricopt_ext.detection.records import DetectionSet
from metricopt_ext.detection.scenes import SceneShift, write_scenes
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.detection.voc import write_voc
from metricopt_ext.tasks.trajectories import TrajectoryStore
from metricopt_ext.tools import evaluate_ap50, finetune_detector

pytestmark = pytest.mark.detectron2

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = ROOT / "configs" / "detection" / "detectron2"
FILES = sorted(path.name for path in CONFIGS.glob("*.yaml") if not path.name.startswith("Base"))


@pytest.mark.parametrize("name", FILES)
def test_config_is_sound(name: str) -> None:
    cfg = read_config(CONFIGS / name, ["MODEL.DEVICE", "cpu"])
    settings = metricopt_settings(cfg)
    parts = {match["name"]: match for match in map(ENTRY.fullmatch, settings.datasets.register) if match is not None}
    assert len(parts) == len(settings.datasets.register)
    assert set(cfg.DATASETS.TRAIN) < set(parts)
    assert settings.metric.set in parts
    assert settings.metric.set not in cfg.DATASETS.TRAIN
    assert cfg.DATASETS.TEST == ()  # nothing asks it by the way
    assert settings.datasets.scenes == ScenesNode() or name == "scenes.yaml"
    trained_on = [parts[name].group("folder", "split", "first", "last") for name in cfg.DATASETS.TRAIN]
    folder, split, first, last = parts[settings.metric.set].group("folder", "split", "first", "last")
    for other in trained_on:
        assert other[:2] != (folder, split) or (other[2:] == (None, first) and last is None)
    if settings.datasets.classes:
        assert len(settings.datasets.classes) == cfg.MODEL.ROI_HEADS.NUM_CLASSES
    model, film = build_model(cfg), settings.film
    assert mo.attach_film(model, film_layers(model, film.layers), dim=film.dim).dim == film.dim


@pytest.fixture
def folder(squares: Callable[..., DetectionSet], tmp_path: Path) -> Path:
    """A VOC folder of squares with the splits train and val."""
    for seed, split in enumerate(("train", "val")):
        data = squares(4, seed=seed)
        examples = [Example(image.load(), image) for image in data.images]
        write_voc(tmp_path / "squares", examples, data.classes, split)
    return tmp_path / "squares"


def test_lazy_config_runs(tmp_path: Path) -> None:
    cfg = LazyConfig.load(str(CONFIGS / "lazy_scenes.py"))
    cfg = LazyConfig.apply_overrides(
        cfg,
        [
            *(f"data.root.folder={tmp_path / 'scenes'}", "data.root.images=[4,3,1]", "train.max_iter=3"),
            *("train.device=cpu", f"train.output_dir={tmp_path / 'out'}", "dataloader.train.total_batch_size=2"),
            *("hooks.evals=2", f"hooks.store.folder={tmp_path / 'kept'}"),
        ],
    )
    torch.manual_seed(0)
    model = instantiate(cfg.model)
    cfg.optimizer.params.model = cfg.hooks.model = model
    optimizer = instantiate(cfg.optimizer)
    assert isinstance(optimizer, torch.optim.SGD)
    trainer = SimpleTrainer(model, instantiate(cfg.dataloader.train), optimizer)
    rate = LRMultiplier(optimizer, instantiate(cfg.lr_multiplier), cfg.train.max_iter)  # as Detectron2's tool does
    trainer.register_hooks([*instantiate(cfg.hooks), hooks.LRScheduler(scheduler=rate)])
    trainer.train(0, cfg.train.max_iter)
    assert optimizer.param_groups[0]["lr"] == 0.1
    (trajectory,) = TrajectoryStore(tmp_path / "kept")
    assert trajectory.phi.shape == (4, 32)
    assert torch.equal(trajectory.observed_phi[trajectory.cost.argmin()], model.metricopt.phi)
    assert trajectory.phi[-1].norm() > 0
    assert (tmp_path / "out" / "model_best.pth").exists()
    assert (tmp_path / "out" / "model_merged.pth").exists()


# --- The tool ------------------------------------------------------------------------------------------------


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Call tools/train_detector.py as the command line does, each time as in a process of its own."""
    spec = importlib.util.spec_from_file_location("train_detector", ROOT / "tools" / "train_detector.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    before = set(DatasetCatalog.list())

    def forget() -> None:
        for name in set(DatasetCatalog.list()) - before:
            DatasetCatalog.remove(name)
            MetadataCatalog.remove(name)
        for name in ("detectron2", "fvcore"):
            logging.getLogger(name).handlers.clear()
        setup_logger.cache_clear()

    def call(*arguments: Any) -> None:
        forget()
        monkeypatch.setattr(sys, "argv", ["train_detector.py", *map(str, arguments)])
        module.main()

    call.module = module  # type: ignore[attr-defined]
    yield call
    forget()


@pytest.mark.slow
def test_tool_trains_and_finetunes(
    tool: Callable[..., Any], tiny_config: Any, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = tiny_config("fpn", "BN", "SOLVER.MAX_ITER", 60, "SOLVER.BASE_LR", 0.01, "SOLVER.WARMUP_ITERS", 5)
    cfg.SOLVER.CLIP_GRADIENTS.ENABLED, cfg.SOLVER.CLIP_GRADIENTS.CLIP_TYPE = True, "norm"
    cfg.METRICOPT.DATASETS.REGISTER = ["train=squares:train", "val=squares:val"]
    cfg.METRICOPT.DATASETS.ROOT = str(tmp_path)
    cfg.METRICOPT.METRIC.SET = "val"
    cfg.METRICOPT.METRIC.EVALS = 3
    cfg.METRICOPT.FINETUNE.STEPS = 2
    cfg.METRICOPT.META.ROUNDS = 2
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST, cfg.SEED = ("train",), (), 1
    cfg.MODEL.DEVICE = "cuda"  # --num-gpus 0 says otherwise
    file, out, f = tmp_path / "all.yaml", tmp_path / "out", tmp_path / "f.safetensors"
    file.write_text(cfg.dump())
    always = ("--config-file", file, "--num-gpus", 0)

    tool(*always, "OUTPUT_DIR", out)
    weights = ("MODEL.WEIGHTS", out / "model_final.pth")
    tool(*always, "--meta-train", f, *weights, "OUTPUT_DIR", tmp_path / "meta")
    shown = capsys.readouterr().out
    assert "value function (" in shown
    assert re.search(r"24(/| of )24 queries", shown)
    assert len(list((tmp_path / "meta" / "trajectories").glob("round-*"))) == 8

    def score(*options: Any) -> str:
        capsys.readouterr()
        tool(*always, *options, "DATASETS.TEST", "('val',)")
        lines = [line for line in capsys.readouterr().out.splitlines() if "copypaste: " in line and "," not in line]
        assert len(lines) == 3  # Task: bbox, AP50 and its value: it is asked once
        return lines[-1].rsplit(" ", 1)[-1]

    tuned = score(
        *weights, "METRICOPT.ENABLED", True, "METRICOPT.FINETUNE.VALUE_FUNCTION", f, "OUTPUT_DIR", tmp_path / "tuned",
        "METRICOPT.FINETUNE.LR", 1.0,
    )  # fmt: skip

    assert (tmp_path / "tuned" / "model_0000001.pth").exists()  # Detectron2's own period is 5000 steps
    merged = torch.load(tmp_path / "tuned" / "model_merged.pth", weights_only=True)["model"]
    assert merged.keys() == torch.load(out / "model_final.pth", weights_only=True)["model"].keys()
    judged = ("--eval-only", "OUTPUT_DIR", tmp_path / "judged", "MODEL.WEIGHTS")
    as_adapter = score(*judged, tmp_path / "tuned" / "model_best.pth", "METRICOPT.ENABLED", True)
    assert 0 < float(as_adapter) < 100
    assert as_adapter == tuned == score(*judged, tmp_path / "tuned" / "model_merged.pth")
    results = json.loads((tmp_path / "judged" / "results.json").read_text())
    assert results["val"]["bbox"].keys() == {"AP50", "AP50-green", "AP50-red"}
    assert f"{results['val']['bbox']['AP50']:.4f}" == tuned
    evaluated = [json.loads(line) for line in (tmp_path / "tuned" / "metrics.json").read_text().splitlines()]
    best = max(line["val/bbox/AP50"] for line in evaluated if "val/bbox/AP50" in line)
    assert f"{best:.4f}" == f"{evaluated[-1]['val/bbox/AP50_best']:.4f}" == tuned
    with pytest.raises(SystemExit, match=r"model_best\.pth holds a phi"):
        score(*judged, tmp_path / "tuned" / "model_best.pth")
    with pytest.raises(SystemExit, match=r"^1$"):
        score(*judged, out / "model_final.pth", "TEST.EXPECTED_RESULTS", "[['bbox', 'AP50', 101.0, 0.1]]")


@pytest.mark.slow
def test_tool_searches(tool: Callable[..., Any], tiny_config: Any, folder: Path, tmp_path: Path) -> None:
    cfg = tiny_config("fpn", "BN", "METRICOPT.SEARCH.QUERIES", 7, "METRICOPT.METRIC.SET", "val")
    cfg.METRICOPT.DATASETS.update(REGISTER=["train=squares:train", "val=squares:val"], ROOT=str(tmp_path))
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("train",), ("val",)
    file, weights, out = tmp_path / "all.yaml", tmp_path / "detector.pth", Path(cfg.OUTPUT_DIR)
    file.write_text(cfg.dump())
    torch.save({"model": build_model(cfg).state_dict()}, weights)
    options = ("--config-file", file, "--num-gpus", 0, "--search", "MODEL.WEIGHTS", weights)
    tool(*options)
    spent = sum('"value"' in line for line in (out / "search" / "log.jsonl").read_text().splitlines())
    assert spent in (6, 7)  # without an end if it finds nothing anywhere
    merged = torch.load(out / "model_merged.pth", weights_only=True)["model"]
    assert merged.keys() == torch.load(weights, weights_only=True)["model"].keys()
    written = [json.loads(line) for line in (out / "metrics.json").read_text().splitlines()]
    assert [line["iteration"] for line in written if "val/bbox/AP50" in line][:spent] == list(range(1, spent + 1))
    with pytest.raises(SystemExit, match=r"already holds.*--resume to continue it"):
        tool(*options)
    tool("--resume", *options)
    parts = (
        f"data.train={folder / 'ImageSets' / 'Main' / 'train.txt'}",
        f"data.val={folder / 'ImageSets/Main/val.txt'}",
    )
    tool(*options, *parts, "OUTPUT_DIR", tmp_path / "parts", "DATASETS.TEST", ())
    again = torch.load(tmp_path / "parts" / "model_merged.pth", weights_only=True)["model"]
    assert all(torch.equal(merged[name], again[name]) for name in merged)  # the same sets by other names
    with pytest.raises(SystemExit, match=r"model_merged\.pth.*give another"):
        tool("--config-file", file, "--num-gpus", 0, "--search", "MODEL.WEIGHTS", out / "model_merged.pth")
    with pytest.raises(SystemExit, match="2"):
        tool("--eval-only", *options)


RETINANET = """
MODEL:
  META_ARCHITECTURE: RetinaNet
  BACKBONE: {NAME: build_retinanet_resnet_fpn_backbone}
  RESNETS: {OUT_FEATURES: [res3, res4, res5]}
  ANCHOR_GENERATOR:
    SIZES: !!python/object/apply:eval ["[[x, x * 2**(1.0/3), x * 2**(2.0/3) ] for x in [8, 16, 32, 64, 128 ]]"]
  FPN: {IN_FEATURES: [res3, res4, res5]}
  RETINANET: {NUM_CLASSES: 1, SCORE_THRESH_TEST: 0.0}
"""  # as Detectron2's own Base-RetinaNet.yaml has it, but for sizes
RCNN = """
MODEL:
  ROI_HEADS: {NUM_CLASSES: 1, SCORE_THRESH_TEST: 0.0}
  RPN: {POST_NMS_TOPK_TEST: 300}
TEST: {DETECTIONS_PER_IMAGE: 100}
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rcnn", "retinanet"])
def test_a_detector_has_one_ap50(kind: str, tool: Any, catalog: Any, tiny_config: Any, tmp_path: Path) -> None:
    """By each of our tools and by Detectron2's evaluator and loader, which show it one picture at a time."""
    (tmp_path / "data").mkdir()
    file, data = tmp_path / "all.yaml", tmp_path / "data"
    parts = {part: write_discs(data / f"{part}.json", seed, 6) for seed, part in enumerate(("train", "val", "test"))}
    (tmp_path / "base.yaml").write_text(tiny_config("fpn", "BN").dump())
    file.write_text(f"_BASE_: base.yaml\n{RETINANET if kind == 'retinanet' else RCNN}")
    own = [f"data.{part}={path}" for part, path in parts.items()]
    always = ("--config-file", file, "--num-gpus", 0)
    # Until it finds some, and not so fast that it finds none.
    training = ("SOLVER.MAX_ITER", 30) if kind == "rcnn" else ("SOLVER.BASE_LR", 0.002)
    tool(*always, "OUTPUT_DIR", tmp_path / "out", "SEED", 1, "SOLVER.BASE_LR", 0.01, *training, own[0])
    trained = ("MODEL.WEIGHTS", tmp_path / "out" / "model_final.pth")
    tool(*always, "--search", *trained, "OUTPUT_DIR", tmp_path / "found", "METRICOPT.SEARCH.QUERIES", 7, *own[:2])
    weights = tmp_path / "found" / "model_merged.pth"
    tool(*always, "--eval-only", "MODEL.WEIGHTS", weights, "OUTPUT_DIR", tmp_path / "judged", own[2])
    ways = [json.loads((tmp_path / "judged" / "results.json").read_text())["own_test"]["bbox"]["AP50"] / 100]

    cfg = read_config(file)
    model = build_model(cfg).eval()
    DetectionCheckpointer(model).load(str(weights))
    register_coco_instances("stock_test", {}, str(parts["test"]), str(data))
    loader = build_detection_test_loader(cfg, "stock_test", mapper=DatasetMapper(cfg, is_train=False))
    evaluator = COCOEvaluator("stock_test", ("bbox",), False, str(tmp_path / "stock"))
    ways.append(inference_on_dataset(model, loader, evaluator)["bbox"]["AP50"] / 100)

    model_there = {"config_file": str(file), "opts": ["MODEL.WEIGHTS", str(weights)], "steps": 0}
    layers = ["head.*"] if kind == "retinanet" else ["roi_heads.box_head.*"]
    content = {
        "toolkit": "detectron2",
        "model": model_there,
        "adapter": {"layers": layers, "dim": 3},
        "device": "cpu",
        "data": {"name": "coco", **{part: str(path) for part, path in parts.items()}},
        "methods": [],
        "queries": 12,
        "seeds": 1,
        "workers": 1,
        "finetune": {"steps": 2},
        "best_evals": 2,
        "batch_size": 2,
    }
    (tmp_path / "run.yaml").write_text(json.dumps(content))
    words, run = ("--config-file", tmp_path / "run.yaml"), tmp_path / "run"
    call(finetune_detector, *words, "--output-dir", run)
    ways += json.loads((run / "report.json").read_text())["methods"]["pretrained"]["test"]
    judged = ("--annotations", parts["test"], "--images-dir", data, "--output-dir", run, "--weights", weights)
    call(evaluate_ap50, *words, *judged)
    ways.append(json.loads((run / "report.json").read_text())["ap50"]["coco"]["mean"])
    assert 0 < min(ways) == pytest.approx(max(ways), abs=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["MODEL.ROI_HEADS.NUM_CLASSES", 3],
            "3; train has 2 classes: green, red",
        ),
        (["--eval-only", "DATASETS.TEST", "('train',)", "MODEL.WEIGHTS", __file__], ".py can't be loaded"),
        (["TEST.AUG.ENABLED", True], "TEST.AUG.ENABLED: AP50 is evaluated"),
        (
            ["METRICOPT.SEARCH.QUERYS", 3],
            "you mean ['METRICOPT.SEARCH.QUERIES'",
        ),
        (["--search"], "trained detector: MODEL.WEIGHTS is ''"),
        (["SOLVER.AMP.ENABLED", True], "True, but no GPU was found"),
        (["MODEL.WEIGHTS", "m.pth"], "MODEL.WEIGHTS=m.pth: there is no such"),
    ],
)
def test_tool_s_errors(
    options: list[Any],
    message: str,
    tool: Callable[..., Any],
    tiny_config: Any,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cfg = tiny_config()
    cfg.METRICOPT.DATASETS.REGISTER = ["train=squares:train"]
    cfg.METRICOPT.DATASETS.ROOT = str(tmp_path)
    cfg.DATASETS.TRAIN = ("train",)
    (tmp_path / "all.yaml").write_text(cfg.dump())
    with pytest.raises(SystemExit, match=re.escape(message)):
        tool("--config-file", tmp_path / "all.yaml", "--num-gpus", 0, *options)


def test_tool_writes_the_scenes(tool: Callable[..., Any], tiny_config: Any, tmp_path: Path) -> None:
    cfg = tiny_config("fpn", "BN", "MODEL.ROI_HEADS.NUM_CLASSES", 10, "SOLVER.MAX_ITER", 1)
    cfg.METRICOPT.DATASETS.REGISTER, cfg.METRICOPT.DATASETS.ROOT = ["train=scenes:train"], str(tmp_path / "data")
    cfg.METRICOPT.DATASETS.CLASSES = tuple("0123456789")
    cfg.METRICOPT.DATASETS.SCENES.update(FOLDER="scenes", IMAGES=(3, 2, 1), SEED=4)
    cfg.METRICOPT.DATASETS.SCENES.SHIFT.update(CONTRAST=0.3, NOISE_STD=0.03, SCALE=0.8)
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("train",), ()
    (tmp_path / "all.yaml").write_text(cfg.dump())
    tool("--config-file", tmp_path / "all.yaml", "--num-gpus", 0)
    shift = SceneShift(contrast=0.3, noise_std=0.03, scale=0.8)
    expected = write_scenes(tmp_path / "expected", images=(3, 2, 1), seed=4, shift=shift)
    written = tmp_path / "data" / "scenes"
    files = {path.relative_to(expected) for path in expected.rglob("*") if path.is_file()}
    assert files == {path.relative_to(written) for path in written.rglob("*") if path.is_file()}
    assert all((written / file).read_bytes() == (expected / file).read_bytes() for file in files)


def test_tool_does_not_write_over_the_detector(
    tool: Callable[..., Any], tiny_config: Any, folder: Path, tmp_path: Path
) -> None:
    cfg = tiny_config("fpn", "BN", "METRICOPT.ENABLED", True)
    cfg.METRICOPT.DATASETS.update(REGISTER=["train=squares:train"], ROOT=str(tmp_path))
    cfg.DATASETS.TRAIN = ("train",)
    (tmp_path / "all.yaml").write_text(cfg.dump())
    Path(cfg.OUTPUT_DIR).mkdir()
    for name, message in (
        ("model_final.pth", "model_final.pth, which would be overwritten; give another"),
        ("detector.pth", "detector.pth can't be loaded"),  # of no kind that a run writes: the next error is its own
    ):
        file = Path(cfg.OUTPUT_DIR) / name
        file.touch()
        with pytest.raises(SystemExit, match=message):
            tool("--config-file", tmp_path / "all.yaml", "--num-gpus", 0, "MODEL.WEIGHTS", file, "DATASETS.TEST", "()")


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ("metricopt_ext.errors.DataError: none.json is\nmissing", "none.json is missing"),
        ("OSError: [Errno 28] No space left on device", "[Errno 28] No space left on device"),
        ("AssertionError", None),  # an error without a message
        ("torch.cuda.OutOfMemoryError: CUDA out of memory", None),
    ],
)
def test_an_error_of_another_process_is_told_by_its_last_line(last: str, said: str | None, tool: Any) -> None:
    traceback = f"-- Process 1 terminated:\nTraceback (most recent call last):\n  File 'a.py', line 1\n{last}\n"
    assert tool.module.in_one_line(traceback) == said


def test_tool_without_detectron2(tmp_path: Path) -> None:
    (tmp_path / "detectron2.py").write_text("raise ModuleNotFoundError(\"No module\", name='detectron2')\n")
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, ROOT / "tools" / "train_detector.py"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: this needs detectron2: pip install --no-build-isolation git+")
