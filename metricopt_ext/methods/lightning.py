"""A search in one line of a script under PyTorch Lightning: a callback at the end of fit."""

from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.methods.pipeline import optimize_metric
from metricopt_ext.methods.result import SearchRun
from metricopt_ext.tasks.batches import DatasetBatches
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask


class SearchPhi(L.Callback):
    """Searches phi at the end of ``Trainer.fit`` for what the module's own validation logs.

    The loss is that of ``training_step``, on the trainer's training data; what the step logs meanwhile is dropped. Each
    query is one pass of ``validation_step`` over the trainer's validation data, by a trainer without loggers and
    callbacks, on one device. The module keeps its adapter, with the phi that the guard kept; ``adapter.merge()`` makes
    it an ordinary module again.

    Args:
        monitor: What to tune, by the name under which ``validation_step`` logs it.
        queries: Passes over the validation data that may be spent.
        halves: Names under which it is logged on two random halves of the data; they tell the guard what is chance.
        maximize: Whether higher is better.
        bounds: Lowest and highest possible value; None for a metric without known bounds.
        attach: Attaches the adapter to the module; by default FiLM on every normalisation layer (`attach_film`).
        options: Further arguments of `optimize_metric`, e.g. ``seed`` and ``output_dir``.

    Attributes:
        adapter: The module's adapter, after fit.
        run: What the search did, after fit.

    Example:
        >>> search = SearchPhi("val_f1", queries=100)  # doctest: +SKIP
        >>> L.Trainer(callbacks=[search]).fit(module, train_loader, val_loader)  # doctest: +SKIP
        >>> print(search.run)  # doctest: +SKIP
    """

    adapter: Adapter
    run: SearchRun

    def __init__(
        self,
        monitor: str,
        *,
        queries: int,
        halves: tuple[str, str] | None = None,
        maximize: bool = True,
        bounds: tuple[float, float] | None = (0.0, 1.0),
        attach: Callable[[nn.Module], Adapter] = attach_film,
        **options: Any,
    ) -> None:
        self.monitor, self.halves, self.attach = monitor, halves, attach
        self.queries, self.maximize, self.bounds, self.options = queries, maximize, bounds, options

    def on_fit_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Attach the adapter and search.

        Raises:
            MetricError: The validation does not log ``monitor`` or one of the halves.
            DataError: The training data can't be drawn in batches, or there is no validation data.
            Others: As from `optimize_metric`.
        """
        loader: Any = trainer.train_dataloader
        validation = trainer.val_dataloaders
        dataset = getattr(loader, "dataset", None)
        if dataset is None or isinstance(dataset, IterableDataset):
            raise DataError(
                f"the training data is a {type(loader).__name__}; SearchPhi needs a DataLoader with an index"
            )
        if not validation:
            raise DataError(
                f"there is no validation data, on which to ask for {self.monitor!r}; give fit a loader of it"
            )
        drawn = DatasetBatches(dataset, loader.batch_size or 1, collate=loader.collate_fn)

        def validate(model: L.LightningModule) -> Any:
            (scores,) = _quiet_trainer().validate(model, validation, verbose=False)
            for name in (self.monitor, *(self.halves or ())):
                if name not in scores:
                    raise ConfigError(
                        f"validation_step does not log {name!r}; it logs {', '.join(scores) or 'nothing'}"
                    )
            return scores[self.monitor], None if self.halves is None else [scores[half] for half in self.halves]

        self.adapter = self.attach(module)
        task = FinetuneTask(
            self.adapter,
            loss=_training_loss,
            batches=lambda *place: move_data_to_device(drawn(*place), module.device),
            metric=Metric(validate, maximize=self.maximize, bounds=self.bounds, name=self.monitor),
            population=1,  # a training step can be any code
        )
        self.run = optimize_metric(task, queries=self.queries, **self.options)
        module.trainer = trainer


def _quiet_trainer() -> L.Trainer:
    return L.Trainer(
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _training_loss(module: Any, batch: Any) -> Tensor:
    """Return the loss of a training step, which logs nothing: no loop is there to take it."""
    muted = dict.fromkeys(("log", "log_dict"), lambda *args, **kwargs: None)
    vars(module).update(muted)
    try:
        returned: Any = module.training_step(batch, 0)
    finally:
        for name in muted:
            del vars(module)[name]
    return returned["loss"] if isinstance(returned, Mapping) else returned  # type: ignore[no-any-return]
