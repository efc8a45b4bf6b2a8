"""Which layer gives what a model returns, for outputs of every form."""

from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.refusals import assert_refused
from helpers.tensors import rand32
from metricopt_ext.adapters.attach import attach_film, attach_input_bias, attach_outputs
from metricopt_ext.adapters.signature import Outputs
from metricopt_ext.errors import AdapterError


class HeadFirst(nn.Module):
    """A head that is defined before the body and called after it, an auxiliary one that is defined last."""

    def __init__(self, returns: Callable[..., Any], hidden: int = 6) -> None:
        super().__init__()
        self.head, self.body, self.norm = nn.Linear(hidden, 3), nn.Linear(4, hidden), nn.LayerNorm(hidden)
        self.unused_norm, self.aux = nn.LayerNorm(hidden), nn.Linear(hidden, 3)
        self.returns = returns

    def forward(self, x: Tensor) -> Any:
        features = self.norm(self.body(x)).relu()
        return self.returns(self, features, self.head(features))


@dataclass
class Output:
    loss: Tensor
    logits: Tensor
    hidden_states: tuple[Tensor, ...]


Named = namedtuple("Named", ["logits", "aux_logits"])

RETURNS: dict[str, Callable[..., Any]] = {
    "tensor": lambda model, h, y: y,
    "log-probabilities": lambda model, h, y: y.log_softmax(1),
    "probabilities": lambda model, h, y: y.softmax(1),
    "scaled up": lambda model, h, y: F.interpolate(y[:, :, None], scale_factor=4),
    "tuple": lambda model, h, y: (y, h),
    "features first": lambda model, h, y: (h, y),
    "auxiliary after it": lambda model, h, y: (y, model.aux(h)),
    "auxiliary for nothing": lambda model, h, y: y if model.aux(h).sum() < torch.inf else h,
    "dict": lambda model, h, y: {"features": h, "scores": y},
    "named": lambda model, h, y: Named(y, model.aux(h)),
    "dataclass": lambda model, h, y: Output(y.sum(), y, (h, model.body.weight)),
    "object": lambda model, h, y: SimpleNamespace(logits=y, labels=y.argmax(1)),
    "in a list of dicts": lambda model, h, y: [{"logits": y}],
}


@pytest.mark.parametrize("hidden", [6, 3])
@pytest.mark.parametrize("returns", RETURNS.values(), ids=RETURNS)
def test_the_layer_that_gives_the_logits_is_found(returns: Callable[..., Any], hidden: int) -> None:
    model, x = HeadFirst(returns, hidden), rand32(5, 4)
    assert attach_outputs(model, example=x).layers == ["head"]


class Segmenter(nn.Module):
    """Logits of a 1 x 1 convolution, in a model that has a linear layer as well."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.classifier, self.gate = nn.Conv2d(2, 6, 3), nn.Conv2d(6, 4, 1), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x).relu()
        h = h * self.gate(h.mean((2, 3))).sigmoid()[:, :, None, None]
        return F.interpolate(self.classifier(h), size=x.shape[-2:], mode="bilinear")


def test_a_convolution_may_give_the_logits() -> None:
    assert attach_outputs(Segmenter(), example=rand32(2, 2, 9, 9)).layers == ["classifier"]


class Inputs(nn.Module):
    """A model of two inputs, or of one mapping of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, first: Any, second: Any = 0.0) -> Tensor:
        x = first["x"] if isinstance(first, dict) else first
        return self.linear(x + second)


@pytest.mark.parametrize(
    "example",
    [
        rand32(4, 3),
        (rand32(4, 3), rand32(4, 3)),
        {"first": rand32(4, 3)},
        {"x": rand32(4, 3)},
        UserDict(first=rand32(4, 3)),
    ],
)
def test_forms_of_an_example(example: Any) -> None:
    assert attach_outputs(Inputs(), example=example).layers == ["linear"]


@pytest.mark.parametrize("example", [(rand32(4, 3), rand32(4, 3), rand32(4, 3)), rand32(4, 7), "text", [rand32(4, 3)]])
def test_an_example_on_which_the_model_fails(example: Any) -> None:
    model = Inputs()
    assert_refused(lambda: attach_outputs(model, example=example), AdapterError, "Inputs")
    assert not hasattr(model, "metricopt")
    assert not any(len(module._forward_hooks) for module in model.modules())


def test_an_example_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)).train()
    state, drawn = {key: each.clone() for key, each in model.state_dict().items()}, torch.get_rng_state()
    attach_film(model, dim=2, outputs=Outputs(), example=rand32(5, 4)).remove()
    assert all(torch.equal(each, state[key]) for key, each in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(module.training for module in model.modules())
    assert all(each.requires_grad and each.grad is None for each in model.parameters())


def test_layers_that_an_example_does_not_call() -> None:
    x = rand32(5, 4)
    assert attach_film(HeadFirst(RETURNS["tensor"]), dim=2, example=x).layers == ["norm"]
    assert attach_input_bias(HeadFirst(RETURNS["tensor"]), dim=2, example=x).layers == ["head"]
    for attach in (
        lambda model: attach_film(model, ["norm", "unused_norm"], example=x),
        lambda model: attach_input_bias(model, "aux", example=x),
        lambda model: attach_outputs(model, Outputs("aux"), example=x),
    ):
        with pytest.raises(AdapterError):
            attach(HeadFirst(RETURNS["tensor"]))
