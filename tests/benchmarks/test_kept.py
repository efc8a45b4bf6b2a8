"""What is on file is made once, and something else there is refused by name."""

from pathlib import Path

import pytest

from kept import kept_json
from metricopt_ext.errors import FileFormatError


def test_it_is_made_once(tmp_path: Path) -> None:
    file, made = tmp_path / "row.json", []

    def make() -> dict[str, float]:
        made.append(1)
        return {"test": 0.5}

    assert kept_json(file, {"test": float}, make) == kept_json(file, {"test": float}, make) == {"test": 0.5}
    assert len(made) == 1


def test_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "row.json").write_text('{"test": "a"}')
    with pytest.raises(FileFormatError, match=r"row\.json.*delete it to make it anew"):
        kept_json(tmp_path / "row.json", {"test": float}, dict)
