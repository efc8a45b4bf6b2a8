"""What phi leaves as it is is computed once, and masks are the same to the last bit."""

import copy
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchvision")

from torchvision.models.detection import MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops import MultiScaleRoIAlign

from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.detection.build import remembering
from metricopt_ext.detection.config import DetectorAdapterConfig
from metricopt_ext.detection.frozen import FrozenFeatures
from metricopt_ext.detection.kept_maps import keep_maps
from metricopt_ext.detection.torchvision_toolkit import TorchvisionToolkit

PHI = torch.tensor([0.4, -0.3], dtype=torch.float64)


def detector(kind: str) -> Any:
    """Make an untrained detector on two convolutions, whose backbone has one map."""
    torch.manual_seed(0)
    body: Any = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1))
    body.out_channels = 8
    anchors = AnchorGenerator(((24.0,),), ((1.0,),))
    sizes: dict[str, Any] = {"min_size": 48, "max_size": 48}
    if kind == "retinanet":
        return RetinaNet(body, 3, anchor_generator=anchors, score_thresh=0.0, **sizes).double().eval()
    pools = {"box_roi_pool": MultiScaleRoIAlign(["0"], 3, 1)}
    heads = {"box_head": TwoMLPHead(72, 16), "box_predictor": FastRCNNPredictor(16, 3)}
    some: dict[str, Any] = {"rpn_post_nms_top_n_test": 12, "box_score_thresh": 0.0, "box_detections_per_img": 4}
    some |= {**pools, **heads, **sizes, "rpn_anchor_generator": anchors}
    own: dict[str, Any] = {"mask_roi_pool": MultiScaleRoIAlign(["0"], 5, 1), "mask_head": MaskRCNNHeads(8, (8,), 1)}
    return MaskRCNN(body, mask_predictor=MaskRCNNPredictor(8, 8, 3), **own, **some).double().eval()


CASES = {
    "masks": (["roi_heads.mask_head.0.0"], ["backbone", "rpn"]),
    "in the rpn": (["rpn.head.conv.0.0"], ["backbone"]),
    "in the backbone": (["backbone.1"], []),
    "retinanet": (["head.regression_head.conv.0.0"], []),
}


@pytest.mark.parametrize("case", CASES)
def test_only_what_phi_changes_is_computed_for_each_phi(case: str) -> None:
    layers, expected = CASES[case]
    model = detector(case if case == "retinanet" else "masks")
    adapter = attach_film(model, layers, dim=2)
    plain, ran = copy.deepcopy(model), list[str]()
    model.backbone[0].register_forward_hook(lambda *_: ran.append("backbone"))
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
            each.backbone[0].weight.mul_(1.1)
    found(PHI)
    assert len(ran) == (3 if expected else 5)


def test_of_boxes_whole_passes_are_told_of_where_phi_leaves_the_backbone_as_it_is() -> None:
    told = "backbone's maps, which phi leaves as they are, are not kept of a MaskRCNN, as phi acts in more than the box"
    for layers, settings, says in (
        (["rpn.head.conv.0.0"], {}, True),
        (["roi_heads.box_head.fc6"], {}, False),  # which are kept
        (["backbone.1"], {}, False),
        (["rpn.head.conv.0.0"], {"keep_gib": 0.0}, False),
    ):
        adapter, toolkit = attach_film(detector("masks"), layers, dim=2), TorchvisionToolkit()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            used = remembering(toolkit, adapter, DetectorAdapterConfig(**settings))
        assert [told in str(each.message) for each in found] == [True] * says
        assert isinstance(used, FrozenFeatures) == (layers == ["roi_heads.box_head.fc6"])


def test_the_loss_and_copies_are_as_without() -> None:
    model = detector("masks")
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
    other = copy.deepcopy(model)  # of a start that has other tensors
    with torch.no_grad():
        for each in (other, plain):
            each.backbone[0].weight.mul_(1.1)
        ours, whole = (each.eval()([image]) for each in (other, plain))
    assert torch.equal(ours[0]["masks"], whole[0]["masks"])
