"""A search for phi from what a user of pytorch-metric-learning has at hand: a trainer and a tester."""

import copy
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.data.evidence import LOOKED_AT, check_evidence, leaves, spaced
from metricopt_ext.data.halves import class_draws
from metricopt_ext.errors import AdapterError, ConfigError, DataError
from metricopt_ext.methods.guard import CONFIDENCE
from metricopt_ext.methods.result import Result
from metricopt_ext.methods.tune import tune_model
from metricopt_ext.retrieval.few_classes import FewClasses
from metricopt_ext.retrieval.judged import JudgedEmbeddings, Processing
from metricopt_ext.retrieval.kept_features import KeptPasses
from metricopt_ext.retrieval.task import memories
from metricopt_ext.runtime.progress import Callback, progress_of
from metricopt_ext.tasks.direction import direction
from metricopt_ext.tasks.halved import with_halves
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.kept_modules import KeptModules
from metricopt_ext.utils.modes import evaluating
from metricopt_ext.utils.seeding import generator, seeded_streams
from metricopt_ext.utils.words import counted

CPU = torch.device("cpu")

# A tester's embeddings and labels by split.
Embedded = dict[str, tuple[Tensor, Tensor]]

# A tester's queried split and the splits that its items are searched in.
Evaluated = Sequence[tuple[str, Sequence[str]]]


def tune_with_trainer(
    trainer: Any,
    tester: Any,
    dataset_dict: Mapping[str, Any],
    *,
    queries: int,
    part: str = "trunk",
    split: str = "val",
    metric: str = "precision_at_1",
    maximize: bool | None = None,
    bounds: tuple[float, float] | None = (0.0, 1.0),
    splits_to_eval: Evaluated | None = None,
    test_collate_fn: Any = None,
    keep_gib: float = 4.0,
    seed: int = 0,
    callback: Callback | None = None,
    **options: Any,
) -> Result:
    """Tune one of a trainer's models in one call, and merge phi into its weights (see `tune_model`).

    The loss's gradients come from the trainer's own loss, miners and batches, the metric from the tester; it reports
    halves, of the classes, if there are enough of them at each label level. The model ends at what the guard kept, so
    what the script tests or saves next is the tuned one; nothing else of trainer or tester is changed.

    Args:
        trainer: One of pytorch-metric-learning's, or a subclass. Its models compute as in evaluation throughout.
        tester: One of its testers. Its hook at the end of testing and its visualizer are not called.
        dataset_dict: Datasets by split, as for ``tester.test``.
        queries: Evaluations of ``split`` that may be spent.
        part: Which of the trainer's models is tuned, as ``"trunk"`` or ``"embedder"``.
        split: The split that phi is tuned for; hold its classes out of training and test.
        metric: What to tune, one of those that the tester's ``AccuracyCalculator`` calculates. Of several label levels
            the mean counts.
        maximize: Whether higher is better; None where the metric's name says so.
        bounds: Lowest and highest possible value; None for a metric without known bounds.
        splits_to_eval: As for ``tester.test``, e.g. ``[("query", ["gallery"])]``; by default ``split`` is searched in
            itself.
        test_collate_fn: As ``collate_fn`` of ``tester.test``.
        keep_gib: Memory for what the models compute of the test data before phi, in GiB, on their device; of the same
            batches it is computed once, to the same embeddings. 0 keeps nothing.
        seed: Seed of all draws.
        callback: Notified of progress; by default a bar on the terminal, or plain lines where there is none.
        options: Further arguments of `tune_model` or `optimize_metric`, e.g. ``attach``, ``merge=False`` to keep the
            adapter, ``starts`` and ``output_dir``.

    Raises:
        ConfigError: The trainer has no such model, or the tester does not calculate the metric, or one for each class,
            or nothing tells whether higher is better; or there is no such split.
        DataError: The trainer's data can't be drawn in batches.
        Others: As from `tune_model`; the models have no adapter then.

    Examples:
        >>> run = tune_with_trainer(trainer, tester, {"val": val_dataset}, queries=150)  # doctest: +SKIP
        >>> print(run)  # doctest: +SKIP
    """
    if part not in trainer.models:
        raise ConfigError(f"part={part!r} is none of the trainer's models: {', '.join(trainer.models)}")
    found = _parts(
        trainer,
        tester,
        part,
        dataset_dict,
        split=split,
        metric=metric,
        maximize=maximize,
        bounds=bounds,
        splits_to_eval=splits_to_eval,
        test_collate_fn=test_collate_fn,
        keep_gib=keep_gib,
        seed=seed,
    )
    models = KeptModules(*trainer.models.values())  # the loss and the metric are of all of them
    confidence = options.get("guard_confidence", CONFIDENCE)
    try:
        with progress_of(callback, found.metric.name, queries) as shown:
            told = FewClasses(found.metric, lambda: len(found.classes), shown.say, confidence)
            found.metric.callbacks.append(told)
            return tune_model(
                trainer.models[part],
                loss=found.loss,
                batches=found.batches,
                metric=found.metric,
                queries=queries,
                population=1,  # a trainer's loss can be any code
                together=False,
                seed=seed,
                callback=shown,
                **options,
            )
    except BaseException:
        models.put_back()
        raise


def search_with_trainer(
    trainer: Any, tester: Any, adapter: Adapter, dataset_dict: Mapping[str, Any], *, queries: int, **options: Any
) -> Result:
    """Search the phi of an adapter that you have attached to one of a trainer's models, where it stays.

    Args:
        trainer: As of `tune_with_trainer`, as for the rest.
        tester: See there.
        adapter: Of one of the trainer's models, e.g. the trunk.
        dataset_dict: See there.
        queries: See there.
        options: Its other arguments, but for ``part``, ``attach`` and ``merge``.

    Raises:
        AdapterError: The adapter is on none of the trainer's models.
        Others: As from `tune_with_trainer`.
    """
    attached: dict[str, Any] = {"part": _part_of(trainer, adapter), "attach": lambda model: adapter, "merge": False}
    return tune_with_trainer(trainer, tester, dataset_dict, queries=queries, **attached, **options)


def trainer_task(
    trainer: Any, tester: Any, adapter: Adapter, dataset_dict: Mapping[str, Any], **options: Any
) -> FinetuneTask:
    """Return the task that `tune_with_trainer` tunes on, for `optimize_metric` and `tune_start`.

    Args:
        trainer: As of `tune_with_trainer`.
        tester: As there.
        adapter: Of one of the trainer's models, e.g. the trunk.
        dataset_dict: As there.
        options: Its arguments from ``split`` to ``seed``.

    Raises:
        AdapterError: The adapter is on none of the trainer's models.
        Others: As from `tune_with_trainer`.
    """
    found = _parts(trainer, tester, _part_of(trainer, adapter), dataset_dict, **options)
    return FinetuneTask(adapter, loss=found.loss, batches=found.batches, metric=found.metric, population=1)


def _part_of(trainer: Any, adapter: Adapter) -> str:
    for name, model in trainer.models.items():
        if model is adapter.model:
            return str(name)
    raise AdapterError(
        f"the adapter is on none of the trainer's models ({', '.join(trainer.models)}); attach it to one of them, not"
        " to a copy or to a part"
    )


class _Parts(NamedTuple):
    loss: "TrainerLoss"
    batches: "TrainerBatches"
    metric: Metric
    classes: set[int]  # of the first label level, which are known once the metric was asked


def _parts(
    trainer: Any,
    tester: Any,
    part: str,
    dataset_dict: Mapping[str, Any],
    *,
    split: str = "val",
    metric: str = "precision_at_1",
    maximize: bool | None = None,
    bounds: tuple[float, float] | None = (0.0, 1.0),
    splits_to_eval: Evaluated | None = None,
    test_collate_fn: Any = None,
    keep_gib: float = 4.0,
    seed: int = 0,
) -> _Parts:
    """Return what a task is made of but the adapter; see `tune_with_trainer`."""
    classes = set[int]()
    evaluated = splits_to_eval or [(split, [split])]
    asked = {name for query, references in evaluated for name in (query, *references)}
    if split not in dict(evaluated) or not asked <= dataset_dict.keys():
        raise ConfigError(
            f"split={split!r} with splits_to_eval={splits_to_eval}: each must be a split of dataset_dict"
            f" ({', '.join(dataset_dict)}), and {split!r} must be queried"
        )
    try:
        check_evidence(trainer.dataset, dataset_dict[split], f"split {split!r}")
    except DataError as error:  # it may be meant, as where nothing else is labelled
        warnings.warn(str(error), stacklevel=4)
    _warn_of_classes(trainer.dataset, dataset_dict[split], split)
    known = tester.accuracy_calculator.get_curr_metrics()
    if metric not in known:
        raise ConfigError(f"metric={metric!r} is not calculated by the tester; its metrics are {', '.join(known)}")
    higher = direction(metric, maximize)
    if getattr(tester.accuracy_calculator, "return_per_class", False):
        raise ConfigError(
            f"the tester's calculator returns {metric} of each class; one value is tuned: leave return_per_class out,"
            " or take avg_of_avgs=True for the mean over classes"
        )

    def models_with(model: nn.Module) -> dict[str, nn.Module]:
        return {**trainer.models, part: model}

    passes = KeptPasses(keep_gib)

    def keeping(models: dict[str, nn.Module]) -> dict[str, nn.Module]:
        kept = {part: passes.of(models[part])}
        if part == "embedder":
            kept["trunk"] = passes.of(models["trunk"], before_phi=True)
        return models | kept

    def tested_by(model: nn.Module) -> tuple[Any, dict[str, nn.Module], list[tuple[str, list[str]]]]:
        own = copy.copy(tester)
        own.accuracy_calculator, own.reference_split_names = copy.copy(tester.accuracy_calculator), {}
        own.visualizer = None
        return own, models_with(model), [(query, list(references)) for query, references in evaluated]

    def embedded(model: nn.Module) -> Embedded:
        own, models, splits = tested_by(model)
        models = keeping(models)
        with evaluating(nn.ModuleList(models.values())), seeded_streams(0, CPU):
            names = own.get_splits_to_compute_embeddings(dict(dataset_dict), splits)[1]
            found: Embedded = own.get_all_embeddings_for_all_splits(
                dict(dataset_dict), models["trunk"], models["embedder"], names, test_collate_fn
            )
        return found

    def judge(found: Embedded, processing: Processing) -> Any:
        verdict: list[Any] = []
        own, models, splits = tested_by(trainer.models[part])
        own.get_all_embeddings_for_all_splits = lambda *_: {
            name: (processing.of(embeddings), labels) for name, (embeddings, labels) in found.items()
        }
        own.end_of_testing_hook = lambda tested: verdict.append(_verdict(tested, split, metric, seed, classes))
        with evaluating(nn.ModuleList(models.values())), seeded_streams(0, CPU):
            own.test(dict(dataset_dict), 0, models["trunk"], models["embedder"], splits, test_collate_fn)
        return verdict[0]

    def further(model: nn.Module, dataset: Any) -> Tensor:
        own, models, _ = tested_by(model)
        models = keeping(models)
        with evaluating(nn.ModuleList(models.values())), seeded_streams(0, CPU):
            found: Tensor = own.get_all_embeddings(dataset, models["trunk"], models["embedder"], test_collate_fn)[0]
        return found

    judged = JudgedEmbeddings(
        embedded,
        judge,
        embeddings_of=lambda found: found[split][0].cpu(),
        embed_inputs=further,
        augments=False,  # a tester's calculator has one gallery for all queries
        models=lambda model: models_with(model).values(),
        whole_inputs=True,
    )
    loss, batches = TrainerLoss(trainer, part), TrainerBatches(trainer)
    loss.fill_memories(trainer.models[part], (batches(seed, 0, step) for step in range(batches.length)))
    tuned = Metric(judged, maximize=higher, bounds=bounds, name=f"{split}/{metric}", new_classes=True)
    return _Parts(loss, batches, tuned, classes)


def _warn_of_classes(train: Any, data: Any, split: str) -> None:
    """Warn where datasets whose labels are comparable, as parts of one or of classes of the same names, share some."""
    known, judged = _labels_of(train), _labels_of(data)
    both = {label for key in known.keys() & judged.keys() for label in known[key] & judged[key]}
    if both:
        warnings.warn(
            f"{counted(len(both), 'class')} of split {split!r} are trained on, too; hold whole classes out",
            stacklevel=5,
        )


def _labels_of(data: Any) -> dict[Any, set[str]]:
    """The labels of up to `LOOKED_AT` items of each dataset that one is made of, by its classes' names or itself."""
    found: dict[Any, set[str]] = {}
    for leaf, places in leaves(data) if hasattr(data, "__len__") else ():
        targets = getattr(leaf, "targets", None)
        for place in (places[i] for i in spaced(len(places), LOOKED_AT)):
            item = leaf[place] if targets is None else (None, targets[place])
            if isinstance(item, tuple | list) and len(item) > 1:
                found.setdefault(tuple(getattr(leaf, "classes", ())) or id(leaf), set()).add(str(item[1]))
    return found


def _verdict(tested: Any, split: str, metric: str, seed: int, classes: set[int]) -> Any:
    """Return a metric and, if there are enough classes, its halves, while a tester still has the embeddings."""
    embeddings, labels = tested.embeddings_and_labels[split]
    levels = tested.label_levels
    classes.update(labels[:, levels[0]].unique().tolist())
    name = tested.accuracies_keyname(metric, label_hierarchy_level=levels[0], average=len(levels) > 1)

    def value_on(rows: Tensor | None) -> float:
        if rows is None:
            return tested.all_accuracies[split][name]  # type: ignore[no-any-return]
        half = {**tested.embeddings_and_labels, split: (embeddings[rows], labels[rows])}
        accuracies: dict[str, float] = {}
        tested.do_knn_and_accuracies(accuracies, half, split, tested.reference_split_names[split])
        return accuracies[name]

    return with_halves(value_on, class_draws(labels[:, list(levels)], seed))


class TrainerLoss:
    """A trainer's loss of a model on one of its batches: all that it calculates and weights in one iteration.

    Every model computes as in evaluation. Losses and miners are copies, and what they draw at random comes from the
    same seed each time, so a step can be replayed. Each starts from the same memory of earlier batches, if a loss has
    one (`CrossBatchMemory`): what training left in it.

    Args:
        trainer: The trainer; it is not changed.
        part: Which of its models is given.
    """

    def __init__(self, trainer: Any, part: str) -> None:
        self.trainer, self.part, self.loss_funcs = trainer, part, trainer.loss_funcs

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the trainer's total loss, a scalar, on a batch of its data loader."""
        return self._total(model, batch, copy.deepcopy(self.loss_funcs))

    def fill_memories(self, model: nn.Module, batches: Iterable[Any]) -> None:
        """Fill empty memories with a model's embeddings, as of a trainer that has not trained in this process.

        Args:
            model: As in the call.
            batches: What is remembered, until the memories are full or these end.
        """
        filled = copy.deepcopy(self.loss_funcs)
        empty = [each for loss in filled.values() for each in memories(loss)]
        empty = [each for each in empty if not (each.has_been_filled or each.queue_idx)]
        for batch in batches if empty else ():
            with torch.no_grad():
                self._total(model, batch, filled)
            if all(each.has_been_filled for each in empty):
                break
        self.loss_funcs = filled if empty else self.loss_funcs

    def _total(self, model: nn.Module, batch: Any, loss_funcs: dict[str, Any]) -> Tensor:
        own = copy.copy(self.trainer)
        own.models, own.loss_funcs = {**self.trainer.models, self.part: model}, loss_funcs
        own.mining_funcs, own.loss_weights = copy.deepcopy((self.trainer.mining_funcs, self.trainer.loss_weights))
        own.loss_names = list(self.trainer.loss_names)
        own.initialize_loss_tracker()
        own.set_to_train = own.set_to_eval = lambda: None  # which mining a batch's subset would call
        own.dataloader, own.dataloader_iter = [batch], iter([batch])
        with evaluating(nn.ModuleList(own.models.values())), seeded_streams(0, torch.device(own.data_device)):
            own.update_loss_weights()
            own.calculate_loss(own.get_batch())
            own.loss_tracker.update(own.loss_weights)
        return own.losses["total_loss"]  # type: ignore[no-any-return]


class TrainerBatches:
    """Batches of a trainer's own data loader, each of which can be drawn again.

    Batch ``task + step`` in an order that the trainer's sampler draws from the seed, pass after pass.

    Args:
        trainer: The trainer; it is not changed.

    Raises:
        DataError: Its dataset has no batches to choose from, or too few examples for one.
    """

    def __init__(self, trainer: Any) -> None:
        own = copy.copy(trainer)
        own.dataloader_num_workers = 0
        own.sampler = self._copied(trainer.sampler, trainer.dataset)
        with seeded_streams(0, CPU):
            own.initialize_dataloader()
        self.loader = own.dataloader
        if self.loader.batch_sampler is None or isinstance(self.loader.dataset, torch.utils.data.IterableDataset):
            raise DataError("trainer.dataset is iterable only, so its batches can't be drawn again; it needs an index")
        self._latest: tuple[tuple[int, int], list[list[int]]] = ((-1, -1), [])
        self.length = len(self._order(0, 0))  # of a pass
        if not self.length:
            count = counted(len(trainer.dataset), "example")
            raise DataError(f"trainer.dataset has {count}, fewer than batch_size={trainer.batch_size}")

    def __call__(self, seed: int, task: int, step: int) -> Any:
        """Return what the data loader's collate function makes of a batch's examples."""
        number, place = divmod(task + step, self.length)
        order = self._order(seed, number)
        with seeded_streams(generator(seed, "augmentation", task, step).initial_seed(), CPU):
            return self.loader.collate_fn([self.loader.dataset[i] for i in order[place % len(order)]])

    def _order(self, seed: int, number: int) -> list[list[int]]:
        """Return the batches' indices in a pass through the data; the latest is kept."""
        if self._latest[0] != (seed, number):
            sampler = self._copied(self.loader.batch_sampler, self.loader.dataset)
            with seeded_streams(generator(seed, "batch", number).initial_seed(), CPU):
                self._latest = (seed, number), [list(indices) for indices in sampler]
        return self._latest[1]

    @staticmethod
    def _copied(sampler: Any, dataset: Any) -> Any:
        """Return a copy, as drawing may shuffle what a sampler holds; the dataset in it stays the same."""
        return copy.deepcopy(sampler, {id(dataset): dataset})
