"""What every run can be told: what it becomes, and what is refused before any work."""

import json
import re
from pathlib import Path

import pytest

from metricopt_ext.errors import BudgetError, ConfigError
from metricopt_ext.experiment.config_sections import AdapterConfig
from metricopt_ext.experiment.method_config import FinetuneConfig, RecipeConfig
from metricopt_ext.experiment.run_config import RunConfig
from metricopt_ext.search.direct import CMAES, GuidedES
from metricopt_ext.utils.config import load_config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seeds=0", "seeds=0: it must be at least 1"),
        ("evaluation.failures=-1", "failures is -1; it must be at least 0"),
        ("evaluation.timeout=0", "evaluation: timeout is 0"),
        ("seed=-1", "seed=-1: it must be at least 0"),
        ("seed=4294967292", "seed=4294967292: it and all after it must be below 2^32"),
        ("population=0", "population=0: it must be at least 1"),
        ("best_evals=0", "best_evals=0: it must be at least 1"),
        ("workers=0", "workers=0: it must be at least 1"),
        ("threads=0", "threads=0: it must be at least 1"),
        ("adapter.dim=0", "adapter.dim=0: it must be at least 1"),
        ("finetune.steps=1", "steps is 1; it must be at least 2"),
        ("finetune.lr=0", "finetune: lr is 0.0; it must be above 0"),
    ],
)
def test_numbers_out_of_range_are_refused_before_any_work(override: str, message: str) -> None:
    config = load_config(RunConfig, None, [override])
    with pytest.raises(ConfigError, match=re.escape(message)):
        config.check()


def test_a_population_is_chosen_unless_it_is_given() -> None:
    config = load_config(RunConfig, None, [])
    config.check()
    assert config.population is None
    assert load_config(RunConfig, None, ["population=3"]).population == 3
    assert load_config(RunConfig, None, ["population=null"]).population is None


def test_too_few_queries_are_refused_before_any_work() -> None:
    with pytest.raises(BudgetError, match=r"9 queries.*give at least (\d+)") as caught:
        RunConfig(queries=9, method=RecipeConfig()).check()
    enough = int(re.search(r"at least (\d+), or", str(caught.value)).group(1))
    RunConfig(queries=enough, method=RecipeConfig()).check()
    with pytest.raises(BudgetError, match=f"at least {enough}"):
        RunConfig(queries=enough - 1, method=RecipeConfig()).check()


@pytest.mark.parametrize(("starts", "least"), [([], 9), (["batchnorm"], 10), (["loss_finetune", "prior"], 11)])
def test_a_search_needs_its_starts_a_design_and_an_end(starts: list[str], least: int) -> None:
    RunConfig(queries=least, starts=starts).check()
    with pytest.raises(BudgetError, match=rf"too few: .* needs at least {least}"):
        RunConfig(queries=least - 1, starts=starts).check()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("search_queries=some", "search_queries='some': it must be a"),
        (
            "methods=[sl_r]",
            "'sl_r' is none of metricopt_paper",
        ),
        ("starts=[labels]", "'labels' is none of loss_finetune"),
        ("guard.confidence=0.4", "guard_confidence is 0.4; it must be at"),
        ("methods=[refined]", "recipe's end: set method.name=recipe"),
    ],
)
def test_a_search_is_set_up_before_any_work(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(RunConfig, None, [override]).check()


def test_searches_can_be_given_what_metricopt_spends() -> None:
    load_config(RunConfig, None, ["search_queries=same", "queries=60"]).check()
    with pytest.raises(ConfigError, match=r"search_queries=15.*least 19"):
        load_config(RunConfig, None, ["search_queries=same", "queries=15"]).check()


def test_searches_get_enough_queries_or_none() -> None:
    config = RunConfig(adapter=AdapterConfig(dim=5), method=RecipeConfig(), methods=["refined"])
    assert config.refined is not None
    least = max(GuidedES().least_queries(5), CMAES().least_queries(5))
    for enough in (0, least, least + 100):
        config.search_queries = enough
        config.check()
    for few in (1, least - 1):
        config.search_queries = few
        with pytest.raises(ConfigError, match=rf"least {least} for adapter.dim=5"):
            config.check()
    config.search_queries, least = 0, CMAES().least_queries(5)
    config.refined.queries = least
    config.check()
    config.refined.queries = least - 1
    with pytest.raises(ConfigError, match=rf"refined.queries={least - 1}.*least {least} for"):
        config.check()


def test_settings_as_plain_data_make_the_same_settings(tmp_path: Path) -> None:
    methods = ["metricopt_learned", "refined"]
    config = RunConfig(AdapterConfig(["layer4.*"], 8), RecipeConfig(rounds=2), FinetuneConfig(lr=0.5), methods=methods)
    config.queries, config.pictures = 700, False
    (tmp_path / "again.yaml").write_text(json.dumps(config.as_dict()))  # JSON is YAML
    assert load_config(RunConfig, tmp_path / "again.yaml") == config
    assert "paper" not in config.as_dict()


@pytest.mark.parametrize("name", ["metricopt_paper", "metricopt_learned"])
def test_methods_that_tune_no_settings_are_refused_beside_some(name: str) -> None:
    config = load_config(RunConfig, None, ["methods=[settings]"])
    config.check()
    config.methods = ["settings", name]
    with pytest.raises(ConfigError, match=rf"{name} tunes.*leave it or settings out"):
        config.check()
