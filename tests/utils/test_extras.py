"""A module that is missing is named together with the extra that brings it, by every tool."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from helpers.refusals import assert_named, assert_refused
from metricopt_ext.utils.extras import EXTRAS, needed, require

ROOT = Path(__file__).parents[2]
FOLDERS = ("tools", "benchmarks")
MODULES = {"faiss-cpu": "faiss", "faiss-gpu": "faiss", "pillow": "PIL", "scikit-learn": "sklearn"}

# What each tool or benchmark is called with, what it then needs first, and the extra that it names.
CALLS = {
    "benchmarks/ablate_recipe": ("--output-dir out", "omegaconf", "classification"),
    "tools/assess": ("configs/compare/digits_shifted.yaml", "omegaconf", "classification"),
    "tools/compare": ("--config-file configs/compare/digits_shifted.yaml --output-dir out", "omegaconf", "all"),
    "benchmarks/compare_starts": (
        "--config-file configs/classification/a9a.yaml --output-dir out",
        "omegaconf",
        "classification",
    ),
    "benchmarks/gpu": ("--smoke --device cpu --output gpu.json", "torchvision", "all"),
    "tools/evaluate_ap50": (
        "--config-file configs/detection/scenes_torchvision.yaml --weights w.pth --annotations a --output-dir out",
        "torchvision",
        "detection",
    ),
    "benchmarks/ratios": ("--output ratios.json", "torchvision", "detection"),
    "tools/evaluate_recall": ("--embeddings e.npy --labels y.npy --output-dir out", "faiss", "retrieval"),
    "tools/finetune_classifier": (
        "--config-file configs/classification/digits.yaml --output-dir out",
        "omegaconf",
        "classification",
    ),
    "tools/finetune_detector": (
        "--config-file configs/detection/scenes_torchvision.yaml --output-dir out",
        "torchvision",
        "detection",
    ),
    "tools/finetune_retrieval": ("--config-file configs/retrieval/digits.yaml --output-dir out", "faiss", "retrieval"),
    "benchmarks/measure_ap50": ("--output-dir out", "pycocotools", "detection"),
    "benchmarks/measure_checkpoints": (
        "--config-file configs/detection/scenes_torchvision.yaml --output-dir out",
        "torchvision",
        "detection",
    ),
    "benchmarks/measure_correlation": (
        "--config-file benchmarks/configs/siblings/reloss_digits.yaml --output-dir out",
        "omegaconf",
        "classification",
    ),
    "benchmarks/measure_recall": ("--output-dir out", "faiss", "retrieval"),
    "benchmarks/measure_search": (
        "--task retrieval --config-file configs/retrieval/digits.yaml --output-dir out",
        "faiss",
        "retrieval",
    ),
    "benchmarks/measure_transfer": (
        "--task classification --config-file configs/classification/digits.yaml --output-dir out",
        "omegaconf",
        "classification",
    ),
    "benchmarks/reproduce_figure3": ("--output-dir out", "omegaconf", "classification"),
    "tools/train_detector": ("--config-file configs/detection/detectron2/scenes.yaml", "detectron2", ""),
}
NEED_NONE = {
    *("benchmarks/measure_assess", "benchmarks/measure_cost", "benchmarks/measure_scale"),
    *("benchmarks/published_cifar", "benchmarks/tabulate_runs"),
    *("benchmarks/summarise_comparisons", "benchmarks/summarise_siblings"),
    *("tools/doctor", "tools/tune_checkpoint", "tools/tune_settings"),
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
def test_every_tool_names_the_extra_that_is_missing(tmp_path: Path) -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).glob("*.py")]
    scripts = {f"{path.parent.name}/{path.stem}" for path in files if '__name__ == "__main__"' in path.read_text()}
    assert {*CALLS, *NEED_NONE} == scripts, "say what the new tool needs"
    blocked = sorted({module for modules in EXTRAS.values() for module in modules} - {"PIL"} | {"detectron2"})
    calls = {**{tool: call for tool, (call, _, _) in CALLS.items()}, **dict.fromkeys(NEED_NONE, "--help")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([blocked, calls, str(ROOT)])],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    for tool, (_, module, extra) in CALLS.items():
        install = f"'metricopt-ext[{extra}]'" if extra else "--no-build-isolation git+"
        assert str(said[tool]).startswith(f"error: this needs {module}: pip install {install}"), (tool, said[tool])
    assert [said[tool] for tool in NEED_NONE] == [0] * len(NEED_NONE)
    assert not list(tmp_path.iterdir())  # nothing was done before


def test_the_extras_are_those_of_the_package() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {
        extra: {line.partition(">")[0] for line in declared[extra]} for extra in ("retrieval-gpu", *EXTRAS)
    }  # distributions
    modules = {
        extra: {MODULES.get(name, name.replace("-", "_")) for name in distributions}
        for extra, distributions in names.items()
    }
    brought = {"omegaconf": {"yaml"}}
    for extra, own in EXTRAS.items():
        assert set(own) == modules[extra].union(*(brought.get(each, ()) for each in modules[extra])), extra
    assert modules["retrieval-gpu"] == modules["retrieval"]
    assert names["retrieval-gpu"] ^ names["retrieval"] == {"faiss-cpu", "faiss-gpu"}


def missing(module: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"No module named {module!r}", name=module)


def test_an_extra_is_named_for_its_modules_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for extra in ("classification", "detection", "retrieval"):
        monkeypatch.delitem(sys.modules, f"metricopt_ext.{extra}", raising=False)
    assert needed(missing("botorch.models")) == "this needs botorch: pip install 'metricopt-ext[compare]'"
    assert needed(missing("omegaconf")) == "this needs omegaconf: pip install 'metricopt-ext[all]'"
    monkeypatch.setitem(sys.modules, "metricopt_ext.retrieval", sys)
    assert needed(missing("omegaconf")) == "this needs omegaconf: pip install 'metricopt-ext[retrieval]'"
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
        "packaging",
        "rich",
        "safetensors",
        "scipy",
        "torch",
        "typing-extensions",
    }


@pytest.mark.slow
def test_a_search_does_without_any_extra(tmp_path: Path) -> None:
    """All that extras bring is missing: a default search with a folder runs, as does the import of a sibling."""
    blocked = sorted({module for modules in EXTRAS.values() for module in modules})
    done = subprocess.run(
        [sys.executable, "-c", SEARCH, json.dumps(blocked), str(tmp_path / "run")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "20 queries"


def test_reloss_asks_for_its_extra_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from metricopt_ext.experiment.siblings import ReLossConfig

    ReLossConfig().relational_training()
    monkeypatch.setattr("metricopt_ext.utils.extras.find_spec", lambda module: None)
    assert_refused(lambda: ReLossConfig().relational_training(), ModuleNotFoundError, "diffsort")
    assert needed(missing("diffsort")) == "this needs diffsort: pip install 'metricopt-ext[siblings]'"


def test_a_module_is_required_before_it_is_used() -> None:
    require("json", "math")
    with pytest.raises(ModuleNotFoundError) as caught:
        require("own_missing")
    assert_named(caught, "own_missing")
    assert caught.value.name == "own_missing"
