"""Losses that have weights for each class, such as proxies: as constants of a finetune of phi."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from metricopt_ext.errors import DataError
from metricopt_ext.utils.seeding import generator, seeded_streams

# Returns a loss of pytorch-metric-learning for so many classes and dimensions.
PerClass = Callable[[int, int], nn.Module]

STEPS, BATCH, RATE = 300, 512, 0.01  # of the fit; embeddings are calculated once


class ProxyLoss(nn.Module):
    """A loss with weights for each class, for labels of several parts of the data.

    Each part has a loss of its own, as its classes are told apart from each other alone.

    Args:
        made: Makes the loss.
        labels: The labels of each part, any integers; no class is in two parts.
        dimension: Of the embeddings.
        seed: Draws the first weights.
    """

    def __init__(self, made: PerClass, labels: Sequence[Tensor], dimension: int, seed: int) -> None:
        super().__init__()
        self.classes = [each.unique() for each in labels]
        with seeded_streams(generator(seed, "proxies").initial_seed(), torch.device("cpu")):
            self.losses = nn.ModuleList(made(len(each), dimension) for each in self.classes)

    def forward(self, embeddings: Tensor, labels: Tensor, mined: object = None) -> Tensor:
        """Return the loss of a batch of one part.

        Args:
            embeddings: ``n x d``.
            labels: ``n``.
            mined: What a miner found; None without one.

        Raises:
            DataError: The labels are not of one part.
        """
        for classes, loss in zip(self.classes, self.losses, strict=True):
            at = torch.searchsorted(classes, labels.to(classes.device)).clamp(max=len(classes) - 1)
            if (classes[at] == labels.to(classes.device)).all():
                value: Tensor = loss(embeddings, at.to(embeddings.device), mined)
                return value
        raise DataError(f"there are no proxies for all of the classes {labels.unique().tolist()[:8]} in one part")


def fitted_proxies(made: PerClass, parts: Sequence[tuple[Tensor, Tensor]], seed: int) -> ProxyLoss:
    """Return a loss whose weights are fitted to the embeddings of each part, and stay so.

    Proxies start at the mean embedding of their class, other weights at random, and take Adam's steps on the loss.

    Args:
        made: Makes the loss.
        parts: Embeddings, ``n x d``, and labels, ``n``, on one device.
        seed: Draws the steps' batches.
    """
    dimension, device = parts[0][0].shape[1], parts[0][0].device
    loss = ProxyLoss(made, [labels for _, labels in parts], dimension, seed).to(device)
    for (embeddings, labels), classes, own in zip(parts, loss.classes, loss.losses, strict=True):
        _begin(own, torch.stack([embeddings[labels == each].mean(dim=0) for each in classes]))
        descent, size = torch.optim.Adam(own.parameters(), RATE), min(BATCH, len(embeddings))
        for step in range(STEPS):
            rows = torch.randperm(len(embeddings), generator=generator(seed, "proxies", step))[:size].to(device)
            descent.zero_grad()
            loss(embeddings[rows], labels[rows]).backward()
            descent.step()
    return loss.requires_grad_(False)


def _begin(loss: nn.Module, means: Tensor) -> None:
    """Set weights of one vector for each class, ``c x d`` or ``d x c``, to the classes' mean embeddings."""
    for weight in loss.parameters():
        for values in (means, means.T):
            if weight.shape == values.shape:
                weight.data.copy_(values)
                break


class Together(nn.Module):
    """An embedder that is trained together with the weights of its loss.

    Args:
        model: The embedder.
        loss: The loss.
    """

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x: Tensor) -> Tensor:
        """Return the embeddings, ``n x d``."""
        embeddings: Tensor = self.model(x)
        return embeddings
