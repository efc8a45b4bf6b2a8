"""Settings of retrieval: what embeddings can gain before they are searched, without another weight."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.retrieval.judged import JudgedEmbeddings, Processing, judged_by
from metricopt_ext.retrieval.post_processing import COVARIANCES, PostProcessing
from metricopt_ext.tasks.cost_scale import CostScale
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.settings import Setting, Settings, Value, Values
from metricopt_ext.utils.kept_outputs import GIB, KeptOutputs
from metricopt_ext.utils.modes import evaluating
from metricopt_ext.utils.words import brief

POWERS = (0.0, 0.25, 0.5, 0.75, 1.0)
AUGMENTED = (0, 4, 8)


class RetrievalSettings(Settings):
    """The settings of retrieval metrics, as `retrieval_settings` returns them."""

    def __init__(
        self, *arguments: Any, kept: KeptOutputs, judges: Sequence[JudgedEmbeddings[Any]], **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._kept, self._judges = kept, judges

    @property
    def passes(self) -> int:
        """Passes over a metric's data or ``whiten_on`` while settings were applied; settings alone make none."""
        return self._kept.passes

    def judges(self, metric: CostScale) -> bool:
        """Whether a metric's embeddings are post-processed: it is one of those that the settings are made of."""
        return judged_by(metric) in self._judges

    @torch.no_grad()
    def processing(self, model: nn.Module, values: Values) -> Processing:
        """Return what values do to a model's embeddings: ``processing.of(embeddings)``, for an index of your own.

        ``merge_whitening(model, processing.whitening, processing.post, example)`` has the model do what it can of it.

        Raises:
            ValueError: As from `complete`.
        """
        with self.applied(values), evaluating(model):
            return self._judges[0].processing(model)

    def set_on(self, model: nn.Module, values: Values) -> str:
        """Return how a model, once phi is merged, takes what a linear layer can do of it; nothing is set here.

        Raises:
            ValueError: As from `complete`.
        """
        changed = self.changed(values)
        if not changed:
            return ""
        return (
            f"{', '.join(changed)} act on embeddings: `adapter.merge(); processing = settings.processing(model,"
            f" {changed}); print(merge_whitening(model, processing.whitening, processing.post, example))`, of"
            " metricopt_ext.retrieval.merge_whitening, prints what is left to the search"
        )


def retrieval_settings(
    *metrics: Metric, whiten_on: Any, labelled: Sequence[tuple[Any, Tensor]] = (), gib: float = GIB
) -> RetrievalSettings:
    """Return the settings of retrieval: the power of a PCA whitening, and database augmentation.

    A ``covariance`` of ``"within"`` in place of ``"all"`` whitens by that within classes, which takes labels. If these
    are what the metric is judged on, its value is optimistic: so this is not tuned, but chosen (`Start`).

    While they are applied, the metrics judge post-processed embeddings, and a model's embeddings are kept: a query
    that changes settings alone runs no model. The metrics' data, ``whiten_on``, and what ``embed`` uses besides the
    model must be the same each time.

    Args:
        metrics: What judges, on validation and test data, say: made by `recall_metric`, by `trainer_task`, or by the
            tool. All of them are judged by the settings.
        whiten_on: Unlabelled inputs that a whitening is fitted on, anew for each model: training data, or better the
            deployment's own. A batch, or batches as the metric's ``embed`` takes them, or pairs of such a batch and its
            labels; of `trainer_task` a dataset. Never the gallery that is judged, unless you ask for it: give one of
            the metrics, whose embeddings are then used, without a pass of their own.
        labelled: Inputs, as of ``whiten_on``, and their classes, ``n`` integers, for a covariance within classes:
            the training data's, say, and the deployment's.
        gib: Most memory that kept embeddings may take, in GiB; at least 0. They are in memory alone, as nothing tells a
            later process what data they are of.

    Returns:
        The settings, ``whitening`` first; presets are database augmentation with 4 and with 8 neighbours, where the
            metrics can be judged so. They can't if others than recall are of embeddings that search each other.

    Raises:
        ValueError: A metric is not one of this package's retrieval metrics, or there is none.

    Examples:
        >>> import torch
        >>> from metricopt_ext.retrieval.recall import recall_metric
        >>> x, y = torch.randn(40, 4), torch.arange(40) % 8
        >>> metric = recall_metric([(x, y)])
        >>> settings = retrieval_settings(metric, whiten_on=torch.randn(100, 4))
        >>> settings.names, list(settings.presets)
        (('whitening', 'covariance', 'augmentation'), ['augmentation_4', 'augmentation_8'])
        >>> with settings.applied({"whitening": 0.5}):
        ...     cost = metric.cost(torch.nn.Identity(), "example")
    """
    judges = [_judge(metric) for metric in metrics]
    if not judges:
        raise ValueError("there is no metric; give those that are to be judged by the settings")
    augments = all(each.augments for each in judges)
    chosen = [
        Setting("whitening", values=POWERS, default=0.0),
        Setting("covariance", values=COVARIANCES, default=COVARIANCES[0]),
    ]
    if augments:
        chosen.append(Setting("augmentation", values=AUGMENTED, default=0))
    kept = KeptOutputs(gib)

    @contextmanager
    def apply(values: dict[str, Value]) -> Iterator[None]:
        post = PostProcessing(**values)  # type: ignore[arg-type]
        if post.covariance != COVARIANCES[0] and not labelled:
            raise ValueError(f"covariance is {post.covariance!r}, which takes labels: labelled=[(inputs, classes)]")
        with ExitStack() as stack:
            for judge in judges:
                stack.enter_context(judge.processed(post, whiten_on, kept, labelled))
            yield

    presets = {f"augmentation_{k}": {"augmentation": k} for k in AUGMENTED if k} if augments else {}
    return RetrievalSettings(chosen, apply, alone=["whitening"], presets=presets, kept=kept, judges=judges)


def _judge(metric: Any) -> JudgedEmbeddings[Any]:
    found = judged_by(metric)
    if found is None:
        raise ValueError(
            f"{brief(metric)} is no metric whose embeddings can be post-processed; make it by recall_metric or"
            " trainer_task, or let your own metric read the settings"
        )
    return found
