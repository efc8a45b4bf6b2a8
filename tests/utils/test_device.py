"""Where a run computes."""

import pytest
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


@pytest.mark.parametrize(("available", "expected"), [(True, "cuda"), (False, "cpu")])
def test_auto_is_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch, available: bool, expected: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert choose_device("auto") == torch.device(expected)


@pytest.mark.parametrize("name", ["abacus", "", "cpu:x"])
def test_a_name_that_is_no_device_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_device(name)
    assert str(caught.value).startswith(f"device={name!r} is not available here: ")
    assert len(str(caught.value).splitlines()) == 1
