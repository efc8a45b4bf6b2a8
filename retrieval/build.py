"""Turns a retrieval config into the things it describes: data, model, adapter, loss, metric."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.data.images import Limits
from metricopt_ext.data.labelled import Labelled, Split
from metricopt_ext.data.named_model import folder_weights, has_weights, settings_of
from metricopt_ext.data.pretrained import pretrained
from metricopt_ext.data.reading import Reading
from metricopt_ext.data.splits import Splits
from metricopt_ext.data.training import train_supervised
from metricopt_ext.errors import ConfigError
from metricopt_ext.retrieval.cameras import CAMERA
from metricopt_ext.retrieval.config import DataConfig, LossConfig, MetricConfig, ModelConfig, RetrievalConfig
from metricopt_ext.retrieval.data import (
    hold_out_classes,
    load_digits,
    load_omniglot,
    load_stanford_online_products,
    split_classes,
)
from metricopt_ext.retrieval.judged import JudgedEmbeddings, Processing
from metricopt_ext.retrieval.kept_features import KeptFeatures, embed
from metricopt_ext.retrieval.layouts import load_class_folders
from metricopt_ext.retrieval.metrics import Draws, EmbeddingMetric, besides, embedding_metric
from metricopt_ext.retrieval.models import Embedder, build_model
from metricopt_ext.retrieval.own_data import own_parts
from metricopt_ext.retrieval.proxies import PerClass, Together, fitted_proxies
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.tasks.batch_metric import BatchMetric
from metricopt_ext.tasks.batches import ClassBatches
from metricopt_ext.tasks.halved import Halved, with_halves
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import Loss
from metricopt_ext.utils.config import config_section
from metricopt_ext.utils.modes import evaluating
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.state_dict import load_checkpoint
from metricopt_ext.utils.words import counted

LOADERS: dict[str, Callable[[DataConfig, Limits], Labelled]] = {  # by the settings and the bounds
    "class_folders": lambda data, limits: load_class_folders(Path(data.root), data.image_size or None, limits)[0],
    "digits": lambda data, limits: load_digits(),
    "omniglot": lambda data, limits: load_omniglot(data.root, data.image_size or None, **limits),
}


MEMORY = "cross_batch_memory"  # a loss of a loss (Wang et al., Cross-Batch Memory for Embedding Learning, CVPR 2020)
WITH_PARTS = ("in_shop", "market1501", "stanford_online_products")  # sets with train and test parts of their own


def _embed_on_cpu(model: nn.Module, x: Tensor) -> Tensor:
    return embed(model, x).cpu()


@torch.no_grad()
def embed_with(adapter: Adapter, phi: Tensor, x: Tensor) -> Tensor:
    """Return the embeddings, ``n x d``, that the model with phi computes for images, on the CPU."""
    with adapter.using(phi) as model:
        return embed(model, x).cpu()


def build_metric(
    config: MetricConfig,
    part: Split,
    halves: Sequence[Tensor] | Sequence[tuple[Tensor, Tensor]] | str = (),
    queries: Tensor | None = None,
    new_classes: bool = False,
    *,
    constrained: bool = True,
    keep_gib: float = 0.0,
) -> Metric:
    """Make the black box: the metric of a part's embeddings, by default mean Recall@k.

    Args:
        config: The settings.
        part: Images and labels.
        halves: Indices of two halves of them by class, or several such pairs, for a metric that also reports its value
            within each, or why there are none; empty for one that does not.
        queries: Which of the images are queries, ``n`` booleans, and the others their gallery; None if each searches
            all others.
        new_classes: Whether the model will be judged on other classes, and the halves are of different ones.
        constrained: Whether it is subject to what the settings say, told at every query, by the same embeddings.
        keep_gib: Memory for what models compute of the images before phi, in GiB (`KeptFeatures`); 0 keeps nothing.

    Raises:
        ConfigError: The metric's settings are impossible.
    """
    metric, also, cameras = embedding_metric(config), besides(config), part.columns.get(CAMERA)
    for each in (metric, *also.values()):
        each.check(queries is not None, cameras is not None)
    bounded = {name: each for name, each in also.items() if name in config.subject_to and constrained}
    several = not isinstance(halves, str) and len(halves) > 0 and not isinstance(halves[0], Tensor)
    draws = cast(Draws, halves) if several and queries is None and cameras is None else []

    own_queries = None if queries is None else queries.cpu()
    features = KeptFeatures(part.x, keep_gib)

    def judged(each: EmbeddingMetric, embeddings: Tensor, half: Tensor | None = None) -> float:
        rows = slice(None) if half is None else half.cpu()
        return each.judge(
            embeddings[rows],
            part.y.cpu()[rows],
            None if own_queries is None else own_queries[rows],
            None if cameras is None else cameras[rows],
        )

    def value_of(each: EmbeddingMetric, raw: Tensor, processing: Processing, pairs: Any = ()) -> Any:
        if processing.post.mixes and own_queries is None:
            assert each.left_out is not None  # see `cannot`
            return each.left_out(processing.alone(raw), part.y.cpu(), pairs, processing.post)
        return judged(each, processing.of(raw, own_queries))

    def value(raw: Tensor, processing: Processing) -> Any:
        found: Any
        if processing.post.mixes and own_queries is None:
            pairs = halves if isinstance(halves, str) or several or not len(halves) else [halves]
            found = value_of(metric, raw, processing, pairs)
        elif metric.on_halves is not None and draws:
            found = Halved(*metric.on_halves(processing.of(raw), part.y.cpu(), draws))
        else:
            embeddings = processing.of(raw, own_queries)
            found = with_halves(lambda half: judged(metric, embeddings, half), halves)
        others = {name: value_of(each, raw, processing) for name, each in bounded.items()}
        return {metric.name: found, **others} if others else found

    def alone(other: EmbeddingMetric) -> Callable[[nn.Module], float]:
        def of_model(model: nn.Module) -> float:
            found: float = judging.judged(model, lambda raw, processing: value_of(other, raw, processing))
            return found

        return of_model

    judging: JudgedEmbeddings[Tensor] = JudgedEmbeddings(
        lambda model: features.embed(model).cpu(),
        value,
        embeddings_of=lambda raw: raw,
        embed_inputs=_embed_on_cpu,
        cannot=_not_mixed((metric, *also.values()), queries is not None, cameras is not None),
    )
    return Metric(
        judging,
        maximize=metric.maximize,
        bounds=metric.bounds,
        name=metric.name,
        new_classes=new_classes,
        also={name: alone(each) for name, each in also.items() if name not in bounded},
        subject_to=config.subject_to if constrained else None,
        data=f"{counted(len(part.y), 'image')} of {counted(len(part.y.unique()), 'class')}",
    )


def _not_mixed(metrics: Sequence[EmbeddingMetric], gallery: bool, cameras: bool) -> dict[str, str]:
    """Return why embeddings are not mixed with their neighbours, if they are not; see `JudgedEmbeddings`."""
    if cameras and not gallery:
        why = "images by a query's own camera are ignored for each query, but not when embeddings are mixed"
    elif not gallery and (names := [each.name for each in metrics if each.left_out is None]):
        why = f"{names[0]} is of embeddings that search each other, and each would know the queries it was mixed with"
    else:
        return {}
    return dict.fromkeys(("augmentation", "expansion"), why)


def build_loss(config: LossConfig, model: nn.Module | None = None, parts: Sequence[Split] = (), seed: int = 0) -> Loss:
    """Return the surrogate loss that the settings name, as a function of model and batch.

    It is one of pytorch-metric-learning's or of `metricopt_ext.retrieval.losses`, whose smooth_ap replaces theirs. One
    with proxies has those that fit the model (`fitted_proxies`), of each part that batches come from; one with a memory
    remembers the model's embeddings of the first part.

    Args:
        config: The settings.
        model: The embedder; None to check the settings alone.
        parts: What the batches come from.
        seed: Fits the proxies, and draws what is remembered.

    Raises:
        ConfigError: There is no such loss, it rejects its arguments, or it has other weights than those of classes.
    """
    from metricopt_ext.retrieval.task import embedding_loss

    made, size = _criterion(_inner(config)), _memory_size(config)
    if not size and isinstance(made, nn.Module):
        return embedding_loss(made)
    if model is None:
        return embedding_loss(_memory(config, made, 2) if size else made(2, 2))
    with torch.no_grad(), evaluating(model):
        embedded = [(embed(model, part.x), part.y) for part in parts[: 1 if size else None]]
    if not size:
        assert not isinstance(made, nn.Module)
        return embedding_loss(fitted_proxies(made, embedded, seed))
    x, y = embedded[0]
    memory = _memory(config, made, x.shape[1]).to(x.device)
    drawn = torch.randperm(len(y), generator=generator(seed, "memory"))[:size].to(x.device)
    for rows in drawn.split(config.classes * config.samples):
        memory(x[rows], y[rows])
    return embedding_loss(memory)


def _inner(config: LossConfig) -> LossConfig:
    """The loss that a memory is for; any other as it is."""
    if config.name != MEMORY:
        return config
    params = config.params.get("params", {})
    if not isinstance(name := config.params.get("loss"), str) or not isinstance(params, dict):
        raise ConfigError(f"loss.name={MEMORY} needs loss.params={{loss: contrastive, memory_size: 1024}} or the like")
    return replace(config, name=name, params=params)


def _memory_size(config: LossConfig) -> int:
    """How many embeddings a loss remembers; 0 for one without a memory."""
    if config.name != MEMORY:
        return 0
    size, batch = config.params.get("memory_size", 1024), config.classes * config.samples
    if unknown := sorted({*config.params} - {"loss", "memory_size", "params"}):
        raise ConfigError(f"loss.params: {MEMORY} takes loss, its params and memory_size, not {unknown[0]}")
    if not isinstance(size, int) or size < batch:
        raise ConfigError(f"loss.params: memory_size is {size}; it must be at least a batch, {batch}")
    return size


def _memory(config: LossConfig, loss: nn.Module | PerClass, dimension: int) -> nn.Module:
    """An empty memory around a loss."""
    from pytorch_metric_learning.losses import CrossBatchMemory

    name = config.params["loss"]
    try:
        memory: nn.Module = CrossBatchMemory(loss, dimension, memory_size=_memory_size(config))
    except Exception as error:
        raise ConfigError(f"loss.params: a memory can't be for {name}: {error}") from error
    return memory


def _criterion(config: LossConfig) -> nn.Module | PerClass:
    """The loss, or what makes it for so many classes and dimensions."""
    from pytorch_metric_learning import losses

    from metricopt_ext.retrieval.losses import RecallLoss, SmoothAPLoss

    names = [name for name in dir(losses) if name.endswith("Loss")]
    known = {_snake(name.removesuffix("Loss")): getattr(losses, name) for name in names}
    known |= {"recall": RecallLoss, "smooth_ap": SmoothAPLoss}
    if config.name not in known:
        raise ConfigError(f"loss.name={config.name!r} is none of {', '.join(sorted(known))}")
    if ours := sorted({"num_classes", "embedding_size"} & {*config.params}):
        raise ConfigError(f"loss.params: leave {' and '.join(ours)} out, which data and model tell")

    def made(classes: int, dimension: int) -> nn.Module:
        loss: nn.Module = known[config.name](num_classes=classes, embedding_size=dimension, **config.params)
        return loss

    try:
        loss = known[config.name](**config.params)
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        try:
            made(2, 2)
        except (TypeError, ValueError, AssertionError) as other:
            told = other if "num_classes" in str(error) else error
            raise ConfigError(f"loss: {config.name} does not take {config.params}: {told}") from error
        return made
    if list(loss.parameters()):
        raise ConfigError(f"loss.name={config.name} has its own weights, which finetuning phi would leave untrained")
    return loss  # type: ignore[no-any-return]


def class_batches(part: Split, config: LossConfig) -> ClassBatches:
    """Return the loss's batches of a part of the data, with all its classes if it has fewer than a batch."""
    paired = int((part.y.unique(return_counts=True)[1] > 1).sum())
    return ClassBatches(part.x, part.y, max(2, min(config.classes, paired)), config.samples)


def load_splits(config: RetrievalConfig, seed: int) -> Splits:
    """Load the data, divide its classes by the seed, and shift validation and test if the settings say so.

    Raises:
        ConfigError: A setting is unknown.
        DataError: The data are missing or unusable.
    """
    with config_section("data"):
        splits = _divided(config.data, config.limits, seed)
    with config_section("shift"):
        if config.shift.kind == "none":
            return splits
        if config.shift.kind != "image":
            raise ConfigError(f"shift.kind={config.shift.kind!r} must be none or image")
        return splits.shifted(config.shift.image_shift(), seed)


def embedder(
    config: RetrievalConfig, splits: Splits, seed: int, folder: Path, callback: Callback | None = None
) -> nn.Module:
    """Return the embedder: loaded, resumed from ``folder``, or trained and kept there as ``model.safetensors``.

    Raises:
        DataError: The weights don't fit the model.
    """
    settings, shape = config.model, splits.train.x.shape[1:]
    return pretrained(
        lambda: built(settings, shape, settings.trunk_weights),
        lambda model, checkpoint: train(model, splits.train, config, seed, checkpoint, callback),
        check=lambda model: attach(model, config, seed).merge(),
        weights=settings.weights or (settings.name if has_weights(settings.name) else ""),
        entry=settings.entry,
        folder=folder,
        seed=seed,
        device=splits.train.x.device,
        load=lambda model, weights, entry: _load(model, settings.name, weights, entry),
    )


def built(settings: ModelConfig, shape: torch.Size, trunk_weights: str = "") -> Embedder:
    """Return the embedder that the settings name, for images of a shape, ``c x h x w``.

    Args:
        settings: The settings.
        shape: The shape.
        trunk_weights: File of the classifier's weights to start from; empty for fresh ones.

    Raises:
        ConfigError: There is no such model, or it doesn't take images of this shape.
        DataError: The weights don't fit the model.
    """
    return build_model(
        settings.name,
        shape,
        settings.embedding,
        settings.width,
        trunk_weights,
        settings.entry,
        **settings_of(settings),
    )


def _load(model: nn.Module, name: str, weights: str, entry: str) -> None:
    """Load the weights of the model's own folder, or a file's."""
    trunk = model.trunk
    if weights == name and isinstance(trunk, nn.Module):
        trunk.load_state_dict(folder_weights(name, trunk))
    else:
        load_checkpoint(model, Path(weights), entry=entry)


def untrained(config: RetrievalConfig, splits: Splits, seed: int) -> nn.Module:
    """Return the embedder with random weights of a seed, all of them trainable."""
    settings = config.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(seed, "untrained").initial_seed())
        model = built(settings, splits.train.x.shape[1:])
    return model.to(splits.train.x.device)


def batch_metric(config: MetricConfig) -> BatchMetric:
    """Make the second black box: the same metric of a batch's embeddings."""
    metric = embedding_metric(replace(config, query_subset=0))
    return BatchMetric(metric.function, maximize=metric.maximize, bounds=metric.bounds, name=metric.name)


def train(
    model: nn.Module,
    part: Split,
    config: RetrievalConfig,
    seed: int,
    checkpoint: Path | None = None,
    callback: Callback | None = None,
) -> None:
    """Train an embedder by the surrogate loss, with proxies that it has but no memory; see `train_supervised`."""
    from metricopt_ext.retrieval.task import embedding_loss

    settings, batches, made = config.model, class_batches(part, config.loss), _criterion(_inner(config.loss))
    if not isinstance(made, nn.Module):
        with torch.no_grad(), evaluating(model):
            embedded = embed(model, part.x), part.y
        made = fitted_proxies(made, [embedded], seed).requires_grad_(True)
        model = Together(model, made)
    loss = embedding_loss(made)
    train_supervised(
        model,
        loss,
        batches,
        steps=steps_of(config, part, batches),
        lr=settings.lr,
        seed=seed,
        optimizer=settings.optimizer,
        weight_decay=settings.weight_decay,
        augment=settings.augment,
        checkpoint=checkpoint,
        callback=callback,
    )


def steps_of(config: RetrievalConfig, part: Split, batches: ClassBatches) -> int:
    """Return the steps of a training on a part of the data."""
    return max(1, config.model.epochs * len(part) // (batches.classes * batches.samples))


def attach(model: nn.Module, config: RetrievalConfig, seed: int) -> Adapter:
    """Attach the adapter that the settings describe."""
    return attach_film(model, config.adapter.layers or None, dim=config.adapter.dim, seed=seed)


def _divided(data: DataConfig, limits: Limits, seed: int) -> Splits:
    if data.name not in (*WITH_PARTS, *LOADERS):
        raise ConfigError(f"data.name={data.name!r} is none of {', '.join((*LOADERS, *WITH_PARTS))}")
    if data.name != "digits" and not (data.root or data.parts):
        raise ConfigError(
            f"data.name={data.name} needs data.root=PATH, the file or folder that holds it"
            + ", or data.train=PATH and data.val or data.test" * (data.name == "class_folders")
        )
    if (parts := own_parts(data, limits, seed)) is not None:
        return parts
    if data.name == "stanford_online_products":
        train, test = load_stanford_online_products(data.root, data.image_size or 224, **limits)
        return hold_out_classes(train, test, data.validation_share, seed)
    said = ""
    if data.name == "class_folders":
        whole, said = load_class_folders(Path(data.root), data.image_size or None, limits, stream=data.stream)
    else:
        whole = LOADERS[data.name](data, limits)
    splits = split_classes(whole, data.fractions, seed, last_test=data.last_test, test_classes=data.test_classes)
    return replace(splits, reading=Reading(said)) if said else splits


def _snake(name: str) -> str:
    """Turn ``FastAP`` into ``fast_ap``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
