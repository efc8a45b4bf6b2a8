"""The AP loss: its value against scikit-learn's, its gradient against a loop, and what following it does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.refusals import assert_refused
from helpers.tensors import rand
from metricopt_ext.detection.ap_loss import ap_loss
from metricopt_ext.detection.records import Annotated
from metricopt_ext.detection.toolkit import Example

N, CLASSES = 40, 4


LABELS = torch.randint(-1, CLASSES - 1, (N,), generator=torch.Generator().manual_seed(1))  # none of the last class


@pytest.mark.parametrize("margin", [0.0, 0.7])
def test_the_loss_is_one_minus_the_mean_average_precision(margin: float) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    scores = rand(N, CLASSES)
    expected = []
    for c in range(CLASSES - 1):
        positive = (c == LABELS).numpy()
        shifted = scores[:, c].numpy() + np.where(positive, -margin / 2, margin / 2)
        expected.append(1 - metrics.average_precision_score(positive, shifted))
    assert float(ap_loss(scores, LABELS, margin=margin)) == pytest.approx(np.mean(expected))


def naive_gradient(scores: list[float], positive: list[bool], lambda_val: float, margin: float) -> list[float]:
    """The interpolated gradient of one class's 1 - AP by its formula, in pure Python."""
    shifted = [s - margin / 2 if p else s + margin / 2 for s, p in zip(scores, positive, strict=True)]

    def ranks(values: list[float]) -> list[int]:
        return [1 + sum(other > value for other in values) for value in values]

    before, slope = ranks(shifted), [0.0] * len(scores)
    for i, rank in enumerate(before):
        if positive[i]:
            among = sum(p and other <= rank for p, other in zip(positive, before, strict=True))
            slope[i] = among / rank**2 / sum(positive)
    after = ranks([s + lambda_val * number for s, number in zip(shifted, slope, strict=True)])
    return [(a - b) / lambda_val for a, b in zip(after, before, strict=True)]


@pytest.mark.parametrize(("lambda_val", "margin"), [(20.0, 0.0), (100.0, 0.4), (1000.0, 0.0)])
def test_the_gradient_is_the_interpolation(lambda_val: float, margin: float) -> None:
    scores = rand(N, CLASSES).requires_grad_(True)
    (gradient,) = torch.autograd.grad(3 * ap_loss(scores, LABELS, lambda_val=lambda_val, margin=margin), scores)
    assert (gradient[:, -1] == 0).all()
    for c in range(CLASSES - 1):
        expected = naive_gradient(scores[:, c].tolist(), (c == LABELS).tolist(), lambda_val, margin)
        assert any(expected)
        # Three classes are averaged: the loss is tripled, after its scores were moved.
        assert gradient[:, c].tolist() == pytest.approx(expected)


@pytest.mark.outcome
def test_following_the_gradient_ranks_the_positives_first() -> None:
    left = []
    for seed in range(5):
        scores = rand(N, CLASSES, seed=seed).requires_grad_(True)
        optimizer = torch.optim.SGD([scores], lr=10.0)
        first = float(ap_loss(scores, LABELS, margin=0.0).detach())
        for _ in range(100):
            optimizer.zero_grad()
            ap_loss(scores, LABELS, lambda_val=1000.0).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        left.append(float(ap_loss(scores, LABELS, margin=0.0).detach()) / first)
    assert np.mean(left) < 0.5  # at worst 0.04 ± 0.03


def test_background_alone_has_no_loss_but_a_gradient_and_settings_have_ranges() -> None:
    scores = rand(3, 2).requires_grad_(True)
    loss = ap_loss(scores, torch.tensor([-1, -1, -1]))
    assert float(loss.detach()) == 0
    assert torch.equal(torch.autograd.grad(loss, scores)[0], torch.zeros_like(scores))
    assert_refused(lambda: ap_loss(scores, torch.tensor([0, 1, -1]), lambda_val=0.0), ValueError, "lambda_val", "0")
    assert_refused(lambda: ap_loss(scores, torch.tensor([0, 1, -1]), margin=-1.0), ValueError, "margin", "-1")


def test_a_detector_can_have_it_in_place_of_the_cross_entropy() -> None:
    pytest.importorskip("torchvision")
    from metricopt_ext.detection.torchvision_toolkit import TorchvisionToolkit

    entropy = TorchvisionToolkit(min_size=64, max_size=64, width=16, head=32)
    model: Any = entropy.build(CLASSES, seed=0)
    rng = torch.Generator().manual_seed(0)
    corners = 20 * torch.rand(6, 2, generator=rng)
    no, boxes = torch.zeros(6, dtype=torch.bool), torch.cat([corners, corners + 20], dim=1)
    truth = Annotated(0, Path("none"), 64, 64, boxes, torch.arange(6) % CLASSES, no, no)
    image = torch.randint(256, (3, 64, 64), generator=rng, dtype=torch.uint8)

    logits: list[Tensor] = []
    sampled: list[Tensor] = []
    heads = model.roi_heads
    select = heads.select_training_samples

    def spy(*args: Any) -> Any:
        chosen = select(*args)
        sampled.extend(chosen[2])
        return chosen

    heads.select_training_samples = spy
    heads.box_predictor.register_forward_hook(lambda module, inputs, outputs: logits.append(outputs[0]))
    losses = []
    for toolkit in (entropy, replace(entropy, classification_loss="ap")):
        torch.manual_seed(0)
        losses.append(toolkit.loss(model, [Example(image, truth)]))
    assert torch.equal(logits[0], logits[1])
    expected = ap_loss(logits[1].log_softmax(1)[:, 1:], sampled[1] - 1)
    assert 0 < float(expected.detach()) < 1
    torch.testing.assert_close(losses[1] - losses[0], expected - F.cross_entropy(logits[0], sampled[0]))
    (gradient,) = torch.autograd.grad(losses[1], heads.box_predictor.cls_score.weight)
    assert (gradient != 0).any()
