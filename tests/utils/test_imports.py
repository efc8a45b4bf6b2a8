"""What a name in a config may import: installed modules and those of a given folder, and not what lies about."""

import json
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.refusals import assert_refused
from metricopt_ext.errors import ConfigError
from metricopt_ext.utils.imports import import_named, installed_path

ROOT = Path(__file__).parents[2]
KEY = "metric.folder"

METRIC = """
from pathlib import Path
Path(__file__).with_suffix(".ran").touch()

def half(labels, predictions):
    return len(labels) / 2
"""


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    """Forget what a test imports, and the folders that it adds."""
    path, modules = sys.path[:], set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("own_"):
            del sys.modules[name]


def written(folder: Path, module: str, text: str = METRIC) -> Path:
    path = folder.joinpath(*module.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


CALL = """
import json, sys
from metricopt_ext.errors import ConfigError
from metricopt_ext.utils.imports import import_named
try:
    print(import_named(sys.argv[1], "", "metric.folder")([1], []))
except ConfigError as error:
    print(json.dumps(str(error)))
"""

HOOK = """
import sys
from importlib.util import spec_from_file_location

class Finder:
    def find_spec(name, path=None, target=None):
        return spec_from_file_location(name, {!r}) if name == "own_hooked" else None

sys.meta_path.append(Finder)
"""


def refused(name: str, folder: str | Path = "") -> str:
    with pytest.raises(ConfigError) as caught:
        import_named(name, str(folder), KEY)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_installed_modules_are_imported() -> None:
    import sklearn.metrics

    assert import_named("statistics:mean", "", KEY) is statistics.mean
    assert import_named("sklearn.metrics:f1_score", "", KEY) is sklearn.metrics.f1_score
    assert import_named("os.path:join", "", KEY) is os.path.join  # of a module that is frozen into the interpreter
    assert import_named("math:sqrt", "", KEY)(4) == 2  # built in, or in lib-dynload


@pytest.mark.parametrize("place", ["working directory", "sys.path", "PYTHONPATH"])
def test_what_lies_about_is_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    path = written(tmp_path, "own_about")
    if place == "working directory":
        monkeypatch.chdir(tmp_path)
    else:
        monkeypatch.syspath_prepend(tmp_path)
    if place == "PYTHONPATH":
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        installed_path.cache_clear()
    assert refused("own_about:half") == (
        f"module 'own_about', {path}, is not installed, so it is not imported; {KEY}={tmp_path} would allow it"
    )
    assert not path.with_suffix(".ran").exists()
    assert import_named("own_about:half", str(tmp_path), KEY)([1, 2, 3], []) == 1.5


def test_the_key_for_a_package_is_the_folder_around_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "own_package.__init__", "")
    written(tmp_path, "own_package.scores")
    written(tmp_path, "own_bare.scores")  # without an __init__.py
    for package in ("own_package", "own_bare"):
        assert f"; {KEY}={tmp_path} would allow it" in refused(f"{package}.scores:half")
        assert import_named(f"{package}.scores:half", str(tmp_path), KEY)([1], []) == 0.5


def test_an_installed_module_is_taken_rather_than_one_that_lies_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    path = written(tmp_path, "colorsys", "rgb_to_hsv = None\n" + METRIC)
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    try:
        assert import_named("colorsys:rgb_to_hsv", "", KEY)(1, 1, 1) == (0, 0, 1)
    finally:
        sys.modules.pop("colorsys", None)
    assert not path.with_suffix(".ran").exists()


def test_one_that_was_imported_before_does_not_pass_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = written(tmp_path / "a", "own_twice"), written(tmp_path / "b", "own_twice")
    import_named("own_twice:half", str(first.parent), KEY)
    message = f"module 'own_twice' is {second}, but {first} was imported by this name before"
    assert refused("own_twice:half", second.parent) == message
    monkeypatch.setitem(sys.modules, "colorsys", sys.modules["own_twice"])
    assert re.fullmatch(rf"module 'colorsys' is .*, but {re.escape(str(first))} was .*", refused("colorsys:half"))


def test_the_folder_does_not_shadow_what_is_installed(tmp_path: Path) -> None:
    path = written(tmp_path, "statistics")
    message = f"{KEY}={tmp_path} has a module 'statistics', but {statistics.__file__} is installed; rename yours"
    assert refused("statistics:mean", tmp_path) == message
    assert not path.with_suffix(".ran").exists()
    assert import_named("json:dumps", str(tmp_path), KEY) is json.dumps  # a name that the folder lacks
    (tmp_path / "json").mkdir()  # holds no module
    assert import_named("json:dumps", str(tmp_path), KEY) is json.dumps
    assert import_named("json:dumps", sysconfig.get_path("stdlib"), KEY) is json.dumps  # the same file in both places


def test_what_a_module_imports_is_limited_like_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = written(tmp_path / "about", "own_helper")
    written(tmp_path / "given", "own_needs", "from own_helper import half\nimport statistics")
    monkeypatch.syspath_prepend(about.parent)
    assert_refused(
        lambda: import_named("own_needs:half", str(tmp_path / "given"), KEY), ModuleNotFoundError, "own_helper"
    )
    assert not about.with_suffix(".ran").exists()
    written(tmp_path / "given", "own_helper")
    assert import_named("own_needs:half", str(tmp_path / "given"), KEY)([1], []) == 0.5


def test_a_function_imports_from_the_folder_when_it_is_called(tmp_path: Path) -> None:
    written(tmp_path, "own_helper")
    written(tmp_path, "own_later", "def half(*given):\n    import own_helper\n    return own_helper.half(*given)\n")
    before = sys.path[:]
    assert import_named("own_later:half", str(tmp_path), KEY)([1], []) == 0.5
    assert sys.path == [*before, str(tmp_path)]  # at its end: it shadows nothing


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., Any]:
    """Make an environment with two editable installs; calls a function there, and returns its result or the refusal."""
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", "posix_prefix", {"base": str(environment)}))
    (packages / "ours.pth").write_text(f"{tmp_path / 'editable'}\nimport own_hook\n")
    written(packages, "own_hook", HOOK.format(str(tmp_path / "elsewhere" / "own_hooked.py")))
    for module in (
        "metricopt_ext.plain",
        "metricopt_ext.errors",
        "metricopt_ext.utils.imports",
    ):  # without what the whole package needs
        written(packages, module, ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text())

    def run(name: str, search: str = "") -> Any:
        done = subprocess.run(
            [str(environment / "bin" / "python"), "-c", CALL, name],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": search},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.mark.parametrize(("place", "module"), [("editable", "own_linked"), ("elsewhere", "own_hooked")])
def test_editable_installs_count_as_installed(
    tmp_path: Path, python: Callable[..., Any], place: str, module: str
) -> None:
    """By a path in a .pth file, as most build backends write it, and by an import hook, as setuptools does."""
    written(tmp_path / place, module)
    assert python(f"{module}:half") == 0.5
