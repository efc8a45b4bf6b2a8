"""The number of CPU threads is put back, whatever happens in between."""

import pytest
import torch

from metricopt_ext.utils.threads import num_threads


def test_the_number_holds_inside_alone() -> None:
    before = torch.get_num_threads()
    with num_threads(before + 2):
        assert torch.get_num_threads() == before + 2
    assert torch.get_num_threads() == before
    with pytest.raises(KeyError), num_threads(before + 1):
        raise KeyError
    assert torch.get_num_threads() == before
