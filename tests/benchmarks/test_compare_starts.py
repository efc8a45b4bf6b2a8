"""The comparison at new starts on a tiny run, and when learning f is said to pay."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import compare_starts as tool
from helpers.programs import call
from metricopt_ext.adapters.start import Start
from metricopt_ext.comparison.comparison import Plan
from metricopt_ext.experiment.experiment import Experiment
from metricopt_ext.experiment.method_config import FinetuneConfig, RecipeConfig
from metricopt_ext.experiment.run_config import RunConfig
from metricopt_ext.methods.pipeline import optimize_metric
from metricopt_ext.methods.searched import search_results
from metricopt_ext.methods.tuning import FRESH, finetune, tune_start
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.direct import CMAES, GuidedES
from metricopt_ext.search.optimizer import LossStep
from metricopt_ext.utils.machine import Machine

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "configs" / "classification" / "digits.yaml"
TINY = [
    *("finetune.steps=6", "method.evals=3", "method.rounds=2", "method.folds=2", "method.trials=0", "queries=60"),
    *("model.epochs=1", "adapter.dim=4", "population=8", "method.learners=[ridge]", "workers=1"),
]


def run(folder: Path, *arguments: str, device: str = "cpu") -> dict[str, Any]:
    """Call the script's main as the command line does, and return what it wrote."""
    settings = [*TINY, "seeds=2", "seed=7", f"device={device}"]
    options = ["--config-file", DIGITS, "--output-dir", folder]
    call(tool, *options, *settings, "--budgets", "8", "20", *arguments)
    content: dict[str, Any] = json.loads((folder / "starts.json").read_text())
    return content


@pytest.mark.slow
def test_all_methods_are_asked_for_their_budgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = run(tmp_path, "--starts", "2", "--methods", "loss_finetune_best", "cma_es", "metricopt", "threshold")
    methods = {name: [point["queries"] for point in points] for name, points in content["methods"].items()}
    assert methods["pretrained"] == methods["loss_finetune"] == [0]
    assert methods["loss_finetune_best"] == [7]  # 51 by default, but there are no more steps
    assert methods["cma_es"] == [20]  # 8 are too few for a population
    assert methods["metricopt"] == [8, 20]
    (ours,) = methods["learned_f"]
    assert 2 <= ours <= 5
    assert methods["refined"] == [ours + 20]
    assert "guided_es" not in methods  # it was not named
    assert "threshold" not in methods  # it does not apply to ten classes
    assert all(len(point["test"]) == 2 for points in content["methods"].values() for point in points)
    assert content["queries_once"] <= 60 - 2
    text = (tmp_path / "starts.md").read_text()
    assert "| CMA-ES on the metric | 20 |" in text
    assert "| MetricOpt | 20 |" in text
    assert "2 seeds from 7 on, 2 new starts each" in text
    assert f"Computed on {Machine.current(torch.device('cpu'), 1)}; other processors" in text
    assert (tmp_path / "starts.png").stat().st_size > 10_000

    named = ["--methods", "cma_es", "guided_es"]
    more = run(tmp_path, "--starts", "2", *named)
    assert [point["queries"] for point in more["methods"]["guided_es"]] == [20]
    assert more["methods"]["cma_es"] == content["methods"]["cma_es"]
    assert "metricopt" not in more["methods"]
    monkeypatch.setattr(tool, "optimize_metric", lambda *_, **__: pytest.fail("ran a seed again that is on file"))
    assert run(tmp_path, "--starts", "2", *named, device="auto") == more  # may change: how it is run, not what
    with pytest.raises(SystemExit, match="starts was 2, now 3"):
        run(tmp_path, "--starts", "3", *named)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--starts", "0"], "--starts"),
        (["--methods", "sorcery"], "'sorcery' is none of"),
        (["--budgets", "60", "20"], "ascending"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(tool, "run_seeds", lambda *_, **__: pytest.fail("ran something"))
    with pytest.raises(SystemExit, match=message):
        run(tmp_path, *arguments)
    assert not list(tmp_path.iterdir())


def test_points_are_means_over_the_starts_of_what_each_method_finds(
    quadratic: Callable[..., Any], tmp_path: Path
) -> None:
    class Known(Experiment[RunConfig]):
        def prepare(self) -> Any:
            task = quadratic()
            return task, task.metric.with_new_ledger()

        describe = validation = None

    method = RecipeConfig(evals=3, rounds=2, folds=2, trials=0, learners=["ridge"])
    config = RunConfig(finetune=FinetuneConfig(6, 0.1), method=method, queries=60, best_evals=3)
    recipe = method.build(config.finetune)
    names = (
        "pretrained",
        "loss_finetune",
        "loss_finetune_best",
        "guided_es",
        "cma_es",
        "metricopt",
        "learned_f",
        "refined",
    )
    row = tool.run_seed(Known, config, tmp_path, 2, Plan(names, (12, 30)), 5, Callback())
    assert json.loads((tmp_path / "seed-5" / "points.json").read_text()) == row

    task = quadratic()
    result = optimize_metric(task, queries=60, strategy=recipe, seed=5, callback=Callback())
    expected: dict[str, list[list[tuple[int, float]]]] = {name: [] for name in names}
    for number in range(2):
        index, seed = FRESH + 1000 + number, 5 + number
        start = task.starts(recipe.start_std, 5, [index])[0]
        path = finetune(task, LossStep(0.1), 6, seed, start)
        guided = search_results(task, [12, 30], starts={"given": Start(start)}, seed=seed)
        tuned = [
            tune_start(task, result.fit, recipe=own, setting=result.details.setting, start=start, index=index, seed=5)
            for own in (recipe, *(replace(recipe, refine=CMAES(), refine_queries=n) for n in (12, 30)))
        ]
        found = {
            "pretrained": [(0, start)],
            "loss_finetune": [(0, path[-1])],
            "loss_finetune_best": [(3, min((path[0], path[3], path[-1]), key=task.true_cost))],
            "guided_es": [(30, GuidedES(lr=0.1)(task, start, 30, seed=seed).phi)],  # 12 are too few
            "cma_es": [(n, CMAES()(task, start, n, seed=seed).phi) for n in (12, 30)],
            "metricopt": [(n, each.ends[each.chosen]) for n, each in zip((12, 30), guided, strict=True)],
            "learned_f": [(3, tuned[0].ends[tuned[0].chosen])],
            "refined": [(3 + n, each.ends[each.chosen]) for n, each in zip((12, 30), tuned[1:], strict=True)],
        }
        for name, points in found.items():
            expected[name].append([(queries, task.true_cost(phi)) for queries, phi in points])
    for name, of_starts in expected.items():
        for got, points in zip(row["points"][name], zip(*of_starts, strict=True), strict=True):
            assert got == pytest.approx([sum(column) / 2 for column in zip(*points, strict=True)], abs=1e-12), name


def content(baselines: list[tuple[float, float]], maximize: bool = True) -> dict[str, Any]:
    return {
        "task": "t",
        "metric": {"name": "m", "maximize": maximize},
        "seeds": [0],
        "computed_on": "A processor (AVX2)",
        "starts": 1,
        "queries_once": 600,
        "spearman": [0.5],
        "methods": {
            "learned_f": [{"queries": 5.0, "test": [0.8]}],
            "cma_es": [{"queries": queries, "test": [value]} for queries, value in baselines],
        },
    }


@pytest.mark.parametrize(
    ("baselines", "maximize", "expected"),
    [
        ([(25, 0.5), (65, 0.8), (125, 0.9)], True, (65, 10)),
        ([(25, 0.5), (66, 0.81)], True, (66, 10)),  # 9.8 starts
        ([(25, 0.5), (125, 0.79)], True, (math.inf, math.inf)),
        ([(5, 0.85)], True, (5, math.inf)),
        ([(25, 0.9), (125, 0.7)], False, (125, 5)),
    ],
)
def test_from_how_many_starts_learning_pays(
    baselines: list[tuple[float, float]], maximize: bool, expected: tuple[float, float]
) -> None:
    assert tool.pays_from(content(baselines, maximize), "cma_es") == expected


def test_the_words_follow_the_numbers() -> None:
    assert "\n1 seed from 0 on, 1 new start each: " in tool.markdown(content([(65, 0.8)]))
    assert "pays from 10 starts on" in tool.markdown(content([(65, 0.8)]))
    assert "with up to 125 queries per start: learning f pays from at most 5 starts" in tool.markdown(
        content([(125, 0.7)])
    )
    assert "does not pay" in tool.markdown(content([(5, 0.85)]))
    both = content([(125, 0.7)])
    both["methods"]["guided_es"] = [{"queries": 15.0, "test": [0.7]}]
    text = tool.markdown(both)
    assert "Guided ES on the metric did not reach MetricOpt's mean with up to 15 queries per start" in text
    del both["methods"]["cma_es"]
    assert "CMA-ES" not in tool.markdown(both)  # it was not run
