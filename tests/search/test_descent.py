"""Descent in a ball, on bowls whose minimum is known."""

import pytest
import torch
from torch import Tensor

from helpers.tensors import rand
from metricopt_ext.search.descent import FIRST_STEP, STEPS, descend


def test_descent_stays_in_the_ball_and_never_gets_worse() -> None:
    centre, goal = rand(3, seed=2), rand(3, seed=3) + 4
    starts = centre + 0.3 * torch.nn.functional.normalize(rand(6, 3, seed=4), dim=1)

    def value(phi: Tensor) -> Tensor:
        return (phi - goal).square().sum(1) + torch.sin(9 * phi).sum(1)

    ends, values = descend(value, starts, centre, 0.5)
    assert float((ends - centre).norm(dim=1).max()) <= 0.5 * (1 + 1e-12)
    torch.testing.assert_close(values, value(ends), rtol=1e-12, atol=1e-12)
    assert (values < value(starts)).all()
    top = starts[:1]
    end, least = descend(lambda phi: -torch.ones_like(phi[:, 0]) + 0 * phi.sum(1), top, centre, 0.5)
    assert torch.equal(end, top)  # nowhere to go
    assert float(least) == -1


@pytest.mark.parametrize("inside", [True, False])
def test_descent_ends_at_the_minimum_of_a_bowl(inside: bool) -> None:
    """In the ball, or where the ball is closest to it; steps decay to 0 from a length of FIRST_STEP."""
    centre = torch.zeros(3, dtype=torch.float64)
    goal = torch.tensor([0.3, -0.2, 0.1] if inside else [3.0, -2.0, 1.0], dtype=torch.float64)
    ends, _ = descend(lambda phi: (phi - goal).square().sum(1), 0.1 * rand(5, 3), centre, 1.0)
    expected = goal if inside else goal / goal.norm()
    assert float((ends - expected).norm(dim=1).max()) < 2 * FIRST_STEP / STEPS
