"""Ranks that share a search must find the same value of a model."""

from typing import Any

import pytest

ON_RANKS = """
import torch
import torch.distributed as dist
from torch import nn
from metricopt_ext import FinetuneTask, Metric
from metricopt_ext.adapters.attach import attach_input_bias
from metricopt_ext.experiment.baselines import searched
from metricopt_ext.runtime import distributed
from metricopt_ext.search.direct import RandomSearch

dist.init_process_group("gloo")
own, calls = dist.get_rank(), []
draw = torch.Generator().manual_seed(own)

def summed(model):
    value = torch.tensor(0.25)
    dist.all_reduce(value)
    return float(value)

def on_all(model):
    calls.append(1)
    return 0.1 * len(calls), (0.4 + 1e-9 * own, 0.6)

def failing(model):
    if own == 1:
        raise OSError("no such file")
    return 0.5

# A function, further options, and what every rank says: the values of three evaluations, or an error.
METRICS = {
    "a shard": (lambda model: 0.6 - 0.1 * own, {}, "0.6 on rank 0, but 0.5 on rank 1"),
    "halves of a shard": (lambda model: (0.6, (0.5, 0.7 - 0.1 * own)), {}, "all the data"),
    "other draws": (lambda model: float(torch.rand(1, generator=draw)), {}, "draw the same"),
    "a failure": (failing, {}, "no such file"),
    "a sum": (summed, {}, "all the data"),
    "rounding close to 1": (lambda model: 1 - 1e-6 + 1e-7 * own, {}, 3),
    "noise": (lambda model: 0.5 + 0.1 * float(torch.rand(1, generator=draw)), {"repeats": 3}, 3),
    "data beyond noise": (
        lambda model: 0.5 + 0.3 * own + 1e-3 * float(torch.rand(1, generator=draw)), {"repeats": 5}, "all the data"
    ),
    "quantities in another order": (
        lambda model: {"m": 0.5, **dict(sorted({"a": 0.1, "b": 0.9}.items(), reverse=bool(own)))}, {"name": "m"}, 3
    ),
    "another quantity of a shard": (lambda model: {"m": 0.5, "a": 0.1 * own}, {"name": "m"}, "all the data"),
    "the same": (on_all, {}, 3),
}
for name, (function, options, right) in METRICS.items():
    metric = Metric(function, maximize=True, **options)
    try:
        with distributed.joined(), distributed.sharing():
            task = FinetuneTask(attach_input_bias(nn.Linear(3, 2), dim=2), metric=metric)
            said = len(searched(task, RandomSearch(), task.origin(), 3).evaluations)
        assert metric.ledger.spent == 3 * metric.repeats
    except RuntimeError as error:
        said = str(error)
    assert said == right if isinstance(right, int) else right in str(said), (name, said)
assert len(calls) == 2  # the first point, and one of the two others
assert Metric(summed, maximize=True).evaluate(nn.Identity(), "test").value == 0.5  # each point together, not joined
dist.destroy_process_group()
print(f"rank {own} is done")
"""


@pytest.mark.slow
def test_ranks_must_find_the_same_and_not_wait_for_each_other(torchrun: Any) -> None:
    process = torchrun(ON_RANKS, 2)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert output.count("is done") == 2
