"""Settings of inference of Detectron2's detectors against the same detectors built by its config."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("detectron2")

from metricopt_ext.detection.detectron2.settings import config_lines, detectron2_settings
from metricopt_ext.detection.detectron2.toolkit import Detectron2Toolkit
from metricopt_ext.detection.records import DetectionSet
from metricopt_ext.detection.task import load_examples
from metricopt_ext.errors import ConfigError

pytestmark = pytest.mark.detectron2

CASCADE = ("MODEL.ROI_HEADS.NAME", "CascadeROIHeads", "MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG", True)
RETINANET = (
    *("MODEL.META_ARCHITECTURE", "RetinaNet", "MODEL.BACKBONE.NAME", "build_retinanet_resnet_fpn_backbone"),
    *("MODEL.RESNETS.OUT_FEATURES", ["res3", "res4", "res5"], "MODEL.FPN.IN_FEATURES", ["res3", "res4", "res5"]),
    *("MODEL.RETINANET.NUM_CLASSES", 2, "MODEL.RETINANET.SCORE_THRESH_TEST", 0.005),
)
KINDS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "fpn": ("fpn", ()),
    "c4": ("c4", ()),
    "cascade": ("fpn", CASCADE),
    "retinanet": ("fpn", RETINANET),
}
VALUES: list[dict[str, Any]] = [
    {"score_thresh": 0.34, "nms": 0.6},
    {"detections": 3},
    {"nms": 0.35},
    {"size": 1.41},
    {"size": 0.71, "detections": 300, "score_thresh": 0.0005},
]


def detected(toolkit: Detectron2Toolkit, model: Any, batch: Any) -> list[torch.Tensor]:
    found = toolkit.detect(model, batch)
    return [part for each in found for part in (each.boxes, each.scores, each.labels)]


def same(ours: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, ours, other))


@pytest.mark.parametrize("kind", KINDS)
def test_it_detects_as_what_the_config_s_lines_build(
    kind: str, tiny_config: Callable[..., Any], squares: Callable[..., DetectionSet]
) -> None:
    base, options = KINDS[kind]
    cfg = tiny_config(base, "BN", *options)
    toolkit = Detectron2Toolkit(cfg)
    model: Any = toolkit.build(2, seed=0)
    batch = load_examples(squares(2))
    expected = detected(toolkit, model, batch)
    assert len(expected[0])
    settings = detectron2_settings(toolkit, model, names=["size", "score_thresh", "detections", "nms"])
    different = 0
    for values in ({}, *VALUES):
        lines = config_lines(cfg, values)
        stock = Detectron2Toolkit(tiny_config(base, "BN", *options, *lines))
        theirs = detected(stock, stock.build(2, seed=0), batch)
        before, resize = dict(vars(model)), toolkit._resize
        with settings.applied(values):
            assert same(detected(toolkit, model, batch), theirs)
        assert vars(model) == before
        assert toolkit._resize is resize
        different += not same(theirs, expected)
    assert same(detected(toolkit, model, batch), expected)
    assert different >= 3
    with pytest.raises(KeyError), settings.applied(VALUES[-1]):
        raise KeyError
    assert same(detected(toolkit, model, batch), expected)


def test_free_and_names_are_those_of_other_detectors(tiny_config: Callable[..., Any]) -> None:
    toolkit = Detectron2Toolkit(tiny_config())
    model = toolkit.build(2, seed=0)
    settings = detectron2_settings(toolkit, model, average_precision=True)
    assert settings.names == ("size", "score_thresh", "detections")
    assert settings.free == {"score_thresh": 0.0005, "detections": 300}
    assert settings.presets == ()
    assert detectron2_settings(toolkit, model, inference=1)["size"].values == (0.71, 0.84, 1.0)
    unscaled = Detectron2Toolkit(tiny_config("fpn", "BN", "INPUT.MIN_SIZE_TEST", 0))
    assert detectron2_settings(unscaled, model).names == ("score_thresh", "detections")


def test_lines_are_keys_and_values_in_turns(tiny_config: Callable[..., Any]) -> None:
    cfg = tiny_config("fpn", "BN", "INPUT.MIN_SIZE_TEST", 800)
    assert config_lines(cfg, {"size": 1.41, "detections": 300, "score_thresh": 0.0005}) == [
        *("MODEL.ROI_HEADS.SCORE_THRESH_TEST", "0.0005", "TEST.DETECTIONS_PER_IMAGE", "300"),
        *("INPUT.MIN_SIZE_TEST", "1128", "INPUT.MAX_SIZE_TEST", "1880"),
    ]
    with pytest.raises(ConfigError, match="Detectron2's config has no key for 'flip'; it has for score_thresh"):
        config_lines(cfg, {"flip": True})
    with pytest.raises(ConfigError, match=r"MODEL\.META_ARCHITECTURE is FCOS; settings are known of GeneralizedRCNN"):
        config_lines(tiny_config("fpn", "BN", "MODEL.META_ARCHITECTURE", "FCOS"), {})


def test_other_detectors_are_refused(tiny_config: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="Linear is not, or detects otherwise than, Detectron2's GeneralizedRCNN"):
        detectron2_settings(Detectron2Toolkit(tiny_config()), torch.nn.Linear(2, 2))
