"""What a first batch shows of phi: layers that act on nothing are refused, models that return other forms are not."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers.refusals import assert_named, assert_refused, assert_warned
from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film, attach_input_bias, attach_outputs
from metricopt_ext.adapters.effect import check_effect
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
    "probabilities": ("body head", lambda m, x, h: m.head(h).softmax(1)),
    "scaled up": ("body head", lambda m, x, h: F.interpolate(m.head(h)[:, :, None], scale_factor=2)),
    "a mean over views": ("body head", lambda m, x, h: m.head(torch.stack([h, h + 1])).mean(0)),
    "an object": ("body head", lambda m, x, h: SimpleNamespace(logits=m.head(h))),
    "a sum of heads": ("body head wide", lambda m, x, h: m.wide(x) + m.head(h)),
    "an auxiliary head that is defined before": ("body aux head", lambda m, x, h: {"a": m.head(h), "b": m.aux(h)}),
    "two probabilities of a logit": ("body binary", lambda m, x, h: torch.cat([m.binary(h), -m.binary(h)], 1).exp()),
    "saturated probabilities": ("body head", lambda m, x, h: (m.head(h) + X.new_tensor([0, 90, 150])).softmax(1)),
    "masked": ("body head", lambda m, x, h: m.head(h).masked_fill(X[:, :3] > 1, -torch.inf)),
    "labels besides": ("body head", lambda m, x, h: {"logits": m.head(h), "labels": m.head(h).argmax(1)}),
}  # fmt: skip


@pytest.mark.parametrize("temperature", [False, True])
@pytest.mark.parametrize(("order", "returns"), FINE.values(), ids=FINE)
def test_offsets_of_what_is_returned_are_fine(order: str, returns: Callable[..., Any], temperature: bool) -> None:
    check(attach_outputs(Model(order, returns), Outputs(temperature=temperature)))
    check(attach_film(Model(order, returns), "norm", dim=3, outputs=Outputs()))


@pytest.mark.parametrize("hidden", [6, 3])
def test_a_head_that_is_defined_before_the_body(hidden: int) -> None:
    """Offsets of hidden units move what is returned, and may even be as many as the classes."""
    names = ("outputs", "body", hidden, "8 x 3", "Outputs(layer='head')", "example=inputs")
    for attach in (attach_outputs, lambda model: attach_film(model, dim=2, outputs=Outputs())):
        with pytest.raises(AdapterError) as caught:
            check_effect(attach(Model("head body", hidden=hidden)), first_output, lambda: X)
        assert_named(caught, *names)
    check(attach_outputs(Model("head body", hidden=hidden), Outputs("head")))
    check(attach_outputs(Model("head body", hidden=hidden), example=X))


@pytest.mark.parametrize("returns", [None, lambda m, x, h: m.head(h + 0 * m.aux(h).detach().sum())])
def test_an_auxiliary_head_that_does_not_act(returns: Any) -> None:
    called = returns is not None
    why = "whose output is 8 x 3" if called else "which was not called on the first batch"
    names = ("aux", why, "8 x 3", "head")
    assert_refused(lambda: check(attach_outputs(Model("body head aux", returns))), AdapterError, *names)
    # named, but without an effect
    assert_refused(
        lambda: check(attach_outputs(Model("body head aux", returns), Outputs("aux"))), AdapterError, "aux", "Outputs"
    )


def test_logits_that_no_layer_gives() -> None:
    model = Model("body", lambda m, x, h: h @ torch.ones(6, 10).cumsum(0).cumsum(1))
    assert_refused(lambda: check(attach_outputs(model)), AdapterError, "8 x 6", "8 x 10")
    check(attach_outputs(model_of(model), Outputs("body")))  # its user's to choose


def model_of(model: Any) -> nn.Module:
    """The same model without an adapter."""
    return Adapter(model).remove()


def test_a_named_layer_of_hidden_units_is_warned_of() -> None:
    adapter = attach_outputs(Model("head body"), Outputs("body"))
    assert_warned(lambda: check_effect(adapter, first_output, lambda: X), "body", "8 x 3", "head")


def test_a_class_that_is_cut_off_has_no_offset() -> None:
    model = Model("body five", lambda m, x, h: m.five(h)[:, :3])
    assert_refused(lambda: check(attach_outputs(model)), AdapterError, "five", "8 x 5")
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
    assert_refused(lambda: check(attach_outputs(whole(Model("head body"))), loss), AdapterError, "net.body", "net.head")


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

    made = task(attach_outputs(Model()))
    made.copied().judged_by(made.metric)
    assert len(calls) == 1
    assert_refused(lambda: task(attach_outputs(Model("head body"))), AdapterError, "body", "head")


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
    message = "coordinate 4 of phi moves no output on the first batch: it is the offset of class 4, on layer 'five',"
    assert_refused(lambda: check(attach_outputs(four, Outputs("five"))), AdapterError, message, "8 x 5")
    full = Model("body head", lambda m, x, h: m.head(h).clamp(-1, 0))
    nn.init.constant_(full.head.bias, 100.0)  # type: ignore[union-attr,arg-type]
    message = "coordinate 3 of phi moves no output on the first batch: it is the temperature, on layer 'head',"
    assert_refused(
        lambda: check(attach_outputs(full, Outputs("head", temperature=True))),
        AdapterError,
        message,
        "8 x 3",
        "outputs",
    )


@pytest.mark.parametrize(
    "attach",
    [
        lambda model: attach_film(model, "unused", dim=3),
        lambda model: attach_input_bias(model, "aux", dim=3),
    ],
)
def test_layers_that_are_not_called_are_refused(attach: Callable[[nn.Module], Adapter]) -> None:
    assert_refused(lambda: check(attach(Model("aux body head"))), AdapterError, "phi")
