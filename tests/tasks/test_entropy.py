"""The entropy of predictions, against closed forms, and what has none."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.refusals import assert_refused
from metricopt_ext.errors import AdapterError
from metricopt_ext.tasks.entropy import entropy, logits_of, refuse_probabilities


class Returning(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        (torch.zeros(3, 4), math.log(4)),
        (torch.log(torch.tensor([[0.5, 0.25, 0.25]])), 1.5 * math.log(2)),
        (torch.zeros(5), math.log(2)),  # one logit of two classes
        (torch.log(torch.tensor([3.0])), -0.75 * math.log(0.75) - 0.25 * math.log(0.25)),
        (torch.tensor([[0.0, 1000.0]]), 0.0),
        (torch.zeros(2, 3, 4, 5), math.log(3)),  # of pixels
    ],
)
def test_it_is_that_of_the_predicted_probabilities(logits: Tensor, expected: float) -> None:
    for output in (logits, {"out": logits}, {"logits": logits}, SimpleNamespace(logits=logits)):
        assert float(entropy(Returning(), output)) == pytest.approx(expected, abs=1e-6)


def test_its_gradient_is_that_of_finite_differences() -> None:
    logits = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: entropy(Returning(), x), logits)


@pytest.mark.parametrize("output", [[torch.zeros(2, 3)], None, torch.zeros(3, dtype=torch.long), {"boxes": 1}])
def test_what_returns_no_logits_has_none(output: Any) -> None:
    assert_refused(lambda: entropy(Returning(), output), AdapterError)


def test_as_many_logits_as_phi_has_offsets() -> None:
    assert logits_of(torch.zeros(2, 3, 4), 3).shape == (8, 3)
    assert_refused(lambda: logits_of(torch.zeros(2, 3), 2), AdapterError, "3", "phi", "2")


def test_probabilities_are_refused_and_logits_are_not() -> None:
    logits = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    for taken in (logits, logits.log_softmax(1), torch.rand(30, 4), logits[:, :1], torch.rand(5, 1), torch.zeros(0, 4)):
        refuse_probabilities(taken)
    for probabilities in (logits.softmax(1), logits.half().softmax(1), logits[:, :1].sigmoid()):
        with pytest.raises(AdapterError):
            refuse_probabilities(probabilities)
