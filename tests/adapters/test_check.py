"""What a first batch or an example shows of phi and of the layer of the logits, for outputs of every form."""

import warnings
from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers.refusals import assert_named, assert_refused, assert_warned
from helpers.tensors import rand32
from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film, attach_input_bias, attach_outputs
from metricopt_ext.adapters.check import check_effect
from metricopt_ext.adapters.signature import Outputs
from metricopt_ext.errors import AdapterError, WeightsError
from metricopt_ext.tasks.batches import TensorBatches
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = torch.arange(8) % 3


class Model(nn.Module):
    """Two norms, one of which is not called, and three linear layers in the order of their definition."""

    def __init__(self, order: str = "body head", returns: Callable[..., Any] | None = None, hidden: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        made = {
            "body": nn.Linear(4, hidden),
            "head": nn.Linear(hidden, 3),
            "aux": nn.Linear(hidden, 3),
            "wide": nn.Linear(4, 3),
            "binary": nn.Linear(hidden, 1),
            "five": nn.Linear(hidden, 5),
        }
        for name in order.split():
            self.add_module(name, made[name])
        self.norm, self.unused = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.returns = returns or (lambda model, x, h: model.head(h))

    def forward(self, x: Tensor) -> Any:
        return self.returns(self, x, self.norm(self.body(x)).relu())


def check(adapter: Adapter, loss: Callable[..., Tensor] | None = None) -> None:
    """Check the effect as a task does, and that no warning comes."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_effect(adapter, loss or first_output, lambda: X)


def first_output(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x)
    while not isinstance(output, Tensor):
        output = next(iter(output.values() if isinstance(output, dict) else vars(output).values()))
    return output.float().square().sum()


FINE: dict[str, tuple[str, Callable[..., Any]]] = {
    "logits": ("body head", lambda m, x, h: m.head(h)),
    "scaled up": ("body head", lambda m, x, h: F.interpolate(m.head(h)[:, :, None], scale_factor=2)),
    "one logit without an axis": ("body binary", lambda m, x, h: m.binary(h).squeeze(1)),
    "a mean over views": ("body head", lambda m, x, h: m.head(torch.stack([h, h + 1])).mean(0)),
    "an object": ("body head", lambda m, x, h: SimpleNamespace(logits=m.head(h))),
    "a sum of heads": ("body head wide", lambda m, x, h: m.wide(x) + m.head(h)),
    "an auxiliary head that is defined before": ("body aux head", lambda m, x, h: {"a": m.head(h), "b": m.aux(h)}),
    "masked": ("body head", lambda m, x, h: m.head(h).masked_fill(X[:, :3] > 1, -torch.inf)),
    "labels besides": ("body head", lambda m, x, h: {"logits": m.head(h), "labels": m.head(h).argmax(1)}),
    "in half precision": ("body wide head", lambda m, x, h: (30 * m.wide(x) + m.head(h)).bfloat16().float()),
    "without gradients": ("body head", lambda m, x, h: m.head(h).detach()),
    "losses": ("body head", lambda m, x, h: {"loss": m.head(h).softmax(1)[:, 0].mean()}),
}  # fmt: skip

PROBABILITIES: dict[str, tuple[str, Callable[..., Any]]] = {
    "of classes": ("body head", lambda m, x, h: m.head(h).softmax(1)),
    "two of a logit": ("body binary", lambda m, x, h: torch.cat([m.binary(h), -m.binary(h)], 1).exp()),
    "saturated": ("body head", lambda m, x, h: (m.head(h) + X.new_tensor([0, 90, 150])).softmax(1)),
}


@pytest.mark.parametrize("temperature", [False, True])
@pytest.mark.parametrize(("order", "returns"), FINE.values(), ids=FINE)
def test_offsets_of_what_is_returned_are_fine(order: str, returns: Callable[..., Any], temperature: bool) -> None:
    check(attach_outputs(Model(order, returns), Outputs(temperature=temperature)))
    check(attach_film(Model(order, returns), "norm", dim=3, outputs=Outputs(scale=0.01)))


@pytest.mark.parametrize("temperature", [False, True])
@pytest.mark.parametrize(("order", "returns"), PROBABILITIES.values(), ids=PROBABILITIES)
def test_probabilities_need_the_name_of_the_layer(order: str, returns: Callable[..., Any], temperature: bool) -> None:
    """Their user may want offsets of the logits behind them, or may not know that these are no logits."""
    layer = order.split()[-1]
    guessed = attach_outputs(Model(order, returns), Outputs(temperature=temperature))
    assert_refused(lambda: check(guessed), AdapterError, layer, "Outputs(layer=")
    check(attach_outputs(Model(order, returns), Outputs(layer, temperature=temperature)))


@pytest.mark.parametrize("hidden", [6, 3])
def test_a_head_that_is_defined_before_the_body(hidden: int) -> None:
    """Offsets of hidden units move what is returned, and may even be as many as the classes."""
    names = ("outputs", "body", "Outputs(layer=", "example=inputs")
    for attach in (attach_outputs, lambda model: attach_film(model, dim=2, outputs=Outputs())):
        with pytest.raises(AdapterError) as caught:
            check_effect(attach(Model("head body", hidden=hidden)), first_output, lambda: X)
        assert_named(caught, *names)
    check(attach_outputs(Model("head body", hidden=hidden), Outputs("head")))
    check(attach_outputs(Model("head body", hidden=hidden), example=X))


@pytest.mark.parametrize("returns", [None, lambda m, x, h: m.head(h + 0 * m.aux(h).detach().sum())])
def test_an_auxiliary_head_that_does_not_act(returns: Any) -> None:
    assert_refused(lambda: check(attach_outputs(Model("body head aux", returns))), AdapterError, "aux", "Outputs")
    # named, but without an effect
    assert_refused(
        lambda: check(attach_outputs(Model("body head aux", returns), Outputs("aux"))), AdapterError, "aux", "Outputs"
    )


def test_logits_that_no_layer_gives() -> None:
    model = Model("body", lambda m, x, h: h @ torch.ones(6, 10).cumsum(0).cumsum(1))
    assert_refused(lambda: check(attach_outputs(model)), AdapterError, "body", "Outputs(layer=")
    check(attach_outputs(model_of(model), Outputs("body")))  # its user's to choose


def model_of(model: Any) -> nn.Module:
    """The same model without an adapter."""
    return Adapter(model).remove()


def test_a_layer_that_was_named_is_its_user_s_to_choose() -> None:
    check(attach_outputs(Model("head body"), Outputs("body")))


def test_a_class_that_is_cut_off_has_no_offset() -> None:
    model = Model("body five", lambda m, x, h: m.five(h)[:, :3])
    assert_refused(lambda: check(attach_outputs(model)), AdapterError, "five", "Outputs(layer=")
    assert_refused(lambda: check(attach_outputs(model_of(model), Outputs("five"))), AdapterError)


def test_layers_whose_output_is_used_in_nothing() -> None:
    model = Model("body head", lambda m, x, h: m.head(h + 0 * m.unused(h).detach()))
    assert_refused(lambda: check(attach_film(model, "unused", dim=3)), AdapterError, "unused")
    nn.init.zeros_(model_of(model).head.weight)  # type: ignore[arg-type]
    assert_refused(lambda: check(attach_film(model, "norm", dim=3)), AdapterError, "phi", "norm")


def test_a_layer_that_is_not_called_beside_others_is_warned_of() -> None:
    assert_warned(lambda: check_effect(attach_film(Model(), dim=3), first_output, lambda: X), "layers", "unused", "phi")


def test_what_tells_nothing_is_left_to_the_search() -> None:
    adapter = attach_film(Model(), "unused", dim=3)
    check(adapter, lambda model, x: x.sum())  # without the model
    check(adapter, lambda model, x: model(x)[:0].sum() + model.absent)
    check_effect(adapter, first_output, lambda: X[:0])


def test_the_part_of_a_module_that_its_loss_calls_is_what_returns() -> None:
    """As a LightningModule's training step, which calls no forward of its own."""

    def whole(net: nn.Module) -> nn.Module:
        return nn.ModuleDict({"net": net, "criterion": nn.CrossEntropyLoss()})

    def loss(model: Any, x: Tensor) -> Tensor:
        return model["criterion"](model["net"](x), Y)

    check(attach_film(whole(Model()), "net.norm", dim=2, outputs=Outputs()), loss)
    assert_refused(
        lambda: check(attach_outputs(whole(Model("head body"))), loss), AdapterError, "net.body", "Outputs(layer="
    )


def test_a_check_leaves_everything_as_it_was() -> None:
    adapter = attach_film(Model().train(), "norm", dim=3)
    adapter.set_phi(torch.ones(3))
    state, drawn = {key: each.clone() for key, each in adapter.model.state_dict().items()}, torch.get_rng_state()
    check(adapter, lambda model, x: model(x + torch.rand(())).sum())
    assert all(torch.equal(each, state[key]) for key, each in adapter.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(each.grad is None for each in adapter.model.parameters())
    assert len(adapter.model.head._forward_hooks) == 0


def test_a_task_runs_its_first_batch_once() -> None:
    x, calls = torch.cat([X, X]), []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        calls.append(batch)
        return F.cross_entropy(model(batch[0]), batch[1])

    def task(adapter: Adapter) -> FinetuneTask:
        y = torch.arange(16) % 3
        metric = Metric(lambda: 0.0, maximize=True)
        return FinetuneTask(adapter, loss=loss, batches=TensorBatches(x, y, 4), metric=metric, population=1)

    made = task(attach_outputs(Model(), Outputs("head")))
    made.copied().judged_by(made.metric)
    assert len(calls) == 1
    task(attach_outputs(Model()))  # whose layer is a guess
    assert len(calls) == 1 + 2
    assert_refused(lambda: task(attach_outputs(Model("head body"))), AdapterError, "body", "Outputs(layer=")


@pytest.mark.parametrize("trace", [False, True])
def test_a_loss_that_changes_the_weights_is_refused(trace: bool) -> None:
    adapter = attach_outputs(Model())

    def loss(model: Any, batch: Any) -> Tensor:
        with torch.no_grad():
            (model.head.weight if trace else model.head.weight.data).clamp_(-0.1, 0.1)
        return F.cross_entropy(model(batch[0]), batch[1])

    assert_refused(lambda: check_effect(adapter, loss, lambda: (X, Y)), WeightsError, "head.weight")


def test_checkpointing_that_keeps_no_gradient_is_refused_with_the_remedy() -> None:
    def checkpointed(reentrant: bool) -> Model:
        return Model(
            returns=lambda m, x, h: m.head(checkpoint(lambda x: m.norm(m.body(x)).relu(), x, use_reentrant=reentrant))
        )

    check(attach_film(checkpointed(False), "norm", dim=3))
    assert_refused(
        lambda: check(attach_film(checkpointed(True), "norm", dim=3)), AdapterError, "Model", "use_reentrant=False"
    )


def test_one_coordinate_of_the_outputs_that_moves_nothing_is_named() -> None:
    four = Model("body five", lambda m, x, h: m.five(h)[:, :4])
    assert_refused(
        lambda: check(attach_outputs(four, Outputs("five"))), AdapterError, "coordinate 4", "five", "Outputs"
    )
    full = Model("body head", lambda m, x, h: m.head(h).clamp(-1, 0))
    nn.init.constant_(full.head.bias, 100.0)  # type: ignore[union-attr,arg-type]
    saturated = attach_outputs(full, Outputs("head", temperature=True))
    assert_refused(lambda: check(saturated), AdapterError, "coordinate 3", "head", "Outputs")


@pytest.mark.parametrize(
    "attach",
    [
        lambda model: attach_film(model, "unused", dim=3),
        lambda model: attach_input_bias(model, "aux", dim=3),
    ],
)
def test_layers_that_are_not_called_are_refused(attach: Callable[[nn.Module], Adapter]) -> None:
    assert_refused(lambda: check(attach(Model("aux body head"))), AdapterError, "phi")


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


def test_a_head_beside_the_returned_one_is_none_of_it() -> None:
    """As of torchvision's segmentation models, which call it last and return its output in as many classes."""

    def scaled(model: Any, h: Tensor, y: Tensor) -> Any:
        return {"out": F.interpolate(y[:, :, None], scale_factor=4), "aux": F.interpolate(model.aux(h)[:, :, None], 8)}

    assert attach_outputs(HeadFirst(scaled), example=rand32(5, 4)).layers == ["head"]


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
        ({"x": rand32(4, 3)},),
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
    with torch.no_grad():
        assert attach_outputs(model, example=rand32(5, 4)).remove() is model
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
