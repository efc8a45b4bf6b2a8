"""A module that is missing is named together with the command that installs it, by every tool."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from metricopt_ext.utils.extras import DETECTRON2, OPTIONAL, install, needed

ROOT = Path(__file__).parents[2]
FOLDERS = ("tools",)
# What each tool is called with, and what it then needs first.
CALLS = {
    "tools/assess": ("configs/compare/digits_shifted.yaml", "omegaconf"),
    "tools/compare": ("--config-file configs/compare/digits_shifted.yaml --output-dir out", "omegaconf"),
    "tools/evaluate_ap50": (
        "--config-file configs/detection/scenes_torchvision.yaml --weights w.pth --annotations a --output-dir out",
        "torchvision",
    ),
    "tools/evaluate_recall": ("--embeddings e.npy --labels y.npy --output-dir out", "faiss"),
    "tools/finetune_classifier": ("--config-file configs/classification/digits.yaml --output-dir out", "omegaconf"),
    "tools/finetune_detector": (
        "--config-file configs/detection/scenes_torchvision.yaml --output-dir out",
        "torchvision",
    ),
    "tools/finetune_retrieval": ("--config-file configs/retrieval/digits.yaml --output-dir out", "faiss"),
    "tools/train_detector": ("--config-file configs/detection/detectron2/scenes.yaml", "detectron2"),
}
NEED_NONE = {"tools/tune_checkpoint", "tools/tune_settings"}

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
