"""The settings of methods: what they become, and that a key exists only for what a chosen method reads."""

from dataclasses import fields
from typing import Any

import pytest

from helpers.refusals import assert_named, assert_refused
from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.cli import experiment_of
from metricopt_ext.experiment.method_config import FinetuneConfig, LearnedConfig, RecipeConfig, SearchConfig
from metricopt_ext.experiment.run_config import RunConfig
from metricopt_ext.methods.algorithm1 import Algorithm1
from metricopt_ext.methods.algorithm_s1 import AlgorithmS1
from metricopt_ext.methods.recipe import Recipe
from metricopt_ext.search.learned_objective import LearnedObjective
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.tasks.own_metric import OwnMetricConfig
from metricopt_ext.utils.config import known_keys, load_config
from metricopt_ext.value.labels import GaussianProcessLabels, LinearLabels, WithoutSigma
from metricopt_ext.value.observations import Observations
from metricopt_ext.value.reptile import ReptileLearner


def test_a_recipe_of_nothing_but_defaults_is_the_library_s() -> None:
    assert RecipeConfig().build(FinetuneConfig()) == Recipe()


def test_what_is_set_becomes_the_recipe_s() -> None:
    set_here = {"evals": 4, "rounds": 2, "start_std": 0.1, "trials": 1, "folds": 3}
    recipe = RecipeConfig(**set_here).build(FinetuneConfig(20, 0.5))  # type: ignore[arg-type]
    assert recipe == Recipe(steps=20, lr=0.5, **set_here)  # type: ignore[arg-type]


def test_each_field_of_the_search_is_a_key() -> None:
    assert [name for name in vars(SearchConfig()) if name != "name"] == [
        each.name for each in fields(GuidedTrustRegion)
    ]
    keys = {"design": 6, "batch": 4, "radius": 2.0, "least_radius": 0.1, "largest_radius": 4.0, "grow": 1.5}
    more = {"shrink": 0.5, "boldness": 0.7}
    made = load_config(RunConfig, None, [f"method.{key}={value}" for key, value in (keys | more).items()])
    assert made.build_strategy() == GuidedTrustRegion(**keys, **more)  # type: ignore[arg-type]


def test_each_method_is_built_from_the_settings() -> None:
    def built(*overrides: str) -> Any:
        return load_config(RunConfig, None, ["finetune.steps=7", "finetune.lr=0.2", *overrides]).build_strategy()

    shared = ["method.evals=3", "method.start_std=0.4"]
    assert built() == built("method.name=search") == GuidedTrustRegion()
    assert built("method.name=recipe", *shared) == Recipe(steps=7, lr=0.2, evals=3, start_std=0.4)
    as_printed = {"learner": ReptileLearner.paper(), "labels": GaussianProcessLabels(always=True)}
    of_paper = Algorithm1(steps=7, lr=0.2, evals=3, start_std=0.4, **as_printed)
    assert built("method.name=paper", *shared) == of_paper
    beside = load_config(RunConfig, None, ["methods=[metricopt_paper]", "paper.evals=3", "paper.start_std=0.4"])
    assert beside.paper is not None
    assert beside.paper.build(FinetuneConfig(7, 0.2)) == of_paper
    assert beside.build_strategy() == GuidedTrustRegion()


def test_each_part_of_the_paper_s_algorithm_is_a_key() -> None:
    keys = ["optimizer=adam", "metric_rate=0.5", "history=2", "count=7", "variance=0.2", "gamma=3", "beta=0"]
    overrides = ["method.name=paper", *(f"method.{key}" for key in keys)]
    built = load_config(RunConfig, None, overrides).build_strategy()
    assert isinstance(built, Algorithm1)
    assert (built.optimizer, built.metric_rate, built.history, built.count, built.variance) == ("adam", 0.5, 2, 7, 0.2)
    assert isinstance(built.learner, ReptileLearner)
    assert (built.learner.objective.gamma, built.learner.objective.beta) == (3, 0)
    learners = {}
    for name in ("reptile", "reptile_mixed", "offline", "neural", "ridge"):
        built = load_config(RunConfig, None, [*overrides, f"method.learner={name}"]).build_strategy()
        learners[name] = built.learner  # type: ignore[union-attr]
    assert len(set(map(repr, learners.values()))) == 5
    assert learners["offline"].objective.gamma == 3
    for name, kind in (("linear", LinearLabels()), ("observed", Observations.of), ("gp", GaussianProcessLabels())):
        for sigma, labels in ((True, kind), (False, WithoutSigma(kind))):
            more = [f"method.labels={name}", f"method.sigma={sigma}"]
            assert load_config(RunConfig, None, [*overrides, *more]).build_strategy().labels == labels  # type: ignore[union-attr]


def test_literal_readings_of_the_paper_are_keys() -> None:
    keys = ["kernel=rbf", "sigma=posterior", "history_grows=false", "ends=random"]
    overrides = ["method.name=paper", *(f"method.{key}" for key in keys)]
    built = load_config(RunConfig, None, overrides).build_strategy()
    assert isinstance(built, Algorithm1)
    assert built.labels == GaussianProcessLabels(always=True, levels=False, noisy=False)
    assert (built.history_grows, built.ends) == (False, "random")
    assert isinstance(built.learner, ReptileLearner)
    default = load_config(RunConfig, None, ["method.name=paper"]).build_strategy()
    assert isinstance(default, Algorithm1)
    assert default.labels == GaussianProcessLabels(always=True)
    assert default.learner == ReptileLearner.paper()
    in_a_file = load_config(RunConfig, {"method": {"name": "paper", "sigma": False}}).build_strategy()
    assert in_a_file.labels == WithoutSigma(GaussianProcessLabels(always=True))  # type: ignore[union-attr]
    assert not {"method.kernel", "method.ends"} & set(known_keys(RunConfig()))


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("method.learner=best", ("reptile_mixed",)),
        ("method.labels=best", ("method", "labels", "best")),
        ("method.gamma=-1", ("method", "gamma", "-1.0")),
        ("method.kernel=matern", ("rbf_constant",)),
        ("method.sigma=noise", ("noise",)),
        ("method.ends=first", ("ends", "first", "observed")),
    ],
)
def test_impossible_parts_are_refused_before_any_work(override: str, names: tuple[str, ...]) -> None:
    assert_refused(lambda: load_config(RunConfig, None, ["method.name=paper", override]).check(), ConfigError, *names)


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["kernel=rbf", "labels=linear"], ("linear", "gp_always")),
        (["sigma=posterior", "labels=observed"], ("posterior", "labels", "observed")),
    ],
)
def test_a_part_that_would_change_nothing_is_refused(overrides: list[str], names: tuple[str, ...]) -> None:
    assert_refused(
        lambda: load_config(RunConfig, None, ["method.name=paper", *(f"method.{each}" for each in overrides)]).check(),
        ConfigError,
        *names,
    )


def test_the_learned_optimizer_of_nothing_but_defaults_is_the_library_s() -> None:
    assert LearnedConfig().build(FinetuneConfig()) == AlgorithmS1()
    changed = LearnedConfig(sharpness=4.0, metric_weight=2.0, mixed=False, labels="gp_always", sees_loss=False, evals=4)
    built = changed.build(FinetuneConfig(steps=9))
    assert built.objective == LearnedObjective(2.0, 4.0)
    assert (built.steps, built.evals, built.sees_loss) == (9, 4, False)
    assert built.value == ReptileLearner.paper()
    assert built.labels == GaussianProcessLabels(always=True)


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
    assert kind in repr(RecipeConfig(labels=name).build(FinetuneConfig()).labels)


def test_unknown_labels_are_named() -> None:
    assert_refused(lambda: RecipeConfig(labels="cubic").build(FinetuneConfig()), ConfigError, "labels", "cubic")


def test_learners_are_chosen_by_name() -> None:
    recipe = RecipeConfig(learners=["reptile", "ridge"]).build(FinetuneConfig())
    assert [type(learner).__name__ for learner in recipe.learners] == ["ReptileLearner", "RidgeLearner"]
    for wrong in (["forest"], []):
        with pytest.raises(ConfigError):
            RecipeConfig(learners=wrong).build(FinetuneConfig())


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("method.evals=99", ("method", "evals", "99")),
    ],
)
def test_a_recipe_out_of_range_is_refused(override: str, names: tuple[str, ...]) -> None:
    assert_refused(lambda: load_config(RunConfig, None, ["method.name=recipe", override]).check(), ConfigError, *names)


def test_a_search_out_of_range_is_refused() -> None:
    assert_refused(lambda: load_config(RunConfig, None, ["method.design=3"]).check(), ConfigError, "method", "3", "4")


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
