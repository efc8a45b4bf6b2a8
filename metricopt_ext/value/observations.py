"""Labelled points for fitting value functions: phi, its cost, and how certain the label is."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from metricopt_ext.adapters.signature import Signature
from metricopt_ext.errors import ValueFunctionError
from metricopt_ext.tasks.trajectories import Trajectory


@dataclass(frozen=True)
class Observations:
    """Labelled points of some trajectories, n in all.

    Attributes:
        phi: ``n x d``, float32.
        cost: The labels, ``n``, float64: a large offset must not swallow what differs.
        sigma: Standard deviation of each label, ``n``, above 0; only ratios matter if all labels are of one kind.
        trajectory: Which trajectory a point lies on, counted from 0, ``n``.
        round: The trajectory's round, ``n``.
        progress: The point's step over T, in [0, 1], ``n``.
        observed: Whether the metric was evaluated there, ``n``; elsewhere the label is interpolated.
        signature: What phi means: the adapter of all trajectories; None if unknown.
    """

    phi: Tensor
    cost: Tensor
    sigma: Tensor
    trajectory: Tensor
    round: Tensor
    progress: Tensor
    observed: Tensor
    signature: Signature | None = None

    @classmethod
    def of(cls, trajectories: Iterable[Trajectory]) -> "Observations":
        """Gather the observed points, trajectory by trajectory, all equally certain (sigma 1).

        Raises:
            ValueFunctionError: The trajectories are of different adapters.
        """
        return cls.joined([cls.along(t, t.observed, t.cost, torch.ones(len(t.cost))) for t in trajectories])

    @classmethod
    def along(cls, trajectory: Trajectory, steps: Tensor, cost: Tensor, sigma: Tensor) -> "Observations":
        """Return points of one trajectory: some of its steps, their labels, and the labels' sigma, ``m`` each."""
        return cls(
            phi=trajectory.phi[steps].float(),
            cost=cost.double(),
            sigma=sigma.float(),
            trajectory=torch.zeros_like(steps),
            round=torch.full_like(steps, trajectory.round),
            progress=steps / (len(trajectory.phi) - 1),
            observed=torch.isin(steps, trajectory.observed),
            signature=trajectory.signature,
        )

    @classmethod
    def joined(cls, parts: Sequence["Observations"]) -> "Observations":
        """Put labelled points together, part after part; trajectories are counted on.

        Args:
            parts: At least one; all of the same adapter, as far as they say it.

        Raises:
            ValueFunctionError: They are of different adapters.
        """
        signatures = {each.signature for each in parts} - {None}
        if len(signatures) > 1:
            raise ValueFunctionError(
                f"the trajectories are of {len(signatures)} different adapters, in each of which phi means something"
                " else; learn a value function for each"
            )
        names = [each.name for each in fields(cls) if each.name != "signature"]
        joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        part = torch.arange(len(parts)).repeat_interleave(torch.tensor([len(each.cost) for each in parts]))
        pairs = torch.stack([part, joined["trajectory"]])
        joined["trajectory"] = pairs.unique(dim=1, return_inverse=True)[1]
        return cls(**joined, signature=next(iter(signatures), None))

    def where_used(self) -> Tensor:
        """Mark the observed points where f will be used, ``n``: in the second half of on-policy trajectories.

        Before the first on-policy round, it is the second half of all trajectories.
        """
        late, on_policy = self.observed & (self.progress >= 0.5), self.round > 0
        return late & on_policy if on_policy.any() else late


# Turns trajectories into labelled points: `Observations.of`, or an interpolation in time.
Labeller = Callable[[Sequence[Trajectory]], Observations]
