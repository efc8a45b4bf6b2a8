"""Where the parts of a set for detectors are: how people lay out VOC's, COCO's and YOLO's files, recognised here."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from metricopt_ext.data.own_parts import FOLDERS
from metricopt_ext.detection.coco import read_coco
from metricopt_ext.detection.records import DetectionSet
from metricopt_ext.detection.tables import Kind
from metricopt_ext.detection.voc import read_voc
from metricopt_ext.detection.voc_tree import find_tree
from metricopt_ext.detection.yolo import PARTS, read_yolo, read_yolo_file, yolo_file
from metricopt_ext.errors import DataError
from metricopt_ext.utils.files import existing, parse_json
from metricopt_ext.utils.words import brief, shortened

ROBOFLOW = "_annotations.coco.json"
JSON = ".json"
TRIED = 20  # images that a folder must hold to be a part's
KINDS = ("voc", "coco", "yolo")
PREFIX = re.compile(r"^(instances|annotations?|coco|labels?|bbox|detection)[_-]+")
SUFFIX = re.compile(r"([_-]+(instances|annotations?|coco|labels?))+$")


@dataclass(frozen=True)
class Part:
    """A part of a set: where its annotations and its images are.

    Attributes:
        kind: One of `KINDS`.
        path: COCO's file of annotations; VOC's folder; YOLO's folder of images.
        images: COCO: the folder of its images.
        split: VOC: the name or the path of a list of images; None for all.
        classes: YOLO: the names of the classes.
        more: YOLO: further folders of images.
        found: What was taken for what, in words.
    """

    kind: str
    path: Path
    images: Path | None = None
    split: str | Path | None = None
    classes: tuple[str, ...] = ()
    more: tuple[Path, ...] = ()
    found: str = ""

    @property
    def files(self) -> list[Path]:
        """What the part is read from."""
        return [self.path, *self.more, *([self.images] if self.images is not None else [])]

    def read(
        self,
        classes: Sequence[str] | None = None,
        *,
        images: bool = True,
        dtype: torch.dtype = torch.float32,
        shapes: Kind = "bbox",
    ) -> DetectionSet:
        """Read the part.

        Args:
            classes: VOC: the names of the classes; None for all in its annotations.
            images: Whether the images must be there.
            dtype: COCO: type of the boxes.
            shapes: COCO: what is read besides boxes.

        Raises:
            DataError: It can't be read.
        """
        if self.kind == "coco":
            return read_coco(self.path, self.images if images else None, dtype=dtype, kind=shapes)
        if self.kind == "yolo":
            return read_yolo([self.path, *self.more], self.classes)
        return read_voc(self.path, self.split, classes=classes, images=images)


def part_at(path: Path, kind: str = "", root: Path | None = None) -> Part:
    """Return the part that a path stands for.

    It is COCO's file of annotations, or a folder that holds one (Roboflow's); a list of images in VOC's tree, or the
    tree, or a folder of XML files beside their images; or YOLO's folder of images, with a
    ``data.yaml`` there or in a folder around it.

    Args:
        path: The path.
        kind: One of `KINDS` that it must be; empty for any.
        root: Where COCO's images are, or folders of them.

    Raises:
        DataError: It does not exist, or is of none of these, or of another kind.
    """
    existing(path)
    found = _coco_at(path, root) or _voc_list_at(path) or _voc_at(path) or _yolo_at(path)
    if found is None:
        raise DataError(
            f"{path} is neither COCO's .json file, a folder with {ROBOFLOW}, a folder or list in Pascal VOC's"
            " format, nor a folder of images with YOLO's labels and data.yaml"
        )
    if kind and found.kind != kind:
        raise DataError(f"{path} is of another kind: {found.found}; set data.name={found.kind}")
    return found


def part_of(root: Path, name: str, kind: str) -> Part:
    """Return a part of a set by its name, such as ``train`` or ``val``.

    These are looked for in turn: a file of COCO's of this name, or a list of VOC's;
    ``annotations/instances_train*.json``; a part of YOLO's ``data.yaml``; a folder of this name, or one that means the
    same.

    Args:
        root: The folder that holds the set.
        name: The part's name, or COCO's file of annotations.
        kind: One of `KINDS`.

    Raises:
        DataError: There is no such part; the message says what there is.
    """
    if kind == "coco":
        given = next((each for each in (Path(name), root / name) if each.is_file()), None)
        if given is None and name.lower().endswith(JSON):
            raise DataError(f"{name} does not exist")
        given = given or _annotations_named(root, name)
        if given is not None:
            return part_at(given, kind, root)
    if kind == "yolo" and (file := yolo_file(root, around=False)) is not None and _has_part(file, name):
        return _of_yolo_file(file, name)
    folder = _folder_named(root, name)
    if kind == "voc" and not (folder is not None and _voc_at(folder) and not _has_list(root, name)):
        return Part("voc", root, split=name, found=str(find_tree(root)))
    if folder is None:
        raise DataError(f"{root} has no part {name!r} in {_names(kind)}; it has {_what_is_in(root)}")
    return part_at(folder, kind, root)


def part_in(folder: Path, name: str | None) -> Part | None:
    """Return the part of a folder that is named, or all of it, of whatever kind; None if nothing is recognised.

    Args:
        folder: The folder.
        name: The part's name; None for the folder itself.

    Raises:
        DataError: It holds several sets, or can't be read.
    """
    if name is None:
        return _coco_at(folder, None) or _voc_at(folder) or _yolo_at(folder)
    if _has_list(folder, name):
        return Part("voc", folder, split=name, found=str(find_tree(folder)))
    if (file := _annotations_named(folder, name)) is not None:
        return part_at(file, "coco", folder)
    if (yaml := yolo_file(folder, around=False)) is not None and _has_part(yaml, name):
        return _of_yolo_file(yaml, name)
    inner = _folder_named(folder, name)
    return None if inner is None else part_in(inner, None)


def as_usual(part: Part) -> bool:
    """Whether a part is VOC's, in folders of VOC's own names, which goes without saying."""
    if part.kind != "voc" or not part.path.is_dir():
        return part.kind == "voc"
    tree = find_tree(part.path)
    return tree.annotations.name == "Annotations" and all(each.name == "JPEGImages" for each in tree.images)


def is_whole(root: Path, kind: str) -> bool:
    """Whether a set has no parts, but images of VOC's without a list of them, as Kaggle's often are."""
    if kind != "voc" or not root.exists():
        return False
    if root.is_dir() and any(_folder_named(root, name) for name in ("train", "test")):
        return False
    try:
        return root.is_dir() and find_tree(root).lists is None
    except DataError:  # which its reader says
        return False


def images_of(annotations: Path, root: Path | None = None) -> Path:
    """Return the folder of the images that a file of COCO's names.

    Looked for in turn: in the root that is given; in a folder named after the file, as ``train2017`` of
    ``instances_train2017.json``, beside it, around it, in ``images`` or in the root; beside the file; in ``images``.

    Args:
        annotations: The file.
        root: Where the images are, or their folder.

    Returns:
        The first that holds the file's first images; or, if none does, the root, or the folder that holds most.
    """
    names = _image_names(annotations)
    beside, around = annotations.parent, annotations.parent.parent
    bases = list(dict.fromkeys([*([root] if root is not None else []), beside, around]))
    own = _part_name(annotations)
    after = [base / inner / own for base in bases for inner in ("", "images", "Images", "JPEGImages")] if own else []
    after = [*after, *(base / own / "images" for base in bases if own)]
    plain = [base / inner for base in bases[::-1] for inner in ("images", "Images", "JPEGImages", "data")]
    tried = [*([root] if root is not None else []), *after, beside, around, *plain]
    held = {folder: sum((folder / name).is_file() for name in names) for folder in tried if folder.is_dir()}
    if not held:
        return root or beside
    best = max(held.values())
    return next(folder for folder in held if held[folder] == best) if best else root or beside


def _coco_at(path: Path, root: Path | None) -> Part | None:
    file = path / ROBOFLOW if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        found = sorted(each for each in path.glob("*.json") if _is_coco(each))
        if len(found) > 1:
            raise DataError(
                f"{path} holds several files of COCO's: {shortened([each.name for each in found])}; name one"
            )
        if not found:
            return None
        file = found[0]
    if file.suffix.lower() != JSON:
        return None
    images = images_of(file, root)
    return Part("coco", file, images=images, found=f"COCO's format: {file}, images in {images}")


def _voc_list_at(path: Path) -> Part | None:
    if path.suffix.lower() != ".txt" or not path.is_file():
        return None
    for folder in path.resolve().parents[:3]:
        if any(each.is_dir() and each.name.lower() == "annotations" for each in folder.iterdir()):
            return Part("voc", folder, split=path, found=f"{find_tree(folder)}; the list {path}")
    return None


def _voc_at(path: Path) -> Part | None:
    if not path.is_dir():
        return None
    try:
        tree = find_tree(path)
    except DataError as error:
        if "several sets" in str(error):
            raise
        return None
    return Part("voc", path, found=str(tree))


def _yolo_at(path: Path) -> Part | None:
    file = yolo_file(path)
    if file is None or path == file:
        return None
    if path.is_file():
        return None
    inner = path / "images"
    images = inner if path.is_dir() and inner.is_dir() else path
    return Part(
        "yolo", images, classes=read_yolo_file(file).classes, found=f"YOLO's format: {images}, classes of {file}"
    )


def _has_part(file: Path, name: str) -> bool:
    return any(known in read_yolo_file(file).parts for known in PARTS.get(name, (name,)))


def _of_yolo_file(file: Path, name: str) -> Part:
    read = read_yolo_file(file)
    first, *more = read.part(name)
    shown = " and ".join(map(str, (first, *more)))
    return Part(
        "yolo", first, classes=read.classes, more=tuple(more), found=f"YOLO's format: {shown}, classes of {file}"
    )


def _annotations_named(root: Path, name: str) -> Path | None:
    """The file of COCO's for a part, as ``annotations/instances_val2017.json``, or Roboflow's in the part's folder."""
    folder = _folder_named(root, name)
    if folder is not None and (folder / ROBOFLOW).is_file():
        return folder / ROBOFLOW
    found = [each for each in _json_files(root) if _means(_part_name(each), name)]
    boxes = [each for each in found if each.name.lower().startswith("instances")] or found
    if len(boxes) > 1:
        raise DataError(
            f"{root} has several files for {name!r}: {shortened([each.name for each in boxes])}; name one in"
            " data.splits, or in data.train, data.val and data.test"
        )
    return boxes[0] if boxes else None


def _json_files(root: Path) -> list[Path]:
    places = [root, *(each for each in _folders(root) if each.name.lower() == "annotations")]
    return [each for place in places for each in sorted(place.glob("*.json"))]


def _part_name(file: Path) -> str:
    """The part that a file of annotations is named after: ``train2017`` of ``instances_train2017.json``."""
    return SUFFIX.sub("", PREFIX.sub("", file.stem.removeprefix("_"), count=1))


def _means(found: str, name: str) -> bool:
    """Whether a name stands for a part, but for a year after it."""
    bare = re.sub(r"[_-]?\d{4}$", "", found.lower())
    known = next((names for names in FOLDERS.values() if name.lower() in names), (name.lower(),))
    return found.lower() == name.lower() or bare in known


def _folder_named(root: Path, name: str) -> Path | None:
    """The folder of a part, one of its own name first."""
    found = [each for each in _folders(root) if _means(each.name, name)]
    own = [each for each in found if each.name == name]
    return next(iter([*own, *found]), None)


def _folders(root: Path) -> list[Path]:
    return sorted(each for each in root.iterdir() if each.is_dir()) if root.is_dir() else []


def _has_list(root: Path, name: str) -> bool:
    try:
        lists = find_tree(root).lists
    except DataError:
        return False
    return lists is not None and (lists / f"{name}.txt").is_file()


def _is_coco(file: Path) -> bool:
    content = _content(file)
    return isinstance(content, dict) and {"images", "categories"} <= content.keys()


def _image_names(annotations: Path) -> list[str]:
    """The names of a file's first images; none if it is not COCO's."""
    content = _content(annotations)
    images = content.get("images") if isinstance(content, dict) else None
    named = (
        [each.get("file_name") for each in images[:TRIED] if isinstance(each, dict)] if isinstance(images, list) else []
    )
    return [name for name in named if isinstance(name, str) and "\0" not in name]


def _content(file: Path) -> Any:
    """A JSON file's content; None for one that is none, which its reader says."""
    try:
        return parse_json(file.read_bytes())
    except (OSError, ValueError):
        return None


def _names(kind: str) -> str:
    return {"voc": "Pascal VOC's format", "coco": "COCO's format", "yolo": "YOLO's format"}[kind]


def _what_is_in(root: Path) -> str:
    if not root.is_dir():
        return brief("nothing, as it is no folder")
    names = sorted(each.name + "/" * each.is_dir() for each in root.iterdir())
    return shortened(names) if names else "nothing"
