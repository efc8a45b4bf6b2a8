"""A search in one line of a script under PyTorch Lightning: a callback at the end of fit."""

import math
import re
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any

import lightning as L
from torch import nn
from torch.utils._pytree import tree_leaves

from metricopt_ext.adapters.attach import FILM
from metricopt_ext.data.evidence import check_evidence
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.integrations.lightning_steps import best_weights, last_epoch, prepared, training_loss, validated
from metricopt_ext.integrations.reported import metric_of, names_of
from metricopt_ext.methods.result import Result
from metricopt_ext.methods.tune import Attach, check_tuning, tune_model
from metricopt_ext.tasks.batches import DatasetBatches, loader_batches
from metricopt_ext.tasks.combine import Combine
from metricopt_ext.tasks.direction import direction

LOADER = r"/dataloader_idx_([0-9]+)$"  # ends a name that is logged of one of several loaders


class SearchPhi(L.Callback):
    """Searches phi at the end of ``Trainer.fit`` for what the module's own validation logs.

    Each query is one validation by the trainer itself, as in its last epoch: with its precision, ``limit_val_batches``,
    data module and hooks, but without its callbacks, and loggers get nothing. The loss is that of ``training_step``, on
    batches of the training data after the same hooks; what the step logs meanwhile is dropped. Several processes
    validate together, and the first one's values count: log with ``sync_dist=True`` what all should have a part in. The
    search begins from the best checkpoint, if the trainer keeps one, as that is what would be deployed. It ends with
    phi merged, in an ordinary module: save it by ``trainer.save_checkpoint(path)`` and test it by
    ``trainer.test(module)``, as the fit's own checkpoints stay as they are, and ``ckpt_path="best"`` is one of them. A
    module that FSDP or DeepSpeed's stage 3 shards is refused before training. Settings, adapter and data are checked
    before the first training step, what the validation logs after the sanity check or the first validation.

    Args:
        monitor: What to tune, by the name under which ``validation_step`` logs it; or a list of several that
            ``combine`` makes the metric of, such as a recall for each class.
        queries: Passes over the validation data that may be spent.
        combine: How several make the metric, as of `Metric`, e.g. ``"worst"``.
        halves: Names under which it is logged on two random halves of the data; they tell the guard what is chance. Of
            several two lists, each in their order.
        maximize: Whether higher is better; None where the name says so, as ``val_f1`` and ``val_loss`` do.
        bounds: Lowest and highest possible value; None for a metric without known bounds.
        attach: Attaches the adapter to the module; by default FiLM on every normalisation layer, with 32 numbers. It is
            called before training too, for a check, and that adapter is removed.
        merge: Whether phi is merged. If not, the module keeps its adapter, ``Adapter(module)``, with the phi that the
            guard kept.
        options: Further arguments of `optimize_metric`, e.g. ``seed`` and ``output_dir``.

    Attributes:
        maximize: Whether higher is better.
        run: What the search did, after fit.

    Raises:
        ValueError: ``bounds`` are none, or ``halves`` name one value twice, or ``monitor`` itself.
        ConfigError: Nothing tells whether higher is better.

    Examples:
        >>> search = SearchPhi("val_f1", queries=100)  # doctest: +SKIP
        >>> L.Trainer(callbacks=[search]).fit(module, train_loader, val_loader)  # doctest: +SKIP
        >>> print(search.run)  # doctest: +SKIP
    """

    run: Result

    def __init__(
        self,
        monitor: str | Sequence[str],
        *,
        queries: int,
        combine: Combine | None = None,
        halves: tuple[str | Sequence[str], str | Sequence[str]] | None = None,
        maximize: bool | None = None,
        bounds: tuple[float, float] | None = (0.0, 1.0),
        attach: Attach = FILM,
        merge: bool = True,
        **options: Any,
    ) -> None:
        self.names = names_of(monitor, combine)
        parts = [(each,) if isinstance(each, str) else tuple(each) for each in halves or ()]
        every = [*self.names, *chain(*parts)]
        if [*map(len, parts)] not in ([], [len(self.names)] * 2) or len({*every}) < len(every):
            raise ValueError(f"halves are {halves} of {monitor!r}; give the names of its values on two halves of data")
        self.halves: dict[str, tuple[str, ...]] = dict(zip(self.names, zip(*parts, strict=True), strict=False))
        self.queries, self.attach, self.merge, self.options = queries, attach, merge, options
        higher = partial(direction, maximize=maximize)
        self._metric = partial(metric_of, names=self.names, higher=higher, bounds=bounds, combine=combine)
        self.maximize: bool = self._metric(dict).maximize
        self._named = maximize is None  # so that the name alone says which way is better

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Check the settings, the folder, and on the module that it can be adapted.

        Raises:
            ConfigError: The module optimizes by itself, so its training step returns no loss to follow; or another
                callback has the other mode of what is tuned; or there are several processes and an ``output_dir``,
                which they can't share.
            Others: As from `check_tuning`.
        """
        if not module.automatic_optimization:
            name = type(module).__name__
            raise ConfigError(f"{name}.automatic_optimization is False; let training_step return the loss alone")
        opposite = "min" if self.maximize else "max"
        for each in trainer.callbacks if self._named else []:  # type: ignore[attr-defined]
            watched = getattr(each, "monitor", None)
            if watched in self.names and getattr(each, "mode", None) == opposite:
                raise ConfigError(
                    f"{type(each).__name__} has mode={opposite!r} of {watched!r}, which by its name means the"
                    " opposite; give it the other mode, or SearchPhi maximize=True or maximize=False"
                )
        check_tuning(module, metric=self._metric(dict), queries=self.queries, attach=self.attach, **self.options)

    def on_sanity_check_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Check that the validation logs what is asked for, unless it logs nothing yet."""
        if logged := trainer.logged_metrics:
            self._check_logged(logged, "; if it does later, set num_sanity_val_steps=0")

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Check that the validation logs what is asked for, within its bounds, before more is trained.

        Raises:
            ConfigError: It does not log it.
            MetricError: It is outside the bounds.
        """
        if not trainer.sanity_checking:
            self._check_logged(trainer.logged_metrics)
            values = {name: float(trainer.logged_metrics[name]) for name in self.names}
            if all(map(math.isfinite, values.values())):  # or undefined so early in the training
                self._metric(lambda: values).judge(nn.Module())

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Check that there are batches to draw, and validation data, the one loader or that of ``monitor``, of others.

        Raises:
            DataError: There are none.
        """
        self._batches(trainer)
        judged, place = tree_leaves(trainer.val_dataloaders), re.search(LOADER, self.names[0])
        for each in judged[int(place[1]) :][:1] if place else judged[: len(judged) == 1]:
            train, own = getattr(trainer.train_dataloader, "dataset", None), getattr(each, "dataset", each)
            check_evidence(train, own, "the validation data", getattr(each, "collate_fn", itemgetter(0)))

    def on_fit_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Load the best checkpoint, and tune the module; after an error it is as it was.

        Raises:
            MetricError: The validation does not log ``monitor`` or one of the halves.
            DataError: The training data can't be drawn in batches, or there is no validation data.
            Others: As from `tune_model`.
        """
        drawn = self._batches(trainer)

        def validate() -> dict[str, Any]:
            scores = validated(trainer)
            self._check_logged(scores)
            halves = {name: [scores[each] for each in of] for name, of in self.halves.items()}
            return {name: (scores[name], halves.get(name)) for name in self.names}

        with best_weights(trainer), last_epoch(trainer):
            self.run = tune_model(
                module,
                loss=partial(training_loss, trainer),
                batches=lambda *place: prepared(trainer, drawn(*place), *place),
                metric=self._metric(validate),
                queries=self.queries,
                attach=self.attach,
                merge=self.merge,
                training=None,
                population=1,  # a training step can be any code
                **self.options,
            )

    def _check_logged(self, scores: Iterable[str], remedy: str = "") -> None:
        """Refuse names that the validation does not log.

        Raises:
            ConfigError: It does not log one.
        """
        for name in (*self.names, *chain(*self.halves.values())):
            if name not in scores:
                logged = ", ".join(scores) or "nothing"
                raise ConfigError(f"validation_step does not log {name!r}; it logs {logged}{remedy}")

    def _batches(self, trainer: L.Trainer) -> DatasetBatches:
        """Return the trainer's training data as batches that can be drawn again.

        Raises:
            DataError: They can't; or there is no validation data.
        """
        if not trainer.val_dataloaders:
            raise DataError(f"there is no validation data, to ask for {self.names[0]!r}; give fit a loader of it")
        return loader_batches(trainer.train_dataloader)
