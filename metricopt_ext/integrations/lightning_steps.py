"""What a fitted Lightning trainer did in its last epoch, once more: its validation, batches and training loss."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning as L
from lightning.pytorch.loggers.logger import DummyLogger, Logger
from torch import Tensor

from metricopt_ext.utils.seeding import generator, seeded_streams


@contextmanager
def best_weights(trainer: L.Trainer) -> Iterator[None]:
    """Load the weights of the best checkpoint, if a trainer has kept one; after an error its module has its own again.

    Raises:
        Exception: The checkpoint can't be loaded.
    """
    host: Any = trainer
    module, before = host.lightning_module, copy.deepcopy(host.lightning_module.state_dict())
    try:
        if path := getattr(host.checkpoint_callback, "best_model_path", ""):
            checkpoint = host.strategy.load_checkpoint(path)
            host.strategy.load_model_state_dict(checkpoint, strict=module.strict_loading)
        yield
    except BaseException:
        module.load_state_dict(before)
        raise


@contextmanager
def last_epoch(trainer: L.Trainer) -> Iterator[None]:
    """Put a trainer that has fitted back into its last epoch, without callbacks; afterwards it is as it was.

    Its module is on the trainer's device, which Lightning takes it off before ``on_fit_end``. What is logged reaches no
    logger, and not the trainer's metrics.
    """
    host: Any = trainer
    module, state, epoch = host.lightning_module, host.state, host.fit_loop.epoch_progress.current
    device, stage = module.device, state.stage
    before = host.callbacks, host.loggers
    counted = epoch.processed, epoch.completed  # one more than during the validation
    metrics = [(each, dict(each)) for each in (host.callback_metrics, host.logged_metrics, host.progress_bar_metrics)]
    try:
        host.callbacks, host.loggers = [], [silent(each) for each in before[1]]
        epoch.processed, epoch.completed = (max(0, each - 1) for each in counted)
        module.to(host.strategy.root_device)
        yield
    finally:
        module.to(device)
        host.callbacks, host.loggers = before
        epoch.processed, epoch.completed = counted
        state.stage = stage
        for held, content in metrics:
            held.clear()
            held.update(content)


def silent(logger: Logger) -> Logger:
    """Return a logger that drops what is logged; names and folders are another's, as a step may ask for them."""
    own = {name: getattr(logger, name, None) for name in ("name", "version", "save_dir", "log_dir")}
    made: Logger = type("SilentLogger", (DummyLogger,), own)()
    return made


def validated(trainer: L.Trainer) -> dict[str, Any]:
    """Return what the trainer's own validation logs, by name: in its precision, on as many batches, by its hooks."""
    host: Any = trainer
    host.validating = True  # so that what is logged reaches the loop of the validation
    logged: dict[str, Any] = {}
    for each in host.fit_loop.epoch_loop.val_loop.run():  # of each loader
        logged |= each
    return logged


def prepared(trainer: L.Trainer, batch: Any, seed: int, task: int, step: int) -> Any:
    """Return a training batch as the trainer hands it to ``training_step``, on its device.

    Args:
        trainer: The trainer.
        batch: The batch as its loader gives it.
        seed: With ``task`` and ``step``, what the hooks draw at random depends on.
        task: See ``seed``.
        step: See ``seed``.
    """
    host: Any = trainer
    host.training = True  # hooks of batches ask for it
    draws = generator(seed, "batch hooks", task, step).initial_seed()
    with seeded_streams(draws, host.strategy.root_device):
        batch = host.precision_plugin.convert_input(batch)
        batch = host.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        return host.strategy.batch_to_device(batch, dataloader_idx=0)


def training_loss(trainer: L.Trainer, module: Any, batch: Any) -> Tensor:
    """Return the loss of a training step in the trainer's precision; it logs nothing, as no loop is there to take it.

    Where Lightning scales the loss (``16-mixed``) it is computed in full precision: unscaled, small gradients would be
    rounded to 0.
    """
    host: Any = trainer
    host.training = True
    precision = host.precision_plugin
    scaled = getattr(precision, "scaler", None) is not None
    with muted(module), nullcontext() if scaled else precision.train_step_context():
        returned: Any = module.training_step(batch, 0)
    return returned["loss"] if isinstance(returned, Mapping) else returned  # type: ignore[no-any-return]


@contextmanager
def muted(module: Any) -> Iterator[None]:
    """Have a module's ``log``, by which ``log_dict`` logs too, do nothing."""
    held, before = vars(module), vars(module).get("log")
    held["log"] = lambda *arguments, **options: None
    try:
        yield
    finally:
        del held["log"]
        if before is not None:
            held["log"] = before
