"""The comparison tool end to end on a tiny set: shards, resuming, failures, and what is refused before it runs."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from helpers import own, programs
from helpers.refusals import assert_refused
from metricopt_ext.errors import ConfigError
from metricopt_ext.search.guided_es import estimated_direction
from metricopt_ext.tools import compare as tool
from metricopt_ext.utils.config import load_config
from testers.tool import whole

call = partial(programs.call, tool)

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "configs" / "compare" / "digits_shifted.yaml"
OTHERS = ROOT / "benchmarks" / "configs" / "compare"
CONFIGS = sorted([DIGITS, *OTHERS.glob("*.yaml")])
CONFIG = ROOT / "configs" / "classification" / "digits.yaml"
SMALL = [
    *("data.name=breast_cancer", "data.positive=malignant", "data.standardise=true", "shift.kind=none"),
    "model.name=tabular_mlp",
    *("adapter.kind=input_bias", "adapter.layers=[]", "adapter.dim=4", "model.epochs=2", "finetune.steps=5"),
    *("workers=1", "device=cpu"),
]
OVERRIDES = [
    *("methods=[random_search,cma_es,guided_es,threshold,metricopt]", "budgets=[6,20,40]", "metric.name=f1"),
    *SMALL,
]


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    call("--config-file", DIGITS, "--output-dir", folder, *OVERRIDES, *arguments)
    content: dict[str, Any] = json.loads((folder / "comparison.json").read_text())
    return content


def refused(*arguments: str | Path) -> str:
    """Return the error, or the status with which the parser of arguments ends."""
    with pytest.raises(SystemExit) as caught:
        call(*arguments)
    return str(caught.value.code).removeprefix("error: ")


def numbers(content: dict[str, Any]) -> dict[str, Any]:
    """Return what equal runs share."""
    methods = {
        name: {budget: {**cell, "seconds": None} for budget, cell in method["cells"].items()}
        for name, method in content["methods"].items()
    }
    return {"methods": methods, "starts": content["starts"], "pairs": content["pairs"], "guards": content["guards"]}


@pytest.mark.slow
def test_shards_and_resuming_give_one_comparison(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", "--seeds", "3-5")
    assert whole["seeds"] == [3, 4, 5]
    assert list(whole["starts"]) == ["pretrained", "loss_finetune", "batchnorm"]
    methods = whole["methods"]
    assert list(methods["cma_es"]["cells"]) == list(methods["guided_es"]["cells"]) == ["20", "40"]
    assert methods["guided_es"]["least"] == 14 + 3
    assert methods["random_search"]["cells"]["6"]["queries"] == [6] * 3
    assert methods["threshold"]["cells"]["40"]["queries"] == [40] * 3
    # Of each: 3 starts and BatchNorm's pass, 5 steps of the loss; then 37 queries, of which the threshold's are on one
    # pass, and a check of two batches and the probe's 64, or a check and two steps of Guided ES.
    passes = {name: method["cells"]["40"]["passes"] for name, method in methods.items()}
    assert passes == {
        name: [{"metric": 4 + metric, "loss": 5 + loss}] * 3
        for name, metric, loss in (
            ("threshold", 1, 0),
            ("guided_es", 37, 3),
            ("cma_es", 37, 0),
            ("random_search", 37, 0),
            ("metricopt", 37, 66),
        )
    }
    assert len(whole["guards"]) == 3 * 2
    assert all(guard["whole"]["error"] >= 0 for guard in whole["guards"])
    assert all(guard["error"] >= 0 for guard in whole["guards"])
    for name in ("comparison.md", "comparison.png", "report.html"):
        assert (tmp_path / "whole" / name).exists()

    parts = tmp_path / "parts"
    assert run(parts, "seed=4", "seeds=2")["seeds"] == [4, 5]
    (parts / "seed-5" / "cma_es.json").unlink()
    (parts / "seed-4" / "starts.json").unlink()
    both = run(parts, "--seeds", "3-5")
    assert numbers(both) == numbers(whole)

    assert_refused(lambda: run(parts, "budgets=[6,20]"), SystemExit, "budgets")

    assert "are in more than one of" in refused("--join", parts, tmp_path / "whole", "--output-dir", tmp_path / "all")
    call("--join", parts, "--output-dir", tmp_path / "all")
    assert numbers(json.loads((tmp_path / "all" / "comparison.json").read_text())) == numbers(whole)


def test_a_failing_method_marks_its_cells_and_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **more: Any) -> Any:
        raise RuntimeError("no direction today")

    monkeypatch.setattr("metricopt_ext.search.direct.estimated_direction", fail)
    failed = run(tmp_path, "--seeds", "3-3")
    message = "seed 3: RuntimeError: no direction today"
    assert failed["methods"]["guided_es"]["errors"] == {"20": [message], "40": [message]}
    assert failed["methods"]["guided_es"]["cells"] == {}
    assert len(failed["methods"]["cma_es"]["cells"]) == 2
    monkeypatch.setattr("metricopt_ext.search.direct.estimated_direction", estimated_direction)
    assert run(tmp_path, "--seeds", "3-3")["methods"]["guided_es"]["errors"] == {}


@pytest.mark.slow
def test_a_limit_that_nothing_keeps_to_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["methods=[cma_es,metricopt]", "budgets=[20]", "metric.subject_to.accuracy=>= 2", "--seeds", "3-3"]
    with pytest.raises(SystemExit) as caught:
        run(tmp_path, *words)
    assert caught.value.code == 3
    (guard,) = json.loads((tmp_path / "comparison.json").read_text())["guards"]
    assert 1 < guard["broken"]["accuracy >= 2"] < 2
    said = " ".join(capsys.readouterr().out.split())
    for name in ("seed 3", "20 queries", "accuracy >= 2", f"{guard['broken']['accuracy >= 2']:.4f}", "validation"):
        assert name in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["budgets=[60,20]"], "ascending"),
        (["task=regression"], "task=regression: it must be one of"),
        (["metric.name=sorcery"], "'sorcery'"),
        (["--seeds", "9-3"], "must be FIRST-LAST"),
        (
            ["metric.subject_to.mcc=>= 0", "methods=[metricopt,loss_finetune_best,cma_es]"],
            "loss_finetune_best can't respect",
        ),
        (["metric.also=[mcc]"], "tools that finetune"),
        (["overrides=[seed=3]"], "seed=3 is a key of the comparison"),
    ],
)
def test_bad_keys_are_refused_before_anything_runs(tmp_path: Path, arguments: list[str], message: str) -> None:
    assert message in refused("--config-file", DIGITS, "--output-dir", tmp_path, *arguments)
    assert not list(tmp_path.iterdir())


def test_it_asks_its_budgets_the_ends_and_for_the_guard_no_more_than_four_tests(tmp_path: Path) -> None:
    """Here by a metric of one's own, which is called on all of validation and of test so often."""
    (tmp_path / "compare.yaml").write_text(f"task: classification\nconfig: {CONFIG}\n")
    own_metric = ("metric.name=helpers.own:accuracy", f"metric.folder={own.FOLDER}")
    plan = ("methods=[random_search,metricopt]", "budgets=[20]", "starts=[loss_finetune]", "seed=0", "seeds=1")
    with own.counting() as asked:
        call("--config-file", tmp_path / "compare.yaml", "--output-dir", tmp_path / "out", *SMALL, *own_metric, *plan)
    tested, judged = whole(asked)
    starts, cells = 2, 2
    assert judged == starts + cells * (20 - starts) + cells
    assert starts + cells <= tested <= starts + cells + 4


def test_overrides_go_to_the_comparison_or_to_its_task() -> None:
    config, subject = tool.read_configs(DIGITS, ["budgets=[30]", "data.root=FOLDER", "metric.name=f1", "seed=9"])
    assert config.budgets == [30]
    assert config.seed == 9
    assert subject.data.root == "FOLDER"
    assert subject.metric.name == "f1"


def test_what_the_task_s_tool_runs_by_default_is_no_part_of_a_comparison() -> None:
    config, subject = tool.read_configs(OTHERS / "digits_retrieval.yaml")
    assert "settings" in config.methods  # its rows
    assert subject.methods == []  # configs/retrieval/digits.yaml has [settings]


def test_the_configs_of_a_comparison_are_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    call("--config-file", DIGITS, "--show-config", "--seeds", "7-9", "metric.name=f1", "budgets=[30]")
    own, of_task = capsys.readouterr().out.split("---  # configs/classification/digits.yaml\n")
    assert {"budgets: [30]  # command line", "seeds: 3  # command line", "task: classification  # config file"} <= set(
        own.splitlines()
    )
    assert {"  name: f1  # command line", "seed: 7  # the comparison's", "queries: 600  # config file"} <= set(
        of_task.splitlines()
    )
    for text, schema in ((own, tool.CompareConfig), (of_task, tool.experiment_of("classification").config_type)):
        (tmp_path / "shown.yaml").write_text(text)
        load_config(schema, tmp_path / "shown.yaml")


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_configs_can_be_run(file: Path) -> None:
    try:
        config, subject = tool.read_configs(file)
    except ConfigError as error:
        if "digits_longtail.yaml" in str(error):
            pytest.skip("the task's config is not there yet")
        raise
    if config.task == "retrieval":
        pytest.importorskip("faiss")
    experiment = tool.experiment_of(config.task)
    subject.check()
    config.plan.check(experiment.baselines(subject))
    assert experiment.describe(subject).metric
    assert config.seed in (810, 31100, 31600)  # nothing was chosen on seeds from there on


def test_joining_takes_comparisons_alone(tmp_path: Path) -> None:
    assert "run the comparison into" in refused("--join", tmp_path, "--output-dir", tmp_path)
    for arguments in (("--join", tmp_path, "--config-file", DIGITS), ("--join", tmp_path)):
        assert refused(*arguments) == "2"  # argparse's own
    assert refused("--config-file", DIGITS) == "2"
