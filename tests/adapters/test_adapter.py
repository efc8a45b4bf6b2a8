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
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.errors import AdapterError

CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Adapter], str]] = {
    "tied": (Tied, lambda model: attach_film(model, "head", dim=2), "head.weight"),
    "computed": (
        lambda: nn.Sequential(nn.Embedding(7, 3), nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))),
        lambda model: attach_film(model, "1", dim=2),
        "1.weight",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_merging_where_it_would_be_wrong(case: str) -> None:
    make, attach, name = CASES[case]
    model, x = make(), torch.arange(7)
    adapter = attach(model)
    adapter.set_phi(torch.ones(adapter.dim))
    adapted = model(x)
    for merge in (adapter.check_merge, adapter.merge):
        assert_refused(merge, AdapterError, name)
    assert torch.equal(model(x), adapted)


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
