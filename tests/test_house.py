"""The house rule for tests: `tests` mirrors the core's packages, module by module."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("classification", "detection", "retrieval", "tools")  # through symlinks, with tests of their own making
CORE = ROOT / "metricopt_ext"
PACKAGES = sorted(
    str(folder)
    for folder in (path.parent.relative_to(CORE) for path in CORE.glob("*/**/__init__.py"))
    if folder.parts[0] not in LINKED
)


def test_there_are_packages_to_mirror() -> None:
    assert {"adapters", "data", "experiment", "methods", "runtime", "search", "tasks", "utils", "value"} <= set(
        PACKAGES
    )
    assert "siblings/ala" in PACKAGES


def test_every_benchmark_has_a_test_file_of_its_name() -> None:
    modules = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    assert len(modules) > 10
    assert modules == {path.stem.removeprefix("test_") for path in (ROOT / "tests/benchmarks").glob("test_*.py")}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_has_a_test_file_of_its_name(package: str) -> None:
    modules = {path.stem for path in (CORE / package).glob("*.py")} - {"__init__"}
    tested = {path.stem.removeprefix("test_") for path in (ROOT / "tests" / package).glob("test_*.py")}
    missing = [f"tests/{package}/test_{module}.py" for module in sorted(modules - tested)]
    assert not missing, f"modules without a test file: {', '.join(missing)}"
    strays = [f"tests/{package}/test_{module}.py" for module in sorted(tested - modules)]
    assert not strays, f"test files without a module: {', '.join(strays)}"
