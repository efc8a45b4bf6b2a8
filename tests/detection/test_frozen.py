"""Features in memory: detections and phi's gradient are those of the detector without them."""

import copy
import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchvision")

from helpers.boxes import CLASSES, example
from helpers.refusals import assert_refused, having
from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.detection.frozen import FrozenFeatures
from metricopt_ext.detection.records import Detections
from metricopt_ext.detection.task import detection_loss
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.detection.torchvision_toolkit import PLACEMENTS, TorchvisionToolkit
from metricopt_ext.errors import AdapterError

TOOLKIT = TorchvisionToolkit(min_size=64, max_size=64, width=16, head=32)


SAME_SIZE = [example(2, seed=1), example(3, seed=2), example(0, seed=3)]
ALONE = [[example(2, seed=1)], [example(3, height=36, width=50, seed=2)], [example(1, 120, 90, seed=4)]]


def adapted(name: str = "small_fpn", layers: Sequence[str] = PLACEMENTS["roi_head"]) -> tuple[Any, Adapter]:
    toolkit = replace(TOOLKIT, name=name)
    model: Any = toolkit.build(CLASSES, seed=0).double()
    # Other numbers in training than in detection, as the 800-pixel detectors have.
    model.rpn._post_nms_top_n = {"training": 40, "testing": 20}
    adapter = attach_film(model, layers, dim=4)
    adapter.set_phi(torch.tensor([0.3, -0.2, 0.1, 0.2], dtype=torch.float64))
    return toolkit, adapter


def assert_same(ours: Detections, other: Detections) -> None:
    assert len(ours) > 0
    assert torch.equal(ours.labels, other.labels)
    torch.testing.assert_close(ours.boxes, other.boxes, rtol=0, atol=1e-9)
    torch.testing.assert_close(ours.scores, other.scores, rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "batch"),
    [*(("small_fpn", batch) for batch in (SAME_SIZE, *ALONE)), ("fasterrcnn_resnet50_fpn_v2", ALONE[0])],
    ids=["one size", "square", "scaled up", "scaled down", "a box head with norms"],
)
def test_detections_are_those_without_memory(name: str, batch: list[Example]) -> None:
    toolkit, adapter = adapted(name)
    frozen = FrozenFeatures(toolkit, adapter)
    for _ in range(2):
        for ours, other in zip(frozen.detect(adapter.model, batch), toolkit.detect(adapter.model, batch), strict=True):
            assert_same(ours, other)
        adapter.set_phi(-adapter.phi.detach())


def gradient(loss: Any, adapter: Adapter, batch: list[Example]) -> tuple[Tensor, Tensor]:
    phi = adapter.phi.detach().clone().requires_grad_(True)
    with adapter.using(phi) as model:
        value = loss(model, batch)
    return value.detach(), torch.autograd.grad(value, phi)[0]


@pytest.mark.parametrize("batch", [SAME_SIZE, *ALONE], ids=["one size", "square", "scaled up", "scaled down"])
def test_the_gradient_is_that_without_memory(batch: list[Example]) -> None:
    toolkit, adapter = adapted()
    heads: Any = adapter.model.roi_heads
    # Samples all proposals, whatever was drawn before for the proposals' loss.
    heads.fg_bg_sampler.batch_size_per_image = 10_000
    heads.fg_bg_sampler.positive_fraction = 0.5
    frozen = FrozenFeatures(toolkit, adapter)
    value, ours = gradient(frozen.loss, adapter, batch)
    whole, theirs = gradient(toolkit.loss, adapter, batch)
    assert (theirs != 0).all()
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert value < whole  # without the proposals' losses


def test_outputs_of_coco_are_read_and_trained_without_memory_and_with_it() -> None:
    model: Any
    toolkit = replace(TOOLKIT, labels=(18, 1, 17)[:CLASSES])
    model = toolkit.build(CLASSES, seed=0).double()
    assert model.roi_heads.box_predictor.cls_score.out_features == 91
    model.roi_heads.box_predictor.cls_score.bias.data[[1, 17, 18, 50]] = 3.0  # whatever the box
    model.roi_heads.fg_bg_sampler.batch_size_per_image = 10_000  # all, whatever was drawn before
    model.roi_heads.fg_bg_sampler.positive_fraction = 0.5
    model.rpn._post_nms_top_n = {"training": 40, "testing": 20}
    adapter = attach_film(model, PLACEMENTS["roi_head"], dim=4)
    frozen = FrozenFeatures(toolkit, adapter)
    for ours, other in zip(frozen.detect(model, SAME_SIZE), toolkit.detect(model, SAME_SIZE), strict=True):
        assert_same(ours, other)
        assert set(ours.labels.tolist()) <= set(range(CLASSES))
    gradients = [gradient(each.loss, adapter, SAME_SIZE)[1] for each in (frozen, toolkit)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)


def test_an_image_is_computed_once_for_the_loss_and_once_for_detection() -> None:
    toolkit, adapter = adapted()
    model: Any = adapter.model
    passes: list[int] = []
    model.backbone.register_forward_hook(lambda *_: passes.append(1))
    frozen = FrozenFeatures(toolkit, adapter)
    for _ in range(2):
        frozen.loss(model, SAME_SIZE)
        frozen.detect(model, SAME_SIZE[:2])
        frozen.detect(model, SAME_SIZE)
    assert len(passes) == 2 * len(SAME_SIZE)


@pytest.mark.parametrize("images", [0, 2])
def test_what_does_not_fit_is_computed_each_time_to_the_same_numbers(images: int) -> None:
    toolkit, adapter = adapted()
    model: Any = adapter.model
    model.roi_heads.fg_bg_sampler.batch_size_per_image = 8  # fewer than there are proposals
    passes: list[int] = []
    model.backbone.register_forward_hook(lambda *_: passes.append(1))
    # An image has 20 proposals, of 16 channels and 4 coordinates in double precision, and twice as many for the loss.
    gib = 2 * (images + 0.5) * 20 * (16 * 49 + 4) * 8 / 2**30  # half of it is for detection
    for_loss = images // 2
    whole, bounded = FrozenFeatures(toolkit, adapter), FrozenFeatures(toolkit, adapter, gib)

    def numbers(frozen: FrozenFeatures) -> list[Tensor]:
        found, again = frozen.detect(model, SAME_SIZE), frozen.detect(model, SAME_SIZE)
        slope = gradient(detection_loss(frozen), adapter, SAME_SIZE)
        return [*(tensor for each in (*found, *again) for tensor in (each.boxes, each.scores)), *slope]

    expected = numbers(whole)
    passes.clear()
    names = (images, f"adapter.keep_gib={gib}")
    with pytest.warns(UserWarning, match=having(*names)) as warned:
        first, second = (numbers(bounded) for _ in range(2))
    assert len(warned) == 1
    assert all(map(torch.equal, first, expected))
    assert all(map(torch.equal, second, expected))
    assert len(passes) == images + 4 * (3 - images) + for_loss + 2 * (3 - for_loss)


def test_the_loss_leaves_room_for_detection() -> None:
    """Meta-training computes the losses of many images before it detects in the few that it asks the metric about."""
    toolkit, adapter = adapted()
    passes: list[int] = []
    adapter.model.backbone.register_forward_hook(lambda *_: passes.append(1))
    frozen = FrozenFeatures(toolkit, adapter, 2 * 3.5 * 20 * (16 * 49 + 4) * 8 / 2**30)
    adapter.model.rpn._post_nms_top_n = {"training": 40, "testing": 20}
    many = [example(2, seed=seed) for seed in range(8)]
    with pytest.warns(UserWarning, match="images for loss fill their half"):
        gradient(detection_loss(frozen), adapter, many)
    for _ in range(2):
        frozen.detect(adapter.model, SAME_SIZE)
    assert len(passes) == 8 + 3


@pytest.mark.parametrize("placement", ["backbone", "fpn", "rpn"])
def test_an_adapter_elsewhere_is_refused(placement: str) -> None:
    toolkit, adapter = adapted(layers=[*PLACEMENTS["roi_head"], PLACEMENTS[placement][0]])
    first = next(layer for layer in adapter.layers if not layer.startswith("roi_heads."))
    assert_refused(lambda: FrozenFeatures(toolkit, adapter), AdapterError, first)


def shift_batchnorm(model: Any) -> None:
    """Give BatchNorm other statistics, in place, as estimating them anew does."""
    for name, buffer in model.backbone.named_buffers():
        if name.endswith("running_mean"):
            buffer.add_(0.3)


def test_a_copy_with_other_statistics_has_a_memory_of_its_own() -> None:
    """A search may begin from the same detector with its BatchNorm estimated anew."""
    toolkit, adapter = adapted()
    frozen = FrozenFeatures(toolkit, adapter)
    before = frozen.detect(adapter.model, SAME_SIZE)
    other: Any = copy.deepcopy(adapter.model)
    shift_batchnorm(other)
    passes: list[int] = []
    other.backbone.register_forward_hook(lambda *_: passes.append(1))
    for _ in range(2):
        found = frozen.detect(other, SAME_SIZE)
    assert len(passes) == len(SAME_SIZE)
    for ours, theirs in zip(found, toolkit.detect(other, SAME_SIZE), strict=True):
        assert_same(ours, theirs)
    assert not torch.equal(found[0].scores, before[0].scores)
    for ours, theirs in zip(frozen.detect(adapter.model, SAME_SIZE), before, strict=True):
        assert torch.equal(ours.scores, theirs.scores)


@pytest.mark.parametrize("use", ["detect", "loss"])
def test_what_changed_before_the_head_is_computed_anew(use: str) -> None:
    """The best start's statistics are kept in the user's own model, whose features are in memory by then."""
    toolkit, adapter = adapted()
    frozen, fresh = FrozenFeatures(toolkit, adapter), FrozenFeatures(toolkit, adapter)

    def numbers(by: FrozenFeatures) -> list[Tensor]:
        if use == "detect":
            return [tensor for each in by.detect(adapter.model, SAME_SIZE) for tensor in (each.boxes, each.scores)]
        return [*gradient(detection_loss(by), adapter, SAME_SIZE)]

    before = numbers(frozen)
    shift_batchnorm(adapter.model)
    after = numbers(frozen)
    assert all(map(torch.equal, after, numbers(fresh)))
    assert not all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_a_model_that_is_gone_is_forgotten() -> None:
    toolkit, adapter = adapted()
    frozen = FrozenFeatures(toolkit, adapter)
    other = copy.deepcopy(adapter.model)
    frozen.detect(other, SAME_SIZE)
    assert len(frozen.memories) == 1
    del other
    gc.collect()
    assert len(frozen.memories) == 0


def test_a_model_whose_backbone_is_trained_is_run_whole() -> None:
    toolkit, adapter = adapted()
    frozen = FrozenFeatures(toolkit, adapter)
    frozen.loss(adapter.model, SAME_SIZE)
    weight = next(adapter.model.backbone.parameters()).requires_grad_(True)
    frozen.loss(adapter.model, SAME_SIZE).backward()
    assert weight.grad is not None
    assert (weight.grad != 0).any()


def test_another_model_is_run_whole() -> None:
    toolkit, adapter = adapted()
    frozen = FrozenFeatures(toolkit, adapter)
    frozen.detect(adapter.model, SAME_SIZE)
    other: nn.Module = frozen.build(CLASSES, seed=1)
    for found, expected in zip(frozen.detect(other, SAME_SIZE), toolkit.detect(other, SAME_SIZE), strict=True):
        assert torch.equal(found.boxes, expected.boxes)
    torch.manual_seed(0)
    loss = frozen.loss(other, SAME_SIZE)
    torch.manual_seed(0)
    assert torch.equal(loss, toolkit.loss(other, SAME_SIZE))
