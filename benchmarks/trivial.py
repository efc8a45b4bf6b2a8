"""Predictors of the metric that know next to nothing, to compare a value function's quality with."""

from collections.abc import Callable, Sequence

import torch
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV, LeaveOneGroupOut
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from metricopt_ext.tasks.trajectories import Trajectory
from metricopt_ext.value.fitting import assign_folds, measure
from metricopt_ext.value.observations import Observations
from metricopt_ext.value.value_function import Quality

# Turns the points of Observations, given a mask of those that may be learned from, into features, ``n x p``.
Features = Callable[[Tensor], Tensor]


def trivial_predictors(trajectories: Sequence[Trajectory], *, folds: int = 4, seed: int = 0) -> dict[str, Quality]:
    """Measure trivial predictors as `fit_value_function` measures f: on the same held-out points, with the same folds.

    Each is a linear regression, fitted to the other folds, on one thing: nothing (``constant``), the step (``step``),
    the distance to the mean end point (``end_distance``), the surrogate loss (``loss``), phi and its squares
    (``diagonal_quadratic``), or phi and all products (``full_quadratic``); the last two with a ridge penalty. The first
    four learn only from points where f is used, which flatters them.

    Args:
        trajectories: What f was learned from.
        folds: Number of folds, as given to `fit_value_function`.
        seed: Its seed.

    Returns:
        Held-out quality by name.
    """
    data = Observations.of(trajectories)
    fold = assign_folds(data.trajectory, folds, seed)
    used = data.where_used()
    ends = torch.stack([t.phi[-1] for t in trajectories]).float()
    last_loss = [t.loss[t.observed.clamp(max=len(t.loss) - 1)] for t in trajectories]
    loss = torch.cat(last_loss).float()
    on_policy = torch.tensor([t.round > 0 for t in trajectories])
    if not on_policy.any():
        on_policy[:] = True
    upper = torch.triu_indices(data.phi.shape[1], data.phi.shape[1])

    def end_distance(seen: Tensor) -> Tensor:
        known = on_policy & torch.zeros(len(ends), dtype=torch.bool).index_fill(0, data.trajectory[seen], True)
        distance: Tensor = torch.linalg.vector_norm(data.phi - ends[known].mean(0), dim=1, keepdim=True)
        return distance

    narrow: dict[str, Features] = {
        "constant": lambda seen: torch.zeros(len(data.cost), 1),
        "step": lambda seen: data.progress[:, None],
        "end_distance": end_distance,
        "loss": lambda seen: loss[:, None],
    }
    wide: dict[str, Features] = {
        "diagonal_quadratic": lambda seen: torch.cat([data.phi, data.phi**2], 1),
        "full_quadratic": lambda seen: torch.cat([data.phi, data.phi[:, upper[0]] * data.phi[:, upper[1]]], 1),
    }
    everywhere = torch.ones_like(used)
    return {
        **{name: _cross_validated(data, fold, used, features, used, [1e-12]) for name, features in narrow.items()},
        **{name: _cross_validated(data, fold, used, f, everywhere, PENALTIES) for name, f in wide.items()},
    }


PENALTIES = tuple(10.0**e for e in range(-4, 4))


def _cross_validated(
    data: Observations, fold: Tensor, used: Tensor, features: Features, learned: Tensor, penalties: Sequence[float]
) -> Quality:
    predicted, cost = torch.empty(len(data.cost), dtype=torch.float64), data.cost.double()
    for member in range(int(fold.max()) + 1):
        seen = (fold != member) & learned
        x, grid = (
            features(seen).double().numpy(),
            {"ridge__alpha": [penalty * int(seen.sum()) for penalty in penalties]},
        )
        ridge = make_pipeline(StandardScaler(), Ridge())
        search = GridSearchCV(ridge, grid, scoring="neg_mean_absolute_error", cv=LeaveOneGroupOut())
        search.fit(x[seen], cost[seen], groups=data.trajectory[seen] % 5)
        predicted[fold == member] = torch.from_numpy(search.predict(x[fold == member]))
    return measure(predicted[used].float(), data.cost[used], data.trajectory[used])
