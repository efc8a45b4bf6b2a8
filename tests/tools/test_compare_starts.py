"""The comparison at new starts on a tiny run, and when learning f is said to pay."""

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch

from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.errors import FileFormatError
from metricopt_ext.utils.config import load_config
from metricopt_ext.utils.machine import Machine

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "configs" / "classification" / "digits.yaml"
TINY = [
    *("recipe.steps=6", "recipe.evals=3", "recipe.rounds=2", "recipe.folds=2", "recipe.trials=0", "queries=60"),
    *("model.epochs=1", "adapter.dim=4", "population=8", "device=cpu", "recipe.learners=[ridge]", "workers=1"),
]


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load("compare_starts")


def test_all_methods_are_asked_for_their_budgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(ClassificationConfig, DIGITS, [*TINY, "seeds=2", "seed=7"])
    content = tool.compare_starts("classification", config, tmp_path, 2, (8, 20))
    methods = {name: [point["queries"] for point in points] for name, points in content["methods"].items()}
    assert methods["pretrained"] == [0]
    assert methods["loss_finetune"] == [0]
    assert methods["loss_finetune_best"] == [min(config.best_evals, config.recipe.steps + 1)]
    assert methods["cma_es"] == [20]  # 8 are too few for a population
    assert methods["guided_es"] == [20]
    (ours,) = methods["metricopt"]
    assert 2 <= ours <= 5
    assert methods["refined"] == [ours + 20]
    assert all(len(point["test"]) == 2 for points in content["methods"].values() for point in points)
    assert content["queries_once"] <= 60 - 2
    text = (tmp_path / "starts.md").read_text()
    assert "| CMA-ES on the metric | 20 |" in text
    assert "2 seeds from 7 on, 2 new starts each" in text
    assert f"Computed on {Machine.current(torch.device('cpu'), config.threads)}; other processors" in text
    assert json.loads((tmp_path / "starts.json").read_text()) == content
    assert (tmp_path / "starts.png").stat().st_size > 10_000

    monkeypatch.setattr(tool, "experiment_of", lambda *_: pytest.fail("ran a seed again that is on file"))
    config.device = "auto"  # may change: how it is run, not what
    assert tool.compare_starts("classification", config, tmp_path, 2, (8, 20)) == content
    with pytest.raises(FileFormatError, match="starts was 2, now 3"):
        tool.compare_starts("classification", config, tmp_path, 3, (8, 20))


def content(rivals: list[tuple[float, float]], maximize: bool = True) -> dict[str, Any]:
    return {
        "task": "t",
        "metric": {"name": "m", "maximize": maximize},
        "seeds": [0],
        "computed_on": "A processor (AVX2)",
        "starts": 1,
        "queries_once": 600,
        "spearman": [0.5],
        "methods": {
            "metricopt": [{"queries": 5.0, "test": [0.8]}],
            "cma_es": [{"queries": queries, "test": [value]} for queries, value in rivals],
        },
    }


@pytest.mark.parametrize(
    ("rivals", "maximize", "expected"),
    [
        ([(25, 0.5), (65, 0.8), (125, 0.9)], True, (65, 10)),
        ([(25, 0.5), (66, 0.81)], True, (66, 10)),  # 9.8 starts
        ([(25, 0.5), (125, 0.79)], True, (math.inf, math.inf)),
        ([(5, 0.85)], True, (5, math.inf)),
        ([(25, 0.9), (125, 0.7)], False, (125, 5)),
    ],
)
def test_from_how_many_starts_learning_pays(
    rivals: list[tuple[float, float]], maximize: bool, expected: tuple[float, float]
) -> None:
    assert tool.pays_from(content(rivals, maximize), "cma_es") == expected


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


def test_standard_error_is_that_of_a_sample() -> None:
    assert tool.standard_error([1.0, 2.0, 4.0]) == pytest.approx(scipy.stats.sem([1.0, 2.0, 4.0]))
    assert math.isnan(tool.standard_error([1.0]))
