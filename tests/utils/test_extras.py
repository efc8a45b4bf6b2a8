"""A module that is missing is named together with the command that installs it."""

import tomllib
from pathlib import Path

import pytest

from metricopt_ext.utils.extras import DETECTRON2, OPTIONAL, install, needed

ROOT = Path(__file__).parents[2]
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
