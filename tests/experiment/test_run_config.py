"""What every run can be told: what it becomes, and what is refused before any work."""

import re

import pytest

from helpers.refusals import assert_named, assert_refused
from metricopt_ext.errors import BudgetError, ConfigError
from metricopt_ext.experiment.config_sections import AdapterConfig
from metricopt_ext.experiment.method_config import RecipeConfig
from metricopt_ext.experiment.run_config import RunConfig
from metricopt_ext.search.direct import CMAES, GuidedES
from metricopt_ext.utils.config import load_config


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("seed=-1", ("seed=-1", "0")),
        ("seed=4294967292", ("seed=4294967292", "2^32")),
        ("best_evals=0", ("best_evals=0", "1")),
    ],
)
def test_numbers_out_of_range_are_refused_before_any_work(override: str, names: tuple[str, ...]) -> None:
    config = load_config(RunConfig, None, [override])
    assert_refused(config.check, ConfigError, *names)


def test_too_few_queries_are_refused_before_any_work() -> None:
    with pytest.raises(BudgetError) as caught:
        RunConfig(queries=9, method=RecipeConfig()).check()
    assert_named(caught, "9", "queries")
    enough = int(re.search(r"at least (\d+), or", str(caught.value)).group(1))
    RunConfig(queries=enough, method=RecipeConfig()).check()
    assert_refused(lambda: RunConfig(queries=enough - 1, method=RecipeConfig()).check(), BudgetError, enough)


@pytest.mark.parametrize(("starts", "least"), [([], 9), (["batchnorm"], 10), (["loss_finetune", "prior"], 11)])
def test_a_search_needs_its_starts_a_design_and_an_end(starts: list[str], least: int) -> None:
    RunConfig(queries=least, starts=starts).check()
    assert_refused(lambda: RunConfig(queries=least - 1, starts=starts).check(), BudgetError, least)


def test_searches_get_enough_queries_or_none() -> None:
    """By default as many as MetricOpt, its three usual starts among them."""
    named = ["methods=[cma_es]", "starts=[batchnorm,prior]"]
    load_config(RunConfig, None, [*named, "queries=60"]).check()
    config = load_config(RunConfig, None, [*named, "queries=600", "search_queries=15"])
    least = CMAES().least_queries(16) + 3
    assert_refused(config.check, ConfigError, "cma_es", "15", least, "adapter.dim=16", "search_queries")
    config.search_queries = least
    config.check()
    config = RunConfig(adapter=AdapterConfig(dim=5), method=RecipeConfig(), methods=["guided_es"])
    config.search_queries = GuidedES().least_queries(5)
    config.check()
    config.search_queries -= 1
    assert_refused(config.check, ConfigError, "guided_es", config.search_queries, "adapter.dim=5")


@pytest.mark.parametrize("name", ["metricopt_paper", "metricopt_learned"])
def test_methods_that_tune_no_settings_are_refused_beside_some(name: str) -> None:
    config = load_config(RunConfig, None, ["methods=[settings]"])
    config.check()
    config.methods = ["settings", name]
    assert_refused(config.check, ConfigError, name)
