import subprocess
import sys
import warnings

import pytest

from helpers.refusals import having
from metricopt_ext.experiment.command import errors_in_one_line


def test_warnings_of_a_tool_are_plain() -> None:
    with pytest.warns(UserWarning, match=having("a\\x1b[31m")), errors_in_one_line():
        warnings.warn("a\x1b[31m", stacklevel=1)


def test_torch_is_not_imported() -> None:
    script = "import sys, metricopt_ext.experiment.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
