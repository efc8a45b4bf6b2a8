"""What a start replaces in a model: every bit of it comes back, through copies and casts; lines of starts."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.refusals import assert_refused
from helpers.tensors import rand32
from metricopt_ext.adapters.adapter import FILE_FORMAT, Adapter
from metricopt_ext.adapters.attach import attach_film, load_adapter
from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.errors import AdapterError, FileFormatError
from metricopt_ext.utils.files import read_tensors, write_tensors
from metricopt_ext.utils.weights import same_bits


class Net(nn.Module):
    """Has BatchNorm, a buffer outside the state dict, and one matrix under two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm, self.head = nn.Embedding(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)
        self.head.weight = self.embedding.weight
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(x)))


X = torch.arange(5)


def start(shift: float = 0.1) -> Start:
    """Other statistics, one of them NaN's, a modulated weight and a tied one."""
    return Start(
        rand32(3),
        {
            "norm.running_mean": rand32(4, seed=2) + shift,
            "norm.running_var": torch.tensor([1.0, 2.0, math.nan, 0.5]),
            "norm.num_batches_tracked": torch.tensor(7),
            "norm.weight": rand32(4, seed=3),
            "head.weight": rand32(5, 4, seed=4),
        },
    )


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    assert [name for name, value in found.items() if not same_bits(value, expected[name])] == []


def expected_with(start: Start) -> dict[str, Tensor]:
    """Return a bare model's state with a start's tensors, written out."""
    state = bits(Net()) | dict(start.tensors)
    return state | {"embedding.weight": state["head.weight"]}


def base_of(adapter: Adapter) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in adapter.base_state_dict().items()}


def beyond(adapter: Adapter) -> dict[str, Tensor]:
    return {name: value for name, value in bits(adapter.model).items() if not name.startswith("metricopt.")}


@pytest.fixture
def adapter() -> Adapter:
    return attach_film(Net().eval(), dim=3)


def test_a_start_is_in_the_model_s_own_tensors(adapter: Adapter) -> None:
    model, tensors = adapter.model, {id(each) for each in adapter.model.state_dict(keep_vars=True).values()}
    adapter.apply(start())
    assert_same(beyond(adapter), expected_with(start()))
    assert_same(base_of(adapter), bits(Net()))
    assert {id(each) for each in model.state_dict(keep_vars=True).values()} == tensors
    assert model.head.weight is model.embedding.weight
    held = adapter.as_start()
    assert set(held.tensors) == {*start().tensors, "embedding.weight"} - {"head.weight"}  # the first of two names
    adapter.apply(Start(torch.zeros(3)))
    assert_same(beyond(adapter), bits(Net()))
    assert not adapter.as_start().tensors
    adapter.apply(held)
    assert_same(beyond(adapter), expected_with(start()))


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "double": lambda model: model.double(),
    "half and back": lambda model: model.half().float(),
    "a copy in bfloat16": lambda model: copy.deepcopy(model).bfloat16(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_remove_leaves_the_bare_model_s_bits_after(change: str, adapter: Adapter) -> None:
    adapter.apply(start())
    changed, bare = CHANGES[change](adapter.model), CHANGES[change](Net())
    with_start = Net()
    with_start.load_state_dict(expected_with(start()))
    theirs = Adapter(changed)
    assert_same(beyond(theirs), bits(CHANGES[change](with_start)))
    assert_same(base_of(theirs), bits(bare))
    assert changed.head.weight is changed.embedding.weight
    assert_same(bits(theirs.remove()), bits(bare))
    if changed is not adapter.model:
        assert_same(bits(adapter.remove()), bits(Net()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_remove_leaves_the_bare_model_s_bits_on_another_device(adapter: Adapter) -> None:
    adapter.apply(start())
    adapter.model.cuda()
    assert {value.device.type for value in adapter.base_state_dict().values()} == {"cuda"}
    adapter.apply(start(0.2))  # of tensors on the CPU
    assert_same(bits(adapter.remove()), bits(Net().cuda()))


def test_a_start_may_hold_the_model_s_own_tensors(adapter: Adapter) -> None:
    own = {name: value for name, value in adapter.model.named_buffers() if "norm.running" in name}
    adapter.apply(Start(adapter.phi, own, dict(Net().named_parameters())))
    assert not adapter.as_start().tensors  # the values are the base's
    adapter.apply(start())
    adapter.apply(Start(adapter.phi, own))
    assert set(adapter.as_start().tensors) == set(own)
    assert_same(bits(adapter.remove()), bits(Net()))


def test_what_a_diverged_training_left_is_put_back_too(adapter: Adapter) -> None:
    with torch.no_grad():
        adapter.phi.fill_(math.nan)
    with pytest.raises(KeyError), adapter.applied(Start(torch.zeros(3))):
        raise KeyError
    assert adapter.phi.isnan().all()


MEAN = {"norm.running_mean": torch.ones(4)}


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        (Start(torch.tensor([0, math.inf, 0]), MEAN), ("phi", "inf")),
        (Start(torch.zeros(3), {**MEAN, "scratch": torch.ones(2)}), ("scratch",)),
        (Start(torch.zeros(3), {**MEAN, "metricopt.phi": torch.ones(3)}), ("metricopt.phi",)),
        (Start(torch.zeros(3), {**MEAN, "head.bias": torch.ones(1)}), ("head.bias", "(5,)")),
        (Start(torch.zeros(3), {**MEAN, "head.bias": torch.ones(5).double()}), ("head.bias", "torch.float32")),
        (
            Start(torch.zeros(3), {**MEAN, "head.weight": torch.ones(5, 4), "embedding.weight": torch.zeros(5, 4)}),
            ("embedding.weight",),
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    wrong: Start, names: tuple[str, ...], adapter: Adapter
) -> None:
    adapter.apply(start())
    before, base = bits(adapter.model), base_of(adapter)
    assert_refused(lambda: adapter.apply(wrong), AdapterError, *names)
    assert_refused(lambda: adapter.applied(wrong).__enter__(), AdapterError, *names)
    assert_same(bits(adapter.model), before)
    assert_same(base_of(adapter), base)


@pytest.mark.parametrize(
    ("changed", "error", "names"),
    [
        ({"replaced.metricopt.phi": torch.ones(3)}, AdapterError, ("metricopt.phi",)),
        ({"replaced.head.bias": torch.ones(10**6)}, AdapterError, ("head.bias", "(1000000,)")),
        ({"phi": torch.tensor([0, math.nan, 0])}, AdapterError, ("phi",)),
        ({"phi": torch.zeros(3).long()}, FileFormatError, ("phi", "torch.int64")),
    ],
)
def test_a_file_that_does_not_fit_changes_nothing(
    changed: dict[str, Tensor], error: type[Exception], names: tuple[str, ...], adapter: Adapter, tmp_path: Path
) -> None:
    path = tmp_path / "adapter.safetensors"
    adapter.apply(start())
    adapter.save(path)
    tensors, described = read_tensors(path, FILE_FORMAT)
    write_tensors(path, {**tensors, **changed}, FILE_FORMAT, described)
    bare = Net().eval()
    for load, model in ((adapter.load, adapter.model), (lambda path: load_adapter(bare, path), bare)):
        before = bits(model)
        assert_refused(lambda load=load: load(path), error, *names)
        assert_same(bits(model), before)
    assert [set(vars(module)) for module in bare.modules()] == [set(vars(module)) for module in Net().modules()]


# --- Starts and lines ----------------------------------------------------------------------------------------------


def test_starts_of_the_same_model_differ_in_phi_alone() -> None:
    a, phi = start(), torch.zeros(3)
    assert a.of_the_same(Start(phi, start().tensors))
    for other in (
        Start(a.phi),
        Start(a.phi, dict(list(a.tensors.items())[:1])),
        start(0.2),
        Start(a.phi, a.tensors, {"k": 1}),
    ):
        assert not a.of_the_same(other)
        assert not other.of_the_same(a)


WAY = torch.tensor([1.0, -2.0])


def along(high: float = 2.0, **more: Any) -> StartLine:
    return StartLine(lambda t: Start(t * WAY, {"mean": 1000 * t * torch.ones(3)}), 0.0, high, **more)


def test_a_line_asks_the_middle_and_the_quarters_first_unless_it_is_told() -> None:
    assert along().first == (1.0, 0.5, 1.5)
    assert along(first=(2.0,)).first == (2.0,)
    assert [each.phi.tolist() for each in along().ends] == [[0, 0], [1, -2], [2, -4]]


def drawn_anew(t: float, rng: torch.Generator = torch.Generator().manual_seed(0)) -> Start:  # noqa: B008
    return Start(torch.randn(2, generator=rng))


@pytest.mark.parametrize(
    ("make", "error", "names"),
    [
        (lambda: StartLine(drawn_anew, 1.0, 1.0), ValueError, ("1.0",)),
        (lambda: StartLine(drawn_anew, 0.0, math.inf), ValueError, ("high", "inf")),
        (lambda: StartLine(drawn_anew, 0.0, 1.0, (0.5, 2.0)), ValueError, ("2.0", "0.0", "1.0")),
        (lambda: StartLine(Start(torch.zeros(2)), 0.0, 1.0), TypeError, ("Start",)),
        (lambda: StartLine(drawn_anew, 0.0, 1.0).check(), AdapterError, ("at(0.0)",)),
        (lambda: StartLine(lambda t: t, 0.0, 1.0).check(), AdapterError, ("at(0.0)", "Start")),
        (lambda: Start(torch.tensor([True])), TypeError, ("phi",)),
    ],
)
def test_what_is_no_start_or_line_is_refused(
    make: Callable[[], Any], error: type[Exception], names: tuple[str, ...]
) -> None:
    assert_refused(make, error, *names)


def test_which_starts_are_the_same_model() -> None:
    """What one does not replace is the base's; counts do not matter."""
    base = {"mean": torch.zeros(3), "other": torch.ones(2), "count": torch.tensor(3)}
    one = along().at(1.0)
    for same in (
        Start(WAY.double(), {**one.tensors, "other": torch.ones(2)}),
        Start(WAY, {**one.tensors, "count": torch.tensor(7)}),
    ):
        assert one.is_same_model(same, base)
        assert same.is_same_model(one, base)
    assert Start(0 * WAY).is_same_model(along().at(0.0), base)
    for other in (
        Start(WAY + torch.tensor([0.01, 0.0]), one.tensors),
        Start(WAY),
        Start(WAY, {**one.tensors, "other": torch.zeros(2)}),
        Start(WAY, one.tensors, {"flip": True}),
    ):
        assert not one.is_same_model(other, base)
        assert not other.is_same_model(one, base)


def test_a_line_goes_through_another_start() -> None:
    line = along().through(Start(torch.ones(2), {"mean": torch.ones(3), "weight": torch.ones(1)}, {"flip": True}))
    start = line.at(1.5)
    assert start.phi.tolist() == [2.5, -2.0]
    assert start.tensors["mean"].tolist() == [1500.0] * 3
    assert (start.tensors["weight"].tolist(), dict(start.settings)) == ([1.0], {"flip": True})
    assert (line.low, line.high, line.first) == (0.0, 2.0, along().first)
