"""How often a user's own function is called: as often as was asked for, and as a dry run announced."""

import json
import re
import shlex
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from helpers.programs import call
from metricopt_ext.tools import (
    assess,
    compare,
    finetune_classifier,
    finetune_detector,
    finetune_retrieval,
    tune_checkpoint,
    tune_settings,
)

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
OWN = """
import math
from pathlib import Path

CALLS = Path(__file__).with_name("calls")


def note(number):
    with CALLS.open("a") as file:
        file.write(f"{number}\\n")


def accuracy(labels, predictions):
    note(len(labels))
    return float((labels == predictions).mean())


def spread(embeddings, labels):
    note(len(labels))
    return float((1 + math.tanh(float(embeddings.mean()))) / 2)


def scored(truth, found):
    note(len(truth))
    return sum(float(each["scores"].sum()) for each in found) / (1 + sum(len(each["scores"]) for each in found))
"""
COMMON = ("seeds=1", "workers=1", "device=cpu", "queries=20", "finetune.steps=4", "adapter.dim=4")
TOOLS = {
    "classifier": (
        *(finetune_classifier, "classification/digits.yaml", "accuracy"),
        *("data.name=wine", "data.standardise=true", "data.fractions=[0.5,0.2,0.3]", "shift.kind=none"),
        *("model.name=tabular_mlp", "model.epochs=2", "adapter.kind=input_bias", "adapter.layers=[]"),
    ),
    "retrieval": (
        *(finetune_retrieval, "retrieval/digits.yaml", "spread"),
        *("model.epochs=1", "model.width=4", "model.embedding=8"),
    ),
    "detector": (
        *(finetune_detector, "detection/scenes_torchvision.yaml", "scored"),
        *("model.steps=4", "model.batch_size=2", "batch_size=2", "model.min_size=48", "model.max_size=48"),
        *("model.proposals=20", "data.images=[6,8,10]", "scene.size=48", "scene.digits=[1,2]", "scene.scale=[24,40]"),
    ),
}
MORE = (
    "methods=[loss_finetune_best,class_offsets,cma_es]",
    "best_evals=3",
    "search_queries=18",
    "starts=[]",
    "pictures=[curves]",
)


def written(folder: Path) -> str:
    """Write the functions; returns the name of the module, which a process imports once."""
    name = f"calls_of_{abs(hash(folder))}"
    (folder / f"{name}.py").write_text(OWN)
    return name


def whole(folder: Path) -> list[int]:
    """Return how often the function was called on all of validation, and on all of test, the fewer first.

    Halves and the few examples on which it is tried first are smaller than both.
    """
    counts = Counter(map(int, (folder / "calls").read_text().split()))
    return sorted(counts[size] for size in sorted(counts)[-2:])


def announced(printed: str) -> list[int]:
    """Return how many evaluations a dry run announces, on test and on validation."""
    said = " ".join(printed.split())
    return sorted(map(int, re.findall(r"evaluations on (?:test|validation) (\d+)", said)))


@pytest.mark.slow
@pytest.mark.parametrize(("tool", "more"), [*((tool, ()) for tool in TOOLS), ("classifier", MORE)])
def test_a_finetune_tool_asks_what_was_asked_for_and_tests_each_end_once(
    tool: str, more: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, config, function, *settings = TOOLS[tool]
    own = (f"metric.name={written(tmp_path)}:{function}", f"metric.folder={tmp_path}")
    words = ("--config-file", CONFIGS / config, *COMMON, *settings, *own, *more)
    call(module, *words, "--output-dir", tmp_path / "out", "--dry-run")
    plan = announced(capsys.readouterr().out)
    (tmp_path / "calls").unlink()
    call(module, *words, "--output-dir", tmp_path / "out")
    report, calls = json.loads((tmp_path / "out" / "report.json").read_text()), whole(tmp_path)
    (told,) = report["evaluations"]
    assert calls == sorted(told.values())
    assert told["test"] == len(report["methods"])
    ours = report["methods"]["metricopt"]["queries_total"]
    assert all(made <= most for made, most in zip(calls, plan, strict=True))
    if not more:
        assert told["validation"] == ours <= plan[1] == 20
    else:  # cma_es began where MetricOpt had, whose query it counts too
        named = {name: each["queries_total"] for name, each in report["methods"].items() if each["queries_total"]}
        judged, curves, starts = 3, 2 * (4 + 1), report["queries"][0]["starts"]
        assert told["validation"] == sum(named.values()) - starts + judged + curves
    assert f"{told['validation']} evaluations on validation and {told['test']} evaluations on test" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.slow
def test_an_assessment_asks_its_queries(tmp_path: Path) -> None:
    _, config, function, *settings = TOOLS["classifier"]
    own = (f"metric.name={written(tmp_path)}:{function}", f"metric.folder={tmp_path}")
    call(assess, CONFIGS / config, *COMMON, *settings, *own, "--queries", 12)
    counts = Counter(map(int, (tmp_path / "calls").read_text().split()))
    assert counts[max(counts)] == 12
    assert max(counts) < 0.25 * 178  # the validation part's size, not the test part's


@pytest.mark.slow
def test_a_comparison_asks_its_budgets_the_ends_and_for_the_guard_no_more_than_four_tests(tmp_path: Path) -> None:
    _, config, function, *settings = TOOLS["classifier"]
    (tmp_path / "compare.yaml").write_text(f"task: classification\nconfig: {CONFIGS / config}\n")
    own = (f"metric.name={written(tmp_path)}:{function}", f"metric.folder={tmp_path}")
    plan = ("methods=[random_search,metricopt]", "budgets=[20]", "starts=[loss_finetune]", "seed=0")
    words = ("--config-file", tmp_path / "compare.yaml", "--output-dir", tmp_path / "out")
    call(compare, *words, *(each for each in COMMON if not each.startswith("queries")), *settings, *own, *plan)
    tested, asked = whole(tmp_path)
    starts, cells = 2, 2
    assert asked == starts + cells * (20 - starts) + cells
    assert starts + cells <= tested <= starts + cells + 4


@pytest.mark.slow
def test_a_command_is_run_once_for_each_query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"norm.weight": torch.ones(6), "norm.bias": torch.zeros(6)}, tmp_path / "in.safetensors")
    (tmp_path / "score.py").write_text(
        "import sys\nopen('calls', 'a').write('1\\n')\nprint('score', len(sys.argv[1]) + float(sys.argv[2]))\n"
    )
    command = f"{shlex.quote(sys.executable)} -S score.py {{}} {{trial}}"
    score = ("--parse", r"score (\S+)", "--output-dir", tmp_path / "out", "--score")
    checkpoint = ("--checkpoint", "in.safetensors", "--output", "out.safetensors", "--dim", 3)
    setting = ("--setting", "size=1,2,3,4")
    for tool, words, name, most, least in (
        (tune_checkpoint, (*checkpoint, "--queries", 14), "{checkpoint}", 14, 14),
        (tune_checkpoint, (*checkpoint, "--queries", 14, "--dry-run"), "{checkpoint}", 1, 1),
        (tune_settings, (*setting, "--queries", 4), "{size}", 4, 2),
    ):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        (tmp_path / "calls").unlink(missing_ok=True)
        call(tool, *score, command.replace("{}", name), *words)
        assert least <= len((tmp_path / "calls").read_text().split()) <= most
