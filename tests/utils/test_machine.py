"""The machine of a run: what is said of it, and the settings under which it matters least."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.refusals import assert_refused
from metricopt_ext.errors import ConfigError
from metricopt_ext.utils import machine
from metricopt_ext.utils.machine import (
    Machine,
    check_capability,
    deterministic,
    deterministic_environment,
    restart_deterministically,
)
from metricopt_ext.utils.threads import num_threads

CPU = torch.device("cpu")
PROGRAM = """\
import json, os, sys
import torch
from metricopt_ext.utils.machine import Machine, restart_deterministically
print("at first", torch.backends.cpu.get_cpu_capability(), flush=True)
restart_deterministically(1)
print(json.dumps([vars(Machine.current(torch.device("cpu"))), sys.argv[1:], dict(os.environ)]))
"""


def started(*arguments: str, **environment: str) -> Any:
    """Return the lines that a program prints which starts itself anew."""
    inherited = {name: value for name, value in os.environ.items() if name not in deterministic_environment(1)}
    done = subprocess.run(
        [sys.executable, *arguments], env={**inherited, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_the_current_machine() -> None:
    with num_threads(2):
        here = Machine.current(CPU)
    assert (here.threads, here.device) == (2, "cpu")
    assert here.capability == torch.backends.cpu.get_cpu_capability()
    assert here.processor
    assert str(here) == f"{here.processor} ({here.capability}, 2 threads)"
    assert Machine.current(CPU, threads=7).threads == 7
    assert str(Machine("A", "AVX2", 1, "NVIDIA X")) == "A (AVX2, 1 thread), NVIDIA X"


@pytest.mark.parametrize("environment", [{}, {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "2"}])
def test_a_restarted_program_computes_on_what_every_processor_has(environment: dict[str, str], tmp_path: Path) -> None:
    program = tmp_path / "a program.py"
    program.write_text(PROGRAM)
    *first, last = started(str(program), "a=b c", "--flag", KEPT="yes", **environment)
    here, arguments, after = json.loads(last)
    assert len(first) == 2  # once before and once after
    assert first[1] == "at first DEFAULT"
    assert (here["capability"], here["threads"]) == ("DEFAULT", 1)
    assert arguments == ["a=b c", "--flag"]
    assert deterministic_environment(1).items() <= after.items()
    assert after["KEPT"] == "yes"


def test_a_program_under_that_environment_goes_on(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    assert len(started(str(program), "a", **deterministic_environment(1))) == 2


def test_what_cannot_be_started_anew_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tool.py", "deterministic=true"])
    assert_refused(lambda: restart_deterministically(1), ConfigError, "ONEDNN_MAX_CPU_ISA")


@pytest.mark.parametrize(
    ("asked", "flags", "has"),
    [
        ("avx512", "sse2 avx avx2", False),
        ("avx512", "avx2 avx512f", True),
        ("avx2", "sse2 avx", False),
        ("avx2", "avx avx2", True),
        ("default", "sse2", True),
        ("", "sse2", True),
        ("avx512", "", True),  # unknown
    ],
)
def test_an_instruction_set_that_the_processor_lacks_is_refused(
    asked: str, flags: str, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", asked)
    monkeypatch.setattr(machine, "_cpuinfo", {"flags": flags, "model name": "A processor"}.get)
    if has:
        check_capability()
    else:
        assert_refused(check_capability, ConfigError, f"ATEN_CPU_CAPABILITY={asked}", asked)


def test_deterministic_algorithms_are_used_within(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in deterministic_environment(2).items():
        monkeypatch.setenv(name, value)
    assert not torch.are_deterministic_algorithms_enabled()
    for wanted in (True, False):
        with deterministic(wanted, threads=2):
            assert torch.are_deterministic_algorithms_enabled() == wanted
        assert not torch.are_deterministic_algorithms_enabled()
