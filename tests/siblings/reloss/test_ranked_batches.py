"""What a relational loss learns from: the random generator's distribution, and where each batch comes from."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from metricopt_ext.siblings.checkpoints import Checkpoints
from metricopt_ext.siblings.reloss.ranked_batches import (
    STREAM,
    BatchSource,
    RandomOutputs,
    slope_in_logits,
    true_class_log_probability,
)
from metricopt_ext.siblings.training import TrainingTask
from metricopt_ext.utils.seeding import generator


def test_it_is_the_negative_of_cross_entropy() -> None:
    rng = torch.Generator().manual_seed(0)
    scores, labels = torch.randn(20, 4, generator=rng).double(), torch.randint(4, (20,), generator=rng)
    assert torch.allclose(
        true_class_log_probability(scores, labels), -F.cross_entropy(scores, labels, reduction="none")
    )
    one, binary = scores[:, 0], labels % 2
    expected = -F.binary_cross_entropy_with_logits(one, binary.double(), reduction="none")
    assert torch.allclose(true_class_log_probability(one, binary), expected)


@pytest.mark.parametrize("outputs", [1, 2, 5])
def test_slopes_are_the_lengths_of_autograds_gradients(outputs: int) -> None:
    rng = torch.Generator().manual_seed(1)
    scores = torch.randn((7, outputs) if outputs > 1 else 7, generator=rng, dtype=torch.float64).requires_grad_()
    labels = torch.randint(max(2, outputs), (7,), generator=rng)
    (gradient,) = torch.autograd.grad(true_class_log_probability(scores, labels).exp().sum(), scores)
    expected = gradient.reshape(7, -1).norm(dim=1)
    assert torch.allclose(slope_in_logits(scores, labels), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("outputs", [1, 5])
def test_matched_labels_spread_the_accuracy_evenly(outputs: int) -> None:
    chance, batches = 1 / max(2, outputs), 400
    rng, accuracy = generator(1, "test"), []
    for _ in range(batches):
        scores, labels = RandomOutputs().draw(500, outputs, rng)
        best = (scores > 0).long() if outputs == 1 else scores.argmax(1)
        accuracy.append(float((best == labels).double().mean()))
    # Given the share u it is u + (1 - u) chance on average: uniform between chance and 1, but for a noise of 0.02.
    width = 1 - chance
    assert abs(np.mean(accuracy) - (1 + chance) / 2) < 4 * width / math.sqrt(12 * batches)
    assert abs(np.std(accuracy) - width / math.sqrt(12)) < 0.05 * width
    thirds = np.histogram(accuracy, bins=3, range=(chance, 1))[0] / batches
    assert np.abs(thirds - 1 / 3).max() < 4 * math.sqrt(2 / 9 / batches) + 0.02


def test_the_share_of_random_batches_is_p() -> None:
    for p in (0.0, 0.2, 1.0):
        found = BatchSource(9000, 1000, random=p).are_random(3).double().mean()
        assert abs(float(found) - p) <= 4 * math.sqrt(p * (1 - p) / 10_000)


@pytest.mark.parametrize("outputs", [1, 3])
def test_each_batch_is_of_its_generator_and_has_its_cost(
    outputs: int, training_task: Callable[..., TrainingTask], calls: Any
) -> None:
    task = training_task("model", outputs)
    source = BatchSource(9, 5, checkpoints=Checkpoints(4, lr=0.1, count=3))
    torch.manual_seed(0)
    state = {name: value.clone() for name, value in task.model.state_dict().items()}
    training, heldout = source.draw(task, 2)
    assert all(torch.equal(state[name], value) for name, value in task.model.state_dict().items())
    assert task.batch_metric.ledger.spent_on == {"reloss": 14}
    assert (calls.batch_metric, calls.metric) == (14, 0)
    assert training.probabilities.shape == (9, 12)
    assert heldout.probabilities.shape == (5, 12)

    torch.manual_seed(0)  # dropout while the network trains
    models = [
        {name: value.clone() for name, value in model.state_dict().items()}
        for model in source.checkpoints.models(task, 2)
    ]
    probabilities = torch.cat([training.probabilities, heldout.probabilities])
    slopes = torch.cat([training.slopes, heldout.slopes])
    costs, model, seen = torch.cat([training.costs, heldout.costs]), task.model.eval(), 0
    are_random = source.are_random(2).tolist()
    assert 0 < sum(are_random) < 14
    for row, is_random in enumerate(are_random):
        if is_random:
            scores, labels = source.outputs.draw(12, outputs, generator(2, "random outputs", row))
            scores = scores.double()
        else:
            model.load_state_dict(models[seen % 3])
            seen += 1
            x, labels = task.batches(2, STREAM, row)
            scores = model(x).detach()
        assert torch.allclose(probabilities[row], true_class_log_probability(scores, labels).exp())
        assert torch.allclose(slopes[row], slope_in_logits(scores, labels))
        decided = (scores > 0).long() if outputs == 1 else scores.argmax(1)
        assert float(costs[row]) == pytest.approx(float((decided != labels).double().mean()))
