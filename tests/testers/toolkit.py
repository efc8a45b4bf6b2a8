"""What the tools rely on in each toolkit of detectors, in double precision, where no two boxes tie."""

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import metricopt_ext as mo
from helpers.boxes import CLASSES, example
from testers import FEW

SEEDS = st.integers(0, 2**31 - 1)
each_a_detector = settings(max_examples=FEW, phases=[Phase.generate])  # to find something smaller would take minutes
SIDES = st.tuples(st.integers(40, 90), st.integers(40, 90))


@st.composite
def pictures(draw: Any, size: tuple[int, int] | None = None) -> list[Any]:
    """Up to three pictures with none to three boxes each, of several sizes or of one."""
    seeds = draw(st.lists(SEEDS, min_size=1, max_size=3, unique=True))
    return [example(draw(st.integers(0, 3)), *(size or draw(SIDES)), seed=seed) for seed in seeds]


def phi_of(seed: int) -> Tensor:
    return 0.3 * torch.randn(4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mixed(model: nn.Module) -> dict[str, bool]:
    """Set some modules to training and others to evaluation, and return which."""
    model.eval()
    for child in list(model.children())[::2]:
        child.train()
    return modes(model)


def modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def same(ours: Any, other: Any, atol: float = 1e-9) -> bool:
    """Whether the same is found in a picture; a difference is only by rounding, which may swap what is tied."""
    if len(ours.scores) != len(other.scores):
        return False
    first, second = (torch.from_numpy(np.lexsort([*each.boxes.double().T, each.labels])) for each in (ours, other))
    if not torch.equal(ours.labels[first], other.labels[second]):
        return False
    scores = torch.allclose(ours.scores[first].double(), other.scores[second].double(), rtol=0, atol=atol)
    boxes = torch.allclose(ours.boxes[first].double(), other.boxes[second].double(), rtol=0, atol=1e5 * atol)
    return scores and boxes


def assert_same(ours: Sequence[Any], others: Sequence[Any], atol: float = 1e-9) -> None:
    assert any(len(each.scores) for each in ours)
    for found, other in zip(ours, others, strict=True):
        assert same(found, other, atol)


class ToolkitTester:
    """A toolkit builds detectors, has their loss, detects by them, and exports them.

    A case gives it as the fixture ``toolkit``, in which an object has ``build(classes, seed)``, ``loss(model, batch)``,
    ``detect(model, batch)``, ``film_layers(model, placements)`` and ``export(model, path)``, and says how the library
    itself judges a picture and loads a file.
    """

    placement = "roi_head"
    samples = True  # the loss draws at random
    loss_dtype = torch.float64  # in which the library has its loss
    clips = True  # what is found to the picture
    alone = False  # pictures of several sizes are promised not to see each other

    @pytest.fixture
    def toolkit(self) -> Any:
        raise NotImplementedError

    def own(self, toolkit: Any, model: nn.Module, image: Tensor) -> Any:
        """What the library's own evaluation finds in a picture, uint8: ``boxes``, ``scores``, ``labels`` from 0."""
        raise NotImplementedError

    def load(self, toolkit: Any, path: Path) -> nn.Module:
        """The library's own detector with the weights of an exported file, in double precision."""
        raise NotImplementedError

    def layers(self, toolkit: Any, model: nn.Module) -> list[str]:
        """Where phi acts."""
        return toolkit.film_layers(model, [self.placement])  # type: ignore[no-any-return]

    def serve(self, toolkit: Any, adapter: Any) -> Any:
        """What detects and has the loss of an adapted detector: the toolkit, or one that keeps what phi leaves."""
        return toolkit

    def adapted(self, toolkit: Any, seed: int = 0) -> tuple[Any, Any]:
        """An adapter whose phi is drawn, and what serves its detector."""
        model = toolkit.build(CLASSES, seed=0).double()
        adapter = mo.attach_film(model, self.layers(toolkit, model), dim=4)
        adapter.set_phi(phi_of(seed))
        return adapter, self.serve(toolkit, adapter)

    @each_a_detector
    @given(seeds=st.lists(SEEDS, min_size=2, max_size=2, unique=True))
    def test_the_seed_draws_the_weights_and_the_global_stream_is_left_alone(self, toolkit: Any, seeds: Any) -> None:
        before = torch.get_rng_state()
        first = toolkit.build(CLASSES, seed=seeds[0]).state_dict()
        assert torch.equal(torch.get_rng_state(), before)
        torch.rand(3)
        again, other = (toolkit.build(CLASSES, seed=seed).state_dict() for seed in seeds)
        assert all(torch.equal(value, again[name]) for name, value in first.items())
        assert any(not torch.equal(value, other[name]) for name, value in first.items())

    @each_a_detector
    @given(seed=SEEDS, batch=pictures())
    def test_the_seed_replays_the_loss_whose_gradient_is_its_slope(self, toolkit: Any, seed: int, batch: Any) -> None:
        """It is of phi alone, and finite whether there are boxes or not."""
        adapter, serving = self.adapted(toolkit, seed)
        adapter.model.to(self.loss_dtype)
        before = mixed(adapter.model)

        def loss(phi: Tensor, seed: int = seed) -> Tensor:
            torch.manual_seed(seed)
            with adapter.using(phi) as model:
                return serving.loss(model, batch)

        phi = phi_of(seed).to(self.loss_dtype).requires_grad_(True)
        value = loss(phi)
        assert value.dim() == 0
        assert value.isfinite()
        value.backward()
        assert modes(adapter.model) == before
        assert all(weight.grad is None for weight in adapter.model.parameters())
        assert phi.grad.norm() > 0
        assert torch.equal(value, loss(phi))
        assert torch.equal(value, loss(phi, seed + 1)) != self.samples
        if self.loss_dtype is torch.float64:
            step = 1e-6 * torch.eye(4, dtype=torch.float64)[seed % 4]
            with torch.no_grad():
                slope = (loss(phi + step) - loss(phi - step)) / 2e-6
            torch.testing.assert_close(phi.grad[seed % 4], slope, rtol=1e-3, atol=1e-5)

    @each_a_detector
    @given(seed=SEEDS, batch=pictures())
    def test_detections_are_within_the_picture_best_first(self, toolkit: Any, seed: int, batch: Any) -> None:
        adapter, serving = self.adapted(toolkit, seed)
        before = mixed(adapter.model)
        detections = serving.detect(adapter.model, batch)
        assert modes(adapter.model) == before
        assert any(len(found.scores) for found in detections)
        for found, each in zip(detections, batch, strict=True):
            height, width = each.image.shape[1:]
            assert not any(tensor.requires_grad for tensor in (found.boxes, found.scores))
            beyond = (found.boxes < 0) | (found.boxes > torch.tensor([width, height, width, height]) + 1e-4)
            assert not (self.clips and beyond.any())
            assert (found.boxes[:, 2:] >= found.boxes[:, :2]).all()
            assert ((found.scores >= 0) & (found.scores <= 1)).all()
            assert (found.scores.diff() <= 0).all()
            assert set(found.labels.tolist()) <= set(range(CLASSES))

    @each_a_detector
    @given(seed=SEEDS, batch=pictures())
    def test_the_library_s_own_evaluation_finds_the_same(self, toolkit: Any, seed: int, batch: Any) -> None:
        adapter, serving = self.adapted(toolkit, seed)
        for each in batch:
            expected = self.own(toolkit, adapter.model.eval(), each.image)
            assert_same(serving.detect(adapter.model, [each]), [expected])

    @each_a_detector
    @given(seed=SEEDS, data=st.data())
    def test_a_batch_is_its_pictures_one_by_one(self, toolkit: Any, seed: int, data: Any) -> None:
        batch = data.draw(pictures(None if self.alone else (64, 64)))
        adapter, serving = self.adapted(toolkit, seed)
        expected = [serving.detect(adapter.model, [each])[0] for each in batch]
        assert_same(serving.detect(adapter.model, batch), expected)

    @each_a_detector
    @given(seed=SEEDS, batch=pictures())
    def test_a_phi_of_0_is_the_bare_detector_bit_for_bit(self, toolkit: Any, seed: int, batch: Any) -> None:
        bare = toolkit.build(CLASSES, seed=0).double().requires_grad_(False)  # as an adapter leaves it
        expected = toolkit.detect(bare, batch)
        adapter, _ = self.adapted(toolkit, seed)
        tuned = toolkit.detect(adapter.model, batch)
        adapter.set_phi(torch.zeros(4, dtype=torch.float64))
        assert_same(toolkit.detect(adapter.model, batch), expected, atol=0)
        assert not all(map(same, tuned, expected))

    @each_a_detector
    @given(seed=SEEDS, batch=pictures())
    def test_the_bare_library_loads_an_exported_file_and_finds_the_same(
        self, toolkit: Any, seed: int, batch: Any, tmp_path: Path
    ) -> None:
        adapter, serving = self.adapted(toolkit, seed)
        expected = [serving.detect(adapter.model, [each])[0] for each in batch]
        serving.export(adapter.model, tmp_path / "tuned.pth")
        assert torch.equal(adapter.phi.detach(), phi_of(seed))  # the model is left as it was
        alone = self.load(toolkit, tmp_path / "tuned.pth").eval()
        assert_same([self.own(toolkit, alone, each.image) for each in batch], expected)

    @each_a_detector
    @given(seed=SEEDS, batch=pictures())
    def test_a_merged_detector_is_an_ordinary_one_and_finds_the_same(self, toolkit: Any, seed: int, batch: Any) -> None:
        adapter, serving = self.adapted(toolkit, seed)
        expected = serving.detect(adapter.model, batch)
        merged = adapter.merge()
        assert merged.state_dict().keys() == toolkit.build(CLASSES, seed=0).state_dict().keys()
        assert_same(serving.detect(merged, batch), expected)


class KeepsFeatures(ToolkitTester):
    """What serves a detector keeps what phi leaves as it is; all that `ToolkitTester` says holds of it too."""

    def before_phi(self, model: Any) -> nn.Module:
        """A module before phi that has weights."""
        return model.backbone  # type: ignore[no-any-return]

    @each_a_detector
    @given(seeds=st.lists(SEEDS, min_size=2, max_size=4, unique=True), batch=pictures((64, 64)))
    def test_what_is_found_is_as_by_whole_passes_and_a_picture_takes_one(
        self, toolkit: Any, seeds: Any, batch: Any
    ) -> None:
        """Weights that change before phi take another."""
        adapter, serving = self.adapted(toolkit)
        whole = [copy.deepcopy(adapter.model) for _ in range(2)]
        before, passes = self.before_phi(adapter.model), list[int]()
        handle = before.register_forward_hook(lambda module, args, output: passes.append(1))
        for model in whole:
            for seed in seeds:
                adapter.set_phi(phi_of(seed))
                mo.Adapter(model).set_phi(phi_of(seed))
                assert_same(serving.detect(adapter.model, batch), toolkit.detect(model, batch))
            assert len(passes) <= len(batch)
            passes.clear()
            with torch.no_grad():
                for each in (adapter.model, whole[1]):
                    next(self.before_phi(each).parameters()).mul_(1.1)
        handle.remove()


class TakesSettings(ToolkitTester):
    """A detector acts by settings of inference as the library does by its own."""

    def settings(self, toolkit: Any, model: nn.Module) -> Any:
        """The settings ``score_thresh``, ``detections``, ``nms`` and ``size``."""
        raise NotImplementedError

    def set_own(self, toolkit: Any, model: nn.Module, values: dict[str, Any]) -> None:
        """Set the library's own attributes, on a detector and a toolkit that are thrown away."""
        raise NotImplementedError

    def applied(self, toolkit: Any, model: nn.Module, values: dict[str, Any]) -> AbstractContextManager[Any]:
        return self.settings(toolkit, model).applied(values)  # type: ignore[no-any-return]

    @each_a_detector
    @given(
        batch=pictures((64, 64)),
        values=st.fixed_dictionaries(
            {},
            optional={
                "score_thresh": st.floats(0.01, 0.5),
                "detections": st.integers(1, 30),
                "nms": st.floats(0.35, 0.85),
                "size": st.sampled_from((0.71, 0.84, 1.19, 1.41)),
            },
        ),
    )
    def test_settings_of_inference_act_as_the_library_s_own(self, toolkit: Any, batch: Any, values: Any) -> None:
        """Afterwards, also after an exception, all is as it was."""
        adapter, serving = self.adapted(toolkit)
        model = adapter.model.eval()
        expected, told = serving.detect(model, batch), toolkit.inference(model)
        with self.applied(toolkit, model, values):
            found = serving.detect(model, batch)
        with pytest.raises(KeyError), self.applied(toolkit, model, values):
            raise KeyError
        assert_same(serving.detect(model, batch), expected, atol=0)
        assert toolkit.inference(model) == told
        stock, theirs = copy.deepcopy(model), copy.deepcopy(toolkit)
        self.set_own(theirs, stock, values)
        for ours, each in zip(found, batch, strict=True):
            assert same(ours, self.own(theirs, stock, each.image))
