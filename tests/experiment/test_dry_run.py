"""What --dry-run prints, and that it does nothing else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.experiment.config_sections import AdapterConfig
from metricopt_ext.experiment.dry_run import dry_run, planned
from metricopt_ext.experiment.experiment import Experiment, Subject
from metricopt_ext.experiment.method_config import (
    FinetuneConfig,
    PaperConfig,
    PaperSettings,
    RecipeConfig,
)
from metricopt_ext.experiment.run_config import RunConfig
from metricopt_ext.methods.optimize import optimize_metric
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.tasks.ledger import Ledger
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask


def settings(**change: Any) -> RunConfig:
    given = {"queries": 60, "seeds": 2, "seed": 3, "best_evals": 4, **change}
    return RunConfig(adapter=AdapterConfig(dim=4), finetune=FinetuneConfig(10, 0.1), **given)


PAPER = PaperConfig(evals=3)
RECIPE = RecipeConfig(evals=3, rounds=2, folds=2, trials=1)


@pytest.fixture
def toy(quadratic: Callable[..., Any]) -> type[Experiment[Any]]:
    """An experiment that counts its evaluations, and keeps the tasks that it prepared."""

    class Toy(Experiment[RunConfig]):
        config_type = RunConfig
        tuned_file = "phi.pt"
        evaluated = 0
        made: list[FinetuneTask] = []  # noqa: RUF012

        @classmethod
        def describe(cls, config: RunConfig) -> Subject:
            return Subject("toy/square", "squares", "distance", maximize=False)

        def prepare(self) -> Any:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "model.safetensors").touch()
            task = quadratic()
            function = task.metric.function

            def evaluated(model: Any) -> float:
                Toy.evaluated += 1
                return float(function(model))

            metric = Metric(evaluated, **task.metric.settings, ledger=Ledger(60))
            self.made.append(task.judged_by(metric))
            return self.made[-1], metric.with_settings()

        def validation(self) -> Any:
            return [], self.task.batches

        def finish(self) -> None:
            (self.folder / "phi.pt").touch()

    return Toy


def shown(toy: Any, config: RunConfig, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what is printed, each run of spaces as one."""
    dry_run(toy, config)
    return " ".join(capsys.readouterr().out.split())


def test_it_evaluates_the_metric_twice_charges_nothing_and_writes_nothing(
    toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shown(toy, settings(), capsys)
    (task,) = toy.made
    assert toy.evaluated == 2
    assert task.metric.ledger.spent == 0
    assert list(tmp_path.iterdir()) == []


def test_what_takes_long_is_said_before_it_begins_and_not_done_twice(
    toy: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Time is played: an evaluation of a minute needs none to warm up."""
    clock, said = [0.0], []

    def slow(*given: Any) -> Any:
        said.append(capsys.readouterr().out)
        clock[0] += 60
        return evaluate(*given)

    evaluate = FinetuneTask.evaluate
    monkeypatch.setattr(FinetuneTask, "evaluate", slow)
    monkeypatch.setattr("metricopt_ext.experiment.dry_run.now", lambda: clock[0])
    dry_run(toy, settings())
    (before,) = said
    for name in ("squares", "distance", "data and model", "starts", "evaluation"):
        assert name in before
    assert "an evaluation takes 60 s" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (
            {"workers": 2},
            [
                "seeds 2 (3 to 4), 2 at a time",
                "starts 2, a query each",  # of those named, but one applies
                "design 4 queries",
                "batches about 14 of 4 queries",  # 60 - 2 - 4 - the end = 53
                "queries of MetricOpt 60 of 60 at most",
                "evaluations on validation 60 at most",
                "evaluations on test 5 at most",  # as trained, MetricOpt's, by the loss, by labels, and by BatchNorm
            ],
        ),
        (
            {"methods": ["loss_finetune_best", "cma_es"], "search_queries": 30, "pictures": ["curves"]},
            [
                "queries of loss finetune, best step 4 at most",
                "queries of CMA-ES on the metric 30 at most",
                "for ends and curves of these 24",  # two ends, and two paths of 11 points
                "evaluations on validation 118 at most",
                "evaluations on test 7 at most",
            ],
        ),
        (
            {"starts": ["batchnorm", "soup"]},
            ["starts 2, a query each", "soup 6 finetunes of the model, 10% of its training each: 60% more training"],
        ),
        (
            {"method": RECIPE, "methods": ["metricopt_paper"], "paper": PaperSettings(evals=3)},
            [
                "seeds 2 (3 to 4), 1 at a time",
                "rounds 2 of 8 tasks",  # (60 - 6 - 5) // 6
                "tasks 16 of 10 steps, 3 queries each",
                "then 6 queries to choose settings, 5 for the start and its guard",
                "queries of MetricOpt 59 of 60 at most",
                "queries of MetricOpt, Algorithm 1 60 at most",
            ],
        ),
        (
            {"method": PAPER},
            ["tasks 19 of 10 steps, 3 queries each", "3 for the start and its guard", "MetricOpt 60 of 60 at most"],
        ),
    ],
)
def test_the_table_has_the_planned_numbers(
    change: dict[str, Any], rows: list[str], toy: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    said = shown(toy, settings(**change), capsys)
    for row in rows:
        assert row in said, said


@pytest.mark.parametrize(("queries", "along", "batches"), [(30, 6, 5), (12, 4, 1), (9, 0, 1)])
def test_the_plan_of_a_line_is_what_a_search_asks(
    queries: int, along: int, batches: int, quadratic: Callable[..., Any]
) -> None:
    """The start, points of the line, pairs on opposite sides of the best of these, and what f proposes."""
    way = torch.tensor([1.0, -2.0, 0.5, 0.0]).double()
    line, task = StartLine(lambda t: Start(t * way), -2.0, 2.0), quadratic(4)
    config = settings(queries=queries, starts=["prior_line"])
    strategy = config.build_strategy()
    rows, work = planned(strategy, config, 4, 1, {"prior_line": line})
    assert [what for name, what in rows if name != "batches"] == [
        "1, a query each: the model as trained",
        f"{along} queries" if along else "left out, as there are too few queries",
        f"{min(4, queries - 2 - along)} queries around the start that is chosen",
    ]
    assert dict(rows)["batches"].startswith(f"about {batches} of 4 queries")
    assert work.queries == queries
    result = optimize_metric(task, queries=queries, starts={"line": line}, callback=Callback())
    points, costs = result.points.double(), result.costs
    off = (points - torch.outer(points @ way / (way @ way), way)).norm(dim=1)
    assert (off < 1e-9).tolist() == [True] * (1 + along) + [False] * (len(points) - 1 - along)
    best = points[min(range(1 + along), key=lambda at: costs[at])]
    for pair in range(min(4, queries - 2 - along) // 4 * 2):
        torch.testing.assert_close((points[1 + along + pair] + points[3 + along + pair]) / 2, best)
    assert len(points) == queries - 1  # the end is a query of its own
    assert result.queries == {"starts": 1 + along, "search": queries - 1 - along}


def test_a_line_is_planned_from_what_is_presumed() -> None:
    """As a search looks along it: from the whitening, which is in force, to the whitening with BatchNorm besides."""
    own, phi = {"whitening": 0.5}, torch.zeros(4)
    line = StartLine(lambda t: Start(phi, {"mean": torch.full((3,), t)}, own), 0.0, 1.0, (0.75, 0.5, 1.0))
    found = {
        "whitening": Start(phi, settings=own, presumed=True),
        "both": Start(phi, {"mean": torch.ones(3)}, own),
        "line": line,
    }
    config = settings(queries=60)
    rows, _ = planned(config.build_strategy(), config, 4, 1, found, {"mean": torch.zeros(3)})
    along = dict(rows)["the line line"]
    assert "including those of both" in along
    assert "whitening" not in along
    assert "if both is better" in along


def test_the_time_is_the_probes_times_the_plan() -> None:
    config = settings(method=RECIPE)
    _, work = planned(config.build_strategy(), config, 4, population=3)
    # Two rounds of 8 tasks and 6 trials, three at a time, of 10 steps each; 4 ends of the guard, one by one.
    assert work == (2 * 8 * 3 + 6 + 5, 4 * 10, (2 * 3 + 2) * 10, 3)
