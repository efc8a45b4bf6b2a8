"""Where a model is cut before phi: as late as one tensor does, and nowhere where something unknown acts before."""

from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.adapters.before_phi import cut_before_phi, why_uncut
from metricopt_ext.adapters.sequence import modules_of, run


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.norm(self.first(x)).relu())


class Net(nn.Module):
    """Blocks between two layers; the last one is defined first, and dropout changes nothing in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.stem = nn.Linear(4, 2), nn.Linear(3, 4)
        self.blocks, self.dropout = nn.Sequential(Block(), Block()), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.blocks(self.stem(x).tanh())))


def adapted(*layers: str) -> Any:
    torch.manual_seed(0)
    net = Net().eval()
    attach_film(net, list(layers), dim=2)
    return net


def before(net: Any) -> list[str] | None:
    cut = cut_before_phi(net)
    return None if cut is None else list(modules_of(cut.before))


def test_the_cut_is_as_late_as_one_tensor_does() -> None:
    assert before(adapted("head")) == ["stem", "blocks", "dropout"]
    assert before(adapted("blocks.1.norm")) == ["stem", "blocks.0"], "a block's input is needed after it, too"
    assert before(adapted("blocks.1.*", "head")) == ["stem", "blocks.0"], "whatever is defined first"
    assert before(adapted("blocks.*")) == ["stem"]


def test_both_parts_give_what_the_model_does() -> None:
    net, x = adapted("blocks.1.norm"), torch.rand(5, 3)
    cut = cut_before_phi(net)
    assert cut is not None
    features = run(net, cut.before, cut.given, x, cut.kept)
    assert torch.equal(run(net, cut.after, cut.kept, features), net(x))


def test_there_is_no_cut_where_phi_acts_at_once_or_something_unknown_does() -> None:
    assert cut_before_phi(Net()) is None, "no adapter"
    assert before(adapted("stem", "head")) is None
    for hooked in ("stem", "blocks.0.last", ""):
        net = adapted("head")
        net.get_submodule(hooked).register_forward_hook(lambda module, inputs, output: output + 1)
        assert before(net) is None
    other = adapted("head")
    other.forward = lambda x: other.head(other.stem(x))
    assert before(other) is None


def test_there_is_no_cut_where_the_forward_pass_depends_on_the_data() -> None:
    net = Forked()
    attach_film(net, ["net.head"], dim=2)
    assert before(net) is None
    inner = nn.Sequential(Forked(), nn.Linear(2, 2)).eval()
    attach_film(inner, ["1"], dim=2)
    assert before(inner) == ["0"], "a module that is run as a whole"


class Forked(nn.Module):
    """Its way depends on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x if x.sum() > 0 else -x)


class Twice(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, -x


class OfTheFirst(nn.BatchNorm1d):
    """A norm of the first of two tensors, or of one alone."""

    def forward(self, given: Any) -> Tensor:
        return super().forward(given[0] if isinstance(given, tuple) else given)


def test_why_there_is_no_cut_is_said() -> None:
    other, hooked = adapted("head"), adapted("head")
    other.forward = other.stem.forward
    assert why_uncut(other, "head") == "Net has another forward pass than its class"
    hooked.blocks[0].norm.register_forward_pre_hook(lambda module, inputs: None)
    assert why_uncut(hooked, "head") == "LayerNorm has hooks, of which nothing is known"
    assert why_uncut(Forked(), "net.head").startswith("Forked can't be cut at 'net.head': torch.fx can't trace its")
    pairs = nn.Sequential(nn.Linear(3, 4), Twice(), OfTheFirst(4), nn.Linear(4, 2)).eval()
    attach_film(pairs, "2", dim=2)
    assert why_uncut(pairs, "2") == "what comes before '2' is no single tensor"
