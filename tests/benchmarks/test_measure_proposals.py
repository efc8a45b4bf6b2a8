"""Proposals are those that the box head gets, and their recall is a naive loop's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("torchvision")

import measure_proposals as tool
from helpers.boxes import naive_iou
from helpers.programs import call
from measure_proposals import proposal_recall, propose
from metricopt_ext.detection.records import Annotated, DetectionSet
from metricopt_ext.detection.scenes import write_scenes
from metricopt_ext.detection.task import load_examples
from metricopt_ext.detection.torchvision_toolkit import TorchvisionToolkit
from metricopt_ext.detection.voc import read_voc


def random_boxes(count: int, rng: torch.Generator) -> Tensor:
    corners = torch.randint(0, 60, (count, 2), generator=rng)
    return torch.cat([corners, corners + torch.randint(5, 40, (count, 2), generator=rng)], 1).float()


def random_set(seed: int) -> tuple[list[Tensor], DetectionSet]:
    """Proposals by the hundred, fewer, or none at all, and images with and without objects."""
    rng = torch.Generator().manual_seed(seed)
    images, proposals = [], []
    for i in range(12):
        boxes = random_boxes(i % 5, rng)
        difficult, crowd = (torch.rand(len(boxes), generator=rng) < 0.2 for _ in range(2))
        images.append(Annotated("a", Path("a.png"), 100, 80, boxes, difficult.long(), difficult, crowd))
        proposals.append(random_boxes((120, 30, 0)[i % 3], rng))
    return proposals, DetectionSet(("thing", "other"), images)


@pytest.mark.parametrize("iou", [0.3, 0.5])
def test_recall_equals_a_naive_loop(iou: float) -> None:
    proposals, truth = random_set(1)
    counts = (1, 10, 29, 100, 300)
    recalls = proposal_recall(proposals, truth, counts, iou)
    for k in counts:
        covered = [
            any(naive_iou(box, proposal) >= iou for proposal in boxes[:k].tolist())
            for boxes, image in zip(proposals, truth.images, strict=True)
            for box, skip in zip(image.boxes.tolist(), image.difficult | image.crowd, strict=True)
            if not skip
        ]
        assert recalls[k] == pytest.approx(sum(covered) / len(covered), abs=1e-12)
    assert 0 < recalls[1] < recalls[100] < 1


def test_a_detector_s_proposals_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_scenes(tmp_path / "scenes", images=(2, 1, 2), size=64, seed=0)
    data = read_voc(tmp_path / "scenes", "test")
    examples = load_examples(data)
    model: Any = TorchvisionToolkit(min_size=48, max_size=48).build(len(data.classes), seed=0).eval()
    seen: list[list[Tensor]] = []
    model.roi_heads.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    with torch.no_grad():
        model([each.image / 255 for each in examples])
    for ours, scaled in zip(propose(model, examples), seen[0], strict=True):
        torch.testing.assert_close(ours * 48 / 64, scaled)
        assert len(ours) > 0
    torch.save(model.state_dict(), tmp_path / "model.pth")
    (tmp_path / "c.yaml").write_text("data: {name: voc}\nmodel: {min_size: 48, max_size: 48}\n")
    files = ("--config-file", tmp_path / "c.yaml", "--weights", tmp_path / "model.pth")
    call(tool, *files, "--annotations", tmp_path / "scenes", "--split", "test")
    assert "model.pth" in capsys.readouterr().out
