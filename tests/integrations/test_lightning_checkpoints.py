"""What Lightning reloads after a fit whose end is a search: the tuned model, from each of its files."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import metricopt_ext as mo
from helpers.refusals import having
from metricopt_ext.errors import MetricError
from metricopt_ext.integrations.lightning import SearchPhi
from metricopt_ext.integrations.lightning_checkpoints import best_of, reloaded
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.direct import CMAES

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (X[:, 0] > 0.5).long()
BATCHES = DataLoader(TensorDataset(X, Y), batch_size=16)
WHOLE = DataLoader(TensorDataset(X, Y), batch_size=48)


class Classifier(L.LightningModule):
    """Its first epoch is its best one, by what it says of itself."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, width), nn.LayerNorm(width), nn.Tanh(), nn.Linear(width, 2)).double()

    def training_step(self, batch: Any, index: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, index: int) -> None:
        first = self.net(batch[0]).softmax(1)[:, 0]  # which offsets of the logits surely raise
        self.log_dict({"score": first.mean(), "even": first[::2].mean(), "odd": first[1::2].mean()})
        self.log("early", -float(self.current_epoch))

    def test_step(self, batch: Any, index: int) -> None:
        self.log("score", self.net(batch[0]).softmax(1)[:, 0].mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(callback: SearchPhi, folder: Path, **options: Any) -> tuple[Any, Classifier]:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    strategy = options.pop("strategy", "auto")
    kept = ModelCheckpoint(
        folder, **{"monitor": "early", "mode": "max", "filename": "best", "save_last": True, **options}
    )
    host = L.Trainer(accelerator="cpu", max_epochs=3, callbacks=[callback, kept], strategy=strategy, **quiet)
    module = Classifier()
    host.fit(module, BATCHES, WHOLE)
    return host, module


def search(**options: Any) -> SearchPhi:
    attach = lambda module: mo.attach_film(module, dim=4, outputs=mo.Outputs())  # noqa: E731
    return SearchPhi(
        "score", **{"queries": 14, "halves": ("even", "odd"), "attach": attach, "callback": Callback(), **options}
    )


def weights_of(path: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = torch.load(path, weights_only=True)["state_dict"]
    return state


def test_whatever_lightning_reloads_is_the_tuned_model(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    callback = search()
    host, module = fitted(callback, tmp_path)
    run, tuned = callback.run, module.state_dict()
    assert run.after > run.before + 0.01
    for which in ("best", "last"):
        (scores,) = host.test(ckpt_path=which, dataloaders=WHOLE, verbose=False)
        assert scores["score"] == pytest.approx(run.after, abs=1e-9)
        state = weights_of(tmp_path / f"{which}.ckpt")
        assert state.keys() == tuned.keys()
        assert all(torch.equal(each, tuned[name]) for name, each in state.items())
    loaded = Classifier.load_from_checkpoint(host.checkpoint_callback.best_model_path)
    assert all(torch.equal(each, tuned[name]) for name, each in loaded.state_dict().items())
    host.save_checkpoint(tmp_path / "again.ckpt")
    assert all(torch.equal(each, tuned[name]) for name, each in weights_of(tmp_path / "again.ckpt").items())
    assert not [each for each in recwarn if "phi" in str(each.message)]


def test_the_search_begins_from_the_best_checkpoint_and_keeps_its_file(tmp_path: Path) -> None:
    callback = search()
    _, module = fitted(callback, tmp_path)
    best = torch.load(tmp_path / "best.ckpt.untuned", weights_only=True)
    assert best["epoch"] == 0
    assert (tmp_path / "last.ckpt.untuned").exists()
    untuned = Classifier()
    untuned.load_state_dict(best["state_dict"])
    right = untuned.net(X).softmax(1)[:, 0].mean()
    assert callback.run.before == pytest.approx(float(right), abs=1e-9)
    rewritten = torch.load(tmp_path / "best.ckpt", weights_only=True)
    assert rewritten["epoch"] == 0
    assert rewritten["hyper_parameters"] == best["hyper_parameters"]
    assert rewritten.keys() == best.keys()
    assert not all(torch.equal(each, best["state_dict"][name]) for name, each in module.state_dict().items())


def test_a_fit_goes_on_from_the_tuned_model(tmp_path: Path) -> None:
    _, module = fitted(search(), tmp_path)
    tuned = {name: each.clone() for name, each in module.state_dict().items()}
    again = L.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False)
    other = Classifier()
    again.fit(other, BATCHES, ckpt_path=tmp_path / "last.ckpt")  # no epoch is left
    assert all(torch.equal(each, tuned[name]) for name, each in other.state_dict().items())


@pytest.mark.parametrize("options", [{"strategy": CMAES(), "queries": 60, "halves": None}, {"merge": False}])
def test_files_that_stay(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing better was found, and where the adapter is to stay on the module."""
    monkeypatch.setattr(Classifier, "validation_step", lambda self, *batch: self.log_dict(dict.fromkeys(NAMES, 0.5)))
    fitted(search(**options), tmp_path)
    assert not list(tmp_path.glob("*.untuned"))


NAMES = ("score", "even", "odd", "early")


def test_after_an_error_the_weights_are_the_last_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **options: Any) -> None:
        raise MetricError("no data")

    monkeypatch.setattr("metricopt_ext.integrations.lightning.optimize_metric", fails)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    weights = []
    for callbacks in ([], [search(), ModelCheckpoint(tmp_path, monitor="early", mode="max")]):
        module = Classifier()
        kept = {"callbacks": callbacks, "enable_checkpointing": bool(callbacks)}
        host = L.Trainer(accelerator="cpu", max_epochs=3, **kept, **quiet)
        with pytest.raises(MetricError, match="no data") if callbacks else nullcontext():
            host.fit(module, BATCHES, WHOLE)
        weights.append(module.state_dict())
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(each, weights[0][name]) for name, each in weights[1].items())
    assert not list(tmp_path.glob("*.untuned"))


def test_a_link_to_the_best_is_one_file(tmp_path: Path) -> None:
    host, _ = fitted(search(), tmp_path, save_last="link", monitor=None)
    assert reloaded(host) == [Path(best_of(host)).resolve()]  # type: ignore[arg-type]
    assert len(list(tmp_path.glob("*.untuned"))) == 1


def test_a_file_that_can_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(self: Any, path: Any, **options: Any) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr("lightning.pytorch.strategies.SingleDeviceStrategy.load_checkpoint", unreadable)
    callback = search()
    with pytest.warns(UserWarning, match=having("phi")) as caught:
        fitted(callback, tmp_path, save_last=False)
    said = [str(each.message) for each in caught]
    assert any("best.ckpt can't be read, so the search begins from the last weights: the disk" in each for each in said)
    assert any("best.ckpt lacks phi, as it can't be read" in each for each in said)


class Sharding(L.pytorch.strategies.SingleDeviceStrategy):
    """Writes each checkpoint as a folder, as strategies for many devices do."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        Path(filepath).mkdir(parents=True, exist_ok=True)
        torch.save(checkpoint, Path(filepath) / "shard.pt")

    def remove_checkpoint(self, filepath: Any) -> None:
        Path(filepath, "shard.pt").unlink()
        Path(filepath).rmdir()


def test_folders_of_shards_stay(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    callback = search()
    fitted(callback, tmp_path, strategy=Sharding(device="cpu"))
    assert callback.run.after > callback.run.before + 0.01
    said = [str(each.message) for each in recwarn]
    begins = "so the search begins from the last weights"
    assert [each for each in said if begins in each] == [f"{tmp_path / 'best.ckpt'} is no file here, {begins}"]
    for which in ("best", "last"):
        assert [each.name for each in (tmp_path / f"{which}.ckpt").iterdir()] == ["shard.pt"]
