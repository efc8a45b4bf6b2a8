"""One seed of a real run, and several beside each other."""

import itertools
import json
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from helpers.refusals import assert_refused, having
from metricopt_ext.adapters.start import Start
from metricopt_ext.classification.config import ClassificationConfig, ClassifierAdapterConfig, MetricConfig, ModelConfig
from metricopt_ext.classification.data_config import DataConfig, TableConfig
from metricopt_ext.classification.experiment import ClassificationExperiment
from metricopt_ext.classification.predictions import scores_at
from metricopt_ext.comparison.comparison import Plan
from metricopt_ext.comparison.comparison import run_seed as compare_seed
from metricopt_ext.errors import FileFormatError
from metricopt_ext.experiment.cli import run_and_report
from metricopt_ext.experiment.dry_run import dry_run
from metricopt_ext.experiment.experiment import run_seed
from metricopt_ext.experiment.method import Started
from metricopt_ext.experiment.method_config import FinetuneConfig, RecipeConfig
from metricopt_ext.experiment.record import SeedRecord
from metricopt_ext.runtime.parallel import run_seeds
from metricopt_ext.runtime.progress import Callback


class Stages(Callback):
    """Keeps the stages that it is told of."""

    def __init__(self) -> None:
        self.stages: list[str] = []

    def stage(self, description: str) -> None:
        self.stages.append(description)


def without_seconds(record: SeedRecord) -> SeedRecord:
    outcomes = {name: [replace(each, seconds=0.0) for each in of] for name, of in record.outcomes.items()}
    return replace(record, outcomes=outcomes)


def tiny() -> ClassificationConfig:
    return ClassificationConfig(
        data=DataConfig(name="wine", fractions=[0.5, 0.25, 0.25], standardise=True),
        model=ModelConfig(name="tabular_mlp", epochs=3, batch_size=30),
        adapter=ClassifierAdapterConfig(kind="input_bias", dim=3),
        metric=MetricConfig(name="mcr"),
        finetune=FinetuneConfig(4, 0.1),
        method=RecipeConfig(evals=2, rounds=1, start_std=2.0, folds=2, trials=0),
        queries=30,
        batch_size=9,
    )


def test_free_starts_are_what_the_free_methods_reach(tmp_path: Path) -> None:
    experiment = ClassificationExperiment(tiny(), tmp_path, 3)
    starts, methods = experiment.starts(), experiment.methods()
    (loss,) = methods["loss_finetune"]({}).run(experiment.task)
    assert torch.equal(starts["loss_finetune"].phi, loss.end)  # type: ignore[arg-type]
    others = methods["batchnorm_validation"]({}).run(experiment.task)
    assert ("batchnorm" in starts) == bool(others)
    for other in others:
        cost = experiment.task.evaluate(starts["batchnorm"], "judge").cost
        assert cost == experiment.task.metric.cost(other.end, "judge")  # type: ignore[type-var]
    assert "threshold" in experiment.baselines(experiment.config)


def test_a_comparison_finetunes_on_validation_labels_as_the_tool_does(tmp_path: Path) -> None:
    experiment = ClassificationExperiment(tiny(), tmp_path, 3)
    (tools,) = experiment.methods()["loss_finetune_validation"]({}).run(experiment.task)
    baseline = experiment.baselines(experiment.config, experiment)["loss_finetune_validation"]
    (one, other) = baseline.run(experiment.task, Started.at(experiment.task.origin()), [1, 9], 3)
    assert torch.equal(one.end, tools.end)
    assert torch.equal(other.end, one.end)
    assert (one.queries, other.queries) == (0, 0)
    assert baseline.least(experiment.task.dim) == 0
    (elsewhere,) = baseline.run(experiment.task, Started.at(torch.ones_like(one.end)), [1], 3)
    assert not torch.equal(elsewhere.end, one.end)


def test_of_a_finetune_on_validation_labels_the_best_step_may_be_asked_for(tmp_path: Path) -> None:
    experiment = ClassificationExperiment(tiny(), tmp_path, 3)
    baselines, started = experiment.baselines(experiment.config, experiment), Started.at(experiment.task.origin())
    (walked,) = baselines["loss_finetune_validation"].run(experiment.task, started, [9], 3)
    best = list(baselines["loss_finetune_validation_best"].run(experiment.task, started, [2, 9], 3))
    assert walked.path is not None
    for reached, points in zip(best, (walked.path[[0, -1]], walked.path), strict=True):
        costs = [experiment.task.evaluate(phi, "judge").cost for phi in points]
        assert torch.equal(reached.end, points[costs.index(min(costs))])  # type: ignore[arg-type]
        assert reached.queries == len(points)


def test_data_that_take_long_say_how_far_they_are(tmp_path: Path) -> None:
    rows = [f"{number % 7},{number % 3}" for number in range(30)]
    (tmp_path / "own.csv").write_text("\n".join(["value,label", *rows]))
    data = TableConfig(name="csv", root=str(tmp_path / "own.csv"), target="label")
    seen = Stages()
    with mock.patch("metricopt_ext.runtime.pace.time.monotonic", side_effect=itertools.count(0, 20)):
        ClassificationExperiment(replace(tiny(), data=data), tmp_path, 3, seen)
    assert any("own.csv" in stage and re.search(r", \d+%, about .+ left$", stage) for stage in seen.stages), seen.stages


def with_soups(*more: str) -> ClassificationConfig:
    return ClassificationConfig(
        data=DataConfig(name="digits"),
        model=ModelConfig(name="small_cnn", epochs=2, lr=0.01, balanced=True),
        adapter=ClassifierAdapterConfig(layers=["norm*"], dim=3, outputs=True),
        metric=MetricConfig(name="accuracy"),
        finetune=FinetuneConfig(2, 0.1),
        starts=["soup", *more],
        queries=14,
    )


def test_a_soup_is_a_start_where_it_is_asked_for_kept_in_the_seeds_folder(tmp_path: Path) -> None:
    experiment = ClassificationExperiment(with_soups("soup_batchnorm", "soup_prior"), tmp_path, 3)
    starts, base = experiment.starts(), experiment.task.adapter.base_state_dict()
    assert list(starts) == ["soup", "soup_batchnorm", "soup_prior"]
    assert experiment.task.metric.ledger.spent == 0
    files = sorted((tmp_path / "soup").glob("finetune-*.safetensors"))
    assert len(files) == 6
    states = [load_file(file) for file in files]
    for name, value in base.items():
        if value.is_floating_point():
            mean = torch.stack([state[name].double() for state in states]).mean(0).to(value.dtype)
            assert torch.equal(starts["soup"].tensors[name], mean), name
    recalibrated, prior = starts["soup_batchnorm"], starts["soup_prior"]
    assert recalibrated.tensors.keys() >= starts["soup"].tensors.keys()
    assert not recalibrated.of_the_same(starts["soup"])
    assert prior.of_the_same(starts["soup"])
    assert torch.equal(prior.phi, experiment.start("prior").phi)  # type: ignore[union-attr]
    training = experiment.training()
    assert training.steps == max(1, 2 * len(experiment.splits.train) // experiment.config.model.batch_size)
    assert (training.rebalanced is not None, training.augment is not None) == (True, True)


def test_the_priors_of_classes_that_are_as_frequent_cost_no_query(tmp_path: Path) -> None:
    experiment = ClassificationExperiment(replace(with_soups(), starts=["prior", "prior_twice"]), tmp_path, 3)
    assert experiment.starts().keys() == {"prior", "prior_twice"}
    train = experiment.splits.train
    train.y[:] = torch.arange(len(train.y)) % 7 + 3
    assert experiment.starts() == {}  # a class without examples has no prior
    train.y[:] = torch.arange(len(train.y)) % 10
    kept = len(train.y) // 10 * 10
    experiment.splits = replace(experiment.splits, train=replace(train, x=train.x[:kept], y=train.y[:kept]))
    assert experiment.starts() == {}


def test_starts_of_batchnorm_share_one_pass_over_the_inputs(tmp_path: Path) -> None:
    experiment = ClassificationExperiment(with_soups(), tmp_path, 3)
    seen = list[int]()
    experiment.task.adapter.model.register_forward_pre_hook(lambda model, args: seen.append(len(args[0])))
    start, line, fixed = (experiment.start(name) for name in ("batchnorm", "batchnorm_line", "batchnorm_mixed"))
    assert sum(seen) == len(experiment.splits.validation)
    for t, expected in ((1.0, start), (0.75, fixed)):
        found = line.at(t).tensors  # type: ignore[union-attr]
        assert all(torch.equal(value, expected.tensors[name]) for name, value in found.items())  # type: ignore[union-attr]


@pytest.mark.slow
def test_baselines_end_at_starts_that_cost_what_they_ask_and_begin_other_methods(tmp_path: Path) -> None:
    names = ("whole_network_labels", "em_prior", "batchnorm_mixed", "soup", "soup_greedy", "whitening")
    plan = Plan((*names, "random_search"), (5, 14), ("soup_greedy", "batchnorm"))
    config = replace(with_soups(), starts=["loss_finetune"])
    compare_seed(ClassificationExperiment, config, plan, tmp_path, 3, Callback())
    found = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "seed-3").glob("*.json")}
    starts, cells = found["starts"], {name: found[name]["cells"] for name in plan.methods}
    assert starts["test"].keys() == {"pretrained", "soup_greedy", "batchnorm"}
    assert starts["queries"] == 3 + 6
    assert {name: [cells[name][b]["queries"] for b in cells[name]] for name in names} == {
        **{name: [0, 0] for name in names},
        "soup_greedy": [6],  # five are too few
        "whitening": [],  # of no classifier
    }
    assert cells["soup_greedy"]["14"]["test"] == starts["test"]["soup_greedy"]
    assert cells["random_search"]["14"]["queries"] == 14
    assert found["random_search"]["least"] > starts["queries"]
    finetunes = 6 * max(1, round(0.1 * (2 * 1257 // 100)))
    assert cells["soup"]["14"]["passes"] == {"metric": 0, "loss": finetunes}
    assert cells["soup_greedy"]["14"]["passes"] == {"metric": 6, "loss": finetunes}
    assert cells["em_prior"]["14"]["passes"] == {"metric": 0, "loss": 0}
    assert 120 <= cells["whole_network_labels"]["14"]["passes"]["loss"] <= 180
    assert cells["batchnorm_mixed"]["14"]["test"] not in (starts["test"]["batchnorm"], starts["test"]["pretrained"])


def test_the_error_of_a_classifiers_difference_is_that_of_paired_examples(tmp_path: Path) -> None:
    """For an error rate it is the root of sum_c n_c var_c, over n, with the variance of each class's differences."""
    config = tiny()
    config.data = DataConfig(name="breast_cancer", fractions=[0.3, 0.2, 0.5], standardise=True)
    experiment = ClassificationExperiment(config, tmp_path, 3)
    part, task = experiment.splits.test, experiment.task
    ends = task.origin(), task.starts(3.0, 0, [0])[0]
    wrong = [((scores_at(task.adapter, phi, part.x) > 0) != part.y).double() for phi in ends]
    change = wrong[1] - wrong[0]
    assert change.abs().sum() > 10
    classes = [change[part.y == label] for label in (0, 1)]
    expected = math.sqrt(sum(len(each) * float(each.var(correction=0)) for each in classes)) / len(change)
    before, after = map(Start, ends)
    assert experiment.test_error(before, after) == pytest.approx(expected, rel=0.2)  # 200 resamples: ± 5%
    assert experiment.test_error(before, before) == 0


def test_states_of_two_models_are_compared(tmp_path: Path) -> None:
    """A model with other buffers is another state at the same phi."""
    config = ClassificationConfig(
        data=DataConfig(name="digits"), model=ModelConfig(name="small_cnn", epochs=1), metric=MetricConfig(name="mcr")
    )
    experiment = ClassificationExperiment(config, tmp_path, 0)
    task, start = experiment.task, experiment.start("batchnorm")
    assert start is not None
    noisy = Start(start.phi, {name: torch.ones_like(value) for name, value in start.tensors.items()})
    before, after = Start(task.origin()), noisy
    assert experiment.test_error(before, after) > 0
    assert experiment.test_error(before, before) == experiment.test_error(after, after) == 0


@pytest.mark.slow
def test_workers_change_nothing_and_pass_their_errors_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny()
    alone = run_seeds(
        partial(run_seed, ClassificationExperiment, config, tmp_path / "a", False),
        [4, 2],
        queries=30,
        workers=1,
        threads=1,
    )
    assert [record.seed for record in alone] == [4, 2]
    assert alone[0].outcomes["loss_finetune"] != alone[1].outcomes["loss_finetune"]
    (tmp_path / "b" / "seed-1").mkdir(parents=True)
    (tmp_path / "b" / "seed-1" / "record.json").write_text("{")
    capsys.readouterr()
    assert_refused(
        lambda: run_seeds(
            partial(run_seed, ClassificationExperiment, config, tmp_path / "b", True),
            [4, 2, 1],
            queries=30,
            workers=2,
            threads=1,
        ),
        FileFormatError,
        "seed-1/record.json",
        "JSON",
    )
    for record in alone:
        kept = SeedRecord.load(tmp_path / "b" / f"seed-{record.seed}" / "record.json")
        assert without_seconds(kept) == without_seconds(record)
    shown = capsys.readouterr().out
    assert "seed 4  value function" in shown
    assert "seed 2  value function" in shown


@pytest.mark.slow
def test_a_class_that_the_metric_hardly_sees_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the log and before the first query, by the report and by a dry run; with enough examples, nowhere."""
    rows = ["0,low"] * 300 + ["1,mid"] * 100 + ["2,seldom"] * 3  # 20% and 70% of 3 are none and two
    (tmp_path / "t.csv").write_text("\n".join(["x,y", *rows]))
    config = tiny()
    config.data = TableConfig(name="csv", root=str(tmp_path / "t.csv"), target="y", fractions=[0.7, 0.1, 0.2])
    config.seeds = 2
    with pytest.warns(UserWarning, match=having("1", "3", "seldom", "0")) as told:
        run_and_report(ClassificationExperiment, config, tmp_path / "out", resume=False)
    assert sum("fewer than 10 examples" in str(each.message) for each in told) == 1
    log = (tmp_path / "out" / "log.txt").read_text()
    assert "('seldom' 0)" in log
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["rare"] == [{"of": "class", "groups": 3, "rare": 1, "fewest": {"seldom": 0}, "least": 10}] * 2
    capsys.readouterr()
    dry_run(ClassificationExperiment, config)
    assert "1 of 3 classes has fewer than 10 examples" in " ".join(capsys.readouterr().out.split())
