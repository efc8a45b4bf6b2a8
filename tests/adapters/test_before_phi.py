"""Models cut in two before phi: both parts together are the whole."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.refusals import assert_refused
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.adapters.before_phi import Cut, cut_before
from metricopt_ext.errors import AdapterError


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


def called(cut: Cut) -> list[str]:
    return [str(node.target) for node in cut.head.nodes if node.op == "call_module"]


@pytest.mark.parametrize("first", ["blocks", "blocks.1", "head"])
def test_both_parts_are_the_whole(first: str) -> None:
    model, x = net(), torch.randn(5, 4)
    cut = cut_before(model, first)
    for each in (cut, copy.deepcopy(cut), pickle.loads(pickle.dumps(cut))):
        for own in (model, copy.deepcopy(model)):
            with torch.no_grad():
                own.shift.add_(0.1)
                own.head.weight.add_(0.1)
            assert torch.equal(each.output(own, each.features(own, x))["logits"], own(x)["logits"])


def test_the_state_is_of_all_that_the_first_part_uses_alone() -> None:
    model = net()
    cut, seen = cut_before(model, "blocks.1"), list[str]()
    for tensor in (model.head.weight, model.blocks[1].norm.weight, model.shift, model.blocks[0].norm.weight):
        tensor.detach().add_(0.1)
        seen.append(cut.state(model))
    assert len(set(seen)) == 3
    assert seen[0] == seen[1]
    assert cut.state(copy.deepcopy(model)) == seen[-1]


# --- Where there is a cut ------------------------------------------------------------------------------------------


def adapted(*layers: str) -> Any:
    model = net()
    attach_film(model, list(layers), dim=2)
    return model


def test_the_cut_is_as_late_as_one_tensor_does() -> None:
    assert called(cut_before(adapted("head"), "head")) == ["stem", "blocks", "dropout"]
    block = cut_before(adapted("blocks.1.*", "head"), "blocks.1.norm")
    assert called(block) == ["stem", "blocks.0"], "a block's input is needed after it, too"


def test_there_is_no_cut_where_phi_acts_at_once_or_something_unknown_does() -> None:
    assert_refused(lambda: cut_before(adapted("stem.0", "head"), "stem.0"), AdapterError, "stem.0", "tensor")
    assert_refused(lambda: cut_before(adapted("stem.0", "head"), "head"), AdapterError, "Linear", "hooks")
    for hooked in ("stem", "blocks.0.last", ""):
        for kind in ("register_forward_pre_hook", "register_forward_hook"):
            model = adapted("head")
            module = model.get_submodule(hooked)
            getattr(module, kind)(lambda *given: None)
            assert_refused(lambda model=model: cut_before(model, "head"), AdapterError, type(module).__name__, "hooks")
    other = adapted("head")
    other.forward = lambda x: other.head(other.stem(x))
    assert_refused(lambda: cut_before(other, "head"), AdapterError, "Net", "forward pass")


def test_there_is_no_cut_where_the_forward_pass_depends_on_the_data() -> None:
    assert_refused(lambda: cut_before(Branches(), "body"), AdapterError, "torch.fx", "Branches", "body")
    inner = nn.Sequential(Branches(), nn.Linear(4, 2)).eval()
    assert called(cut_before(inner, "1")) == ["0"], "a module that is run as a whole"


class Shifted(Branches):
    """Makes a tensor of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.stem(x) - torch.tensor(0.5))


def test_there_is_no_cut_where_the_forward_pass_makes_a_tensor_and_the_model_stays_as_it_is() -> None:
    model = Shifted().eval()
    held = set(vars(model))
    assert_refused(lambda: cut_before(model, "body"), AdapterError, "torch.fx", "Shifted", "body")
    assert set(vars(model)) == held


class Second(nn.Module):
    """Uses what it is given besides."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None, scale: float = 2.0) -> Tensor:
        return self.body(self.stem(x) * mask) * scale


def test_there_is_no_cut_where_another_input_is_needed() -> None:
    assert_refused(lambda: cut_before(Second(), "body"), AdapterError, "body", "tensor")
    assert called(cut_before(adapted("blocks.0.norm"), "blocks")) == ["stem"], "whose default is a number"
