"""Torchvision's detectors of COCO's 91 outputs, on sets of COCO's categories."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchvision")

from torchvision.models import get_model

from helpers.detectors import thin_detectors
from helpers.refusals import assert_refused
from metricopt_ext.detection.coco_outputs import coco_categories, coco_outputs, for_classes
from metricopt_ext.detection.records import Annotated
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.detection.torchvision_models import SSD
from metricopt_ext.detection.torchvision_toolkit import TorchvisionToolkit, targets_of, to_detections
from metricopt_ext.errors import DataError

NAMES = (
    "fasterrcnn_mobilenet_v3_large_320_fpn",
    "ssdlite320_mobilenet_v3_large",
    *("retinanet_resnet50_fpn_v2", "fcos_resnet50_fpn", "ssd300_vgg16"),
)


def eighty() -> list[int]:
    """COCO's ids of categories, as its paper's annotations have them: 1 to 90 but for ten."""
    return [each for each in range(1, 91) if each not in (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)]


def test_the_80_categories_are_found_by_name_or_by_id() -> None:
    names = coco_categories()
    assert len(names) == 91
    ids = eighty()
    classes = [names[each] for each in ids]
    assert coco_outputs(classes) == coco_outputs(classes, ids) == tuple(ids)
    assert coco_outputs([f"Klasse {each}" for each in ids], ids) == tuple(ids)  # in another language
    assert coco_outputs(["dog", "person", "cat"]) == (18, 1, 17)
    assert coco_outputs(["tvmonitor", "aeroplane"], [5, 7]) == (72, 5)  # VOC's names; ids of some alone mean nothing
    assert_refused(lambda: coco_outputs(["dog", "helmet"], [18, 2]), DataError, "COCO", "categories")
    assert_refused(lambda: coco_outputs(["tv", "tvmonitor"]), DataError, "tv", "tvmonitor", "COCO")
    assert_refused(lambda: coco_outputs(["N/A"]), DataError, "N/A")


@pytest.fixture(scope="module")
def thin() -> Iterator[None]:
    """See `thin_detectors`."""
    with pytest.MonkeyPatch.context() as patch:
        thin_detectors(patch)
        yield


@pytest.fixture(scope="module", params=NAMES)
def trained(
    thin: None, request: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TorchvisionToolkit, nn.Module, Path]:
    """A detector of 91 outputs as torchvision builds it, and its file as a training script saves it."""
    name = request.param
    torch.manual_seed(0)
    threshold = "box_score_thresh" if name.startswith("faster") else "score_thresh"
    options: dict[str, Any] = {threshold: 0.0} | ({} if name in SSD else {"min_size": 64, "max_size": 64})
    model = get_model(name, weights=None, weights_backbone=None, **options).eval()
    path = tmp_path_factory.mktemp(name) / "model.pth"
    torch.save({"model": {f"module.{key}": value for key, value in model.state_dict().items()}}, path)
    return TorchvisionToolkit(name, min_size=64, max_size=64, score_threshold=0.0), model, path


CLASSES = ("dog", "person", "cat")
IMAGE = torch.randint(256, (3, 64, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def example(labels: list[int]) -> Example:
    none = torch.zeros(len(labels), dtype=torch.bool)
    boxes = torch.tensor([[4.0, 6.0, 30.0, 28.0], [31.0, 20.0, 60.0, 58.0]])[: len(labels)]
    return Example(IMAGE, Annotated(0, Path("none"), 64, 64, boxes, torch.tensor(labels), none, none))


@pytest.mark.slow
def test_detections_and_loss_are_those_of_the_categories(
    trained: tuple[TorchvisionToolkit, nn.Module, Path],
) -> None:
    toolkit, theirs, path = trained
    with torch.no_grad():
        (found,) = theirs([IMAGE / 255])
    known = [label for label in found["labels"].unique().tolist() if label in eighty()]
    assert len(known) > 3
    labels = tuple(reversed(known[:3]))  # of the classes of a set that has not all categories, and another order
    toolkit = for_classes(toolkit, [coco_categories()[each] for each in labels], (), path, "")
    assert toolkit.labels == labels
    ours = toolkit.build(3, seed=0).eval()
    ours.load_state_dict(theirs.state_dict())
    (detected,) = toolkit.detect(ours, [example([])])
    rows = torch.isin(found["labels"], torch.tensor(labels))
    assert not rows.all()
    assert detected.labels.tolist() == [labels.index(label) for label in found["labels"][rows].tolist()]
    assert torch.equal(detected.scores, found["scores"][rows])
    batch = [example([0, 2]), example([1])]  # two, as an SSDLite's last norm sees one pixel of each
    torch.manual_seed(0)
    loss = toolkit.loss(ours, batch)
    torch.manual_seed(0)
    own_labels = [torch.tensor([labels[0], labels[2]]), torch.tensor([labels[1]])]
    targets = [{"boxes": each.truth.boxes, "labels": mine} for each, mine in zip(batch, own_labels, strict=True)]
    own: dict[str, Tensor] = theirs.train()([IMAGE / 255] * 2, targets)
    theirs.eval()
    torch.testing.assert_close(loss, torch.stack(list(own.values())).sum())


@pytest.mark.slow
def test_other_outputs_are_left_or_refused(trained: tuple[TorchvisionToolkit, nn.Module, Path]) -> None:
    toolkit, _, path = trained
    ninety = [f"class {each}" for each in range(90)]
    assert for_classes(toolkit, ninety, (), path, "") is toolkit  # as many as the file's
    assert_refused(lambda: for_classes(toolkit, ["dog", "helmet"], (), path, ""), DataError, "model.pth", "helmet")
    few = path.with_name("few.pth")
    torch.save(toolkit.build(4, seed=0).state_dict(), few)
    assert for_classes(toolkit, ["a", "b", "c", "d"], (), few, "") is toolkit
    assert_refused(lambda: for_classes(toolkit, CLASSES, (), few, ""), DataError, "few.pth", "5", "outputs", "4")
    torch.save(nn.Linear(2, 2).state_dict(), few)
    assert for_classes(toolkit, CLASSES, (), few, "") is toolkit  # loading it says what is wrong


def test_labels_that_are_no_class_are_left_out() -> None:
    found = {
        "boxes": torch.arange(16.0).view(4, 4),
        "scores": torch.tensor([0.9, 0.8, 0.7, 0.6]),
        "labels": torch.tensor([0, 18, 3, 1]),
    }
    detected = to_detections(found, (18, 1))
    assert detected.labels.tolist() == [0, 1]
    assert detected.scores.tolist() == pytest.approx([0.8, 0.6])
    assert to_detections(found).labels.tolist() == [17, 2, 0]
    (target,) = targets_of(nn.Linear(1, 1), [example([1, 0])], (18, 1))
    assert target["labels"].tolist() == [1, 18]
