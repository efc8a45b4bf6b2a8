"""What a start replaces in a model: every bit of it comes back, through copies, casts, files and second starts."""

import copy
import io
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers.refusals import assert_named, assert_refused, having
from helpers.tensors import rand32
from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.adapter_file import FILE_FORMAT
from metricopt_ext.adapters.attach import attach_film, load_adapter
from metricopt_ext.adapters.start import PlacesOnLine, Start, StartLine
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
        },
        {"norm.weight": rand32(4, seed=3), "head.weight": rand32(5, 4, seed=4)},
    )


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    assert [name for name, value in found.items() if not same_bits(value, expected[name])] == []


def expected_with(start: Start, model: nn.Module | None = None) -> dict[str, Tensor]:
    """Return a bare model's state with a start's tensors, written out."""
    state = bits(model or Net()) | dict(start.replaced)
    return state | {"embedding.weight": state["head.weight"]}


def base_of(adapter: Adapter) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in adapter.base_state_dict().items()}


def beyond(adapter: Adapter) -> dict[str, Tensor]:
    return {name: value for name, value in bits(adapter.model).items() if not name.startswith("metricopt.")}


@pytest.fixture
def adapter() -> Adapter:
    return attach_film(Net().eval(), dim=3)


# --- Applying and removing -----------------------------------------------------------------------------------------


def test_a_start_is_in_the_model_and_its_base_is_known(adapter: Adapter) -> None:
    model, tensors = adapter.model, {id(each) for each in adapter.model.state_dict(keep_vars=True).values()}
    keys = list(model.state_dict())
    adapter.apply(start())
    assert torch.equal(adapter.phi, rand32(3))
    assert_same(beyond(adapter), expected_with(start()))
    assert_same(base_of(adapter), bits(Net()))
    assert list(model.state_dict()) == keys
    assert {id(each) for each in model.state_dict(keep_vars=True).values()} == tensors
    assert model.head.weight is model.embedding.weight
    assert_same(bits(adapter.remove()), bits(Net()))
    assert [set(vars(module)) for module in model.modules()] == [set(vars(module)) for module in Net().modules()]


def by_pickle(model: nn.Module) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": by_pickle,
    "pickle of a deepcopy": lambda model: by_pickle(copy.deepcopy(model)),
    "to a device": lambda model: model.to("cpu"),
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


def test_casting_a_part_of_the_model_casts_what_comes_back(adapter: Adapter) -> None:
    adapter.apply(start())
    adapter.model.norm.double()
    bare = Net()
    bare.norm.double()
    assert_same(bits(adapter.remove()), bits(bare))


def test_a_second_start_is_applied_to_the_base(adapter: Adapter) -> None:
    second = Start(rand32(3, seed=5), {"norm.running_mean": rand32(4, seed=6)}, {"head.bias": rand32(5, seed=7)})
    adapter.apply(start())
    adapter.apply(second)
    assert_same(beyond(adapter), bits(Net()) | second.replaced)
    assert_same(base_of(adapter), bits(Net()))
    adapter.apply(start())
    adapter.apply(start(0.5))
    assert_same(beyond(adapter), expected_with(start(0.5)))
    assert_same(bits(adapter.remove()), bits(Net()))


def test_a_start_of_phi_alone_leaves_the_base(adapter: Adapter) -> None:
    adapter.apply(start())
    adapter.apply(Start(torch.ones(3)))
    assert_same(beyond(adapter), bits(Net()))
    assert not adapter.as_start().replaced


def test_a_start_for_a_while(adapter: Adapter) -> None:
    adapter.apply(start())
    held = bits(adapter.model)
    with adapter.applied(Start(torch.zeros(3))) as model:
        assert model is adapter.model
        assert_same(beyond(adapter), bits(Net()))
    assert_same(bits(adapter.model), held)
    with torch.no_grad():
        adapter.phi.fill_(math.nan)  # what a diverged training left is put back, too
    with pytest.raises(KeyError), adapter.applied(Start(torch.zeros(3))):
        raise KeyError
    assert adapter.phi.isnan().all()
    assert_same(bits(adapter.remove()), bits(Net()))


def test_what_a_model_holds_is_a_start_of_copies(adapter: Adapter) -> None:
    adapter.apply(start())
    held = adapter.as_start()
    assert set(held.buffers) == set(start().buffers)
    assert set(held.parameters) == {"norm.weight", "embedding.weight"}  # the first of two names
    adapter.apply(Start(torch.zeros(3)))
    adapter.apply(held)
    assert_same(beyond(adapter), expected_with(start()))


def test_a_start_may_hold_the_model_s_own_tensors(adapter: Adapter) -> None:
    own = {name: value for name, value in adapter.model.named_buffers() if "norm.running" in name}
    adapter.apply(Start(adapter.phi, own, dict(Net().named_parameters())))
    assert not adapter.as_start().replaced  # the values are the base's
    adapter.apply(start())
    adapter.apply(Start(adapter.phi, own))
    assert set(adapter.as_start().replaced) == set(own)
    assert_same(beyond(adapter), bits(Net()) | {name: start().buffers[name] for name in own})
    assert_same(bits(adapter.remove()), bits(Net()))


# --- Refusals ------------------------------------------------------------------------------------------------------

MEAN = {"norm.running_mean": torch.ones(4)}


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        (Start(torch.zeros(2), MEAN), ("phi", "(2,)")),
        (Start(torch.tensor([0, math.inf, 0]), MEAN), ("phi", "inf")),
        (
            Start(torch.zeros(3), {**MEAN, "norm.mean": torch.ones(4)}),
            ("norm.mean",),
        ),
        (Start(torch.zeros(3), {**MEAN, "norm.weight": torch.ones(4)}), ("norm.weight",)),
        (Start(torch.zeros(3), MEAN, MEAN), ("norm.running_mean",)),
        (Start(torch.zeros(3), {**MEAN, "scratch": torch.ones(2)}), ("scratch",)),
        (Start(torch.zeros(3), MEAN, {"metricopt.phi": torch.ones(3)}), ("metricopt.phi",)),
        (Start(torch.zeros(3), {**MEAN, "metricopt.signature": torch.ones(2).long()}), ("metricopt.signature",)),
        (
            Start(torch.zeros(3), {**MEAN, "norm.metricopt_modulation.A": torch.ones(4, 3)}),
            ("norm.metricopt_modulation.A",),
        ),
        (
            Start(torch.zeros(3), MEAN, {"head.bias": torch.ones(1)}),
            ("head.bias", "(5,)"),
        ),
        (
            Start(torch.zeros(3), MEAN, {"head.bias": torch.ones(5).double()}),
            ("head.bias", "torch.float32"),
        ),
        (Start(torch.zeros(3), MEAN, {"head.bias": [1.0] * 5}), ("head.bias",)),  # type: ignore[dict-item]
        (
            Start(torch.zeros(3), MEAN, {"head.weight": torch.ones(5, 4), "embedding.weight": torch.zeros(5, 4)}),
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
    with pytest.raises(AdapterError) as caught, adapter.applied(wrong):
        pass
    assert_named(caught, *names)
    assert_same(bits(adapter.model), before)
    assert_same(base_of(adapter), base)
    assert_same(bits(adapter.remove()), bits(Net()))


def test_two_names_of_a_tensor_may_be_given_one_value(adapter: Adapter) -> None:
    both = {"head.weight": torch.ones(5, 4), "embedding.weight": torch.ones(5, 4)}
    adapter.apply(Start(torch.zeros(3), {}, both))
    assert adapter.model.head.weight.eq(1).all()
    assert_same(bits(adapter.remove()), bits(Net()))


def test_starts_of_the_same_model_differ_in_phi_alone() -> None:
    a, phi = start(), torch.zeros(3)
    assert a.replaces_the_same(Start(phi, start().buffers, start().parameters))
    assert Start(phi).replaces_the_same(Start(phi + 1))
    for other in (
        Start(a.phi),
        Start(a.phi, a.buffers),
        start(0.2),
        Start(a.phi, {**a.buffers, "x": phi}, a.parameters),
    ):
        assert not a.replaces_the_same(other)
        assert not other.replaces_the_same(a)


# --- Merging -------------------------------------------------------------------------------------------------------


def test_merging_keeps_what_was_replaced_and_folds_phi_into_it() -> None:
    adapter = attach_film(Net().double().eval(), dim=3)
    started = start()
    finite = {**started.buffers, "norm.running_var": torch.ones(4)}
    doubled = Start(
        started.phi,
        {name: value.double() if value.is_floating_point() else value for name, value in finite.items()},
        {name: value.double() for name, value in started.parameters.items()},
    )
    adapter.apply(doubled)
    expected, base = adapter.model(X), base_of(adapter)
    merged = adapter.merged_state_dict()
    assert_same(base_of(adapter), base)
    bare = Net().double().eval()
    bare.load_state_dict(merged, strict=True)
    torch.testing.assert_close(bare(X), expected, rtol=1e-12, atol=1e-12)
    untouched = expected_with(doubled, Net().double())
    assert {name for name, value in merged.items() if not same_bits(value, untouched[name])} == {
        "norm.weight",
        "norm.bias",
    }
    adapter.merge()
    assert_same(bits(adapter.model), merged)


# --- Hosts ---------------------------------------------------------------------------------------------------------


def test_optimizers_and_compiled_graphs_keep_their_tensors(adapter: Adapter) -> None:
    compiled = torch.compile(adapter.model, backend="eager")
    finite = Start(rand32(3), {"norm.running_mean": rand32(4, seed=2)}, start().parameters)
    before = compiled(X)
    optimizer = torch.optim.SGD(adapter.parameters(), 0.1)
    adapter.apply(finite)
    assert torch.equal(compiled(X), adapter.model(X))
    assert not torch.allclose(compiled(X), before)
    compiled(X).square().sum().backward()
    optimizer.step()
    assert not torch.equal(adapter.phi, finite.phi)
    adapter.apply(Start(torch.zeros(3)))
    assert torch.equal(compiled(X), before)


def test_distributed_data_parallel_keeps_its_tensors(adapter: Adapter, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(adapter.model)
        before = wrapped(X).detach()
        adapter.apply(Start(rand32(3), {"norm.running_mean": rand32(4, seed=2)}, start().parameters))
        output = wrapped(X)
        assert torch.equal(output, adapter.model(X))
        output.square().sum().backward()
        assert adapter.phi.grad is not None
        assert adapter.phi.grad.abs().sum() > 0
        adapter.apply(Start(torch.zeros(3)))
        assert torch.equal(wrapped(X), before)
    finally:
        dist.destroy_process_group()


# --- Files ---------------------------------------------------------------------------------------------------------


def loaded_without_a_warning(model: nn.Module, path: Path) -> Adapter:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load_adapter(model, path)


def test_one_file_has_all_that_differs_from_the_base(adapter: Adapter, tmp_path: Path) -> None:
    path, same = tmp_path / "adapter.safetensors", bits(Net())["head.bias"]
    given = start()
    adapter.apply(Start(given.phi, given.buffers, {**given.parameters, "head.bias": same}))
    adapter.save(path)
    tensors, _ = read_tensors(path, FILE_FORMAT)
    kept = {name for name in tensors if not name.startswith("matrices.")}
    parameters = {"parameters.norm.weight", "parameters.embedding.weight"}
    assert kept == {"phi", *parameters, *(f"buffers.{name}" for name in given.buffers)}
    again = loaded_without_a_warning(Net().eval(), path)
    assert_same(bits(again.model), bits(adapter.model))
    assert_same(base_of(again), bits(Net()))
    again.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()
    assert_same(bits(again.remove()), bits(Net()))


def test_loading_into_an_attached_adapter_is_applying(adapter: Adapter, tmp_path: Path) -> None:
    path, plain = tmp_path / "adapter.safetensors", tmp_path / "plain.safetensors"
    adapter.save(plain)
    adapter.apply(start())
    adapter.save(path)
    mine = attach_film(Net().eval(), dim=3, seed=9)
    mine.apply(Start(torch.zeros(3), {}, {"head.bias": rand32(5)}))
    mine.load(path)
    assert_same(bits(mine.model), bits(adapter.model))
    mine.load(plain)
    assert_same(beyond(mine), bits(Net()))


def test_other_base_weights_are_warned_of_once(adapter: Adapter, tmp_path: Path) -> None:
    path, other = tmp_path / "adapter.safetensors", Net().eval()
    adapter.apply(start())
    adapter.save(path)
    with torch.no_grad():
        other.head.bias[0] += 1
    with pytest.warns(UserWarning, match=r"other weights.* does not hold here") as caught:
        again = load_adapter(other, path)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert torch.equal(again.phi, rand32(3))
    with pytest.warns(UserWarning, match=having("Net")) as caught:
        again.load(path)
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("changed", "error", "names"),
    [
        ({"buffers.norm.mean": torch.ones(4)}, AdapterError, ("norm.mean",)),
        ({"buffers.norm.metricopt_modulation.A": torch.ones(4, 3)}, AdapterError, ("norm.metricopt_modulation.A",)),
        ({"parameters.metricopt.phi": torch.ones(3)}, AdapterError, ("metricopt.phi",)),
        ({"parameters.norm.running_mean": torch.ones(4)}, AdapterError, ("norm.running_mean",)),
        ({"parameters.head.bias": torch.ones(10**6)}, AdapterError, ("head.bias", "(1000000,)")),
        ({"parameters.head.bias": torch.ones(5).half()}, AdapterError, ("head.bias", "torch.float16")),
        ({"parameters.head.weight": torch.zeros(5, 4)}, AdapterError, ()),
        ({"phi": torch.tensor([0, math.nan, 0])}, AdapterError, ("phi",)),
        ({"phi": torch.zeros(3).long()}, FileFormatError, ("phi", "torch.int64")),
        ({"matrices.norm.A": torch.zeros(4, 3).bool()}, FileFormatError, ("matrices.norm.A", "torch.bool")),
        ({"extra": torch.ones(1)}, FileFormatError, ("extra",)),
        ({"norm.A": torch.ones(4, 3)}, FileFormatError, ("norm.A",)),
        ({"parameters." + "x" * 5000: torch.ones(1)}, AdapterError, ("head.bias",)),
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
        with pytest.raises(error) as caught:
            load(path)
        assert_named(caught, *names)
        assert len(str(caught.value)) < 1000
        assert_same(bits(model), before)
    assert [set(vars(module)) for module in bare.modules()] == [set(vars(module)) for module in Net().modules()]
    assert_same(bits(adapter.remove()), bits(Net()))


# --- Lines -------------------------------------------------------------------------------------------------------


WAY = torch.tensor([1.0, -2.0])


def along(high: float = 2.0, **more: Any) -> StartLine:
    return StartLine(lambda t: Start(t * WAY, {"mean": 1000 * t * torch.ones(3)}), 0.0, high, **more)


def test_a_line_asks_the_middle_and_the_quarters_first_unless_it_is_told() -> None:
    assert along().first == (1.0, 0.5, 1.5)
    assert along(first=(2.0,)).first == (2.0,)
    assert [each.phi.tolist() for each in along().ends] == [[0, 0], [1, -2], [2, -4]]


@pytest.mark.parametrize(
    ("low", "high", "first", "names"),
    [
        (1.0, 1.0, (), ("1.0",)),
        (1.0, 0.0, (), ()),
        (0.0, math.inf, (), ("high", "inf")),
        (0.0, 1.0, (0.5, 2.0), ("2.0", "0.0", "1.0")),
        (0.0, 1.0, 0.5, ("first", "0.5")),
        (0.0, 1.0, "05", ("first", "'05'")),
        (0.0, 1.0, ("0.5",), ("first", "0.5")),
    ],
)
def test_what_is_no_interval_is_refused(low: float, high: float, first: Any, names: tuple[str, ...]) -> None:
    assert_refused(lambda: StartLine(lambda t: Start(t * WAY), low, high, first), ValueError, *names)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (([0.0, 1.0],), ("phi", "0.0", "1.0")),
        ((torch.zeros(2), [torch.ones(3)]), ("buffers",)),
    ],
)
def test_a_start_is_of_tensors(arguments: tuple[Any, ...], names: tuple[str, ...]) -> None:
    assert_refused(lambda: Start(*arguments), TypeError, *names)


def test_a_line_is_a_function() -> None:
    assert_refused(lambda: StartLine(Start(torch.zeros(2)), 0.0, 1.0), TypeError, "Start")


def test_a_line_has_one_start_for_a_strength() -> None:
    drawn = torch.Generator().manual_seed(0)
    assert_refused(
        lambda: StartLine(lambda t: Start(torch.randn(2, generator=drawn)), 0.0, 1.0).check(), AdapterError, "at(0.0)"
    )
    assert_refused(lambda: StartLine(lambda t: t, 0.0, 1.0).check(), AdapterError, "at(0.0)", "Start")
    along().check()


def test_where_a_start_lies_on_a_line() -> None:
    """Each tensor counts by itself, however much larger another is; what is not replaced is the base's."""
    places = PlacesOnLine(along(), {"mean": torch.zeros(3), "other": torch.ones(2)})
    assert places.of(Start(0 * WAY)) == 0
    for t in (0.0, 1 / 3, 1.0, 2.0):
        assert places.of(along().at(t)) == pytest.approx(t, abs=1e-6)
    off = {
        "beyond the end": along(3.0).at(2.5),
        "phi off it": Start(WAY + torch.tensor([0.01, 0.0]), along().at(1.0).buffers),
        "phi elsewhere on it": Start(0.5 * WAY, along().at(1.0).buffers),
        "other tensors": Start(WAY, {**along().at(1.0).buffers, "other": torch.zeros(2)}),
        "other settings": Start(WAY, along().at(1.0).buffers, {}, {"flip": True}),
    }
    assert {name: places.of(start) for name, start in off.items()} == dict.fromkeys(off)
    counted = Start(WAY, along().at(1.0).buffers | {"count": torch.tensor(7)})
    assert PlacesOnLine(along(), {"mean": torch.zeros(3), "count": torch.tensor(3)}).of(counted) == 1
    bent = StartLine(lambda t: Start(torch.tensor([t, t * t])), 0.0, 1.0)
    curve = PlacesOnLine(bent, {})
    assert curve.of(Start(torch.tensor([0.5, 0.5]))) is None  # on the straight way, which is not the line
    assert curve.of(bent.at(1.0)) == 1


def test_a_line_goes_through_another_start() -> None:
    line = along().through(Start(torch.ones(2), {"mean": torch.ones(3)}, {"weight": torch.ones(1)}, {"flip": True}))
    start = line.at(1.5)
    assert start.phi.tolist() == [2.5, -2.0]
    assert start.buffers["mean"].tolist() == [1500.0] * 3
    assert (start.parameters["weight"].tolist(), dict(start.settings)) == ([1.0], {"flip": True})
    assert (line.low, line.high, line.first) == (0.0, 2.0, along().first)


@pytest.mark.parametrize("phi", [torch.zeros(2, dtype=torch.complex64), torch.tensor([True])])
def test_phi_of_no_real_numbers_is_refused(phi: Tensor) -> None:
    assert_refused(lambda: Start(phi), TypeError, "phi")
