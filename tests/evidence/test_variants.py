"""The paper's own forms of MetricOpt as methods of the tools."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from metricopt_ext.errors import BudgetError, ConfigError
from metricopt_ext.evidence.method import METHODS
from metricopt_ext.evidence.method_config import FinetuneConfig, LearnedConfig, PaperSettings
from metricopt_ext.evidence.rivals import usual_methods
from metricopt_ext.evidence.run_config import VARIANTS, RunConfig
from metricopt_ext.evidence.variants import variant_method
from metricopt_ext.methods.pipeline import optimize_metric
from metricopt_ext.search.update_rule import load_update_rule
from metricopt_ext.utils import progress
from metricopt_ext.utils.progress import Watcher

SMALL = LearnedConfig(evals=3, tasks=2, pairs=2, hidden=4, queries=30)
FINETUNE, PAPER = FinetuneConfig(steps=5, lr=0.2), PaperSettings(evals=3, labels="observed")
CONFIG = RunConfig(finetune=FINETUNE, learned=SMALL, methods=["metricopt_learned"])


def test_the_learned_optimizer_runs_where_it_is_asked_for(quadratic: Callable[..., Any], tmp_path: Path) -> None:
    CONFIG.check()
    task = quadratic(3)
    plain = usual_methods(RunConfig(), 5, inputs=[], batches=task.batches)
    assert "metricopt_learned" not in plain
    methods = usual_methods(CONFIG, 5, inputs=[], batches=task.batches, folder=tmp_path)
    result = methods["metricopt_learned"](task, {})
    assert result is not None
    (reached,) = result.reached
    strategy = SMALL.build(FINETUNE)
    assert strategy.lr == 0.2
    expected = optimize_metric(quadratic(3), queries=30, strategy=strategy, seed=5, watcher=Watcher())
    assert isinstance(reached.end, torch.Tensor)
    assert torch.equal(reached.end, expected.ends[expected.chosen])
    assert result.path is not None
    assert torch.equal(result.path, expected.path)
    assert reached.queries == task.queries == sum(expected.queries.values()) <= 30
    assert reached.queries_per_start == expected.queries_per_start == 5
    kept = load_update_rule(tmp_path / "metricopt_learned" / "update_rule.safetensors")
    assert torch.equal(kept.weights, expected.details.learned.rule.weights)
    again = variant_method("metricopt_learned", CONFIG, 5, folder=tmp_path, resume=True)(quadratic(3), {})
    assert again is not None
    assert torch.equal(again.path, result.path)  # type: ignore[arg-type]


def test_algorithm_1_runs_beside_another_strategy(quadratic: Callable[..., Any], tmp_path: Path) -> None:
    config = RunConfig(finetune=FINETUNE, queries=30, paper=PAPER, methods=["metricopt_paper"], starts=[])
    config.check()
    assert config.method.name == "search"
    task = quadratic(3)
    methods = usual_methods(config, 5, starts={}, inputs=[], batches=task.batches, folder=tmp_path)
    result = methods["metricopt_paper"](task, {})
    assert result is not None
    (reached,) = result.reached
    expected = optimize_metric(quadratic(3), queries=30, strategy=PAPER.build(FINETUNE), seed=5, watcher=Watcher())
    assert isinstance(reached.end, torch.Tensor)
    assert torch.equal(reached.end, expected.ends[expected.chosen])
    assert reached.queries == task.queries == sum(expected.queries.values()) <= 30
    assert (tmp_path / "metricopt_paper" / "value_function.safetensors").exists()


def test_they_are_in_the_table_of_methods() -> None:
    assert all(METHODS[name].kind == "queries" for name in VARIANTS)


def test_too_little_is_refused_before_any_work() -> None:
    with pytest.raises(BudgetError, match="16 queries are too few"):
        RunConfig(finetune=FINETUNE, learned=replace(SMALL, queries=16), methods=CONFIG.methods).check()
    with pytest.raises(ConfigError, match=r"methods=\['learned'\]: 'learned' is none of metricopt_paper, metricopt_l"):
        RunConfig(methods=["learned"]).check()
    with pytest.raises(BudgetError, match="6 queries"):
        RunConfig(finetune=FINETUNE, queries=6, paper=PAPER, methods=["metricopt_paper"], starts=[]).check()
    with pytest.raises(ConfigError, match="learned: pairs is 1"):
        RunConfig(learned=LearnedConfig(pairs=1), methods=CONFIG.methods).check()


@pytest.mark.parametrize("name", VARIANTS)
def test_one_that_takes_long_says_how_far_it_is(
    name: str, quadratic: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stages(Watcher):
        told: ClassVar[list[str]] = []

        def stage(self, description: str) -> None:
            self.told.append(description)

        def query(self, spent: int, value: float) -> None:
            raise AssertionError("these are not the run's queries")

    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    Stages.told.clear()
    config = RunConfig(finetune=FINETUNE, learned=SMALL, queries=30, paper=PAPER)
    variant_method(name, config, 5, watcher=Stages())(quadratic(3), {})
    title = METHODS[name].title
    assert Stages.told[0] == title
    assert {f"{title}, {n} of 30 queries" for n in (1, 10, 20)} <= set(Stages.told)
    assert all(each.startswith(title) for each in Stages.told)
