"""The content of a comparison; see tests/comparison/test_comparison_report.py for what is gathered."""

from pathlib import Path

from helpers.refusals import assert_refused
from metricopt_ext.comparison.comparison import Plan
from metricopt_ext.comparison.comparison_content import gather, load
from metricopt_ext.errors import DataError, FileFormatError
from metricopt_ext.experiment.experiment import Subject

SUBJECT = Subject("classification/toy", "net on toy", "accuracy", True)
PLAN = Plan(("cma_es", "metricopt", "noisy_ei"), (5, 20, 60))


def test_a_folder_without_seeds_or_comparison_is_refused(tmp_path: Path) -> None:
    assert_refused(lambda: gather(tmp_path, PLAN, SUBJECT, {}), DataError, "seed")
    assert_refused(lambda: load(tmp_path), FileFormatError)
    (tmp_path / "comparison.json").write_text("{}")
    assert_refused(lambda: load(tmp_path), FileFormatError)
