"""The scale of the logits' offsets, on models where the effect of each coordinate is known."""

import math

import pytest
import torch
from torch import Tensor, nn

from metricopt_ext.adapters.attach import attach_film, attach_input_bias
from metricopt_ext.adapters.signature import Outputs
from metricopt_ext.classification.probe import output_scale


class OneLogit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).squeeze(1)  # type: ignore[no-any-return]


def several(classes: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, classes))


def rounded(scale: float) -> float:
    return float(f"{scale:.2g}")


@pytest.mark.parametrize("outputs", [None, Outputs(scale=7.0, temperature=True)])
@pytest.mark.parametrize("classes", [2, 5])
def test_several_logits(classes: int, outputs: Outputs | None) -> None:
    """The logits are linear in phi: V (W x + b + C phi) + c, so their derivative is V C, whatever the input."""
    torch.manual_seed(0)
    model = several(classes).double()
    adapter = attach_input_bias(model, dim=3, outputs=outputs)
    effects = model[2].weight.detach() @ adapter.modulations()[0][1].C  # classes x 3
    effects = effects - effects.mean(0)
    rms = math.sqrt(float(effects.square().mean(0).mean()))
    model.train()
    scale = output_scale(adapter, torch.randn(20, 2).double())
    assert scale == rounded(3 * rms * math.sqrt(classes / (1 - 1 / classes)))
    assert scale != rounded(3 * rms)
    assert model.training

    offset = torch.eye(classes)[0].double() * scale  # what the scale is made for
    effect = float((offset - offset.mean()).square().mean().sqrt())
    assert effect == pytest.approx(3 * rms, rel=0.05)


def test_one_logit_has_no_mean_to_leave_out() -> None:
    torch.manual_seed(0)
    model = OneLogit().double()
    adapter = attach_input_bias(model, dim=3)
    effects = model.head.weight.detach() @ adapter.modulations()[0][1].C
    assert output_scale(adapter, torch.randn(20, 2).double()) == rounded(3 * float(effects.square().mean().sqrt()))


def test_film_is_measured_on_the_first_thousand_inputs() -> None:
    """FiLM on a linear body: logit V ((1 + A phi) h + B phi) + c, whose derivative depends on the input."""
    torch.manual_seed(0)
    model = several(3).double()
    adapter = attach_film(model, "0", dim=2)
    x = torch.randn(1500, 2).double()
    film = adapter.modulations()[0][1]
    h = (x[:1000] @ model[0].weight.T + model[0].bias).detach()
    slopes = torch.stack([(h * film.A[:, i] + film.B[:, i]) @ model[2].weight.T.detach() for i in range(2)])
    rms = float((slopes - slopes.mean(2, keepdim=True)).square().mean().sqrt())
    x[1000:] *= 100
    assert output_scale(adapter, x) == rounded(3 * rms * math.sqrt(3 / (1 - 1 / 3)))


def test_a_phi_without_an_effect_gives_a_scale_of_one() -> None:
    model = several(3)
    nn.init.zeros_(model[2].weight)
    assert output_scale(attach_input_bias(model, dim=2), torch.randn(20, 2)) == 1.0
