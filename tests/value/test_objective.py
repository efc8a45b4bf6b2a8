"""Eq. 2 against loops written from the paper's formulas."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from metricopt_ext.value.learning import (
    Objective,
    Triplets,
    fisher_ratio,
    ordinal_loss,
    regression_loss,
    triplets_of,
)
from metricopt_ext.value.value_function import NeuralValueFunction

B, M, E = 9, 3, 4


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sampled_triplets(ratio: Tensor, features: Tensor, rng: torch.Generator) -> Triplets:
    drawn = -torch.rand(ratio.shape, generator=rng).double()
    return triplets_of(ratio, drawn, drawn)


def hardest_triplets(ratio: Tensor, features: Tensor, rng: torch.Generator) -> Triplets:
    far = (features[:, None] - features).norm(dim=-1).detach()
    return triplets_of(ratio, far, -far)


MINERS = [sampled_triplets, hardest_triplets]


def labels(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Costs and sigmas: the last member's costs are all equal, the second one's are all different."""
    cost = torch.rand(B, M, generator=rng(seed), dtype=torch.float64)
    sigma = 0.02 + 0.1 * torch.rand(B, M, generator=rng(seed + 1), dtype=torch.float64)
    cost[:, 2] = 0.5
    cost[:, 1] = 10 * torch.randperm(B, generator=rng(seed)).double()
    return cost, sigma


def embeddings(seed: int = 2) -> Tensor:
    """Embeddings with ties: two points of member 0 coincide, as do all of member 1's but one."""
    features = torch.randn(B, M, E, generator=rng(seed), dtype=torch.float64)
    features[3, 0] = features[5, 0]
    features[1:, 1] = features[1, 1]
    return features


def naive_ratio(cost: Tensor, sigma: Tensor, t: int, u: int, m: int) -> float:
    return float((cost[t, m] - cost[u, m]) ** 2 / (sigma[t, m] ** 2 + sigma[u, m] ** 2))


def naive_sets(cost: Tensor, sigma: Tensor, t: int, m: int) -> tuple[set[int], set[int]]:
    positives = {u for u in range(B) if u != t and naive_ratio(cost, sigma, t, u, m) < 2}
    negatives = {u for u in range(B) if naive_ratio(cost, sigma, t, u, m) >= 2}
    return positives, negatives


def distance(features: Tensor, t: int, u: int, m: int) -> float:
    return math.dist(features[t, m].tolist(), features[u, m].tolist())


# --- Regression ----------------------------------------------------------------------------------------------


def test_regression_loss() -> None:
    cost, sigma = labels()
    predicted = torch.randn(B, M, generator=rng(5), dtype=torch.float64)
    expected = 0.0
    for m in range(M):
        error = sum(abs(float(predicted[t, m] - cost[t, m])) / float(sigma[t, m]) for t in range(B))
        expected += error / sum(1 / float(sigma[t, m]) for t in range(B))
    assert float(regression_loss(predicted, cost, sigma)) == pytest.approx(expected, rel=1e-12)
    assert float(regression_loss(predicted, cost, 7 * sigma)) == pytest.approx(expected, rel=1e-12)


# --- Fisher's ratio and mining -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_fisher_ratio(seed: int) -> None:
    cost, sigma = labels(seed)
    ratio = fisher_ratio(cost, sigma)
    for t, u, m in np.ndindex(B, B, M):
        assert float(ratio[t, u, m]) == pytest.approx(naive_ratio(cost, sigma, t, u, m), rel=1e-12)


def test_a_ratio_of_exactly_two_is_negative() -> None:
    cost = torch.tensor([[0.0], [2.0], [-0.1]], dtype=torch.float64)
    positive, negative, valid = sampled_triplets(fisher_ratio(cost, torch.ones_like(cost)), cost, rng())
    assert valid.flatten().tolist() == [True, False, True]  # 2.0 has no positive
    assert (int(positive[0]), int(negative[0])) == (2, 1)


@pytest.mark.parametrize("miner", MINERS)
@pytest.mark.parametrize("seed", range(5))
def test_triplets_are_of_the_sets(miner: Any, seed: int) -> None:
    cost, sigma = labels(seed)
    triplets = miner(fisher_ratio(cost, sigma), embeddings(), rng(seed))
    assert all(x.shape == (B, M) for x in triplets)
    for t, m in np.ndindex(B, M):
        positives, negatives = naive_sets(cost, sigma, t, m)
        assert bool(triplets.valid[t, m]) == bool(positives and negatives)
        if triplets.valid[t, m]:
            assert int(triplets.positive[t, m]) in positives
            assert int(triplets.negative[t, m]) in negatives
    assert triplets.valid[:, 0].any()
    assert not triplets.valid[:, 1:].any()


@pytest.mark.parametrize("seed", range(5))
def test_hardest_triplets(seed: int) -> None:
    cost, sigma = labels(seed)
    cost[:, 1:] = labels(seed + 9)[0][:, :1]
    features = embeddings()
    triplets = hardest_triplets(fisher_ratio(cost, sigma), features, rng())
    checked = 0
    for t, m in np.ndindex(B, M):
        positives, negatives = naive_sets(cost, sigma, t, m)
        if positives and negatives:
            farthest = max(distance(features, t, u, m) for u in positives)
            nearest = min(distance(features, t, u, m) for u in negatives)
            assert distance(features, t, int(triplets.positive[t, m]), m) == pytest.approx(farthest, abs=1e-12)
            assert distance(features, t, int(triplets.negative[t, m]), m) == pytest.approx(nearest, abs=1e-12)
            checked += 1
    assert checked > B


def test_sampled_triplets_are_uniform_and_independent() -> None:
    cost, sigma = labels(3)
    cost[:, 1:] = labels(4)[0][:, :1]
    ratio, draws, generator = fisher_ratio(cost, sigma), 1500, rng(8)
    counts = np.zeros((M, B, B, B))
    for _ in range(draws):
        positive, negative, _ = sampled_triplets(ratio, ratio, generator)
        for m in range(M):
            counts[m, np.arange(B), positive[:, m], negative[:, m]] += 1
    several = 0
    for t, m in np.ndindex(B, M):
        positives, negatives = naive_sets(cost, sigma, t, m)
        if positives and negatives:
            pairs = counts[m, t][np.ix_(sorted(positives), sorted(negatives))] / draws
            p = 1 / pairs.size
            assert pairs.sum() == pytest.approx(1)
            assert np.abs(pairs - p).max() < 5 * math.sqrt(p * (1 - p) / draws)
            several += len(positives) > 1 < len(negatives)
    assert several > B / 2


# --- The ordinal embedding -----------------------------------------------------------------------------------


def some_triplets(seed: int = 0) -> Triplets:
    positive, negative = torch.randint(B, (2, B, M), generator=rng(seed))
    valid = torch.rand(B, M, generator=rng(seed)) < 0.6
    valid[:, 1] = False
    return Triplets(positive, negative, valid)


@pytest.mark.parametrize("seed", range(3))
def test_ordinal_loss(seed: int) -> None:
    features, triplets = embeddings(), some_triplets(seed)
    expected = 0.0
    for m in (0, 2):
        losses = []
        for t in range(B):
            if triplets.valid[t, m]:
                to_negative = distance(features, t, int(triplets.negative[t, m]), m)
                to_positive = distance(features, t, int(triplets.positive[t, m]), m)
                losses.append(math.log(1 + math.exp(-(to_negative - to_positive))))
        expected += sum(losses) / len(losses)
    assert float(ordinal_loss(features, triplets)) == pytest.approx(expected, rel=1e-12)


def test_without_valid_anchors_the_loss_is_zero() -> None:
    features = embeddings().requires_grad_(True)
    loss = ordinal_loss(features, some_triplets()._replace(valid=torch.zeros(B, M, dtype=torch.bool)))
    loss.backward()
    assert float(loss.detach()) == 0
    assert features.grad is not None
    assert features.grad.abs().max() == 0


@pytest.mark.parametrize("miner", MINERS)
@pytest.mark.parametrize("spread", [0.0, 1e-30, 1.0])
def test_gradients_are_finite_where_embeddings_coincide(miner: Any, spread: float) -> None:
    cost, sigma = (x[:, :1].expand(-1, M) for x in labels())
    features = (1 + spread * embeddings()).float().requires_grad_(True)
    triplets = miner(fisher_ratio(cost, sigma), features, rng())
    loss = ordinal_loss(features, triplets)
    loss.backward()
    assert triplets.valid.any()
    assert features.grad is not None
    assert features.grad.isfinite().all()
    if spread < 1:
        assert float(loss.detach()) == pytest.approx(M * math.log(2))


# --- Eq. 2 ---------------------------------------------------------------------------------------------------


def neural(cost_std: float = 0.2) -> NeuralValueFunction:
    torch.manual_seed(0)
    f = NeuralValueFunction(5, M).double()
    f.cost_std.fill_(cost_std)
    return f.eval()


@pytest.mark.parametrize("hardest", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_objective_is_the_weighted_sum(beta: float, hardest: bool) -> None:
    f, (cost, sigma) = neural(), labels()
    phi = torch.randn(B, M, 5, generator=rng(4), dtype=torch.float64)
    features = f.features(phi)
    expected = 4 * regression_loss(f.predict(features), cost, sigma) / 0.2
    miner = hardest_triplets if hardest else sampled_triplets
    triplets = miner(fisher_ratio(cost, sigma), features, rng(6))
    expected = expected + beta * ordinal_loss(features, triplets)
    loss = Objective(gamma=4, beta=beta, hardest=hardest)(f, phi, cost, sigma, rng(6))
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
