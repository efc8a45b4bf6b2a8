"""The search at the end of a fit under PyTorch Lightning, and MetricOpt as a module's optimizer."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import metricopt_ext as mo
from metricopt_ext.errors import DataError, MetricError
from metricopt_ext.methods.lightning import SearchPhi
from metricopt_ext.utils.progress import Watcher

D = 4
X = torch.randn(48, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (X[:, 0] > 0.5).long()
BATCHES = DataLoader(TensorDataset(X, Y), batch_size=16)


class Module(L.LightningModule):
    """A classifier whose training step logs and returns a dict, as the host allows."""

    def __init__(self, optimizer: Callable[[Any], Any] = lambda module: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2)).double()
        self.optimizer = optimizer
        self.validated = 0

    def training_step(self, batch: Any, index: int) -> dict[str, Tensor]:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return {"loss": loss}

    def validation_step(self, batch: Any, index: int) -> None:
        self.validated += 1
        right = (self.net(batch[0]).argmax(1) == batch[1]).double() * 0.5
        right += self.net(batch[0]).softmax(1).gather(1, batch[1][:, None])[:, 0] * 0.5
        self.log_dict({"score": right.mean(), "even": right[::2].mean(), "odd": right[1::2].mean()})

    def configure_optimizers(self) -> Any:
        return self.optimizer(self)


def trainer(**options: Any) -> Any:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "barebones": False}
    return L.Trainer(accelerator="cpu", enable_model_summary=False, **{"max_epochs": 1, **quiet, **options})


def search(**options: Any) -> SearchPhi:
    attach = lambda module: mo.attach_film(module, dim=D)  # noqa: E731
    return SearchPhi(**{"monitor": "score", "queries": 14, "attach": attach, "watcher": Watcher(), **options})


def test_metric_opt_under_lightning_is_metric_opt_in_a_loop() -> None:
    """Lightning gives the optimizer a closure that computes the gradient."""

    def follow(module: Module) -> mo.MetricOpt:
        f = mo.RidgeValueFunction(D, 2).double()
        f.coefficients.copy_(torch.randn(2 * D, 2, generator=torch.Generator().manual_seed(5)))
        f.radius.fill_(2.0)
        f.gradient_floor.fill_(0.1)
        return mo.MetricOpt(mo.Adapter(module).parameters(), f.eval(), lr=0.2, steps=10, even_untrusted=True)

    phis = []
    for host in (True, False):
        module = Module(follow)
        adapter = mo.attach_film(module, dim=D)
        if host:
            trainer(max_epochs=2).fit(module, BATCHES)
        else:
            optimizer = follow(module)
            for x, y in [*BATCHES, *BATCHES]:
                optimizer.zero_grad()
                F.cross_entropy(module.net(x), y).backward()
                optimizer.step()
        phis.append(adapter.phi.detach())
    assert float(phis[0].norm()) > 0.1
    torch.testing.assert_close(*phis, rtol=1e-12, atol=1e-12)


def test_the_search_asks_the_modules_own_validation() -> None:
    module, callback = Module(), search(halves=("even", "odd"))
    host = trainer(callbacks=[callback], num_sanity_val_steps=0)
    host.fit(module, BATCHES, DataLoader(TensorDataset(X, Y), batch_size=48))
    assert module.validated == 1 + 14  # its own epoch
    assert sum(callback.run.queries.values()) == 14
    assert callback.run.guard == "halves"
    assert callback.run.after >= callback.run.before
    assert module.trainer is host
    (scores,) = trainer().validate(module, DataLoader(TensorDataset(X, Y), batch_size=48), verbose=False)
    assert scores["score"] == pytest.approx(callback.run.after, abs=1e-12)
    assert not {"log", "log_dict"} & vars(module).keys()
    assert "net.1.weight" in callback.adapter.merge().state_dict()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(zip(X, Y, strict=True))


@pytest.mark.parametrize(
    ("options", "data", "error", "message"),
    [
        ({"monitor": "f1"}, BATCHES, MetricError, "does not log 'f1'; it logs score, even, odd"),
        ({"halves": ("even", "uneven")}, BATCHES, MetricError, "does not log 'uneven'"),
        ({}, DataLoader(Stream(), batch_size=16), DataError, "needs a DataLoader with an index"),
    ],
)
def test_what_it_can_not_search(options: dict[str, Any], data: Any, error: type[Exception], message: str) -> None:
    host = trainer(callbacks=[search(**options)], num_sanity_val_steps=0)
    with pytest.raises(error, match=message):
        host.fit(Module(), data, BATCHES)


def test_it_needs_validation_data() -> None:
    with pytest.raises(DataError, match="no validation data"):
        trainer(callbacks=[search()]).fit(Module(), BATCHES)
