"""Norms of a model's own code, against what they compute by their definitions."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.refusals import assert_refused
from helpers.tensors import rand
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.adapters.foreign_norms import is_foreign_norm, scales_alone, weight_offset
from metricopt_ext.errors import AdapterError


class OwnRMSNorm(nn.Module):
    """As Llama's, Qwen's and T5's."""

    def __init__(self, size: int, offset: float = 0.0) -> None:
        super().__init__()
        self.weight, self.offset = nn.Parameter(rand(size, seed=3)), offset

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight + self.offset) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class OwnLayerNorm(nn.Module):
    """As DeBERTa's."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(rand(size, seed=3)), nn.Parameter(rand(size, seed=4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:], self.weight, self.bias)


class Gated(OwnRMSNorm):
    """A norm that needs more than its input."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * gate


class SquaredRMSNorm(OwnRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight**2 * x


class CurvedLayerNorm(OwnLayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


Gated.__name__ = "GatedRMSNorm"


@pytest.mark.parametrize(
    ("norm", "offset"),
    [(OwnRMSNorm(4), 0.0), (OwnRMSNorm(4, 1.0), 1.0), (nn.LayerNorm(4, bias=False).double(), 0.0)],
    ids=["Llama", "Gemma", "LayerNorm without a bias"],
)
def test_a_norm_without_a_bias_is_scaled_and_merged(norm: nn.Module, offset: float) -> None:
    model = nn.Sequential(nn.Linear(4, 4).double(), norm, nn.Linear(4, 2).double())
    x, phi = rand(5, 3, 4), rand(3, seed=2)
    plain = norm(model[0](x)).detach()
    adapter = attach_film(model, dim=3, seed=4)
    assert adapter.layers == ["1"]
    assert weight_offset(norm) == offset
    (modulation,) = [each for _, each in adapter.modulations()]
    adapter.set_phi(phi)
    expected = model[2](plain * (1 + modulation.A @ phi)).detach()
    torch.testing.assert_close(model(x).detach(), expected, rtol=1e-12, atol=1e-12)
    keys = list(adapter.base_state_dict())
    torch.testing.assert_close(adapter.merge()(x).detach(), expected, rtol=1e-12, atol=1e-12)
    assert list(model.state_dict()) == keys


def test_a_norm_with_a_bias_is_modulated_along_the_last_axis() -> None:
    norm = OwnLayerNorm(4)
    model = nn.Sequential(norm, nn.Linear(4, 2).double())
    x, phi = rand(5, 3, 4), rand(3, seed=2)
    plain = norm(x).detach()
    adapter = attach_film(model, dim=3)
    (film,) = [each for _, each in adapter.modulations()]
    adapter.set_phi(phi)
    expected = model[1](plain * (1 + film.A @ phi) + film.B @ phi).detach()
    torch.testing.assert_close(model(x).detach(), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(adapter.merge()(x).detach(), expected, rtol=1e-12, atol=1e-12)


def test_norms_without_a_bias_are_left_where_others_have_one() -> None:
    model = nn.Sequential(OwnRMSNorm(4), OwnLayerNorm(4), nn.RMSNorm(4))
    assert attach_film(model, dim=2).layers == ["1"]
    assert attach_film(nn.Sequential(OwnRMSNorm(4), nn.RMSNorm(4)), dim=2).layers == ["0", "1"]


@pytest.mark.parametrize(
    ("norm", "names"),
    [
        (Gated(4), ("output",)),
        (SquaredRMSNorm(4), ("output",)),
        (CurvedLayerNorm(4), ()),
    ],
)
def test_norms_that_phi_can_not_be_folded_into_are_refused_if_named_and_left_out_if_not(
    norm: nn.Module, names: tuple[str, ...]
) -> None:
    assert_refused(lambda: attach_film(nn.Sequential(norm), "0"), AdapterError, *names)
    assert attach_film(nn.Sequential(norm, nn.LayerNorm(4)), dim=2).layers == ["1"]


def test_names_alone_make_no_norm() -> None:
    def named(name: str, **attributes: Any) -> nn.Module:
        module = type(name, (nn.Module,), {})()
        for key, value in attributes.items():
            setattr(module, key, value)
        return module

    weight = nn.Parameter(torch.ones(3))
    assert is_foreign_norm(named("MyRMSNorm", weight=weight))
    assert is_foreign_norm(named("RmsNorm", weight=weight, bias=None))
    assert not is_foreign_norm(named("MyRMSNorm"))
    assert not is_foreign_norm(named("MyRMSNorm", weight=nn.Parameter(torch.ones(3, 2))))
    assert not is_foreign_norm(named("MyRMSNorm", weight=weight, inner=nn.Linear(2, 2)))
    assert not is_foreign_norm(named("LayerNormLSTM", weight=weight))
    assert not is_foreign_norm(nn.LayerNorm(3))
    assert scales_alone(nn.RMSNorm(3))
    assert scales_alone(nn.LayerNorm(3, bias=False))
    assert not scales_alone(nn.LayerNorm(3))
    assert not scales_alone(nn.LayerNorm(3, elementwise_affine=False))


def test_an_interruption_is_passed_on_and_leaves_the_norm_as_it_was() -> None:
    class Interrupted(OwnRMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            self.weight, self.seen = nn.Parameter(x.new_zeros(4)), True
            raise KeyboardInterrupt

    norm = Interrupted(4).train()
    weight = norm.weight
    with pytest.raises(KeyboardInterrupt):
        weight_offset(norm)
    assert norm.weight is weight
    assert norm.training
