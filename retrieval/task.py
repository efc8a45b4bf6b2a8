"""pytorch-metric-learning's losses as the surrogate loss of a `FinetuneTask`."""

from typing import Any

from torch import Tensor, nn

from metricopt_ext.tasks.task import OutputLoss
from metricopt_ext.utils.modes import evaluating
from metricopt_ext.utils.seeding import seeded_streams

try:
    from pytorch_metric_learning.losses import CrossBatchMemory
except ImportError as error:
    raise ImportError("embedding_loss needs pytorch-metric-learning: pip install 'metricopt-ext[retrieval]'") from error


def embedding_loss(
    loss_fn: nn.Module, miner: nn.Module | None = None, *, embedder: nn.Module | None = None
) -> OutputLoss:
    """Return the surrogate loss of an embedding model, for batches ``(x, labels)``.

    A population of phi is embedded together; the miner and the loss then see the embeddings of one task at a time, as
    they would in a loop over the tasks. Anything they draw at random from torch (as some miners do) comes from the
    same seed each time, so a step can be replayed. Parameters of the loss, such as proxies, are used as they are.

    Args:
        loss_fn: A loss of pytorch-metric-learning; called with ``B x e`` embeddings, ``B`` labels and what was mined.
        miner: One of its tuple miners.
        embedder: Turns the adapted trunk's output into embeddings, if the adapter is attached to the trunk alone. It
            computes as in evaluation.

    Raises:
        ValueError: The loss remembers embeddings of earlier batches, which belong to another phi and another task.

    Example:
        >>> import torch
        >>> from pytorch_metric_learning.losses import ContrastiveLoss
        >>> loss = embedding_loss(ContrastiveLoss())
        >>> batch = (torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0, 1]))
        >>> float(loss(nn.Identity(), batch))
        0.0
    """
    refuse_memory(loss_fn)

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
            value: Tensor = loss_fn(embeddings, labels, mined)
        return value

    return OutputLoss(forward, loss)


def refuse_memory(loss_fn: nn.Module) -> None:
    """Refuse a loss that depends on more than a batch.

    Raises:
        ValueError: The loss remembers embeddings of earlier batches.
    """
    if any(isinstance(module, CrossBatchMemory) for module in loss_fn.modules()):
        raise ValueError(
            "CrossBatchMemory remembers embeddings of earlier batches, which another phi computed for another task;"
            " use the loss that it wraps"
        )
