"""The settings of methods: what they become, and that a key exists only for what a chosen method reads."""

from typing import Any

import pytest

from helpers.refusals import assert_named
from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.cli import experiment_of
from metricopt_ext.experiment.method_config import FinetuneConfig, RecipeConfig
from metricopt_ext.experiment.own_metric import OwnMetricConfig
from metricopt_ext.experiment.run_config import RunConfig
from metricopt_ext.methods.paper.recipe import Algorithm1, Recipe
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.utils.config import load_config
from metricopt_ext.value.reptile import ReptileLearner


def test_what_is_set_becomes_the_recipe_s() -> None:
    set_here = {"evals": 4, "rounds": 2, "start_std": 0.1, "trials": 1, "folds": 3}
    recipe = RecipeConfig(**set_here).build(FinetuneConfig(20, 0.5))  # type: ignore[arg-type]
    assert recipe == Recipe(steps=20, lr=0.5, **set_here)  # type: ignore[arg-type]


def test_each_method_is_built_from_the_settings() -> None:
    def built(*overrides: str) -> Any:
        return load_config(RunConfig, None, ["finetune.steps=7", "finetune.lr=0.2", *overrides]).build_strategy()

    assert built() == built("method.name=search") == GuidedTrustRegion()
    assert built("method.name=recipe", "method.evals=3") == Recipe(steps=7, lr=0.2, evals=3)
    of_paper = Algorithm1(steps=7, lr=0.2, evals=3)
    assert built("method.name=paper", "method.evals=3") == of_paper
    beside = load_config(RunConfig, None, ["methods=[metricopt_paper]", "paper.evals=3"])
    assert beside.paper is not None
    assert beside.paper.build(FinetuneConfig(7, 0.2)) == of_paper
    assert beside.build_strategy() == GuidedTrustRegion()


def test_a_learner_is_chosen_by_name() -> None:
    assert RecipeConfig().build(FinetuneConfig()).learner == Recipe().learner
    assert RecipeConfig(learner="reptile").build(FinetuneConfig()).learner == ReptileLearner()
    with pytest.raises(ConfigError):
        RecipeConfig(learner="forest").build(FinetuneConfig())


NAMES = {"data": {"name": "x"}, "model": {"name": "x"}}


@pytest.mark.parametrize("key", ["kwargs.average=macro", "kwargs={a: 1}", "folder=x", "maximize=false", "bounds=[0,2]"])
def test_a_metric_of_ones_own_brings_its_keys(key: str) -> None:
    for task in ("classification", "detection"):
        schema: Any = experiment_of(task).config_type
        chosen = load_config(schema, NAMES, [f"metric.{key}", "metric.name=a:b"])
        assert isinstance(chosen.metric, OwnMetricConfig)
        names = (key.partition("=")[0], "metric.name=MODULE:FUNCTION")
        with pytest.raises(ConfigError) as caught:
            load_config(schema, None, [f"metric.{key}"])
        assert_named(caught, *names)
