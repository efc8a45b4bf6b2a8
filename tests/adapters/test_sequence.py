"""Models cut in two: both parts together are the whole, and what can't be cut is refused."""

import copy
import pickle
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from helpers.refusals import assert_refused
from metricopt_ext.adapters.sequence import attributes_of, cut_at, modules_of, run
from metricopt_ext.errors import AdapterError


class Net(nn.Module):
    """Modules with functions, methods, shapes and a parameter between them."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(6))
        self.stem = nn.Sequential(nn.Linear(4, 6), nn.ReLU())
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.norm, self.unused = nn.LayerNorm(6), nn.Linear(1, 1)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor, scale: float = 2.0) -> dict[str, Tensor]:
        h = torch.relu(self.stem(x) + self.shift) * 0.5
        h = self.norm(self.body(h) + h)
        h = h.view(h.size(0), -1)[:, 1:4]
        return {"logits": self.head(torch.cat([h[:, :1], h[:, 1:]], dim=1))}


@pytest.mark.parametrize("first", ["body", "norm", "head"])
def test_both_parts_are_the_whole(first: str) -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(5, 4)
    cut = cut_at(net, first)
    for each in (cut, copy.deepcopy(cut), pickle.loads(pickle.dumps(cut))):
        kept = run(net, each.before, each.given, x, each.kept)
        assert torch.equal(run(net, each.after, each.kept, kept)["logits"], net(x)["logits"])
    assert set(modules_of(cut.before)).isdisjoint(modules_of(cut.after))
    assert modules_of(cut.after)[-1] == "head"
    assert attributes_of(cut.before) == ("shift",)
    assert attributes_of(cut.after) == ()


def test_a_part_runs_under_vmap() -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(3, 5, 4)
    cut = cut_at(net, "norm")
    kept = torch.stack([run(net, cut.before, cut.given, each, cut.kept) for each in x])
    together = torch.func.vmap(lambda each: run(net, cut.after, cut.kept, each)["logits"])(kept)
    torch.testing.assert_close(together, torch.stack([net(each)["logits"] for each in x]))


def test_a_layer_within_another() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(Net().stem, Net().body), torch.randn(5, 4)
    cut = cut_at(net, "1.2")
    assert modules_of(cut.before) == ("0", "1.0", "1.1")
    assert torch.equal(run(net, cut.after, cut.kept, run(net, cut.before, cut.given, x, cut.kept)), net(x))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return self.body(h) if h.sum() > 0 else h


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class OfPairs(nn.Module):
    """Passes on a tuple with names, and has an argument with a default."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.joined, self.head = nn.Linear(4, 4), Joined(), nn.Linear(4, 2)

    def forward(self, x: Tensor, scale: float = 3.0) -> Tensor:
        h = self.stem(x) * scale
        return self.head(self.joined(Pair(h, x)))


class Joined(nn.Module):
    def forward(self, pair: Pair) -> Tensor:
        return pair.left - pair.right


def test_tuples_with_names_and_defaults_of_arguments_are_kept() -> None:
    torch.manual_seed(0)
    net, x = OfPairs(), torch.randn(5, 4)
    cut = cut_at(net, "head")
    kept = run(net, cut.before, cut.given, x, cut.kept)
    assert torch.equal(kept, 3 * net.stem(x) - x)
    assert torch.equal(run(net, cut.after, cut.kept, kept), net(x))


class Constant(nn.Module):
    def forward(self) -> Tensor:
        return torch.ones(2)


class WithoutInput(nn.Module):
    """A layer that is called on nothing, and an argument that has no default."""

    def __init__(self) -> None:
        super().__init__()
        self.constant, self.stem, self.body = Constant(), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return self.body(torch.where(x > 0, self.stem(x), rest)) * self.constant()


@pytest.mark.parametrize(
    ("model", "first", "names"),
    [
        (Net(), "boddy", ("boddy",)),
        (Net(), "unused", ("Net", "unused")),
        (Net(), "stem", ("stem",)),
        (Net(), "body.2", ("body.2", "mul")),
        (Branches(), "body", ("Branches",)),
        (WithoutInput(), "constant", ("constant",)),
        (WithoutInput(), "body", ("body", "_rest")),
    ],
)
def test_what_can_not_be_cut_is_refused(model: nn.Module, first: str, names: tuple[str, ...]) -> None:
    before = {name: each.training for name, each in model.named_modules()}
    assert_refused(lambda: cut_at(model, first), AdapterError, *names)
    assert before == {name: each.training for name, each in model.named_modules()}
