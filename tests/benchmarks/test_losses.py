"""Rival losses: pairs one by one, the saddle point of the AUCPR loss by a linear program, and Jaccard's index."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor

from losses import AUCPRLoss, PairwiseAUC, lovasz
from metricopt_ext.classification.metrics import METRICS

pytestmark = pytest.mark.slow


def batch(outputs: int, size: int = 9, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn((size, outputs) if outputs > 1 else (size,), generator=rng, dtype=torch.float64)
    return logits, torch.arange(size) % max(2, outputs)


def odds(logits: Tensor, labels: Tensor) -> list[tuple[np.ndarray, np.ndarray]]:
    """Each class's scores and whether an example is of it, by NumPy."""
    if logits.dim() == 1:
        return [(logits.numpy(), labels.numpy() == 1)]
    p = np.exp(logits.numpy()) / np.exp(logits.numpy()).sum(1, keepdims=True)
    classes = [1] if p.shape[1] == 2 else range(p.shape[1])
    return [(np.log(p[:, k] / (1 - p[:, k])), labels.numpy() == k) for k in classes]


@pytest.mark.parametrize("outputs", [1, 2, 3])
@pytest.mark.parametrize("form", ["squared_hinge", "logistic"])
def test_pairs_one_by_one(form: str, outputs: int) -> None:
    logits, labels = batch(outputs)
    means = []
    for scores, positive in odds(logits, labels):
        d = [a - b for a in scores[positive] for b in scores[~positive]]
        means.append(np.mean([max(0, 1 - x) ** 2 if form == "squared_hinge" else np.log1p(np.exp(-x)) for x in d]))
    assert PairwiseAUC(form)(logits, labels).item() == pytest.approx(np.mean(means), abs=1e-12)


def saddle(scores: np.ndarray, positive: np.ndarray, alpha: float, most: float) -> float:
    """Minimise L+ + most x excess over b, hinges and excess >= L+ + alpha / (1 - alpha) L- - P, each at least 0."""
    n, rho, p = len(scores), alpha / (1 - alpha), positive.sum()
    costs = np.concatenate([[0.0], positive.astype(float), [most]])
    sign = np.where(positive, 1.0, -1.0)
    # hinge_i >= 1 - sign_i (s_i - b);  excess >= sum of weighted hinges - P
    hinges = np.concatenate([sign[:, None], -np.eye(n), np.zeros((n, 1))], 1)
    excess = np.concatenate([[0.0], np.where(positive, 1.0, rho), [-1.0]])[None]
    bounds = [(None, None)] + [(0, None)] * (n + 1)
    found = linprog(costs, np.concatenate([hinges, excess]), np.concatenate([sign * scores - 1, [p]]), bounds=bounds)
    return float(found.fun) / p


@pytest.mark.parametrize("outputs", [1, 2, 3])
@pytest.mark.parametrize(("anchors", "multiplier", "spread"), [(1, 10, 1), (4, 10, 3), (3, 0.5, 0.2), (4, 1e3, 9)])
def test_the_aucpr_loss_is_its_saddle_point(outputs: int, anchors: int, multiplier: float, spread: float) -> None:
    logits, labels = batch(outputs)
    logits = logits * spread
    expected = []
    for scores, positive in odds(logits, labels):
        share = positive.mean()
        alphas = [share + (1 - share) * t / (anchors + 1) for t in range(1, anchors + 1)]
        expected.append(np.mean([saddle(scores, positive, alpha, multiplier) for alpha in alphas]))
    assert AUCPRLoss(anchors, multiplier)(logits, labels).item() == pytest.approx(np.mean(expected), rel=1e-8, abs=1e-9)


@pytest.mark.parametrize("flips", [[], [0], [1, 3], [0, 1, 2, 3, 4, 5, 6]])
def test_of_whole_errors_the_lovasz_losses_are_the_metric(flips: list[int]) -> None:
    labels = torch.tensor([0, 1, 1, 0, 1, 0, 0])
    signs = 2.0 * labels - 1
    signs[flips] *= -1
    decided = 1e3 * torch.stack([-signs, signs], 1)  # probabilities of 0 and 1
    expected = 1 - METRICS["mean_iou"].function(decided, labels)
    assert lovasz(decided, labels).item() == pytest.approx(expected, abs=1e-6)
    # Each mistake of logits -1 and 1 has an error of 2.
    assert lovasz(signs, labels).item() == pytest.approx(2 - 2 * METRICS["jaccard"].function(signs, labels), abs=1e-6)


@pytest.mark.parametrize("loss", [PairwiseAUC(), PairwiseAUC("logistic"), AUCPRLoss(4), lovasz])
@pytest.mark.parametrize("outputs", [1, 3])
def test_gradients_are_right_and_computed_for_many_at_once(loss: Any, outputs: int) -> None:
    logits, labels = batch(outputs)
    assert torch.autograd.gradcheck(lambda x: loss(x, labels), logits.requires_grad_())
    many = torch.stack([logits, 2 * logits, logits.flip(0)]).detach()
    together = torch.func.vmap(loss, (0, None))(many, labels)
    assert torch.allclose(together, torch.stack([loss(each, labels) for each in many]), rtol=0, atol=1e-12)
