"""Masks of COCO's files: what is read is right, and what pycocotools' C would trip over is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.refusals import assert_refused

pytest.importorskip("pycocotools")

from pycocotools import mask

from coco_files import read_detections
from metricopt_ext.detection.coco import read_coco
from metricopt_ext.detection.shapes import box_around, mask_of, pixels_of
from metricopt_ext.errors import DataError


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_an_encoding_as_text_or_numbers_is_the_mask(seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    drawn = (rng.random((37 + 400 * seed, 53)) < share).astype(np.uint8)
    encoded = mask.encode(np.asfortranarray(drawn))
    size = list(drawn.shape)
    flat = drawn.flatten(order="F")
    ends = np.concatenate([[0], np.flatnonzero(np.diff(flat)) + 1, [flat.size]])
    runs = [0] * int(flat[0]) + np.diff(ends).tolist()
    for counts in (encoded["counts"].decode(), runs):
        read = mask_of({"size": size, "counts": counts}, "x", *size)
        assert (mask.decode(read) == drawn).all()
        assert pixels_of(read) == drawn.sum()
    if drawn.any():
        rows, columns = np.nonzero(drawn)
        sides = [int(each.max() - each.min() + 1) for each in (columns, rows)]
        assert box_around(read) == [columns.min(), rows.min(), *sides]
    else:
        assert box_around(read) == [0, 0, 0, 0]


def test_polygons_are_drawn_together_and_clipped() -> None:
    read = mask_of([[-5, 1, 4, 1, 4, 3, -5, 3], [6, 5, 8, 5, 8, 9, 6, 9]], "x", 8, 10)
    expected = np.zeros((8, 10))
    expected[1:3, :4] = expected[5:, 6:8] = 1
    assert (mask.decode(read) == expected).all()


SQUARE = {"size": [4, 5], "counts": [6, 2, 2, 2, 8]}


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ("text", ("text", "encoding")),
        ({**SQUARE, "size": [5, 4]}, ("size", "5", "4")),
        ({**SQUARE, "counts": [6, 2, 2, 2, 9]}, ("21", "20")),
        ({**SQUARE, "counts": [6, -2, 16]}, ("counts", "6", "encoding")),
        ([[1, 1, 2, 2, 3, 3, 4]], ()),
    ],
)
def test_what_is_no_mask_is_refused(shape: Any, names: tuple[str, ...]) -> None:
    assert_refused(lambda: mask_of(shape, "x", 4, 5), DataError, *names)


def write(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


TRUTH: dict[str, Any] = {
    "images": [{"id": 1, "width": 5, "height": 4}],
    "categories": [{"id": 1, "name": "a"}],
    "annotations": [{"image_id": 1, "category_id": 1, "bbox": [1, 2, 2, 2], "segmentation": SQUARE}],
}


def test_entries_without_what_is_compared_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "truth.json", TRUTH)
    data = read_coco(path, kind="segm")
    assert data.images[0].areas.tolist() == [4]  # that of the mask, as none is told
    (shape,) = data.images[0].shapes
    assert mask.decode(shape).sum() == 4
    assert read_coco(path).images[0].shapes is None
    found = {"image_id": 1, "category_id": 1, "bbox": [1, 2, 2, 2], "score": 0.5}
    assert_refused(
        lambda: read_detections(write(tmp_path / "found.json", [found]), data, kind="segm"), DataError, "0", "segm"
    )
    assert_refused(lambda: read_coco(write(path, {**TRUTH, "images": [{"id": 1}]}), kind="segm"), DataError, "1")
