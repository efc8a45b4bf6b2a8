"""Where a run computes."""

import pytest
import torch

from metricopt_ext.errors import ConfigError
from metricopt_ext.utils.device import choose_device


def test_devices() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ConfigError, match="device='abacus' is not to be had here"):
        choose_device("abacus")
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(ConfigError, match=f"device='{missing}' is not to be had here"):
        choose_device(missing)
