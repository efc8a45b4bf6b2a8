"""Detectors that a function of the user's own builds: what is called with what, and which are refused."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.refusals import assert_refused, having

pytest.importorskip("torchvision")

from torchvision.models.detection import FasterRCNN

from helpers.boxes import CLASSES, example
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.detection.frozen import served
from metricopt_ext.detection.own_detector import OwnToolkit
from metricopt_ext.detection.torchvision_toolkit import TorchvisionToolkit, has_proposals
from metricopt_ext.errors import ConfigError, DataError
from testers.toolkit import ToolkitTester

GRID = """
import torch
import torch.nn.functional as F
from torch import nn

class Grid(nn.Module):
    # Finds in each of 4 x 4 cells the class of the box that covers its centre, and that box as a share of the image.
    def __init__(self, outputs, width):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.AdaptiveAvgPool2d(4))
        self.head = nn.Conv2d(width, outputs + 4, 1)

    def forward(self, images, targets=None):
        answers = [self.head(self.body(image[None]))[0].flatten(1).T for image in images]
        logits, shares = [a[:, :-4] for a in answers], [a[:, -4:].sigmoid() for a in answers]
        sizes = [image.new_tensor([image.shape[2], image.shape[1]] * 2) for image in images]
        if self.training:
            return self.losses(logits, shares, sizes, targets)
        scores = [each.softmax(1)[:, 1:].max(1) for each in logits]
        boxes = [torch.cat([torch.minimum(b[:, :2], b[:, 2:]), torch.maximum(b[:, :2], b[:, 2:])], 1) for b in shares]
        return [{"boxes": (b * s)[order], "scores": found.values[order], "labels": found.indices[order] + 1}
                for b, s, found in zip(boxes, sizes, scores) for order in [found.values.argsort(descending=True)]]

    def losses(self, logits, shares, sizes, targets):
        classes, boxes = [], []
        for each, share, size, target in zip(logits, shares, sizes, targets):
            centres = (torch.stack(torch.meshgrid(*[torch.arange(4)] * 2, indexing="xy"), -1).reshape(-1, 2) + 0.5) / 4
            wanted = torch.zeros(16, dtype=torch.int64)
            for box, label in zip(target["boxes"] / size, target["labels"]):
                inside = ((centres > box[:2]) & (centres < box[2:])).all(1)
                wanted[inside] = label
                boxes.append(((share[inside] - box) ** 2).sum())
            classes.append(F.cross_entropy(each, wanted))
        return {"classes": torch.stack(classes).mean(), "boxes": torch.stack(boxes).sum() if boxes else each.sum() * 0}

def grid(num_classes, width=4):
    return Grid(num_classes, width)
"""


class TestOwnDetector(ToolkitTester):
    """Its pictures don't see each other."""

    samples, alone = False, True

    @pytest.fixture
    def toolkit(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OwnToolkit:
        monkeypatch.delitem(sys.modules, "own_grid", raising=False)
        monkeypatch.setattr(sys, "path", sys.path[:])
        (tmp_path / "own_grid.py").write_text(GRID)
        return OwnToolkit(name="own_grid:grid", folder=str(tmp_path), kwargs={"width": 6})

    def layers(self, toolkit: Any, model: nn.Module) -> list[str]:
        return ["body.*"]

    @torch.no_grad()
    def own(self, toolkit: Any, model: nn.Module, image: Tensor) -> Any:
        (found,) = model([image.double() / 255])
        return SimpleNamespace(**{**found, "labels": found["labels"] - 1})

    def load(self, toolkit: Any, path: Path) -> nn.Module:
        model: nn.Module = sys.modules["own_grid"].grid(CLASSES + 1, width=6).double()
        model.load_state_dict(torch.load(path))
        return model


class Plain(nn.Module):
    """Returns what it is told to, in either mode."""

    def __init__(self, found: Any, losses: Any = None) -> None:
        super().__init__()
        self.found, self.losses = found, losses
        self.layer = nn.Linear(1, 1)

    def forward(self, images: Any, targets: Any = None) -> Any:
        return self.losses if self.training else self.found


def found_of(*labels: int) -> dict[str, Tensor]:
    count = len(labels)
    return {"boxes": torch.zeros(count, 4), "scores": torch.rand(count), "labels": torch.tensor(labels).long()}


GOOD = [found_of(1, 2)] * 2


@pytest.fixture
def toolkit_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the toolkit of a function that returns a model."""
    monkeypatch.setattr(sys, "path", sys.path[:])

    def make(model: nn.Module, **settings: Any) -> OwnToolkit:
        monkeypatch.setitem(sys.modules, "told", SimpleNamespace(model=model))
        monkeypatch.delitem(sys.modules, "mine", raising=False)
        (tmp_path / "mine.py").write_text("import told\n\ndef net(num_classes):\n    return told.model\n")
        return OwnToolkit(name="mine:net", folder=str(tmp_path), **settings)

    return make


def test_torchvisions_two_stages_are_taken_apart_and_others_are_not(toolkit_of: Any) -> None:
    stock = TorchvisionToolkit(min_size=64, max_size=64, width=16, head=32)
    model: Any = stock.build(CLASSES, seed=0)
    assert has_proposals(model)
    examples = [example(2, seed=seed) for seed in (0, 1)]

    class Doubled(FasterRCNN):
        def forward(self, images: Any, targets: Any = None) -> Any:
            result = super().forward(images, targets)
            return {name: 2 * value for name, value in result.items()} if self.training else result

    toolkit = toolkit_of(model)
    torch.manual_seed(1)
    expected = stock.loss(model, examples)
    torch.manual_seed(1)
    assert torch.equal(toolkit.loss(model, examples), expected)
    model.__class__ = Doubled
    assert not has_proposals(model)
    torch.manual_seed(1)
    torch.testing.assert_close(toolkit.loss(model, examples), 2 * expected)
    attach_film(model, ["roi_heads.box_head.*"], dim=3)
    assert not served(model)  # whose features are computed as torchvision's are


@pytest.mark.parametrize(
    ("found", "losses", "names"),
    [
        ([{"boxes": torch.zeros(0, 4)}] * 2, {}, ("boxes",)),
        ([{**found_of(1), "labels": torch.zeros(1)}] * 2, {}, ("labels", "torch.float32")),
        (GOOD, {"box": torch.zeros(2)}, ("box",)),
    ],
)
def test_another_interface_is_refused(toolkit_of: Any, found: Any, losses: Any, names: tuple[str, ...]) -> None:
    assert_refused(lambda: toolkit_of(Plain(found, losses)).build(2, seed=0), ConfigError, *names)


def test_labels_of_no_class_are_refused_and_the_background_is_left_out_with_a_warning(toolkit_of: Any) -> None:
    examples = [example(1)]
    toolkit = toolkit_of(Plain([]), classes=2)
    with pytest.warns(UserWarning, match=having("0")):
        (found,) = toolkit.detect(Plain([found_of(0, 2)]), examples)
    assert found.labels.tolist() == [1]
    assert_refused(lambda: toolkit.detect(Plain([found_of(1, 3)]), examples), DataError, "2", "1")
