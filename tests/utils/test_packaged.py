"""The package's own configs: what there is, what comes first, and what a wrong name is told."""

from pathlib import Path

import pytest

from metricopt_ext.utils.packaged import existing_config

ROOT = Path(__file__).parents[2]
DIGITS = "configs/classification/digits.yaml"


def test_a_file_of_the_path_comes_before_the_packages_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (DIGITS, f"./{DIGITS}", Path(DIGITS)):
        assert existing_config(name).read_bytes() == (ROOT / DIGITS).read_bytes()
    own = tmp_path / DIGITS
    own.parent.mkdir(parents=True)
    own.write_text("queries: 3\n")
    assert existing_config(DIGITS).read_text() == "queries: 3\n"
    assert existing_config(own) == own
