"""The package's own configs: what there is, what comes first, and what a wrong name is told."""

from pathlib import Path

import pytest

from metricopt_ext.errors import ConfigError
from metricopt_ext.utils.packaged import existing_config, find_config, packaged_configs

ROOT = Path(__file__).parents[2]
DIGITS = "configs/classification/digits.yaml"


def test_they_are_the_files_of_the_folder() -> None:
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*.yaml")}
    assert packaged_configs() == sorted(files)
    assert DIGITS in files


def test_a_file_of_the_path_comes_before_the_packages_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (DIGITS, f"./{DIGITS}", Path(DIGITS)):
        assert existing_config(name).read_bytes() == (ROOT / DIGITS).read_bytes()
    own = tmp_path / DIGITS
    own.parent.mkdir(parents=True)
    own.write_text("queries: 3\n")
    assert existing_config(DIGITS).read_text() == "queries: 3\n"
    assert existing_config(own) == own


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("configs/clasification/digits.yaml", f"the nearest is {DIGITS} or "),
        ("digits.yaml", f"the nearest is {DIGITS} or configs/retrieval/digits.yaml"),
        ("classification/digits.yaml", f"the nearest is {DIGITS}"),
        ("my/digit.yaml", f"the nearest is {DIGITS} or configs/retrieval/digits.yaml"),
        ("mine", "`metricopt configs` lists them"),
        ("../configs/classification/digits.yaml", "the nearest is "),  # a name, not a way into the package
    ],
)
def test_a_wrong_name_is_told_the_nearest(
    name: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_config(name) is None
    with pytest.raises(ConfigError) as caught:
        existing_config(name)
    start = f"config file {name} does not exist, neither here nor among the package's own; "
    assert str(caught.value).startswith(start + hint)
