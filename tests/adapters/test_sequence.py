"""Models cut in two before phi: both parts together are the whole."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.adapters.before_phi import cut_before_phi
from metricopt_ext.adapters.sequence import attributes_of, cut_at, modules_of, run


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.norm(self.first(x)).relu())


class Net(nn.Module):
    """Modules with functions, methods, shapes and a parameter between them; the last is defined first."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.stem = nn.Linear(3, 2), nn.Sequential(nn.Linear(4, 6), nn.ReLU())
        self.shift = nn.Parameter(torch.randn(6))
        self.blocks, self.dropout, self.unused = nn.Sequential(Block(), Block()), nn.Dropout(), nn.Linear(1, 1)

    def forward(self, x: Tensor, scale: float = 2.0) -> dict[str, Tensor]:
        h = self.blocks(torch.relu(self.stem(x) + self.shift) * scale)
        h = h.view(h.size(0), -1)[:, 1:4]
        return {"logits": self.head(self.dropout(torch.cat([h[:, :1], h[:, 1:]], dim=1)))}


class Branches(nn.Module):
    """Its way depends on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return self.body(h) if h.sum() > 0 else h


def net() -> Any:
    torch.manual_seed(0)
    return Net().eval()


@pytest.mark.parametrize("first", ["blocks", "blocks.1", "head"])
def test_both_parts_are_the_whole(first: str) -> None:
    model, x = net(), torch.randn(5, 4)
    cut = cut_at(model, first)
    for each in (cut, copy.deepcopy(cut), pickle.loads(pickle.dumps(cut))):
        kept = run(model, each.before, each.given, x, each.kept)
        assert torch.equal(run(model, each.after, each.kept, kept)["logits"], model(x)["logits"])
    assert set(modules_of(cut.before)).isdisjoint(modules_of(cut.after))
    assert modules_of(cut.after)[-1] == "head"
    assert attributes_of(cut.before) == ("shift",)
    assert attributes_of(cut.after) == ()


# --- Before phi ----------------------------------------------------------------------------------------------------


def adapted(*layers: str) -> Any:
    model = net()
    attach_film(model, list(layers), dim=2)
    return model


def before(model: Any) -> list[str] | None:
    cut = cut_before_phi(model)
    return None if cut is None else list(modules_of(cut.before))


def test_the_cut_is_as_late_as_one_tensor_does() -> None:
    assert before(adapted("head")) == ["stem", "blocks", "dropout"]
    assert before(adapted("blocks.1.norm")) == ["stem", "blocks.0"], "a block's input is needed after it, too"
    assert before(adapted("blocks.1.*", "head")) == ["stem", "blocks.0"], "whatever is defined first"
    assert before(adapted("blocks.*")) == ["stem"]


def test_there_is_no_cut_where_phi_acts_at_once_or_something_unknown_does() -> None:
    assert cut_before_phi(net()) is None, "no adapter"
    assert before(adapted("stem.0", "head")) is None
    for hooked in ("stem", "blocks.0.last", ""):
        model = adapted("head")
        model.get_submodule(hooked).register_forward_pre_hook(lambda module, inputs: inputs)
        assert before(model) is None
        model = adapted("head")
        model.get_submodule(hooked).register_forward_hook(lambda module, inputs, output: output)
        assert before(model) is None
    other = adapted("head")
    other.forward = lambda x: other.head(other.stem(x))
    assert before(other) is None


def test_there_is_no_cut_where_the_forward_pass_depends_on_the_data() -> None:
    model = Branches()
    attach_film(model, ["body"], dim=2)
    assert before(model) is None
    inner = nn.Sequential(Branches(), nn.Linear(4, 2)).eval()
    attach_film(inner, ["1"], dim=2)
    assert before(inner) == ["0"], "a module that is run as a whole"
