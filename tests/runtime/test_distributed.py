"""Processes under torchrun: what they share, what they refuse, and how they end when one of them dies."""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from metricopt_ext.runtime import distributed

# Each rank says what it saw; the script ends with an error if a rank saw something else than it should.
SHARED = """
import os
import torch
from metricopt_ext.errors import ConfigError, MetricError
from metricopt_ext.runtime import distributed

assert (distributed.world(), distributed.rank(), distributed.several()) == (1, 0, False)
def outside():
    with distributed.sharing({"own": os.environ["RANK"]}):
        assert (distributed.world(), distributed.rank(), distributed.several()) == (1, 0, False)

outside()
with distributed.joined():
    number, own = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    assert distributed.several() == (number > 1)
    assert (distributed.world(), distributed.rank()) == (1, 0)
    with distributed.sharing({"seed": 3, "loss": 0.5 + 1e-7 * own}), distributed.sharing():
        assert (distributed.world(), distributed.rank()) == (number, own)

        ran = []
        def square(item):
            with distributed.joined(), distributed.sharing({"own": own}):  # each works by itself
                assert (distributed.world(), distributed.rank()) == (1, 0)
            ran.append(item)
            return torch.tensor(item) ** 2
        assert [int(x) for x in distributed.each(square, range(7))] == [0, 1, 4, 9, 16, 25, 36]
        assert ran == list(range(own, 7, number)), ran
        assert list(distributed.each(square, [])) == []

        def failing(item):
            if item == 2:
                raise MetricError(f"item {item} on rank {own}")
            return item
        seen = []
        try:
            for x in distributed.each(failing, range(6)):
                seen.append(x)
        except MetricError as error:
            assert str(error) == f"item 2 on rank {2 % number}", error
        assert seen == [0, 1]

        assert distributed.on_first(lambda: (own, torch.full((2,), 1 / 3)))[0] == 0
        try:
            distributed.on_first(lambda: failing(2))
            raise SystemExit("no error")
        except MetricError as error:
            assert str(error) == "item 2 on rank 0"
        class Local(Exception):
            def __reduce__(self):
                raise TypeError("not to be sent")
        def unsent():
            raise Local("what happened")
        try:
            distributed.on_first(unsent)
            raise SystemExit("no error")
        except (Local, RuntimeError) as error:
            assert "what happened" in str(error), error
    try:
        with distributed.sharing({"queries": 60 + own}):
            assert number == 1
    except ConfigError as error:
        assert "queries is " in str(error) and "give all ranks the same" in str(error), error
    assert distributed.world() == 1
print(f"rank {own} is done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3])
def test_what_is_shared_is_the_same_on_every_rank(torchrun: Any, world: int) -> None:
    process = torchrun(SHARED, world)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert sorted(re.findall(r"rank (\d) is done", output)) == [str(rank) for rank in range(world)]


LEAVING = """
import torch.distributed as dist
from metricopt_ext.runtime import distributed

with distributed.joined():
    if dist.get_rank() == 1:
        raise SystemExit("failed")
"""


@pytest.mark.slow
def test_a_rank_that_fails_is_not_waited_for(torchrun: Any) -> None:
    process = torchrun(LEAVING, 2)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "failed" in output


def test_a_process_alone_shares_with_nobody() -> None:
    assert (distributed.world(), distributed.rank(), distributed.several(), distributed.restarted()) == (
        1,
        0,
        False,
        False,
    )
    with distributed.joined(), distributed.sharing({"seed": 0}):
        assert (distributed.world(), distributed.rank()) == (1, 0)
        ran: list[int] = []
        results = distributed.each(lambda item: ran.append(item) or item, [1, 2, 3])
        assert next(results) == 1
        assert ran == [1]  # the next one runs when it is asked for
        assert list(results) == [2, 3]
        tensor = torch.zeros(2)
        assert distributed.on_first(lambda: tensor) is tensor


LEFT = """
import time
import torch.distributed as dist
from metricopt_ext.runtime import distributed

dist.init_process_group("gloo")
own = dist.get_rank()

def ended(program):
    began = time.monotonic()
    try:
        with distributed.joined():
            program()
        return "a result", time.monotonic() - began
    except BaseException as error:
        return f"{type(error).__name__} {error}", time.monotonic() - began

def interrupted(error, rank):
    def work(item):
        if item >= 2 and own == rank:
            raise error
    def program():
        with distributed.sharing():
            list(distributed.each(work, range(4)))
    return program

def between(error, rank, ends=False):
    def program():
        with distributed.sharing():
            list(distributed.each(lambda item: item, range(4)))
            if own == rank:
                raise error
            ends or distributed.on_first(lambda: 3)
    return program

def before():
    with distributed.sharing({"own": Unpackable() if own == 1 else 0}):
        pass

class Unpackable:
    def __reduce__(self):
        raise OSError("not to be sent")

PROGRAMS = {
    "KeyboardInterrupt": (interrupted(KeyboardInterrupt(), 1), 1),
    "SystemExit": (interrupted(SystemExit(3), 0), 0),
    "GeneratorExit": (interrupted(GeneratorExit(), 1), 1),
    "KeyboardInterrupt ": (between(KeyboardInterrupt(), 0), 0),
    "KeyError": (between(KeyError("own"), 1), 1),
    "ValueError": (between(ValueError(), 0, ends=True), 0),
    "TypeError": (before, 1),
}
for name, (program, rank) in PROGRAMS.items():
    end, seconds = ended(program)
    assert seconds < 60, (name, seconds)
    if own == rank:
        assert end.startswith(name), (name, end)
    else:
        assert end.startswith("RankError") and f"rank {rank}, by {name.strip()}" in end, (name, end)
    with distributed.joined(), distributed.sharing():  # they can begin anew
        assert list(distributed.each(lambda item: item + own, range(4))) == [0, 2, 2, 4]

dist.destroy_process_group()
print(f"rank {own} is done")
"""


@pytest.mark.slow
def test_a_rank_that_leaves_ends_the_others(torchrun: Any) -> None:
    """In the metric, between two exchanges and at the end; it may live on."""
    process = torchrun(LEFT, 2)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert sorted(re.findall(r"rank (\d) is done", output)) == ["0", "1"]


DYING = """
import os, sys, time
from metricopt_ext.errors import RankError
from metricopt_ext.runtime import distributed

own = int(os.environ["RANK"])
began = time.monotonic()
try:
    with distributed.joined(), distributed.sharing():
        list(distributed.each(lambda item: item == 6 and os._exit(0), range(8)))
except RankError as error:
    assert time.monotonic() - began < 60
    print(f"rank {own}: {error}")
"""


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others_whatever_launched_them(forked: Any) -> None:
    output = forked(DYING, 4)
    assert sorted(re.findall(r"rank (\d): another rank has ended", output)) == ["0", "1", "3"]


ALONE = """
import time
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torchmetrics.classification import BinaryAccuracy
from metricopt_ext.errors import RankError
from metricopt_ext.runtime import distributed

dist.init_process_group("gloo")
own, one = dist.get_rank(), torch.ones(1)
held, mesh = dist.new_group(), init_device_mesh("cpu", (2,))
wrapped = nn.parallel.DistributedDataParallel(nn.BatchNorm1d(1))

def run(work):
    with distributed.joined(), distributed.sharing():
        return list(distributed.each(work, range(2)))

def accuracy(item):
    assert not dist.is_initialized()
    metric = BinaryAccuracy()
    metric.update(torch.tensor([1, item]), torch.tensor([1, 0]))
    return float(metric.compute())

def gradient(item):
    wrapped.zero_grad()
    wrapped.eval()(torch.full((3, 1), 1.0 + item)).sum().backward()
    return round(float(wrapped.module.weight.grad), 2)

assert run(accuracy) == [1.0, 0.5]
assert run(gradient) == [3.0, 6.0]

REFUSED = {
    "all_reduce": lambda item: dist.all_reduce(one),
    "get_rank": lambda item: dist.get_rank(),
    "begin": lambda item: dist.init_process_group("gloo"),
    "new group": lambda item: dist.new_group(),
    "held": lambda item: dist.all_reduce(one, group=held),
    "held by the first": lambda item: own == 0 and dist.barrier(held),
    "held, by its method": lambda item: held.allreduce([one]).wait(),
    "recv": lambda item: dist.recv(one, 1 - own, group=held),
    "functional": lambda item: all_reduce(one, "sum", held).sum(),
    "mesh": lambda item: all_reduce(one, "sum", mesh).sum(),
    "named": lambda item: torch.ops._c10d_functional.all_reduce(one, "sum", "0").sum(),
}
for name, work in REFUSED.items():
    began = time.monotonic()
    try:
        said = run(work)
    except RankError as error:
        said = str(error)
    assert "all the data" in said and time.monotonic() - began < 30, (name, said)
    for group in (None, held):  # elsewhere all is as it was
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert total == 2
    assert all_reduce(one, "sum", mesh) == 2
dist.destroy_process_group()
print(f"rank {own} is done")
"""


@pytest.mark.slow
def test_a_rank_sees_no_process_group_while_it_works_alone(torchrun: Any) -> None:
    """What looks for one computes by itself; what holds one is refused, and never hangs or adds up other points."""
    process = torchrun(ALONE, 2)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert output.count("is done") == 2


WAITING = """
import os, sys, time
from pathlib import Path
from metricopt_ext.experiment.command import errors_in_one_line
from metricopt_ext.runtime import distributed

folder = Path(sys.argv[1])

def work(item):
    (folder / f"{distributed.restarted()}-{item}-{os.getpid()}").touch()
    time.sleep(0 if distributed.restarted() else 600 * (item == 1))
    return item

with errors_in_one_line(), distributed.joined(), distributed.sharing():
    assert list(distributed.each(work, range(4))) == [0, 1, 2, 3]
    print("went on" if distributed.restarted() else "ended", flush=True)
"""


def kill_the_working(folder: Path) -> None:
    """Kill the rank that works on item 1, while the other waits for it."""
    until = time.monotonic() + 300
    while not (working := list(folder.glob("False-1-*"))):
        assert time.monotonic() < until
        time.sleep(0.05)
    os.kill(int(working[0].name.rpartition("-")[2]), signal.SIGKILL)


@pytest.mark.slow
def test_torchrun_starts_them_again(torchrun: Any, tmp_path: Path) -> None:
    process = torchrun(WAITING, 2, str(tmp_path), options=("--max-restarts=1",))
    kill_the_working(tmp_path)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert output.count("went on") == 2
    assert len(list(tmp_path.glob("True-*"))) == 4
