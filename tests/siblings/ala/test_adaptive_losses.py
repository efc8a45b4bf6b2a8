"""The losses of Adaptive Loss Alignment against Eq. 6, 7, 9 and 10 written out in plain numbers."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from metricopt_ext.siblings.ala.adaptive_losses import (
    AdaptiveLoss,
    ClassCorrelation,
    DistanceMixture,
    FocalWeighting,
)

INCREASING = [lambda d: d * d, lambda d: d, lambda d: d**3, math.log1p, math.expm1]
DECREASING = [lambda d: 0.5 / d, lambda d: -d, lambda d: -d * d, lambda d: -math.log(d), lambda d: math.exp(-d)]


def logits(n: int, c: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(n, c, generator=rng, dtype=torch.float64), torch.arange(n) % c


def log_f(row: list[float]) -> list[float]:
    total = math.log(sum(math.exp(z) for z in row))
    return [z - total for z in row]


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def phi_matrix(parameters: list[float], c: int) -> list[list[float]]:
    entries = iter(parameters)
    matrix = [[float(i == j) for j in range(c)] for i in range(c)]
    for i in range(c):
        for j in range(i + 1, c):
            matrix[i][j] = matrix[j][i] = next(entries)
    return matrix


@pytest.mark.parametrize("c", [2, 3, 5])
@pytest.mark.parametrize("link", ["sigmoid", "none"])
def test_classes_are_equation_6(c: int, link: str) -> None:
    scores, labels = logits(11, c)
    parameters = 2 * torch.rand(c * (c - 1) // 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 1
    matrix = phi_matrix(parameters.tolist(), c)
    total = 0.0
    for row, y in zip(scores.tolist(), labels.tolist(), strict=True):
        inner = sum(matrix[y][j] * value for j, value in enumerate(log_f(row)))
        total -= sigmoid(inner) if link == "sigmoid" else inner
    loss = ClassCorrelation(c, link).loss(parameters, scores, labels)  # type: ignore[arg-type]
    assert loss.item() == pytest.approx(total / 11, abs=1e-12)


def test_one_logit_is_two_classes() -> None:
    scores, labels = logits(9, 2)
    one, parameters = scores[:, 1] - scores[:, 0], torch.tensor([-0.4], dtype=torch.float64)
    loss = ClassCorrelation(2)
    assert loss.loss(parameters, one, labels).item() == pytest.approx(loss.loss(parameters, scores, labels).item())
    assert torch.allclose(loss.confusions(one, labels), loss.confusions(scores, labels), rtol=0, atol=1e-12)


def test_confusions_are_equation_7_and_seen_by_pairs() -> None:
    c, (scores, labels) = 4, logits(10, 4)
    loss, expected = ClassCorrelation(c), torch.zeros(c, c, dtype=torch.float64)
    for i, j in product(range(c), range(c)):
        members = [row for row, y in zip(scores.tolist(), labels.tolist(), strict=True) if y == i]
        expected[i, j] = sum(-log_f(row)[j] for row in members) / len(members)
    assert torch.allclose(loss.confusions(scores, labels), expected, rtol=0, atol=1e-12)
    pairs = [[expected[i, j].item(), expected[j, i].item()] for i in range(c) for j in range(i + 1, c)]
    statistics = loss.statistics(scores, labels)
    assert torch.allclose(statistics, torch.tensor(pairs, dtype=torch.float64) / math.log(c), rtol=0, atol=1e-12)


def embeddings(counts: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    labels = torch.tensor([label for label, n in enumerate(counts) for _ in range(n)])
    rng = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(len(labels), 4, generator=rng, dtype=torch.float64), labels


def naive_distances(scores: Tensor) -> list[list[float]]:
    rows = [[v / math.sqrt(sum(u * u for u in row)) for v in row] for row in scores.tolist()]
    return [[math.dist(a, b) for b in rows] for a in rows]


def test_the_mixture_is_equation_9_over_all_triplets_of_classes_of_one_size() -> None:
    scores, labels = embeddings([3, 3, 3])
    phi = torch.rand(10, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    d, weights, y = naive_distances(scores), phi.tolist(), labels.tolist()
    found = [
        sum(w * f(d[a][p]) for w, f in zip(weights[:5], INCREASING, strict=True))
        + sum(w * f(d[a][n]) for w, f in zip(weights[5:], DECREASING, strict=True))
        for a, p, n in product(range(9), repeat=3)
        if a != p and y[a] == y[p] and y[a] != y[n]
    ]
    assert len(found) == 9 * 2 * 6
    assert DistanceMixture().loss(phi, scores, labels).item() == pytest.approx(sum(found) / len(found), abs=1e-10)


@pytest.mark.parametrize("phi", [(1.0, 1.0), (0.1, 2.5), (30.0, 4.0)])
def test_focal_weighting_is_equation_10(phi: tuple[float, float]) -> None:
    scores, labels = embeddings([2, 3, 1])
    d, y, total = naive_distances(scores), labels.tolist(), 0.0
    for a in range(6):
        far = sum(math.exp(phi[0] * (d[a][b] - 0.8)) for b in range(6) if b != a and y[a] == y[b])
        near = sum(math.exp(-phi[1] * (d[a][b] - 0.8)) for b in range(6) if y[a] != y[b])
        total += math.log(1 + far) / phi[0] + math.log(1 + near) / phi[1]
    loss = FocalWeighting(0.8).loss(torch.tensor(phi, dtype=torch.float64), scores, labels)
    assert loss.item() == pytest.approx(total / 6, abs=1e-10)
    assert torch.equal(FocalWeighting().initial(), torch.ones(2, dtype=torch.float64))
    assert FocalWeighting().offset == 1


def test_the_statistics_of_pairs_are_mean_distances_in_units_of_right_angles() -> None:
    scores, labels = embeddings([2, 3, 4])
    d, y = naive_distances(scores), labels.tolist()
    positives = [d[a][b] for a, b in product(range(9), repeat=2) if a != b and y[a] == y[b]]
    negatives = [d[a][b] for a, b in product(range(9), repeat=2) if y[a] != y[b]]
    expected = [sum(each) / len(each) / math.sqrt(2) for each in (positives, negatives)]
    assert FocalWeighting().statistics(scores, labels).flatten().tolist() == pytest.approx(expected, abs=1e-10)
    mixed = DistanceMixture().statistics(scores, labels).flatten().tolist()
    for i, (f, sample) in enumerate([(f, positives) for f in INCREASING] + [(f, negatives) for f in DECREASING]):
        assert mixed[i] == pytest.approx(sum(map(f, sample)) / len(sample) / abs(f(math.sqrt(2))), abs=1e-9)


LOSSES: list[tuple[AdaptiveLoss, int]] = [(ClassCorrelation(4), 6), (DistanceMixture(), 10), (FocalWeighting(), 2)]


@pytest.mark.parametrize(("loss", "size"), LOSSES, ids=lambda value: getattr(value, "family", None))
def test_each_parameter_matters_and_has_its_statistics(loss: AdaptiveLoss, size: int) -> None:
    scores, labels = embeddings([3, 2, 2, 2])
    phi = loss.initial().requires_grad_()
    assert phi.shape == (size,)
    assert loss.statistics(scores, labels).shape == (size, loss.observed)
    assert loss.kinds in (0, size)
    (slope,) = torch.autograd.grad(loss.loss(phi, scores, labels), phi)
    assert bool((slope != 0).all())
    assert torch.autograd.gradcheck(lambda x: loss.loss(phi.detach(), x, labels), scores.requires_grad_())


@pytest.mark.parametrize(
    ("loss", "size"), [*LOSSES, (ClassCorrelation(3, lowest=-0.5), 3)], ids=lambda value: getattr(value, "family", None)
)
def test_parameters_stay_within_their_limits(loss: AdaptiveLoss, size: int) -> None:
    step = torch.full((size,), 0.25, dtype=torch.float64)
    assert torch.equal(loss.moved(torch.full_like(step, 0.5), step), torch.full_like(step, 0.75))
    assert torch.equal(loss.moved(torch.full_like(step, loss.low), -step), torch.full_like(step, loss.low))
    assert torch.equal(loss.moved(torch.full_like(step, loss.high), step), torch.full_like(step, loss.high))


def test_equal_embeddings_and_missing_pairs_leave_everything_finite() -> None:
    same, labels = torch.ones(4, 3, dtype=torch.float64, requires_grad=True), torch.tensor([0, 0, 1, 1])
    apart = torch.arange(4)
    for loss in (DistanceMixture(), FocalWeighting()):
        for y in (labels, apart, 0 * apart):
            value = loss.loss(torch.ones_like(loss.initial()), same, y)
            (slope,) = torch.autograd.grad(value, same)
            assert bool(value.isfinite())
            assert bool(slope.isfinite().all())
            assert bool(loss.statistics(same.detach(), y).isfinite().all())
