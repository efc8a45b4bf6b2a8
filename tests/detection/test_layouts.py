"""How people lay out sets for detectors: each part is found with its own images, and what is missing is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from helpers.refusals import assert_refused, assert_warned

pytest.importorskip("torchvision")

from metricopt_ext.detection.config import DATA, DetectionConfig
from metricopt_ext.detection.data import DetectionSplits, load_splits
from metricopt_ext.detection.layouts import images_of, part_at, part_in, part_of
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.utils.config import load_config

CLASSES = ("cat", "dog")
SIDE = 16
NUMBERS = {"train": range(1, 5), "val": range(5, 8), "test": range(8, 10)}  # of the images in each part

Layout = Callable[[Path], dict[str, str]]


def box_of(number: int) -> list[int]:
    """Left, top, right and bottom of the one object of an image, in whole pixels."""
    return [number % 5, number % 3, number % 5 + 6, number % 3 + 8]


def write_image(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (SIDE, SIDE), (number, number, number)).save(path, format="PNG")


def write_coco(file: Path, images: Path, numbers: range, prefix: str = "", names: bool = True) -> None:
    """Write COCO's file, and the images; those of each part have the same names as others' unless told otherwise."""
    entries, objects = [], []
    for place, number in enumerate(numbers, start=1):
        name = f"{number if names else place}.png"
        write_image(images / name, number)
        entries.append({"id": place, "file_name": prefix + name, "width": SIDE, "height": SIDE})
        left, top, right, bottom = box_of(number)
        box = [left, top, right - left, bottom - top]
        objects.append({"id": place, "image_id": place, "category_id": 1 + number % 2, "bbox": box, "area": 48})
    categories = [{"id": i, "name": name} for i, name in enumerate(CLASSES, start=1)]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"images": entries, "annotations": objects, "categories": categories}))


def write_xml(file: Path, number: int) -> None:
    left, top, right, bottom = box_of(number)
    ends = zip(("xmin", "ymin", "xmax", "ymax"), (left + 1, top + 1, right, bottom), strict=True)
    box = "".join(f"<{end}>{value}</{end}>" for end, value in ends)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        f"<annotation><filename>{file.stem}.png</filename><size><width>{SIDE}</width><height>{SIDE}</height></size>"
        f"<object><name>{CLASSES[number % 2]}</name><bndbox>{box}</bndbox></object></annotation>"
    )


def write_yolo(labels: Path, images: Path, numbers: range) -> None:
    labels.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        write_image(images / f"{number}.png", number)
        left, top, right, bottom = box_of(number)
        shares = ((left + right) / 2, (top + bottom) / 2, right - left, bottom - top)
        row = [number % 2, *(share / SIDE for share in shares)]
        (labels / f"{number}.txt").write_text(" ".join(map(str, row)) + "\n")


# --- Layouts: each writes the set into a folder, and returns the settings that read it -------------------------------


def coco_as_distributed(root: Path) -> dict[str, str]:
    for name, numbers in NUMBERS.items():
        write_coco(root / f"annotations/instances_{name}2017.json", root / f"{name}2017", numbers, names=False)
        (root / f"annotations/captions_{name}2017.json").write_text('{"images": [], "annotations": []}')
    return {"name": "coco", "root": str(root)}


def coco_in_images(root: Path) -> dict[str, str]:
    for name, numbers in NUMBERS.items():
        write_coco(root / f"annotations/{name}.json", root / f"images/{name}", numbers, names=False)
    return {"name": "coco", "root": str(root)}


def coco_in_one_folder(root: Path) -> dict[str, str]:
    for name, numbers in NUMBERS.items():
        write_coco(root / f"{name}.json", root / "images", numbers)
    return {"name": "coco", "root": str(root)}


def coco_with_folders_in_names(root: Path) -> dict[str, str]:
    for name, numbers in NUMBERS.items():
        write_coco(root / f"labels/{name}.json", root / f"data/{name}", numbers, f"data/{name}/", names=False)
    return {"name": "coco", **{name: str(root / f"labels/{name}.json") for name in NUMBERS}}


def coco_by_files(root: Path) -> dict[str, str]:
    coco_as_distributed(root)
    return {"name": "coco", **{name: str(root / f"annotations/instances_{name}2017.json") for name in NUMBERS}}


def roboflow_coco(root: Path) -> dict[str, str]:
    for name, numbers in NUMBERS.items():
        folder = root / name.replace("val", "valid")
        write_coco(folder / "_annotations.coco.json", folder, numbers, names=False)
    return {"name": "coco", "root": str(root)}


def roboflow_coco_by_folders(root: Path) -> dict[str, str]:
    roboflow_coco(root)
    return {"name": "coco", **{name: str(root / name.replace("val", "valid")) for name in NUMBERS}}


def roboflow_voc(root: Path) -> dict[str, str]:
    for name, numbers in NUMBERS.items():
        for number in numbers:
            write_xml(root / name.replace("val", "valid") / f"{number}.xml", number)
            write_image(root / name.replace("val", "valid") / f"{number}.png", number)
    return {"name": "voc", "root": str(root)}


def voc_tree(root: Path, annotations: str, images: str, lists: str) -> None:
    for name, numbers in NUMBERS.items():
        for number in numbers:
            write_xml(root / annotations / f"{number}.xml", number)
            write_image(root / images / f"{number}.png", number)
        (root / lists).mkdir(parents=True, exist_ok=True)
        (root / lists / f"{name}.txt").write_text("".join(f"{number}\n" for number in numbers))


def voc_in_lower_case(root: Path) -> dict[str, str]:
    voc_tree(root, "annotations", "images", "imagesets/main")
    return {"name": "voc", "root": str(root)}


def voc_lists(root: Path) -> dict[str, str]:
    voc_tree(root, "Annotations", "images", "lists")
    return {"name": "voc", **{name: str(root / f"lists/{name}.txt") for name in NUMBERS}}


def yolo(root: Path) -> dict[str, str]:
    for name, numbers in NUMBERS.items():
        write_yolo(root / f"labels/{name}", root / f"images/{name}", numbers)
    parts = "".join(f"{name}: images/{name}\n" for name in NUMBERS)
    (root / "data.yaml").write_text(f"path: .\n{parts}names:\n  0: cat\n  1: dog\n")
    return {"name": "yolo", "root": str(root)}


def roboflow_yolo(root: Path) -> dict[str, str]:
    for name, numbers in NUMBERS.items():
        folder = root / name.replace("val", "valid")
        write_yolo(folder / "labels", folder / "images", numbers)
    parts = "train: ../train/images\nval: ../valid/images\ntest: ../test/images\n"
    (root / "data.yaml").write_text(f"{parts}nc: 2\nnames: ['cat', 'dog']\nroboflow: {{version: 1}}\n")
    return {"name": "yolo", "root": str(root)}


def yolo_by_folders(root: Path) -> dict[str, str]:
    yolo(root)
    return {"name": "yolo", **{name: str(root / f"images/{name}") for name in NUMBERS}}


LAYOUTS: list[Layout] = [
    coco_in_images,
    coco_in_one_folder,
    coco_with_folders_in_names,
    coco_by_files,
    roboflow_coco,
    roboflow_coco_by_folders,
    roboflow_voc,
    voc_in_lower_case,
    voc_lists,
    roboflow_yolo,
    yolo_by_folders,
]


def splits_of(folder: Path, **data: Any) -> DetectionSplits:
    config = DetectionConfig(data=DATA[data["name"]](**data))
    config.check()
    assert all(file.exists() for file in config.data_files())
    return load_splits(config, 0, folder)


def numbers_of(part: list[Example]) -> list[int]:
    """Return the number that each image has in all its pixels, after a look at its object."""
    found = []
    for example in part:
        number = int(example.image[0, 0, 0])
        assert example.truth.boxes.tolist() == [box_of(number)]
        assert example.truth.labels.tolist() == [number % 2]
        found.append(number)
    return sorted(found)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_each_part_has_its_own_images_and_objects(layout: Layout, tmp_path: Path) -> None:
    splits = splits_of(tmp_path, **layout(tmp_path / "set"))
    assert splits.classes == CLASSES
    for name, part in (("train", splits.train), ("val", splits.validation), ("test", splits.test)):
        assert numbers_of(part) == [*NUMBERS[name]], name
    assert [line.partition(":")[0] for line in splits.found] == ["train", "validation", "test"]


def test_a_set_without_parts_is_divided(tmp_path: Path) -> None:
    for number in range(1, 11):
        write_xml(tmp_path / f"set/Annotations/{number}.xml", number)
        write_image(tmp_path / f"set/JPEGImages/{number}.png", number)
    splits = splits_of(tmp_path, name="voc", root=str(tmp_path / "set"), validation_share=0.2)
    parts = [numbers_of(part) for part in (splits.train, splits.validation, splits.test)]
    assert [len(part) for part in parts] == [6, 2, 2]
    assert sorted(number for part in parts for number in part) == list(range(1, 11))
    assert "2 images held out from train" in splits.found[-1]


def test_what_is_missing_or_could_mean_two_things_is_named(tmp_path: Path) -> None:
    data = roboflow_coco(tmp_path)
    assert_refused(lambda: part_of(tmp_path, "extra", "coco"), DataError, "extra", "train/", "valid/")
    assert_refused(lambda: part_at(tmp_path / "nowhere"), DataError, "nowhere")
    both = DetectionConfig(data=DATA["coco"](**data, train=str(tmp_path / "train")))
    assert_refused(both.check, ConfigError, "data.root")
    captions = tmp_path / "train/_annotations.coco.json"
    captions.write_text(json.dumps({"images": [{"id": 1}], "annotations": [{"image_id": 1, "caption": "a cat"}]}))
    assert_refused(lambda: part_at(captions).read(), DataError, "_annotations.coco.json", "categories")
    for name in ("instances_other", "instances_other2017"):
        write_coco(tmp_path / f"{name}.json", tmp_path / "images", range(1, 3))
    assert_refused(lambda: part_of(tmp_path, "other", "coco"), DataError, "other")


def test_a_yaml_file_around_a_set_is_no_reason_to_take_it_for_yolo_s(tmp_path: Path) -> None:
    data = roboflow_voc(tmp_path / "set")
    (tmp_path / "data.yaml").write_text("model: {name: small_fpn}\nseeds: 1\n")
    part = part_in(tmp_path / "set", "val")
    assert part is not None
    assert part.kind == "voc"
    assert numbers_of(splits_of(tmp_path, **data).validation) == [*NUMBERS["val"]]


def test_an_image_in_two_parts_is_found_by_content(tmp_path: Path) -> None:
    data = roboflow_coco(tmp_path / "set")
    (tmp_path / "set/test/1.png").write_bytes((tmp_path / "set/train/2.png").read_bytes())
    assert_warned(lambda: splits_of(tmp_path, **data), "1", "train/2.png")


def test_classes_are_compared_by_name_whatever_their_numbers(tmp_path: Path) -> None:
    data = coco_as_distributed(tmp_path / "set")
    file = tmp_path / "set/annotations/instances_val2017.json"
    content = json.loads(file.read_text())
    content["categories"] = [{"id": 1, "name": "dog"}, {"id": 2, "name": "cat"}]
    for each in content["annotations"]:
        each["category_id"] = 3 - each["category_id"]
    file.write_text(json.dumps(content))
    assert numbers_of(splits_of(tmp_path, **data).validation) == [*NUMBERS["val"]]
    content["categories"].append({"id": 3, "name": "emu"})
    file.write_text(json.dumps(content))
    assert_refused(lambda: splits_of(tmp_path, **data), DataError, "emu", "data.val")


@pytest.mark.parametrize(
    ("layout", "kind", "other"),
    [(coco_in_one_folder, "coco", "voc"), (voc_in_lower_case, "voc", "yolo"), (yolo, "yolo", "voc")],
)
def test_another_kind_is_named(layout: Layout, kind: str, other: str, tmp_path: Path) -> None:
    layout(tmp_path)
    path = {"coco": tmp_path / "train.json", "voc": tmp_path, "yolo": tmp_path / "images/train"}[kind]
    assert_refused(lambda: part_at(path, other), DataError, f"data.name={kind}")


def test_images_that_are_missing_are_said_of_the_folder_that_has_most(tmp_path: Path) -> None:
    data = coco_as_distributed(tmp_path)
    (tmp_path / "val2017/2.png").unlink()
    assert images_of(tmp_path / "annotations/instances_val2017.json", tmp_path) == tmp_path / "val2017"
    assert_refused(lambda: splits_of(tmp_path, **data), DataError, "val2017", "1", "3", "2.png")


@pytest.mark.parametrize(
    ("name", "override", "bringing"),
    [
        ("scenes", "data.train=a.json", "voc or coco or yolo"),
        ("coco", "data.more_train=[a]", "voc"),
        ("yolo", "data.classes=[a]", "voc"),
        ("voc", "shift.contrast=0.5", "scenes"),
        ("coco", "scene.size=64", "scenes"),
    ],
)
def test_a_key_of_other_data_is_refused_by_their_names(name: str, override: str, bringing: str) -> None:
    key = override.partition("=")[0]
    names = (key, f"data.name={bringing}", f"data.name={name}")
    assert_refused(lambda: load_config(DetectionConfig, None, [f"data.name={name}", override]), ConfigError, *names)
