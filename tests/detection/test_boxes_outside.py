import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("PIL")

from metricopt_ext.detection.boxes_outside import warn_of_boxes_outside
from metricopt_ext.detection.records import Annotated, DetectionSet
from metricopt_ext.detection.tables import TruthTable


def test_boxes_outside_are_counted_with_the_files_that_have_them(tmp_path: Path) -> None:
    def of(*boxes: list[float], size: tuple[int, int] = (4, 3)) -> Annotated:
        none = torch.zeros(len(boxes), dtype=torch.bool)
        return Annotated("a", tmp_path, *size, torch.tensor(boxes).reshape(-1, 4), none.long(), none, none)

    images = [of([0, 0, 4.009, 3]), of(), of([-1, 0, 2, 2], [5, 0, 9, 2], [6, 0, 9, 2]), of([1, 1, 1, 2])]
    with pytest.warns(UserWarning, match="boxes in") as caught:
        warn_of_boxes_outside(
            "the set", TruthTable.of(DetectionSet(("a",), images)), ["a.png", "b.png", "c.png", "d.png"]
        )
    (said,) = [str(each.message) for each in caught]
    assert said == (
        "boxes in the set: 1 without area, left out of training (d.png); 2 outside the image, left out of training"
        " (c.png); 1 partly outside the image, clipped for training (c.png); an evaluation counts them as they are"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_boxes_outside("nothing", TruthTable.of(DetectionSet(("a",), [])), [])
        unsized = DetectionSet(("a",), [images[0], of([0, 0, 99, 99], size=(0, 0))])
        warn_of_boxes_outside("the set", TruthTable.of(unsized), ["a.png", "unknown"])
