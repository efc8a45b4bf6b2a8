"""What a user installs: the sdist, the wheel and the names they import."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TASKS = ("classification", "detection", "retrieval")
LINKED = (*TASKS, "configs", "tools")  # folders at the top level that metricopt_ext has symlinks to
CONFIG = "configs/classification/digits.yaml"
PAGE = "metricopt_ext/experiment/page.html"
FILES = (
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "MANIFEST.in",
    "Makefile",
    "README.md",
    "RELEASING.md",
    "SECURITY.md",
    "pyproject.toml",
)
TOOLS = (
    "assess",
    *("train_detector", "finetune_detector", "finetune_retrieval", "finetune_classifier"),
    *("evaluate_ap50", "evaluate_recall", "compare", "tune_checkpoint", "tune_settings"),
)
FOLDERS = ("metricopt_ext", "benchmarks", "examples", "tests", *LINKED)
HEAVY = ("detectron2", "faiss", "gpytorch", "matplotlib", "pytorch_metric_learning", "sklearn", "torchvision")


def run_python(*args: str, cwd: Path, stdin: str = "") -> str:
    """Run this interpreter and return its standard output; fail with its standard error."""
    result = subprocess.run([sys.executable, *args], cwd=cwd, input=stdin, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def source_files(pattern: str) -> set[str]:
    """Return the files of the source tree, each at the path that its import name calls for."""
    core = {path.relative_to(ROOT) for path in (ROOT / "metricopt_ext").rglob(pattern)}
    linked = {"metricopt_ext" / path.relative_to(ROOT) for name in LINKED for path in (ROOT / name).rglob(pattern)}
    return {path.as_posix() for path in core | linked}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel built from it, of a copy without build leftovers."""
    checkout = tmp_path_factory.mktemp("checkout")
    for name in FILES:
        shutil.copy2(ROOT / name, checkout / name)
    for name in FOLDERS:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, checkout / name, symlinks=True, ignore=ignore)
    folder = tmp_path_factory.mktemp("dist")
    run_python("-m", "build", "--no-isolation", "--outdir", str(folder), str(checkout), cwd=folder)
    return folder


@pytest.fixture(scope="module")
def unpacked_wheel(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel puts into site-packages."""
    (wheel,) = dist.glob("*.whl")
    folder = tmp_path_factory.mktemp("site").resolve()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_the_least_versions_are_without_known_holes() -> None:
    """The first releases without a known hole in what SECURITY.md promises, from the advisories."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = {*project["dependencies"], *(line for lines in extras.values() for line in lines)}
    for task in (*TASKS, "retrieval-gpu"):
        assert "pillow>=10.3,<14" in extras[task]
    least = {"filelock": "3.20.1", "pillow": "10.3", "torch": "2.6", "torchvision": "0.21"}  # 0.21 is for torch 2.6
    for name, version in least.items():
        assert [line for line in lines if re.match(rf"{name}\b[^-]", line)] == [
            line for line in lines if line.startswith(f"{name}>={version},<")
        ]


def test_checkout_links_folders() -> None:
    for name in LINKED:
        link = ROOT / "metricopt_ext" / name
        assert os.readlink(link) == f"../{name}"
        assert link.samefile(ROOT / name)


def test_sdist_holds_regular_files_only(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = [member for member in archive if not member.isdir()]
    assert all(member.isreg() for member in members)

    names = {member.name.split("/", 1)[1] for member in members}
    assert names >= set(FILES)
    assert names >= {f"{task}/__init__.py" for task in TASKS}
    assert names >= {"metricopt_ext/__init__.py", "metricopt_ext/py.typed", PAGE, CONFIG}
    elsewhere = ("benchmarks", "tests", *(f"metricopt_ext/{folder}" for folder in LINKED))
    assert not [name for name in names if name.startswith(tuple(f"{folder}/" for folder in elsewhere))]


def test_wheel_holds_every_module_below_one_package(unpacked_wheel: Path) -> None:
    top_level = {path.name for path in unpacked_wheel.iterdir() if path.suffix != ".dist-info"}
    assert top_level == {"metricopt_ext"}

    packed = {path.relative_to(unpacked_wheel).as_posix() for path in unpacked_wheel.rglob("*.*")}
    for pattern in ("*.py", "*.pyi", "*.yaml"):
        assert {path for path in packed if Path(path).match(pattern)} == source_files(pattern), pattern
    assert packed >= {f"metricopt_ext/{task}/__init__.py" for task in TASKS}
    scripts = [path for path in (ROOT / "benchmarks").glob("*.py") if '__name__ == "__main__"' in path.read_text()]
    assert len(scripts) >= 11
    assert not [path for path in packed if "benchmarks" in path or Path(path).stem in {each.stem for each in scripts}]
    assert {Path(path).stem for path in packed if path.startswith("metricopt_ext/tools/")} == {"__init__", *TOOLS}
    assert packed >= {f"metricopt_ext/{CONFIG}", "metricopt_ext/__init__.pyi", "metricopt_ext/py.typed", PAGE}
    (metadata,) = unpacked_wheel.glob("*.dist-info/METADATA")
    assert "License-Expression: Apache-2.0" in metadata.read_text(encoding="utf-8")
    assert list(unpacked_wheel.glob("*.dist-info/licenses/LICENSE"))


def test_wheel_imports_under_the_full_names_only(unpacked_wheel: Path) -> None:
    code = """
import importlib, json, sys
site, *tasks = sys.argv[1:]
sys.path.insert(0, site)
files = [importlib.import_module(name).__file__ for name in ("metricopt_ext", *(f"metricopt_ext.{t}" for t in tasks))]
missing = []
for task in tasks:
    try:
        importlib.import_module(task)
    except ModuleNotFoundError:
        missing.append(task)
print(json.dumps([files, missing]))
"""
    # -I: neither the working directory nor PYTHONPATH may offer the checkout.
    files, missing = json.loads(run_python("-I", "-c", code, str(unpacked_wheel), *TASKS, cwd=unpacked_wheel))
    assert all(Path(file).resolve().is_relative_to(unpacked_wheel) for file in files)
    assert missing == list(TASKS)


@pytest.fixture(scope="module")
def command(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Run `metricopt`, as the wheel installs it into a fresh folder, in an empty working directory."""
    pytest.importorskip("pip")
    (wheel,) = dist.glob("*.whl")
    site = tmp_path_factory.mktemp("installed")
    run_python(
        "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel), cwd=site
    )
    (program,) = site.glob("bin/metricopt" if os.name == "posix" else "bin/metricopt.exe")

    def call(*arguments: str) -> str:
        empty = tmp_path_factory.mktemp("empty")
        environment = {**os.environ, "PYTHONPATH": str(site)}
        done = subprocess.run([program, *arguments], cwd=empty, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


def test_an_installed_wheel_has_the_command_and_the_configs(command: Callable[..., str]) -> None:
    words = command("--help").split()
    assert set(words) >= {name.replace("_", "-") for name in TOOLS}
    assert command("configs").splitlines() == sorted(
        path.removeprefix("metricopt_ext/") for path in source_files("*.yaml")
    )
    assert command("configs", CONFIG) == (ROOT / CONFIG).read_text()
    assert command("finetune-classifier", "--help").startswith("usage: metricopt finetune-classifier ")
