"""Columns say what objects say: the same tables, or the same refusal, whatever is in a file."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("msgspec")

from metricopt_ext.detection import coco_tables
from metricopt_ext.detection.coco_columns import annotations_of, detections_of
from metricopt_ext.detection.coco_tables import read_found, read_truth
from metricopt_ext.errors import DataError
from metricopt_ext.utils.files import JSON_LEVELS


def annotations(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    entries = [
        {
            "id": i,
            "image_id": int(rng.integers(1, 6)),
            "category_id": int(rng.integers(1, 4)) * 10,
            "bbox": [int(rng.integers(50)), float(rng.random()), *(1 + 20 * rng.random(2)).tolist()],
            **[{"area": 40}, {"area": None}, {}][i % 3],
            **[{"iscrowd": 1}, {"iscrowd": False}, {}, {"iscrowd": None}][i % 4],
            "segmentation": [[1, 2, 3, 4, 5, 6.5]],
        }
        for i in range(30)
    ]
    images = [{"id": i, "file_name": f"{i}.png", "width": 90, "height": 60} for i in (5, 3, 4, 2, 1)]
    return {"images": images, "annotations": entries, "categories": [{"id": i, "name": f"{i}"} for i in (30, 10, 20)]}


def results(seed: int = 1) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [
        {
            "image_id": int(rng.integers(1, 6)),
            "category_id": int(rng.integers(1, 4)) * 10,
            "bbox": [*(50 * rng.random(2)).tolist(), *(20 * rng.random(2)).tolist()],
            "score": float(rng.random()),
        }
        for _ in range(40)
    ]


def outcome(read: Callable[[], Any]) -> Any:
    """Each array of a table with its type, and what was warned of; or the refusal."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            table = read()
        except DataError as error:
            return str(error)
    parts = {
        name: (value.dtype, value.tolist()) if isinstance(value, np.ndarray) else value
        for name, value in vars(table).items()
    }
    return str(parts), [str(each.message) for each in caught]


def nested(levels: int) -> Any:
    return [nested(levels - 1)] if levels else 1


ENTRIES: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "usual": lambda entries: None,
    "text": lambda entries: [each.update(image_id=str(each["image_id"])) for each in entries],
    "names of files": lambda entries: [each.update(image_id=f"{each['image_id']}.png") for each in entries],
    "numbers with a point": lambda entries: entries[1].update(image_id=3.0),
    "names of classes": lambda entries: entries[2].update(category_name="10", category_id=77),
    "a truth value as an id": lambda entries: entries[0].update(image_id=True),
    "no id": lambda entries: entries[3].pop("image_id"),
    "an unknown class": lambda entries: entries[4].update(category_id=7),
    "an unknown image": lambda entries: entries[4].update(image_id=99),
    "a large id": lambda entries: entries[4].update(image_id=2**70),
    "an unknown key": lambda entries: entries[5].update(colour={"red": [1]}),
    "another mode": lambda entries: entries[5].update(bbox_mode="XYXY_ABS"),
    "three numbers": lambda entries: entries[6].update(bbox=[1, 2, 3]),
    "no box": lambda entries: entries[6].pop("bbox"),
    "text in a box": lambda entries: entries[6].update(bbox=[1, 2, "3", 4]),
    "NaN": lambda entries: entries[6].update(bbox=[1, 2, float("nan"), 4]),
    "too large": lambda entries: entries[6].update(bbox=[1, 2, 1e31, 4]),
    "beyond float64": lambda entries: entries[6].update(bbox=[1, 2, 10**400, 4]),
    "nested": lambda entries: entries[7].update(segmentation=nested(JSON_LEVELS - 4)),
    "nested too deeply": lambda entries: entries[7].update(segmentation=nested(JSON_LEVELS)),
    "deeply by an unknown key": lambda entries: entries[7].update(x=nested(JSON_LEVELS)),
    "normalised": lambda entries: [each.update(bbox=[0.1, 0.2, 0.3, 0.4]) for each in entries],
    "no entry": list.clear,
    "no object": lambda entries: entries.insert(0, None),
}
DETECTIONS: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "a score as text": lambda found: found[0].update(score="0.5"),
    "no score": lambda found: found[0].pop("score"),
    "an infinite score": lambda found: found[0].update(score=float("inf")),
    "a score of 1": lambda found: found[0].update(score=1),
}
OBJECTS: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "a flag as text": lambda objects: objects[0].update(iscrowd="1"),
    "a flag of 2": lambda objects: objects[0].update(iscrowd=2),
    "an infinite area": lambda objects: objects[0].update(area=1e31),
    "an area as text": lambda objects: objects[0].update(area="3"),
    "flat": lambda objects: objects[0].update(bbox=[1, 2, 0, 4], iscrowd="x"),
    "corners": lambda objects: [each.update(bbox=[5, 5, 9, 9], area=16) for each in objects],
}


def alike(monkeypatch: pytest.MonkeyPatch, read: Callable[[], Any]) -> Any:
    by_columns = outcome(read)
    with monkeypatch.context() as patch:
        patch.setattr(coco_tables, "find_spec", lambda name: None)
        assert by_columns == outcome(read)
    return by_columns


@pytest.mark.parametrize("change", [*ENTRIES, *DETECTIONS])
def test_detections_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    content, path = results(), tmp_path / "found.json"
    {**ENTRIES, **DETECTIONS}[change](content)
    path.write_text(json.dumps(content))
    (tmp_path / "gt.json").write_text(json.dumps(annotations()))
    truth = read_truth(tmp_path / "gt.json")
    alike(monkeypatch, lambda: read_found(path, truth))
    alike(monkeypatch, lambda: read_found(path, truth, strict=True))


@pytest.mark.parametrize("change", [*ENTRIES, *OBJECTS])
def test_annotations_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    content, path = annotations(), tmp_path / "gt.json"
    {**ENTRIES, **OBJECTS}[change](content["annotations"])
    path.write_text(json.dumps(content))
    alike(monkeypatch, lambda: read_truth(path))


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("categories"),
        lambda content: content.update(annotations={}),
        lambda content: content.update(images=[]),
        lambda content: content.update(info=nested(JSON_LEVELS - 1)),
        lambda content: content.update(info=nested(JSON_LEVELS)),
        lambda content: content["images"].append(content["images"][0]),
        lambda content: content["images"][0].update(width="90", height=None),
    ],
)
def test_files_of_annotations_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]
) -> None:
    content, path = annotations(), tmp_path / "gt.json"
    change(content)
    path.write_text(json.dumps(content))
    alike(monkeypatch, lambda: read_truth(path))


@pytest.mark.parametrize(
    "data", [b"", b"[", b"\xef\xbb\xbf[]", b"[{}]x", b"{}", b'"text"', b"[" * 10**6, b'[{"\x80": 1}]']
)
def test_what_is_no_list_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(data)
    (tmp_path / "gt.json").write_text(json.dumps(annotations()))
    truth = read_truth(tmp_path / "gt.json")
    alike(monkeypatch, lambda: read_found(path, truth))
    alike(monkeypatch, lambda: read_truth(path))


def test_a_key_that_is_written_twice_counts_the_last_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, entry = tmp_path / "found.json", json.dumps(results()[0])
    path.write_text(f'[{entry[:-1]}, "score": 0.25}}]')
    (tmp_path / "gt.json").write_text(json.dumps(annotations()))
    truth = read_truth(tmp_path / "gt.json")
    alike(monkeypatch, lambda: read_found(path, truth))
    assert read_found(path, truth).scores.tolist() == [0.25]


def test_usual_files_are_read_in_columns() -> None:
    found = detections_of(json.dumps(results()).encode(), "detection")
    assert found is not None
    assert len(found) == 40
    assert annotations_of(json.dumps(annotations()).encode(), "annotation") is not None
    assert detections_of(json.dumps([*results(), None]).encode(), "detection") is None
