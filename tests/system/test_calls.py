"""How often a user's own function is called: as often as was asked for, and as a dry run announced."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from helpers.programs import call
from metricopt_ext.tools import finetune_classifier, finetune_detector, finetune_retrieval

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
    return sorted(int(re.search(rf"evaluations on {part} (\d+)", said)[1]) for part in ("test", "validation"))  # type: ignore[index]


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
