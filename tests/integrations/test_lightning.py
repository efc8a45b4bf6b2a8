"""The search at the end of a fit under PyTorch Lightning, and MetricOpt as a module's optimizer."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

import metricopt_ext as mo
from helpers.refusals import assert_named, assert_refused, assert_warned
from metricopt_ext.errors import AdapterError, BudgetError, ConfigError, DataError, FileFormatError
from metricopt_ext.integrations.lightning import SearchPhi
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.direct import CMAES
from metricopt_ext.value.value_function import RidgeValueFunction

D = 4
X = torch.randn(48, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (X[:, 0] > 0.5).long()
BATCHES = DataLoader(TensorDataset(X, Y), batch_size=16)
TOO_LONG = mo.StartLine(lambda t: mo.Start(t * torch.ones(D + 1)), -1.0, 1.0)


class Module(L.LightningModule):
    """A classifier whose training step logs and returns a dict, as the host allows."""

    def __init__(self, optimizer: Callable[[Any], Any] = lambda module: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2)).double()
        self.optimizer = optimizer
        self.validated = self.trained = 0

    def training_step(self, batch: Any, index: int) -> dict[str, Tensor]:
        self.trained += 1
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return {"loss": loss}

    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
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
    return SearchPhi(**{"monitor": "score", "queries": 14, "attach": attach, "callback": Callback(), **options})


def test_metric_opt_under_lightning_is_metric_opt_in_a_loop() -> None:
    """Lightning gives the optimizer a closure that computes the gradient."""

    def follow(module: Module) -> mo.MetricOpt:
        f = RidgeValueFunction(D, 2).double()
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
    assert module.state_dict().keys() == Module().state_dict().keys()  # phi is merged
    assert all(parameter.requires_grad for parameter in module.parameters())


class Scaled(L.LightningDataModule):
    """Its batches come in other units than the module takes."""

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(1000 * X, Y), batch_size=16)

    val_dataloader = train_dataloader

    def on_after_batch_transfer(self, batch: Any, index: int) -> Any:
        return batch[0] / 1000, batch[1]


class Recording(Module):
    """Notes the largest number of each training batch."""

    def training_step(self, batch: Any, index: int) -> dict[str, Tensor]:
        self.seen = [*getattr(self, "seen", []), float(batch[0].abs().max())]
        return super().training_step(batch, index)


@pytest.mark.parametrize(
    "options", [{"limit_val_batches": 1}, {"precision": "64-true"}, {"precision": "bf16-true"}], ids=str
)
def test_it_judges_and_follows_what_the_trainer_does(options: dict[str, Any]) -> None:
    module, callback = Recording(), search()
    host = trainer(callbacks=[callback], num_sanity_val_steps=0, **options)
    host.fit(module, datamodule=Scaled())
    own = float(host.callback_metrics["score"])  # of the epoch, which changed no weight
    assert callback.run.before == pytest.approx(own, abs=1e-12)
    assert module.validated == (1 + 14) * options.get("limit_val_batches", len(BATCHES))
    assert len(module.seen) > len(BATCHES)
    assert max(module.seen) < 10


def test_the_adapter_stays_if_it_is_asked_for() -> None:
    module, callback = Module(), search(merge=False)
    trainer(callbacks=[callback]).fit(module, BATCHES, BATCHES)
    assert callback.adapter.dim == D
    assert "net.1.weight" in callback.adapter.merge().state_dict()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(zip(X, Y, strict=True))


def test_what_can_not_be_merged_is_said_before_training_if_it_is_to_be() -> None:
    module = Module()
    module.scale = module.net[1].weight
    assert_refused(lambda: trainer(callbacks=[search()]).fit(module, BATCHES, BATCHES), AdapterError, "net.1.weight")
    assert (module.trained, module.validated) == (0, 0)
    callback = search(merge=False)
    trainer(callbacks=[callback]).fit(module, BATCHES, BATCHES)
    assert callback.adapter.dim == D


@pytest.mark.parametrize(
    ("options", "data", "error", "names"),
    [
        ({"monitor": "f1"}, BATCHES, ConfigError, ("'f1'",)),
        ({"halves": ("even", "uneven")}, BATCHES, ConfigError, ("uneven",)),
        ({"queries": 3}, BATCHES, BudgetError, ("3", "queries")),
        ({"queries": -1}, BATCHES, ValueError, ("queries", "-1")),
        ({"seed": 0.5}, BATCHES, ValueError, ("seed", "0.5")),
        ({"guard_confidence": 2.0}, BATCHES, ValueError, ()),
        ({"strategy": CMAES}, BATCHES, ValueError, ("strategy", "CMAES")),
        ({"starts": {"mine": mo.Start(torch.zeros(D + 1))}}, BATCHES, AdapterError, ("phi", "(5,)")),
        ({"starts": {"line": TOO_LONG}}, BATCHES, AdapterError, ("phi", "(5,)")),
        ({"starts": {"mine": None}}, BATCHES, AdapterError, ("mine", "None")),
        ({"attach": lambda module: mo.attach_film(module, "net.9")}, BATCHES, AdapterError, ()),
        ({}, DataLoader(Stream(), batch_size=16), DataError, ("DataLoader",)),
    ],
)
def test_what_it_can_not_search_is_said_before_training(
    options: dict[str, Any], data: Any, error: type[Exception], names: tuple[str, ...]
) -> None:
    module = Module()
    weights = {name: each.clone() for name, each in module.state_dict().items()}
    assert_refused(lambda: trainer(callbacks=[search(**options)]).fit(module, data, BATCHES), error, *names)
    assert module.trained == 0
    assert module.state_dict().keys() == weights.keys()  # the adapter that was tried is gone
    assert all(torch.equal(each, weights[name]) for name, each in module.state_dict().items())


@pytest.mark.parametrize("options", [{"querys": 30}, {"task": None}])
def test_options_that_there_are_not(options: dict[str, Any]) -> None:
    assert_refused(lambda: search(**options), TypeError)
    assert_refused(lambda: search(bounds=(1.0, 0.0)), ValueError, "bounds")


def test_a_folder_that_can_not_be_used_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "identity.json").touch()
    for name, error in {"used": FileFormatError, "file/below": OSError}.items():
        module = Module()
        with pytest.raises(error) as caught:
            trainer(callbacks=[search(output_dir=tmp_path / name)]).fit(module, BATCHES, BATCHES)
        assert_named(caught, name.split("/")[0])
        assert module.trained == 0


def test_without_a_sanity_check_the_first_validation_tells() -> None:
    module = Module()
    assert_refused(
        lambda: trainer(callbacks=[search(monitor="f1")], num_sanity_val_steps=0, max_epochs=5).fit(
            module, BATCHES, BATCHES
        ),
        ConfigError,
        "'f1'",
    )
    assert module.trained == len(BATCHES)


def test_a_module_that_takes_its_own_steps_is_refused() -> None:
    module = Module()
    module.automatic_optimization = False
    assert_refused(
        lambda: trainer(callbacks=[search()]).fit(module, BATCHES, BATCHES),
        ConfigError,
        "automatic_optimization",
        "False",
    )


def test_several_validation_loaders() -> None:
    module, callback = Module(), search(monitor="score/dataloader_idx_1")
    trainer(callbacks=[callback]).fit(module, BATCHES, [BATCHES, DataLoader(TensorDataset(X, Y), batch_size=48)])
    assert sum(callback.run.queries.values()) == 14


def test_it_needs_validation_data() -> None:
    assert_refused(lambda: trainer(callbacks=[search()]).fit(Module(), BATCHES), DataError)


@pytest.mark.parametrize("halves", [("even", "even"), ("score", "odd"), ("score", "score")])
def test_its_halves_are_two_other_values(halves: tuple[str, str]) -> None:
    assert_refused(lambda: search(halves=halves), ValueError, "halves", "score")


@pytest.mark.parametrize("monitor", ["val_loss", "Error rate", "val/WER"])
def test_a_loss_that_would_be_maximised_is_warned_of(monitor: str) -> None:
    assert_warned(lambda: search(monitor=monitor), monitor, "maximize=False")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        search(monitor=monitor, maximize=False)
        search(monitor="val_power")


def test_the_batches_are_as_large_as_the_samplers() -> None:
    data = TensorDataset(X, Y)
    callback, host = search(), trainer()
    sampler = BatchSampler(SequentialSampler(data), 12, drop_last=False)
    host.fit(
        Module(lambda module: torch.optim.SGD(module.parameters(), lr=0.1)),
        DataLoader(data, batch_sampler=sampler),
        BATCHES,
    )
    assert len(callback._batches(host)(0, 0, 0)[0]) == 12
    whole = DataLoader(data, batch_sampler=[list(range(24)), list(range(24, 48))])
    assert_refused(
        lambda: trainer(callbacks=[callback]).fit(Module(), whole, BATCHES), DataError, "batch_size", "batch_sampler"
    )


SHARDED = """
import sys, torch, lightning as L
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset
from metricopt_ext.errors import ConfigError
from metricopt_ext.integrations.lightning import SearchPhi
from metricopt_ext.runtime.progress import Callback

x = torch.randn(48, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
y = (x[:, 0] > 0.5).long()

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2)).double()

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, index):
        right = self.net(batch[0]).softmax(1).gather(1, batch[1][:, None]).mean()
        self.log("score", right, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

world = int(sys.argv[2])
OWN = {"strategy": "ddp"} if world > 1 else {}
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}

def fit(**options):
    module, search = Module(), SearchPhi("score", queries=14, callback=Callback(), **options)
    host = L.Trainer(accelerator="cpu", devices=world, max_epochs=1, callbacks=[search], **OWN, **quiet)
    data = TensorDataset(x, y)
    host.fit(module, DataLoader(data, batch_size=16), DataLoader(data, batch_size=24))
    return search.run, module, host.global_rank

run, module, rank = fit()
torch.save((run.before, run.after, module.state_dict()), f"{sys.argv[1]}/{world}-{rank}.pt")
if world > 1:
    try:
        fit(output_dir="out")
    except ConfigError as error:
        assert "output_dir='out' is for one process" in str(error)
    else:
        raise AssertionError("it was not refused")
    distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_processes_validate_together(forked: Any, tmp_path: Path) -> None:
    for world in (1, 2):
        forked(SHARDED, world, str(tmp_path), str(world))
    (before, after, one), *two = (torch.load(tmp_path / name) for name in ("1-0.pt", "2-0.pt", "2-1.pt"))
    assert after > before
    for shared_before, shared_after, state in two:
        assert (shared_before, shared_after) == pytest.approx((before, after), abs=1e-9)
        for name, each in state.items():
            assert torch.equal(each, two[0][2][name])
            torch.testing.assert_close(each, one[name], rtol=0, atol=1e-6)
