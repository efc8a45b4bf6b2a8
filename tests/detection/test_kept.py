"""What phi leaves as it is, computed once: the loss, its gradient, memory, copies and masks are as without.

That detections are, the toolkits' contract says.
"""

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchvision")

from helpers.boxes import CLASSES, example
from helpers.detectors import SMALL_IMAGES, small_detector
from helpers.refusals import assert_refused, having
from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.detection.build import remembering
from metricopt_ext.detection.config import DetectorAdapterConfig
from metricopt_ext.detection.frozen import FrozenFeatures
from metricopt_ext.detection.kept_maps import keep_maps
from metricopt_ext.detection.records import Detections
from metricopt_ext.detection.task import detection_loss
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.detection.torchvision_toolkit import PLACEMENTS, TorchvisionToolkit, images_of, targets_of
from metricopt_ext.errors import AdapterError
from metricopt_ext.methods.starts import reestimate_batchnorm

TOOLKIT = TorchvisionToolkit(min_size=64, max_size=64, width=16, head=32)


SAME_SIZE = [example(2, seed=1), example(3, seed=2), example(0, seed=3)]
ALONE = [[example(2, seed=1)], [example(3, height=36, width=50, seed=2)], [example(1, 120, 90, seed=4)]]


def adapted(layers: Sequence[str] = PLACEMENTS["roi_head"], toolkit: Any = TOOLKIT) -> tuple[Any, Adapter]:
    model: Any = toolkit.build(CLASSES, seed=0).double()
    # Other numbers in training than in detection, as the 800-pixel detectors have.
    model.rpn._post_nms_top_n = {"training": 40, "testing": 20}
    adapter = attach_film(model, layers, dim=4)
    adapter.set_phi(torch.tensor([0.3, -0.2, 0.1, 0.2], dtype=torch.float64))
    # All proposals are sampled, whatever was drawn before for the proposals' loss.
    model.roi_heads.fg_bg_sampler.batch_size_per_image, model.roi_heads.fg_bg_sampler.positive_fraction = 10_000, 0.5
    return toolkit, adapter


def assert_same(ours: Detections, other: Detections) -> None:
    assert len(ours) > 0
    assert torch.equal(ours.labels, other.labels)
    torch.testing.assert_close(ours.boxes, other.boxes, rtol=0, atol=1e-9)
    torch.testing.assert_close(ours.scores, other.scores, rtol=0, atol=1e-9)


def gradient(loss: Any, adapter: Adapter, batch: list[Example]) -> tuple[Tensor, Tensor]:
    phi = adapter.phi.detach().clone().requires_grad_(True)
    with adapter.using(phi) as model:
        value = loss(model, batch)
    return value.detach(), torch.autograd.grad(value, phi)[0]


@pytest.mark.parametrize("batch", [SAME_SIZE, *ALONE], ids=["one size", "square", "scaled up", "scaled down"])
def test_the_gradient_is_that_without_memory(batch: list[Example]) -> None:
    toolkit, adapter = adapted()
    frozen = FrozenFeatures(toolkit, adapter)
    value, ours = gradient(frozen.loss, adapter, batch)
    whole, theirs = gradient(toolkit.loss, adapter, batch)
    assert (theirs != 0).all()
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert value < whole  # without the proposals' losses


def test_outputs_of_coco_are_read_and_trained_without_memory_and_with_it() -> None:
    toolkit, adapter = adapted(toolkit=replace(TOOLKIT, labels=(18, 1, 17)[:CLASSES]))
    model: Any = adapter.model
    assert model.roi_heads.box_predictor.cls_score.out_features == 91
    model.roi_heads.box_predictor.cls_score.bias.data[[1, 17, 18, 50]] = 3.0  # whatever the box
    frozen = FrozenFeatures(toolkit, adapter)
    for ours, other in zip(frozen.detect(model, SAME_SIZE), toolkit.detect(model, SAME_SIZE), strict=True):
        assert_same(ours, other)
        assert set(ours.labels.tolist()) <= set(range(CLASSES))
    gradients = [gradient(each.loss, adapter, SAME_SIZE)[1] for each in (frozen, toolkit)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("images", [0, 2])
def test_what_does_not_fit_is_computed_each_time_to_the_same_numbers(images: int) -> None:
    toolkit, adapter = adapted()
    model: Any = adapter.model
    model.roi_heads.fg_bg_sampler.batch_size_per_image = 8  # fewer than there are proposals
    # An image has 20 proposals, of 16 channels and 4 coordinates in double precision, and twice as many for the loss.
    gib = 2 * (images + 0.5) * 20 * (16 * 49 + 4) * 8 / 2**30  # half of it is for detection
    whole, bounded = FrozenFeatures(toolkit, adapter), FrozenFeatures(toolkit, adapter, gib)

    def numbers(frozen: FrozenFeatures) -> list[Tensor]:
        found, again = frozen.detect(model, SAME_SIZE), frozen.detect(model, SAME_SIZE)
        slope = gradient(detection_loss(frozen), adapter, SAME_SIZE)
        return [*(tensor for each in (*found, *again) for tensor in (each.boxes, each.scores)), *slope]

    expected = numbers(whole)
    with pytest.warns(UserWarning, match=having(images, f"adapter.keep_gib={gib}")) as warned:
        first, second = (numbers(bounded) for _ in range(2))
    assert len(warned) == 1
    assert all(map(torch.equal, first, expected))
    assert all(map(torch.equal, second, expected))


def test_an_adapter_elsewhere_is_refused() -> None:
    toolkit, adapter = adapted(layers=[*PLACEMENTS["roi_head"], PLACEMENTS["rpn"][0]])
    first = next(layer for layer in adapter.layers if not layer.startswith("roi_heads."))
    assert_refused(lambda: FrozenFeatures(toolkit, adapter), AdapterError, first)


def shift_batchnorm(model: Any) -> None:
    """Give BatchNorm other statistics, in place, as estimating them anew does."""
    for name, buffer in model.backbone.named_buffers():
        if name.endswith("running_mean"):
            buffer.add_(0.3)


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


def test_other_models_and_those_whose_backbone_is_trained_are_run_whole() -> None:
    toolkit, adapter = adapted()
    frozen = FrozenFeatures(toolkit, adapter)
    frozen.detect(adapter.model, SAME_SIZE)
    other: nn.Module = frozen.build(CLASSES, seed=1)
    for found, expected in zip(frozen.detect(other, SAME_SIZE), toolkit.detect(other, SAME_SIZE), strict=True):
        assert torch.equal(found.boxes, expected.boxes)
    frozen.loss(adapter.model, SAME_SIZE)
    weight = next(adapter.model.backbone.parameters()).requires_grad_(True)
    frozen.loss(adapter.model, SAME_SIZE).backward()
    assert weight.grad is not None
    assert (weight.grad != 0).any()


def test_a_backbone_of_one_map_is_trained_and_kept_as_torchvision_has_it() -> None:
    model = small_detector("FasterRCNN")
    adapter = attach_film(model, ["roi_heads.box_head.fc?"], dim=2)
    frozen, losses = FrozenFeatures(TOOLKIT, adapter), list[Tensor]()
    batch = [replace(each, truth=replace(each.truth, labels=each.truth.labels % 2)) for each in SAME_SIZE]
    for found, expected in zip(frozen.detect(model, batch), TOOLKIT.detect(model, batch), strict=True):
        assert_same(found, expected)
    for loss in (TOOLKIT.loss, lambda *of: sum(model.train()(images_of(*of), targets_of(*of)).values())):
        torch.manual_seed(0)
        losses.append(loss(model, batch))
    torch.testing.assert_close(*losses)
    assert frozen.loss(model, batch).isfinite()


# --- Maps and proposals, where phi is not in the box head alone, or masks are judged -------------------------------

PHI = torch.tensor([0.4, -0.3], dtype=torch.float64)


CASES = {
    "masks": (["roi_heads.mask_head.0.0"], ["backbone", "rpn"]),
    "in the rpn": (["rpn.head.conv.0.0"], ["backbone"]),
    "in the backbone": (["backbone.body.1"], []),
    "retinanet": (["head.regression_head.conv.0.0"], []),
}


@pytest.mark.parametrize("case", CASES)
def test_only_what_phi_changes_is_computed_for_each_phi(case: str) -> None:
    layers, expected = CASES[case]
    model = small_detector("RetinaNet" if case == "retinanet" else "MaskRCNN")
    adapter = attach_film(model, layers, dim=2)
    plain, ran = copy.deepcopy(model), list[str]()
    model.backbone.body[0].register_forward_hook(lambda *_: ran.append("backbone"))
    images = [torch.rand(3, 40, 48, dtype=torch.float64), torch.rand(3, 48, 30, dtype=torch.float64)]
    with pytest.warns(UserWarning, match="of a RetinaNet, as its code") if case == "retinanet" else nullcontext():
        assert keep_maps(model, gib=1.0) == expected

    @torch.no_grad()
    def found(phi: Tensor, batch: list[Tensor] = images) -> list[Tensor]:
        adapter.set_phi(phi)
        type(adapter)(plain).set_phi(phi)
        ours, whole = (each(batch) for each in (model, plain))
        pairs = [(a[key], b[key]) for a, b in zip(ours, whole, strict=True) for key in b]
        assert all(torch.equal(*pair) for pair in pairs)
        return [own for own, _ in pairs]

    first, other = found(0 * PHI), found(PHI)
    assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(first, other, strict=True))
    found(-PHI)
    assert len(ran) == (1 if expected else 3)
    found(PHI, images[::-1])
    for each in (model, plain):
        with torch.no_grad():
            each.backbone.body[0].weight.mul_(1.1)
    found(PHI)
    assert len(ran) == (3 if expected else 5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:the backbone's maps")
def test_statistics_of_batchnorm_are_estimated_as_without(case: str) -> None:
    """Each time: a map that was computed while others were in use would estimate them twice, or not at all."""
    model = small_detector("RetinaNet" if case == "retinanet" else "MaskRCNN")
    attach_film(model, CASES[case][0], dim=2)
    plain, batches = copy.deepcopy(model), [[image * scale] for image in SMALL_IMAGES for scale in (0.3, 1.0)]
    keep_maps(model, gib=1.0)
    for _ in range(2):
        with torch.no_grad():
            model(batches[0])  # keeps its map
        ours, expected = (reestimate_batchnorm(each, batches) for each in (model, plain))
        assert not torch.equal(expected.backbone.body[1].running_mean, plain.backbone.body[1].running_mean)
        for name, tensor in expected.named_buffers():
            assert torch.equal(ours.get_buffer(name), tensor), name


def test_phi_in_the_rpn_leaves_the_backbone_s_maps() -> None:
    """Where boxes are judged, too."""
    model = TOOLKIT.build(CLASSES, seed=0).double()
    adapter = attach_film(model, PLACEMENTS["rpn"], dim=2)
    plain, ran = copy.deepcopy(model), list[int]()
    next(model.backbone.body.children()).register_forward_hook(lambda *_: ran.append(1))
    used = remembering(TOOLKIT, adapter, DetectorAdapterConfig(placement="rpn"))
    for phi in (0 * PHI, PHI, -PHI):
        for each in (adapter, Adapter(plain)):
            each.set_phi(phi)
        for found, expected in zip(used.detect(model, SAME_SIZE), TOOLKIT.detect(plain, SAME_SIZE), strict=True):
            assert_same(found, expected)
    assert len(ran) == 1


def test_the_loss_is_as_without() -> None:
    model = small_detector("MaskRCNN")
    adapter = attach_film(model, ["roi_heads.mask_head.0.0"], dim=2)
    plain = copy.deepcopy(model)
    keep_maps(model, gib=1.0)
    image, box = torch.rand(3, 48, 48, dtype=torch.float64), torch.tensor([[8.0, 8.0, 40.0, 36.0]]).double()
    target = {"boxes": box, "labels": torch.ones(1, dtype=torch.int64), "masks": torch.ones(1, 48, 48).byte()}
    losses = []
    for each in (model, plain):
        torch.manual_seed(0)
        losses.append(sum(each.train()([image], [target]).values()))
    assert torch.equal(*losses)
    losses[0].backward()
    assert adapter.phi.grad.abs().max() > 0
