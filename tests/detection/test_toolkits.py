"""The contract of toolkits: torchvision's detectors, whole and with kept features, and Detectron2's."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchvision")

from torchvision.models import get_model

from helpers.boxes import CLASSES
from helpers.detectors import thin_detectors
from metricopt_ext.detection.frozen import FrozenFeatures
from metricopt_ext.detection.settings import detection_settings
from metricopt_ext.detection.torchvision_toolkit import TorchvisionToolkit
from testers.toolkit import KeepsFeatures, TakesSettings, ToolkitTester

NAMES = ["score_thresh", "detections", "nms", "size"]


class Torchvision(ToolkitTester):
    """Torchvision's own detector of a name, built thin."""

    name: str
    options: ClassVar[dict[str, Any]]  # the toolkit's
    theirs: ClassVar[dict[str, Any]]  # torchvision's own

    @pytest.fixture
    def toolkit(self, monkeypatch: pytest.MonkeyPatch) -> TorchvisionToolkit:
        thin_detectors(monkeypatch)
        return TorchvisionToolkit(self.name, min_size=64, max_size=64, **self.options)

    @torch.no_grad()
    def own(self, toolkit: Any, model: nn.Module, image: Tensor) -> Any:
        (found,) = model([image.double() / 255])
        thing = found["labels"] > 0  # detectors of one stage find the background too
        return SimpleNamespace(
            boxes=found["boxes"][thing], scores=found["scores"][thing], labels=found["labels"][thing] - 1
        )

    def load(self, toolkit: Any, path: Path) -> nn.Module:
        model = get_model(self.name, weights=None, weights_backbone=None, num_classes=CLASSES + 1, **self.theirs)
        model.double().load_state_dict(torch.load(path))
        return model


class TestRetinaNet(Torchvision):
    name, placement, samples = "retinanet_resnet50_fpn", "head", False
    options: ClassVar = {"score_threshold": 0.0}
    theirs: ClassVar = {"min_size": 64, "max_size": 64, "score_thresh": 0.0}


class TestFasterRCNN(Torchvision, TakesSettings):
    name = "fasterrcnn_resnet50_fpn"
    options: ClassVar = {"proposals": 20}
    theirs: ClassVar = {"min_size": 64, "max_size": 64, "rpn_pre_nms_top_n_test": 40, "rpn_post_nms_top_n_test": 20}

    def adapted(self, toolkit: Any, seed: int = 0) -> tuple[Any, Any]:
        adapter, serving = super().adapted(toolkit, seed)
        adapter.model.roi_heads.fg_bg_sampler.batch_size_per_image = 8  # fewer than there are: some are drawn
        return adapter, serving

    def settings(self, toolkit: Any, model: nn.Module) -> Any:
        return detection_settings(model, names=NAMES)

    def set_own(self, toolkit: Any, model: Any, values: dict[str, Any]) -> None:
        names = {"score_thresh": "score_thresh", "detections": "detections_per_img", "nms": "nms_thresh"}
        for name in values.keys() - {"size"}:
            setattr(model.roi_heads, names[name], values[name])
        side = round(64 * values.get("size", 1.0))
        model.transform.min_size, model.transform.max_size = (side,), side


class TestKeptFeatures(TestFasterRCNN, KeepsFeatures):
    def serve(self, toolkit: Any, adapter: Any) -> Any:
        return FrozenFeatures(toolkit, adapter)


@pytest.mark.detectron2
@pytest.mark.usefixtures("double_nms")
class TestDetectron2(KeepsFeatures, TakesSettings):
    """Its maps and proposals are kept in the model itself."""

    kind, options = "fpn", ()

    @pytest.fixture
    def toolkit(self, tiny_config: Any) -> Any:
        from metricopt_ext.detection.detectron2.toolkit import Detectron2Toolkit

        return Detectron2Toolkit(tiny_config(self.kind, "BN", "MODEL.ROI_HEADS.NUM_CLASSES", CLASSES, *self.options))

    def own(self, toolkit: Any, model: nn.Module, image: Tensor) -> Any:
        from detectron2.engine import DefaultPredictor

        predictor = DefaultPredictor(toolkit.cfg)
        predictor.model = model
        found = predictor(np.ascontiguousarray(image.permute(1, 2, 0).numpy()[:, :, ::-1]))["instances"]
        return SimpleNamespace(boxes=found.pred_boxes.tensor, scores=found.scores, labels=found.pred_classes)

    def load(self, toolkit: Any, path: Path) -> nn.Module:
        from detectron2.checkpoint import DetectionCheckpointer
        from detectron2.modeling import build_model

        model = build_model(toolkit.cfg).double()
        DetectionCheckpointer(model).load(str(path))
        return model

    def serve(self, toolkit: Any, adapter: Any) -> Any:
        from metricopt_ext.detection.detectron2.kept_features import keep_features

        keep_features(adapter.model, gib=1.0)
        return toolkit

    def before_phi(self, model: Any) -> nn.Module:
        return model.backbone.bottom_up.stem if self.kind == "fpn" else model.backbone.stem

    def settings(self, toolkit: Any, model: nn.Module) -> Any:
        from metricopt_ext.detection.detectron2.settings import detectron2_settings

        return detectron2_settings(toolkit, model, names=NAMES)

    def set_own(self, toolkit: Any, model: Any, values: dict[str, Any]) -> None:
        names = {"score_thresh": "test_score_thresh", "detections": "test_topk_per_image", "nms": "test_nms_thresh"}
        for name in values.keys() - {"size"}:
            setattr(model.roi_heads.box_predictor, names[name], values[name])
        cfg = toolkit.cfg.clone()
        cfg.defrost()
        for key in ("MIN_SIZE_TEST", "MAX_SIZE_TEST"):
            cfg.INPUT[key] = round(cfg.INPUT[key] * values.get("size", 1.0))
        toolkit.cfg = cfg


class TestDetectron2WithoutAPyramid(TestDetectron2):
    kind, options = "c4", ("MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION", 4, "MODEL.RESNETS.WIDTH_PER_GROUP", 8)
