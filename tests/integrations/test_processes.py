"""Two processes that judge their shards together tune one model, as one process does."""

from pathlib import Path
from typing import Any

import pytest
import torch

# Each host defines tune(**options) -> its result and the model; an OUTPUT folder is refused where there are several.
BEGIN = """
import sys, torch, torch.nn.functional as F
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset
import metricopt_ext as mo

folder, world = sys.argv[1], int(sys.argv[2])
x = torch.randn(60, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
y = (x[:, 0] > 0.5).long()
data, trained_on = TensorDataset(x, y), TensorDataset(x + 1e-9, y)
told = {"queries": 16, "callback": mo.Callback()}

def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2)).double()
"""

LOOP = """
from metricopt_ext.tasks.halved import with_halves

distributed.init_process_group("gloo")
rank, rows = distributed.get_rank(), torch.arange(60)
model = network()
wrapped = nn.parallel.DistributedDataParallel(model)

def metric():  # of each process's shard, gathered; the first one alone returns it
    right = wrapped(x[rank::world]).softmax(1).gather(1, y[rank::world, None])[:, 0].contiguous()
    shards = [torch.empty_like(right) for _ in range(world)]
    distributed.all_gather(shards, right)
    return with_halves(lambda half: float(torch.stack(shards).mean()), (rows[::2], rows[1::2])) if rank == 0 else None

def fails():
    if rank == 0:
        raise RuntimeError("no data")
    return 0.5

loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])

def tune(metric=metric, **options):
    given = {"loss": loss, "batches": DataLoader(data, 20), "metric": mo.Metric(metric, maximize=True)}
    return mo.tune_model(wrapped, **given, **told, **options), model, rank

try:
    tune(fails)
except mo.errors.MetricError as error:
    assert "no data" in str(error), error
else:
    raise AssertionError("it did not fail")
"""

LIGHTNING = """
import lightning as L
from metricopt_ext.integrations.lightning import SearchPhi

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network()

    def training_step(self, batch, index):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, index):
        self.log("score", self.net(batch[0]).softmax(1).gather(1, batch[1][:, None]).mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

def tune(**options):
    module, search = Module(), SearchPhi("score", **told, **options)
    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    own = {"strategy": "ddp"} if world > 1 else {}
    host = L.Trainer(accelerator="cpu", devices=world, max_epochs=1, callbacks=[search], **own, **quiet)
    host.fit(module, DataLoader(trained_on, batch_size=20), DataLoader(data, batch_size=30))
    return search.run, module, host.global_rank
"""

END = """
run, model, rank = tune()
torch.save((run.before, run.after, model.state_dict()), f"{folder}/{world}-{rank}.pt")
if world > 1:
    try:
        tune(output_dir="out")
    except mo.errors.ConfigError as error:
        assert "output_dir='out'" in str(error), error
    else:
        raise AssertionError("it was not refused")
if distributed.is_initialized():
    distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("host", [LOOP, LIGHTNING], ids=["loop", "lightning"])
def test_processes_judge_their_shards_together(host: str, forked: Any, tmp_path: Path) -> None:
    if host is LIGHTNING:
        pytest.importorskip("lightning", reason="the extra `examples` is not installed")
    for world in (1, 2):
        forked(BEGIN + host + END, world, str(tmp_path), str(world))
    (before, after, one), *two = (torch.load(tmp_path / name) for name in ("1-0.pt", "2-0.pt", "2-1.pt"))
    assert after > before
    for shared_before, shared_after, state in two:
        assert (shared_before, shared_after) == pytest.approx((before, after), abs=1e-9)
        for name, each in state.items():
            assert torch.equal(each, two[0][2][name])
            torch.testing.assert_close(each, one[name], rtol=0, atol=1e-6)
