"""The content of a comparison; see tests/comparison/test_comparison_report.py for what is gathered."""

from pathlib import Path

import pytest

from metricopt_ext.comparison.comparison import Plan
from metricopt_ext.comparison.comparison_content import gather, load
from metricopt_ext.errors import DataError, FileFormatError
from metricopt_ext.experiment.experiment import Subject

SUBJECT = Subject("classification/toy", "net on toy", "accuracy", True)
PLAN = Plan(("cma_es", "metricopt", "turbo"), (5, 20, 60))


def test_a_folder_without_seeds_or_comparison_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no seed"):
        gather(tmp_path, PLAN, SUBJECT, {})
    with pytest.raises(FileFormatError, match="run the comparison into"):
        load(tmp_path)
    (tmp_path / "comparison.json").write_text("{}")
    with pytest.raises(FileFormatError, match="not a comparison's"):
        load(tmp_path)
