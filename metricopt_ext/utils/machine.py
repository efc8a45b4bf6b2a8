"""The machine that a run computes on, and the settings under which its results depend on it least.

Processors round differently: torch, oneDNN, MKL, OpenBLAS and FAISS choose among kernels by what the processor can do,
and sums depend on the number of threads. Training amplifies the differences: a run's digits are those of its machine.
"""

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from metricopt_ext.errors import ConfigError
from metricopt_ext.utils.words import counted

CAPABILITY = "ATEN_CPU_CAPABILITY"


@dataclass(frozen=True)
class Machine:
    """What a run's digits depend on besides its settings.

    Attributes:
        processor: The processor's name.
        capability: The instruction set of torch's kernels: ``"DEFAULT"``, ``"AVX2"``, ``"AVX512"``, ...
        threads: CPU threads that torch computes on.
        device: Where the model is: ``"cpu"``, or the GPU's name.
    """

    processor: str
    capability: str
    threads: int
    device: str

    @classmethod
    def current(cls, device: torch.device, threads: int | None = None) -> "Machine":
        """Return this machine as this process uses it, or as one on another number of threads does."""
        return cls(
            processor=processor(),
            capability=torch.backends.cpu.get_cpu_capability(),
            threads=threads or torch.get_num_threads(),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        )

    def __str__(self) -> str:
        """Return the attributes in words."""
        gpu = "" if self.device == "cpu" else f", {self.device}"
        return f"{self.processor} ({self.capability}, {counted(self.threads, 'thread')}){gpu}"


def processor() -> str:
    """Return the processor's name."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def check_capability() -> None:
    """Reject an ATEN_CPU_CAPABILITY that this processor lacks, by which torch would end in an illegal instruction.

    Raises:
        ConfigError: The processor lacks it; the message names both.
    """
    asked, flags = os.environ.get(CAPABILITY, ""), _cpuinfo("flags").split()
    if flags and {"avx2": "avx2", "avx512": "avx512f"}.get(asked, flags[0]) not in flags:
        raise ConfigError(f"{CAPABILITY}={asked}: {processor()} has no {asked}; unset it, or set it to default")


def _cpuinfo(key: str) -> str:
    """Return the first processor's entry in Linux's table, empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    entries = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in entries if name.strip() == key), "")


def deterministic_environment(threads: int) -> dict[str, str]:
    """Return the environment under which every processor uses the same kernels, as far as the libraries let it."""
    environment = {
        CAPABILITY: "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_CBWR": "COMPATIBLE",
        "FAISS_OPT_LEVEL": "generic",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads)),
    }
    if platform.machine() in ("x86_64", "AMD64"):
        environment["OPENBLAS_CORETYPE"] = "Nehalem"
    return environment


def restart_deterministically(threads: int) -> None:
    """Start this process anew under `deterministic_environment`, which libraries read when they are loaded.

    Does nothing if the environment is that already.

    Args:
        threads: CPU threads to compute on.

    Raises:
        ConfigError: The command line is not this process's own, so that it can't be started anew.
    """
    environment = deterministic_environment(threads)
    if environment.items() <= os.environ.items():
        return
    arguments = sys.argv[1:]
    if not arguments or sys.orig_argv[-len(arguments) :] != arguments:
        settings = " ".join(f"{name}={value}" for name, value in environment.items())
        raise ConfigError(f"deterministic takes effect only before torch is loaded: start the program under {settings}")
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **environment})


@contextmanager
def deterministic(wanted: bool, threads: int) -> Iterator[None]:
    """Compute on what every processor has, if ``wanted``, and by torch's deterministic algorithms alone.

    A GPU's operation that has none raises a RuntimeError.

    Raises:
        ConfigError: See `restart_deterministically`, by which the process starts anew if need be.
    """
    check_capability()
    if wanted:
        restart_deterministically(threads)
    before = torch.are_deterministic_algorithms_enabled()
    use_deterministic(wanted or before)
    try:
        yield
    finally:
        use_deterministic(before)


def use_deterministic(algorithms: bool) -> None:
    """Set what ``torch.use_deterministic_algorithms`` sets; calling that loads torch's compiler, for two seconds."""
    if algorithms != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(algorithms)
