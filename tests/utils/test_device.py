"""Where a run computes."""

import torch

from helpers.refusals import assert_refused
from metricopt_ext.errors import ConfigError
from metricopt_ext.utils.device import choose_device


def test_devices() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert_refused(lambda: choose_device("abacus"), ConfigError, "device='abacus'")
    missing = f"cuda:{torch.cuda.device_count()}"
    assert_refused(lambda: choose_device(missing), ConfigError, f"device='{missing}'")
