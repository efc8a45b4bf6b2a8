"""The handle on an adapter: what can't be merged, and whose handle it is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from helpers.architectures import Tied
from helpers.refusals import assert_refused
from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film, attach_input_bias, attach_outputs
from metricopt_ext.adapters.signature import Outputs
from metricopt_ext.errors import AdapterError

CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Adapter], str]] = {
    "tied": (Tied, lambda model: attach_film(model, "head", dim=2), "head.weight"),
    "computed": (
        lambda: nn.Sequential(nn.Embedding(7, 3), nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))),
        lambda model: attach_film(model, "1", dim=2),
        "1.weight",
    ),
}


def test_weights_that_are_quantised_are_refused_and_their_biases_move() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    for layer in model:
        layer.weight = nn.Parameter(torch.ones_like(layer.weight).to(torch.int8), requires_grad=False)
    assert_refused(lambda: attach_film(model, "0", dim=2), AdapterError, "0.weight", "quantised")
    assert_refused(lambda: attach_outputs(model, Outputs(temperature=True)), AdapterError, "1.weight", "quantised")
    adapter = attach_input_bias(model, dim=2, outputs=Outputs())
    adapter.set_phi(torch.ones(4))
    bias = model[1].bias.detach().clone()
    assert torch.equal(adapter.merge()[1].bias, bias + 1)


def test_an_rnn_has_gradients_and_no_dropout_where_its_mode_is_pinned() -> None:
    """cuDNN has no backward pass through one in evaluation mode, and a CPU does not tell."""
    model, seen = nn.Sequential(nn.LayerNorm(4), nn.LSTM(4, 4, num_layers=2, dropout=0.5)), list[Any]()
    attach_film(model, dim=2)
    model[1].register_forward_pre_hook(lambda rnn, _: seen.append((rnn.training, rnn.dropout)))
    for mode in (True, False):
        model.train(mode)(torch.rand(5, 2, 4))
        with torch.no_grad():
            model(torch.rand(5, 2, 4))
    assert seen == [(True, 0.0), (False, 0.0)] * 2
    assert (model[1].training, model[1].dropout) == (False, 0.5)


@pytest.mark.parametrize("case", CASES)
def test_weights_that_are_no_layer_s_own_are_refused(case: str) -> None:
    make, attach, name = CASES[case]
    model, x = make(), torch.arange(7)
    before = model(x)
    assert_refused(lambda: attach(model), AdapterError, name)
    assert torch.equal(model(x), before)
    assert all(each.requires_grad for each in model.parameters())


def test_the_handle_is_of_the_model_and_not_of_what_wraps_it(tuned: Callable[..., Adapter]) -> None:
    model = tuned().model
    for wrapped, attribute in [
        (torch.compile(model, backend="eager"), "_orig_mod"),
        (nn.DataParallel(model), "module"),
        (AveragedModel(model), "module"),
    ]:
        assert_refused(lambda wrapped=wrapped: Adapter(wrapped), AdapterError, attribute)
        assert Adapter(getattr(wrapped, attribute)).dim == 3


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_set_phi_takes_finite_numbers(wrong: float) -> None:
    adapter = attach_film(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)), dim=2)
    before = adapter.phi.detach().clone()
    assert_refused(lambda: adapter.set_phi(torch.tensor([0.5, wrong])), AdapterError, "phi", str(wrong))
    assert torch.equal(adapter.phi, before)
