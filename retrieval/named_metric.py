"""The metric that a config names, of a model's embeddings."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.data.labelled import Split
from metricopt_ext.retrieval.config import MetricConfig
from metricopt_ext.retrieval.judged import JudgedEmbeddings, Processing
from metricopt_ext.retrieval.kept_features import KeptFeatures, embed
from metricopt_ext.retrieval.metrics import Draws, EmbeddingMetric, besides, embedding_metric
from metricopt_ext.retrieval.models import embedders, unscaled
from metricopt_ext.siblings.batch_metric import BatchMetric
from metricopt_ext.tasks.halved import Halved, with_halves
from metricopt_ext.tasks.metric import Metric


def _embed_on_cpu(model: nn.Module, x: Tensor) -> Tensor:
    with unscaled(model):
        return embed(model, x).cpu()


@torch.no_grad()
def embed_with(adapter: Adapter, phi: Tensor, x: Tensor) -> Tensor:
    """Return the embeddings, ``n x d``, that the model with phi computes for images, unscaled and on the CPU."""
    with adapter.using(phi) as model:
        return _embed_on_cpu(model, x)


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
    metric, also = embedding_metric(config), besides(config)
    for each in (metric, *also.values()):
        each.check(queries is not None)
    bounded = {name: each for name, each in also.items() if name in config.subject_to and constrained}
    several = not isinstance(halves, str) and len(halves) > 0 and not isinstance(halves[0], Tensor)
    draws = cast(Draws, halves) if several and queries is None else []

    own_queries = None if queries is None else queries.cpu()
    features = KeptFeatures(part.x, keep_gib)

    def judged(each: EmbeddingMetric, embeddings: Tensor, half: Tensor | None = None) -> float:
        rows = slice(None) if half is None else half.cpu()
        return each.judge(embeddings[rows], part.y.cpu()[rows], None if own_queries is None else own_queries[rows])

    def value_of(each: EmbeddingMetric, raw: Tensor, processing: Processing, pairs: Any = ()) -> Any:
        if processing.post.augmentation and own_queries is None:
            assert each.left_out is not None  # see `augments`
            return each.left_out(processing.alone(raw), part.y.cpu(), pairs, processing.post.augmentation)
        return judged(each, processing.of(raw, own_queries))

    def value(raw: Tensor, processing: Processing) -> Any:
        found: Any
        if processing.post.augmentation and own_queries is None:
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

    def embedded(model: nn.Module) -> Tensor:
        with unscaled(model):
            return features.embed(model).cpu()

    judging: JudgedEmbeddings[Tensor] = JudgedEmbeddings(
        embedded,
        value,
        embeddings_of=lambda raw: raw,
        embed_inputs=_embed_on_cpu,
        augments=queries is not None or all(each.left_out is not None for each in (metric, *also.values())),
        unscaled=lambda model: any(embedders(model)),
    )
    return Metric(
        judging,
        maximize=metric.maximize,
        bounds=metric.bounds,
        name=metric.name,
        new_classes=new_classes,
        also={name: alone(each) for name, each in also.items() if name not in bounded},
        subject_to=config.subject_to if constrained else None,
    )


def batch_metric(config: MetricConfig) -> BatchMetric:
    """Make the second black box: the same metric of a batch's embeddings."""
    metric = embedding_metric(config)
    return BatchMetric(metric.function, maximize=metric.maximize, bounds=metric.bounds, name=metric.name)
