"""The sibling methods as methods of a comparison, and their settings."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.refusals import assert_named, assert_refused
from metricopt_ext.errors import ConfigError, FileFormatError
from metricopt_ext.experiment.compare import compare
from metricopt_ext.experiment.method import METHODS, SIBLINGS, siblings_of
from metricopt_ext.experiment.siblings import (
    EmbedderSiblingsConfig,
    SiblingsConfig,
    plot_histories,
    training,
)
from metricopt_ext.experiment.usual_methods import planned
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.siblings.ala.ala import AdaptiveLossAlignment
from metricopt_ext.siblings.ala.loss_policy import LossPolicy
from metricopt_ext.siblings.checkpoints import Checkpoints
from metricopt_ext.siblings.reloss.ranked_batches import BatchSource, RandomOutputs
from metricopt_ext.siblings.reloss.relational_loss import RelationalLoss, RelationalTraining
from metricopt_ext.siblings.reloss.reloss import ReLoss
from metricopt_ext.siblings.sibling import Sibling
from metricopt_ext.siblings.sl.set_loss import SetLoss
from metricopt_ext.siblings.sl.surrogate_learning import SurrogateLearning
from metricopt_ext.siblings.training import TrainingTask
from metricopt_ext.tasks.batch_metric import BatchMetric
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.files import write_json


def test_every_training_is_in_the_table_of_methods() -> None:
    assert list(SIBLINGS) == [name for name in METHODS if name in SIBLINGS]
    assert all(METHODS[name].kind == "queries" for name in SIBLINGS)


def test_the_default_settings_are_the_papers() -> None:
    assert {name: SiblingsConfig().build(name) for name in SIBLINGS} == SIBLINGS
    built = {name: EmbedderSiblingsConfig().build(name) for name in siblings_of("embedders")}
    assert built == {name: SIBLINGS[name] for name in siblings_of("embedders")}


def test_what_is_set_reaches_ala(tmp_path: Path) -> None:
    LossPolicy("mixture", 1, 10, history=4).save(tmp_path / "policy.safetensors")
    values: dict[str, Any] = {
        "iterations": 60,
        "action_steps": 20,
        "reward_evals": 3,
        "gamma": 0.5,
        "beta": 0.2,
        "children": 1,
        "history": 4,
        "validation_batches": 2,
        "memory": 7,
        "decay": 0.8,
        "policy_lr": 0.1,
        "model_lr": 0.3,
        "optimizer": "adam",
        "momentum": 0.1,
        "link": "none",
        "offset": 0.7,
        "lowest": -0.5,
        "learn": False,
        "controller": "policy",
        "reward": "train_loss",
        "reward_batches": 3,
    }
    config = EmbedderSiblingsConfig("scratch", {**values, "begin": str(tmp_path / "policy.safetensors")})
    built = config.build("ala_mixture")
    assert isinstance(built, AdaptiveLossAlignment)
    assert {name: getattr(built, name) for name in values} == values
    assert built.loss == "mixture"
    assert built.fresh_children
    assert built.begin is not None
    assert not EmbedderSiblingsConfig("model").build("ala_focal").fresh_children  # type: ignore[attr-defined]
    assert_refused(lambda: config.build("ala_focal"), ConfigError, "siblings.ala", "history=4")


def test_what_is_set_reaches_the_method(tmp_path: Path) -> None:
    SetLoss(3, "f1").save(tmp_path / "f1.safetensors")
    values: dict[str, Any] = {"iterations": 7, "model_steps": 2, "surrogate_steps": 4, "model_lr": 0.1, "evals": 3}
    values |= {"network": "published", "thresholds": 5, "judged": "evaluation", "first": "surrogate"}
    given = {**values, "surrogate_lr": 0.2, "clip": None, "universal": {"steps": 9, "lr": 0.3}}
    config = SiblingsConfig(sl={**given, "begin": str(tmp_path / "f1.safetensors")})
    built = config.build("sl_r")
    assert isinstance(built, SurrogateLearning)
    assert built.surrogate == "refined"
    assert {name: getattr(built, name) for name in values} == values
    assert (built.surrogate_lr, built.clip) == (0.2, None)
    assert (built.universal.steps, built.universal.lr, built.universal.clip) == (9, 0.3, 1e-5)
    assert built.begin is not None
    assert built.begin.metric == "f1"
    scratch = config.build("sl_s")
    assert isinstance(scratch, SurrogateLearning)
    assert scratch.begin is None


def test_what_is_set_reaches_reloss(tmp_path: Path) -> None:
    RelationalLoss("f1", absolute=True).save(tmp_path / "f1.safetensors")
    ours: dict[str, Any] = {"steps": 7, "lr": 0.1, "evals": 3}
    checkpoints = {"count": 3, "steps": 5, "lr": 0.2}
    source = {"training": 9, "heldout": 4, "random": 0.3, "outputs": {"scale": 2.0}, "checkpoints": checkpoints}
    learning = {"steps": 6, "batches": 8, "lr": 0.3, "weight_decay": 0.4, "penalty": 5, "gradient": "logits"}
    learning |= {"absolute": True, "steepness": 6.0}
    begin = str(tmp_path / "f1.safetensors")
    config = SiblingsConfig(reloss={**ours, "source": source, "training": learning, "begin": begin})
    built = config.build("reloss_only")
    assert isinstance(built, ReLoss)
    assert not built.cross_entropy
    assert {name: getattr(built, name) for name in ours} == ours
    assert built.source == BatchSource(9, 4, 0.3, RandomOutputs(2.0), Checkpoints(5, 0.2, 3))
    assert built.training == RelationalTraining(6, 8, 0.3, 0.4, 5.0, 6.0, gradient="logits", absolute=True)
    assert built.begin is not None
    assert built.begin.metric == "f1"


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (SiblingsConfig(trains="theta"), ("siblings.trains='theta'",)),
        (SiblingsConfig(threshold_evals=-1), ("threshold_evals", "0")),
        (SiblingsConfig(sl={"iterations": 0}), ("siblings.sl", "0", "1")),
        (SiblingsConfig(sl={"universal": {"steps": 0}}), ("siblings.sl", "0", "1")),
        (SiblingsConfig(sl={"iteratons": 4}), ("siblings.sl", "'iteratons'", "iterations")),
        (SiblingsConfig(sl={"iterations": "ten"}), ("siblings.sl", "iterations", "'ten'", "int")),
        (SiblingsConfig(sl={"surrogate": "scratch"}), ("siblings.sl", "'surrogate'")),
        (SiblingsConfig(reloss={"source": 3}), ("siblings.reloss", "source", "3")),
        (SiblingsConfig(reloss={"source": {"random": 2.0}}), ("siblings.reloss", "2.0", "1")),
        (SiblingsConfig(reloss={"source": {"checkpoints": {"count": 1}}}), ("siblings.reloss", "1", "2")),
    ],
)
def test_settings_out_of_range_are_refused_before_any_work(config: SiblingsConfig, names: tuple[str, ...]) -> None:
    assert_refused(lambda: config.check(["sl_u", "reloss"]), ConfigError, *names)


def test_settings_of_ala_out_of_range_are_refused_before_any_work() -> None:
    for made in (SiblingsConfig, EmbedderSiblingsConfig):
        with pytest.raises(ConfigError) as caught:
            made(ala={"optimizer": "lion"}).check(["ala_focal"])
        assert_named(caught, "siblings.ala", "lion")
        with pytest.raises(ConfigError) as caught:
            made(trains="all").check([])
        assert_named(caught, "siblings.trains='all'")
        with pytest.raises(FileFormatError):
            made(ala={"begin": "nowhere"}).check(["ala_focal"])


@pytest.mark.parametrize(
    ("config", "names", "named"),
    [
        (
            SiblingsConfig(sl={"begin": "x"}),
            ["sl_s"],
            ("siblings.sl.begin=x", "sl_u", "sl_r", "methods"),
        ),
        (SiblingsConfig(sl={"judged": "evaluation"}), ["sl_u"], ("siblings.sl.judged=evaluation", "sl_s", "sl_r")),
        (SiblingsConfig(sl={"first": "surrogate"}), ["sl_u"], ("siblings.sl.first=surrogate", "sl_s", "sl_r")),
        (SiblingsConfig(ala={"offset": 5.0}), ["ala"], ("siblings.ala.offset=5.0", "ala_focal")),
        (EmbedderSiblingsConfig(ala={"offset": 5.0}), ["ala_mixture"], ("siblings.ala.offset=5.0", "ala_focal")),
        (EmbedderSiblingsConfig(ala={"link": "none"}), ["ala_focal"], ("siblings.ala.link=none",)),
        (EmbedderSiblingsConfig(ala={"lowest": 0}), ["ala_focal"], ("siblings.ala.lowest=0",)),
        (
            EmbedderSiblingsConfig(ala={"controller": "confusion"}),
            ["ala_mixture", "ala_focal"],
            ("siblings.ala.controller=confusion", "methods", "ala_focal"),
        ),
    ],
)
def test_a_key_that_no_chosen_method_reads_is_refused(
    config: EmbedderSiblingsConfig, names: list[str], named: tuple[str, ...]
) -> None:
    assert_refused(lambda: config.check(names), ConfigError, *named)


def test_a_key_that_one_of_the_methods_reads_is_taken(tmp_path: Path) -> None:
    SetLoss(1, "f1").save(tmp_path / "f1.safetensors")
    config = SiblingsConfig(sl={"begin": str(tmp_path / "f1.safetensors"), "judged": "evaluation"})
    config.check(["sl_s", "sl_r"])
    EmbedderSiblingsConfig(ala={"offset": 5.0}).check(["ala_mixture", "ala_focal"])


def test_absolute_values_are_those_of_the_loss_to_begin_with(tmp_path: Path) -> None:
    files = {absolute: str(tmp_path / f"{absolute}.safetensors") for absolute in (False, True)}
    for absolute, file in files.items():
        RelationalLoss("f1", absolute).save(file)
    wrong = SiblingsConfig(reloss={"training": {"absolute": True}, "begin": files[False]})
    assert_refused(lambda: wrong.check(["reloss"]), ConfigError, "siblings.reloss", "True", "begin")
    SiblingsConfig(reloss={"begin": files[False]}).check(["reloss"])
    SiblingsConfig(reloss={"training": {"absolute": True}, "begin": files[True]}).check(["reloss"])


def test_a_surrogate_that_is_not_there_is_refused_before_any_work(tmp_path: Path) -> None:
    assert_refused(lambda: SiblingsConfig(sl={"begin": str(tmp_path / "none")}).check(["sl_r"]), FileFormatError)


class Nudge(Sibling):
    """Adds 1 to the first parameter, and asks the batch metric three times and the metric once."""

    def __init__(self) -> None:
        self.runs = 0

    def run(self, task: TrainingTask, seed: int, callback: Callback) -> tuple[None, dict[str, Any]]:
        self.runs += 1
        with torch.no_grad():
            task.parameters()[0].add_(1)
        for _ in range(3):
            task.batch_metric.cost(torch.zeros(2), torch.zeros(2), "nudge")
        return None, {"value": [(0, task.metric.cost(task.model, "nudge"))]}


def of(task: FinetuneTask) -> TrainingTask:
    return TrainingTask.of(
        task,
        trains="phi",
        predict=lambda model, batch: (batch, batch),
        batch_metric=BatchMetric(lambda scores, labels: 0.5, maximize=False),
    )


@pytest.fixture
def nudged(quadratic: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Compare the nudge alone, with a threshold that two queries find or without; returns the outcomes."""

    def run(method: Sibling, tuned: bool, resume: bool = False) -> Any:
        task = quadratic()
        metric = Metric(task.distance, maximize=False, bounds=None, name="distance")

        def tune(task: FinetuneTask, model: nn.Module) -> nn.Module | None:
            for _ in range(2):
                task.metric.cost(model, "threshold")
            return model if tuned else None

        made = training("sl_r", method, of, tune, folder=tmp_path, resume=resume)
        return task, compare(task.judged_by(metric), metric, {"sl_r": planned(made)}).outcomes["sl_r"]

    return run


def test_its_ends_are_judged_and_both_kinds_of_queries_count(nudged: Callable[..., Any], tmp_path: Path) -> None:
    task, (before, after) = nudged(Nudge(), tuned=True)
    true: Tensor = ((1 - task.goal) ** 2).sum()
    assert before.validation == after.validation == after.test == pytest.approx(float(true))
    assert (before.queries_total, after.queries_total, after.queries_per_start) == (1, 3, 3)
    assert before.batch_queries == after.batch_queries == 3
    assert after.seconds >= before.seconds > 0
    assert {path.name for path in tmp_path.iterdir()} == {"sl_r.json", "sl_r_model.safetensors"}
    assert len(nudged(Nudge(), tuned=False)[1]) == 1


def test_a_finished_training_is_not_repeated_on_resume(nudged: Callable[..., Any]) -> None:
    method = Nudge()
    _, first = nudged(method, tuned=True)
    _, again = nudged(method, tuned=True, resume=True)
    assert method.runs == 1
    assert [vars(each) | {"seconds": 0} for each in first] == [vars(each) | {"seconds": 0} for each in again]
    assert again[0].seconds == first[0].seconds
    nudged(method, tuned=True)
    assert method.runs == 2


@pytest.mark.parametrize("iterations", [2, 600, 30_000, 300_000])
def test_numbers_below_what_was_measured_on_the_way_do_not_touch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, iterations: int
) -> None:
    (tmp_path / "seed-0").mkdir()
    line = [[step * iterations / 10, 0.1] for step in range(11)]
    write_json(tmp_path / "seed-0" / "sl_s.json", {"history": {"surrogate": line, "distance": line, "metric": line}})
    figures: list[Any] = []
    monkeypatch.setattr("metricopt_ext.experiment.siblings.save_figure", lambda figure, path: figures.append(figure))
    plot_histories(tmp_path, [0])
    figures[0].draw_without_rendering()
    for axes in figures[0].axes:
        low, high = axes.get_xlim()
        shown = [label for label in axes.get_xticklabels() if low <= label.get_position()[0] <= high]
        texts = [label.get_text() for label in shown]
        assert len(set(texts)) == len(texts) > 1
        boxes = [label.get_window_extent() for label in shown]
        assert all(left.x1 + 4 < right.x0 for left, right in pairwise(boxes))


@pytest.mark.parametrize(("count", "rows"), [(1, 1), (4, 1), (5, 2), (11, 3)])
def test_what_was_measured_on_the_way_is_drawn_in_rows_of_four(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, rows: int
) -> None:
    (tmp_path / "seed-0").mkdir()
    names = [f"quantity {i}" for i in range(count)]
    write_json(tmp_path / "seed-0" / "sl_s.json", {"history": {name: [[0, 0.1], [9, 0.2]] for name in names}})
    figures: list[Any] = []
    monkeypatch.setattr("metricopt_ext.experiment.siblings.save_figure", lambda figure, path: figures.append(figure))
    plot_histories(tmp_path, [0])
    assert [axes.get_title() for axes in figures[0].axes] == names
    assert {axes.get_gridspec().get_geometry() for axes in figures[0].axes} == {(rows, min(4, count))}
