"""What every run can be told: what it becomes, and what is refused before any work."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from metricopt_ext.data.shift import ImageShift
from metricopt_ext.errors import BudgetError, ConfigError
from metricopt_ext.evidence.run_config import (
    AdapterConfig,
    LearnedConfig,
    RecipeConfig,
    RunConfig,
    ShiftConfig,
    TrainingConfig,
)
from metricopt_ext.methods.paper import Algorithm1
from metricopt_ext.methods.recipe import Recipe
from metricopt_ext.methods.siblings.algorithm_s1 import AlgorithmS1
from metricopt_ext.search.direct import CMAES, GuidedES
from metricopt_ext.search.learned_objective import LearnedObjective
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.utils.config import load_config
from metricopt_ext.value.labels import GaussianProcessLabels, LinearLabels, WithoutSigma
from metricopt_ext.value.observations import Observations
from metricopt_ext.value.reptile import ReptileLearner


def test_a_recipe_of_nothing_but_defaults_is_the_library_s() -> None:
    assert RecipeConfig().build() == Recipe()


def test_what_is_set_becomes_the_recipe_s() -> None:
    set_here = {"steps": 20, "lr": 0.5, "evals": 4, "rounds": 2, "start_std": 0.1, "trials": 1, "folds": 3}
    recipe = RecipeConfig(**set_here, adapt_queries=6).build()  # type: ignore[arg-type]
    assert recipe == replace(Recipe(), **set_here, adapt_queries=6)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seeds=0", "seeds=0: it must be at least 1"),
        ("evaluation.failures=-1", "evaluation: failures is -1; it must be at least 0"),
        ("evaluation.timeout=0", "evaluation: timeout is 0"),
        ("seed=-1", "seed=-1: it must be at least 0"),
        ("population=0", "population=0: it must be at least 1"),
        ("best_evals=0", "best_evals=0: it must be at least 1"),
        ("workers=0", "workers=0: it must be at least 1"),
        ("threads=0", "threads=0: it must be at least 1"),
        ("adapter.dim=0", "adapter.dim=0: it must be at least 1"),
        ("recipe.folds=1", "recipe: folds is 1; it must be at least 2"),
        ("recipe.evals=99", "recipe: evals is 99"),
        ("recipe.adapt_queries=50", "recipe: adapt_queries is 50; a task of 50 steps has 49 points"),
    ],
)
def test_numbers_out_of_range_are_refused_before_any_work(override: str, message: str) -> None:
    config = load_config(RunConfig, None, [override])
    with pytest.raises(ConfigError, match=re.escape(message)):
        config.check()


def test_too_few_queries_are_refused_before_any_work() -> None:
    with pytest.raises(BudgetError, match=r"9 queries are too few .* give at least (\d+)") as caught:
        RunConfig(queries=9, strategy="recipe").check()
    enough = int(re.search(r"at least (\d+), or", str(caught.value)).group(1))
    RunConfig(queries=enough, strategy="recipe").check()
    with pytest.raises(BudgetError, match=f"at least {enough}"):
        RunConfig(queries=enough - 1, strategy="recipe").check()


@pytest.mark.parametrize(("starts", "least"), [([], 11), (["batchnorm"], 12), (["loss_finetune", "prior"], 13)])
def test_a_search_needs_its_starts_a_design_and_an_end(starts: list[str], least: int) -> None:
    RunConfig(queries=least, starts=starts).check()
    with pytest.raises(BudgetError, match=f"queries={least - 1}: the search needs at least {least}"):
        RunConfig(queries=least - 1, starts=starts).check()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("search_queries=some", "search_queries='some': it must be a number, or same"),
        ("strategy=best", "strategy='best' must be search, recipe or paper"),
        ("methods=[sl_r]", "methods=['sl_r']: 'sl_r' is none of metricopt_paper, metricopt_learned in this tool"),
        ("starts=[labels]", "'labels' is none of loss_finetune, batchnorm, prior"),
        ("guard_confidence=0.4", "guard_confidence is 0.4; it must be at least 0.5 and below 1"),
        ("refine_queries=40", "refine_queries=40 continue from a recipe's end: set strategy=recipe"),
    ],
)
def test_a_search_is_set_up_before_any_work(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(RunConfig, None, [override]).check()


def test_searches_can_be_given_what_metricopt_spends() -> None:
    load_config(RunConfig, None, ["search_queries=same", "queries=60"]).check()
    with pytest.raises(ConfigError, match="search_queries=15: it must be at least 19"):
        load_config(RunConfig, None, ["search_queries=same", "queries=15"]).check()


def test_each_strategy_is_built_from_the_settings() -> None:
    config = RunConfig(recipe=RecipeConfig(steps=7, lr=0.2, evals=3, start_std=0.4))
    assert config.build_strategy() == GuidedTrustRegion()
    config.strategy = "recipe"
    assert config.build_strategy() == Recipe(steps=7, lr=0.2, evals=3, start_std=0.4)
    config.strategy = "paper"
    as_printed = {"learner": ReptileLearner.paper(), "labels": GaussianProcessLabels(always=True)}
    assert config.build_strategy() == Algorithm1(steps=7, lr=0.2, evals=3, start_std=0.4, **as_printed)


def test_each_part_of_the_paper_s_algorithm_is_a_key() -> None:
    keys = ["optimizer=adam", "metric_rate=0.5", "history=2", "count=7", "variance=0.2", "gamma=3", "beta=0"]
    overrides = ["strategy=paper", *(f"paper.{key}" for key in keys)]
    built = load_config(RunConfig, None, overrides).build_strategy()
    assert isinstance(built, Algorithm1)
    assert (built.optimizer, built.metric_rate, built.history, built.count, built.variance) == ("adam", 0.5, 2, 7, 0.2)
    assert isinstance(built.learner, ReptileLearner)
    assert (built.learner.objective.gamma, built.learner.objective.beta) == (3, 0)
    learners = {}
    for name in ("reptile", "reptile_mixed", "offline", "neural", "ridge"):
        built = load_config(RunConfig, None, [*overrides, f"paper.learner={name}"]).build_strategy()
        learners[name] = built.learner  # type: ignore[union-attr]
    assert len(set(map(repr, learners.values()))) == 5
    assert learners["offline"].objective.gamma == 3
    for name, kind in (("linear", LinearLabels()), ("observed", Observations.of), ("gp", GaussianProcessLabels())):
        for sigma, labels in ((True, kind), (False, WithoutSigma(kind))):
            more = [f"paper.labels={name}", f"paper.sigma={sigma}"]
            assert load_config(RunConfig, None, [*overrides, *more]).build_strategy().labels == labels  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("paper.learner=best", "paper: learner is 'best'; it must be one of reptile, reptile_mixed, offline"),
        ("paper.labels=best", "paper: labels is 'best'"),
        ("paper.count=0", "paper: count is 0"),
        ("paper.gamma=-1", "paper: gamma is -1.0"),
        ("paper.optimizer=rmsprop", "paper: optimizer is 'rmsprop'"),
    ],
)
def test_impossible_parts_are_refused_before_any_work(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(RunConfig, None, ["strategy=paper", override]).check()


def test_the_learned_optimizer_of_nothing_but_defaults_is_the_library_s() -> None:
    assert LearnedConfig().build(Recipe()) == AlgorithmS1()
    changed = LearnedConfig(sharpness=4.0, metric_weight=2.0, mixed=False, labels="gp_always", sees_loss=False)
    built = changed.build(Recipe(steps=9, evals=4))
    assert built.objective == LearnedObjective(2.0, 4.0)
    assert (built.steps, built.evals, built.sees_loss) == (9, 4, False)
    assert built.value == ReptileLearner.paper()
    assert built.labels == GaussianProcessLabels(always=True)


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("search_queries", max(GuidedES().least_queries(5), CMAES().least_queries(5))),
        ("refine_queries", CMAES().least_queries(5)),
    ],
)
def test_searches_get_enough_queries_or_none(name: str, least: int) -> None:
    config = RunConfig(adapter=AdapterConfig(dim=5), strategy="recipe")
    for enough in (0, least, least + 100):
        setattr(config, name, enough)
        config.check()
    for few in (1, least - 1):
        setattr(config, name, few)
        with pytest.raises(ConfigError, match=f"{name}={few}: it must be at least {least} for adapter.dim=5, or 0"):
            config.check()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "model.epochs=0: it must be at least 1"),
        ({"optimizer": "adam"}, r"model\.optimizer='adam' is none of adamw, sgd"),
        ({"lr": 0.0}, r"model: lr is 0\.0; it must be above 0"),
        ({"lr": math.nan}, "model: lr is nan; it must be a finite number"),
        ({"lr": math.inf}, "model: lr is inf; it must be a finite number"),
        ({"weight_decay": math.nan}, "model: weight_decay is nan; it must be a finite number"),
        ({"weight_decay": -0.1}, r"model\.weight_decay=-0\.1: it must be at least 0"),
    ],
)
def test_what_cannot_be_trained_with_is_refused(settings: dict[str, Any], message: str) -> None:
    TrainingConfig().check()
    with pytest.raises(ConfigError, match=message):
        TrainingConfig(**settings).check()


def test_a_shift_of_images_has_the_settings_and_no_settings_change_nothing() -> None:
    config = ShiftConfig(kind="image", contrast=0.5, brightness=0.1, noise_std=0.2, rotation_degrees=30.0)
    assert config.image_shift() == ImageShift(contrast=0.5, brightness=0.1, noise_std=0.2, rotation_degrees=30.0)
    assert ShiftConfig().image_shift() == ImageShift()
    with pytest.raises(ValueError, match=r"contrast must be in \(0, 1\], got 2"):
        ShiftConfig(contrast=2.0).image_shift()


def test_settings_as_plain_data_make_the_same_settings(tmp_path: Path) -> None:
    config = RunConfig(AdapterConfig(["layer4.*"], 8), RecipeConfig(lr=0.5))
    config.queries, config.pictures = 700, False
    (tmp_path / "again.yaml").write_text(json.dumps(config.as_dict()))  # JSON is YAML
    assert load_config(RunConfig, tmp_path / "again.yaml") == config


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("linear", "LinearLabels()"),
        ("gp", "GaussianProcessLabels(always=False"),
        ("gp_always", "GaussianProcessLabels(always=True"),
        ("observed", "Observations.of"),
    ],
)
def test_labels_are_chosen_by_name(name: str, kind: str) -> None:
    assert kind in repr(RecipeConfig(labels=name).build().labels)


def test_unknown_labels_are_named() -> None:
    with pytest.raises(ConfigError, match="labels is 'cubic'; it must be observed, linear, gp"):
        RecipeConfig(labels="cubic").build()


def test_learners_are_chosen_by_name() -> None:
    recipe = RecipeConfig(learners=["reptile", "ridge"]).build()
    assert [type(learner).__name__ for learner in recipe.learners] == ["ReptileLearner", "RidgeLearner"]
    for wrong in (["forest"], []):
        with pytest.raises(ConfigError, match="it must name one or more of neural, ridge, reptile"):
            RecipeConfig(learners=wrong).build()
