"""What is installed, of distributions made for the test."""

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from metricopt_ext.utils.installation import DISTRIBUTION, Extra, extras, failing, installed


def made(folder: Path, name: str, release: str, *requires: str) -> None:
    """Put a distribution's metadata into a folder."""
    info = folder / f"{name.replace('-', '_')}-{release}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {release}"]
    (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {line}" for line in requires)]) + "\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that comes first on the path, with this package's metadata and some of what it needs."""
    made(
        tmp_path,
        DISTRIBUTION,
        "7.0",
        "made-core<3,>=2",
        'made-file>=1; extra == "files"',
        'made-tuner; extra == "docs"',
        'made-tuner; extra == "compare"',
        'made-never; python_version < "3" and extra == "docs"',
        f'{DISTRIBUTION}[files]; extra == "compare"',
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def of(name: str) -> Extra:
    (found,) = [each for each in extras() if each.name == name]
    return found


def test_what_is_missing_is_named_by_its_extra(site: Path) -> None:
    made(site, "made-core", "2.5")
    made(site, "made-tuner", "0.1")
    assert of("").complete
    assert of("files").missing == ["made-file"]
    assert of("files").absent
    assert of("docs").missing == of("compare").missing == []


@pytest.mark.parametrize("release", ["1.9", "3.0"])
def test_a_version_that_is_not_allowed_is_named_with_what_is(release: str, site: Path) -> None:
    made(site, "made-core", release)
    core = of("")
    assert core.outside == [f"made-core {release}, not <3,>=2"]
    assert not core.complete
    assert not core.absent


def test_what_is_installed_but_does_not_import_is_broken(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (site / "diffsort.py").write_text("raise OSError('undefined symbol:\\n  aten')")
    monkeypatch.delitem(sys.modules, "diffsort", raising=False)
    assert of("siblings").broken == ["diffsort does not import: OSError: undefined symbol: aten"]
    assert not of("siblings").absent


def test_a_module_that_is_not_there_does_not_fail() -> None:
    assert failing("made_of_nothing") is None
    assert failing("json") is None


def test_versions_are_those_of_the_metadata() -> None:
    assert installed("torch") == version("torch")
    assert installed("made-of-nothing") is None
