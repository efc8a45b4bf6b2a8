"""What phi leaves as it is is computed once, and what is found is the same to the last bit."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("detectron2")

from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.detection.detectron2.kept_features import keep_features
from metricopt_ext.detection.detectron2.toolkit import Detectron2Toolkit
from metricopt_ext.detection.records import Detections, DetectionSet
from metricopt_ext.detection.task import load_examples

pytestmark = pytest.mark.detectron2

CASCADE = ("MODEL.ROI_HEADS.NAME", "CascadeROIHeads", "MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG", True)
C4 = ("MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION", 4, "MODEL.RESNETS.WIDTH_PER_GROUP", 8)
RETINANET = (
    *("MODEL.META_ARCHITECTURE", "RetinaNet", "MODEL.BACKBONE.NAME", "build_retinanet_resnet_fpn_backbone"),
    *("MODEL.RESNETS.OUT_FEATURES", ["res3", "res4", "res5"], "MODEL.FPN.IN_FEATURES", ["res3", "res4", "res5"]),
    *("MODEL.RETINANET.NUM_CLASSES", 2, "MODEL.RETINANET.SCORE_THRESH_TEST", 0.005),
)
BOTH = ["backbone", "proposal_generator"]
CASES: dict[str, tuple[str, tuple[Any, ...], list[str], list[str]]] = {
    "fpn": ("fpn", (), ["roi_heads.box_head.fc?"], BOTH),
    "c4": ("c4", C4, ["roi_heads.res5.*.norm"], BOTH),
    "cascade": ("fpn", CASCADE, ["roi_heads.box_head.*.fc?"], BOTH),
    "rpn": ("fpn", (), ["proposal_generator.rpn_head.objectness_logits", "roi_heads.box_head.fc?"], ["backbone"]),
    "retinanet": ("fpn", RETINANET, ["head.cls_subnet.*"], ["backbone"]),
    "backbone": ("fpn", (), ["backbone.bottom_up.res2.*.norm"], []),
}


def same(ours: list[Detections], other: list[Detections]) -> bool:
    pairs = zip(ours, other, strict=True)
    return all(torch.equal(a.boxes, b.boxes) and torch.equal(a.scores, b.scores) for a, b in pairs)


@pytest.mark.parametrize("case", CASES)
def test_only_what_phi_changes_is_computed_for_each_phi(
    case: str, tiny_config: Callable[..., Any], squares: Callable[..., DetectionSet]
) -> None:
    base, options, layers, expected = CASES[case]
    toolkit = Detectron2Toolkit(tiny_config(base, "BN", *options))
    model: Any = toolkit.build(2, seed=0)
    adapter = attach_film(model, layers, dim=2)
    plain = copy.deepcopy(model)
    batch = [*load_examples(squares(1)), *load_examples(squares(1, width=80, seed=3))]
    ran: list[str] = []
    for name in BOTH:
        if hasattr(model, name):
            module: Any = next(iter(getattr(model, name).children()))  # as a hook of the part itself runs either way
            module.register_forward_hook(lambda *_, name=name: ran.append(name))
    assert keep_features(model, gib=1.0) == expected

    def runs(phi: list[float], batch: Any = batch) -> list[str]:
        ran.clear()
        adapter.set_phi(torch.tensor(phi))
        type(adapter)(plain).set_phi(torch.tensor(phi))
        assert same(toolkit.detect(model, batch), toolkit.detect(plain, batch))
        return sorted(set(ran))

    whole = [name for name in BOTH if hasattr(model, name)]
    rest = [name for name in whole if name not in expected]
    assert [runs([0.0, 0.0]), runs([0.3, -0.2]), runs([0.0, 0.0])] == [whole, rest, rest]
    assert [runs([0.1, 0.0], batch[:1]), runs([0.2, 0.0], batch[:1])] == [whole, rest]
    other = copy.deepcopy(model)  # of a start that has other tensors
    for each in (other, plain):
        with torch.no_grad():
            next(each.backbone.parameters()).mul_(1.01)
    assert same(toolkit.detect(other, batch), toolkit.detect(plain, batch))
    assert not same(toolkit.detect(model, batch), toolkit.detect(plain, batch))


def test_another_architecture_is_told_of() -> None:
    model = nn.ModuleDict({"backbone": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    attach_film(model, ["head"], dim=2)
    with pytest.warns(UserWarning, match=r"unknown.*SEARCH\.KEEP_GIB=0 turns"):
        assert keep_features(model, gib=1.0) == []
