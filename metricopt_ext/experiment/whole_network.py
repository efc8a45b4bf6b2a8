"""A baseline with the deployment's labels: the whole network finetuned on them by the task's loss, stopped early."""

import copy
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.start import Start
from metricopt_ext.experiment.passes import CountedTask
from metricopt_ext.tasks.batches import Batches
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask, Loss
from metricopt_ext.utils.seeding import generator, seeded_streams
from metricopt_ext.utils.weights import same_bits

RATES = (0.3, 1.0)  # factors on the training's rate
STEPS, EVERY = 60, 5  # of each finetune at most, and how often it is judged
FEWEST_CLASSES = 6  # of which whole ones can be held out


class LabelParts(NamedTuple):
    """The labelled data that the metric sees, in two parts.

    Attributes:
        fit: Batches of two thirds of them, or so.
        judge: The metric on the others.
        whole: Batches of all.
    """

    fit: Batches
    judge: Metric
    whole: Batches


def held_third(groups: Tensor, seed: int) -> Tensor:
    """Return which examples are held out, ``n`` booleans: about a third of each group, none of a single example.

    Args:
        groups: The group of each, such as its class, ``n`` integers.
        seed: Seed of the choice.
    """
    groups = groups.cpu()
    order = torch.randperm(len(groups), generator=generator(seed, "held-out labels"))
    held = torch.zeros(len(groups), dtype=torch.bool)
    for group in groups.unique():
        held[order[groups[order] == group][1::3]] = True
    return held


def whole_network_start(task: FinetuneTask, loss: Loss, parts: LabelParts, *, lr: float, seed: int) -> Start:
    """Return the model with all of its weights finetuned on labels of the data that the metric sees.

    Two finetunes, at .3 and 1 times the training's rate, are judged by the metric on a held-out third of the labels
    every 5 of 60 steps. The best of these, of the fewest steps among equals, is done again on all labels; none may be
    the best. What is judged is not the metric's own data as a whole, and is no query of it.

    Args:
        task: Its model at phi = 0 is where each begins, and stays as it is; what was frozen before the adapter was
            attached stays so.
        loss: The task's loss.
        parts: The labelled data.
        lr: Peak rate of the model's training, above 0.
        seed: Seed of batches and dropout.

    Raises:
        ValueError: Nothing in the model can be trained.
    """
    base = Adapter(copy.deepcopy(task.adapter.model)).remove().eval()
    if not any(parameter.requires_grad for parameter in base.parameters()):
        raise ValueError(f"no parameter of {type(base).__name__} requires a gradient, so that it can't be finetuned")
    drawn, count = generator(seed, "whole network").initial_seed() % 2**31, 0
    with seeded_streams(drawn, task.origin().device):
        best, rate, steps = parts.judge.cost(base, "held-out labels"), 0.0, 0
        for factor in RATES:
            model = copy.deepcopy(base)
            for step in _finetuned(model, loss, parts.fit, factor * lr, STEPS, drawn):
                count += 1
                if step % EVERY == 0:
                    cost = parts.judge.cost(model.eval(), "held-out labels")
                    if (cost, step) < (best, steps):
                        best, rate, steps = cost, factor * lr, step
        for _ in _finetuned(base, loss, parts.whole, rate, steps, drawn):
            count += 1
    if isinstance(task, CountedTask):
        task.losses.count += count
    own = task.adapter.base_state_dict()

    def changed(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        return {n: each.detach() for n, each in named if n in own and not same_bits(each.detach(), own[n])}

    return Start(task.origin(), changed(chain(base.named_buffers(), base.named_parameters())))


def _finetuned(model: nn.Module, loss: Loss, batches: Batches, lr: float, steps: int, seed: int) -> Iterator[int]:
    """Train a model in place, at a constant rate so that it can stop anywhere; yields the number of steps so far."""
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    descent = torch.optim.AdamW(own, lr, weight_decay=0.0)
    for step in range(steps):
        model.train()
        with torch.enable_grad():
            value = loss(model, batches(seed, 0, step))
        descent.zero_grad()
        value.backward()
        descent.step()
        yield step + 1
    model.eval()
