"""A search in one line of a script with Hugging Face's ``Trainer``: its model, its data, its own compute_metrics."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import EvalPrediction

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import FILM
from metricopt_ext.adapters.wrappers import unwrapped
from metricopt_ext.data.evidence import check_evidence
from metricopt_ext.data.halves import Halves, random_halves, stratified_halves
from metricopt_ext.errors import ConfigError
from metricopt_ext.methods.pipeline import optimize_metric
from metricopt_ext.methods.result import Result
from metricopt_ext.methods.tune import (
    Logged,
    ReplayedLoss,
    in_step,
    judged_together,
    loader_batches,
    of_first,
    several,
)
from metricopt_ext.tasks.combine import Combine
from metricopt_ext.tasks.direction import direction, known_direction
from metricopt_ext.tasks.halved import with_halves
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.kept_modules import KeptModules

PREFIX = "eval_"  # of the names by which a Trainer reports its metrics
SPEEDS = ("runtime", "per_second", "preparation_time")  # end names of what is measured of each evaluation
SET_BY_EVALUATE = ("compute_metrics", "log", "_gen_kwargs", "gather_function")  # attributes; the last two by Seq2Seq's


def tune_trainer(
    trainer: Any,
    metric: str | Sequence[str] | None = None,
    *,
    queries: int,
    combine: Combine | None = None,
    eval_dataset: Any = None,
    maximize: bool | None = None,
    bounds: tuple[float, float] | None = (0.0, 1.0),
    attach: Callable[[nn.Module], Adapter] = FILM,
    population: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Result:
    """Tune a trained ``Trainer``'s model for a metric of its ``compute_metrics``, and merge phi into its weights.

    Call it after ``trainer.train()``, with ``load_best_model_at_end`` from the best weights: what the script saves,
    evaluates or predicts next is the tuned model. Save it by ``trainer.save_model()``: the training's own checkpoints
    stay as they are. A model of which each process has a part, as by FSDP or DeepSpeed's stage 3, is refused.

    The loss is ``trainer.compute_loss`` on batches of the training data. A query is one ``trainer.evaluate()``, a
    subclass's too, such as that of `Seq2SeqTrainer` with its arguments' ``generation_max_length``; but callbacks and
    logs get nothing. ``compute_metrics`` is also asked on two halves of what was predicted, for the guard. Several
    processes evaluate together.

    Args:
        trainer: The Trainer, or a subclass's.
        metric: What to tune, as ``compute_metrics`` names it, with or without ``eval_``; by default
            ``metric_for_best_model`` of the training's arguments. ``"loss"`` is the mean loss. Or a list of several
            that ``combine`` makes the metric of, such as a recall for each class.
        queries: Passes over the evaluation data that may be spent.
        combine: How several make the metric, as of `Metric`, e.g. ``"worst"``.
        eval_dataset: The data to judge on; by default the trainer's own.
        maximize: Whether higher is better. By default as the name says, as ``f1`` and ``wer`` do, or the arguments'
            ``greater_is_better`` where it is not what transformers sets without being told.
        bounds: Lowest and highest possible value; None for a metric without known bounds, as a loss always is.
        attach: Attaches the adapter to the model; by default FiLM on every normalisation layer, with 32 numbers.
        population: How many phi are computed in one forward pass; by default chosen on the first batch, as in
            `FinetuneTask`. A loss that keeps tensors for later needs 1.
        seed: Seed of all draws, that of the halves among them.
        options: Further arguments of `optimize_metric`, e.g. ``output_dir``.

    Returns:
        What the search did.

    Raises:
        ConfigError: No metric is named, or nothing tells whether higher is better, or the trainer has no evaluation
            data, or several sets of them; or there are several processes and an ``output_dir``, which they can't share.
        DataError: The training data can't be drawn in batches.
        MetricError: The evaluation does not report the metric.
        AdapterError: Each process has only a part of the model.
        Others: As from ``attach``, `FinetuneTask` and `optimize_metric`; the model has no adapter then.

    Examples:
        >>> trainer.train()  # doctest: +SKIP
        >>> run = tune_trainer(trainer, "f1", queries=100)  # doctest: +SKIP
        >>> trainer.save_model()  # doctest: +SKIP
    """
    if several():
        options = in_step(options)
    logged = _named(trainer, metric, combine)
    judge = _Evaluation(trainer, logged, _judged_on(trainer, eval_dataset), seed)
    loader = trainer.get_train_dataloader()
    drawn = loader_batches(loader, trainer.args.train_batch_size)
    model = unwrapped(trainer.model)
    higher = logged.maximize(partial(_higher, trainer.args)) if maximize is None else maximize
    before = KeptModules(model)
    try:
        adapter = attach(model)
        task = FinetuneTask(
            adapter,
            loss=ReplayedLoss(partial(_loss, trainer), training=False),
            batches=drawn,
            metric=Metric(
                judged_together(adapter, judge),
                maximize=higher,
                bounds=None if "loss" in logged.names else bounds,
                name=str(logged),
                combine=combine,
            ),
            population=population,  # 1 with BERT's mask, whose values transformers' code branches on
        )
        run: Result = optimize_metric(task, queries=queries, seed=seed, **options)
        adapter.set_phi(of_first(adapter.phi.detach()))
        adapter.merge()
    except BaseException:
        before.put_back()  # without an adapter
        raise
    return run


def _named(trainer: Any, metric: str | Sequence[str] | None, combine: Combine | None) -> Logged:
    name = trainer.args.metric_for_best_model if metric is None else metric
    if name is None:
        raise ConfigError(
            "no metric is named; give one that compute_metrics returns, as tune_trainer(trainer, 'f1', ...), or set"
            " metric_for_best_model"
        )
    logged = Logged.of(name, combine)
    return logged._replace(names=tuple(str(each).removeprefix(PREFIX) for each in logged.names))


def _higher(arguments: Any, name: str) -> bool:
    """Return whether higher is better.

    Raises:
        ConfigError: Nothing tells, as where ``greater_is_better`` may be what transformers has set for any name.
    """
    best, told, known = arguments.metric_for_best_model, arguments.greater_is_better, known_direction(name)
    if best is None or best.removeprefix(PREFIX) != name or told is None or told == known:
        return direction(name, None)
    if told == (not name.endswith("loss")):  # as transformers sets it
        says = "does not say" if known is None else "says the opposite"
        raise ConfigError(
            f"greater_is_better is {told}, which transformers sets itself unless it is told, and a name like {name!r}"
            f" {says}; say maximize=True or maximize=False"
        )
    return bool(told)


def _judged_on(trainer: Any, given: Any) -> Any:
    """Return the evaluation data.

    Raises:
        ConfigError: There is none, or there are several sets.
        DataError: Most of it is what was trained on.
    """
    data = trainer.eval_dataset if given is None else given
    if data is None:
        raise ConfigError("the trainer has no eval_dataset, on which to ask for the metric; give one")
    if isinstance(data, dict):
        raise ConfigError(
            f"the trainer has several evaluation sets ({', '.join(data)}); give one, eval_dataset={next(iter(data))!r}"
            " of them"
        )
    check_evidence(trainer.train_dataset, data, "eval_dataset", trainer.data_collator)
    return data


def _loss(trainer: Any, model: nn.Module, batch: Any) -> Tensor:
    """Return the trainer's own loss of a batch, which it may take apart."""
    loss: Tensor = trainer.compute_loss(model, trainer._prepare_inputs(dict(batch)))
    return loss


class _Evaluation:
    """A pass over the evaluation data: the metric, and its values on two halves of what was predicted.

    Args:
        trainer: The Trainer; it is as it was after each pass.
        logged: The metric's name, or its outcomes', without the prefix.
        dataset: The data.
        seed: Seed of the halves.
    """

    def __init__(self, trainer: Any, logged: Logged, dataset: Any, seed: int) -> None:
        self.trainer, self.logged, self.dataset, self.seed = trainer, logged, dataset, seed

    def __call__(self) -> Any:
        """Return the metric's value, or its outcomes', with the halves where there are some."""
        trainer, found = self.trainer, dict[str, Any]()
        own = trainer.compute_metrics
        with _quiet(trainer, None if own is None else self._halved(own, found)):
            metrics = trainer.evaluate(eval_dataset=self.dataset) or {}

        def value_of(name: str) -> Any:
            if name == "loss" and PREFIX + "loss" in metrics:
                return metrics[PREFIX + "loss"]
            if found.get(name) is None:
                named = [each.removeprefix(PREFIX) for each in metrics]
                reported = ", ".join(each for each in named if not each.endswith(SPEEDS))
                raise ConfigError(f"compute_metrics does not report {name!r}; the evaluation has {reported}")
            return found[name]

        return self.logged.told(value_of)

    def _halved(self, own: Callable[..., Any], found: dict[str, Any]) -> Callable[..., Any]:
        """Return the same compute_metrics, which also notes the values and their halves."""

        def compute(prediction: Any, *further: Any, **options: Any) -> Any:
            metrics = own(prediction, *further, **options)
            found.clear()
            values = {name: value for name in self.logged.names if (value := _value(metrics, name)) is not None}
            if further or options:  # of batches, of which it keeps the state itself
                found.update({name: (each, "compute_metrics is asked batch by batch") for name, each in values.items()})
                return metrics
            on_half: dict[int, Any] = {}  # of each, asked once for all names
            halves = _halves_of(prediction, self.seed)

            def on(name: str, rows: Tensor | None) -> Any:
                if rows is None:
                    return values[name]
                if id(rows) not in on_half:
                    on_half[id(rows)] = own(_rows(prediction, rows))
                return _value(on_half[id(rows)], name)

            for name in values:
                each = with_halves(partial(on, name), halves)
                found[name] = each if self.logged.combine is None else (float(each), each.halves)
            return metrics

        return compute


def _value(metrics: Any, name: str) -> Any:
    return None if metrics is None else metrics.get(name, metrics.get(PREFIX + name))


@contextmanager
def _quiet(trainer: Any, compute_metrics: Any) -> Iterator[None]:
    """Let a trainer evaluate with another compute_metrics, and without its callbacks and logs."""
    handler, held = trainer.callback_handler, vars(trainer)
    callbacks, before = handler.callbacks, {name: held[name] for name in SET_BY_EVALUATE if name in held}
    try:
        handler.callbacks, trainer.compute_metrics = [], compute_metrics
        trainer.log = lambda *arguments, **options: None
        yield
    finally:
        handler.callbacks = callbacks
        for name in SET_BY_EVALUATE:
            held.pop(name, None)
        held.update(before)


def _leaves(content: Any) -> list[Any]:
    return [each for part in content for each in _leaves(part)] if isinstance(content, tuple) else [content]


def _halves_of(prediction: Any, seed: int) -> Halves:
    """Return two halves of what was predicted, with the same share of each class where labels are single numbers."""
    leaves = [each for each in (*_leaves(prediction.predictions), *_leaves(prediction.label_ids)) if each is not None]
    if not all(isinstance(each, np.ndarray) and each.ndim for each in leaves):
        return "predictions and labels are no arrays of one row for each example"
    if len({len(each) for each in leaves}) != 1:
        return "predictions and labels have different numbers of rows"
    labels = prediction.label_ids
    if isinstance(labels, np.ndarray) and labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer):
        halves = stratified_halves(torch.from_numpy(labels), seed)
        if not isinstance(halves, str):
            return halves
    return random_halves(len(leaves[0]), seed)


def _rows(prediction: Any, rows: Tensor) -> EvalPrediction:
    """Return some examples of what was predicted."""
    index = rows.numpy()

    def taken(content: Any) -> Any:
        if isinstance(content, tuple):
            return tuple(map(taken, content))
        return None if content is None else content[index]

    parts = (prediction.predictions, prediction.label_ids, prediction.inputs, prediction.losses)
    return EvalPrediction(*map(taken, parts))
