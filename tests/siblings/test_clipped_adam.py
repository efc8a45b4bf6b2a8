"""Adam after clipping, against torch's own."""

import pytest
import torch
from torch import nn

from helpers.refusals import assert_refused
from metricopt_ext.errors import AdapterError
from metricopt_ext.siblings.clipped_adam import ClippedAdam


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


@pytest.mark.parametrize("clip", [None, 1e-5, 0.3, 1e5])
def test_steps_are_those_of_torch(clip: float | None) -> None:
    x = torch.randn(20, 5, 3, dtype=torch.float64)
    ours, theirs = network(), network()
    reference = torch.optim.Adam(theirs.parameters(), 0.01)
    with ClippedAdam(ours.parameters(), 0.01, clip) as optimizer:
        for batch in x:
            optimizer.step(ours(batch).square().mean())
            reference.zero_grad()
            theirs(batch).square().mean().backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(theirs.parameters(), clip)
            reference.step()
            for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert torch.allclose(a, b, rtol=0, atol=1e-12)
    assert not torch.equal(ours[0].weight, network()[0].weight)


def test_afterwards_each_parameter_has_its_own_memory_even_after_an_error() -> None:
    net = network()

    def owners() -> set[int]:
        return {parameter.untyped_storage().data_ptr() for parameter in net.parameters()}

    def interrupted() -> None:
        with ClippedAdam(net.parameters(), 0.1) as optimizer:
            optimizer.step(net(torch.ones(2, 3, dtype=torch.float64)).sum())
            assert len(owners()) == 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    assert len(owners()) == 4


def test_a_parameter_that_the_loss_does_not_see_stays() -> None:
    net = network()
    before = net[2].weight.detach().clone()
    with ClippedAdam(net.parameters(), 0.1, 1.0) as optimizer:
        optimizer.step(net[0].weight.sum())
    assert torch.equal(net[2].weight, before)


def test_what_it_can_not_train_is_refused() -> None:
    net = network()
    for loss in (torch.tensor(1.0), torch.ones(1, requires_grad=True).sum()):
        with (
            ClippedAdam(net.parameters(), 0.1) as optimizer,
            pytest.raises(AdapterError),
        ):
            optimizer.step(loss)
    assert_refused(lambda: ClippedAdam([], 0.1), ValueError)
    assert_refused(lambda: ClippedAdam(net.parameters(), 0), ValueError, "lr", "0")
    assert_refused(lambda: ClippedAdam(net.parameters(), 0.1, -1), ValueError, "clip", "-1", "0")
