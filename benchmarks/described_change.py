"""What phi does to a network, in numbers that mean the same on another one: the inputs of an f that could move.

phi's own coordinates go through matrices that are drawn for the network's channels. These go through what comes out.
"""

import copy
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.modes import evaluating
from metricopt_ext.value.value_function import ValueFunction

TINY = 1e-6


class Description(ABC):
    """A function of phi, by a fixed batch of the deployment's inputs, without labels; 0 at phi = 0.

    Args:
        task: What is finetuned.
        x: The inputs, ``n x ...``.
    """

    def __init__(self, task: FinetuneTask, x: Tensor) -> None:
        self.task, self.x = task, x
        with torch.no_grad():
            self.before = self.seen(task.origin())

    @abstractmethod
    def seen(self, phi: Tensor) -> list[Tensor]:
        """Return what the network computes for the inputs with phi, ``d``."""

    @abstractmethod
    def compared(self, before: list[Tensor], after: list[Tensor]) -> Tensor:
        """Return the change between what was computed with phi = 0 and with phi, a vector."""

    def __call__(self, phi: Tensor) -> Tensor:
        """Return the change, ``... x m``, at phi, ``... x d``."""
        rows = phi.reshape(-1, phi.shape[-1]).to(self.task.origin().dtype)
        found = torch.stack([self.compared(self.before, self.seen(row)) for row in rows])
        return found.view(*phi.shape[:-1], -1)


class LayerChange(Description):
    """How the outputs of the modulated layers change, pooled over channels and over the two halves of the depth.

    Of each layer: the mean over channels, and the root of the mean square, of the change of a channel's mean, in its
    standard deviations, and of the logarithm of the factor on this standard deviation. Eight numbers in all.
    """

    def seen(self, phi: Tensor) -> list[Tensor]:
        """Return mean and standard deviation of each layer's channels, ``2 x c``."""
        found: list[Tensor] = []

        def keep(layer: nn.Module, inputs: Any, output: Tensor) -> None:
            flat = output.transpose(0, 1).flatten(1) if output.dim() > 2 else output.T
            found.append(torch.stack([flat.mean(1), flat.std(1) + TINY]))

        adapter = self.task.adapter
        handles = [adapter.model.get_submodule(name).register_forward_hook(keep) for name in adapter.layers]
        try:
            with self.task.adapter.using(phi) as model, evaluating(model):
                model(self.x)
        finally:
            for handle in handles:
                handle.remove()
        return found

    def compared(self, before: list[Tensor], after: list[Tensor]) -> Tensor:
        """Return the pooled changes, 8."""
        rows = []
        for old, new in zip(before, after, strict=True):
            moved, spread = (new[0] - old[0]) / old[1], (new[1] / old[1]).log()
            rows.append(torch.stack([moved.mean(), _rms(moved), spread.mean(), _rms(spread)]))
        half = (len(rows) + 1) // 2
        return torch.cat([torch.stack(part).mean(0) for part in (rows[:half], rows[-half:])])


class OutputChange(Description):
    """How what the network says changes: classes' mean probabilities and how sure it is, or how near embeddings are."""

    def __init__(self, task: FinetuneTask, x: Tensor, embeds: bool) -> None:
        self.embeds = embeds
        super().__init__(task, x)

    def seen(self, phi: Tensor) -> list[Tensor]:
        """Return probabilities, ``n x classes``, or cosines between the inputs' embeddings, ``n x (n - 1)``."""
        with self.task.adapter.using(phi) as model, evaluating(model):
            out = model(self.x)
        if self.embeds:
            unit = F.normalize(out, dim=1)
            others = ~torch.eye(len(unit), dtype=torch.bool)
            return [(unit @ unit.T)[others].view(len(unit), -1)]
        if out.dim() == 1 or out.shape[1] == 1:
            positive = out.flatten().sigmoid()
            return [torch.stack([1 - positive, positive], 1)]
        return [out.softmax(1)]

    def compared(self, before: list[Tensor], after: list[Tensor]) -> Tensor:
        """Return the changes: 5 of embeddings, 4 and one for each class of classes."""
        (old,), (new,) = before, after
        if self.embeds:
            changes = [each(new) - each(old) for each in (_mean, _spread, _nearest, _gap)]
            return torch.stack([*changes, (new - old).square().mean()])
        sure = [each(new) - each(old) for each in (_entropy, _mixed_entropy, _most)]
        away = (old * ((old + TINY).log() - (new + TINY).log())).sum(1).mean()
        return torch.cat([new.mean(0) - old.mean(0), torch.stack([*sure, away])])


class DescribedValueFunction(ValueFunction):
    """f of a description of phi: ``f(D(phi) / scale)``.

    Args:
        f: What was fitted to descriptions, in units of ``scale``.
        describe: The description, on the network where f is followed.
        scale: Their standard deviations where f was fitted, ``m``.
        radius: How far phi went there.
    """

    kind = "described"

    def __init__(self, f: ValueFunction, describe: Description, scale: Tensor, radius: float) -> None:
        super().__init__(describe.task.dim, f.members_count)
        self.f, self.describe, self.scale = copy.deepcopy(f), describe, scale
        self.quality = f.quality
        self.radius.fill_(radius)

    def members(self, phi: Tensor) -> Tensor:
        """Predict the cost by each member, ``... x M``, at phi, ``... x d``."""
        return self.f.members((self.describe(phi) / self.scale).to(self.f.radius.dtype))


def _rms(values: Tensor) -> Tensor:
    return (values.square().mean() + TINY**2).sqrt()


def _mean(cosines: Tensor) -> Tensor:
    return cosines.mean()


def _spread(cosines: Tensor) -> Tensor:
    return cosines.std()


def _nearest(cosines: Tensor) -> Tensor:
    return cosines.max(1).values.mean()


def _gap(cosines: Tensor) -> Tensor:
    best = cosines.topk(2, 1).values
    return (best[:, 0] - best[:, 1]).mean()


def _entropy(p: Tensor) -> Tensor:
    return -(p * (p + TINY).log()).sum(1).mean()


def _mixed_entropy(p: Tensor) -> Tensor:
    return _entropy(p.mean(0)[None])


def _most(p: Tensor) -> Tensor:
    return p.max(1).values.mean()
