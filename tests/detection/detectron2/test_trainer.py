"""Detectron2's trainers finetune phi: MetricOpt under their optimizer, trajectories and the best model by hooks."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

pytest.importorskip("detectron2", reason="needs Detectron2, installed from source")

from detectron2.checkpoint import DetectionCheckpointer
from detectron2.engine import DefaultTrainer, hooks
from detectron2.evaluation import DatasetEvaluator
from detectron2.modeling import build_model
from detectron2.structures import Boxes, Instances
from detectron2.utils.env import seed_all_rng
from detectron2.utils.logger import _LOG_COUNTER

import metricopt_ext as mo
from metricopt_ext.adapters.signature import Signature
from metricopt_ext.detection.detectron2.datasets import register
from metricopt_ext.detection.detectron2.hooks import LOGGER
from metricopt_ext.detection.detectron2.trainer import MetricOptTrainer, trajectory_store
from metricopt_ext.detection.records import DetectionSet
from metricopt_ext.errors import FileFormatError
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.trajectories import Trajectory, observation_steps
from metricopt_ext.utils.seeding import generator
from metricopt_ext.value.value_function import NeuralValueFunction, Quality

pytestmark = pytest.mark.detectron2

FINETUNING = [
    *("METRICOPT.ENABLED", True, "METRICOPT.FINETUNE.START_STD", 0.1, "METRICOPT.FINETUNE.LR", 0.01),
    *("METRICOPT.METRIC.SET", "squares_val", "METRICOPT.METRIC.EVALS", 3, "MODEL.ROI_HEADS.SCORE_THRESH_TEST", 0.0),
    *("DATASETS.TRAIN", ("squares_train",), "DATASETS.TEST", ("squares_test",), "SOLVER.CHECKPOINT_PERIOD", 3),
]


@pytest.fixture(autouse=True)
def _squares_in_catalog(catalog: Any, squares: Callable[..., DetectionSet]) -> None:
    for seed, name in enumerate(("squares_train", "squares_val", "squares_test")):
        register(name, squares(4, seed=seed))


def save_f(path: Path, signature: Signature | None = None, dim: int = 4) -> NeuralValueFunction:
    f = NeuralValueFunction.drawn(dim, 1, torch.Generator().manual_seed(0))
    f.set_domain(torch.randn(50, dim, generator=torch.Generator().manual_seed(0)))
    f.quality, f.signature = Quality(0.9, 0.01, 0.1, 50, 10, 0.01, 0.1), signature
    f.save(path)
    return f


class KilledError(Exception):
    """What a test stops a run with."""


class Kill(hooks.HookBase):
    def __init__(self, at: int) -> None:
        self.at = at

    def after_step(self) -> None:
        if self.trainer.iter + 1 == self.at:
            raise KilledError


def trained(cfg: Any, *, resume: bool = False, kill_at: int | None = None) -> MetricOptTrainer:
    """Train as a process of its own would, in which global streams are in any state."""
    seed_all_rng(17 if resume else 4)
    made = MetricOptTrainer(cfg)
    made.resume_or_load(resume)
    if kill_at is None:
        made.train()
        return made
    made.register_hooks([Kill(kill_at)])
    with pytest.raises(KilledError):
        made.train()
    return made


def phi_of(made: Any) -> Tensor:
    return made.model.metricopt.phi.detach().clone()


def phi_in(path: Path) -> Tensor:
    return torch.load(path, weights_only=True)["model"]["metricopt.phi"]


def observed(trajectory: Trajectory) -> tuple[list[int], list[float]]:
    return trajectory.observed.tolist(), trajectory.cost.tolist()


def written(folder: Path, name: str) -> dict[int, float]:
    """Return a scalar of ``metrics.json`` by iteration."""
    lines = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    return {line["iteration"]: line[name] for line in lines if name in line}


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    """What this package says in Detectron2's log; warnings that were given once may be given again."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    _LOG_COUNTER.clear()
    LOGGER.addHandler(handler)
    yield records
    LOGGER.removeHandler(handler)


@pytest.mark.parametrize("followed", [False, True])
def test_resumed_run_is_the_run(followed: bool, tiny_config: Any, tmp_path: Path) -> None:
    options = [*FINETUNING, "METRICOPT.META.INDEX", 5, "SOLVER.CHECKPOINT_PERIOD", 2]
    if followed:
        save_f(tmp_path / "f.safetensors")
        options += ["METRICOPT.FINETUNE.VALUE_FUNCTION", str(tmp_path / "f.safetensors")]
    outcomes = []
    for name in ("straight", "resumed"):
        folder, kept = tmp_path / name, tmp_path / f"{name}-trajectories"
        cfg = tiny_config("fpn", "BN", *options, "OUTPUT_DIR", str(folder), "METRICOPT.META.TRAJECTORIES", str(kept))
        if name == "resumed":
            trained(cfg, kill_at=5)
            assert [file.name for file in folder.glob("model_0*")] == ["model_0000003.pth"]  # after the fourth
        made = trained(cfg, resume=name == "resumed")
        (trajectory,) = trajectory_store(cfg, str(kept))
        assert torch.equal(phi_of(made), phi_in(folder / "model_best.pth"))
        assert written(folder, "squares_val/bbox/AP50") == {
            step: pytest.approx(-cost) for step, cost in zip(*observed(trajectory), strict=True)
        }
        outcomes.append((phi_in(folder / "model_final.pth"), trajectory, phi_of(made)))
    (phi, straight, best), (again, resumed, best_again) = outcomes
    assert torch.equal(phi, again)
    for field in ("phi", "loss", "observed", "cost"):
        assert torch.equal(getattr(straight, field), getattr(resumed, field))
    assert torch.equal(best, best_again)
    assert torch.equal(straight.phi[-1], phi)
    assert len(straight.phi.unique(dim=0)) == 7
    assert torch.equal(straight.observed, observation_steps(6, 3, 0, 5))
    assert torch.equal(best, straight.observed_phi[straight.cost.argmin()])
    start = 0.1 * torch.randn(4, generator=generator(0, "start", 5))
    assert torch.equal(straight.phi[0], start)


def test_a_run_goes_on_from_its_own_checkpoints_alone(tiny_config: Any, tmp_path: Path) -> None:
    options = [*FINETUNING, "METRICOPT.FINETUNE.STEPS", 2, "METRICOPT.METRIC.EVALS", 2, "DATASETS.TEST", ()]
    weights = [str(tmp_path / f"{name}.pth") for name in ("one", "other")]
    for path in weights:
        torch.save({"model": build_model(tiny_config()).state_dict()}, path)
    one, other = (tiny_config("fpn", "BN", *options, "MODEL.WEIGHTS", path) for path in weights)
    trained(one)
    trained(one, resume=True)
    for change, key in (
        (["MODEL.WEIGHTS", weights[1]], r"MODEL\.WEIGHTS was 'one\.pth \(\w{16}\)', now 'other\.pth \("),
        (["METRICOPT.FINETUNE.LR", 5.0], r"METRICOPT\.FINETUNE\.LR was 0\.01, now 5\.0"),
        (["METRICOPT.FINETUNE.METRIC_STEP", 0.3], r"METRICOPT\.FINETUNE\.METRIC_STEP was 0\.15, now 0\.3"),
        (["SOLVER.IMS_PER_BATCH", 1], r"SOLVER\.IMS_PER_BATCH was 2, now 1"),
    ):
        with pytest.raises(FileFormatError, match=f"holds another run: {key}"):
            trained(tiny_config("fpn", "BN", *options, "MODEL.WEIGHTS", weights[0], *change), resume=True)
    moved = one.clone()
    moved.MODEL.WEIGHTS = str(tmp_path / "there" / "one.pth")
    Path(moved.MODEL.WEIGHTS).parent.mkdir()
    Path(weights[0]).rename(moved.MODEL.WEIGHTS)
    trained(moved, resume=True)

    # A new run in the same folder, killed before its first checkpoint, does not go on with the old one's.
    MetricOptTrainer(other).resume_or_load(resume=False)
    made = MetricOptTrainer(other)
    made.resume_or_load(resume=True)
    assert made.start_iter == 0
    theirs = torch.load(weights[1])["model"]["backbone.fpn_output2.weight"]
    assert torch.equal(made.model.backbone.fpn_output2.weight, theirs)


def test_finetuning_moves_nothing_but_phi(tiny_config: Any, tmp_path: Path) -> None:
    save_f(tmp_path / "f.safetensors")
    cfg = tiny_config("fpn", "BN", *FINETUNING, "METRICOPT.FINETUNE.VALUE_FUNCTION", str(tmp_path / "f.safetensors"))
    cfg.TEST.PRECISE_BN.ENABLED, cfg.SOLVER.REFERENCE_WORLD_SIZE = True, 2  # neither statistics nor steps follow these
    model = build_model(cfg)
    torch.save({"model": model.state_dict()}, tmp_path / "pretrained.pth")
    cfg.MODEL.WEIGHTS = str(tmp_path / "pretrained.pth")
    made = trained(cfg)
    assert isinstance(made.optimizer, mo.MetricOpt)
    assert made.optimizer.state[made.model.metricopt.phi]["step"] == 6
    bare = mo.Adapter(made.model).base_state_dict()
    assert all(torch.equal(value, bare[name]) for name, value in model.state_dict().items())
    assert made._last_eval_results["bbox"].keys() == {"AP50", "AP50-red", "AP50-green"}

    other = MetricOptTrainer.build_model(cfg)
    DetectionCheckpointer(other).load(str(Path(cfg.OUTPUT_DIR) / "model_best.pth"))
    assert torch.equal(other.metricopt.phi, phi_of(made))


def test_ordinary_training(tiny_config: Any) -> None:
    cfg = tiny_config("fpn", "BN", *FINETUNING, "METRICOPT.ENABLED", False, "SOLVER.MAX_ITER", 2)
    made = trained(cfg)
    assert not hasattr(made.model, "metricopt")
    assert any(parameter.requires_grad for parameter in made.model.parameters())
    stock = DefaultTrainer.build_optimizer(cfg, made.model)
    assert len(made.optimizer.param_groups) == len(stock.param_groups)
    assert "AP50" in made._last_eval_results["bbox"]


# --- What a run says ------------------------------------------------------------------------------------------


class Judged(MetricOptTrainer):
    """A user's trainer, whose metric gives one of these values after the other; it remembers what test was given."""

    values: list[float]
    bounds: tuple[float, float]
    phi: Tensor

    @classmethod
    def build_metric(cls, cfg: Any) -> Metric:
        values = iter(cls.values)
        return Metric(lambda: next(values), maximize=True, bounds=cls.bounds, name="squares_val/bbox/AP50")

    @classmethod
    def test(cls, cfg: Any, model: Any) -> dict[str, Any]:
        cls.phi = model.metricopt.phi.detach().clone()
        return {"bbox": {"AP50": 12.5}}


@pytest.mark.parametrize(("best", "unit"), [(2, 100), (0, 1)])
def test_a_run_ends_at_its_best_point_and_says_so_in_the_metric_s_own_units(
    best: int, unit: int, tiny_config: Any, tmp_path: Path, logged: list[logging.LogRecord]
) -> None:
    name, kept = "squares_val/bbox/AP50", str(tmp_path / "kept")
    cfg = tiny_config("fpn", "BN", *FINETUNING, "METRICOPT.METRIC.EVALS", 7, "METRICOPT.META.TRAJECTORIES", kept)
    Judged.values = [unit * (0.25 + 0.25 * (step == best) + 0.01 * (step == 4)) for step in range(7)]
    Judged.bounds = (0, unit)
    seed_all_rng(4)
    made = Judged(cfg)
    made.resume_or_load(resume=False)
    made.train()

    out = Path(cfg.OUTPUT_DIR)
    (trajectory,) = trajectory_store(cfg, kept)
    assert torch.equal(phi_of(made), trajectory.phi[best])
    assert torch.equal(Judged.phi, trajectory.phi[best])
    assert torch.equal(phi_in(out / "model_best.pth"), trajectory.phi[best])
    merged = mo.Adapter(made.model).merge().state_dict()
    written_down = torch.load(out / "model_merged.pth", weights_only=True)["model"]
    assert merged.keys() == written_down.keys()
    assert all(torch.equal(tensor, written_down[key]) for key, tensor in merged.items())

    values = Judged.values
    assert written(out, name) == pytest.approx(dict(enumerate(values)))
    assert written(out, "bbox/AP50") == {6: 12.5}
    before, after = values[0], values[6]
    verdict = {"before": before, "after": after, "best": values[best], "best_step": best}
    for key, value in verdict.items():
        assert written(out, f"{name}_{key}") == {6: pytest.approx(value)}
    board = EventAccumulator(str(out))
    board.Reload()
    assert [event.step for event in board.Scalars(name)] == list(range(7))
    assert [event.value for event in board.Scalars(name)] == pytest.approx(values)
    assert "squares_val/bbox/AP50_best" in board.Tags()["scalars"]

    said = [record.getMessage() for record in logged if record.levelno == logging.INFO]
    assert said[0] == f"{name}: {before:.4f} before finetuning"
    assert (
        said[4] == f"{name}: {0.26 * unit:.4f} after 4 of 6 steps"
        f" (best so far{'' if best == 6 else f': {0.5 * unit:.4f} after {best}'})"
    )
    assert len(said) == 8
    outcome = f"{name}: {before:.4f} before, {after:.4f} after 6 steps, "
    if best:
        outcome += f"best {0.5 * unit:.4f} ({0.25 * unit:+.4f}) after {best} steps: this step is kept"
    else:
        outcome += "none of 6 evaluated steps better than the start: the start is kept"
    assert said[7] == f"{outcome}; merged into {out / 'model_merged.pth'}"


# --- What is judged -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("result", ["bbox/AP", "segm/AP50"])
def test_another_result_of_the_evaluator_can_be_asked_for(tiny_config: Any, result: str) -> None:
    kind, _, measure = result.partition("/")

    class Given(DatasetEvaluator):  # type: ignore[misc]
        def evaluate(self) -> dict[str, dict[str, float]]:
            return {"bbox": {"AP50": 90.0}, kind: {measure: 40.0}}

        def reset(self) -> None: ...

        def process(self, inputs: Any, outputs: Any) -> None: ...

    class Mine(MetricOptTrainer):
        @classmethod
        def build_evaluator(cls, cfg: Any, dataset_name: str) -> Any:
            return Given()

    cfg = tiny_config("fpn", "BN", *FINETUNING, "METRICOPT.METRIC.NAME", result)
    metric = Mine.build_metric(cfg)
    assert metric is not None
    assert metric.name == f"squares_val/{result}"
    assert metric.judge(build_model(cfg)).value == 40.0


def test_ap_of_boxes_is_our_own_evaluator_s(tiny_config: Any) -> None:
    cfg = tiny_config("fpn", "BN", *FINETUNING, "METRICOPT.METRIC.NAME", "bbox/AP")
    evaluator: Any = MetricOptTrainer.build_evaluator(cfg, "squares_val")
    evaluator.reset()
    for image in evaluator.truth.images:
        size = (image.height, image.width)
        truth, scores = image.boxes.clone(), torch.ones(len(image.boxes))
        truth[:, 3] -= 0.28 * (truth[:, 3] - truth[:, 1])  # an overlap of 0.73 hits at 5 of the 10 IoUs
        found = Instances(size, pred_boxes=Boxes(truth), scores=scores, pred_classes=image.labels)
        evaluator.process([{"image_id": image.image_id}], [{"instances": found}])
    result = evaluator.evaluate()["bbox"]
    assert result["AP50"] == pytest.approx(100)
    assert result["AP"] == pytest.approx(50)
