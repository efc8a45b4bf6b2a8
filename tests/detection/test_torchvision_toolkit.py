"""Torchvision's detectors behind the toolkit: what they compute is what torchvision computes, also after a merge."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchvision")

from torchvision.models.detection import FasterRCNN, faster_rcnn, fasterrcnn_resnet50_fpn
from torchvision.models.detection._utils import overwrite_eps
from torchvision.models.detection.backbone_utils import _resnet_fpn_extractor
from torchvision.ops import FrozenBatchNorm2d

from helpers.boxes import CLASSES, example
from helpers.detectors import thin_detectors
from helpers.refusals import assert_refused
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.detection.shapes import masks_from, pixels_in
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.detection.torchvision_toolkit import PLACEMENTS, TorchvisionToolkit, images_of
from metricopt_ext.errors import ConfigError, DataError, MetricError

SMALL = TorchvisionToolkit(min_size=64, max_size=64, width=16, head=32)


BATCH = [example(2, seed=1), example(3, height=48, width=56, seed=2), example(0, seed=3)]


def lived_in(model: nn.Module) -> nn.Module:
    """Give the norms values that they are not born with."""
    rng = torch.Generator().manual_seed(0)
    for module in model.modules():
        if hasattr(module, "running_var"):
            for name, low in (("weight", 0.7), ("bias", -0.3), ("running_mean", -0.3), ("running_var", 0.7)):
                tensor = getattr(module, name).detach()
                tensor.copy_(low + 0.6 * torch.rand(tensor.shape, generator=rng))
    return model


def seeded_loss(model: nn.Module, batch: list[Example], toolkit: TorchvisionToolkit = SMALL) -> Tensor:
    torch.manual_seed(5)
    return toolkit.loss(model, batch)


def test_difficult_and_crowd_boxes_are_left_out_of_the_loss() -> None:
    model = SMALL.build(CLASSES, seed=0).eval()
    full = example(3)
    attach_film(model, PLACEMENTS["roi_head"], dim=2)  # which keeps the norms from updating
    first = {name: getattr(full.truth, name)[:1] for name in ("boxes", "labels", "difficult", "crowd")}
    expected = seeded_loss(model, [Example(full.image, replace(full.truth, **first))])
    flags = {"difficult": torch.tensor([False, True, False]), "crowd": torch.tensor([False, False, True])}
    assert torch.equal(seeded_loss(model, [Example(full.image, replace(full.truth, **flags))]), expected)
    assert not torch.equal(seeded_loss(model, [full]), expected)


def with_box(full: Example, *boxes: list[float]) -> Example:
    """The example with further boxes of the first class."""
    truth, more = full.truth, torch.tensor(boxes)
    flags = torch.zeros(len(truth.boxes) + len(more), dtype=torch.bool)
    labels = torch.cat([truth.labels, torch.zeros(len(more), dtype=torch.int64)])
    places = torch.cat([truth.boxes, more])
    return Example(full.image, replace(truth, boxes=places, labels=labels, difficult=flags, crowd=flags))


@pytest.mark.parametrize("name", ["small_fpn", "retinanet_resnet50_fpn"])
def test_boxes_are_learned_from_as_far_as_they_are_in_their_image(name: str) -> None:
    toolkit = replace(SMALL, name=name)
    model = toolkit.build(CLASSES, seed=0).eval()
    full = example(2, height=48, width=56)
    nan, wide = float("nan"), 1e30
    outside = ([500.0, 300, 540, 340], [-20, -20, 0, 10], [56, 0, 60, 48], [0, 48, 9, 49])
    empty = ([5.0, 5, 5, 9], [9, 9, 5, 5], [nan, 3, 9, 9], [3, 3, 9, nan])
    wanted = seeded_loss(model, [full], toolkit)
    assert torch.equal(seeded_loss(model, [with_box(full, *outside, *empty)], toolkit), wanted)
    partly, clipped = with_box(full, [-9.0, 20, wide, 90]), with_box(full, [0.0, 20, 56, 48])
    assert torch.equal(seeded_loss(model, [partly], toolkit), seeded_loss(model, [clipped], toolkit))
    assert not torch.equal(seeded_loss(model, [partly], toolkit), wanted)


class Told(nn.Module):
    """A detector that finds what it is told to, and remembers its targets."""

    def __init__(self, **found: Tensor) -> None:
        super().__init__()
        self.layer, self.found = nn.Linear(1, 1).double(), found

    def forward(self, images: Any, targets: Any = None) -> Any:
        self.targets = targets
        return {"loss_mask": self.layer.weight.sum()} if self.training else [self.found] * len(images)


def test_masks_are_learned_and_found_as_torchvision_has_them() -> None:
    toolkit = TorchvisionToolkit("maskrcnn_resnet50_fpn", kind="segm")
    drawn = torch.rand(2, 48, 56, generator=torch.Generator().manual_seed(0)) < 0.3
    plain = example(3, height=48, width=56, seed=2)
    crowd = torch.tensor([False, True, False])
    shapes = masks_from(torch.stack([drawn[0], ~drawn[0], drawn[1]]).numpy())
    shown = Example(plain.image, replace(plain.truth, crowd=crowd, shapes=shapes))
    soft = torch.where(drawn, 0.5, 0.4999)[:, None]
    model = Told(boxes=torch.rand(2, 4), scores=torch.rand(2), labels=torch.tensor([2, 1]), masks=soft)
    assert toolkit.loss(model, [shown]) == model.layer.weight.sum()
    (target,) = model.targets
    assert torch.equal(target["masks"].bool(), drawn)
    assert torch.equal(target["labels"], plain.truth.labels[~crowd] + 1)
    (found,) = toolkit.detect(model, [shown])
    assert found.labels.tolist() == [1, 0]
    assert np.array_equal(pixels_in(found.shapes or [], 48, 56), drawn.numpy())
    assert_refused(lambda: toolkit.loss(model, [plain]), DataError)
    model.found.pop("masks")
    assert_refused(lambda: toolkit.detect(model, [shown]), MetricError, "1")


def test_a_loss_that_is_not_finite_is_named() -> None:
    model: Any = SMALL.build(CLASSES, seed=0)
    model.roi_heads.box_predictor.cls_score.bias.data[0] = torch.nan
    assert_refused(lambda: SMALL.loss(model, BATCH), FloatingPointError, "loss_classifier", "nan", "lr")


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"name": "yolo"}, ("yolo",)),
        ({"min_size": 200}, ("min_size=200", "max_size=128")),
        ({"weights": "coco.pth"}, ("weights", "small_fpn")),
        (
            {"kind": "segm"},
            ("small_fpn", "maskrcnn_resnet50_fpn"),
        ),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], names: tuple[str, ...]) -> None:
    assert_refused(lambda: TorchvisionToolkit(**settings), ConfigError, *names)


@torch.no_grad()
def unsorted_outputs(model: Any) -> list[Tensor]:
    """What a detector computes before it sorts and suppresses boxes, where a rounding decides between near-ties.

    Features, objectness and offsets of all anchors, class scores and offsets of two regions that are always the same.
    """
    model.eval()
    images, _ = model.transform(images_of(model, BATCH[:1]))
    features = model.backbone(images.tensors)
    objectness, offsets = model.rpn.head(list(features.values()))
    regions = torch.tensor([[3.0, 5.0, 40.0, 60.0], [20.0, 10.0, 31.0, 24.0]]).to(images.tensors)
    pooled = model.roi_heads.box_roi_pool(features, [regions], images.image_sizes)
    predicted = model.roi_heads.box_predictor(model.roi_heads.box_head(pooled))
    return [*features.values(), *objectness, *offsets, *predicted]


def difference(first: Tensor, second: Tensor) -> float:
    """Return the greatest difference of two tensors over the greatest value of the second."""
    return float((first - second).abs().max() / second.abs().max())


def assert_close(first: list[Tensor], second: list[Tensor], tolerance: float) -> None:
    for ours, theirs in zip(first, second, strict=True):
        assert ours.dtype == theirs.dtype == torch.float64
        assert difference(ours, theirs) < tolerance


@pytest.fixture(scope="module", autouse=True)
def thin() -> Iterator[None]:
    """See `thin_detectors`."""
    with pytest.MonkeyPatch.context() as patch:
        thin_detectors(patch)
        yield


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[FasterRCNN, str]:
    """Torchvision's detector from weights as it publishes them for COCO, in double precision, and their file."""
    torch.manual_seed(0)
    body = faster_rcnn.resnet50(norm_layer=FrozenBatchNorm2d)
    detector = lived_in(FasterRCNN(_resnet_fpn_extractor(body, 5), 91, min_size=64, max_size=64))
    overwrite_eps(detector, 0.0)
    for module in detector.modules():
        if isinstance(module, FrozenBatchNorm2d):
            module.running_var[:3] = torch.tensor([1e-4, 1e-6, 1e-12])  # where 1e-5 more or less matters
            module.weight[:3] *= module.running_var[:3].sqrt()
    path = tmp_path_factory.mktemp("weights") / "coco.pth"
    torch.save(detector.state_dict(), path)
    return detector.double().eval(), str(path)


def test_a_detector_from_published_weights_is_exported_for_torchvision(
    published: tuple[FasterRCNN, str], tmp_path: Path
) -> None:
    """With phi in some of the norms, which were rescaled, and in linear layers."""
    sizes = {"min_size": 64, "max_size": 64}
    toolkit = TorchvisionToolkit("fasterrcnn_resnet50_fpn", weights=published[1], **sizes)
    model = toolkit.build(CLASSES, seed=0).double()
    options = {"num_classes": CLASSES + 1, **sizes}
    stock = fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None, **options).double()
    adapter = attach_film(model, [*toolkit.film_layers(model, ["roi_head"]), "backbone.body.layer4.*"], dim=4)
    adapter.set_phi(torch.tensor([0.03, -0.02, 0.01, 0.02], dtype=torch.float64))
    toolkit.export(model, tmp_path / "tuned.pth")
    stock.load_state_dict(torch.load(tmp_path / "tuned.pth", weights_only=True), strict=True)
    assert_close(unsorted_outputs(stock), unsorted_outputs(model), 1e-10)
