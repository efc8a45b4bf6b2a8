"""pytorch-metric-learning's losses as the surrogate loss of a `FinetuneTask`."""

import copy
from typing import Any

from torch import Tensor, nn

from metricopt_ext.tasks.task import OutputLoss
from metricopt_ext.utils.extras import install
from metricopt_ext.utils.modes import evaluating
from metricopt_ext.utils.seeding import seeded_streams

try:
    from pytorch_metric_learning.losses import CrossBatchMemory
except ImportError as error:
    raise ImportError(f"this needs pytorch-metric-learning: {install('pytorch_metric_learning')}") from error


def embedding_loss(
    loss_fn: nn.Module, miner: nn.Module | None = None, *, embedder: nn.Module | None = None
) -> OutputLoss:
    """Return the surrogate loss of an embedding model, for batches ``(x, labels)``.

    A population of phi is embedded together; the miner and the loss then see the embeddings of one task at a time, as
    they would in a loop over the tasks. Anything they draw at random from torch (as some miners do) comes from the
    same seed each time, so a step can be replayed. Parameters of the loss, such as proxies, are used as they are. So is
    the memory of a `CrossBatchMemory`: each call takes a step from what training left in it, on a copy, so memories are
    constants for phi, as in training (Wang et al., Cross-Batch Memory for Embedding Learning, CVPR 2020). An empty one
    holds the batch alone.

    Args:
        loss_fn: A loss of pytorch-metric-learning; called with ``B x e`` embeddings, ``B`` labels and what was mined.
        miner: One of its tuple miners.
        embedder: Turns the adapted trunk's output into embeddings, if the adapter is attached to the trunk alone. It
            computes as in evaluation.

    Examples:
        >>> import torch
        >>> from pytorch_metric_learning.losses import ContrastiveLoss
        >>> loss = embedding_loss(ContrastiveLoss())
        >>> batch = (torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0, 1]))
        >>> float(loss(nn.Identity(), batch))
        0.0
    """
    remembers = bool(memories(loss_fn))

    def forward(model: nn.Module, batch: Any) -> Tensor:
        output: Tensor = model(batch[0])
        if embedder is not None:
            with evaluating(embedder):
                output = embedder(output)
        return output

    def loss(embeddings: Tensor, batch: Any) -> Tensor:
        labels = batch[1]
        with seeded_streams(0, embeddings.device):
            mined = None if miner is None else miner(embeddings, labels)
            value: Tensor = (copy.deepcopy(loss_fn) if remembers else loss_fn)(embeddings, labels, mined)
        return value

    return OutputLoss(forward, loss)


def memories(loss_fn: nn.Module) -> list[CrossBatchMemory]:
    """Return the parts of a loss that remember embeddings of earlier batches."""
    return [module for module in loss_fn.modules() if isinstance(module, CrossBatchMemory)]
