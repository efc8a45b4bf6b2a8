"""The loss that a config names."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.classification.large_margin import LargeMarginSoftmax
from metricopt_ext.classification.losses import CostSensitive, cross_entropy, loss_of
from metricopt_ext.classification.lovasz import lovasz
from metricopt_ext.classification.ranking_losses import AUCPRLoss, PairwiseAUC
from metricopt_ext.classification.targets import Target
from metricopt_ext.errors import ConfigError

ScoreLoss = Callable[[Tensor, Tensor], Tensor]  # (logits ``n`` or ``n x c``, labels ``n``) -> scalar
COSTS = "expected_cost"


def named_loss(config: ClassificationConfig, target: Target) -> Callable[[nn.Module, Any], Tensor]:
    """Return the loss of a model on a batch, inputs ``n x ...`` and labels ``n``, that the settings name.

    Raises:
        ConfigError: There is no such loss, or it does not take its arguments.
    """
    if config.loss is None:
        return loss_of(target)
    made = _made(config)
    if isinstance(made, LargeMarginSoftmax):
        return made
    return lambda model, batch: made(model(batch[0]), batch[1])


def score_loss(config: ClassificationConfig, target: Target) -> dict[str, ScoreLoss]:
    """Return the loss by its name if logits and labels are all that it sees, or else the target's own."""
    made = None if config.loss is None else _made(config)
    if made is None or isinstance(made, LargeMarginSoftmax):
        return {target.loss_name: cross_entropy if target.kind == "classes" else target.loss}
    return {config.loss.name: made}  # type: ignore[union-attr]


def _made(config: ClassificationConfig) -> Any:
    assert config.loss is not None
    name, params = config.loss.name, dict(config.loss.params)
    known: dict[str, Callable[..., Any]] = {
        "aucpr": AUCPRLoss,
        "cost_sensitive": CostSensitive,
        "cross_entropy": lambda: cross_entropy,
        "large_margin": LargeMarginSoftmax,
        "lovasz": lambda: lovasz,
        "pairwise_auc": PairwiseAUC,
    }
    if name not in known:
        raise ConfigError(f"loss.name={name!r} is none of {', '.join(known)}")
    if name == "cost_sensitive" and not params:
        return _of_metric(config)
    try:
        return known[name](**params)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"loss: {name} does not take {params}: {error}") from error


def _of_metric(config: ClassificationConfig) -> CostSensitive:
    if config.metric.name != COSTS or config.metric.prior:
        raise ConfigError(
            "loss.name=cost_sensitive takes its weights from metric.name=expected_cost without metric.prior, or from"
            " loss.params={weights: [1.0, 2.0]}, one for each class"
        )
    try:
        return CostSensitive.of_costs(config.metric.costs)
    except ValueError as error:
        raise ConfigError(f"metric.costs under loss.name=cost_sensitive: {error}") from error
