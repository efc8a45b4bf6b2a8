"""A key exists only for what a chosen method reads."""

from pathlib import Path

import pytest

from helpers.refusals import assert_refused
from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.method_config import LearnedConfig, RecipeConfig
from metricopt_ext.experiment.run_config import RunConfig
from metricopt_ext.utils.config import load_config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["method.evals=3"], "paper; this run has method.name=search"),
        (
            ["method.name=paper", "method.rounds=4"],
            "key of method.name=recipe; this run has",
        ),
        (["method.nmae=4"], "key 'method.nmae'; did you mean"),
        (
            ["learned.tasks=3", "methods=[metricopt_paper]"],
            "key of metricopt_learned among methods;",
        ),
        (["paper.name=x", "methods=[metricopt_paper]"], "unknown key 'paper.name'"),
    ],
)
def test_a_key_of_what_is_not_chosen_says_which_choice_brings_it(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(RunConfig, None, overrides)
    assert message in str(caught.value)


def test_a_file_chooses_too(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("methods: [metricopt_learned]\nlearned: {tasks: 3}\nmethod: {rounds: 2, name: recipe}\n")
    config = load_config(RunConfig, file)
    assert config.method == RecipeConfig(rounds=2)
    assert config.learned == LearnedConfig(tasks=3)
    names = ("config.yaml", "method.rounds", "method.name=recipe", "method.name=paper")
    assert_refused(lambda: load_config(RunConfig, file, ["method.name=paper"]), ConfigError, *names)
