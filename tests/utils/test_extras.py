"""A module that is missing is named together with the command that installs it, by every tool."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from helpers.refusals import assert_named, assert_refused
from metricopt_ext.utils.extras import DETECTRON2, OPTIONAL, install, needed, require

ROOT = Path(__file__).parents[2]
FOLDERS = ("tools", "benchmarks")
# What each tool or benchmark is called with, and what it then needs first.
CALLS = {
    "benchmarks/ablate_recipe": ("--output-dir out", "omegaconf"),
    "tools/assess": ("configs/compare/digits_shifted.yaml", "omegaconf"),
    "tools/compare": ("--config-file configs/compare/digits_shifted.yaml --output-dir out", "omegaconf"),
    "benchmarks/compare_starts": ("--config-file configs/classification/a9a.yaml --output-dir out", "omegaconf"),
    "benchmarks/gpu": ("--smoke --device cpu --output gpu.json", "torchvision"),
    "tools/evaluate_ap50": (
        "--config-file configs/detection/scenes_torchvision.yaml --weights w.pth --annotations a --output-dir out",
        "torchvision",
    ),
    "benchmarks/ratios": ("--output ratios.json", "torchvision"),
    "tools/evaluate_recall": ("--embeddings e.npy --labels y.npy --output-dir out", "faiss"),
    "tools/finetune_classifier": ("--config-file configs/classification/digits.yaml --output-dir out", "omegaconf"),
    "tools/finetune_detector": (
        "--config-file configs/detection/scenes_torchvision.yaml --output-dir out",
        "torchvision",
    ),
    "tools/finetune_retrieval": ("--config-file configs/retrieval/digits.yaml --output-dir out", "faiss"),
    "benchmarks/measure_ap50": ("--output-dir out", "pycocotools"),
    "benchmarks/measure_checkpoints": (
        "--config-file configs/detection/scenes_torchvision.yaml --output-dir out",
        "torchvision",
    ),
    "benchmarks/measure_correlation": (
        "--config-file benchmarks/configs/siblings/reloss_digits.yaml --output-dir out",
        "omegaconf",
    ),
    "benchmarks/measure_proposals": (
        "--config-file configs/detection/scenes_torchvision.yaml --annotations a --weights w.pth",
        "torchvision",
    ),
    "benchmarks/measure_recall": ("--output-dir out", "faiss"),
    "benchmarks/measure_search": (
        "--task retrieval --config-file configs/retrieval/digits.yaml --output-dir out",
        "faiss",
    ),
    "benchmarks/measure_transfer": (
        "--task classification --config-file configs/classification/digits.yaml --output-dir out",
        "omegaconf",
    ),
    "benchmarks/reproduce_figure3": ("--output-dir out", "omegaconf"),
    "benchmarks/value_plots": (
        "--task classification --config-file configs/classification/digits.yaml --output-dir out",
        "omegaconf",
    ),
    "tools/train_detector": ("--config-file configs/detection/detectron2/scenes.yaml", "detectron2"),
}
NEED_NONE = {
    "benchmarks/convert_cifar",
    *("benchmarks/measure_assess", "benchmarks/measure_cost", "benchmarks/measure_scale"),
    *("benchmarks/published_cifar", "benchmarks/tabulate_runs"),
    *("benchmarks/summarise_comparisons", "benchmarks/summarise_siblings"),
    *("tools/tune_checkpoint", "tools/tune_settings"),
}

# Each tool runs in a fork, so that torch is imported once and what one tool imports is not there for the next.
SCRIPT = """
import json, os, runpy, sys
import metricopt_ext.experiment.cli

blocked, calls, root = json.loads(sys.argv[1])

class Blocking:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocking)
for name in [name for name in sys.modules if name.partition(".")[0] in blocked]:
    del sys.modules[name]
said = {}
for tool, arguments in calls.items():
    receives, sends = os.pipe()
    if os.fork() == 0:
        os.close(receives)
        sys.argv = [tool, *arguments.split()]
        try:
            runpy.run_path(f"{root}/{tool}.py", run_name="__main__")
            end = "ran"
        except SystemExit as error:
            end = error.code
        except BaseException as error:
            end = repr(error)
        os.write(sends, json.dumps(end).encode())
        os._exit(0)
    os.close(sends)
    with open(receives) as stream:
        said[tool] = json.load(stream)
    os.wait()
print("\\n" + json.dumps(said))
"""


SEARCH = """
import json, sys
blocked = json.loads(sys.argv[1])

class Blocking:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocking)
import torch
from torch import nn
import metricopt_ext as mo
import metricopt_ext.experiment.method

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
x, y = torch.randn(200, 4), torch.randint(2, (200,))
task = mo.FinetuneTask(
    mo.attach_film(net, layers="1", dim=4),
    loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    batches=mo.TensorBatches(x, y, batch_size=50),
    metric=mo.Metric(lambda model: float((model(x).argmax(1) == y).float().mean()), maximize=True),
)
run = mo.optimize_metric(task, queries=20, output_dir=sys.argv[2])
print(sum(run.queries.values()), "queries")
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_every_tool_names_what_is_missing(tmp_path: Path) -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).glob("*.py")]
    scripts = {f"{path.parent.name}/{path.stem}" for path in files if '__name__ == "__main__"' in path.read_text()}
    assert {*CALLS, *NEED_NONE} == scripts, "say what the new tool needs"
    blocked = sorted({*OPTIONAL, "detectron2"} - {"PIL"})
    calls = {**{tool: call for tool, (call, _) in CALLS.items()}, **dict.fromkeys(NEED_NONE, "--help")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([blocked, calls, str(ROOT)])],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    for tool, (_, module) in CALLS.items():
        assert str(said[tool]).startswith(f"error: this needs {module}: {install(module)}"), (tool, said[tool])
    assert [said[tool] for tool in NEED_NONE] == [0] * len(NEED_NONE)
    assert not list(tmp_path.iterdir())  # nothing was done before


EXTRAS = ("classification", "retrieval", "detection", "compare", "siblings", "files")


def test_the_modules_are_those_of_the_extras() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {extra: {line.partition(">")[0] for line in declared[extra]} for extra in (*EXTRAS, "retrieval-gpu")}
    brought = {"pyyaml"}  # by omegaconf
    assert {*OPTIONAL.values()} == set().union(*(names[extra] for extra in EXTRAS)) | brought
    assert names["retrieval-gpu"] ^ names["retrieval"] == {"faiss-cpu", "faiss-gpu"}


def missing(module: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"No module named {module!r}", name=module)


@pytest.mark.parametrize("module", [*OPTIONAL, *DETECTRON2])
def test_what_is_named_can_be_installed(module: str) -> None:
    """By its own name, in a version that the package takes: the package itself is in no registry."""
    command = needed(missing(f"{module}.inner"))
    assert command == f"this needs {module}: {install(module)}"
    assert "metricopt" not in command
    if module in DETECTRON2:
        assert "git+" in command
    else:
        assert install(module).startswith(f"pip install '{OPTIONAL[module]}")


def test_versions_are_those_of_the_package() -> None:
    line = install("pytorch_metric_learning")
    assert "<3" in line
    assert ">=2.5" in line
    assert install("own_module") == "pip install 'own_module'"


def test_other_errors_name_nothing() -> None:
    assert needed(missing("own_metric")) is None
    assert needed(ImportError("cannot import name")) is None


def test_the_package_itself_needs_few_distributions() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    needed_always = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {line.partition(">")[0] for line in needed_always}
    assert names == {
        "cma",
        "filelock",
        "gpytorch",
        "lazy-loader",
        "numpy",
        "rich",
        "safetensors",
        "scipy",
        "torch",
        "typing-extensions",
    }


@pytest.mark.slow
def test_a_search_does_without_any_extra(tmp_path: Path) -> None:
    """All that extras bring is missing: a default search with a folder runs, as does the import of a sibling."""
    blocked = sorted(OPTIONAL)
    done = subprocess.run(
        [sys.executable, "-c", SEARCH, json.dumps(blocked), str(tmp_path / "run")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "20 queries"


def test_reloss_asks_for_its_package_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from metricopt_ext.experiment.siblings import SiblingsConfig

    SiblingsConfig().build("reloss")
    monkeypatch.setattr("metricopt_ext.utils.extras.find_spec", lambda module: None)
    assert_refused(lambda: SiblingsConfig().build("reloss"), ModuleNotFoundError, "diffsort")


def test_a_module_is_required_before_it_is_used() -> None:
    require("json", "math")
    with pytest.raises(ModuleNotFoundError) as caught:
        require("own_missing")
    assert_named(caught, "own_missing")
    assert caught.value.name == "own_missing"
