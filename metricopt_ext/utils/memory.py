"""Matrices that would not fit into memory are refused before they are made."""

import bisect
from collections.abc import Callable
from pathlib import Path

import torch

from metricopt_ext.errors import ConfigError

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
# A container's limit and what it uses, in the second version of control groups, and in the first.
LIMITS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))

# What may be taken of the free memory: other processes, and the model itself, need the rest.
SHARE = 1 / 4

FLOAT64 = 8  # bytes


def free_memory(device: torch.device) -> int | None:
    """Return the free bytes of the memory that a device computes in; None where the system does not tell.

    In a container with a limit of its own, it is what that leaves, if it is less.
    """
    if device.type == "cuda":
        kept_for_reuse = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept_for_reuse
    if device.type != "cpu":
        return None
    return min((free for free in (_free_of_system(), _free_of_container()) if free is not None), default=None)


def _free_of_system() -> int | None:
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    entries = (line.partition(":") for line in lines)
    return next((1024 * int(value.split()[0]) for name, _, value in entries if name == "MemAvailable"), None)


def _free_of_container() -> int | None:
    for limit, used in LIMITS:
        try:
            return max(0, int((CGROUP / limit).read_text()) - int((CGROUP / used).read_text()))
        except (OSError, ValueError):  # no such file, or "max" for no limit
            continue
    return None


def check_memory(name: str, value: int, size: Callable[[int], int], device: torch.device) -> None:
    """Refuse a value whose matrices would take more than `SHARE` of the free memory.

    Args:
        name: What the value is, as ``dim``.
        value: The value, at least 0.
        size: Bytes that the matrices of a value take; it grows with the value.
        device: Where they would be.

    Raises:
        ConfigError: They would; the message has their size, and the largest value that fits.
    """
    free = free_memory(device)
    if free is None or size(value) <= SHARE * free:
        return
    largest = bisect.bisect_right(range(value), SHARE * free, key=size) - 1
    raise ConfigError(
        f"{name} is {value}: its matrices would take {size(value) / 2**30:.3g} GiB, more than a quarter of the"
        f" {free / 2**30:.3g} GiB of free memory; the largest {name} that fits is {largest}"
    )
