"""Classes that the metric does not see: how much of a gain they lose, and how far towards a search's end to go.

A search that follows a metric of C classes climbs what is these classes' own. For a quadratic, of the gain
``O = tr(H^-1 J) / C`` is lost on other classes (Takeuchi's criterion), H the curvature and J the covariance of the
classes' gradients. Both halves of the classes have been climbed, so their agreement says nothing of it. But f can be
conditioned on one half's values and followed to its own end, where the other half's f tells what is lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from metricopt_ext.search.descent import descend
from metricopt_ext.search.strategy import SearchResult, SearchStrategy
from metricopt_ext.tasks.combine import costs_on_pairs
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.utils.threads import num_threads
from metricopt_ext.value.gp import GPValueFunction

# The optimism is counted one and a half times: with 60 classes the estimate is about right, with 30 it is too small.
STRENGTH = 1.5

# A half's f is followed within this share of the way from start to end, around its own best point.
REACH = 0.5


def held_back(search: SearchStrategy, metric: Metric) -> int:
    """Return how many evaluations a search does not get, as one is for what is kept (`kept_share`)."""
    return int(metric.new_classes and search.keeps_shares)


@dataclass(frozen=True)
class KeptShare:
    """How far to go towards a search's end where the model will be judged on other classes, in units of the cost.

    Attributes:
        share: t in [0, 1]: ``start + t (end - start)`` is to be kept; 0 for the start.
        optimism: O, what of the gain is expected to be lost on other classes.
        gain: G, the smaller of the observed and of f's gain.
        crossed: The mean gain of one half's end as the other half's f sees it.
        evaluated: Whether the metric was evaluated at what is kept, if that is neither start nor end; else f's mean
            stands in.
    """

    share: float
    optimism: float
    gain: float
    crossed: float
    evaluated: bool = True

    def point(self, start: Tensor, end: Tensor) -> Tensor:
        """Return what is to be kept, ``d``: t of the way from start to end, ``d`` each."""
        return start + self.share * (end - start)

    def doubt(self) -> str:
        """Say why the end was not kept as it is."""
        if self.crossed <= 0:
            return "what is gained by one half of the metric's classes is not gained by the other"
        if not self.share:
            return f"all of its gain may be lost on other classes than the metric's (expected: {self.optimism:.4f})"
        return f"{self.optimism:.4f} of its gain is expected to be lost on other classes than the metric's"


def kept_share(end: SearchResult, start: Tensor) -> KeptShare | None:
    """Return how far to go towards a search's end, if halves of the metric's classes tell; it costs no query.

    On other classes, a step of t times the way is worth ``t (2 G - O) - t^2 G``, were the metric quadratic: t is
    best at ``1 - O / (2 G)``, James and Stein's shrinkage along a line. O is counted `STRENGTH` times. The start is
    kept if nothing is left of t, or if one half's end does not gain on the other half's f, on average.

    Where classes are few, this mends it only in part: with 60 classes O was about what was lost on others, with 30 and
    with 4 it was too small by several times. Halves have half the classes, and make other errors than all of them.

    Args:
        end: A guided search's, with an f.
        start: Where it began, ``d``; one of its points.

    Returns:
        None without an f, or if no point has halves.
    """
    if end.f is None:
        return None
    points, evaluations = _with_halves(end)
    halves = costs_on_pairs(evaluations, end.f.combination) if evaluations else None
    if halves is None:
        return None
    own, other = cross_gains(end.f, points, halves, start, end.phi)
    started = next(e for p, e in zip(end.points, end.evaluations, strict=True) if torch.equal(p, start))
    gain = min(started.cost - end.cost, end.gain_over(start))
    optimism, crossed = optimism_of(own, other), float(other.mean())
    share = share_of(optimism, gain) if crossed > 0 else 0.0
    return KeptShare(share, optimism, gain, crossed)


def optimism_of(own: Tensor, other: Tensor) -> float:
    """Return O, what a gain on all classes is expected to lose on others.

    The end of half the classes gains more on its own f than on the other half's by twice as much as that of all
    classes would: what is lost on others is inversely proportional to their number, and so is what was gained too much.

    Args:
        own: Gains of halves' ends by their own f, ``m``.
        other: Their gains by the f of the other half, ``m``.
    """
    return float((own - other).mean() / 2)


def share_of(optimism: float, gain: float) -> float:
    """Return t in [0, 1] for O and G; 0 for a gain that is none."""
    return min(1.0, max(0.0, 1 - STRENGTH * optimism / (2 * gain))) if gain > 0 else 0.0


@num_threads(1)
def cross_gains(
    f: GPValueFunction, points: Tensor, halves: Tensor, start: Tensor, end: Tensor
) -> tuple[Tensor, Tensor]:
    """Follow the f of each half of the classes to its end, and see what it gains there, and on the other half's f.

    All have f's kernel, noise and promises. Distances are those of the kernel.

    Args:
        f: The value function; of its own costs nothing is used.
        points: The visited points, ``n x d``.
        halves: The outcomes' costs there on p pairs of halves, ``n x p x 2 x m``.
        start: Where the search began, ``d``.
        end: Its end, ``d``: each f is followed within `REACH` times its distance, from the point where f is least.

    Returns:
        The gains over the start by the half's own f, ``2 p``, and by the other half's, ``2 p``, in units of the cost.
    """
    count, m = 2 * halves.shape[1], halves.shape[-1]
    z, none = (points.double() - start.double()) @ f.transform, torch.zeros_like(start[None], dtype=torch.float64)
    trend = torch.linalg.solve(f.transform, (f.trend * f.outcome_std[:, None]).T).T.repeat(count, 1)  # in z
    kernel, costs = torch.eye(len(start)).to(z), halves.to(z).flatten(1)
    of_halves = GPValueFunction.conditioned(z, costs, kernel, f.noise.repeat(count), trend=trend)

    def cost(at: Tensor) -> Tensor:  # k x d in z to k x 2p: at each point, that on each half
        outcomes = (of_halves.outcome_mean + of_halves.outcome_std * of_halves.outcomes(at)).view(len(at), count, m)
        return outcomes[..., 0] if f.combination is None else f.combination.cost(outcomes)

    best = z[cost(z).argmin(0)]
    reach = REACH * float(((end.double() - start.double()) @ f.transform).norm())
    ends, _ = descend(lambda at: cost(at).diagonal(), best, best, reach)
    gains = cost(none) - cost(ends)  # of each half's end, by each half's f
    own = torch.arange(count, device=gains.device)
    return gains[own, own], gains[own, own ^ 1]


def _with_halves(end: SearchResult) -> tuple[Tensor, Sequence[Evaluation]]:
    """Return the points that f knows and the end, ``n x d``, and their evaluations: those that have halves."""
    known = list(range(len(end.points))) if end.known is None else end.known.tolist()
    points = [end.points[at] for at in known]
    evaluations = [end.evaluations[at] for at in known]
    if not any(torch.equal(point, end.phi) for point in points):
        points, evaluations = [*points, end.phi], [*evaluations, end.evaluation]
    halved = [at for at, each in enumerate(evaluations) if each.halves is not None]
    return torch.stack([points[at] for at in halved] or [end.phi]), [evaluations[at] for at in halved]
