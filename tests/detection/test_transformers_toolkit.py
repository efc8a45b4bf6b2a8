"""Hugging Face's detectors as a toolkit: tiny ones of the DETR family, against transformers' own calls."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.refusals import assert_refused

pytest.importorskip("transformers")

import transformers

from helpers.boxes import CLASSES, example
from metricopt_ext.detection.transformers_toolkit import TransformersToolkit
from metricopt_ext.errors import ConfigError, DataError, FileFormatError
from testers.toolkit import ToolkitTester

NAMES = ("ant", "bee", "cow", "N/A")
SMALL = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
SMALL |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_queries": 6}
SMALL |= {"init_std": 0.3, "init_xavier_std": 3.0}  # so that not every query sees the same


def config_of(kind: str) -> Any:
    if kind == "yolos":
        small = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
        sizes = {"image_size": [64, 64], "patch_size": 16, "num_detection_tokens": 6}
        return transformers.YolosConfig(**small, **sizes, initializer_range=0.3)
    stages = {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
    backbone = transformers.ResNetConfig(**stages, out_features=["stage4"])
    made = {"detr": transformers.DetrConfig, "conditional": transformers.ConditionalDetrConfig}[kind]
    return made(backbone_config=backbone, **SMALL)


def saved(folder: Path, kind: str = "detr", weights: bool = True) -> str:
    torch.manual_seed(0)
    config = config_of(kind)
    config.id2label = dict(enumerate(NAMES))
    config.label2id = {name: i for i, name in enumerate(NAMES)}
    processors = {"conditional": transformers.ConditionalDetrImageProcessor, "yolos": transformers.YolosImageProcessor}
    processor = processors.get(kind, transformers.DetrImageProcessor)
    processor(size={"shortest_edge": 64, "longest_edge": 64}).save_pretrained(folder)
    model = transformers.AutoModelForObjectDetection.from_config(config)
    model.save_pretrained(folder) if weights else config.save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def found_by(folder: str, model: nn.Module, image: Tensor) -> Any:
    """What transformers' own calls find in a picture, best first."""
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    inputs = {name: each.to(model.dtype) for name, each in processor(images=[image], return_tensors="pt").items()}
    if "pixel_mask" in inputs:
        inputs["pixel_mask"] = inputs["pixel_mask"].long()
    height, width = image.shape[1:]
    outputs = model.eval()(**inputs)
    (found,) = processor.post_process_object_detection(outputs, threshold=0.0, target_sizes=[(height, width)])
    order = found["scores"].argsort(descending=True)
    return SimpleNamespace(boxes=found["boxes"][order], scores=found["scores"][order], labels=found["labels"][order])


class TestDetr(ToolkitTester):
    kind, placement, clips = "detr", "decoder", False
    loss_dtype = torch.float32

    @pytest.fixture
    def toolkit(self, tmp_path: Path) -> TransformersToolkit:
        return TransformersToolkit(saved(tmp_path / "folder", self.kind, weights=False))

    def own(self, toolkit: Any, model: nn.Module, image: Tensor) -> Any:
        return found_by(toolkit.folder, model, image)

    def load(self, toolkit: Any, path: Path) -> nn.Module:
        config = transformers.AutoConfig.from_pretrained(toolkit.folder, num_labels=CLASSES)
        model = transformers.AutoModelForObjectDetection.from_config(config).double()
        model.load_state_dict(torch.load(path))
        return model


class TestConditionalDetr(TestDetr):
    kind, placement = "conditional", "backbone"


class TestYolos(TestDetr):
    kind, placement, samples = "yolos", "backbone", False


def test_boxes_beyond_the_picture_are_judged_as_transformers_gives_them(tmp_path: Path) -> None:
    """Clipped, they would have another overlap, and the detector another AP50 than by its own evaluation."""
    toolkit, shown = TransformersToolkit(saved(tmp_path)), example(2, 48, 64)
    model: Any = toolkit.build(len(NAMES), seed=0)
    model.bbox_predictor.layers[-1].bias.data[:2] = 2.0  # centres at the right and below
    (found,), expected = toolkit.detect(model, [shown]), found_by(toolkit.folder, model, shown.image)
    assert (expected.boxes[:, 2:] > torch.tensor([64, 48])).any()
    torch.testing.assert_close(found.boxes, expected.boxes)


@pytest.mark.parametrize("kind", ["detr", "yolos"])
def test_labels_are_those_of_the_data_s_classes_by_name(kind: str, tmp_path: Path) -> None:
    """Of a picture and of what is learned; what the model finds of others is left out."""
    folder = saved(tmp_path, kind)
    theirs = transformers.AutoModelForObjectDetection.from_pretrained(folder)
    shown = example(2, 64, 64)
    expected = found_by(folder, theirs, shown.image)
    common = int(expected.labels.mode().values)
    labels = [(common + 1) % len(NAMES), common]
    toolkit = TransformersToolkit(folder, classes=tuple(NAMES[label] for label in labels))
    model = toolkit.build(2, seed=0)
    rows = torch.isin(expected.labels, torch.tensor(labels))
    (found,) = toolkit.detect(model, [shown])
    assert len(found) > 0
    assert found.labels.tolist() == [labels.index(label) for label in expected.labels[rows].tolist()]
    torch.testing.assert_close(found.scores, expected.scores[rows])
    assert len(replace(toolkit, score_threshold=1.0).detect(model, [shown])[0]) == 0

    labelled = replace(shown, truth=replace(shown.truth, labels=torch.tensor([0, 1])))
    shares = shown.truth.boxes / 64
    centred = torch.cat([(shares[:, :2] + shares[:, 2:]) / 2, shares[:, 2:] - shares[:, :2]], dim=1)
    inputs = transformers.AutoImageProcessor.from_pretrained(folder)(images=[shown.image], return_tensors="pt")
    torch.manual_seed(0)
    ours = toolkit.loss(model, [labelled])
    torch.manual_seed(0)  # of dropout
    told = [{"class_labels": torch.tensor(labels), "boxes": centred}]
    torch.testing.assert_close(ours, theirs.train()(**inputs, labels=told).loss)


@pytest.mark.parametrize(
    "classes", [("Ant", "bee", "cow", "N/A"), ("cow", "BEE"), ("bee", "dog"), ("ANT", "x", "y", "z")]
)
def test_classes_are_not_taken_in_order_where_some_are_the_model_s(classes: Any, tmp_path: Path) -> None:
    lacking = next(name for name in classes if name not in NAMES)
    assert_refused(
        lambda: TransformersToolkit(saved(tmp_path)).for_classes(classes), ConfigError, lacking, "id2label", "cow"
    )
    new = TransformersToolkit(saved(tmp_path / "new", weights=False))  # whose labels are still to be learned
    assert new.for_classes(classes).labels(new.build(len(classes), seed=0)) == [*range(len(classes))]


@pytest.mark.parametrize(
    ("classes", "labels"), [(("cow", "N/A", "bee", "ant"), [2, 3, 1, 0]), (tuple("wxyz"), [0, 1, 2, 3])]
)
def test_classes_are_found_by_name_or_all_in_order(classes: Any, labels: list[int], tmp_path: Path) -> None:
    toolkit = TransformersToolkit(saved(tmp_path)).for_classes(classes)
    assert toolkit.labels(toolkit.build(4, seed=0)) == labels


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    assert_refused(lambda: TransformersToolkit(str(tmp_path)), ConfigError, "config.json")
    folder = saved(tmp_path)
    toolkit = TransformersToolkit(folder)
    assert_refused(lambda: toolkit.build(2, seed=0), DataError, "4", "2")
    strange = replace(toolkit, classes=("ant", "dog"))
    assert_refused(lambda: strange.build(2, seed=0), DataError, "classes", "dog", "cow")
    assert_refused(lambda: replace(toolkit, classes=("ant",)).build(3, seed=0), ConfigError, "3", "classes")
    assert_refused(
        lambda: toolkit.film_layers(toolkit.build(4, seed=0), ["roi_head"]), ConfigError, "roi_head", "backbone"
    )
    assert_refused(lambda: replace(toolkit, score_threshold=2), ConfigError, "score_threshold=2", "0", "1")
    (tmp_path / "config.json").write_text("[")
    assert_refused(lambda: toolkit.build(4, seed=0), (ConfigError, FileFormatError))
