"""Modules hold again what they held, by the same objects; handles of hooks still remove them."""

import torch
from torch import nn

from metricopt_ext.utils.kept_modules import KeptModules


def test_what_was_added_taken_away_and_exchanged_is_put_back() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model[1].eval()
    model[0].bias.requires_grad_(False)
    handle = model[0].register_forward_hook(lambda module, args, output: output + 1)
    weight, norm = model[0].weight, model[1]
    content = weight.detach().clone()

    kept = KeptModules(model)
    model[0].register_forward_pre_hook(print)
    model[0].add_module("more", nn.ReLU())
    handle.remove()
    model.train()
    model.requires_grad_(True)
    model[1] = nn.Identity()
    model[0].weight = nn.Parameter(torch.zeros(3, 2))
    torch.set_grad_enabled(False)
    kept.put_back()

    assert torch.is_grad_enabled()
    assert (model.training, model[0].training, model[1].training) == (True, True, False)
    assert model[0].weight is weight
    assert model[1] is norm
    assert not model[0]._forward_pre_hooks
    assert not dict(model[0].named_children())
    assert [parameter.requires_grad for parameter in model.parameters()] == [True, False, True, True]
    x = torch.ones(1, 2)
    assert torch.equal(model[0](x), x @ content.T + model[0].bias + 1)
    handle.remove()
    assert torch.equal(model[0](x), x @ content.T + model[0].bias)
