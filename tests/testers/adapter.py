"""The contract of an adapter: phi acts in a model, and is taken out again bit for bit, or folded into its weights."""

import copy
import io
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import metricopt_ext as mo
from helpers.refusals import assert_refused
from testers import FEW

PACKAGE = str(Path(mo.__file__).parent)

seeds = st.integers(0, 2**31 - 1)
fewer = settings(max_examples=2 * FEW)  # there are many models


def by_pickle(model: nn.Module) -> Any:
    """Return what is left of a model by way of a file."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], Any]] = {"deepcopy": copy.deepcopy, "pickle": by_pickle}


class AdapterTester:
    """What holds of each adapter; a case says how one is attached, and to which models.

    Attributes:
        models: Functions that each make the same model anew, in training mode, and inputs for it.
        one_by_one: Names of models that ``torch.func.vmap`` can't take.
        adds: Tensors that merging adds to a model's state dict.
    """

    models: ClassVar[dict[str, Callable[[], tuple[nn.Module, Any]]]]
    one_by_one: ClassVar[tuple[str, ...]] = ()
    adds: ClassVar[tuple[str, ...]] = ()

    def attach(self, model: nn.Module) -> mo.Adapter:
        """Attach the adapter to a model; each time in the same way."""
        raise NotImplementedError

    def attach_other(self, model: nn.Module) -> mo.Adapter:
        """Attach an adapter whose phi means something else."""
        return mo.attach_outputs(model, mo.Outputs(scale=3.5))

    # ----- What the tests need

    @pytest.fixture(autouse=True)
    def quiet(self) -> Iterator[None]:
        """No warning but those that a test expects."""
        with warnings.catch_warnings():
            warnings.filterwarnings("error", category=UserWarning, module="metricopt_ext")
            yield

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "name" in metafunc.fixturenames:
            metafunc.parametrize("name", list(self.models))

    def first(self) -> str:
        """The model of the tests that take longer."""
        return next(iter(self.models))

    def output(self, model: nn.Module, inputs: Any) -> Tensor:
        """What a model computes, one tensor."""
        return model(inputs)  # type: ignore[no-any-return]

    def precise(self, name: str) -> tuple[nn.Module, Any]:
        """A model in float64, in evaluation mode."""
        model, inputs = self.models[name]()
        return model.double().eval(), inputs.double() if inputs.is_floating_point() else inputs

    def phi(self, adapter: mo.Adapter, seed: int) -> Tensor:
        return drawn(adapter.phi, seed).mul(0.3)

    def tuned(self, name: str, seed: int) -> tuple[mo.Adapter, Any]:
        model, inputs = self.models[name]()
        adapter = self.attach(model.eval())
        adapter.set_phi(self.phi(adapter, seed))
        return adapter, inputs

    # ----- phi

    @torch.no_grad()
    def test_phi_of_zero_is_the_model_bit_for_bit(self, name: str) -> None:
        model, inputs = self.models[name]()
        expected, stream = self.output(model.eval(), inputs), torch.get_rng_state()
        adapter = self.attach(model)
        assert torch.equal(torch.get_rng_state(), stream)
        assert not adapter.phi.any()
        assert torch.equal(self.output(model, inputs), expected)

    @fewer
    @given(seed=seeds)
    @torch.no_grad()
    def test_every_phi_acts_and_as_its_parameter_or_in_its_place(self, name: str, seed: int) -> None:
        adapter, inputs = self.tuned(name, seed)
        found, phi = self.output(adapter.model, inputs), adapter.phi.clone()
        adapter.set_phi(0 * phi)
        plain = self.output(adapter.model, inputs)
        assert not torch.allclose(found, plain)
        with adapter.using(phi) as model:
            assert torch.equal(self.output(model, inputs), found)
            with adapter.using(0 * phi):
                assert torch.equal(self.output(model, inputs), plain)
            assert torch.equal(self.output(model, inputs), found)
        assert torch.equal(self.output(adapter.model, inputs), plain)
        with pytest.raises(KeyError), adapter.using(phi):
            raise KeyError
        assert torch.equal(self.output(adapter.model, inputs), plain)
        start, base = some_start(adapter, seed), copied(adapter.base_state_dict())
        with adapter.applied(start), adapter.using(phi):
            expected = self.output(adapter.model, inputs)
        with adapter.using(phi):
            with adapter.applied(start):
                assert torch.equal(self.output(adapter.model, inputs), expected)
            assert torch.equal(self.output(adapter.model, inputs), found)
        assert all(torch.equal(each, base[key]) for key, each in adapter.model.state_dict().items() if key in base)

    @fewer
    @given(seed=seeds)
    def test_training_mode_computes_as_evaluation_and_learns_no_statistics(self, name: str, seed: int) -> None:
        adapter, inputs = self.tuned(name, seed)
        expected, buffers = self.output(adapter.model, inputs), [each.clone() for each in adapter.model.buffers()]
        assert torch.equal(self.output(adapter.model.train(), inputs), expected)
        assert all(each.training for each in adapter.model.modules())
        assert all(torch.equal(*pair) for pair in zip(adapter.model.buffers(), buffers, strict=True))

    @fewer
    @given(seed=seeds)
    def test_only_phi_learns_by_the_right_gradient(self, name: str, seed: int) -> None:
        model, inputs = self.precise(name)
        adapter = self.attach(model)
        adapter.set_phi(self.phi(adapter, seed))
        weights = drawn(self.output(model, inputs), seed)

        def loss(phi: Tensor) -> Tensor:
            with adapter.using(phi):
                return (self.output(model, inputs) * weights).sum()

        (self.output(model, inputs) * weights).sum().backward()
        (phi,) = adapter.parameters()
        assert [each for each in model.parameters() if each.requires_grad or each.grad is not None] == [phi]
        way = drawn(phi, seed + 1)
        with torch.no_grad():
            slope = (loss(phi + 1e-6 * way) - loss(phi - 1e-6 * way)) / 2e-6
        assert phi.grad is not None
        torch.testing.assert_close(phi.grad @ way, slope, rtol=1e-5, atol=1e-5)
        (other,) = torch.autograd.grad(loss(at := phi.detach().requires_grad_()), at)
        torch.testing.assert_close(other, phi.grad)

    @fewer
    @given(seed=seeds)
    @torch.no_grad()
    def test_a_population_computes_as_one_phi_by_one(self, name: str, seed: int) -> None:
        if name in self.one_by_one:
            pytest.skip("torch.func.vmap can't take this model")
        model, inputs = self.precise(name)
        adapter = self.attach(model)

        def output(phi: Tensor) -> Tensor:
            with adapter.using(phi):
                return self.output(model, inputs)

        phis = drawn(adapter.phi.expand(4, -1), seed).mul(0.3)
        together = torch.func.vmap(output)(phis)
        torch.testing.assert_close(together, torch.stack([output(phi) for phi in phis]), rtol=1e-10, atol=1e-10)

    def test_phi_of_another_size_is_refused(self) -> None:
        adapter, _ = self.tuned(self.first(), 0)
        for wrong in (torch.zeros(adapter.dim + 1), torch.zeros(1, adapter.dim)):
            assert_refused(lambda wrong=wrong: adapter.set_phi(wrong), mo.errors.AdapterError, "phi")
            assert_refused(lambda wrong=wrong: adapter.using(wrong).__enter__(), mo.errors.AdapterError, "phi")
            assert_refused(lambda wrong=wrong: adapter.apply(mo.Start(wrong)), mo.errors.AdapterError, "phi")

    @fewer
    @given(seed=seeds, way=st.sampled_from(["at once", *COPIES]))
    @torch.no_grad()
    def test_a_model_that_is_judged_has_its_phi_in_its_own_tensors(self, name: str, seed: int, way: str) -> None:
        """Whoever exports it, reads its state dict or copies it gets what is judged."""
        model, inputs = self.precise(name)
        bare, adapter = copy.deepcopy(model), self.attach(model)
        base, start = copied(adapter.base_state_dict()), some_start(adapter, seed)
        with adapter.applied(start):
            expected = self.output(model, inputs)
            twin = mo.Adapter(COPIES[way](model) if way in COPIES else model)
            assert torch.equal(self.output(twin.model, inputs), expected)
            state = {key: each for key, each in twin.model.state_dict().items() if not key.startswith("metricopt.")}
            assert all(torch.equal(each, base[key]) for key, each in twin.base_state_dict().items())
            for key in self.adds:
                bare.get_submodule(key.rpartition(".")[0]).bias = nn.Parameter(state[key])
            bare.load_state_dict(state)
            torch.testing.assert_close(self.output(bare, inputs), expected, rtol=1e-12, atol=1e-12)
        assert all(torch.equal(each, base[key]) for key, each in adapter.model.state_dict().items() if key in base)
        if way in COPIES:
            restored = twin.remove().state_dict()
            assert list(restored) == list(base)
            assert all(torch.equal(each, base[key]) for key, each in restored.items())

    # ----- Taking it out

    @fewer
    @given(seed=seeds, way=st.sampled_from(["at once", "after an error", "after a start", *COPIES]))
    def test_removing_it_restores_everything(self, name: str, seed: int, way: str) -> None:
        model, inputs = self.models[name]()
        next(model.parameters()).requires_grad_(False)  # by its owner: it stays so
        bare = copy.deepcopy(model)
        adapter = self.attach(model)
        adapter.set_phi(self.phi(adapter, seed))
        if way == "after an error":
            with (
                suppress(KeyError),
                adapter.using(adapter.phi.detach() + 1),
                adapter.applied(some_start(adapter, seed)),
            ):
                raise KeyError
            with suppress(Exception):
                self.output(model, None)
        elif way == "after a start":
            adapter.apply(some_start(adapter, seed))
        elif way in COPIES:
            adapter = mo.Adapter(COPIES[way](model))
        self.output(adapter.model, inputs)
        model = adapter.model
        assert adapter.remove() is model
        assert_as(model, bare)
        for mode in (True, False):
            torch.manual_seed(seed)
            found = self.output(model.train(mode), inputs)
            torch.manual_seed(seed)
            assert torch.equal(found, self.output(bare.train(mode), inputs))
        assert_refused(lambda: adapter.set_phi(torch.zeros(3)), mo.errors.AdapterError)
        self.attach(model)

    @fewer
    @given(seed=seeds)
    @torch.no_grad()
    def test_what_is_merged_computes_as_what_was_adapted(self, name: str, seed: int) -> None:
        model, inputs = self.precise(name)
        bare = copy.deepcopy(model)
        adapter = self.attach(model)
        adapter.set_phi(self.phi(adapter, seed))
        substituted, stated = self.output(model, inputs), adapter.merged_state_dict()
        assert torch.equal(self.output(model, inputs), substituted)  # a copy was merged
        with adapter.applied(adapter.as_start()):
            expected = self.output(model, inputs)
        assert adapter.merge() is model
        assert torch.equal(self.output(model, inputs), expected)
        torch.testing.assert_close(substituted, expected, rtol=1e-10, atol=1e-10)
        assert list(stated) == list(model.state_dict())
        assert all(torch.equal(each, stated[key]) for key, each in model.state_dict().items())
        assert set(stated) - set(bare.state_dict()) == set(self.adds)
        assert [type(each) for each in model.modules()] == [type(each) for each in bare.modules()]
        assert hooks_of(model) == hooks_of(bare)
        missing, unexpected = bare.load_state_dict(stated, strict=not self.adds)
        assert (missing, set(unexpected)) == ([], set(self.adds))
        assert_refused(lambda: adapter.set_phi(torch.zeros(3)), mo.errors.AdapterError)

    @pytest.mark.parametrize("change", ["attach", "load", "remove", "merge", "apply", "for a while"])
    @settings(max_examples=FEW)
    @given(data=st.data())
    def test_what_is_interrupted_is_undone(self, change: str, data: Any, tmp_path: Path) -> None:
        """By Ctrl-C at a drawn line, and at one of the last: the model is as it was, or as it should become."""
        path = tmp_path / "adapter.safetensors"
        adapter, inputs = self.tuned(self.first(), 1)
        adapter.apply(some_start(adapter, 1))
        adapter.save(path)

        def work() -> tuple[nn.Module, Callable[[], Any]]:
            """A model, and what changes it."""
            if change in ("attach", "load"):
                model = self.models[self.first()]()[0].eval()
                return model, lambda: self.attach(model) if change == "attach" else mo.load_adapter(model, path)
            adapter, _ = self.tuned(self.first(), 2)
            adapter.apply(some_start(adapter, 2))
            start = some_start(adapter, 3)

            def for_a_while() -> None:
                with adapter.applied(start), adapter.using(start.phi):
                    pass

            changes = {"remove": adapter.remove, "merge": adapter.merge, "apply": lambda: adapter.apply(start)}
            return adapter.model, changes.get(change, for_a_while)

        model, run = work()
        before, lines = self.seen(model, inputs), interrupted(run, None)
        after = self.seen(model, inputs)
        drawn = data.draw(st.integers(1, lines), label="line")
        for line in (drawn, lines - drawn % 10):
            model, run = work()
            interrupted(run, line)
            assert self.seen(model, inputs) in (before, after)

    def seen(self, model: nn.Module, inputs: Any) -> Any:
        """All that a change could leave behind: bits, flags, hooks, attributes, outputs."""
        with torch.no_grad():
            torch.manual_seed(0)
            output = self.output(model, inputs).tolist()
        flags = [(key, each.requires_grad) for key, each in model.named_parameters()]
        tensors = {key: each.tolist() for key, each in model.state_dict().items() if isinstance(each, Tensor)}
        return output, flags, tensors, hooks_of(model), [each.training for each in model.modules()]

    # ----- Copies, files, starts

    @fewer
    @given(seed=seeds, way=st.sampled_from(sorted(COPIES)))
    @torch.no_grad()
    def test_a_copy_has_a_phi_of_its_own(self, name: str, seed: int, way: str) -> None:
        adapter, inputs = self.tuned(name, seed)
        mine, other = self.output(adapter.model, inputs), self.phi(adapter, seed + 1)
        with adapter.using(other):
            twin = mo.Adapter(COPIES[way](adapter.model))  # what is used for a while stays here
            theirs = self.output(adapter.model, inputs)
        assert torch.equal(self.output(twin.model, inputs), mine)
        assert twin.signature == adapter.signature
        twin.set_phi(other)
        assert torch.equal(self.output(twin.model, inputs), theirs)
        assert torch.equal(self.output(adapter.model, inputs), mine)
        twin.remove()
        assert torch.equal(self.output(adapter.model, inputs), mine)

    @fewer
    @given(seed=seeds)
    @torch.no_grad()
    def test_a_file_and_a_state_dict_give_it_back(self, name: str, seed: int, tmp_path: Path) -> None:
        adapter, inputs = self.tuned(name, seed)
        adapter.apply(some_start(adapter, seed))
        path, again = tmp_path / "adapter.safetensors", tmp_path / "again.safetensors"
        adapter.save(path)
        expected, base = self.output(adapter.model, inputs), adapter.base_state_dict()
        loaded = mo.load_adapter(self.models[name]()[0].eval(), path)
        assert torch.equal(self.output(loaded.model, inputs), expected)
        assert loaded.signature == adapter.signature
        loaded.save(again)
        assert again.read_bytes() == path.read_bytes()
        attached, _ = self.tuned(name, seed + 1)
        attached.load(path)
        assert torch.equal(self.output(attached.model, inputs), expected)
        attached, _ = self.tuned(name, seed + 1)
        attached.model.load_state_dict(adapter.model.state_dict())
        assert torch.equal(attached.phi, adapter.phi)
        bare = self.models[name]()[0]
        bare.load_state_dict(base, strict=True)
        assert_as(loaded.remove(), bare.eval())

    @fewer
    @given(seed=seeds)
    def test_a_file_is_refused_by_another_adapter_and_warns_of_other_weights(self, seed: int, tmp_path: Path) -> None:
        path, (adapter, inputs) = tmp_path / "adapter.safetensors", self.tuned(self.first(), seed)
        adapter.save(path)
        other = self.attach_other(self.models[self.first()]()[0])
        before = self.seen(other.model, inputs)
        assert other.signature != adapter.signature
        assert_refused(lambda: other.load(path), mo.errors.AdapterError, path.name)
        if other.dim == adapter.dim:
            assert_refused(lambda: other.model.load_state_dict(adapter.model.state_dict()), RuntimeError)
        assert self.seen(other.model, inputs) == before
        assert_refused(lambda: self.attach(other.model), mo.errors.AdapterError)
        elsewhere, _ = self.models[self.first()]()
        with torch.no_grad():
            next(elsewhere.parameters()).view(-1)[0] += 1
        with pytest.warns(UserWarning, match=path.name):
            mo.load_adapter(elsewhere, path)

    @fewer
    @given(seed=seeds)
    @torch.no_grad()
    def test_a_start_is_applied_and_undone(self, name: str, seed: int) -> None:
        adapter, inputs = self.tuned(name, seed)
        held, base = self.output(adapter.model, inputs), copied(adapter.base_state_dict())
        start, (bare, _) = some_start(adapter, seed), self.models[name]()
        bare.load_state_dict(start.tensors, strict=False)
        expected = self.output(bare.eval(), inputs)
        at_zero = mo.Start(0 * start.phi, start.tensors)
        with adapter.applied(at_zero) as model:
            assert torch.equal(self.output(model, inputs), expected)
        assert torch.equal(self.output(adapter.model, inputs), held)
        adapter.apply(some_start(adapter, seed + 1))
        adapter.apply(at_zero)  # to the base, not to what the one before it left
        assert torch.equal(self.output(adapter.model, inputs), expected)
        assert all(torch.equal(each, base[key]) for key, each in adapter.base_state_dict().items())
        adapter.apply(start)
        assert torch.equal(adapter.phi, start.phi)
        wrong = mo.Start(start.phi, {**start.tensors, "no.such": torch.ones(2)})
        assert_refused(lambda: adapter.apply(wrong), mo.errors.AdapterError, "no.such")
        assert torch.equal(adapter.phi, start.phi)


def drawn(like: Tensor, seed: int) -> Tensor:
    """Normal numbers of a tensor's shape and type."""
    numbers = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return numbers.to(like.dtype)


def some_start(adapter: mo.Adapter, seed: int) -> mo.Start:
    """A phi, and other values of the second half of a model's parameters and buffers."""
    names, replaced = adapter.base_state_dict(), dict[str, Tensor]()
    for own in (adapter.model.named_buffers(), adapter.model.named_parameters()):
        known = [(key, each) for key, each in own if key in names and each.is_floating_point()]
        some = known[len(known) // 2 :]
        replaced |= {key: drawn(each, seed).abs().add(0.5) if "var" in key else drawn(each, seed) for key, each in some}
    return mo.Start(drawn(adapter.phi, seed).mul(0.3), replaced)


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: each.clone() for key, each in state.items()}


def hooks_of(model: nn.Module) -> list[Any]:
    """Names of attributes and number of hooks of each module."""
    held = [(type(each).__name__, vars(each)) for each in model.modules()]
    return [(kind, sorted(own), [len(own[key]) for key in sorted(own) if key.endswith("_hooks")]) for kind, own in held]


def assert_as(model: nn.Module, bare: nn.Module) -> None:
    """Check that a model is another one: tensors, flags, modes, hooks and attributes."""
    found, expected = model.state_dict(), bare.state_dict()
    assert list(found) == list(expected)
    assert [key for key, each in found.items() if not torch.equal(each, expected[key])] == []
    assert hooks_of(model) == hooks_of(bare)
    assert [each.training for each in model.modules()] == [each.training for each in bare.modules()]
    assert [each.requires_grad for each in model.parameters()] == [each.requires_grad for each in bare.parameters()]


def interrupted(work: Callable[[], Any], at: int | None) -> int:
    """Run some work and press Ctrl-C at the n-th line of the package that runs; returns how many ran."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        count += event == "line"
        if event == "line" and count == at:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with suppress(KeyboardInterrupt):
            work()
    finally:
        sys.settrace(before)
    return count
