"""Tuned detectors become ordinary checkpoints, which Detectron2's own predictor and trainer load."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("detectron2", reason="needs Detectron2, installed from source")

from detectron2.checkpoint import DetectionCheckpointer
from detectron2.engine import DefaultPredictor
from detectron2.modeling import build_model

from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.detection.detectron2.export import export
from metricopt_ext.detection.detectron2.placements import film_layers
from metricopt_ext.detection.records import DetectionSet
from metricopt_ext.errors import AdapterError

pytestmark = pytest.mark.detectron2


def with_statistics(model: torch.nn.Module) -> torch.nn.Module:
    """Give the norms weights and statistics that no layer is born with, and that random weights don't explode under."""
    rng = torch.Generator().manual_seed(1)
    for name, tensor in model.state_dict().items():
        drawn = torch.rand(tensor.shape, generator=rng)
        if name.endswith(("norm.weight", "norm.bias", "norm.running_mean")):
            tensor.copy_(0.1 + 0.2 * drawn)
        elif name.endswith("norm.running_var"):
            tensor.copy_(1 + drawn)
    return model


@pytest.mark.usefixtures("double_nms")
@pytest.mark.parametrize(("kind", "norm"), [("fpn", "BN"), ("fpn", "FrozenBN"), ("c4", "FrozenBN")])
def test_exported_model_detects_what_the_adapted_one_did(
    kind: str, norm: str, tiny_config: Any, squares: Callable[..., DetectionSet], tmp_path: Path
) -> None:
    """In double precision, where no two boxes tie."""
    cfg = tiny_config(kind, norm, "MODEL.ROI_HEADS.SCORE_THRESH_TEST", 0.0)
    torch.manual_seed(0)
    model = with_statistics(build_model(cfg)).double().eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    (image,) = squares(1).images
    pixels = image.load()

    def detect(judge: Any) -> Any:
        return judge([{"image": pixels.flip(0), "height": 64, "width": 64}])[0]["instances"]

    with torch.no_grad():
        plain = detect(model)
        adapter = attach_film(model, film_layers(model, ["all"]), dim=4)
        adapter.set_phi(0.1 * torch.ones(4))
        adapted = detect(model)
    export(model, tmp_path / "merged.pth")
    assert all(torch.equal(tensor, before[name]) for name, tensor in adapter.base_state_dict().items())

    stock = build_model(cfg)
    stock.load_state_dict(torch.load(tmp_path / "merged.pth", weights_only=True)["model"], strict=True)

    cfg.MODEL.WEIGHTS = str(tmp_path / "merged.pth")
    bgr = np.ascontiguousarray(pixels.permute(1, 2, 0).numpy()[:, :, ::-1])
    predictor = DefaultPredictor(cfg)
    DetectionCheckpointer(predictor.model.double()).load(cfg.MODEL.WEIGHTS)
    merged = predictor(bgr)["instances"]
    assert len(merged) == len(adapted) > 0
    torch.testing.assert_close(merged.scores, adapted.scores, rtol=0, atol=1e-9)
    torch.testing.assert_close(merged.pred_boxes.tensor, adapted.pred_boxes.tensor, rtol=0, atol=1e-4)
    assert not same(plain.scores, adapted.scores)


def same(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.allclose(first, second, atol=1e-4)


def test_what_cannot_be_merged_is_refused(tiny_config: Any, tmp_path: Path) -> None:
    model = build_model(tiny_config())
    with pytest.raises(AdapterError, match="has no adapter"):
        export(model, tmp_path / "merged.pth")
    # The convolution of the proposal network has a ReLU inside.
    with pytest.raises(AdapterError, match="Conv2d with a norm or an act"):
        attach_film(model, "proposal_generator.rpn_head.conv")
