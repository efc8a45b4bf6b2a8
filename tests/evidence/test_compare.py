"""MetricOpt beside its rivals: outcomes against independent evaluation, baselines against naive loops."""

import copy
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.classification.config import (
    AdapterConfig,
    ClassificationConfig,
    DataConfig,
    MetricConfig,
    ModelConfig,
)
from metricopt_ext.classification.experiment import run_seed
from metricopt_ext.errors import ConfigError, FileFormatError
from metricopt_ext.evidence.compare import compare, open_run
from metricopt_ext.evidence.record import Outcome, SeedRecord
from metricopt_ext.evidence.rivals import best_of_loss_finetune, finetune_on, reestimate_batchnorm
from metricopt_ext.evidence.run_config import RecipeConfig
from metricopt_ext.methods.pipeline import optimize_metric
from metricopt_ext.methods.recipe import Recipe
from metricopt_ext.methods.tuning import FRESH, finetune, metric_policy
from metricopt_ext.search.optimizer import LossStep
from metricopt_ext.tasks.batches import TensorBatches
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.parallel import run_seeds
from metricopt_ext.utils.progress import Watcher
from metricopt_ext.value.learners import RidgeLearner

RECIPE = Recipe(steps=10, lr=0.1, evals=3, rounds=2, folds=2, trials=1, learners=(RidgeLearner(),))
SPENT, QUERIES = 45, 47
ALWAYS = ["pretrained", "loss_finetune", "loss_finetune_best", "metricopt"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Hidden:
    """The test metric: the distance to another goal, which counts how often it is asked."""

    def __init__(self, goal: Tensor) -> None:
        self.goal, self.asked = goal, 0
        self.metric = Metric(self, maximize=False, bounds=None, name="distance")

    def at(self, phi: Tensor) -> float:
        return float(((phi - self.goal) ** 2).sum())

    def __call__(self, model: Any) -> float:
        self.asked += 1
        return self.at(model.metricopt.phi)


def beside(task: Any, folder: Path, rivals: Any = None, *, best_evals: int = 6, **arguments: Any) -> tuple[Any, Hidden]:
    hidden = Hidden(task.goal + 0.1)
    record = compare(
        task,
        hidden.metric,
        rivals or {},
        queries=QUERIES,
        recipe=RECIPE,
        seed=3,
        folder=folder,
        best_evals=best_evals,
        watcher=Watcher(),
        **arguments,
    )
    return record, hidden


def without_seconds(record: SeedRecord) -> SeedRecord:
    return replace(record, outcomes={name: replace(o, seconds=0.0) for name, o in record.outcomes.items()})


# --- One seed --------------------------------------------------------------------------------------------------


def test_outcomes_are_what_the_phis_are_worth(quadratic: Callable[..., Any], tmp_path: Path) -> None:
    task, twin = quadratic(noise=2.0), quadratic(noise=2.0)
    record, hidden = beside(task, tmp_path)
    alone = optimize_metric(twin, queries=QUERIES, strategy=RECIPE, seed=3, watcher=Watcher())
    path = finetune(twin, LossStep(0.1), 10, seed=3)
    best = min((path[step] for step in (0, 2, 4, 6, 8, 10)), key=twin.true_cost)  # 6 evenly spaced of 11 points
    phis = {
        "pretrained": torch.zeros(4, dtype=torch.float64),
        "loss_finetune": path[-1],
        "loss_finetune_best": best,
        "metricopt": alone.ends[alone.chosen],
    }
    assert list(record.outcomes) == list(phis) == ALWAYS
    for name, phi in phis.items():
        assert record.outcomes[name].validation == pytest.approx(task.true_cost(phi), rel=1e-12)
        assert record.outcomes[name].test == pytest.approx(hidden.at(phi), rel=1e-12)
    assert not torch.equal(best, path[-1])
    assert hidden.asked == hidden.metric.ledger.spent == len(phis)
    assert torch.equal(task.adapter.phi, phis["metricopt"])
    assert (record.seed, record.kept, record.setting) == (3, alone.chosen, alone.setting)
    assert record.quality == alone.fit.f.quality == record.candidates["ridge"]
    assert record.true == alone.fit.true.tolist()
    assert record.predicted == alone.fit.predicted.tolist()
    steered = finetune(twin, metric_policy(alone.fit.f, RECIPE, alone.setting), 10, seed=3)
    assert record.curves == {
        "loss_finetune": [twin.true_cost(phi) for phi in path],
        "metricopt": [twin.true_cost(phi) for phi in steered],
    }


def test_metrics_of_higher_is_better_keep_their_units(quadratic: Callable[..., Any], tmp_path: Path) -> None:
    lower, higher = quadratic(), quadratic()
    higher = replace(
        higher, metric=Metric(lambda model: 100 - higher.distance(model), maximize=True, bounds=(0.0, 100.0))
    )
    a, b = beside(lower, tmp_path / "a")[0], beside(higher, tmp_path / "b")[0]
    for name in ALWAYS[:3]:
        assert b.outcomes[name].validation == pytest.approx(100 - a.outcomes[name].validation)
    assert b.outcomes["metricopt"].validation > b.outcomes["loss_finetune"].validation
    torch.testing.assert_close(torch.tensor(b.true), 100 - torch.tensor(a.true), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("best_evals", [1, 2, 5, 11, 51])
def test_the_best_step_is_the_best_of_the_evaluated_ones(
    quadratic: Callable[..., Any], tmp_path: Path, best_evals: int
) -> None:
    task = quadratic(noise=2.0)
    record, _ = beside(task, tmp_path, best_evals=best_evals)
    path = finetune(task, LossStep(0.1), 10, seed=3)
    evals = min(best_evals, 11)
    steps = [0] if evals == 1 else [round(i * 10 / (evals - 1)) for i in range(evals)]
    outcome = record.outcomes["loss_finetune_best"]
    assert outcome.validation == min(task.true_cost(path[step]) for step in steps)
    assert (outcome.queries_total, outcome.queries_per_start) == (evals, evals)
    twin = quadratic(noise=2.0)
    assert task.true_cost(best_of_loss_finetune(twin, path, best_evals)) == outcome.validation
    assert twin.queries == evals


def test_each_method_is_charged_with_what_it_asked(quadratic: Callable[..., Any], tmp_path: Path) -> None:
    def asking(task: FinetuneTask, result: Any) -> Tensor:
        task.costs_at(torch.randn(4, task.dim), "search")
        return task.origin()[None]

    task = quadratic()
    record, _ = beside(task, tmp_path, {"silent": lambda task, result: task.origin()[None], "asking": asking})
    assert {name: (o.queries_total, o.queries_per_start) for name, o in record.outcomes.items()} == {
        "pretrained": (0, 0),
        "loss_finetune": (0, 0),
        "loss_finetune_best": (6, 6),
        "silent": (0, 0),
        "asking": (4, 4),
        "metricopt": (SPENT, 3),
    }
    assert task.metric.ledger.spent_on == {"collect": 36, "choose": 6, "guard": 3}  # the others' are not in it


def test_rivals_may_return_points_a_model_or_nothing(quadratic: Callable[..., Any], tmp_path: Path) -> None:
    points = torch.randn(7, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def model(task: FinetuneTask, result: Any) -> nn.Module:
        other = copy.deepcopy(task.adapter.model)
        other.metricopt.phi.data.copy_(points[3])
        return other

    task = quadratic()
    rivals = {"points": lambda task, result: points, "model": model, "nothing": lambda task, result: None}
    record, hidden = beside(task, tmp_path, rivals)
    assert list(record.outcomes) == [*ALWAYS[:3], "points", "model", "metricopt"]
    for name, phi in (("points", points[-1]), ("model", points[3])):
        assert record.outcomes[name].validation == task.true_cost(phi)
        assert record.outcomes[name].test == hidden.at(phi)
    assert hidden.asked == 6
    assert record.curves["points"] == [task.true_cost(phi) for phi in points]
    assert set(record.curves) == {"loss_finetune", "points", "metricopt"}


def test_seconds_are_booked_on_who_took_them(
    quadratic: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, now = quadratic(), [0.0]
    monkeypatch.setattr("metricopt_ext.evidence.compare.time", SimpleNamespace(perf_counter=lambda: now[0]))

    def takes_a_second(model: nn.Module) -> float:
        now[0] += 1
        return task.distance(model)

    def slow(task: FinetuneTask, result: Any) -> None:
        now[0] += 100

    def model(task: FinetuneTask, result: Any) -> nn.Module:
        now[0] += 7
        return task.adapter.model

    task = replace(task, metric=Metric(takes_a_second, maximize=False, bounds=None, name="distance"))
    record, _ = beside(task, tmp_path, {"slow": slow, "model": model})
    assert {name: outcome.seconds for name, outcome in record.outcomes.items()} == {
        "pretrained": 0,
        "loss_finetune": 0,
        "loss_finetune_best": 6,
        "model": 7,
        "metricopt": SPENT,
    }


def test_an_interrupted_comparison_ends_as_an_uninterrupted_one(quadratic: Callable[..., Any], tmp_path: Path) -> None:
    expected, _ = beside(quadratic(), tmp_path / "whole")

    def interrupted(task: FinetuneTask, result: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        beside(quadratic(), tmp_path / "broken", {"rival": interrupted})
    task = quadratic()
    record, _ = beside(task, tmp_path / "broken", resume=True)
    assert without_seconds(record) == without_seconds(expected)
    assert task.metric.ledger.spent == SPENT
    with pytest.raises(FileFormatError, match="holds an earlier run"):
        beside(quadratic(), tmp_path / "broken")


# --- Records ---------------------------------------------------------------------------------------------------


def test_a_record_survives_its_file(quadratic: Callable[..., Any], tmp_path: Path) -> None:
    record, _ = beside(quadratic(), tmp_path)
    record.save(tmp_path / "record.json")
    assert SeedRecord.load(tmp_path / "record.json") == record
    assert json.loads((tmp_path / "record.json").read_text())["outcomes"]["metricopt"]["queries_total"] == SPENT


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: json.dumps(whole)[:100],
        lambda whole: "",
        lambda whole: "[1, 2]",
        lambda whole: json.dumps({key: value for key, value in whole.items() if key != "outcomes"}),
        lambda whole: json.dumps({key: value for key, value in whole.items() if key != "curves"}),
        lambda whole: json.dumps({**whole, "surplus": 1}),
        lambda whole: json.dumps({**whole, "outcomes": []}),
        lambda whole: json.dumps({**whole, "quality": {"spearman": 1.0}}),
        lambda whole: json.dumps({**whole, "setting": None}),
    ],
)
def test_a_damaged_record_is_refused(quadratic: Callable[..., Any], tmp_path: Path, damage: Any) -> None:
    outcome = Outcome(0.5, 0.5, 1, 1, 0.1)
    quality = {"spearman": 0.5, "mae": 0.1, "constant_mae": 0.2, "points": 9, "trajectories": 3}
    whole = {
        "seed": 0,
        "outcomes": {"metricopt": asdict(outcome)},
        "quality": quality,
        "candidates": {"ridge": quality},
        "trivial": {"constant": quality},
        "kept": "start",
        "setting": [0.0, 0.1],
        "split_half": None,
        "chance": 0.0,
        "curves": {},
        "true": [0.5],
        "predicted": [0.5],
    }
    path = tmp_path / "record.json"
    path.write_text(json.dumps(whole))
    assert SeedRecord.load(path).outcomes == {"metricopt": outcome}
    path.write_text(damage(whole))
    with pytest.raises(FileFormatError, match=rf"{re.escape(str(path))} .*delete it to have it made again"):
        SeedRecord.load(path)


def test_a_run_folder_is_not_mixed(tmp_path: Path) -> None:
    config = {"queries": 600, "recipe": {"steps": 50}, "seed": 0, "seeds": 5, "workers": 1, "device": "auto"}
    open_run(tmp_path, {**config, "queries": 5}, resume=False)
    open_run(tmp_path, config, resume=False)  # the first one failed before it made anything
    (tmp_path / "seed-0").mkdir()
    with pytest.raises(FileFormatError, match=r"holds an earlier run: add --resume to go on with it"):
        open_run(tmp_path, config, resume=False)
    open_run(tmp_path, config, resume=True)
    open_run(tmp_path, {**config, "seed": 3, "seeds": 9, "workers": 2, "device": "cpu"}, resume=True)
    with pytest.raises(FileFormatError, match=r"queries was 600, now 700"):
        open_run(tmp_path, {**config, "queries": 700}, resume=True)
    with pytest.raises(FileFormatError, match=r"recipe was \{'steps': 50\}, now \{'steps': 60\}"):
        open_run(tmp_path, {**config, "recipe": {"steps": 60}}, resume=True)
    open_run(tmp_path / "new", config, resume=True)  # nothing there to go on with
    assert json.loads((tmp_path / "new" / "run.json").read_text()) == {"queries": 600, "recipe": {"steps": 50}}


# --- Baselines -------------------------------------------------------------------------------------------------


def statistics(norm: nn.Module) -> tuple[Tensor, Tensor]:
    return norm.running_mean, norm.running_var


@pytest.mark.parametrize("batches", [1, 4])
def test_batchnorm_statistics_are_those_of_the_inputs(batches: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5, momentum=0.3), nn.ReLU(), nn.Linear(5, 2)).eval()
    adapter = attach_film(model, dim=4)
    adapter.set_phi(torch.full((4,), 0.7))
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(40, 3) * 2 + 1
    other = reestimate_batchnorm(model, x.split(40 // batches))
    with torch.no_grad():
        inputs = torch.nn.functional.linear(x, model[0].weight, model[0].bias).view(batches, -1, 5)
    mean, var = statistics(other[1])
    torch.testing.assert_close(mean, inputs.mean(1).mean(0))
    torch.testing.assert_close(var, inputs.var(1).mean(0))
    assert (mean - before["1.running_mean"]).abs().min() > 0.01
    assert not hasattr(other, "metricopt")  # the copy is the model without phi
    assert other[1].momentum == 0.3
    assert not any(module.training for module in other.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(adapter.phi, torch.full((4,), 0.7))
    with torch.no_grad():
        expected = model[3](torch.relu((inputs.flatten(0, 1) - mean) / (var + 1e-5).sqrt()))
    torch.testing.assert_close(other(x), expected, rtol=1e-4, atol=1e-5)


def test_batchnorm_statistics_of_images_and_of_a_model_in_training() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).train()
    x = torch.randn(6, 2, 8, 8)
    mean, var = statistics(reestimate_batchnorm(model, [x])[1])
    h = model[0](x).detach().movedim(1, 0).flatten(1)
    torch.testing.assert_close(mean, h.mean(1))
    torch.testing.assert_close(var, h.var(1))
    assert model.training
    assert int(model[1].num_batches_tracked) == 0


def test_batchnorm_statistics_are_taken_without_dropout_and_without_random_numbers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.BatchNorm1d(5))
    x, state = torch.randn(30, 3), torch.get_rng_state()
    mean, var = statistics(reestimate_batchnorm(model, [x])[2])
    torch.testing.assert_close(mean, model[0](x).detach().mean(0))
    torch.testing.assert_close(var, model[0](x).detach().var(0))
    assert torch.equal(torch.get_rng_state(), state)


def test_no_batchnorm_nothing_to_reestimate() -> None:
    assert reestimate_batchnorm(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)), [torch.randn(4, 3)]) is None


def test_finetuning_on_other_batches_uses_them(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    examples = torch.randn(9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batches = TensorBatches(examples, examples, batch_size=1)
    phi = torch.zeros(4, dtype=torch.float64)
    expected = [phi]
    for step in range(6):
        x, _ = batches(5, FRESH, step)
        phi = phi - 0.2 * task.curvature * (phi - task.centre - x[0])
        expected.append(phi)
    path = finetune_on(task, lambda seed, index, step: batches(seed, index, step)[0][0], 0.2, 6, seed=5)
    torch.testing.assert_close(path, torch.stack(expected))
    assert not torch.allclose(path, finetune(task, LossStep(0.2), 6, seed=5))
    assert task.queries == 0


# --- Several seeds ---------------------------------------------------------------------------------------------


def tiny() -> ClassificationConfig:
    return ClassificationConfig(
        data=DataConfig(name="wine", fractions=[0.5, 0.25, 0.25], standardise=True),
        model=ModelConfig(name="tabular_mlp", epochs=3, batch_size=30),
        adapter=AdapterConfig(kind="input_bias", dim=3),
        metric=MetricConfig(name="mcr"),
        recipe=RecipeConfig(steps=4, lr=0.1, evals=2, rounds=1, folds=2, trials=0, start_std=1.0),
        queries=30,
        batch_size=9,
        best_evals=2,
    )


@pytest.mark.slow
def test_workers_change_nothing_and_pass_their_errors_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny()
    alone = run_seeds(partial(run_seed, config, tmp_path / "a", False), [4, 2], queries=30, workers=1, threads=1)
    assert [record.seed for record in alone] == [4, 2]
    assert alone[0].outcomes["loss_finetune"] != alone[1].outcomes["loss_finetune"]
    (tmp_path / "b" / "seed-1").mkdir(parents=True)
    (tmp_path / "b" / "seed-1" / "record.json").write_text("{")
    capsys.readouterr()
    with pytest.raises(FileFormatError, match=r"seed-1.record\.json is not valid JSON"):
        run_seeds(partial(run_seed, config, tmp_path / "b", True), [4, 2, 1], queries=30, workers=2, threads=1)
    for record in alone:
        kept = SeedRecord.load(tmp_path / "b" / f"seed-{record.seed}" / "record.json")
        assert without_seconds(kept) == without_seconds(record)
    shown = capsys.readouterr().out
    assert "seed 4  value function" in shown
    assert "seed 2  value function" in shown


@pytest.mark.parametrize(("workers", "threads"), [(0, 1), (1, 0), (-1, 1)])
def test_workers_and_threads_are_at_least_one(workers: int, threads: int) -> None:
    with pytest.raises(ConfigError, match=f"workers={workers}, threads={threads}: both must be at least 1"):
        run_seeds(lambda seed, watcher: pytest.fail("was run"), [0], queries=1, workers=workers, threads=threads)
