"""The Lovasz losses against the Jaccard loss of decisions, and against its extension written out."""

import numpy as np
import pytest
import torch
from torch import Tensor

from metricopt_ext.classification.lovasz import lovasz
from metricopt_ext.classification.metrics import METRICS

RNG = torch.Generator().manual_seed(0)
LABELS = torch.tensor([0, 1, 1, 0, 1, 0, 0])


def extension(errors: np.ndarray, positive: np.ndarray) -> float:
    """The sum over examples, by falling error, of the error times what this mistake adds to the Jaccard loss."""

    def jaccard_loss(mistaken: set[int]) -> float:
        truth = {int(i) for i in np.flatnonzero(positive)}
        return len(mistaken) / len(truth | mistaken) if mistaken else 0.0

    total, mistaken = 0.0, set[int]()
    for i in np.argsort(-errors, kind="stable"):
        total += errors[i] * (jaccard_loss(mistaken | {int(i)}) - jaccard_loss(mistaken))
        mistaken |= {int(i)}
    return total


def test_the_hinge_is_the_extension_of_the_jaccard_loss() -> None:
    logits = torch.randn(7, generator=RNG, dtype=torch.float64)
    errors = np.maximum(0, 1 - logits.numpy() * (2 * LABELS.numpy() - 1))
    assert lovasz(logits, LABELS).item() == pytest.approx(extension(errors, LABELS.numpy() == 1), abs=1e-12)


def test_the_softmax_is_the_mean_extension_over_the_classes_present() -> None:
    logits, labels = torch.randn(7, 4, generator=RNG, dtype=torch.float64), torch.tensor([0, 2, 2, 0, 1, 0, 1])
    p = logits.softmax(1).numpy()
    expected = [extension(np.abs((labels == k).numpy() - p[:, k]), (labels == k).numpy()) for k in range(3)]
    assert lovasz(logits, labels).item() == pytest.approx(np.mean(expected), abs=1e-12)


@pytest.mark.parametrize("flips", [[], [0], [1, 3], [0, 1, 2, 3, 4, 5, 6]])
def test_of_whole_errors_it_is_the_metric(flips: list[int]) -> None:
    signs = 2.0 * LABELS - 1
    signs[flips] *= -1
    decided = 1e3 * torch.stack([-signs, signs], 1)  # probabilities of 0 and 1
    expected = 1 - METRICS["mean_iou"].function(decided, LABELS)
    assert lovasz(decided, LABELS).item() == pytest.approx(expected, abs=1e-6)
    # Each mistake of logits -1 and 1 has an error of 2.
    assert lovasz(signs, LABELS).item() == pytest.approx(2 - 2 * METRICS["jaccard"].function(signs, LABELS), abs=1e-6)


@pytest.mark.parametrize("shape", [(7,), (7, 3)])
def test_gradients_are_right_and_computed_for_many_at_once(shape: tuple[int, ...]) -> None:
    logits = torch.randn(shape, generator=RNG, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: lovasz(x, LABELS), logits.requires_grad_())
    many: Tensor = torch.stack([logits, logits.flip(0)]).detach()
    together = torch.func.vmap(lovasz, (0, None))(many, LABELS)
    assert torch.allclose(together, torch.stack([lovasz(each, LABELS) for each in many]), rtol=0, atol=1e-12)
