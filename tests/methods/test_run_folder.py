"""What a run keeps in its folder."""

import json
from pathlib import Path

import pytest

from metricopt_ext.errors import FileFormatError
from metricopt_ext.methods.run_folder import open_run


def test_a_run_folder_is_not_mixed(tmp_path: Path) -> None:
    config = {"queries": 600, "recipe": {"steps": 50}, "seed": 0, "seeds": 5, "workers": 1, "device": "auto"}
    open_run(tmp_path, {**config, "queries": 5}, resume=False)
    open_run(tmp_path, config, resume=False)  # the first one failed before it made anything
    (tmp_path / "seed-0").mkdir()
    with pytest.raises(FileFormatError, match=r"holds an earlier run: add --resume to continue it"):
        open_run(tmp_path, config, resume=False)
    open_run(tmp_path, config, resume=True)
    open_run(tmp_path, {**config, "seed": 3, "seeds": 9, "workers": 2, "device": "cpu"}, resume=True)
    with pytest.raises(FileFormatError, match=r"queries was 600, now 700"):
        open_run(tmp_path, {**config, "queries": 700}, resume=True)
    with pytest.raises(FileFormatError, match=r"recipe was \{'steps': 50\}, now \{'steps': 60\}"):
        open_run(tmp_path, {**config, "recipe": {"steps": 60}}, resume=True)
    open_run(tmp_path / "new", config, resume=True)  # nothing there to go on with
    assert json.loads((tmp_path / "new" / "run.json").read_text()) == {"queries": 600, "recipe": {"steps": 50}}
