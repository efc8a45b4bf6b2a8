"""Large-margin softmax against pytorch-metric-learning's, and its one logit against the two that it stands for."""

import math

import pytest
import torch
import torch.nn.functional as F
from pytorch_metric_learning.losses import LargeMarginSoftmaxLoss
from torch import Tensor, nn

from helpers.refusals import assert_refused
from metricopt_ext.adapters.attach import attach_input_bias
from metricopt_ext.classification.large_margin import LargeMarginSoftmax, chebyshev
from metricopt_ext.errors import ConfigError
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask

X = torch.randn(12, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Net(nn.Module):
    def __init__(self, outputs: int = 3, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body, self.head = nn.Linear(5, 4), nn.Linear(4, outputs, bias)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x).tanh())
        return logits.squeeze(1) if logits.shape[1] == 1 else logits


@pytest.mark.parametrize("margin", [1, 2, 3, 4])
def test_it_is_that_of_pytorch_metric_learning(margin: int) -> None:
    net, labels = Net(bias=False), torch.arange(12) % 3
    theirs = LargeMarginSoftmaxLoss(3, 4, margin=margin).double()
    with torch.no_grad():
        theirs.W.copy_(net.head.weight.T)
    expected = theirs(net.body(X).tanh(), labels)
    found = LargeMarginSoftmax(margin)(net, (X, labels))
    assert found.item() == pytest.approx(expected.item(), abs=1e-10)
    if margin == 1:
        assert found.item() == pytest.approx(F.cross_entropy(net(X), labels).item(), abs=1e-12)


@pytest.mark.parametrize("margin", [1, 2, 4])
def test_one_logit_stands_for_two_of_half_its_row(margin: int) -> None:
    one, two, labels = Net(1), Net(2), torch.arange(12) % 2
    two.body.load_state_dict(one.body.state_dict())
    with torch.no_grad():
        two.head.weight.copy_(torch.cat([-one.head.weight, one.head.weight]) / 2)
        two.head.bias.copy_(torch.cat([-one.head.bias, one.head.bias]) / 2)
    found, expected = (LargeMarginSoftmax(margin)(net, (X, labels)) for net in (one, two))
    assert found.item() == pytest.approx(expected.item(), abs=1e-12)


def test_a_margin_never_lowers_the_loss() -> None:
    values = [LargeMarginSoftmax(margin)(Net(), (X, torch.arange(12) % 3)).item() for margin in (1, 2, 3, 4)]
    assert values == sorted(values)
    assert values[0] < values[-1]


def test_the_polynomial_is_the_cosine_of_the_multiple() -> None:
    for degree in (1, 2, 3, 5):
        for angle in (0.0, 0.3, 1.1, math.pi):
            assert chebyshev(math.cos(angle), degree) == pytest.approx(math.cos(degree * angle), abs=1e-12)


def test_phi_is_finetuned_by_it_one_by_one_and_as_a_population() -> None:
    net, labels = Net(), torch.arange(12) % 3
    loss = LargeMarginSoftmax(2)
    metric = Metric(lambda model: 0.5, maximize=True, name="told")
    adapter = attach_input_bias(net, dim=3)
    task = FinetuneTask(adapter, loss=loss, batches=lambda *key: (X, labels), metric=metric, population=3)
    phi = torch.randn(3, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for one, value, gradient in zip(phi, *task.loss_and_gradient(phi, 0, range(3), 0), strict=True):
        at = one.clone().requires_grad_()
        with adapter.using(at) as model:
            alone = loss(model, (X, labels))
        assert value.item() == pytest.approx(alone.item(), abs=1e-12)
        assert torch.allclose(gradient, torch.autograd.grad(alone, at)[0], rtol=0, atol=1e-10)


class Flat(nn.Module):
    """Its last linear layer does not give the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.body(x)[:, :3]
        return logits


@pytest.mark.parametrize("net", [nn.Identity(), Flat()])
def test_a_model_that_does_not_end_in_one_linear_layer_is_refused(net: nn.Module) -> None:
    assert_refused(lambda: LargeMarginSoftmax()(net, (X, torch.arange(12) % 3)), ConfigError)


def test_other_margins_are_refused() -> None:
    assert_refused(lambda: LargeMarginSoftmax(0), ValueError, "margin", "0", "1")
