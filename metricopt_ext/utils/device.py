"""The device that a run computes on."""

import torch

from metricopt_ext.errors import ConfigError


def choose_device(name: str) -> torch.device:
    """Return the device that a name stands for; ``auto`` is a GPU if there is one.

    Raises:
        ConfigError: There is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device={name!r} is not available here: {str(error).splitlines()[0]}") from error
