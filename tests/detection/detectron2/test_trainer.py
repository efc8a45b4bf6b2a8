"""Detectron2's trainers finetune phi: MetricOpt under their optimizer, trajectories and the best model by hooks."""

import json
import logging
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

pytest.importorskip("detectron2", reason="needs Detectron2, installed from source")

from detectron2.checkpoint import DetectionCheckpointer
from detectron2.data import DatasetMapper, build_detection_train_loader
from detectron2.engine import AMPTrainer, DefaultTrainer, SimpleTrainer, default_setup, defaults, hooks
from detectron2.evaluation import DatasetEvaluator, DatasetEvaluators
from detectron2.modeling import build_model
from detectron2.structures import Boxes, Instances
from detectron2.utils.env import seed_all_rng
from detectron2.utils.logger import _LOG_COUNTER

import metricopt_ext as mo
from metricopt_ext.adapters.signature import Signature
from metricopt_ext.detection.ap_loss import ap_loss
from metricopt_ext.detection.detectron2 import trainer as trainer_module
from metricopt_ext.detection.detectron2.config import metricopt_settings
from metricopt_ext.detection.detectron2.datasets import records_of, register, registered_truth
from metricopt_ext.detection.detectron2.evaluator import ap50_metric
from metricopt_ext.detection.detectron2.hooks import LOGGER, BestCheckpoint, TrajectoryHook
from metricopt_ext.detection.detectron2.meta_train import meta_train
from metricopt_ext.detection.detectron2.trainer import MetricOptTrainer, trajectory_store
from metricopt_ext.detection.records import DetectionSet
from metricopt_ext.errors import ConfigError, DataError, FileFormatError, MetricError, ValueFunctionError
from metricopt_ext.methods.recipe import Recipe
from metricopt_ext.runtime.progress import Bars, Callback
from metricopt_ext.search.learned_optimizer import LearnedOptimizer
from metricopt_ext.search.optimizer import MetricOptStep
from metricopt_ext.search.update_rule import UpdateRule
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.recording import Recording
from metricopt_ext.tasks.rollout import observation_steps
from metricopt_ext.tasks.trajectory import Trajectory, TrajectoryStore
from metricopt_ext.utils.seeding import generator
from metricopt_ext.value.fitting import fit_value_function
from metricopt_ext.value.loading import load_value_function
from metricopt_ext.value.observations import Observations
from metricopt_ext.value.value_function import Quality, RidgeValueFunction

pytestmark = pytest.mark.detectron2

ROOT = Path(__file__).resolve().parents[3]
FINETUNING = [
    *("METRICOPT.ENABLED", True, "METRICOPT.FINETUNE.START_STD", 0.1, "METRICOPT.FINETUNE.LR", 0.01),
    *("METRICOPT.METRIC.SET", "squares_val", "METRICOPT.METRIC.EVALS", 3, "MODEL.ROI_HEADS.SCORE_THRESH_TEST", 0.0),
    *("DATASETS.TRAIN", ("squares_train",), "DATASETS.TEST", ("squares_test",), "SOLVER.CHECKPOINT_PERIOD", 3),
]


@pytest.fixture(autouse=True)
def _squares_in_catalog(catalog: Any, squares: Callable[..., DetectionSet]) -> None:
    for seed, name in enumerate(("squares_train", "squares_val", "squares_test")):
        register(name, squares(4, seed=seed))


def save_f(path: Path, signature: Signature | None = None, dim: int = 4) -> RidgeValueFunction:
    f = RidgeValueFunction(dim)
    f.coefficients.copy_(torch.linspace(-1, 1, 2 * dim)[:, None])
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
            step: pytest.approx(100 * (1 - cost)) for step, cost in zip(*observed(trajectory), strict=True)
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


def test_a_run_does_not_go_on_from_another_kind_of_run(tiny_config: Any, tmp_path: Path) -> None:
    options = [*FINETUNING, "SOLVER.MAX_ITER", 2, "METRICOPT.FINETUNE.STEPS", 2, "DATASETS.TEST", ()]
    ordinary = tiny_config("fpn", "BN", *options, "METRICOPT.ENABLED", False)
    trained(ordinary)
    with pytest.raises(DataError, match=r"model_final\.pth.*use another OUTPUT"):
        trained(tiny_config("fpn", "BN", *options), resume=True)
    elsewhere = ["OUTPUT_DIR", str(tmp_path / "phi")]
    trained(tiny_config("fpn", "BN", *options, *elsewhere))
    with pytest.raises(DataError, match=r"model_final\.pth.*such a run"):
        trained(tiny_config("fpn", "BN", *options, *elsewhere, "METRICOPT.ENABLED", False), resume=True)


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


def test_a_run_starts_where_it_is_told_to(tiny_config: Any, tmp_path: Path) -> None:
    """A phi in the weights, left by an earlier finetuning, would take the place of the start."""
    cfg = tiny_config("fpn", "BN", *FINETUNING, "METRICOPT.FINETUNE.STEPS", 2, "METRICOPT.METRIC.EVALS", 2)
    trained(cfg)
    cfg.MODEL.WEIGHTS, cfg.OUTPUT_DIR = str(Path(cfg.OUTPUT_DIR) / "model_final.pth"), str(tmp_path / "again")
    with pytest.raises(DataError, match=r"model_final\.pth holds a phi"):
        trained(cfg)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [("METRICOPT.FILM.LAYERS", ("fpn",), r"layers \[.*backbone.bottom_up"), ("METRICOPT.SEED", 1, "seed 0, not 1")],
)
def test_an_f_that_was_learned_under_another_adapter_is_refused(
    key: str, value: Any, named: str, tiny_config: Any, tmp_path: Path
) -> None:
    learned = MetricOptTrainer.build_model(tiny_config("fpn", "BN", *FINETUNING))
    save_f(tmp_path / "f.safetensors", mo.Adapter(learned).signature)
    cfg = tiny_config("fpn", "BN", *FINETUNING, "METRICOPT.FINETUNE.VALUE_FUNCTION", str(tmp_path / "f.safetensors"),
                      key, value)  # fmt: skip
    with pytest.raises(ValueFunctionError, match=rf"f\.safetensors.*adapter, of .*{named}"):
        MetricOptTrainer(cfg)


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


def test_a_learned_optimizer_moves_phi(tiny_config: Any, tmp_path: Path) -> None:
    rule = UpdateRule(sees_loss=False, sees_metric=False)
    rule.save(tmp_path / "rule.safetensors")
    named = ("METRICOPT.FINETUNE.UPDATE_RULE", str(tmp_path / "rule.safetensors"))
    made = trained(tiny_config("fpn", "BN", *FINETUNING, *named))
    assert isinstance(made.optimizer, LearnedOptimizer)
    assert torch.equal(made.optimizer.rule.weights, rule.weights)
    assert phi_of(made).any()
    with pytest.raises(ConfigError, match=r"UPDATE_RULE is .*'f\.safetensors'"):
        MetricOptTrainer(
            tiny_config("fpn", "BN", *FINETUNING, *named, "METRICOPT.FINETUNE.VALUE_FUNCTION", "f.safetensors")
        )
    with pytest.raises(ConfigError, match=r"FINETUNE\.OPTIMIZER is 'rmsprop'"):
        MetricOptTrainer(tiny_config("fpn", "BN", *FINETUNING, "METRICOPT.FINETUNE.OPTIMIZER", "rmsprop"))


def test_each_trajectory_has_batches_of_its_own(tiny_config: Any) -> None:
    def order(index: int) -> list[str]:
        cfg = tiny_config("fpn", "BN", *FINETUNING, "METRICOPT.META.INDEX", index)
        batches = iter(MetricOptTrainer(cfg).data_loader)
        return [image["image_id"] for _ in range(8) for image in next(batches)]

    assert order(0) == order(0) != order(1)


def test_the_ap_loss_is_trained_with(tiny_config: Any, tmp_path: Path) -> None:
    """The first step of a finetuning goes down the AP loss that the detector has where training starts."""
    cfg = tiny_config("fpn", "BN", *FINETUNING, "METRICOPT.CLASSIFICATION_LOSS", "ap", "METRICOPT.FINETUNE.STEPS", 2,
                      "METRICOPT.FILM.LAYERS", ("roi_head",))  # fmt: skip
    torch.save({"model": build_model(cfg).state_dict()}, tmp_path / "detector.pth")
    cfg.MODEL.WEIGHTS, cfg.METRICOPT.METRIC.SET = str(tmp_path / "detector.pth"), ""
    losses, logits, labels = {}, [], []
    made = MetricOptTrainer(cfg)
    made.resume_or_load(resume=False)
    heads = made.model.roi_heads
    sample = heads.label_and_sample_proposals

    def remember(*args: Any) -> Any:
        sampled = sample(*args)
        labels.append(torch.cat([each.gt_classes for each in sampled]))
        return sampled

    heads.label_and_sample_proposals = remember
    heads.box_predictor.register_forward_hook(lambda module, args, output: logits.append(output[0].detach()))
    made.register_hooks([hooks.CallbackHook(after_step=lambda t: losses.update({t.iter: dict(t.storage.latest())}))])
    made.train()
    labelled = torch.where(labels[0] == 2, -1, labels[0])
    expected = ap_loss(logits[0].log_softmax(1)[:, :2], labelled)
    assert losses[0]["loss_cls"][0] == pytest.approx(float(expected), abs=1e-6)
    assert made.model.metricopt.phi.grad.norm() > 0


def test_ordinary_training(tiny_config: Any) -> None:
    cfg = tiny_config("fpn", "BN", *FINETUNING, "METRICOPT.ENABLED", False, "SOLVER.MAX_ITER", 2)
    made = trained(cfg)
    assert not hasattr(made.model, "metricopt")
    assert any(parameter.requires_grad for parameter in made.model.parameters())
    stock = DefaultTrainer.build_optimizer(cfg, made.model)
    assert len(made.optimizer.param_groups) == len(stock.param_groups)
    assert "AP50" in made._last_eval_results["bbox"]


def test_hooks_in_a_simple_trainer(tiny_config: Any, tmp_path: Path) -> None:
    cfg = tiny_config("fpn", "BN", *FINETUNING)
    torch.manual_seed(0)
    model = build_model(cfg)
    adapter = mo.attach_film(model, "backbone.fpn_output?", dim=4)
    modes: list[bool] = []

    def judge(model: Any) -> float:
        modes.append(model.training)
        torch.rand(3)
        return float(torch.sigmoid(model.metricopt.phi.sum()))

    def run(*more: Any) -> Tensor:
        adapter.set_phi(torch.zeros(4))
        seed_all_rng(3)
        simple = SimpleTrainer(model, build_detection_train_loader(cfg), torch.optim.SGD(adapter.parameters(), lr=0.01))
        simple.register_hooks(list(more))
        simple.train(0, 5)
        return adapter.phi.detach().clone()

    store = TrajectoryStore()
    recording = Recording(adapter, Metric(judge, maximize=False), store, steps=4, evals=3, seed=1)
    path = tmp_path / "best.pth"
    recorded = run(TrajectoryHook(recording), BestCheckpoint(recording, path))
    assert torch.equal(recorded, run())  # the metric's queries disturb nothing
    assert modes == [False] * 3
    (trajectory,) = store
    torch.testing.assert_close(trajectory.cost, torch.sigmoid(trajectory.observed_phi.sum(1)).double())
    best = torch.load(path, weights_only=True)["model"]["metricopt.phi"]
    assert torch.equal(best, trajectory.observed_phi[trajectory.cost.argmin()])
    assert len(trajectory.loss) == 4
    with pytest.raises(FileFormatError, match=r"trajectory 0.*0 is already stored"):
        run(TrajectoryHook(Recording(adapter, Metric(judge, maximize=False), store, steps=4, evals=3)))
    simple = SimpleTrainer(model, [], None, gather_metric_period=5)
    hook = TrajectoryHook(Recording(adapter, Metric(judge, maximize=False), TrajectoryStore(), steps=4, evals=3))
    simple.register_hooks([hook])
    simple.run_step = lambda: None
    with pytest.raises(ConfigError, match="gather_metric_period=1"):
        simple.train(0, 5)


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


@pytest.mark.parametrize(("best", "unit"), [(2, 100), (0, 100), (6, 100), (2, 1)])
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


def test_one_evaluated_step_is_told_as_one(tiny_config: Any, logged: list[logging.LogRecord]) -> None:
    options = ("METRICOPT.FINETUNE.STEPS", 1, "METRICOPT.METRIC.EVALS", 2, "DATASETS.TEST", ())
    Judged.values, Judged.bounds = [50, 25], (0, 100)
    made = Judged(tiny_config("fpn", "BN", *FINETUNING, *options))
    made.resume_or_load(resume=False)
    made.train()
    assert "none of 1 evaluated step better than the start: the start is kept" in logged[-1].getMessage()


def test_without_a_metric_the_last_point_is_merged(
    tiny_config: Any, tmp_path: Path, logged: list[logging.LogRecord]
) -> None:
    made = trained(tiny_config("fpn", "BN", *FINETUNING, "METRICOPT.METRIC.SET", "", "DATASETS.TEST", ()))
    out = tmp_path / "out"
    assert torch.equal(phi_of(made), phi_in(out / "model_final.pth"))
    assert logged[-1].getMessage().startswith("the metric was not evaluated: the last step is kept")
    merged, written_down = mo.Adapter(made.model).merge().state_dict(), torch.load(out / "model_merged.pth")["model"]
    assert all(torch.equal(tensor, written_down[key]) for key, tensor in merged.items())


def test_a_failed_run_has_no_verdict(tiny_config: Any, tmp_path: Path) -> None:
    trained(tiny_config("fpn", "BN", *FINETUNING), kill_at=6)
    assert not (tmp_path / "out" / "model_merged.pth").exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ["VALUE_FUNCTION is empty: phi follows the loss alone; learn f"]),
        (["METRICOPT.META.TRAJECTORIES", "FOLDER"], []),  # for learning f
        (["METRICOPT.ENABLED", False], []),
        (
            ["METRICOPT.META.TRAJECTORIES", "FOLDER", "METRICOPT.METRIC.SET", "squares_train"],
            ["METRICOPT.METRIC.SET=squares_train is one of DATASETS.TRAIN"],
        ),
    ],
)
def test_warnings_are_given_once(
    options: list[Any], expected: list[str], tiny_config: Any, tmp_path: Path, logged: list[logging.LogRecord]
) -> None:
    cfg = tiny_config("fpn", "BN", *FINETUNING, *(str(tmp_path) if each == "FOLDER" else each for each in options))
    for _ in range(2):
        MetricOptTrainer(cfg)
    warnings = [record.getMessage() for record in logged if record.levelno == logging.WARNING]
    assert len(warnings) == len(expected)
    assert all(part in warning for part, warning in zip(expected, warnings, strict=True))


# --- Mixed precision, and averages of weights -----------------------------------------------------------------


class OnCpu(AMPTrainer):
    """Detectron2's trainer in mixed precision, whose steps are what they are, computed without a GPU."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, grad_scaler=torch.amp.GradScaler("cpu", init_scale=256.0), precision=torch.bfloat16)

    def run_step(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda.amp, "autocast", partial(torch.autocast, "cpu"))
            super().run_step()


def test_steps_in_mixed_precision_are_judged_in_full(
    tiny_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[tuple[bool, torch.dtype, list[float]]] = []

    def judge(model: Any) -> float:
        phi = model.metricopt.phi.detach()
        judged.append((torch.is_autocast_enabled("cpu"), phi.dtype, phi.tolist()))
        return float(phi.sum().sigmoid())

    monkeypatch.setattr(MetricOptTrainer, "build_metric", staticmethod(lambda cfg: Metric(judge, maximize=True)))
    monkeypatch.setattr(trainer_module, "check_amp", lambda cfg: None)
    monkeypatch.setattr(defaults, "AMPTrainer", OnCpu)
    save_f(tmp_path / "f.safetensors")
    options = [*FINETUNING, "METRICOPT.FINETUNE.VALUE_FUNCTION", str(tmp_path / "f.safetensors"), "DATASETS.TEST", ()]
    options += ["METRICOPT.FINETUNE.STEPS", 4, "METRICOPT.META.TRAJECTORIES"]
    stored = {}
    for amp in (False, True):
        folder = tmp_path / f"amp_{amp}"
        cfg = tiny_config("fpn", "BN", *options, str(folder / "kept"), "SOLVER.AMP.ENABLED", amp)
        cfg.OUTPUT_DIR = str(folder)
        judged.clear()
        made = trained(cfg)
        assert isinstance(made._trainer, AMPTrainer) == amp
        (stored[amp],) = trajectory_store(cfg, cfg.METRICOPT.META.TRAJECTORIES)
        assert {each[:2] for each in judged} == {(False, torch.float32)}
        assert [each[2] for each in judged] == stored[amp].observed_phi.tolist()
    plain, mixed = stored[False], stored[True]
    assert torch.equal(plain.phi[0], mixed.phi[0])
    assert plain.cost[0] == mixed.cost[0]
    assert not torch.equal(plain.loss, mixed.loss)  # it was in bfloat16
    torch.testing.assert_close(plain.loss[0], mixed.loss[0], rtol=0.1, atol=0)  # other proposals may be drawn
    step = (plain.phi[1] - plain.phi[0]).norm()
    assert (mixed.phi[1] - plain.phi[1]).norm() < step / 2  # a scaled gradient, of 256 times, would be far away
    with pytest.raises(FileFormatError, match=r"SOLVER\.AMP\.ENABLED was False, now True"):
        trajectory_store(cfg, str(tmp_path / "amp_False" / "kept"))


def test_mixed_precision_without_a_gpu_is_refused_before_the_first_step(
    to_meta_train: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cfg = to_meta_train("SOLVER.AMP.ENABLED", True)
    refusal = r"SOLVER\.AMP\.ENABLED is True, but no GPU was found.*; set it to False"
    with pytest.raises(ConfigError, match=refusal):
        MetricOptTrainer(cfg)
    with pytest.raises(ConfigError, match=refusal):
        meta_train(cfg, tmp_path / "f.safetensors")
    assert not (Path(cfg.OUTPUT_DIR) / "trajectories").exists()


class EMAHook(hooks.HookBase):
    """What projects keep an average of weights by."""


class Averaging(MetricOptTrainer):
    def build_hooks(self) -> list[Any]:
        return [*super().build_hooks(), EMAHook()]


@pytest.mark.parametrize("judged", [True, False])
def test_an_average_of_weights_is_refused_while_phi_is_tuned(
    judged: bool, to_meta_train: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not judged:
        monkeypatch.setattr(MetricOptTrainer, "build_metric", staticmethod(lambda cfg: None))
    cfg = to_meta_train()
    with pytest.raises(ConfigError, match=r"MODEL\.WEIGHTS=FILE\?entry=ema_state"):
        Averaging(cfg).train()
    made = MetricOptTrainer(cfg)
    made.model.ema_state = object()
    with pytest.raises(ConfigError, match="the model's ema_state averages weights"):
        made.train()
    if judged:
        with pytest.raises(ConfigError, match="the hook EMAHook averages weights"):
            meta_train(cfg, tmp_path / "f.safetensors", trainer_class=Averaging)
    cfg.METRICOPT.ENABLED, cfg.SOLVER.MAX_ITER, cfg.DATASETS.TEST = False, 1, ()
    Averaging(cfg).train()  # ordinary training may average


# --- Meta-training -------------------------------------------------------------------------------------------

META = [
    *("METRICOPT.FINETUNE.STEPS", 3, "METRICOPT.FINETUNE.START_STD", 0.0, "METRICOPT.META.ROUNDS", 2),
    *("SOLVER.CHECKPOINT_PERIOD", 100),
]


@pytest.fixture
def to_meta_train(tiny_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Make the config of a meta-training, of one detector; its metric is a function of phi, as it finds nothing yet."""

    def judge(model: Any) -> tuple[float, list[float]]:
        total = model.metricopt.phi.detach().sum()
        return float(total.sigmoid()), (total + torch.tensor([0.1, -0.1])).sigmoid().tolist()

    metric = staticmethod(lambda cfg: Metric(judge, maximize=True))
    monkeypatch.setattr(MetricOptTrainer, "build_metric", metric)

    def make(*options: Any) -> Any:
        cfg = tiny_config("fpn", "BN", *FINETUNING, *META, *options)
        cfg.MODEL.WEIGHTS = str(tmp_path / "detector.pth")
        if not Path(cfg.MODEL.WEIGHTS).exists():
            torch.save({"model": build_model(cfg).state_dict()}, cfg.MODEL.WEIGHTS)
        return cfg

    return make


@pytest.mark.slow
def test_meta_training_follows_what_it_learned(to_meta_train: Callable[..., Any], tmp_path: Path) -> None:
    cfg = to_meta_train()
    fit = meta_train(cfg, tmp_path / "f.safetensors")
    assert len(fit.half_fits) == 2  # one for each half that the metric tells
    folder = Path(cfg.OUTPUT_DIR) / "trajectories"
    store = TrajectoryStore(folder, json.loads((folder / "identity.json").read_text()))
    assert [(t.round, t.index, len(t.cost)) for t in store] == [(i // 4, i, 3) for i in range(8)]
    assert len({tuple(t.phi[0].tolist()) for t in store}) == 8
    assert not (Path(cfg.OUTPUT_DIR) / "meta_train").exists()
    again = fit_value_function(Observations.of(store), folds=4, seed=0).f
    phi = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(load_value_function(tmp_path / "f.safetensors", 4)(phi), again(phi))

    # Round 1's first step, by hand, from the f of round 0: it has no skill and is followed all the same.
    early = fit_value_function(Observations.of([t for t in store if t.round == 0]), folds=2, seed=0).f
    weight, metric_step = Recipe().explored_settings(0, [4])[0].tolist()
    first = store.get(1, 4)
    assert first is not None
    loss_step = MetricOptStep(early, 0.01, 0.0, 1.0, 3, even_untrusted=True)
    rule = replace(loss_step, metric_step=metric_step, loss_weight=weight)
    gradient = gradient_of(cfg, first.phi[0], index=4)
    torch.testing.assert_close(rule(first.phi[0], gradient[None], 0), first.phi[1], rtol=1e-4, atol=1e-5)
    assert (first.phi[1] - (first.phi[0] - 0.01 * gradient)).norm() > 1e-3


def gradient_of(cfg: Any, phi: Tensor, index: int) -> Tensor:
    """Compute the loss gradient at phi that the first step of a run sees."""
    cfg = cfg.clone()
    cfg.METRICOPT.ENABLED, cfg.METRICOPT.METRIC.SET = True, ""
    cfg.METRICOPT.FINETUNE.START_STD = 0.2
    cfg.METRICOPT.META.update(INDEX=index, TRAJECTORIES="")
    cfg.DATASETS.TEST, cfg.METRICOPT.FINETUNE.STEPS = (), 2
    made = MetricOptTrainer(cfg)
    made.resume_or_load(resume=False)
    seen: list[Tensor] = []
    parameter = made.model.metricopt.phi
    parameter.register_hook(lambda gradient: seen.append(gradient.clone()))
    assert torch.equal(parameter.detach(), phi)
    made.train()
    return seen[0]


class Known(DatasetEvaluator):
    """Evaluates a model that tells its phi, without looking at what it finds."""

    model: Any

    def evaluate(self) -> dict[str, Any]:
        return {"bbox": {"AP50": float(100 * self.model.metricopt.phi.detach().sum().sigmoid())}}


class Theirs(MetricOptTrainer):
    """A user's trainer with a loss, data, an evaluator and a hook of its own."""

    seen: list[Any]

    @classmethod
    def build_model(cls, cfg: Any) -> Any:
        model = super().build_model(cfg)
        detect = model.forward

        def forward(batch: Any) -> Any:
            cls.seen += [("trained on" if model.training else "judged on", image["image_id"]) for image in batch]
            return {"loss_phi": (model.metricopt.phi - 1).square().sum() / 2} if model.training else detect(batch)

        model.forward, Known.model = forward, model
        return model

    @classmethod
    def build_train_loader(cls, cfg: Any) -> Any:
        (record, *_) = records_of("squares_test")
        return build_detection_train_loader(cfg, dataset=[record], mapper=DatasetMapper(cfg, is_train=True))

    @classmethod
    def build_evaluator(cls, cfg: Any, dataset_name: str) -> DatasetEvaluator:
        cls.seen.append(("evaluator of", dataset_name))
        return Known()

    def build_hooks(self) -> list[Any]:
        def look(trainer: Any) -> None:
            self.seen.extend(("kept", path.name) for path in Path(self.cfg.OUTPUT_DIR).glob("model_*"))

        return [*super().build_hooks(), hooks.CallbackHook(after_train=look)]


def test_meta_training_uses_the_user_s_trainer(tiny_config: Any, tmp_path: Path) -> None:
    cfg = tiny_config("fpn", "BN", *FINETUNING, *META, "METRICOPT.METRIC.IMAGES", 2)
    cfg.MODEL.WEIGHTS = str(tmp_path / "detector.pth")
    torch.save({"model": build_model(cfg).state_dict()}, cfg.MODEL.WEIGHTS)
    Theirs.seen = []
    meta_train(cfg, tmp_path / "f.safetensors", trainer_class=Theirs)
    drawn = registered_truth("squares_val_2_images_seed_0")
    ids = {image.image_id for image in drawn.images}
    assert len(ids) == 2
    assert ids < {image.image_id for image in registered_truth("squares_val").images}
    assert {what for key, what in Theirs.seen if key == "trained on"} == {"2-0"}  # the first of squares_test
    assert {what for key, what in Theirs.seen if key == "judged on"} == ids
    assert [what for key, what in Theirs.seen if key == "evaluator of"] == ["squares_val_2_images_seed_0"] * 9
    assert [what for key, what in Theirs.seen if key == "kept"] == ["model_final.pth"] * 8  # none is merged

    folder = Path(cfg.OUTPUT_DIR) / "trajectories"
    for trajectory in TrajectoryStore(folder, json.loads((folder / "identity.json").read_text())):
        phi = trajectory.phi
        torch.testing.assert_close(trajectory.cost, 1 - trajectory.observed_phi.sum(1).sigmoid().double())
        torch.testing.assert_close(trajectory.loss, (phi[:-1] - 1).square().sum(1) / 2)
        if trajectory.round == 0:  # which follows the loss alone
            torch.testing.assert_close(phi[1:], phi[:-1] - 0.01 * (phi[:-1] - 1))
    with pytest.raises(TypeError, match=r"trainer_class.*MetricOptTrainer"):
        meta_train(cfg, tmp_path / "again.safetensors", trainer_class=DefaultTrainer)
    with pytest.raises(FileFormatError, match=r"trainer_class.*'.*\.MetricOptTrainer'"):
        meta_train(cfg, tmp_path / "again.safetensors", resume=True)


class WithoutRecorder(MetricOptTrainer):
    def build_hooks(self) -> list[Any]:
        return [hook for hook in super().build_hooks() if not isinstance(hook, TrajectoryHook)]


class WithoutMetric(MetricOptTrainer):
    @classmethod
    def build_metric(cls, cfg: Any) -> None:
        return None


@pytest.mark.parametrize(
    ("trainer_class", "message"),
    [
        (WithoutRecorder, r"WithoutRecorder.build_hooks.*needs one"),
        (WithoutMetric, r"WithoutMetric.build_metric returned"),
    ],
)
def test_a_trainer_that_records_nothing_is_refused(
    trainer_class: type[MetricOptTrainer], message: str, to_meta_train: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match=message):
        meta_train(to_meta_train(), tmp_path / "f.safetensors", trainer_class=trainer_class)


def test_an_evaluator_without_ap50_is_named(tiny_config: Any) -> None:
    cfg = tiny_config("fpn", "BN", *FINETUNING)
    metric = ap50_metric(MetricOptTrainer.build_test_loader(cfg, "squares_val"), DatasetEvaluators([]))
    with pytest.raises(MetricError, match=r"DatasetEvaluators.*bbox/AP50, but \[\]"):
        metric.evaluate(build_model(cfg), "test")


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
    assert metric.judge(build_model(cfg)).cost == pytest.approx(1 - 0.4)


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


class Seen(Callback):
    """Remembers what a bar would show."""

    def __init__(self) -> None:
        self.queries: list[tuple[int, float]] = []

    def query(self, spent: int, value: float) -> None:
        self.queries.append((spent, value))


def test_meta_training_tells_its_progress(
    to_meta_train: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    logged: list[logging.LogRecord],
    capsys: pytest.CaptureFixture[str],
) -> None:
    callback = Seen()
    monkeypatch.setattr(Bars, "watch", lambda self, name, total, metric: callback if name == "miss" else Callback())
    cfg = to_meta_train()

    def judge(model: Any) -> float:
        return float(10 * model.metricopt.phi.detach().sum().sigmoid())

    metric = staticmethod(lambda cfg: Metric(judge, maximize=False, bounds=(0, 10), name="miss"))
    monkeypatch.setattr(MetricOptTrainer, "build_metric", metric)
    default_setup(cfg, Namespace(config_file=""))
    capsys.readouterr()
    meta_train(cfg, tmp_path / "f.safetensors")
    assert [spent for spent, _ in callback.queries] == sorted(spent for spent, _ in callback.queries)
    assert {spent for spent, _ in callback.queries} == set(range(1, 25))
    folder = Path(cfg.OUTPUT_DIR) / "trajectories"
    store = TrajectoryStore(folder, json.loads((folder / "identity.json").read_text()))
    shown = [10 * cost for trajectory in store for cost in trajectory.cost.tolist()]
    assert list(dict(callback.queries).values())[:2] == shown[:2]

    said = [record.getMessage() for record in logged if record.getMessage().startswith("Round")]
    ends = [10 * trajectory.cost[[0, -1]] for trajectory in store]
    assert said == [
        f"Round {i // 4 + 1} of 2, run {i + 1} of 8: miss {first:.4f} -> {last:.4f}; {21 - 3 * i} of 24 queries left"
        for i, (first, last) in enumerate(ends)
    ]
    assert "Round 1 of 2, run 1 of 8" in (Path(cfg.OUTPUT_DIR) / "log.txt").read_text()
    assert "queries left" not in capsys.readouterr().out  # the callback tells it there


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("f.pth", r"f\.pth.*name must end in \.safetensors"),
        ("folder.safetensors", r"folder\.safetensors.*name of a file"),
        ("there.safetensors", r"there\.safetensors.*name, or --resume"),
        ("nowhere/f.safetensors", r"nowhere/f\.safetensors.*exists"),
        ("there.safetensors/f.safetensors", r"f\.safetensors.*Not a directory"),
        (f"{'f' * 300}.safetensors", r"f\.safetensors.*name too long"),
        ("/proc/f.safetensors", r"/proc/f\.safetensors can't be written: "),  # not even by root
    ],
)
def test_f_must_be_writable_before_a_query_is_spent(
    name: str, message: str, to_meta_train: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "there.safetensors").touch()
    cfg = to_meta_train()
    with pytest.raises(ConfigError, match=message):
        meta_train(cfg, tmp_path / name)
    assert not Path(cfg.OUTPUT_DIR).exists()


@pytest.mark.slow
def test_killed_meta_training_goes_on(
    to_meta_train: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = to_meta_train()
    meta_train(cfg, tmp_path / "f.safetensors")
    folder = Path(cfg.OUTPUT_DIR) / "trajectories"
    files = sorted(folder.glob("round-*"))
    contents = {file.name: load_file(file) for file in files}
    for file in files[5:]:
        file.unlink()
    runs: list[int] = []
    train = MetricOptTrainer.train

    def counted(self: Any) -> Any:
        runs.append(metricopt_settings(self.cfg).meta.index)
        return train(self)

    monkeypatch.setattr(MetricOptTrainer, "train", counted)
    with pytest.raises(FileFormatError, match=r"already.*trajectories: add --resume"):
        meta_train(cfg, tmp_path / "again.safetensors")
    (tmp_path / "again.safetensors").touch()  # by a run that finished
    meta_train(cfg, tmp_path / "again.safetensors", resume=True)
    assert runs == [5, 6, 7]
    weights = Path(cfg.MODEL.WEIGHTS).read_bytes()
    detector = torch.load(cfg.MODEL.WEIGHTS)
    detector["model"]["backbone.fpn_output2.bias"] += 1
    torch.save(detector, cfg.MODEL.WEIGHTS)
    with pytest.raises(FileFormatError, match=r"MODEL\.WEIGHTS was 'detector\.pth \(\w{16}\)', now 'detector\.pth \("):
        meta_train(cfg, tmp_path / "again.safetensors", resume=True)
    assert runs == [5, 6, 7]
    Path(cfg.MODEL.WEIGHTS).write_bytes(weights)
    contents["f"] = load_file(tmp_path / "f.safetensors")
    again = {file.name: load_file(file) for file in folder.glob("round-*")}
    again["f"] = load_file(tmp_path / "again.safetensors")
    assert again.keys() == contents.keys()
    for name, tensors in contents.items():
        assert all(torch.equal(tensor, again[name][key]) for key, tensor in tensors.items()), name
    for key, value in (("FINETUNE.LR", 0.02), ("META.TASKS", 5), ("FINETUNE.TRUST", 1.0)):
        with pytest.raises(FileFormatError, match=rf"METRICOPT\.{key} was"):
            meta_train(to_meta_train(f"METRICOPT.{key}", value), tmp_path / "f.safetensors", resume=True)


@pytest.mark.filterwarnings("error:.*phi follows the loss alone")  # the log says so, and only the log
@pytest.mark.parametrize("round", [0, 1])
def test_an_f_without_skill_is_followed_only_to_correct_it(
    round: int, tiny_config: Any, tmp_path: Path, logged: list[logging.LogRecord]
) -> None:
    f = save_f(tmp_path / "f.safetensors")
    f.quality = Quality(0.1, -0.5, 0.1, 50, 10, -0.5, 0.1)
    f.save(tmp_path / "f.safetensors")
    cfg = tiny_config("fpn", "BN", *FINETUNING, "METRICOPT.FINETUNE.VALUE_FUNCTION", str(tmp_path / "f.safetensors"))
    cfg.METRICOPT.META.ROUND = round
    model = MetricOptTrainer.build_model(cfg)
    phi, start = model.metricopt.phi, model.metricopt.phi.detach().clone()
    phi.grad = torch.arange(4.0)
    for _ in range(2):
        optimizer = MetricOptTrainer.build_optimizer(cfg, model)
    optimizer.step()
    as_by_the_loss = torch.allclose(phi, start - 0.01 * torch.arange(4.0))
    assert as_by_the_loss is (round == 0)
    warnings = [record.getMessage() for record in logged if record.levelno == logging.WARNING]
    assert len(warnings) == (round == 0)
    assert all("phi follows the loss alone; learn f from more" in warning for warning in warnings)


def test_recorded_costs_are_the_metric_s(tiny_config: Any, tmp_path: Path) -> None:
    cfg = tiny_config(
        "fpn", "BN", *FINETUNING, "METRICOPT.META.TRAJECTORIES", str(tmp_path / "kept"), "METRICOPT.FINETUNE.STEPS", 2,
        "METRICOPT.METRIC.IMAGES", 2,
    )  # fmt: skip
    made = trained(cfg)
    adapter = mo.Adapter(made.model)
    (trajectory,) = trajectory_store(cfg, str(tmp_path / "kept"))
    metric = MetricOptTrainer.build_metric(cfg)
    assert metric is not None
    for phi, cost in zip(trajectory.observed_phi, trajectory.cost, strict=True):
        adapter.set_phi(phi)
        assert metric.cost(made.model, "test") == cost
