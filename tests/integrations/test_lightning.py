"""The search at the end of a fit under PyTorch Lightning: what it judges, where it begins, what it says before."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

import metricopt_ext as mo
from helpers.quadratics import Quadratic
from helpers.refusals import assert_refused
from metricopt_ext.errors import AdapterError, BudgetError, ConfigError, DataError, MetricError
from metricopt_ext.integrations.lightning import SearchPhi
from metricopt_ext.runtime.progress import Callback

D = 4
X = torch.randn(48, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (X[:, 0] > 0.5).long()
BATCHES = DataLoader(TensorDataset(X + 1e-9, Y), batch_size=16)  # of training
JUDGED = DataLoader(TensorDataset(X, Y), batch_size=16)
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
        f = Quadratic(D, 2).double()
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


class Scaled(L.LightningDataModule):
    """Its batches come in other units than the module takes; those of training are noisy."""

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(1000 * X + 1e-6, Y), batch_size=16)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(1000 * X, Y), batch_size=16)

    def on_after_batch_transfer(self, batch: Any, index: int) -> Any:
        noise = torch.randn_like(batch[0]) if self.trainer.training else 0.0  # type: ignore[union-attr]
        return batch[0] / 1000 + 0.01 * noise, batch[1]


class Recording(Module):
    """Notes the batches that it is trained on, and the epoch in which it is judged."""

    def training_step(self, batch: Any, index: int) -> dict[str, Tensor]:
        self.seen = [*getattr(self, "seen", []), batch[0].detach()]
        return super().training_step(batch, index)

    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        self.epochs = [*getattr(self, "epochs", []), self.current_epoch]
        super().validation_step(batch, index, dataloader_idx)


class Listening(L.Callback):
    validated = 0

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.validated += 1


@pytest.mark.parametrize(
    "options",
    [{"limit_val_batches": 1}, {"precision": "64-true"}, {"precision": "bf16-true"}, {"precision": "bf16-mixed"}],
    ids=str,
)
def test_it_judges_and_follows_what_the_trainer_does(options: dict[str, Any], tmp_path: Path) -> None:
    """In its precision, epoch and hooks; but its other callbacks and its loggers hear of no query."""
    module, callback, listening = Recording(), search(), Listening()
    host = trainer(
        callbacks=[callback, listening],
        num_sanity_val_steps=0,
        max_epochs=2,
        logger=CSVLogger(tmp_path),
        log_every_n_steps=1,
        **options,
    )
    host.fit(module, datamodule=Scaled())
    own = float(host.callback_metrics["score"])  # of the epoch, which changed no weight
    assert callback.run.before == pytest.approx(own, abs=1e-12)
    batches = options.get("limit_val_batches", len(BATCHES))
    assert module.validated == (2 + 14) * batches
    assert set(module.epochs[batches:]) == {1}
    assert listening.validated == 2
    logged = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    assert len(logged) == 1 + 2 * len(BATCHES) + 2
    followed = module.seen[2 * len(BATCHES) :]
    assert len(followed) > 1
    assert max(float(each.abs().max()) for each in followed) < 10
    close = [(each - other).abs().max() for each in followed for other in followed if each is not other]
    assert min(close) == 0  # the same noise, where a batch is drawn again


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(zip(X, Y, strict=True))


def test_what_phi_can_not_move_is_said_before_training() -> None:
    module = Module()
    module.scale = module.net[1].weight
    assert_refused(lambda: trainer(callbacks=[search()]).fit(module, BATCHES, JUDGED), AdapterError, "net.1.weight")
    assert (module.trained, module.validated) == (0, 0)


@pytest.mark.parametrize(
    ("options", "data", "error", "names"),
    [
        ({"monitor": "f1"}, BATCHES, ConfigError, ("'f1'",)),
        ({"queries": 3}, BATCHES, BudgetError, ("3", "queries")),
        ({"querys": 30}, BATCHES, TypeError, ("querys",)),
        ({"seed": 0.5}, BATCHES, ValueError, ("seed", "0.5")),
        ({"starts": {"line": TOO_LONG}}, BATCHES, AdapterError, ("phi", "(5,)")),
        ({"output_dir": Path(__file__) / "below"}, BATCHES, OSError, ("below",)),
        ({}, DataLoader(Stream(), batch_size=16), DataError, ("DataLoader",)),
    ],
)
def test_what_it_can_not_search_is_said_before_training(
    options: dict[str, Any], data: Any, error: type[Exception], names: tuple[str, ...]
) -> None:
    module = Module()
    weights = {name: each.clone() for name, each in module.state_dict().items()}
    assert_refused(lambda: trainer(callbacks=[search(**options)]).fit(module, data, JUDGED), error, *names)
    assert module.trained == 0
    assert module.state_dict().keys() == weights.keys()  # the adapter that was tried is gone
    assert all(torch.equal(each, weights[name]) for name, each in module.state_dict().items())


def test_what_a_script_can_not_mean_is_refused_at_once() -> None:
    assert_refused(lambda: search(bounds=(1.0, 0.0)), ValueError, "bounds")
    assert_refused(lambda: search(halves=("score", "odd")), ValueError, "halves", "score")
    assert_refused(lambda: trainer(callbacks=[search()]).fit(Module(), BATCHES), DataError)
    module = Module()
    module.automatic_optimization = False
    host = trainer(callbacks=[search()])
    assert_refused(lambda: host.fit(module, BATCHES, JUDGED), ConfigError, "automatic_optimization", "False")
    late = trainer(callbacks=[search(monitor="f1")], num_sanity_val_steps=0, max_epochs=5)
    module = Module()
    assert_refused(lambda: late.fit(module, BATCHES, JUDGED), ConfigError, "'f1'")
    assert module.trained == len(BATCHES)


def test_a_value_outside_its_bounds_is_said_before_more_is_trained() -> None:
    module = Module()
    host = trainer(callbacks=[search(bounds=(0.0, 0.1))], max_epochs=5)
    assert_refused(lambda: host.fit(module, BATCHES, JUDGED), MetricError, "score", "(0.0, 0.1)", "bounds=None")
    assert module.trained == len(BATCHES)
    callback = search(bounds=None)
    trainer(callbacks=[callback]).fit(Module(), BATCHES, JUDGED)
    assert callback.run.after >= callback.run.before


class ByClass(Module):
    """Logs the probability of each class, and on halves."""

    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        right = self.net(batch[0]).softmax(1).gather(1, batch[1][:, None])[:, 0]
        rows = {"": slice(None), "even ": slice(None, None, 2), "odd ": slice(1, None, 2)}
        found = {
            f"{half}accuracy {c}": right[of][batch[1][of] == c].mean() for c in (1, 0) for half, of in rows.items()
        }
        self.log_dict(found)


def test_several_that_are_logged_make_the_metric() -> None:
    names = ["accuracy 1", "accuracy 0"]
    halves = tuple([f"{half} {name}" for name in names] for half in ("even", "odd"))
    module, callback = ByClass(), search(monitor=names, combine="worst", halves=halves)
    before = ByClass()
    host = trainer()
    host.validate(before, JUDGED, verbose=False)
    trainer(callbacks=[callback]).fit(module, BATCHES, JUDGED)
    found = {name: float(host.logged_metrics[name]) for name in names}
    made_of = {name: before for name, (before, _) in callback.run.made_of.items()}
    assert made_of == pytest.approx(found)
    assert [*made_of] == names
    assert callback.run.before == pytest.approx(min(found.values()))
    assert callback.run.guard == "halves"
    low = trainer(callbacks=[search(monitor=names, combine="worst", bounds=(0.9, 1.0))])
    assert_refused(lambda: low.fit(ByClass(), BATCHES, JUDGED), MetricError, "accuracy 1 and 1 more", "(0.9, 1.0)")


@pytest.mark.parametrize(
    ("options", "error", "names"),
    [
        ({"monitor": ["accuracy 1"]}, ConfigError, ("combine=",)),
        ({"combine": "worst"}, ConfigError, ("'score'", "list")),
        ({"monitor": [], "combine": "worst"}, ConfigError, ("[]",)),
        ({"monitor": ["val_f1", "val_loss"], "combine": "mean"}, ConfigError, ("maximize=",)),
        ({"monitor": ["acc", "f1"], "combine": "best"}, ValueError, ("'best'",)),
        ({"monitor": ["acc", "f1"], "combine": "mean", "halves": ("a", "b")}, ValueError, ("halves",)),
        ({"monitor": ["acc", "f1"], "combine": "mean", "halves": (["a", "b"], ["c", "a"])}, ValueError, ("halves",)),
    ],
)
def test_several_names_that_can_not_be_meant(options: dict[str, Any], error: Any, names: tuple[str, ...]) -> None:
    assert_refused(lambda: search(**options), error, *names)


def test_several_validation_loaders() -> None:
    module, callback = Module(), search(monitor="score/dataloader_idx_1")
    trainer(callbacks=[callback]).fit(module, BATCHES, [JUDGED, DataLoader(TensorDataset(X, Y), batch_size=48)])
    assert sum(callback.run.queries.values()) == 14


@pytest.mark.parametrize(
    ("monitor", "judged"),
    [
        ("score", BATCHES),
        ("score", DataLoader(Subset(BATCHES.dataset, range(9)), batch_size=3)),
        ("score", DataLoader(TensorDataset(X.flip(0) + 1e-9, 1 - Y), batch_size=16)),
        ("score/dataloader_idx_1", [JUDGED, BATCHES]),
    ],
    ids=["itself", "a part", "its rows", "the loader that counts"],
)
def test_the_training_data_are_refused_before_training(monitor: str, judged: Any) -> None:
    module = Module()
    host = trainer(callbacks=[search(monitor=monitor)])
    assert_refused(lambda: host.fit(module, BATCHES, judged), DataError, "validation")
    assert module.trained == 0


def test_training_data_beside_what_counts_are_let_pass() -> None:
    callback = search(monitor="score/dataloader_idx_0")
    trainer(callbacks=[callback]).fit(Module(), BATCHES, [JUDGED, BATCHES])
    assert sum(callback.run.queries.values()) == 14


def test_which_way_is_better_is_told_or_said_by_the_name_or_asked_for() -> None:
    assert [search(monitor=name).maximize for name in ("val_f1", "val_loss")] == [True, False]
    assert search(monitor="val_loss", maximize=True).maximize
    assert_refused(lambda: search(monitor="my_metric"), ConfigError, "'my_metric'", "maximize=True")


@pytest.mark.parametrize("kept", [ModelCheckpoint(monitor="score", mode="min"), EarlyStopping("score")])
def test_a_callback_that_takes_the_other_way_for_better_is_named(kept: Any, tmp_path: Path) -> None:
    module, options = Module(), {"enable_checkpointing": True, "default_root_dir": tmp_path}
    host = trainer(callbacks=[search(), kept], **options)
    names = (type(kept).__name__, "'score'", "mode='min'", "maximize=False")
    assert_refused(lambda: host.fit(module, BATCHES, JUDGED), ConfigError, *names)
    assert (module.trained, set(module.state_dict())) == (0, set(Module().state_dict()))
    host = trainer(callbacks=[told := search(maximize=False), kept], **options)
    host.fit(module, BATCHES, JUDGED)
    assert told.run.after <= told.run.before


# --- What is on file --------------------------------------------------------------------------------------------


class Saved(Module):
    """Its first epoch is its best one, by what it says of itself; it may fail once it is trained."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__(lambda module: torch.optim.SGD(module.parameters(), lr=0.1))
        self.fails, self.ended = fails, False
        self.save_hyperparameters()

    def on_train_end(self) -> None:
        self.ended = True

    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        if self.fails and self.ended:
            raise RuntimeError("no data")
        super().validation_step(batch, index)
        self.log("early", -float(self.current_epoch))


def fitted(callback: SearchPhi | None, folder: Path, module: Saved) -> dict[str, Tensor]:
    best = ModelCheckpoint(folder, monitor="early", mode="max", filename="best")
    callbacks = [best] if callback is None else [best, callback]
    trainer(max_epochs=3, callbacks=callbacks, enable_checkpointing=True).fit(module, BATCHES, JUDGED)
    return module.state_dict()


def test_the_search_begins_from_the_best_checkpoint_and_leaves_its_file(tmp_path: Path) -> None:
    callback, plain = search(halves=None), tmp_path / "plain"
    tuned = fitted(callback, tmp_path, Saved())
    untuned = {"last": fitted(None, plain, Saved())}
    untuned["best"] = torch.load(plain / "best.ckpt", weights_only=True)["state_dict"]
    kept = torch.load(tmp_path / "best.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(each, untuned["best"][name]) for name, each in kept.items())
    assert not all(torch.equal(each, kept[name]) for name, each in tuned.items())
    scores = {}
    for name, state in untuned.items():
        module = Saved()
        module.load_state_dict(state)
        scores[name] = trainer().validate(module, JUDGED, verbose=False)[0]["score"]
    assert callback.run.before == pytest.approx(scores["best"], abs=1e-9)
    assert abs(scores["best"] - scores["last"]) > 1e-4


def unread(*arguments: Any, **options: Any) -> None:
    raise OSError("the disk is gone")


@pytest.mark.parametrize("reads", [True, False])
def test_after_an_error_the_weights_are_the_last_ones(
    reads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the validation, or where the best checkpoint can't be read."""
    module = Saved(fails=reads)
    if not reads:
        monkeypatch.setattr("lightning.pytorch.strategies.SingleDeviceStrategy.load_checkpoint", unread)
    error, said = (MetricError, "no data") if reads else (OSError, "the disk is gone")
    assert_refused(lambda: fitted(search(), tmp_path, module), error, said)
    expected = fitted(None, tmp_path / "plain", Saved())
    assert all(torch.equal(each, expected[name]) for name, each in module.state_dict().items())
