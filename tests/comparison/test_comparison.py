"""One seed of a comparison on a quadratic: the same start for all, a file for each, and errors that stop nothing."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from helpers.inference import put_into
from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.comparison.comparison import Plan, finished, run_seed
from metricopt_ext.experiment.baselines import at_each_budget, metricopt, searched, searching, usual_baselines
from metricopt_ext.experiment.experiment import Experiment, Subject
from metricopt_ext.experiment.method import Baseline, Reached, Started
from metricopt_ext.experiment.run_config import RunConfig
from metricopt_ext.methods.optimize import optimize_metric
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.direct import CMAES, RandomSearch
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.settings import Setting, Settings

PLAN = Plan(("random_search", "cma_es", "ngopt", "noisy_ei", "metricopt"), (4, 20, 60))


def failing(task: Any, started: Started, budgets: Sequence[int], seed: int) -> Iterator[Reached]:
    if max(budgets) > 30:
        raise RuntimeError("out of\nmemory")
    yield Reached(started.start.phi, 1, 1, 0.0)


def greedy(task: Any, started: Started, budgets: Sequence[int], seed: int) -> Iterator[Reached]:
    for queries in budgets:
        yield Reached(started.start.phi, queries + 1, 1, 0.0)


@pytest.fixture
def experiment(quadratic: Callable[..., Any]) -> type[Experiment[Any]]:
    """An experiment on the quadratic, whose second start is the best; baselines of all kinds."""

    class Known(Experiment[RunConfig]):
        config_type = RunConfig
        built: ClassVar[list[int]] = []
        baselines_now: ClassVar[dict[str, Baseline]] = {
            "random_search": searching(RandomSearch()),
            "cma_es": searching(CMAES()),
            "ngopt": Baseline(failing, lambda dim: 1),
            "noisy_ei": Baseline(greedy, lambda dim: 1, anytime=True),
            "metricopt": at_each_budget(lambda *_: None, lambda dim: 1),
        }

        @classmethod
        def describe(cls, config: Any) -> Subject:
            return Subject("known", "quadratic", "distance", False)

        def prepare(self) -> Any:
            self.built.append(self.seed)
            self.made = quadratic()
            return self.made, self.made.metric.with_settings()

        def validation(self) -> Any:
            raise AssertionError("no start of these needs it")

        def starts(self) -> dict[str, Start]:
            return {"half": Start(self.made.goal / 2)}

        @classmethod
        def baselines(cls, config: Any, subject: Any = None) -> dict[str, Baseline]:
            return cls.baselines_now

    return Known


def rows(folder: Path, seed: int = 5) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in (folder / f"seed-{seed}").glob("*.json")}


def test_every_row_counts_the_choice_of_the_start(
    experiment: Any, quadratic: Callable[..., Any], tmp_path: Path
) -> None:
    run_seed(experiment, RunConfig(), PLAN, tmp_path, 5, Callback())
    found, problem = rows(tmp_path), quadratic()
    half = problem.goal / 2
    assert found["starts"]["chosen"] == "half"
    assert found["starts"]["test"]["half"] == problem.true_cost(half)
    random = found["random_search"]
    assert random["least"] == 2 + 2
    assert {budget: cell["queries"] for budget, cell in random["cells"].items()} == {"4": 4, "20": 20, "60": 60}
    ends = {budget: searched(quadratic(), RandomSearch(), half, budget - 2, seed=5) for budget in (4, 20, 60)}
    for budget, end in ends.items():
        cell = random["cells"][str(budget)]
        assert cell["test"] == cell["validation"] == end.cost
        assert cell["guard"] is None
    assert found["cma_es"]["least"] == CMAES().least_queries(4) + 2
    assert list(found["cma_es"]["cells"]) == ["20", "60"]  # 4 are impossible
    assert found["cma_es"]["cells"]["20"]["test"] == searched(quadratic(), CMAES(), half, 18, seed=5).cost


def test_ends_satisfy_constraints_that_are_relative_to_the_trained_model(
    experiment: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best start lies beyond the limit, so another is chosen; each search ends within it, and gains."""
    prepared, goals = experiment.prepare, list[Any]()

    def prepare(self: Any) -> Any:
        task, test = prepared(self)
        goals.append(goal := task.problem.goal)

        def both(model: Any) -> dict[str, float]:
            along = float(goal @ model.metricopt.phi.detach() / goal.norm())
            return {"distance": task.distance(model), "along": along}

        limit = f"<= start + {0.4 * float(goal.norm())}"
        metric = Metric(both, maximize=False, bounds=None, name="distance", subject_to={"along": limit})
        return replace(task, metric=metric), test

    def starts(self: Any) -> dict[str, Start]:
        return {"half": Start(self.made.goal / 2), "less": Start(self.made.goal / 4)}

    ends: dict[str, list[Any]] = {}

    def noting(name: str, baseline: Baseline) -> Baseline:
        def run(task: Any, *rest: Any) -> Iterator[Reached]:
            for reached in baseline.run(task, *rest):
                ends.setdefault(name, []).append(reached.end)
                yield reached

        return replace(baseline, run=run)

    monkeypatch.setattr(experiment, "prepare", prepare)
    monkeypatch.setattr(experiment, "starts", starts)
    own = {"random_search": searching(RandomSearch()), "cma_es": searching(CMAES()), "metricopt": metricopt()}
    own = {name: noting(name, each) for name, each in own.items()}
    monkeypatch.setattr(experiment, "baselines_now", own)
    run_seed(experiment, RunConfig(), Plan(tuple(own), (40, 60)), tmp_path, 5, Callback())
    found = rows(tmp_path)
    (goal,) = goals
    assert found["starts"]["chosen"] == "less"
    for name in own:
        assert found[name]["errors"] == {}
        assert len(ends[name]) == 2
        for end, cell in zip(ends[name], found[name]["cells"].values(), strict=True):
            assert float(goal @ end / goal.norm()) <= 0.4 * float(goal.norm()) + 1e-9
            assert cell["validation"] <= found["starts"]["validation"]["less"]


def test_errors_mark_their_cells_and_the_rest_goes_on(experiment: Any, tmp_path: Path) -> None:
    run_seed(experiment, RunConfig(), PLAN, tmp_path, 5, Callback())
    found = rows(tmp_path)
    assert list(found["ngopt"]["cells"]) == ["4", "20"]
    assert found["ngopt"]["errors"] == {"60": "RuntimeError: out of memory"}
    assert found["noisy_ei"]["cells"] == {}
    assert found["noisy_ei"]["errors"] == dict.fromkeys(
        ("4", "20", "60"), "BudgetError: 5 queries were spent of a budget of 4"
    )
    assert (found["metricopt"]["cells"], found["metricopt"]["errors"]) == ({}, {})  # does not apply
    assert len(found["random_search"]["cells"]) == 3


def test_only_what_is_missing_or_failed_is_run_again(experiment: Any, tmp_path: Path) -> None:
    run_seed(experiment, RunConfig(), PLAN, tmp_path, 5, Callback())
    folder = tmp_path / "seed-5"
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.json")}
    experiment.baselines_now["ngopt"] = searching(RandomSearch())
    experiment.baselines_now["noisy_ei"] = searching(RandomSearch())
    (folder / "cma_es.json").unlink()
    run_seed(experiment, RunConfig(), PLAN, tmp_path, 5, Callback())
    after = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.json")}
    assert {name for name in after if after[name] == before[name]} == {"random_search.json", "metricopt.json"}
    assert rows(tmp_path)["ngopt"]["errors"] == {}
    assert experiment.built == [5, 5]
    run_seed(experiment, RunConfig(), PLAN, tmp_path, 5, Callback())
    assert experiment.built == [5, 5]  # nothing is missing


def test_budgets_that_were_left_out_are_run_later(experiment: Any, tmp_path: Path) -> None:
    names = ("random_search", "metricopt")  # of which the second does not apply
    for most, cells in (({"random_search": 3}, []), ({"random_search": 20}, ["4", "20"]), ({}, ["4", "20", "60"])):
        plan = Plan(names, (4, 20, 60), most=most)
        run_seed(experiment, RunConfig(), plan, tmp_path, 5, Callback())
        assert list(rows(tmp_path)["random_search"]["cells"]) == cells
    assert experiment.built == [5, 5, 5]
    run_seed(experiment, RunConfig(), Plan(names, (4, 20, 60), most={"random_search": 4}), tmp_path, 5, Callback())
    assert experiment.built == [5, 5, 5]
    file = tmp_path / "seed-5" / "random_search.json"
    row = rows(tmp_path)["random_search"]
    assert row["budgets"] == [4, 20, 60]
    assert finished(file, [4, 20, 60])
    file.write_text(json.dumps({**row, "budgets": [4, 20]}))
    assert not finished(file, [4, 20, 60])


def test_a_guard_is_judged_on_the_test_data(
    experiment: Any, quadratic: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment.baselines_now["metricopt"] = metricopt()
    monkeypatch.setattr(experiment, "test_error", lambda self, before, after: float((after.phi - before.phi).norm()))
    run_seed(experiment, RunConfig(), Plan(("metricopt",), (60,)), tmp_path, 5, Callback())
    problem = quadratic()
    half = problem.goal / 2
    alone = optimize_metric(quadratic(), queries=60, starts={"half": Start(half)}, seed=5, callback=Callback())
    end = alone.ends["search"]
    cell = rows(tmp_path)["metricopt"]["cells"]["60"]
    guard = cell["guard"]
    assert guard["accepted"]
    assert guard["kept"] == "search"
    assert guard["change"] == pytest.approx(problem.true_cost(half) - problem.true_cost(end))
    assert guard["gain"] == pytest.approx(guard["change"])  # both look at the same metric here
    assert guard["error"] == pytest.approx(float((end - half).norm()))
    assert guard["whole"]["change"] == pytest.approx(problem.true_cost(0 * half) - problem.true_cost(end))
    assert guard["whole"]["error"] == pytest.approx(float(end.norm()))
    assert cell["test"] == problem.true_cost(end)


def test_free_settings_hold_for_a_search_that_tunes_no_others(
    experiment: Any, quadratic: Callable[..., Any], tmp_path: Path
) -> None:
    now = {"k": 0}

    class Free(experiment):  # type: ignore[misc]
        def prepare(self) -> Any:
            self.made = task = quadratic()
            distance = Metric(
                lambda model: float(task.problem.distance(model)) + 0.3 * (now["k"] == 0), maximize=False, bounds=None
            )
            return task.judged_by(distance), distance.with_settings()

        def own_settings(self) -> Settings:
            return Settings([Setting("k", values=(0, 1), default=0)], put_into(now), alone=(), free={"k": 1})

        @classmethod
        def baselines(cls, config: Any, subject: Any = None) -> dict[str, Baseline]:
            return usual_baselines(config, lambda: subject.settings)

    run_seed(Free, RunConfig(), Plan(("settings_free", "settings+phi"), (40,)), tmp_path, 5, Callback())
    found = rows(tmp_path)
    free, both = (found[name]["cells"]["40"] for name in ("settings_free", "settings+phi"))
    assert free["test"] == pytest.approx(found["starts"]["test"][found["starts"]["chosen"]] - 0.3)
    assert both["test"] == both["validation"] < 0.1  # 0.3 more without what is free
    assert both["guard"]["accepted"]
    assert both["guard"]["change"] > 0


@pytest.mark.slow
def test_a_comparison_runs_what_optimize_metric_does(
    experiment: Any, quadratic: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks the same points as the product, in the same order, though it asked the starts before."""
    told: list[Any] = []
    prepare = experiment.prepare

    def observed(self: Any) -> Any:
        task, test = prepare(self)
        return replace(task, metric=task.metric.with_callbacks(told.append)), test

    def line(task: Any) -> StartLine:
        return StartLine(lambda t: Start(t * torch.ones_like(task.origin())), -2.0, 2.0)

    own = experiment.starts
    monkeypatch.setattr(experiment, "prepare", observed)
    monkeypatch.setattr(experiment, "starts", lambda self: {**own(self), "along": line(self.task)})
    experiment.baselines_now["metricopt"] = metricopt()
    run_seed(experiment, RunConfig(), Plan(("metricopt",), (60,)), tmp_path, 5, Callback())
    asked = [query.item for query in told if query.purpose in ("starts", "search") and not query.on_file]
    alone: list[Any] = []
    task = quadratic()
    starts = {"half": Start(task.goal / 2), "along": line(task)}
    with task.metric.calling(alone.append):
        optimize_metric(task, queries=60, starts=starts, seed=5, callback=Callback())
    assert torch.equal(torch.stack(asked), torch.stack([query.item for query in alone]))
    assert len(asked) == 60


def test_the_start_is_not_moved_by_a_baseline(experiment: Any, tmp_path: Path) -> None:
    """Baselines run in any order reach the same: none leaves a trace in the model, or in the start."""
    orders = ("random_search", "cma_es"), ("cma_es", "random_search")
    for number, names in enumerate(orders):
        run_seed(experiment, RunConfig(), Plan(names, (20,)), tmp_path / str(number), 5, Callback())
    first, second = (rows(tmp_path / str(number)) for number in range(2))
    for name in orders[0]:
        assert first[name]["cells"]["20"]["test"] == second[name]["cells"]["20"]["test"]
