"""What an embedding can be judged by: mean Recall@k, other metrics of rankings, one's own functions."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metricopt_ext.errors import ConfigError, MetricOptError
from metricopt_ext.experiment.besides import NO_BOUNDS, own_function
from metricopt_ext.experiment.own_metric import number_within, own_metric, try_on_few, why
from metricopt_ext.retrieval.config import MetricConfig
from metricopt_ext.retrieval.inputs import check_items, check_options
from metricopt_ext.retrieval.ranking import AT_K, RANKED, ranking_metrics
from metricopt_ext.retrieval.recall import recall_at_k, recalls_left_out, recalls_on_halves
from metricopt_ext.retrieval.vectors import Array
from metricopt_ext.tasks.evaluation import Pairs
from metricopt_ext.tasks.halved import Halved
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.words import counted

# Pairs of halves, by the indices of each.
Draws = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class EmbeddingMetric:
    """A metric of embeddings, each of which searches all others.

    Attributes:
        function: Called with embeddings, ``n x d``, and labels, ``n``, both on the CPU; returns the value.
        against: The same of queries and a gallery: embeddings and labels of the former, then of the latter; None for a
            metric that has no gallery.
        name: Name in tables.
        maximize: Whether higher is better.
        bounds: Lowest and highest value.
        description: What it is, in a line; empty if its name says it.
        on_halves: Called with embeddings, labels and pairs of halves by class; returns the value, and those on each
            half, from one search of all. None for a metric that is called for each half.
        left_out: Called with embeddings, labels, pairs of halves by class, or none, and with how many neighbours
            embeddings are mixed; returns the value of each found as if it were new. None for a metric that can't tell.
    """

    function: Callable[[Tensor, Tensor], float]
    name: str
    maximize: bool = True
    bounds: tuple[float, float] = (0.0, 1.0)
    description: str = ""
    against: Callable[[Tensor, Tensor, Tensor, Tensor], float] | None = None
    on_halves: Callable[[Tensor, Tensor, Draws], tuple[float, Pairs]] | None = None
    left_out: Callable[[Tensor, Tensor, Draws, int], Halved] | None = None

    def check(self, gallery: bool) -> None:
        """Reject what the metric can't judge.

        Args:
            gallery: Whether there are queries and a gallery.

        Raises:
            ConfigError: The metric has no gallery.
        """
        if gallery and self.against is None:
            raise ConfigError(
                f"metric.name={self.name} is of embeddings that search each other, but the test images are queries and"
                f" a gallery; take recall, {' or '.join(RANKED)}"
            )

    def judge(self, embeddings: Tensor, labels: Tensor, queries: Tensor | None = None) -> float:
        """Return the value for embeddings, ``n x d``, of which each searches all others, or queries a gallery.

        Args:
            embeddings: The embeddings, on the CPU.
            labels: ``n``.
            queries: Which of them are queries, ``n`` booleans; None if each searches all others.

        Raises:
            ConfigError: As from `check`.
        """
        self.check(queries is not None)
        if queries is None:
            return self.function(embeddings, labels)
        assert self.against is not None
        queries = queries.cpu()
        return self.against(embeddings[queries], labels[queries], embeddings[~queries], labels[~queries])


def embedding_metric(config: MetricConfig) -> EmbeddingMetric:
    """Return the metric that the settings name; a module that they name is imported, which runs it.

    Raises:
        ConfigError: There is no such metric, or the settings are not its own or impossible.
    """
    name = config.name
    if own := own_metric(name, config):
        function = _checked(own.function, own.bounds, own.name)
        return EmbeddingMetric(function, *own[1:], f"{name} of embeddings and labels")
    if name == "recall":
        ks = check_ks(config)
        title = ("mean " if len(ks) > 1 else "") + "Recall@" + ",".join(map(str, ks))
        return EmbeddingMetric(
            lambda x, y: recall_at_k(x, y, ks).mean,
            title,
            against=lambda x, y, *gallery: recall_at_k(x, y, ks, gallery=gallery).mean,
            on_halves=lambda x, y, pairs: recalls_on_halves(x, y, ks, pairs),
            left_out=lambda x, y, pairs, k: recalls_left_out(x, y, ks, pairs, k, "l2"),
        )
    if name in RANKED:
        return _ranked(name, check_ks(config) if name in AT_K else (1,))
    known = ", ".join(["recall", *RANKED])
    raise ConfigError(f"metric.name={name!r} is none of {known}; name your own function as MODULE:FUNCTION")


def besides(config: MetricConfig) -> dict[str, EmbeddingMetric]:
    """Return what counts besides the metric by name; a module that is named is imported, which runs it.

    Args:
        config: The metric's settings; recall is over its ks.

    Raises:
        ConfigError: There is no such metric.
    """
    return {name: _besides(name, key, config) for name, key in config.besides.items()}


def _besides(name: str, key: str, config: MetricConfig) -> EmbeddingMetric:
    if function := own_function(name, config, key):
        return EmbeddingMetric(_checked(function, NO_BOUNDS, name), name, True, NO_BOUNDS)
    if name not in ("recall", *RANKED):
        known = ", ".join(["recall", *RANKED])
        raise ConfigError(f"{key}: {name!r} is none of {known}; name your own function as MODULE:FUNCTION")
    return embedding_metric(MetricConfig(name=name, ks=config.ks))


def check_ks(config: MetricConfig) -> tuple[int, ...]:
    """Return the numbers of neighbours.

    Raises:
        ConfigError: The numbers are impossible.
    """
    try:
        return check_options(config.ks)
    except MetricOptError as error:
        raise ConfigError(f"metric: {error}") from error


def check_searched(config: MetricConfig, part: str, count: int) -> None:
    """Reject a k at which each query finds all that there is: recall is 1 there, and raises a mean over ks.

    Args:
        config: The metric's settings.
        part: What is searched, in words.
        count: How many images each query searches.

    Raises:
        ConfigError: There is one, of a recall.
    """
    ks = check_ks(config) if "recall" in (config.name, *config.besides) else ()
    if beyond := [k for k in ks if k >= count]:
        raise ConfigError(
            f"metric.ks={list(config.ks)}: a query searches {counted(count, 'image')} of the {part}, and at k ="
            f" {beyond[0]} finds all of them; leave out what is not below {count}"
        )


def try_metric(config: MetricConfig, labels: Tensor, size: int) -> None:
    """Call a metric of the user's own on random embeddings, before work is done for it.

    Args:
        config: The metric's settings.
        labels: The validation images' labels, ``n``.
        size: d, of the embeddings.

    Raises:
        ConfigError: The metric fails; the message says why.
    """
    if ":" not in config.name:
        return
    metric, embeddings = embedding_metric(config), torch.randn(len(labels), size, generator=generator(0, "try_metric"))
    try:
        try_on_few(lambda rows: metric.function(embeddings[rows], labels.cpu()[rows]), len(labels))
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"metric.name={config.name} fails on random embeddings of shape {tuple(embeddings.shape)} and as many"
            f" labels: {why(error)}; see metric.kwargs (its arguments) and metric.bounds (its range)"
        ) from error


def _ranked(name: str, ks: tuple[int, ...]) -> EmbeddingMetric:
    """Return a metric of `ranking_metrics`; the mean over ks."""

    def value(embeddings: Tensor, labels: Tensor, **options: Any) -> float:
        return statistics.fmean(ranking_metrics(embeddings, labels, [name], ks, **options).values.values())

    return EmbeddingMetric(
        value,
        ("mean " if len(ks) > 1 else "") + f"{name}@" + ",".join(map(str, ks)) if name in AT_K else name,
        description=RANKED[name],
        against=lambda x, y, *gallery: value(x, y, gallery=gallery),
    )


def _checked(
    function: Callable[[Array, Array], float], bounds: tuple[float, float], name: str
) -> Callable[[Tensor, Tensor], float]:
    """Check what goes into a function of arrays, which may work in place, and what comes out."""

    def value(embeddings: Tensor, labels: Tensor) -> float:
        x, y = check_items(embeddings, labels)
        return number_within(function(x.copy(), y.copy()), bounds, name)

    return value
