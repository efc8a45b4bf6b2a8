"""COCO's, Pascal VOC's and YOLO's formats: what is read is what was written, and what is wrong is named."""

import json
import random
import re
import shutil
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from hypothesis import strategies as st
from PIL import Image

pytest.importorskip("torchvision")

from coco_files import read_detections, write_coco, write_detections
from helpers.refusals import assert_refused, assert_warned, having
from metricopt_ext.detection.ap50 import average_precision
from metricopt_ext.detection.coco import read_coco
from metricopt_ext.detection.config import DATA, DetectionConfig
from metricopt_ext.detection.data import load_splits
from metricopt_ext.detection.layouts import part_at, part_of
from metricopt_ext.detection.records import Annotated, Detections, DetectionSet, inside
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.detection.voc import read_voc, write_voc
from metricopt_ext.detection.yolo import read_yolo
from metricopt_ext.errors import ConfigError, DataError
from testers.loader import (
    PARTS,
    Edit,
    InFolders,
    LoaderTester,
    Truth,
    class_names,
    emptied,
    line_changed,
    paint,
    painted,
)

WIDTH, HEIGHT = 32, 16  # shares of which are exact
FILES = {"train": "train", "validation": "val", "test": "test"}  # what parts are called in files


class Thing(NamedTuple):
    """An object: its class, and its edges in whole pixels."""

    label: str
    box: tuple[float, float, float, float]


class Shown(NamedTuple):
    """A picture, by the number that is painted in it, and what is on it."""

    number: int
    things: tuple[Thing, ...]


@st.composite
def shown_parts(draw: st.DrawFn, *, given: bool = True) -> Truth:
    """Draw a few pictures for each part; the first of each has an object of every class, others perhaps none."""
    names = draw(class_names("words"))
    numbers = draw(st.randoms(use_true_random=False)).sample(range(256), 9)
    left, top = st.integers(0, WIDTH - 9), st.integers(0, HEIGHT - 9)
    boxes = st.tuples(left, top, st.integers(2, 8), st.integers(2, 8)).map(
        lambda box: (float(box[0]), float(box[1]), float(box[0] + box[2]), float(box[1] + box[3]))
    )
    parts = {}
    for part in PARTS:
        labels = [names, *draw(st.lists(st.lists(st.sampled_from(names), max_size=3), max_size=2))]
        parts[part] = [Shown(numbers.pop(), tuple(Thing(name, draw(boxes)) for name in each)) for each in labels]
    return Truth(tuple(names), parts)


class DetectionLoader(LoaderTester):
    """A set of a kind below one folder, read as the tools do."""

    kind: str

    def truths(self, *, given: bool = True) -> st.SearchStrategy[Truth]:
        return shown_parts(given=given)

    def read(self, folder: Path, **keys: Any) -> Truth:
        config = DetectionConfig(data=DATA[self.kind](name=self.kind, **(keys or {"root": str(folder)})))
        config.check()
        splits = load_splits(config, 0, folder)
        return Truth(
            splits.classes,
            {name: [self.shown(each, splits.classes) for each in getattr(splits, name)] for name in PARTS},
        )

    def shown(self, example: Example, classes: tuple[str, ...]) -> Shown:
        truth = example.truth
        assert (truth.width, truth.height) == (WIDTH, HEIGHT)
        assert not (truth.difficult | truth.crowd).any()
        found = zip(truth.labels.tolist(), truth.boxes.tolist(), strict=True)
        return Shown(painted(example.image), tuple(Thing(classes[label], tuple(box)) for label, box in found))


def json_changed(change: Callable[[dict[str, Any]], object]) -> Edit:
    """Change the content of the test part's file."""

    def edit(folder: Path, _: Truth) -> None:
        file = folder / "annotations/instances_test2017.json"
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    return edit


def first(key: str, **fields: Any) -> Edit:
    """Change fields of a list's first entry."""
    return json_changed(lambda content: content[key][0].update(fields))


def boxes_changed(change: Callable[[list[float]], list[float]]) -> Edit:
    return json_changed(lambda content: [each.update(bbox=change(each["bbox"])) for each in content["annotations"]])


class TestCoco(DetectionLoader):
    """As it is distributed: a file of annotations for each part, whose images have the same names as others'."""

    kind = "coco"
    edits = (
        ("no JSON", emptied("annotations/instances_test2017.json"), ["instances_test2017.json"]),
        ("no categories", json_changed(lambda content: content.pop("categories")), ["categories"]),
        ("an unknown category", first("annotations", category_id=999), ["0", "category_id", "999"]),
        ("a box of three numbers", first("annotations", bbox=[1, 2, 3]), ["0", "bbox"]),
        ("boxes of another mode", first("annotations", bbox_mode=0), ["0", "bbox_mode"]),
        ("a word as a flag", first("annotations", iscrowd="no"), ["0", "'no'"]),
        ("boxes as shares", boxes_changed(lambda box: [each / WIDTH for each in box]), ["bbox"]),
        ("a category twice", json_changed(lambda content: content["categories"].append({"id": 2, "name": "x"})), ["2"]),
        ("an id that is no number", first("images", id=1.5), ["id", "1.5"]),
        ("another height", first("images", height=9), ["9", HEIGHT]),
        ("no image", lambda folder, _: (folder / "test2017/1.png").unlink(), ["1.png"]),
    )

    def write(self, folder: Path, truth: Truth, rng: random.Random) -> None:
        ids = rng.sample(range(2, 90), len(truth.classes))  # the classes come in their order
        ids = [2, *sorted(ids)[1:]]
        for part, rows in truth.parts.items():
            images, annotations = [], []
            for place, row in enumerate(rows, start=1):
                paint(folder / f"{FILES[part]}2017/{place}.png", row.number, (WIDTH, HEIGHT))
                size = {"width": WIDTH, "height": HEIGHT}
                images.append({"id": 3 * place, "file_name": f"{place}.png", **size})
                for thing in row.things:
                    left, top, right, bottom = thing.box
                    bbox, category = [left, top, right - left, bottom - top], ids[truth.classes.index(thing.label)]
                    annotations.append(
                        {"id": len(annotations), "image_id": 3 * place, "category_id": category, "bbox": bbox}
                    )
            categories = [{"id": number, "name": name} for number, name in zip(ids, truth.classes, strict=True)]
            for entries in (images, categories):
                rng.shuffle(entries)
            content = {"images": images, "annotations": annotations, "categories": categories}
            file = folder / f"annotations/instances_{FILES[part]}2017.json"
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(content))


def xml_changed(old: str, new: str) -> Edit:
    """Change the first annotation of the test part, whose name has to be named."""

    def edit(folder: Path, truth: Truth) -> list[str]:
        file = folder / f"Annotations/{truth.parts['test'][0].number}.xml"
        text, count = re.subn(old, new, file.read_text(), count=1)
        assert count
        file.write_text(text)
        return [file.name]

    return edit


class TestVoc(DetectionLoader, InFolders):
    """A tree with lists of each part's images."""

    kind = "voc"
    edits = (
        ("another format", xml_changed("annotation>", "svg>"), []),
        ("no class", xml_changed("name>", "label>"), []),
        ("no number", xml_changed("<xmin>.*?<", "<xmin>nan<"), ["nan", "bndbox/xmin"]),
        ("Python's number", xml_changed("<xmax>.*?<", "<xmax>1_7<"), ["1_7", "bndbox/xmax"]),
        ("a word as a flag", xml_changed("<difficult>0", "<difficult>Unspecified"), ["Unspecified", "0", "1"]),
        ("an object in another", xml_changed("<object>((.|\n)*?)</object>", "<o><object>\\1</object></o>"), ["1"]),
        (
            "a list of nothing",
            lambda folder, _: (folder / "ImageSets/Main/test.txt").write_text("\n") and None,
            ["test.txt"],
        ),
        ("a name twice", line_changed("ImageSets/Main/test.txt", 1, lambda line: line * 2), ["test.txt"]),
        ("no such list", lambda folder, _: (folder / "ImageSets/Main/test.txt").unlink(), ["test"]),
        (
            "no annotation",
            lambda folder, truth: (folder / f"Annotations/{truth.parts['test'][0].number}.xml").unlink(),
            ["test"],
        ),
        ("no image", lambda folder, truth: (folder / f"JPEGImages/{truth.parts['test'][0].number}.png").unlink(), []),
    )

    def write(self, folder: Path, truth: Truth, rng: random.Random) -> None:
        for part, rows in truth.parts.items():
            for row in rows:
                paint(folder / f"JPEGImages/{row.number}.png", row.number, (WIDTH, HEIGHT))
                write_xml(folder / f"Annotations/{row.number}.xml", row)
            listed = folder / f"ImageSets/Main/{FILES[part]}.txt"
            listed.parent.mkdir(parents=True, exist_ok=True)
            listed.write_text("".join(f"{row.number}\n" for row in rows))

    def read(self, folder: Path, **keys: Any) -> Truth:
        return super().read(folder, root=str(folder), splits=[*FILES.values()])


def write_xml(file: Path, row: Shown) -> None:
    """Write an annotation as VOC does, by pixels that are counted from 1, both ends inside."""
    top = ET.Element("annotation")
    size = ET.SubElement(top, "size")
    for side, value in (("width", WIDTH), ("height", HEIGHT)):
        ET.SubElement(size, side).text = str(value)
    for thing in row.things:
        entry = ET.SubElement(top, "object")
        ET.SubElement(entry, "name").text = thing.label
        ET.SubElement(entry, "difficult").text = "0"
        box = ET.SubElement(entry, "bndbox")
        ends = zip(("xmin", "ymin", "xmax", "ymax"), thing.box, (1, 1, 0, 0), strict=True)
        for end, edge, more in ends:
            ET.SubElement(box, end).text = str(int(edge + more))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(ET.tostring(top))


def label_line(line: str) -> Edit:
    """Put a line before the labels of the test part's first picture, whose file has to be named."""

    def edit(folder: Path, truth: Truth) -> list[str]:
        file = folder / f"labels/test/{truth.parts['test'][0].number}.txt"
        file.write_text(f"{line}\n{file.read_text()}")
        return [file.name]

    return edit


def yaml_changed(**fields: Any) -> Edit:
    def edit(folder: Path, _: Truth) -> None:
        content = yaml.safe_load((folder / "data.yaml").read_text())
        (folder / "data.yaml").write_text(yaml.safe_dump(content | fields))

    return edit


class TestYolo(DetectionLoader, InFolders):
    """Its ``data.yaml`` and a text for each image."""

    kind, in_order = "yolo", False
    edits = (
        ("an unknown class", label_line("9 0.5 0.5 0.2 0.2"), ["1", "'9'", "0"]),
        ("a name as the class", label_line("cat 0.5 0.5 0.2 0.2"), ["1", "'cat'"]),
        ("pixels", label_line("0 20 10 8 4"), ["1", "'20'"]),
        ("no number", label_line("0 0.5 0.5 nan 0.2"), ["1", "nan"]),
        ("five numbers", label_line("0 0.5 0.5 0.2 0.2 0.9"), ["1", "5"]),
        ("keypoints", yaml_changed(kpt_shape=[17, 2]), ["kpt_shape", "keypoints"]),
        ("fewer names than it says", yaml_changed(nc=9), ["9", "data.yaml"]),
        ("a class twice", yaml_changed(names=["cat", "cat"]), ["cat"]),
        ("no classes", yaml_changed(names=None), ["data.yaml", "names"]),
    )

    def write(self, folder: Path, truth: Truth, rng: random.Random) -> None:
        for part, rows in truth.parts.items():
            for row in rows:
                paint(folder / f"images/{FILES[part]}/{row.number}.png", row.number, (WIDTH, HEIGHT))
                lines = []
                for thing in row.things:
                    left, top, right, bottom = (
                        each / side for each, side in zip(thing.box, (WIDTH, HEIGHT) * 2, strict=True)
                    )
                    shares = (left + right) / 2, (top + bottom) / 2, right - left, bottom - top
                    if rng.random() < 0.5:  # a polygon of the same box
                        shares = right, top, left, bottom, left, top
                    lines.append(" ".join(map(str, (truth.classes.index(thing.label), *shares))))
                labels = folder / f"labels/{FILES[part]}/{row.number}.txt"
                labels.parent.mkdir(parents=True, exist_ok=True)
                labels.write_text("".join(f"{line}\n" for line in lines))
        names = dict(enumerate(truth.classes)) if rng.random() < 0.5 else [*truth.classes]
        parts = {name: f"images/{name}" for name in FILES.values()}
        (folder / "data.yaml").write_text(yaml.safe_dump({"path": ".", **parts, "names": names}))


# --- Layouts: how people lay out these sets otherwise ---------------------------------------------------------------

PETS = ("cat", "dog")
NUMBERS = {"train": range(1, 5), "validation": range(5, 8), "test": range(8, 10)}
SET = Truth(
    PETS,
    {
        part: [Shown(n, (Thing(PETS[n % 2], (n % 5.0, n % 3.0, n % 5 + 6.0, n % 3 + 8.0)),)) for n in numbers]
        for part, numbers in NUMBERS.items()
    },
)
FOLDERS = {"train": "train", "validation": "valid", "test": "test"}  # what Roboflow calls parts
COCO_FILE = "annotations/instances_{0}2017.json"
OF_ROBOFLOW = [("{0}2017", "{1}"), (COCO_FILE, "{1}/_annotations.coco.json")]

# The form, what is renamed, {0} being the part, {1} its folder and {2} the number of a picture; the keys of parts.
LAYOUTS: dict[str, tuple[type[DetectionLoader], list[tuple[str, str]], str]] = {
    "COCO's images in folders": (TestCoco, [(COCO_FILE, "annotations/{0}.json"), ("{0}2017", "images/{0}")], ""),
    "COCO's files": (TestCoco, [], COCO_FILE),
    "COCO by Roboflow": (TestCoco, OF_ROBOFLOW, ""),
    "COCO's folders": (TestCoco, OF_ROBOFLOW, "{1}"),
    "VOC by Roboflow": (
        TestVoc,
        [("Annotations/{2}.xml", "{1}/{2}.xml"), ("JPEGImages/{2}.png", "{1}/{2}.png"), ("ImageSets", "lists")],
        "",
    ),
    "VOC's lists": (TestVoc, [("JPEGImages", "images"), ("ImageSets/Main", "lists")], "lists/{0}.txt"),
    "YOLO by Roboflow": (TestYolo, [("images/{0}", "{1}/images"), ("labels/{0}", "{1}/labels")], ""),
    "YOLO's folders": (TestYolo, [], "images/{0}"),
}


def laid_out(root: Path, layout: str) -> tuple[DetectionLoader, dict[str, str]]:
    """Write the set; returns what reads it, with which keys."""
    kind, moves, key = LAYOUTS[layout]
    root.mkdir()
    kind().write(root, SET, random.Random(0))
    for part, numbers in NUMBERS.items():
        for old, new in moves:
            for number in numbers:
                names = FILES[part], FOLDERS[part], number
                if (path := root / old.format(*names)).exists() and not (root / new.format(*names)).exists():
                    (root / new.format(*names)).parent.mkdir(parents=True, exist_ok=True)
                    path.rename(root / new.format(*names))
    if layout == "YOLO by Roboflow":
        parts = {FILES[part]: f"../{FOLDERS[part]}/images" for part in PARTS}
        (root / "data.yaml").write_text(
            yaml.safe_dump({**parts, "nc": 2, "names": [*PETS], "roboflow": {"version": 1}})
        )
    keys = {FILES[part]: str(root / key.format(FILES[part], FOLDERS[part])) for part in PARTS}
    return kind(), keys if key else {"root": str(root)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_part_has_its_own_images_and_objects(layout: str, tmp_path: Path) -> None:
    reader, keys = laid_out(tmp_path / "set", layout)
    read = DetectionLoader.read(reader, tmp_path, **keys)
    assert read.classes == PETS
    assert {part: sorted(rows) for part, rows in read.parts.items()} == SET.parts


def test_a_set_without_parts_is_divided(tmp_path: Path) -> None:
    laid_out(tmp_path / "set", "VOC's lists")
    shutil.rmtree(tmp_path / "set/lists")
    keys: dict[str, Any] = {"root": str(tmp_path / "set"), "validation_share": 0.2}
    read = DetectionLoader.read(TestVoc(), tmp_path, **keys)
    assert [len(rows) for rows in read.parts.values()] == [5, 2, 2]
    assert read.joined() == SET.joined()


def test_what_is_missing_or_named_twice_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "set"
    _, keys = laid_out(root, "COCO by Roboflow")
    assert_refused(lambda: part_of(root, "extra", "coco"), DataError, "extra", "train/", "valid/")
    assert_refused(lambda: part_at(root / "nowhere"), DataError, "nowhere")
    assert_refused(lambda: part_at(root / "train/_annotations.coco.json", "voc"), DataError, "data.name=coco")
    both = DetectionConfig(data=DATA["coco"](**keys, train=str(root / "train")))
    assert_refused(both.check, ConfigError, "data.root")


def test_an_image_in_two_parts_is_found_by_content(tmp_path: Path) -> None:
    reader, keys = laid_out(tmp_path / "set", "COCO by Roboflow")
    shutil.copy(tmp_path / "set/train/2.png", tmp_path / "set/test/1.png")
    assert_warned(lambda: DetectionLoader.read(reader, tmp_path, **keys), "1", "train/2.png")


def test_classes_are_compared_by_name_whatever_their_numbers(tmp_path: Path) -> None:
    reader, keys = laid_out(tmp_path / "set", "COCO by Roboflow")
    file = tmp_path / "set/valid/_annotations.coco.json"
    content = json.loads(file.read_text())
    numbers = {each["id"]: 200 - each["id"] for each in content["categories"]}
    for entries, field in ((content["categories"], "id"), (content["annotations"], "category_id")):
        for each in entries:
            each[field] = numbers[each[field]]
    file.write_text(json.dumps(content))
    assert sorted(DetectionLoader.read(reader, tmp_path, **keys).parts["validation"]) == SET.parts["validation"]
    content["categories"].append({"id": 500, "name": "emu"})
    file.write_text(json.dumps(content))
    assert_refused(lambda: DetectionLoader.read(reader, tmp_path, **keys), DataError, "emu", "data.val")


# --- COCO -----------------------------------------------------------------------------------------------------------

# Ids with gaps, neither images nor categories in their order; a crowd region; an image without objects.
CONTENT = {
    "images": [
        {"id": 70, "file_name": "b.png", "width": 40, "height": 30},
        {"id": 7, "file_name": "a.png", "width": 20, "height": 10},
        {"id": 71, "file_name": "c.png", "width": 20, "height": 10},
    ],
    "annotations": [
        {"id": 5, "image_id": 70, "category_id": 90, "bbox": [1.5, 2, 10.1, 20], "area": 3, "iscrowd": 1},
        {"id": 3, "image_id": 7, "category_id": 90, "bbox": [0, 0, 20, 10], "area": 200, "iscrowd": 0},
        {"id": 4, "image_id": 70, "category_id": 13, "bbox": [3, 4, 5, 6]},
    ],
    "categories": [{"id": 90, "name": "toothbrush"}, {"id": 13, "name": "stop sign"}],
}
RESULTS = [
    {"image_id": 70, "category_id": 13, "bbox": [3, 4, 5.25, 6], "score": 0.125},
    {"image_id": 7, "category_id": 90, "bbox": [0, 1, 2, 3], "score": 0.3},
    {"image_id": 70, "category_id": 90, "bbox": [0.1, 0.2, 0.3, 0.4], "score": 0.9},
]


def as_json(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def annotations(tmp_path: Path) -> Path:
    return as_json(tmp_path / "annotations.json", CONTENT)


@pytest.fixture
def data(annotations: Path) -> Any:
    return read_coco(annotations, dtype=torch.float64)


def test_a_written_set_is_read_as_it_was(data: Any, tmp_path: Path) -> None:
    again = read_coco(write_coco(tmp_path / "out" / "again.json", data), dtype=torch.float64)
    assert (again.classes, again.category_ids) == (data.classes, data.category_ids)
    for ours, theirs in zip(again.images, data.images, strict=True):
        assert (ours.image_id, ours.path, ours.width, ours.height) == (
            theirs.image_id,
            theirs.path,
            theirs.width,
            theirs.height,
        )
        assert torch.allclose(ours.boxes, theirs.boxes, rtol=0, atol=1e-12)
        assert torch.equal(ours.labels, theirs.labels)
        assert torch.equal(ours.crowd, theirs.crowd)


def test_detections_are_read_by_image_and_written_back(data: Any, tmp_path: Path) -> None:
    found = read_detections(as_json(tmp_path / "results.json", RESULTS), data)
    assert [len(each) for each in found] == [1, 2, 0]
    assert found[1].labels.tolist() == [0, 1]
    assert found[1].scores.tolist() == [0.125, 0.9]
    assert found[1].boxes[0].tolist() == [3, 4, 8.25, 10]
    again = read_detections(write_detections(tmp_path / "again.json", found, data), data)
    for ours, theirs in zip(again, found, strict=True):
        assert torch.allclose(ours.boxes, theirs.boxes, rtol=0, atol=1e-12)
        assert torch.equal(ours.scores, theirs.scores)
        assert torch.equal(ours.labels, theirs.labels)


def test_pycocotools_evaluates_what_was_written_for_a_voc_set(tmp_path: Path) -> None:
    coco = pytest.importorskip("helpers.coco_reference")
    no, boxes = torch.tensor([False]), torch.tensor([[1.0, 2.0, 11.0, 12.0]])
    images = [Annotated(name, Path(f"{name}.jpg"), 30, 20, boxes, torch.tensor([1]), no, no) for name in ("7", "3")]
    written = write_coco(tmp_path / "voc.json", DetectionSet(("bird", "cat"), images))
    data = read_coco(written)
    assert [(image.image_id, image.path.name) for image in data.images] == [(1, "7.jpg"), (2, "3.jpg")]
    found = [Detections(boxes, torch.tensor([0.5]), torch.tensor([label])) for label in (1, 0)]
    results = write_detections(tmp_path / "results.json", found, data)
    evaluation = coco.evaluated(json.loads(written.read_text()), json.loads(results.read_text()))
    # One of two cats; birds have no object.
    assert coco.average_precision(evaluation, "AP50") == pytest.approx(51 / 101)


def changed(key: str, place: int, **fields: Any) -> Any:
    content = json.loads(json.dumps(CONTENT))
    content[key][place].update(fields)
    return content


def value(folder: Path, content: Any, results: Any) -> float:
    data = read_coco(as_json(folder / "truth.json", content), dtype=torch.float64)
    return average_precision(read_detections(as_json(folder / "found.json", results), data), data, "coco").mean


@pytest.mark.parametrize(
    "change",
    [
        {"id": 7},
        {"id": None, "iscrowd": None, "area": None},
        {"area": -5},  # the area of its box is its own; pycocotools leaves the object out, without a word
        {"image_id": 70.0, "category_id": 13.0},
    ],
)
def test_annotations_count_whatever_their_ids_and_areas(tmp_path: Path, change: dict[str, Any]) -> None:
    expected = value(tmp_path, CONTENT, RESULTS)
    assert 0.4 < expected < 0.6
    assert value(tmp_path, changed("annotations", 2, **change), RESULTS) == expected


def test_annotations_of_images_that_are_not_listed_are_left_out(tmp_path: Path) -> None:
    """As by pycocotools, and said: a list of images is cut more often than their annotations are."""
    content = changed("annotations", 0)
    content["annotations"] += [{**content["annotations"][1], "id": 90 + i, "image_id": 99} for i in range(2)]
    with pytest.warns(UserWarning, match=having("2", "5", "annotations", "99")):
        assert value(tmp_path, content, RESULTS) == value(tmp_path, CONTENT, RESULTS)


BY_CORNERS = [{**RESULTS[0], "bbox": [3, 4, 8, 10]}, {**RESULTS[1], "bbox": [0, 0, 20, 10]}]


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ({"annotations": []}, ("COCO", "results")),
        ([RESULTS[0], 5], ("1", "image_id")),
        ([{**RESULTS[0], "image_id": 8}], ("0", "image_id", "8")),
        ([{**RESULTS[0], "category_id": 1}], ("0", "category_id", "13", "90")),
        ([{**RESULTS[0], "score": float("nan")}], ("score", "nan")),
        ([{**each, "bbox": [0.1, 0.2, 0.3, 0.4]} for each in RESULTS], ("bbox",)),
        (BY_CORNERS, ("bbox", "left, top, right, bottom")),
    ],
)
def test_wrong_detections_are_named(data: Any, tmp_path: Path, content: Any, names: tuple[str, ...]) -> None:
    assert_refused(lambda: read_detections(as_json(tmp_path / "results.json", content), data), DataError, *names)


# --- Pascal VOC -----------------------------------------------------------------------------------------------------

CLASSES = ("bird", "cat")


def example(name: str, boxes: list[list[float]], labels: list[int], difficult: list[bool]) -> Example:
    image = torch.randint(256, (3, 30, 40), generator=torch.Generator().manual_seed(len(boxes)), dtype=torch.uint8)
    flags = torch.tensor(difficult, dtype=torch.bool)
    truth = Annotated(
        image_id=name,
        path=Path("unused"),
        width=40,
        height=30,
        boxes=torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        labels=torch.tensor(labels, dtype=torch.int64),
        difficult=flags,
        crowd=torch.zeros_like(flags),
    )
    return Example(image, truth)


EXAMPLES = (
    example("a1", [[0, 0, 40, 30], [3, 4, 10.25, 9.1]], [1, 0], [False, True]),
    example("a2", [], [], []),
    example("a3", [[5, 6, 17, 28]], [1], [False]),
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A set below VOCdevkit/VOC2007 with the splits train (a1, a2) and test (a3)."""
    inner = tmp_path / "VOCdevkit" / "VOC2007"
    write_voc(inner, EXAMPLES[:2], CLASSES, "train")
    write_voc(inner, EXAMPLES[2:], CLASSES, "test")
    return tmp_path


def annotation(tree: Path, name: str = "a3") -> Path:
    return tree / "VOCdevkit" / "VOC2007" / "Annotations" / f"{name}.xml"


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def assert_same(image: Annotated, written: Example) -> None:
    truth = written.truth
    assert (image.image_id, image.width, image.height) == (truth.image_id, truth.width, truth.height)
    for ours, theirs in (
        (image.boxes, truth.boxes),
        (image.labels, truth.labels),
        (image.difficult, truth.difficult),
        (image.crowd, truth.crowd),
    ):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def test_reads_what_was_written(tree: Path) -> None:
    data = read_voc(tree)
    assert data.classes == CLASSES
    for image, written in zip(data.images, EXAMPLES, strict=True):
        assert_same(image, written)
        assert torch.equal(image.load(), written.image)


def test_flags_may_be_missing(tree: Path) -> None:
    replace(annotation(tree), "difficult>", "pose>")
    assert read_voc(tree, "test").images[0].difficult.tolist() == [False]


def test_one_warning_says_which_boxes_are_outside_and_they_stay_as_annotated(tree: Path) -> None:
    replace(annotation(tree, "a1"), "<xmax>40</xmax>", "<xmax>45</xmax>")  # partly outside
    replace(annotation(tree, "a1"), "<ymin>5</ymin>", "<ymin>41</ymin>")  # wholly outside
    replace(annotation(tree, "a1"), "<ymax>9.1", "<ymax>48.1")
    with pytest.warns(UserWarning, match="boxes in") as caught:
        data = read_voc(tree)
    (warning,) = caught
    for text in (
        "1 outside the image, left out of training (a1.xml)",
        "1 partly outside the image, clipped for training (a1.xml)",
        "an evaluation counts them as they are",
    ):
        assert text in str(warning.message)
    first = data.images[0]
    assert first.boxes.tolist() == [[0, 0, 45, 30], pytest.approx([3, 40, 10.25, 48.1])]
    clipped, within = inside(first.boxes, first.width, first.height)
    assert clipped[within].tolist() == [[0, 0, 40, 30]]


def test_a_box_of_one_pixel_has_equal_ends(tree: Path) -> None:
    replace(annotation(tree), "<xmax>17</xmax>", "<xmax>6</xmax>")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_voc(tree, "test").images[0].boxes.tolist() == [[5, 6, 6, 28]]


def test_corners_in_the_wrong_order_are_left_out_with_a_warning(tree: Path) -> None:
    replace(annotation(tree), "<xmax>17<", "<xmax>5<")
    with pytest.warns(UserWarning, match=having("1", "a3.xml")):
        assert not len(read_voc(tree, "test").images[0].boxes)


def test_classes_that_do_not_fit_are_named(tree: Path) -> None:
    assert read_voc(tree, "test", classes=("cat",)).images[0].labels.tolist() == [0]
    assert_refused(lambda: read_voc(tree, "test", classes=("dog",)), DataError, "a3.xml", "cat", "classes", "dog")
    assert_refused(lambda: read_voc(tree, "test", classes=("cat", "cow", "cat")), DataError, "classes", "cat")
    assert_refused(lambda: read_voc(tree / "missing"), DataError, "missing")


def test_an_image_that_is_cut_or_of_another_size_is_noticed_when_it_is_loaded(tree: Path) -> None:
    replace(annotation(tree), "<height>30<", "<height>29<")
    (image,) = read_voc(tree, "test").images
    assert_refused(image.load, DataError, "a3.png", "40 x 30", "40 x 29")
    file = next(tree.rglob("a3.png"))
    file.write_bytes(file.read_bytes()[:200])
    assert_refused(image.load, DataError, "a3.png")


# --- YOLO -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder with an image of 40 x 20 pixels, and its labels beside that folder."""
    (tmp_path / "images").mkdir()
    (tmp_path / "labels").mkdir()
    Image.new("RGB", (40, 20)).save(tmp_path / "images/a.png")
    (tmp_path / "labels/a.txt").write_text("1 0.5 0.5 0.25 0.5\n\n0 0.1 0.2 0.3 0.2 0.3 0.9\n")
    return tmp_path / "images"


def test_an_image_without_labels_has_no_objects_and_is_counted(images: Path) -> None:
    Image.new("RGB", (8, 8)).save(images / "b.png")
    with pytest.warns(UserWarning, match=having("1", "b.png")):
        first, second = read_yolo(images, ("cat", "dog")).images
    assert [len(first.boxes), len(second.boxes)] == [2, 0]
    (images.parent / "labels/a.txt").unlink()
    assert_refused(lambda: read_yolo(images, ("cat", "dog")), DataError, "2", "labels/a.txt")


def test_boxes_without_area_are_told(images: Path) -> None:
    """They count as objects that nothing finds, as in COCO's evaluation."""
    (images.parent / "labels/a.txt").write_text("0 0.5 0.5 0 0.5\n")
    with pytest.warns(UserWarning, match=having("1")):
        assert read_yolo(images, ("cat", "dog")).images[0].boxes.tolist() == [[20, 5, 20, 15]]


def test_what_lies_inside_an_image() -> None:
    nan = float("nan")
    boxes = [[-1.0, 2, 3, 9], [1, 1, 2, 2], [4, 0, 5, 2], [1, 2, 1, 3], [2, 2, 1, 1], [nan, 0, 1, 1], [0, 0, 1, nan]]
    clipped, within = inside(torch.tensor(boxes), 4, 3)
    assert clipped[within].tolist() == [[0, 2, 3, 3], [1, 1, 2, 2]]
    assert within.tolist() == [True, True] + [False] * 5
    assert inside(torch.tensor([[-1.0, 2, 30, 90]]), 0, 0)[0].tolist() == [[0, 2, 30, 90]]
