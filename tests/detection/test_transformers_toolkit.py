"""Hugging Face's detectors as a toolkit: tiny ones of the DETR family, against transformers' own calls."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.refusals import assert_refused

pytest.importorskip("transformers")

import transformers

import metricopt_ext as mo
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.detection.metric import ap50_metric, detect_all
from metricopt_ext.detection.records import Annotated, Detections
from metricopt_ext.detection.task import ExampleBatches, detection_loss
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.detection.transformers_toolkit import TransformersToolkit
from metricopt_ext.errors import ConfigError, DataError, FileFormatError

NAMES = ("ant", "bee", "cow", "N/A")
SMALL = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
SMALL |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_queries": 6}


def backbone() -> Any:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
    return transformers.ResNetConfig(**sizes, out_features=["stage4"])


def configs(kind: str) -> Any:
    if kind == "yolos":
        small = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
        return transformers.YolosConfig(**small, image_size=[64, 64], patch_size=16, num_detection_tokens=6)
    made = {"detr": transformers.DetrConfig, "conditional": transformers.ConditionalDetrConfig}[kind]
    return made(backbone_config=backbone(), **SMALL)


def saved(folder: Path, kind: str = "detr", names: tuple[str, ...] = NAMES, weights: bool = True) -> Path:
    torch.manual_seed(0)
    config = configs(kind)
    config.id2label = dict(enumerate(names))
    config.label2id = {name: i for i, name in enumerate(names)}
    processors = {"conditional": transformers.ConditionalDetrImageProcessor, "yolos": transformers.YolosImageProcessor}
    processor = processors.get(kind, transformers.DetrImageProcessor)
    processor(size={"shortest_edge": 64, "longest_edge": 64}).save_pretrained(folder)
    model = transformers.AutoModelForObjectDetection.from_config(config)
    for each in model.modules():  # so that not every query sees the same
        if isinstance(each, nn.Linear):
            nn.init.normal_(each.weight, std=0.3)
    model.save_pretrained(folder) if weights else config.save_pretrained(folder)
    return folder


def example(seed: int, labels: list[int], height: int = 64, width: int = 64) -> Example:
    rng = torch.Generator().manual_seed(seed)
    boxes = torch.tensor([[4.0, 6.0, 30.0, 28.0], [31.0, 20.0, 80.0, 58.0]])[: len(labels)]  # one reaches beyond
    none = torch.zeros(len(labels), dtype=torch.bool)
    truth = Annotated(seed, Path("none"), width, height, boxes, torch.tensor(labels, dtype=torch.int64), none, none)
    return Example(torch.randint(256, (3, height, width), generator=rng, dtype=torch.uint8), truth)


BATCH = [example(1, [0, 1]), example(2, [], 48, 64), example(3, [1], 64, 40)]


@pytest.fixture(scope="module", params=["detr", "conditional", "yolos"])
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp(request.param), request.param)


def own_inputs(folder: Path, batch: list[Example]) -> Any:
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    return processor, processor(images=[each.image for each in batch], return_tensors="pt")


def test_detections_are_those_of_transformers_for_the_datas_classes(folder: Path) -> None:
    theirs = transformers.AutoModelForObjectDetection.from_pretrained(folder).eval()
    processor, inputs = own_inputs(folder, BATCH)
    with torch.no_grad():
        outputs = theirs(**inputs)
    sizes = [tuple(each.image.shape[1:]) for each in BATCH]
    expected = processor.post_process_object_detection(outputs, threshold=0.0, target_sizes=sizes)
    common = int(torch.cat([each["labels"] for each in expected]).mode().values)
    labels = {common: 0, (common + 1) % len(NAMES): 1}
    toolkit = TransformersToolkit(str(folder), classes=tuple(NAMES[label] for label in labels))
    model = toolkit.build(2, seed=0)
    for ours, other, (height, width) in zip(toolkit.detect(model, BATCH), expected, sizes, strict=True):
        rows = [i for i in other["scores"].argsort(descending=True).tolist() if int(other["labels"][i]) in labels]
        assert ours.labels.tolist() == [labels[int(other["labels"][i])] for i in rows]
        torch.testing.assert_close(ours.scores, other["scores"][rows])
        bound = torch.tensor([width, height, width, height])
        torch.testing.assert_close(ours.boxes, other["boxes"][rows].clamp(min=0).minimum(bound))
    assert sum(map(len, toolkit.detect(model, BATCH))) > 0
    less = [each.boxes for each in TransformersToolkit(str(folder), toolkit.classes, 1.0).detect(model, BATCH)]
    assert sum(map(len, less)) == 0


def test_the_loss_is_that_of_transformers(folder: Path) -> None:
    toolkit = TransformersToolkit(str(folder), classes=("cow", "ant"))
    model = toolkit.build(2, seed=0)
    theirs = transformers.AutoModelForObjectDetection.from_pretrained(folder)
    _, inputs = own_inputs(folder, BATCH)
    boxes = [  # centre and size as shares of the image, to which the second is clipped
        torch.tensor([[17.0, 17.0, 26.0, 22.0], [47.5, 39.0, 33.0, 38.0]]) / 64,
        torch.zeros(0, 4),
        torch.tensor([[17.0 / 40, 17.0 / 64, 26.0 / 40, 22.0 / 64]]),
    ]
    labels = [torch.tensor([2, 0]), torch.tensor([], dtype=torch.int64), torch.tensor([0])]
    told = [{"class_labels": label, "boxes": box} for label, box in zip(labels, boxes, strict=True)]
    torch.manual_seed(0)
    ours = toolkit.loss(model, BATCH)
    torch.manual_seed(0)  # of dropout
    named = {name: inputs[name] for name in ("pixel_values", "pixel_mask") if name in inputs}
    expected = theirs.train()(**named, labels=told).loss
    torch.testing.assert_close(ours, expected)
    assert not model.training


@pytest.mark.parametrize(("kind", "placements"), [("detr", ["encoder", "decoder"]), ("detr", ["backbone"])])
def test_phi_changes_merges_and_goes(kind: str, placements: list[str], tmp_path: Path) -> None:
    toolkit = TransformersToolkit(str(saved(tmp_path / "model", kind)))
    model = toolkit.build(4, seed=0).double().requires_grad_(False)  # as the adapter leaves it: other kernels round
    bare = [each.boxes for each in toolkit.detect(model, BATCH)]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    adapter = attach_film(model, toolkit.film_layers(model, placements), dim=4)
    kinds = {type(layer).__name__ for layer, _ in adapter.modulations()}
    assert kinds == ({"DetrFrozenBatchNorm2d"} if placements == ["backbone"] else {"LayerNorm"})
    unchanged = [each.boxes for each in toolkit.detect(model, BATCH)]
    assert all(torch.equal(a, b) for a, b in zip(bare, unchanged, strict=True))
    adapter.set_phi(torch.tensor([0.3, -0.2, 0.1, 0.2], dtype=torch.float64))
    tuned = toolkit.detect(model, BATCH)
    assert not all(torch.equal(a, b.boxes) for a, b in zip(bare, tuned, strict=True))
    toolkit.export(model, tmp_path / "tuned.pth")
    fresh = transformers.AutoModelForObjectDetection.from_pretrained(tmp_path / "model").double().eval()
    fresh.load_state_dict(torch.load(tmp_path / "tuned.pth"))
    for ours, other in zip(toolkit.detect(fresh, BATCH), tuned, strict=True):
        torch.testing.assert_close(ours.boxes, other.boxes, rtol=0, atol=1e-6)
        torch.testing.assert_close(ours.scores, other.scores, rtol=0, atol=1e-8)
    adapter.remove()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_folder_without_weights_draws_them_from_the_seed(tmp_path: Path) -> None:
    toolkit = TransformersToolkit(str(saved(tmp_path, weights=False)))
    torch.manual_seed(5)
    stream = torch.get_rng_state()
    first, again, other = (toolkit.build(3, seed=seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    assert first["class_labels_classifier.weight"].shape[0] == 4  # one for no object


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    assert_refused(lambda: TransformersToolkit(str(tmp_path)), ConfigError, "config.json")
    folder = str(saved(tmp_path))
    assert_refused(lambda: TransformersToolkit(folder).build(2, seed=0), DataError, "4", "2")
    assert_refused(
        lambda: TransformersToolkit(folder, classes=("ant", "dog")).build(2, seed=0),
        DataError,
        "classes",
        "dog",
        "cow",
        "N/A",
    )
    assert_refused(
        lambda: TransformersToolkit(folder, classes=("ant", "bee")).build(3, seed=0), ConfigError, "3", "classes"
    )
    toolkit = TransformersToolkit(folder)
    assert_refused(
        lambda: toolkit.film_layers(toolkit.build(4, seed=0), ["roi_head"]),
        ConfigError,
        "placement='roi_head'",
        "backbone",
    )
    assert_refused(lambda: TransformersToolkit(folder, score_threshold=2), ConfigError, "score_threshold=2", "0", "1")
    (tmp_path / "preprocessor_config.json").unlink()
    assert_refused(lambda: TransformersToolkit(folder), ConfigError)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    (tmp_path / "config.json").write_text("[")
    assert_refused(lambda: TransformersToolkit(folder).build(4, seed=0), (ConfigError, FileFormatError))


@pytest.mark.slow
def test_a_search_in_ten_lines(tmp_path: Path) -> None:
    folder, classes, out = str(saved(tmp_path / "detr")), NAMES, tmp_path / "out"
    toolkit = TransformersToolkit(folder, classes=classes)
    detector = toolkit.build(len(classes), seed=0)
    adapter = mo.attach_film(detector, toolkit.film_layers(detector, ["encoder", "decoder"]), dim=4)
    train, images = [example(seed, [0, 1]) for seed in range(4)], [example(seed, []) for seed in range(4, 8)]
    with adapter.using(torch.tensor([1.0, -1.0, 1.0, 1.0])) as model:
        val = [labelled(image, found) for image, found in zip(images, toolkit.detect(model, images), strict=True)]
    metric = ap50_metric(toolkit, val, classes, "coco")
    task = mo.FinetuneTask(
        adapter, loss=detection_loss(toolkit), batches=ExampleBatches(train, 2), metric=metric, population=1
    )
    result = mo.optimize_metric(task, queries=24, output_dir=out)
    toolkit.export(detector, tmp_path / "tuned.pth")
    assert result.before <= result.best
    fresh = toolkit.build(len(classes), seed=0)
    fresh.load_state_dict(torch.load(tmp_path / "tuned.pth"))
    assert [each.labels.tolist() for each in detect_all(toolkit, fresh, val)] == [
        each.labels.tolist() for each in detect_all(toolkit, adapter.model, val)
    ]


def labelled(image: Example, found: Detections) -> Example:
    """The first two of what was found as the truth."""
    none = torch.zeros(2, dtype=torch.bool)
    truth = replace(image.truth, boxes=found.boxes[:2], labels=found.labels[:2], difficult=none, crowd=none)
    return replace(image, truth=truth)
