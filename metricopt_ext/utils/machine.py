"""The machine that a run computes on.

Processors round differently: torch, oneDNN, MKL, OpenBLAS and FAISS choose among kernels by what the processor can do,
and sums depend on the number of threads. Training amplifies the differences: a run's digits are those of its machine.
"""

import platform
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from metricopt_ext.utils.words import counted


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
    table = Path("/proc/cpuinfo")  # Linux's
    found = re.search(r"^model name\s*: *(.*)$", table.read_text(), re.MULTILINE) if table.exists() else None
    return (found[1].strip() if found else "") or platform.processor() or platform.machine()
