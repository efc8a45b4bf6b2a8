"""A search in one line of a script with Hugging Face's ``Trainer``: its model, its data, its own compute_metrics."""

import copy
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import EvalPrediction

from metricopt_ext.data.evidence import check_evidence
from metricopt_ext.data.halves import Halves, random_halves, stratified_halves
from metricopt_ext.errors import ConfigError
from metricopt_ext.integrations.reported import metric_of, names_of
from metricopt_ext.methods.result import Result
from metricopt_ext.methods.tune import tune_model
from metricopt_ext.tasks.combine import Combine
from metricopt_ext.tasks.direction import direction, known_direction
from metricopt_ext.tasks.halved import with_halves

PREFIX = "eval_"  # of the names by which a Trainer reports its metrics
SPEEDS = ("runtime", "per_second", "preparation_time")  # end names of what is measured of each evaluation


def tune_trainer(
    trainer: Any,
    metric: str | Sequence[str] | None = None,
    *,
    queries: int,
    combine: Combine | None = None,
    eval_dataset: Any = None,
    maximize: bool | None = None,
    bounds: tuple[float, float] | None = (0.0, 1.0),
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
        trainer: The Trainer, or a subclass's. A query is of a shallow copy: what else ``evaluate`` sets is not kept.
        metric: What to tune, as the evaluation names it, with or without ``eval_``; by default
            ``metric_for_best_model`` of the training's arguments. ``"loss"`` is the mean loss. Or a list of several
            that ``combine`` makes the metric of, such as a recall for each class.
        queries: Passes over the evaluation data that may be spent.
        combine: How several make the metric, as of `Metric`, e.g. ``"worst"``.
        eval_dataset: The data to judge on; by default the trainer's own.
        maximize: Whether higher is better. By default as the name says, as ``f1`` and ``wer`` do, or the arguments'
            ``greater_is_better`` where it is not what transformers sets without being told.
        bounds: Lowest and highest possible value; None for a metric without known bounds, as a loss always is.
        seed: Seed of all draws, that of the halves among them.
        options: Further arguments of `tune_model` or `optimize_metric`, e.g. ``attach`` and ``output_dir``.

    Returns:
        What the search did.

    Raises:
        ConfigError: No metric is named, or nothing tells whether higher is better, or the trainer has no evaluation
            data, or several sets of them.
        MetricError: The evaluation does not report the metric.
        Others: As from `tune_model`; the model has no adapter then.

    Examples:
        >>> trainer.train()  # doctest: +SKIP
        >>> run = tune_trainer(trainer, "f1", queries=100)  # doctest: +SKIP
        >>> trainer.save_model()  # doctest: +SKIP
    """
    given = trainer.args.metric_for_best_model if metric is None else metric
    if given is None:
        raise ConfigError("no metric is named; give one that compute_metrics returns, or set metric_for_best_model")
    names = names_of(_bare(given) if isinstance(given, str) else [_bare(each) for each in given], combine)
    data = _judged_on(trainer, eval_dataset)
    return tune_model(
        trainer.model,
        loss=partial(_loss, trainer),
        batches=trainer.get_train_dataloader(),
        metric=metric_of(
            partial(_evaluated, trainer, names, data, seed),
            names=names,
            higher=partial(_higher, trainer.args) if maximize is None else lambda name: maximize,
            bounds=None if "loss" in names else bounds,
            combine=combine,
        ),
        queries=queries,
        seed=seed,
        **options,
    )


def _bare(name: Any) -> str:
    return str(name).removeprefix(PREFIX)


def _higher(arguments: Any, name: str) -> bool:
    """Return whether higher is better.

    Raises:
        ConfigError: Nothing tells, as where ``greater_is_better`` may be what transformers has set for any name.
    """
    best, told, known = arguments.metric_for_best_model, arguments.greater_is_better, known_direction(name)
    if best is None or _bare(best) != name or told is None or told == known:
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
        raise ConfigError(f"the trainer has several evaluation sets, {', '.join(data)}; give one, as eval_dataset=")
    check_evidence(trainer.train_dataset, data, "eval_dataset", trainer.data_collator)
    return data


def _loss(trainer: Any, model: nn.Module, batch: Any) -> Tensor:
    """Return the trainer's own loss of a batch, which it may take apart."""
    loss: Tensor = trainer.compute_loss(model, trainer._prepare_inputs(dict(batch)))
    return loss


def _evaluated(trainer: Any, names: Sequence[str], dataset: Any, seed: int) -> dict[str, Any]:
    """Return what a trainer's evaluation reports by some names, each with its values on two halves, where there are.

    The trainer's callbacks and logs get nothing.

    Raises:
        ConfigError: It does not report one.
    """
    own, halves = copy.copy(trainer), dict[str, Any]()
    own.callback_handler = copy.copy(trainer.callback_handler)
    own.callback_handler.callbacks = []
    own.log = lambda *arguments, **options: None

    def compute(prediction: Any, *further: Any, **options: Any) -> Any:
        metrics = trainer.compute_metrics(prediction, *further, **options)
        values = _by_name(metrics)
        if told := [name for name in names if name in values]:
            batchwise = bool(further or options)  # it keeps the state itself
            parts = "compute_metrics is asked batch by batch" if batchwise else _halves_of(prediction, seed)
            both: Any = with_halves(
                lambda rows: values if rows is None else _by_name(trainer.compute_metrics(_rows(prediction, rows))),
                parts,
            )
            found = both[1]  # beside the values
            none = isinstance(found, str)
            halves.update({each: found if none else [half.get(each, math.nan) for half in found] for each in told})
        return metrics

    if trainer.compute_metrics is not None:
        own.compute_metrics = compute
    values = _by_name(own.evaluate(eval_dataset=dataset))
    for name in names:
        if name not in values:
            reported = ", ".join(each for each in values if not each.endswith(SPEEDS))
            raise ConfigError(f"the evaluation does not report {name!r}; it has {reported}")
    return {name: (values[name], halves.get(name)) for name in names}


def _by_name(metrics: Any) -> dict[str, Any]:
    return {_bare(name): value for name, value in (metrics or {}).items()}


def _halves_of(prediction: Any, seed: int) -> Halves:
    """Return two halves of what was predicted, with the same share of each class where labels are single numbers."""
    labels = prediction.label_ids
    leaves = [each for each in tree_leaves((prediction.predictions, labels)) if each is not None]
    if not all(isinstance(each, np.ndarray) and each.ndim for each in leaves):
        return "predictions and labels are no arrays of one row for each example"
    if len({len(each) for each in leaves}) != 1:
        return "predictions and labels have different numbers of rows"
    if isinstance(labels, np.ndarray) and labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer):
        halves = stratified_halves(torch.from_numpy(labels), seed)
        if not isinstance(halves, str):
            return halves
    return random_halves(len(leaves[0]), seed)


def _rows(prediction: Any, rows: Tensor) -> EvalPrediction:
    """Return some examples of what was predicted."""
    parts = (prediction.predictions, prediction.label_ids, prediction.inputs, prediction.losses)
    return EvalPrediction(*tree_map(lambda each: None if each is None else each[rows.numpy()], parts))
