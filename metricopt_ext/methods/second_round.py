"""A second run (paper, section 4.3 and Table 4): finetune theta under the tuned phi, then adjust phi to it."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.methods.recipe import Recipe
from metricopt_ext.methods.recipe_settings import StepWeights
from metricopt_ext.methods.tuning import finetune, metric_policy
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.value.fitting import Fit


@dataclass(frozen=True)
class SecondRound:
    """What a second round reached, in the metric's own units.

    Attributes:
        before: Metric of the model at the start of the round.
        theta: Metric after theta was finetuned.
        after: Metric after phi was adjusted to the new theta.
        kept: Which of ``"before"``, ``"theta"`` and ``"after"`` was kept in the model.
        points: The phi visited while adjusting, ``(T + 1) x d``.
    """

    before: float
    theta: float
    after: float
    kept: str
    points: Tensor


def run_second_round(
    task: FinetuneTask,
    fit: Fit,
    train_theta: Callable[[nn.Module], None],
    *,
    recipe: Recipe,
    setting: StepWeights,
    seed: int = 0,
) -> SecondRound:
    """Finetune theta by the user's own training, then phi again under the first round's f; three queries.

    f was learned around the first theta and is reused, as in the paper, so the guard decides whether it still helps:
    the model keeps whichever of before, theta alone, and theta and phi scores best on the metric.

    Args:
        task: Its model holds the first round's phi, and is changed in place.
        fit: The first round's value function.
        train_theta: Trains the model it is given, e.g. a few epochs at a low rate; theta is unfrozen meanwhile;
            phi and the normalisation layers' running statistics are left alone.
        recipe: The first round's recipe.
        setting: How boldly f is followed.
        seed: Seed of the batches.

    Raises:
        ValueFunctionError: f was fitted for another adapter.
    """
    fit.f.check_fits(task.adapter.signature)
    adapter = task.adapter
    first_phi = adapter.phi.detach().clone()
    first_theta = copy.deepcopy(adapter.model.state_dict())  # with what a start replaced
    before = task.cost(first_phi, "second round")

    with unfrozen_theta(adapter) as model:
        train_theta(model)
    theta = task.cost(first_phi, "second round")

    points = finetune(task, metric_policy(fit.f, recipe, setting), recipe.steps, seed, start=first_phi)
    after = task.cost(points[-1], "second round")

    costs = {"before": before, "theta": theta, "after": after}
    kept = min(costs, key=lambda name: costs[name])
    if kept == "before":
        adapter.model.load_state_dict(first_theta)
    adapter.set_phi(points[-1] if kept == "after" else first_phi)
    value = task.metric.to_value
    return SecondRound(value(before), value(theta), value(after), kept, points)


@contextmanager
def unfrozen_theta(adapter: Adapter) -> Iterator[nn.Module]:
    """Unfreeze the parameters that were trainable before the adapter was attached, with phi held fixed."""
    trainable = set(adapter.context.thawed)
    theta = [parameter for name, parameter in adapter.model.named_parameters() if name in trainable]
    for parameter in theta:
        parameter.requires_grad_(True)
    adapter.phi.requires_grad_(False)
    try:
        yield adapter.model
    finally:
        for parameter in theta:
            parameter.requires_grad_(False)
            parameter.grad = None
        adapter.phi.requires_grad_(True)
