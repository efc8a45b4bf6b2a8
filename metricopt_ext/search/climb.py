"""How much of a search's gain is chance: it climbs that of the data that its metric sees, as it climbs what is true.

Points near each other share their chance, so the best of them is no largest of independent draws, and those that a
search goes on to are as lucky as the best: a guard that compares them finds no optimism. But halves of the data show
what else chance might have been. At each point half the difference of the two halves' costs, D, has the distribution
that the chance part of the cost has, and is independent of it, while what is true of the model cancels out. What f
predicts of an outcome is linear in the costs that it is fitted to. So the same of D says what the search would have
seen, had chance been that.
"""

import torch
from torch import Tensor

from metricopt_ext.search.descent import descend_each
from metricopt_ext.tasks.split_half import reliability_of
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.threads import num_threads
from metricopt_ext.value.gp import GPValueFunction

# Climbs that are averaged. They differ by 0.7 of chance's deviation in a few dimensions, so the mean by a quarter.
CLIMBS = 8

# Standard errors by which the halves' correlation is lowered, to be sure of it. A search that has climbed chance makes
# halves agree, too: they then correlate at .3 to .5 after 60 queries, as what they share varies more than the rest.
LOWERED = 3.0

# Points from which each climbs, the best by what it climbs, and the start.
STARTED = 3


@num_threads(1)
def climb_of_chance(f: GPValueFunction, halves: Tensor, start: Tensor, end: Tensor) -> float:
    """Return how much of a search's gain over a start is chance that it climbed, as a cost: as much of another draw.

    The draw is D's f, plus tau times the deviation of a posterior sample. The search proposes its points so, tau from 0
    to 1 over a batch. At 0 alone no more of D would be climbed than was asked, while the search asked more where its
    own chance rose. As likely as D is -D, so every other climb takes that. Where outcomes make the metric, each has a D
    of its own, and what climbs is what is made of them: the worst of what is true and of chance together.

    A climb is by how much the draw falls from the start to where it and what is true are least together, in the ball
    around the start that reaches to the end. What is true is f by the share that the halves surely agree on
    (`reliability_of`). Where that is 0, all that the ball allows is climbed: chance in d directions. Where it is 1, a
    bowl of truth with Hessian H lets chance of slope g be climbed by g' H^-1 g (Takeuchi, 1976).

    Args:
        f: The value function, fitted to n points with the start among them.
        halves: The outcomes' costs on two halves of the data there, ``n x 2 x m``.
        start: Where the search began, ``d``.
        end: Its end, ``d``.

    Returns:
        The gain, at least 0; 0 if the halves always move alike, or the end is the start.
    """
    apart = (halves[:, 0] - halves[:, 1]).to(f.points) / 2
    start, end = start.to(f.points), end.to(f.points)
    radius = float((end - start).norm())
    if radius == 0 or not (apart != apart[0]).any():
        return 0.0
    chance = GPValueFunction.conditioned(f.points, apart, f.transform, f.noise)
    deviations = chance.outcome_deviations(CLIMBS, generator(0, "climb"))
    signs = torch.tensor([1.0, -1.0]).to(start).repeat(CLIMBS // 2)[:, None]
    tau, share = torch.linspace(0, 1, CLIMBS).to(start)[:, None], reliability_of(halves, LOWERED)
    at_start = f.outcomes(start[None])

    def true(phi: Tensor) -> Tensor:  # k x m
        return at_start + share * (f.outcomes(phi) - at_start)

    def seen(phi: Tensor) -> Tensor:  # k x CLIMBS
        outcomes = signs * chance.outcomes(phi)[:, None] + tau * deviations(phi)  # k x CLIMBS x m
        drawn = (signs * chance.outcome_mean + chance.outcome_std * outcomes) / f.outcome_std
        return f.combined(true(phi)[:, None] + drawn)

    def climbed(phi: Tensor) -> Tensor:
        return seen(phi) - f.combined(true(phi))[:, None]

    inside = f.points[(f.points - start).norm(dim=1) <= radius]
    best = seen(inside).argsort(dim=0, stable=True)[:STARTED].T  # CLIMBS x STARTED, or fewer
    began = torch.cat([start.expand(CLIMBS, 1, -1), inside[best]], dim=1)
    ends = descend_each(seen, began, start, radius)
    falls = climbed(start[None])[0] - climbed(ends).diagonal()
    return max(0.0, float(f.cost_std * falls.mean()))
