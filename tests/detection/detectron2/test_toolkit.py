"""Detectron2's detectors give losses and detections in the terms of the detection tools."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("detectron2", reason="needs Detectron2, installed from source")

from detectron2.data import DatasetMapper, build_detection_test_loader
from detectron2.modeling import build_model

from helpers.refusals import assert_refused
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.detection.detectron2.datasets import register
from metricopt_ext.detection.detectron2.placements import PLACEMENTS, film_layers
from metricopt_ext.detection.detectron2.toolkit import Detectron2Toolkit, detections_of
from metricopt_ext.detection.records import DetectionSet
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.errors import ConfigError

pytestmark = pytest.mark.detectron2

each_kind = pytest.mark.parametrize("kind", ["fpn", "c4"])


def examples(data: DetectionSet) -> list[Example]:
    return [Example(image.load(), image) for image in data.images]


@each_kind
def test_the_loss_of_a_detector_with_frozen_norms_reaches_phi(kind: str, tiny_config: Any, squares: Any) -> None:
    toolkit = Detectron2Toolkit(tiny_config(kind, "FrozenBN"))
    model = toolkit.build(2, seed=1)
    for name, tensor in model.state_dict().items():
        if name.endswith("norm.weight"):
            tensor.fill_(0.2)  # random weights explode under the identity
    adapter = attach_film(model, film_layers(model, ["backbone"]), dim=4)
    (gradient,) = torch.autograd.grad(toolkit.loss(model, examples(squares(2))), adapter.phi)
    assert gradient.isfinite().all()
    assert gradient.norm() > 0


def test_loss_sees_the_boxes(tiny_config: Any, squares: Callable[..., DetectionSet]) -> None:
    toolkit = Detectron2Toolkit(tiny_config("fpn", "BN", "INPUT.MIN_SIZE_TEST", 96, "INPUT.MAX_SIZE_TEST", 200))
    (example,) = examples(squares(1, width=80, height=64))
    inputs, targets = toolkit._input(example), toolkit._targets(example)
    assert inputs["image"].shape == (3, 96, 120)
    assert (inputs["height"], inputs["width"]) == (64, 80)
    assert targets.image_size == (96, 120)
    torch.testing.assert_close(targets.gt_boxes.tensor, example.truth.boxes * 1.5)
    assert torch.equal(targets.gt_classes, example.truth.labels)

    crowd = replace(example.truth, crowd=torch.tensor([True]))
    assert len(toolkit._targets(Example(example.image, crowd))) == 0
    assert toolkit.loss(toolkit.build(2, 0), [Example(example.image, crowd)]).isfinite()


@each_kind
def test_placements(kind: str, tiny_config: Any) -> None:
    # The real depth, for the names of its layers.
    cfg = tiny_config(kind, "FrozenBN", "MODEL.RESNETS.DEPTH", 50, "MODEL.RESNETS.RES2_OUT_CHANNELS", 256)
    model = build_model(cfg)
    counts = {}
    for name in PLACEMENTS:
        if (kind, name) == ("c4", "fpn"):
            with pytest.raises(ConfigError, match=r"layers='fpn' match no layer"):
                film_layers(model, [name])
            continue
        adapter = attach_film(model, film_layers(model, [name]), dim=2)
        counts[name] = len(adapter.layers)
        adapter.remove()
    # A ResNet-50 has 3, 4, 6, 3 blocks of three norms, and a fourth one in the first block of each stage.
    if kind == "fpn":
        assert counts == {
            "backbone": 52, "early": 11, "last_stage": 10, "fpn": 4, "roi_head": 2, "predictor": 2, "all": 61,
        }  # fmt: skip
    else:
        assert counts == {"backbone": 42, "early": 11, "last_stage": 19, "roi_head": 10, "predictor": 2, "all": 55}


@pytest.mark.parametrize("key", ["MASK_ON", "KEYPOINT_ON"])
def test_heads_are_refused_for_want_of_what_they_learn(
    key: str, tiny_config: Any, squares: Callable[..., DetectionSet]
) -> None:
    toolkit = Detectron2Toolkit(tiny_config("fpn", "BN", f"MODEL.{key}", True))
    with pytest.raises(ConfigError, match=rf"MODEL\.{key}.*images have boxes alone"):
        toolkit.loss(toolkit.build(2, seed=0), examples(squares(1)))


RETINANET = ("MODEL.META_ARCHITECTURE", "RetinaNet", "MODEL.BACKBONE.NAME", "build_retinanet_resnet_fpn_backbone")
LEVELS = (
    *("MODEL.RESNETS.OUT_FEATURES", ["res3", "res4", "res5"], "MODEL.FPN.IN_FEATURES", ["res3", "res4", "res5"]),
    *("MODEL.RETINANET.SCORE_THRESH_TEST", 0.0),
)


@pytest.mark.parametrize(
    "options",
    [
        ("INPUT.FORMAT", "RGB"),
        ("INPUT.FORMAT", "BGR"),
        ("INPUT.FORMAT", "RGB", "MODEL.PIXEL_MEAN", [123.7, 116.3, 103.5], "MODEL.PIXEL_STD", [58.4, 57.1, 57.4]),
        ("INPUT.MIN_SIZE_TEST", 0),
        ("INPUT.MIN_SIZE_TEST", 96, "INPUT.MAX_SIZE_TEST", 100),
        ("TEST.DETECTIONS_PER_IMAGE", 7),
        ("MODEL.MASK_ON", True),
        (*RETINANET, *LEVELS),
    ],
)
def test_what_the_config_says_of_inputs_is_obeyed_as_by_detectron2(
    options: Any, tiny_config: Any, catalog: Any, squares: Callable[..., DetectionSet]
) -> None:
    """A new detector is of the data's classes, and finds in pictures what Detectron2's own loader has it find."""
    cfg = tiny_config("fpn", "BN", "MODEL.ROI_HEADS.SCORE_THRESH_TEST", 0.0, *options)
    toolkit, data = Detectron2Toolkit(cfg), DetectionSet(("red", "green"), [])
    for seed, (width, height) in enumerate(((80, 64), (64, 90))):
        data.images.extend(squares(1, width=width, height=height, seed=seed).images)  # type: ignore[attr-defined]
    model = toolkit.build(2, seed=1).eval()
    register("own", data)
    loader = build_detection_test_loader(cfg, "own", mapper=DatasetMapper(cfg, is_train=False))
    found = [toolkit.detect(model, [each])[0] for each in examples(data)]
    with torch.no_grad():
        stock = [detections_of(output["instances"]) for batch in loader for output in model(batch)]
    for ours, expected in zip(found, stock, strict=True):
        assert len(ours) > 0
        assert torch.equal(ours.boxes, expected.boxes)
        assert torch.equal(ours.scores, expected.scores)
        assert {*ours.labels.tolist()} <= {0, 1}


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (("INPUT.FORMAT", "L"), ["INPUT.FORMAT", "'L'", "BGR"]),
        (("INPUT.FORMAT", "rgb"), ["INPUT.FORMAT", "'rgb'", "RGB"]),
        (("INPUT.FORMAT", "YUV-BT.601"), ["INPUT.FORMAT", "YUV-BT.601"]),
        (("TEST.AUG.ENABLED", True), ["TEST.AUG.ENABLED", "False"]),
    ],
)
def test_what_is_not_obeyed_is_refused(options: Any, names: list[str], tiny_config: Any) -> None:
    assert_refused(lambda: Detectron2Toolkit(tiny_config("fpn", "BN", *options)), ConfigError, *names)
