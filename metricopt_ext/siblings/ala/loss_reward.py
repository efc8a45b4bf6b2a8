"""What the controller of Adaptive Loss Alignment is rewarded by (Huang et al., 2019, Eq. 4 and Fig. 3), as a cost."""

from typing import Literal, get_args

import torch

from metricopt_ext.errors import ConfigError
from metricopt_ext.siblings.training import TrainingTask
from metricopt_ext.utils.modes import evaluating

Reward = Literal["validation_metric", "validation_loss", "train_metric", "train_loss"]
REWARDS: tuple[Reward, ...] = get_args(Reward)
APART = 1_000_000  # the stream of the batches that a reward is of; children have those from 0 on


def reward_cost(task: TrainingTask, reward: Reward, batches: int, seed: int) -> float:
    """Return what a model is to lower, in evaluation mode.

    The validation metric is a query of the metric of a model. The others are of the same batches at every call: the
    train metric of the scores of all of them together, one query of the batch metric, and a loss as the mean of the
    task's own. The paper has the whole train set.

    Args:
        task: Its model is judged.
        reward: What by.
        batches: How many batches; the validation metric does without.
        seed: Seed of the batches.

    Raises:
        ConfigError: The task has no validation batches, which a validation loss is of.
        BudgetError: A ledger's budget is spent.
        MetricError: A metric failed.
    """
    if reward == "validation_metric":
        return task.metric.cost(task.model, "reward")
    source = task.validation if reward == "validation_loss" else task.batches
    if source is None:
        raise ConfigError("the task has no validation batches; reward=validation_loss is of them")
    drawn = [source(seed, APART, i) for i in range(batches)]
    with evaluating(task.model), torch.no_grad():
        if reward.endswith("loss"):
            return sum(float(task.loss(task.model, batch)) for batch in drawn) / batches
        scores, labels = zip(*(task.predict(task.model, batch) for batch in drawn), strict=True)
    metric = task.batch_metric
    return metric.sign * metric.value(torch.cat(scores), torch.cat(labels), "reward")
