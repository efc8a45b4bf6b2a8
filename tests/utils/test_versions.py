import numpy as np

from metricopt_ext.utils.versions import versions


def test_versions_name_what_the_numbers_depend_on() -> None:
    assert {"python", "metricopt-ext", "torch", "numpy", "scipy"} <= set(versions())
    assert versions()["numpy"] == np.__version__
