"""The command-line tool: which task a config is of, what is printed, and that a tool goes on from it byte for byte."""

import sys
from pathlib import Path
from typing import Any

import pytest

from helpers import own
from helpers.refusals import assert_refused
from metricopt_ext.errors import ConfigError
from metricopt_ext.tools import assess, finetune_classifier
from testers.strategy import files_of

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
COMPARED = ROOT / "benchmarks" / "configs" / "compare"
SMALL = [
    "metric.name=f1",
    "model.epochs=3",
    "adapter.dim=6",
    "seeds=1",
    "starts=[batchnorm,prior]",
]
LONGTAIL = CONFIGS / "classification/digits_longtail.yaml"


def call(tool: Any, patch: pytest.MonkeyPatch, *arguments: Any) -> None:
    patch.setattr(sys, "argv", ["metricopt assess", *map(str, arguments)])
    tool.main()


def test_a_tools_config_is_known_by_its_keys_or_its_folder(tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    for task, name in (("classification", "digits"), ("retrieval", "digits"), ("detection", "scenes_torchvision")):
        file = CONFIGS / task / f"{name}.yaml"
        copy = tmp_path / f"{task}.yaml"
        copy.write_text(file.read_text())
        for each in (file, copy):
            experiment, config = assess.read(each, ["seed=7"])
            assert experiment.__name__ == f"{task.title()}Experiment"
            assert type(config) is experiment.config_type
            assert config.seed == 7


def test_a_comparisons_config_is_its_tasks() -> None:
    experiment, config = assess.read(COMPARED / "digits_longtail_worst.yaml", ["model.epochs=3", "seed=9"])
    assert experiment.__name__ == "ClassificationExperiment"
    assert (config.metric.name, config.model.epochs, config.seed) == ("worst_recall", 3, 9)  # type: ignore[attr-defined]
    assert assess.read(COMPARED / "digits_longtail_worst.yaml")[1].seed == 810  # the comparison's first


def test_what_is_no_config_is_refused_with_the_reasons(tmp_path: Path) -> None:
    assert_refused(lambda: assess.read(tmp_path / "none.yaml"), ConfigError)
    (tmp_path / "odd.yaml").write_text("querys: 3\n")
    assert_refused(lambda: assess.read(tmp_path / "odd.yaml"), ConfigError)
    assert_refused(lambda: assess.read(LONGTAIL, ["quries=3"]), ConfigError, "unknown", "quries", "queries")


def test_an_output_folder_among_the_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    experiment, config = assess.read(LONGTAIL, ["data.name=image_folder", f"data.root={tmp_path / 'data'}"])
    folder = tmp_path / "data" / "out"
    assert_refused(lambda: assess.assess_seed(experiment, config, 20, folder, False), ConfigError, "--output-dir")


@pytest.mark.slow
def test_the_tool_goes_on_from_it_with_any_number_of_queries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both, alone = tmp_path / "both", tmp_path / "alone"
    call(assess, monkeypatch, LONGTAIL, *SMALL, "--output-dir", both)
    told = capsys.readouterr().out
    assert "small_cnn on long-tailed digits: " in told
    assert "(higher is better), seed 0\n" in told
    assert "- worth it? " in told
    given = ["--config-file", LONGTAIL, *SMALL, "queries=24", "--output-dir"]
    call(finetune_classifier, monkeypatch, *given, both, "--resume")
    resumed = capsys.readouterr().out
    call(finetune_classifier, monkeypatch, *given, alone)
    assert capsys.readouterr().out.count("worth it? ") == resumed.count("worth it? ") == 1
    ours, theirs = files_of(both), files_of(alone)
    seed = (
        "identity.json",
        "log.jsonl",
        "adapter.safetensors",
        "value_function.safetensors",
        "tuned.safetensors",
    )
    for name in ("run.json", *(f"seed-0/{each}" for each in seed)):
        assert ours[name] == theirs[name], name
    assert_refused(lambda: call(assess, monkeypatch, LONGTAIL, *SMALL, "--output-dir", both), SystemExit, "--resume")
    call(assess, monkeypatch, LONGTAIL, *SMALL, "--output-dir", both, "--resume")
    assert told.splitlines()[-1] in capsys.readouterr().out


def test_only_a_search_goes_on_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(
        lambda: call(
            assess, monkeypatch, CONFIGS / "classification/digits.yaml", "method.name=recipe", "--output-dir", tmp_path
        ),
        SystemExit,
        "method.name=recipe",
        "queries",
    )
    assert not list(tmp_path.iterdir())


def test_too_few_queries_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(
        lambda: call(assess, monkeypatch, LONGTAIL, *SMALL, "--queries", 2), SystemExit, "2", "queries", "3", "4"
    )


@pytest.mark.slow
def test_it_asks_its_queries_on_validation_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    named = ("metric.name=helpers.own:accuracy", f"metric.folder={own.FOLDER}")
    with own.counting() as asked:
        call(assess, monkeypatch, CONFIGS / "classification/digits.yaml", *SMALL, *named, "--queries", 12)
    assert asked.count(max(asked)) == 12
    assert max(asked) < 0.25 * 1797  # the validation part's size, not the test part's
