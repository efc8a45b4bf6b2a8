"""What phi relies on in Detectron2's detectors, in double precision, where no two boxes tie."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("detectron2", reason="needs Detectron2, installed from source")

from detectron2.modeling import build_backbone, build_model
from detectron2.modeling.meta_arch.fcos import FCOS, FCOSHead

from metricopt_ext.adapters.attach import attach_film

pytestmark = [pytest.mark.detectron2, pytest.mark.usefixtures("double_nms")]

PHI = torch.tensor([0.3, -0.2, 0.1, 0.2], dtype=torch.float64)
FEW = [
    *("MODEL.ROI_HEADS.SCORE_THRESH_TEST", 0.0, "MODEL.ROI_HEADS.NMS_THRESH_TEST", 1.0),
    *("TEST.DETECTIONS_PER_IMAGE", 4, "MODEL.RPN.POST_NMS_TOPK_TEST", 8),
]
RETINANET = [
    *("MODEL.META_ARCHITECTURE", "RetinaNet", "MODEL.BACKBONE.NAME", "build_retinanet_resnet_fpn_backbone"),
    *("MODEL.RESNETS.OUT_FEATURES", ["res3", "res4", "res5"], "MODEL.FPN.IN_FEATURES", ["res3", "res4", "res5"]),
    *("MODEL.RETINANET.NUM_CLASSES", 2, "MODEL.RETINANET.SCORE_THRESH_TEST", 0.0, "TEST.DETECTIONS_PER_IMAGE", 20),
]
MASK = ["MODEL.MASK_ON", True, "MODEL.ROI_MASK_HEAD.NAME", "MaskRCNNConvUpsampleHead"]
MASK += ["MODEL.ROI_MASK_HEAD.NUM_CONV", 1, "MODEL.ROI_MASK_HEAD.CONV_DIM", 8]
CASCADE = ["MODEL.ROI_HEADS.NAME", "CascadeROIHeads", "MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG", True]


def fcos(cfg: Any) -> nn.Module:
    """Make an FCOS, which no config describes, on the backbone of one."""
    backbone = build_backbone(cfg)
    levels = list(backbone.output_shape().values())
    head = FCOSHead(input_shape=levels, num_classes=2, conv_dims=[64], norm="GN")
    nn.init.ones_(head.bbox_pred.bias)  # or half of the boxes would have no area
    return FCOS(
        backbone=backbone,
        head=head,
        num_classes=2,
        test_score_thresh=0.0,
        max_detections_per_image=20,
        pixel_mean=cfg.MODEL.PIXEL_MEAN,
        pixel_std=cfg.MODEL.PIXEL_STD,
    )


@torch.no_grad()
def outputs(model: nn.Module) -> dict[str, Tensor]:
    """All that a detector finds in an image: boxes, scores, classes, masks."""
    rng = torch.Generator().manual_seed(0)
    image = torch.randint(256, (3, 64, 64), generator=rng).double()
    found = model.eval()([{"image": image, "height": 64, "width": 64}])[0]["instances"].get_fields()
    assert len(found["scores"]) > 1
    return {name: getattr(value, "tensor", value) for name, value in found.items()}


@pytest.mark.parametrize(
    ("make", "norm", "overrides", "layers"),
    [
        (build_model, "BN", FEW, ["backbone.*.norm"]),
        (build_model, "FrozenBN", FEW, ["backbone.*.norm"]),
        (build_model, "BN", RETINANET, ["backbone.bottom_up.*.norm"]),
        (build_model, "BN", RETINANET, ["head.*"]),
        (build_model, "BN", [*FEW, *MASK], ["roi_heads.mask_head.*"]),
        (build_model, "BN", [*FEW, *CASCADE], ["roi_heads.box_head.*.fc*"]),
        (build_model, "GN", [*FEW, *CASCADE], ["backbone.bottom_up.*.norm"]),
        (fcos, "BN", RETINANET, ["backbone.bottom_up.*.norm"]),
        (fcos, "BN", RETINANET, ["head.*"]),
    ],
    ids=[
        *("faster", "faster frozen", "retinanet", "retinanet head", "mask", "cascade"),
        *("cascade groupnorm", "fcos", "fcos head"),
    ],
)
def test_phi_leaves_changes_merges_and_goes(
    make: Callable[[Any], nn.Module], norm: str, overrides: list[Any], layers: list[str], tiny_config: Any
) -> None:
    torch.manual_seed(0)
    model = make(tiny_config("fpn", norm, *overrides)).double()
    for name, tensor in model.state_dict().items():
        if name.endswith("norm.weight"):
            tensor.fill_(0.2)  # random weights explode otherwise, and one class gets all
    bare, state, stock = outputs(model), copy.deepcopy(model.state_dict()), copy.deepcopy(model)
    adapter = attach_film(model, layers, dim=4)
    unchanged = outputs(model)
    assert all(torch.equal(value, unchanged[name]) for name, value in bare.items())

    adapter.set_phi(PHI)
    tuned = outputs(model)
    assert any(value.shape != tuned[name].shape or not torch.equal(value, tuned[name]) for name, value in bare.items())
    stock.load_state_dict(adapter.merged_state_dict(), strict=True)
    for name, value in outputs(stock).items():
        assert value.shape == tuned[name].shape
        assert (value.double() - tuned[name].double()).abs().max() < 1e-8 * (1 + value.double().abs().max()), name

    restored = outputs(adapter.remove())
    assert all(torch.equal(value, restored[name]) for name, value in bare.items())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
