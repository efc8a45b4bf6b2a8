"""What is free, and what is refused for want of it, without making anything large."""

from pathlib import Path

import pytest
import torch

from helpers.refusals import assert_refused
from metricopt_ext.errors import ConfigError
from metricopt_ext.utils import memory
from metricopt_ext.utils.memory import check_memory, free_memory

CPU = torch.device("cpu")


def square(value: int) -> int:
    return 8 * value**2


def free(monkeypatch: pytest.MonkeyPatch, number: int | None) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: number)


def test_linux_tells_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "meminfo"
    monkeypatch.setattr(memory, "MEMINFO", table)
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert free_memory(CPU) is None
    table.write_text("MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    3000000 kB\n")
    assert free_memory(CPU) == 3_000_000 * 1024
    table.write_text("MemTotal:       16000000 kB\n")  # as kernels before 3.14
    assert free_memory(CPU) is None


@pytest.mark.parametrize(
    ("limit", "used"),
    [("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")],
)
def test_a_container_has_what_its_limit_leaves(
    limit: str, used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    (tmp_path / "meminfo").write_text("MemAvailable:    3000000 kB\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / used).write_text("1000\n")
    for written, free in (
        ("5000\n", 4000),
        ("900\n", 0),
        ("max\n", 3_000_000 * 1024),
        (f"{2**63}\n", 3_000_000 * 1024),
    ):
        (tmp_path / limit).write_text(written)
        assert free_memory(CPU) == free


def test_a_gpu_tells_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch has reserved and does not use is free too."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5000, 8000) if device.index == 1 else (0, 8000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
    assert free_memory(torch.device("cuda", 1)) == 7000
    assert free_memory(torch.device("meta")) is None


def test_the_largest_value_that_fits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 4 * 8 * 1000**2)
    check_memory("dim", 1000, square, CPU)
    names = ("dim", "16000", "1.91", "GiB", "0.0298", "1000")
    assert_refused(lambda: check_memory("dim", 16000, square, CPU), ConfigError, *names)
    assert_refused(lambda: check_memory("dim", 1001, square, CPU), ConfigError, "dim", "1001", "1000")


def test_where_nothing_is_known_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, None)
    check_memory("dim", 10**9, square, CPU)
    free(monkeypatch, 0)
    check_memory("dim", 0, square, CPU)
    assert_refused(lambda: check_memory("dim", 1, square, CPU), ConfigError, "dim", "0")
