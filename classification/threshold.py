"""The cheapest rival of a binary classifier: tune its decision threshold for the metric."""

import copy

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.tasks.task import FinetuneTask


class WithThreshold(nn.Module):
    """A binary classifier whose logit is lowered by a constant: class 1 if the model's own logit is above it."""

    def __init__(self, model: nn.Module, threshold: float) -> None:
        super().__init__()
        self.model, self.threshold = model, threshold

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs, ``n x ...``, to logits, ``n``."""
        logits: Tensor = self.model(x)
        return logits - self.threshold


@torch.no_grad()
def tune_threshold(
    task: FinetuneTask, x: Tensor, evals: int = 101, start: Tensor | None = None
) -> WithThreshold | None:
    """Return the original model with the threshold that is best for the metric, or None if it has several logits.

    Args:
        task: Its model, at phi = 0, is judged by its metric.
        x: Inputs, ``n x ...``, whose logits' quantiles are the candidates.
        evals: Number of thresholds tried, one query each; the model's own, 0, is the first.
        start: Another phi, ``d``, that is merged into the model.
    """
    adapter = Adapter(copy.deepcopy(task.adapter.model))
    if start is not None:
        adapter.set_phi(start)
    model = (adapter.remove() if start is None else adapter.merge()).eval()
    logits = model(x)
    if logits.dim() != 1:
        return None
    quantiles = torch.linspace(0, 1, evals + 1, device=logits.device)[1:-1]
    candidates = [WithThreshold(model, t) for t in [0.0, *logits.quantile(quantiles).tolist()]]
    return min(candidates, key=lambda candidate: task.metric.cost(candidate, "threshold"))
