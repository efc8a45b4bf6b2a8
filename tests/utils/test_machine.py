"""The machine of a run: what is said of it."""

import torch

from metricopt_ext.utils.machine import Machine
from metricopt_ext.utils.threads import num_threads

CPU = torch.device("cpu")


def test_the_current_machine() -> None:
    with num_threads(2):
        here = Machine.current(CPU)
    assert (here.threads, here.device) == (2, "cpu")
    assert here.capability == torch.backends.cpu.get_cpu_capability()
    assert here.processor
    assert str(here) == f"{here.processor} ({here.capability}, 2 threads)"
    assert Machine.current(CPU, threads=7).threads == 7
    assert str(Machine("A", "AVX2", 1, "NVIDIA X")) == "A (AVX2, 1 thread), NVIDIA X"
