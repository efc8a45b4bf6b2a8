"""What a fitted Lightning trainer does once more for a search: as it did itself, and without a trace."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from metricopt_ext.integrations.lightning_steps import SilentLogger, last_epoch, prepared, training_loss, validated

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(0)) * 40 + 128
Y = (X[:, 0] > 128).long()


class Classifier(L.LightningModule):
    """Its steps ask the trainer for all sorts of things."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2))

    def training_step(self, batch: Any, index: int) -> dict[str, Tensor]:
        self.log("rate", self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]
        return {"loss": F.cross_entropy(self.net(batch[0]), batch[1])}

    def validation_step(self, batch: Any, index: int) -> None:
        assert self.trainer.datamodule.classes == 2  # type: ignore[attr-defined]
        self.logger.log_metrics({"index": index})  # type: ignore[union-attr]
        self.logger.experiment.write(self.logger.log_dir)  # type: ignore[union-attr]
        score = self.net(batch[0]).softmax(1)[:, 0].double().mean()
        self.log_dict({"score": score, "epoch": float(self.current_epoch)})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Pixels(L.LightningDataModule):
    """Standardises on the device, and adds noise in training."""

    classes = 2

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(X, Y), batch_size=16)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(X, Y), batch_size=8)

    def on_before_batch_transfer(self, batch: Any, index: int) -> Any:
        return batch[0] - 128, batch[1]

    def on_after_batch_transfer(self, batch: Any, index: int) -> Any:
        noise = torch.randn_like(batch[0]) if self.trainer.training else 0.0  # type: ignore[union-attr]
        return batch[0] / 40 + 0.01 * noise, batch[1]


class Then(L.Callback):
    """Does something at the end of the fit."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function, self.validations = function, 0

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.validations += not trainer.sanity_checking

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        self.found = self.function(trainer)


def fitted(folder: Path, function: Callable[[Any], Any], **options: Any) -> Then:
    then = Then(function)
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    logger = CSVLogger(folder)
    logger.experiment.write = lambda path: None  # type: ignore[attr-defined]
    host = L.Trainer(accelerator="cpu", max_epochs=2, callbacks=[then], logger=logger, **quiet, **options)
    host.fit(Classifier(), datamodule=Pixels())
    return then


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"limit_val_batches": 2},
        {"precision": "64-true"},
        {"precision": "bf16-true"},
        {"precision": "bf16-mixed"},
    ],
)
def test_the_validation_is_the_trainers_own(options: dict[str, Any], tmp_path: Path) -> None:
    """It sees the same batches after the same hooks, in the same precision and epoch."""

    def again(trainer: Any) -> Any:
        own = {name: float(each) for name, each in trainer.callback_metrics.items()}
        with last_epoch(trainer):
            return own, {name: float(each) for name, each in validated(trainer).items()}

    then = fitted(tmp_path, again, **options)
    own, found = then.found
    assert found == {name: own[name] for name in ("score", "epoch")}
    assert found["epoch"] == 1.0
    assert then.validations == 2  # of the fit alone


def test_a_batch_is_what_the_training_step_gets(tmp_path: Path) -> None:
    def batches(trainer: Any) -> Any:
        with last_epoch(trainer):
            before = torch.get_rng_state()
            drawn = [prepared(trainer, [X[:4], Y[:4]], 0, 0, step)[0] for step in (1, 1, 2)]
            assert torch.equal(before, torch.get_rng_state())
            return drawn

    first, same, other = fitted(tmp_path, batches).found
    torch.testing.assert_close(first, (X[:4] - 128) / 40, rtol=0, atol=0.05)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("32-true", torch.float32), ("64-true", torch.float64), ("bf16-mixed", torch.bfloat16)]
)
def test_the_loss_is_the_training_steps_in_its_precision(precision: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    outputs: list[Tensor] = []

    def loss(trainer: Any) -> Any:
        module = trainer.lightning_module
        with last_epoch(trainer):
            batch = prepared(trainer, [X[:8], Y[:8]], 0, 0, 0)
            handle = module.net.register_forward_hook(lambda net, inputs, output: outputs.append(output.detach()))
            found = training_loss(trainer, module, batch)
            handle.remove()
        assert not {"log", "log_dict"} & vars(module).keys()
        return found.detach(), F.cross_entropy(outputs[0].float(), Y[:8])

    found, expected = fitted(tmp_path, loss, precision=precision).found
    assert outputs[0].dtype == dtype
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


def test_where_lightning_scales_the_loss_it_is_computed_in_full_precision(tmp_path: Path) -> None:
    def loss(trainer: Any) -> Any:
        module, trainer.precision_plugin.scaler = trainer.lightning_module, object()
        with last_epoch(trainer):
            batch = prepared(trainer, [X[:8], Y[:8]], 0, 0, 0)
            found = training_loss(trainer, module, batch)
        return found.detach(), F.cross_entropy(module.net(batch[0]), batch[1]).detach()

    found, expected = fitted(tmp_path, loss, precision="bf16-mixed").found
    assert torch.equal(found, expected)


@pytest.mark.parametrize("fails", [False, True])
def test_the_trainer_is_as_it_was(fails: bool, tmp_path: Path) -> None:
    def state(trainer: Any) -> Any:
        metrics = {name: float(each) for name, each in trainer.callback_metrics.items()}
        return trainer.callbacks, trainer.loggers, trainer.current_epoch, trainer.state.stage, metrics

    def within(trainer: Any) -> Any:
        before, module, logged = state(trainer), trainer.lightning_module, list[Any]()
        trainer.logger.log_metrics = lambda *arguments, **options: logged.append(arguments)
        try:
            with last_epoch(trainer):
                assert not trainer.callbacks
                nn.init.zeros_(module.net[3].weight)
                assert float(validated(trainer)["score"]) != before[-1]["score"]
                if fails:
                    raise RuntimeError("no data")
        except RuntimeError:
            pass
        assert module.trainer is trainer
        assert not logged
        return before, state(trainer)

    before, after = fitted(tmp_path, within).found
    assert before == after


def test_a_silent_logger_names_the_folders_of_its_own(tmp_path: Path) -> None:
    own = CSVLogger(tmp_path, name="mine", version=3)
    silent = SilentLogger(own)
    silent.log_metrics({"a": 1.0})
    silent.experiment.add_image("a", X)
    assert (silent.name, silent.version, silent.save_dir) == ("mine", 3, own.save_dir)
    assert silent.log_dir == own.log_dir
    assert not list(tmp_path.iterdir())
