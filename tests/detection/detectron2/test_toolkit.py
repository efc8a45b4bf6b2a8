"""Detectron2's detectors give losses and detections in the terms of the detection tools."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("detectron2", reason="needs Detectron2, installed from source")

from detectron2.modeling import build_model

from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.detection.detectron2.placements import PLACEMENTS, film_layers
from metricopt_ext.detection.detectron2.toolkit import Detectron2Toolkit
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


def test_a_mask_head_is_refused_for_want_of_masks(tiny_config: Any, squares: Callable[..., DetectionSet]) -> None:
    toolkit = Detectron2Toolkit(tiny_config("fpn", "BN", "MODEL.MASK_ON", True))
    with pytest.raises(ConfigError, match=r"MODEL\.MASK_ON.*images have boxes alone"):
        toolkit.loss(toolkit.build(2, seed=0), examples(squares(1)))
