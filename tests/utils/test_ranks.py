"""The former place of what processes share."""

import pytest

from helpers.refusals import having
from metricopt_ext.runtime import distributed
from metricopt_ext.utils import ranks


def test_joined_is_the_same_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match=having("runtime.distributed")):
        context = ranks.joined()
    with context:
        assert distributed.world() == 1
    assert type(context) is type(distributed.joined())
