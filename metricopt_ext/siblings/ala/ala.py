"""Adaptive Loss Alignment (Huang et al., 2019): a controller changes the loss's parameters while models descend it."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.runtime.progress import Callback, told
from metricopt_ext.siblings.ala.adaptive_losses import (
    FAMILIES,
    LINKS,
    AdaptiveLoss,
    ClassCorrelation,
    DistanceMixture,
    FocalWeighting,
    Link,
    PairwiseLoss,
    check_lowest,
)
from metricopt_ext.siblings.ala.loss_policy import ACTIONS, LossPolicy, Reinforce, States
from metricopt_ext.siblings.ala.loss_reward import REWARDS, Reward, reward_cost
from metricopt_ext.siblings.class_labels import class_labels
from metricopt_ext.siblings.sibling import Sibling
from metricopt_ext.siblings.training import History, TrainingTask
from metricopt_ext.utils.checks import check_above, check_at_least, check_integer
from metricopt_ext.utils.modes import evaluating
from metricopt_ext.utils.seeding import generator

Optimizer = Literal["sgd", "adam"]
Controller = Literal["policy", "confusion"]
CONTROLLERS: tuple[Controller, ...] = ("policy", "confusion")
OPTIMIZERS: tuple[Optimizer, ...] = ("sgd", "adam")


@dataclass(frozen=True)
class AdaptiveLossAlignment(Sibling):
    """Algorithm 1: every K iterations a shared policy changes the loss of each of several models, its children.

    The numbers are the paper's (section 5) where it gives them. The child whose metric was the best at the end, by what
    it was asked for its reward, is what is returned.

    Attributes:
        loss: ``"classes"`` for a classifier (Eq. 6); ``"mixture"`` (Eq. 9) or ``"focal"`` (Eq. 10) for embeddings.
        iterations: Of each child, a multiple of ``action_steps``; the paper leaves it to the task.
        action_steps: K, iterations between two actions.
        reward_evals: How many of the K iterations, the last ones, the metric is queried after for the reward. K is
            Eq. 4 as printed; fewer leave out terms whose weights are below gamma^reward_evals.
        gamma: Discount of the metric's values within a time step (Eq. 4).
        beta: How far an action moves a loss parameter; 0 leaves the loss as it begins.
        children: Models trained at once under the same policy.
        fresh_children: Whether all but the first have random weights of their own (``task.build``), as in the paper,
            rather than the task's.
        history: Time steps whose validation statistics a state holds.
        validation_batches: Labelled validation batches that the statistics are taken from.
        memory: Time steps that the replay memory holds; the paper does not give it.
        decay: Of the moving averages of rewards and of statistics; the paper does not give it.
        policy_lr: Adam's rate for the policy; 0 leaves it as it begins.
        model_lr: The children's rate.
        optimizer: ``"sgd"`` with ``momentum``, or ``"adam"``.
        momentum: Of SGD.
        link: Of the loss of classes; see `ClassCorrelation`.
        lowest: Smallest class correlation; see `ClassCorrelation`.
        offset: alpha of the focal weighting (Eq. 10).
        begin: A policy that was learned before, instead of a random one; it is not changed.
        learn: Whether the policy learns. One that does not needs no reward, and so no query of the metric; there is
            nothing to choose a child by, so it must be alone.
        controller: What sets Phi: the ``"policy"``, or as a baseline of Table 1 the ``"confusion"`` matrix of Eq. 7 at
            each time step, in place of Phi (`ClassCorrelation.confusion_matrix`). That learns nothing, so it goes with
            ``learn=False`` and one child.
        reward: What the reward is the improvement of (Fig. 3): the ``"validation_metric"``, or by `reward_cost`
            ``"validation_loss"``, ``"train_metric"`` or ``"train_loss"``; the best child is chosen by the same.
        reward_batches: Batches that the last three are of.
    """

    loss: str = "classes"
    iterations: int = 64_000
    action_steps: int = 200
    reward_evals: int = 200
    gamma: float = 0.9
    beta: float = 0.1
    children: int = 10
    fresh_children: bool = False
    history: int = 10
    validation_batches: int = 5
    memory: int = 3
    decay: float = 0.9
    policy_lr: float = 0.001
    model_lr: float = 0.1
    optimizer: Optimizer = "sgd"
    momentum: float = 0.9
    link: Link = "sigmoid"
    lowest: float = -1.0
    offset: float = 1.0
    begin: LossPolicy | None = field(default=None, compare=False, repr=False)
    learn: bool = True
    controller: Controller = "policy"
    reward: Reward = "validation_metric"
    reward_batches: int = 20

    def __post_init__(self) -> None:
        """Reject what is out of range.

        Raises:
            ValueError: A value is rejected; the message gives it.
        """
        for name, value, known in (
            ("loss", self.loss, FAMILIES),
            ("optimizer", self.optimizer, OPTIMIZERS),
            ("link", self.link, LINKS),
            ("controller", self.controller, CONTROLLERS),
            ("reward", self.reward, REWARDS),
        ):
            if value not in known:
                raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
        check_integer(1, iterations=self.iterations, action_steps=self.action_steps, reward_evals=self.reward_evals)
        check_integer(1, children=self.children, history=self.history, memory=self.memory)
        check_integer(1, validation_batches=self.validation_batches, reward_batches=self.reward_batches)
        check_above(0, gamma=self.gamma, model_lr=self.model_lr, offset=self.offset)
        check_at_least(0, beta=self.beta, policy_lr=self.policy_lr, decay=self.decay, momentum=self.momentum)
        check_lowest(self.lowest)
        if self.gamma > 1:
            raise ValueError(f"gamma is {self.gamma}; it must be at most 1")
        for name, share in (("decay", self.decay), ("momentum", self.momentum)):
            if share >= 1:
                raise ValueError(f"{name} is {share}; it must be below 1")
        if self.reward_evals > self.action_steps:
            raise ValueError(
                f"reward_evals is {self.reward_evals}; it must be at most action_steps = {self.action_steps}"
            )
        if self.iterations % self.action_steps:
            raise ValueError(
                f"iterations is {self.iterations}; it must be a multiple of action_steps = {self.action_steps}"
            )
        if self.begin is not None and (self.begin.family, self.begin.history) != (self.loss, self.history):
            raise ValueError(
                f"begin is a policy for loss={self.begin.family!r} and history={self.begin.history}, but loss is"
                f" {self.loss!r} and history is {self.history}"
            )
        if self.controller == "confusion":
            if self.loss != ClassCorrelation.family or self.learn or self.children != 1 or self.begin is not None:
                raise ValueError(
                    "controller is 'confusion'; that needs loss = 'classes', learn = False and children = 1, without a"
                    " policy in begin"
                )
        elif not self.learn and (self.begin is None or self.children != 1):
            raise ValueError("learn is False; that needs a policy in begin, and children = 1")

    def check(self, task: TrainingTask) -> None:
        """Refuse a task without validation batches or further models, and scores that the loss does not take.

        Raises:
            ConfigError: ``validation`` or ``build`` is missing.
            DataError: The scores have another shape, or are NaN, or a label is no class's number.
            AdapterError: Adam is to train weights of float16.
        """
        if task.validation is None:
            raise ConfigError("the task has no validation batches, which the controller's states are made from")
        if self.fresh_children and self.children > 1 and (task.build is None or task.trains == "phi"):
            raise ConfigError("fresh_children needs a task that trains a model, with build(seed) -> model")
        if self.optimizer == "adam":
            task.check_precision()
        self.adaptive_loss(task)

    def adaptive_loss(self, task: TrainingTask) -> AdaptiveLoss:
        """Return the loss for what the task's model returns.

        Raises:
            DataError: It takes other scores or labels.
        """
        with evaluating(task.model), torch.no_grad():
            scores, labels = task.predicted(task.batches(0, 0, 0))
        if self.loss == ClassCorrelation.family:
            class_labels(scores, labels)
            return ClassCorrelation(2 if scores.dim() == 1 else scores.shape[1], self.link, self.lowest)
        if not scores.is_floating_point() or scores.dim() != 2 or scores.shape[:1] != labels.shape:
            raise DataError(
                f"predict returned scores of shape {tuple(scores.shape)} and labels of shape {tuple(labels.shape)};"
                f" loss={self.loss} takes n x d embeddings and n labels"
            )
        return DistanceMixture() if self.loss == DistanceMixture.family else FocalWeighting(self.offset)

    def run(self, task: TrainingTask, seed: int, callback: Callback) -> tuple[LossPolicy | None, History]:
        """Train the children and the policy; the best child's weights become the task's model's.

        Returns:
            The policy, None if none sets Phi, and the history, means over children at each action's end: ``"reward"``;
            ``"baseline"``, its moving average; ``"change"``, the mean of |Phi - Phi_0|; ``"loss"``; ``"metric"``, the
            value that the reward was last of, or ``"rewarded loss"``. Without learning there are ``"change"`` and
            ``"loss"`` alone.
        """
        loss = self.adaptive_loss(task)
        policy = LossPolicy.of(loss, self.history) if self.begin is None else copy.deepcopy(self.begin)
        learner = Reinforce(policy, self.policy_lr if self.learn else 0.0, self.memory, self.decay)
        children = [Child(self, loss, each, seed, i) for i, each in enumerate(self._models(task, seed))]
        history: History = {}
        actions = self.iterations // self.action_steps
        for t in told(range(actions), callback, "ALA"):
            if self.controller == "confusion":
                children[0].take_confusions(t)
                children[0].descend(t)
                self._keep(history, t, children, [], 0.0)
                continue
            states = [child.observe(t) for child in children]
            choices = [policy.sample(s, generator(seed, "action", t, i)) for i, s in enumerate(states)]
            rewards = [child.train(t, choice) for child, choice in zip(children, choices, strict=True)]
            if self.learn:
                learner.remember(states, choices, rewards)
                learner.update(generator(seed, "replay", t))
            self._keep(history, t, children, rewards, learner.baseline)
        best = min(children, key=lambda child: child.discounted)
        if best is not children[0]:
            task.model.load_state_dict(best.task.model.state_dict())
        return (None if self.controller == "confusion" else policy), history

    def _keep(
        self, history: History, t: int, children: Sequence["Child"], rewards: Sequence[float], baseline: float
    ) -> None:
        for name, value in self._seen(children, rewards, baseline).items():
            history.setdefault(name, []).append(((t + 1) * self.action_steps, value))

    def _models(self, task: TrainingTask, seed: int) -> list[TrainingTask]:
        """Return the children's tasks, the first of them the task itself."""
        if not self.fresh_children:
            return [task, *(task.copied() for _ in range(self.children - 1))]
        drawn = [generator(seed, "child", i).initial_seed() % 2**31 for i in range(1, self.children)]
        others = [task.untrained(each) for each in drawn]
        for other in others:
            other.model.train()
        return [task, *others]

    def _seen(self, children: Sequence["Child"], rewards: Sequence[float], baseline: float) -> dict[str, float]:
        seen = {
            "change": sum(child.change for child in children) / len(children),
            "loss": sum(child.last_loss for child in children) / len(children),
        }
        if not self.learn:
            return seen
        cost = sum(child.last_cost for child in children) / len(children)
        loss = self.reward.endswith("loss")
        last = {"rewarded loss": cost} if loss else {"metric": children[0].task.metric.sign * cost}
        return {"reward": sum(rewards) / len(rewards), "baseline": baseline, **last, **seen}


class Child:
    """One of the models that are trained under the same policy, with loss parameters of its own.

    Args:
        method: The settings.
        loss: The loss.
        task: Its model, which is trained in place.
        seed: The run's seed.
        index: Its number; it has batches of its own.

    Attributes:
        parameters: Phi_t, ``u``, or a whole matrix, ``c x c``, of confusions.
        discounted: M_t of Eq. 4, of costs.
        last_cost: What the reward was last of.
        last_loss: The loss of the last batch.
    """

    def __init__(
        self, method: AdaptiveLossAlignment, loss: AdaptiveLoss, task: TrainingTask, seed: int, index: int
    ) -> None:
        self.method, self.loss, self.task, self.seed, self.index = method, loss, task, seed, index
        self.parameters = loss.initial()
        self.states = States(loss, method.history, method.decay)
        self.optimizer = self._optimizer()
        self.last_cost = self.last_loss = self.discounted = 0.0
        if method.learn:  # no iteration has moved the model yet, so that all terms of M_0 are the same
            self.last_cost = self._cost()
            self.discounted = discounted_sum([self.last_cost] * method.reward_evals, method.gamma)

    def observe(self, t: int) -> Tensor:
        """Return s_t of each loss parameter, ``u x inputs``, from validation batches.

        Raises:
            FloatingPointError: The model's scores are not finite.
        """
        statistics = torch.stack([self.loss.statistics(*each) for each in self._seen(t)]).mean(0)
        iteration = t * self.method.action_steps
        if not statistics.isfinite().all():
            raise FloatingPointError(
                f"the scores of validation data are not finite after {iteration} iterations; lower model_lr"
            )
        return self.states.observe(statistics, self.parameters, iteration / self.method.iterations)

    def take_confusions(self, t: int) -> None:
        """Take the confusion matrix of validation batches for Phi."""
        assert isinstance(self.loss, ClassCorrelation)  # `__post_init__` has seen to it
        ((scores, labels),) = self._seen(t)
        self.parameters = self.loss.confusion_matrix(scores, labels)

    def train(self, t: int, choices: Tensor) -> float:
        """Take an action, ``u`` places in `ACTIONS`, train for K iterations and return the reward, -1, 0 or 1 (Eq. 5).

        Raises:
            FloatingPointError: The loss is no longer finite.
        """
        change = self.method.beta * torch.tensor(ACTIONS, dtype=torch.float64)[choices]
        self.parameters = self.loss.moved(self.parameters, change)
        costs = self.descend(t)
        if not costs:
            return 0.0
        before, self.discounted = self.discounted, discounted_sum(costs, self.method.gamma)
        self.last_cost = costs[-1]
        return float((before > self.discounted) - (before < self.discounted))

    def descend(self, t: int) -> list[float]:
        """Train for K iterations under Phi as it is; returns what the reward is of after the last of them.

        Raises:
            FloatingPointError: The loss is no longer finite.
        """
        k, evals, costs = self.method.action_steps, self.method.reward_evals if self.method.learn else 0, []
        for j in range(k):
            scores, labels = self.task.predicted(self.task.batches(self.seed, self.index, t * k + j))
            loss = self.loss.loss(self.parameters, scores, labels)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            if j >= k - evals:
                self._keep(loss, t * k + j)
                costs.append(self._cost())
        self._keep(loss, t * k + k - 1)
        self.optimizer.zero_grad(set_to_none=True)
        return costs

    @property
    def change(self) -> float:
        """The mean of |Phi_t - Phi_0|."""
        initial = self.loss.initial()
        if self.parameters.dim() == 2:
            initial = torch.eye(len(self.parameters), dtype=torch.float64)
        return float((self.parameters - initial).abs().mean())

    def _cost(self) -> float:
        return reward_cost(self.task, self.method.reward, self.method.reward_batches, self.seed)

    def _seen(self, t: int) -> list[tuple[Tensor, Tensor]]:
        """Return scores and labels of the validation batches of a time step, as the loss takes statistics of them."""
        assert self.task.validation is not None  # `check` has seen to it
        v, model = self.method.validation_batches, self.task.model
        with evaluating(model), torch.no_grad():
            batches = [self.task.validation(self.seed, self.index, v * t + i) for i in range(v)]
            return self._together([self.task.predicted(batch) for batch in batches])

    def _together(self, seen: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Return the batches as one for classes, which need examples each; apart for pairs, as the loss has them."""
        if isinstance(self.loss, PairwiseLoss):
            return seen
        scores, labels = zip(*seen, strict=True)
        return [(torch.cat(scores), torch.cat(labels))]

    def _optimizer(self) -> torch.optim.Optimizer:
        parameters, lr = self.task.parameters(), self.method.model_lr
        if self.method.optimizer == "adam":
            return torch.optim.Adam(parameters, lr=lr)
        return torch.optim.SGD(parameters, lr=lr, momentum=self.method.momentum)

    def _keep(self, loss: Tensor, iteration: int) -> None:
        self.last_loss = float(loss.detach())
        if not torch.isfinite(loss.detach()):
            raise FloatingPointError(f"the loss is {self.last_loss} at iteration {iteration}; lower model_lr")


def discounted_sum(costs: Sequence[float], gamma: float) -> float:
    """Return M of Eq. 4: the sum of gamma^(K - j) times the cost after iteration j, the last of which is K."""
    return sum(gamma**i * cost for i, cost in enumerate(reversed(costs)))
