"""The controller: its states, and REINFORCE against hand computations."""

from itertools import product

import pytest
import torch
from torch import Tensor

from metricopt_ext.siblings.ala.adaptive_losses import AdaptiveLoss
from metricopt_ext.siblings.ala.loss_policy import (
    Episode,
    LossPolicy,
    Reinforce,
    States,
    reinforce_loss,
)
from metricopt_ext.utils.seeding import generator


def policy(observed: int = 2, history: int = 3, seed: int = 0) -> LossPolicy:
    torch.manual_seed(seed)
    return LossPolicy("classes", observed, 0, history).double()


def states(made: LossPolicy, u: int, seed: int = 1) -> Tensor:
    return torch.randn(u, made.inputs, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(value: Tensor, made: LossPolicy) -> list[Tensor]:
    return list(torch.autograd.grad(value, list(made.parameters())))


@pytest.mark.parametrize("baseline", [0.0, 0.4])
def test_it_is_unbiased_for_the_expected_reward_whatever_the_baseline(baseline: float) -> None:
    made = policy()
    s = states(made, 2)
    rewards = {a: ((3 * a[0] + 5 * a[1]) % 7) / 3 - 1 for a in product(range(3), repeat=2)}
    expected, estimated = torch.zeros((), dtype=torch.float64), None
    for a, r in rewards.items():
        probability = made(s)[0, a[0]].exp() * made(s)[1, a[1]].exp()
        expected = expected + probability * r
        each = gradients(reinforce_loss(made, [Episode(s, torch.tensor(a), r - baseline)]), made)
        weighted = [-probability.detach() * gradient for gradient in each]
        estimated = weighted if estimated is None else [x + y for x, y in zip(estimated, weighted, strict=True)]
    assert estimated is not None
    for ours, true in zip(estimated, gradients(expected, made), strict=True):
        assert torch.allclose(ours, true, rtol=0, atol=1e-12)


def test_the_baseline_is_the_average_of_earlier_rewards() -> None:
    made = policy()
    learner, s, a = Reinforce(made, 0.001, memory=2, decay=0.9), states(made, 1), torch.tensor([0])
    for rewards in ([1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]):
        learner.remember([s, s], [a, a], rewards)
    first = 0.1
    second = 0.9 * first
    assert [[e.advantage for e in step] for step in learner.memory] == [
        pytest.approx([1 - first, -1 - first]),
        pytest.approx([-1 - second, -1 - second]),
    ]
    assert learner.baseline == pytest.approx(0.9 * second - 0.1)


def test_an_update_is_a_step_of_adam_on_as_many_remembered_episodes_as_children() -> None:
    ours, theirs = policy(), policy()
    learner = Reinforce(ours, 0.01, memory=3, decay=0.5)
    optimizer = torch.optim.Adam(theirs.parameters(), lr=0.01)
    for t in range(4):
        drawn = [states(ours, 3, 10 * t + i) for i in range(2)]
        learner.remember(drawn, [torch.tensor([0, 1, 2])] * 2, [1.0, -1.0 if t % 2 else 0.0])
        remembered = [episode for step in learner.memory for episode in step]
        assert len(remembered) == 2 * min(t + 1, 3)
        learner.update(generator(0, "replay", t))
        chosen = torch.randperm(len(remembered), generator=generator(0, "replay", t))[:2].tolist()
        loss = sum(-remembered[i].advantage * sum(theirs(remembered[i].states)[p, p] for p in range(3)) for i in chosen)
        optimizer.zero_grad()
        (loss / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-10)
    assert not torch.equal(ours.net[0].weight, policy().net[0].weight)


class Plain(AdaptiveLoss):
    """Two parameters with one statistic each, told apart."""

    family, observed, kinds, low, high = "plain", 1, 2, -1.0, 1.0

    def initial(self) -> Tensor:
        return torch.zeros(2, dtype=torch.float64)

    def loss(self, parameters: Tensor, scores: Tensor, labels: Tensor) -> Tensor:
        raise NotImplementedError

    def statistics(self, scores: Tensor, labels: Tensor) -> Tensor:
        raise NotImplementedError


def test_states_are_what_section_3_2_lists() -> None:
    seen, phi = States(Plain(), history=3, decay=0.5), torch.tensor([0.1, -0.2])
    found = [
        seen.observe(torch.tensor([[s], [0.0]]), phi, progress)
        for s, progress in ((2.0, 0.0), (4.0, 0.25), (-1.0, 0.5), (-1.0, 0.75))
    ]
    # averages before each step: 2, 2, 3, 1
    assert torch.allclose(
        torch.stack([each[0] for each in found]),
        torch.tensor(
            [
                [2, 2, 2, 0, 0.1, 0, 1, 0],
                [4, 2, 2, 2 / 6, 0.1, 0.25, 1, 0],
                [-1, 4, 2, -4 / 4, 0.1, 0.5, 1, 0],
                [-1, -1, 4, -2 / 2, 0.1, 0.75, 1, 0],
            ]
        ),
    )
    assert found[3][1].tolist() == pytest.approx([0, 0, 0, 0, -0.2, 0.75, 0, 1])
    assert found[0].shape[1] == LossPolicy.of(Plain(), history=3).inputs
