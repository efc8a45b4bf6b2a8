"""Annotated images in Pascal VOC's format, in a folder or in a zip file."""

import io
import math
import warnings
import xml.etree.ElementTree as ET
import zipfile
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image

from metricopt_ext.data.archives import Archive, open_zip
from metricopt_ext.detection.records import LONGEST_SIDE, UNREADABLE, Annotated, DetectionSet
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.errors import DataError
from metricopt_ext.utils.files import read_bounded, write_atomically
from metricopt_ext.utils.words import brief

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".JPG", ".JPEG", ".PNG")
ENDS = ("xmin", "ymin", "xmax", "ymax")
FLAGS = {"": False, "0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}
NAMED = 5  # files listed in a warning

# The largest XML file that is read: a thousand objects take 0.3 MB. Parsed, XML takes up to 100 times as much.
XML_BYTES = 1 << 22

# The largest list of images: ten million names.
LIST_BYTES = 1 << 27

Folder = Path | zipfile.Path
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class _Object:
    """What an XML file says about one object; corners as VOC counts them, from 1 and inclusive."""

    name: str
    corners: Box
    difficult: bool


@dataclass(frozen=True)
class _Annotation:
    """What an XML file says."""

    file: Folder
    image: str
    width: int
    height: int
    objects: list[_Object]

    @property
    def stem(self) -> str:
        """The file's name without suffix."""
        return self.file.name.removesuffix(".xml")


def read_voc(
    root: str | Path, split: str | None = None, *, classes: Sequence[str] | None = None, keep_difficult: bool = True
) -> DetectionSet:
    """Read annotated images in Pascal VOC's format.

    The folders ``Annotations``, ``JPEGImages`` and ``ImageSets`` may lie in ``root``, in a folder within it, or one
    level deeper (``VOCdevkit/VOC2007``). VOC counts pixels from 1, with both ends inside the box: its ``(xmin, ymin,
    xmax, ymax)`` become the edges ``(xmin - 1, ymin - 1, xmax, ymax)``. Images are not opened; their sizes are those in
    the XML files. An image without objects is kept.

    Boxes without area as written (``xmax <= xmin`` or ``ymax <= ymin``) and boxes wholly outside their image are left
    out; boxes partly outside are clipped. One warning says how many, and in which files. (Detectron2's VOC evaluator
    counts all of them as objects, with their corners as written, so its AP50 can differ.)

    Args:
        root: A folder, or a zip file, which is read without unpacking it.
        split: Name of a list of images, ``ImageSets/Main/<split>.txt``, which also gives their order; None for every
            annotated image, sorted by name. A line is a name, or a name without spaces and a flag.
        classes: Names of the classes; None for all in the tree's annotations, whatever the split, sorted.
        keep_difficult: Whether to keep objects that are marked as difficult.

    Raises:
        DataError: No such tree, split, annotation or image; a split that is empty, not in UTF-8 or names an image
            twice; an XML file that is truncated, lacks the image's size, an object's name or its box, or has a flag
            other than 0 or 1; a corrupt or encrypted file in the zip file; a class that is not among
            ``classes``.
    """
    root = Path(root)
    if root.is_dir():
        return _read_tree(root, None, split, classes, keep_difficult)
    if not root.exists():
        raise DataError(f"{root} does not exist; it should be a folder or a zip file in Pascal VOC's format")
    with open_zip(root) as archive:
        return _read_tree(zipfile.Path(archive.file), archive, split, classes, keep_difficult)


def _read_tree(
    root: Folder, archive: Archive | None, split: str | None, classes: Sequence[str] | None, keep_difficult: bool
) -> DetectionSet:
    tree = _find_tree(root)
    files = {file.name.removesuffix(".xml"): file for file in (tree / "Annotations").iterdir() if _is_xml(file)}
    stems = sorted(files) if split is None else _read_split(tree, split, files, archive)
    missing = [stem for stem in stems if stem not in files]
    if missing:
        raise DataError(f"{tree / 'Annotations'} lacks {missing[0]}.xml, which the split {split!r} names")
    if not stems:
        raise DataError(f"{tree / 'Annotations'} holds no .xml file")

    # Without given classes all files are read, so that every split gets the same labels.
    annotations = {stem: _parse(files[stem], archive) for stem in (sorted(files) if classes is None else stems)}
    if classes is None:
        classes = sorted({thing.name for annotation in annotations.values() for thing in annotation.objects})
    images_dir = tree / "JPEGImages"
    images = {image.name for image in images_dir.iterdir()} if images_dir.is_dir() else set()
    mended = _Mended()
    found = []
    for annotation in (annotations[stem] for stem in stems):
        path = images_dir / _image_name(annotation, images, images_dir)
        objects = [
            (box, classes.index(thing.name), thing.difficult)
            for thing, box in mended.inside(annotation, classes)
            if keep_difficult or not thing.difficult
        ]
        found.append(
            Annotated(
                image_id=annotation.stem,
                path=path if isinstance(path, Path) else Path(path.at),
                width=annotation.width,
                height=annotation.height,
                boxes=torch.tensor([box for box, _, _ in objects], dtype=torch.float32).reshape(-1, 4),
                labels=torch.tensor([label for _, label, _ in objects], dtype=torch.int64),
                difficult=torch.tensor([difficult for _, _, difficult in objects], dtype=torch.bool),
                crowd=torch.zeros(len(objects), dtype=torch.bool),
                archive=None if archive is None else archive.path,
            )
        )
    mended.warn(tree)
    return DetectionSet(tuple(classes), found)


def _find_tree(root: Folder) -> Folder:
    """The folder that holds Annotations: the root, one in it, or one a level deeper."""
    level: list[Folder] = [root]
    for _ in range(3):
        found = [folder for folder in level if (folder / "Annotations").is_dir()]
        if len(found) > 1:
            raise DataError(f"{root} holds several sets; name one of them: {', '.join(sorted(map(str, found)))}")
        if found:
            return found[0]
        level = [inner for folder in level for inner in folder.iterdir() if inner.is_dir()]
    raise DataError(f"{root} holds no folder Annotations, neither directly nor in the two levels of folders below")


def _is_xml(file: Folder) -> bool:
    return file.name.endswith(".xml") and not file.name.startswith(".")


def _read_split(tree: Folder, split: str, annotated: Container[str], archive: Archive | None) -> list[str]:
    """The names in a split's file: whole lines that are a name, and the first word of others (name and flag)."""
    folder = tree / "ImageSets" / "Main"
    file = folder / f"{split}.txt"
    if not file.is_file():
        known = sorted(each.name.removesuffix(".txt") for each in folder.iterdir()) if folder.is_dir() else []
        raise DataError(f"there is no split {split!r} in {folder}; it has {', '.join(known) or 'none'}")
    try:
        lines = _read_bytes(file, archive, LIST_BYTES).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 ({error})") from error
    names = [line.strip() for line in lines if line.strip()]
    stems = [name if name in annotated else name.split()[0] for name in names]
    if not stems:
        raise DataError(f"{file} is empty; it should name an image on each line")
    double = [stem for stem, count in Counter(stems).items() if count > 1]
    if double:
        raise DataError(f"{file} names {double[0]} twice; an image may appear only once")
    return stems


def _read_bytes(file: Folder, archive: Archive | None, most: int) -> bytes:
    if not isinstance(file, Path):
        assert archive is not None
        content = archive.read(file.at)
        if len(content) > most:
            raise DataError(f"{file} can't be read (it has more than the {most} bytes that are read at most)")
        return content
    try:
        return read_bounded(file, most)
    except (*UNREADABLE, ValueError) as error:
        raise DataError(f"{file} can't be read ({error})") from error


def _parse(file: Folder, archive: Archive | None) -> _Annotation:
    content = _read_bytes(file, archive, XML_BYTES)
    try:
        top = ET.fromstring(content)
    except (ET.ParseError, LookupError, ValueError) as error:
        raise DataError(f"{file} is truncated or not XML ({brief(error)})") from error
    width, height = (_number(top, f"size/{side}", file) for side in ("width", "height"))
    if not (1 <= width <= LONGEST_SIDE and 1 <= height <= LONGEST_SIDE):
        raise DataError(
            f"{file} says that its image has {width:g} x {height:g} pixels; it needs the image's size, at most"
            f" {LONGEST_SIDE} on a side"
        )
    objects = []
    for thing in top.findall("object"):
        left, top_edge, right, bottom = (_number(thing, f"bndbox/{end}", file) for end in ENDS)
        flag = (thing.findtext("difficult") or "").strip()
        if flag.lower() not in FLAGS:
            raise DataError(f"{file} has {brief(flag)} as <difficult>; it must be 0 or 1")
        corners = (left, top_edge, right, bottom)
        objects.append(_Object(_text(thing, "name", file), corners, FLAGS[flag.lower()]))
    return _Annotation(file, (top.findtext("filename") or "").strip(), int(width), int(height), objects)


def _text(element: ET.Element, path: str, file: Folder) -> str:
    text = (element.findtext(path) or "").strip()
    if not text:
        raise DataError(f"{file} has an <{element.tag}> without <{path}>")
    return text


def _number(element: ET.Element, path: str, file: Folder) -> float:
    text = _text(element, path, file)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"{file} has {brief(text)} as <{path}>; it must be a number")
    return number


def _image_name(annotation: _Annotation, images: set[str], images_dir: Folder) -> str:
    # The stem is tried first: in many sets files were renamed, but not their <filename>.
    for name in (*(annotation.stem + suffix for suffix in SUFFIXES), annotation.image):
        if name in images:
            return name
    raise DataError(
        f"{images_dir} lacks the image of {annotation.file}: neither {annotation.stem} with"
        f" {', '.join(SUFFIXES)} nor its filename {annotation.image!r}"
    )


class _Mended:
    """Clips boxes to their images, and remembers the files of those that were left out or clipped."""

    def __init__(self) -> None:
        self.flat: list[str] = []
        self.outside: list[str] = []
        self.clipped: list[str] = []

    def inside(self, annotation: _Annotation, classes: Sequence[str]) -> Iterator[tuple[_Object, Box]]:
        """Yield the objects that have area within the image, with their clipped edges."""
        for thing in annotation.objects:
            if thing.name not in classes:
                raise DataError(
                    f"{annotation.file} has an object of class {thing.name!r}; the classes are {', '.join(classes)}"
                )
            xmin, ymin, xmax, ymax = thing.corners
            box = (xmin - 1, ymin - 1, xmax, ymax)
            cut = (max(box[0], 0.0), max(box[1], 0.0), min(xmax, annotation.width), min(ymax, annotation.height))
            if xmax <= xmin or ymax <= ymin:
                self.flat.append(annotation.file.name)
            elif cut[0] >= cut[2] or cut[1] >= cut[3]:
                self.outside.append(annotation.file.name)
            else:
                if cut != box:
                    self.clipped.append(annotation.file.name)
                yield thing, cut

    def warn(self, tree: Folder) -> None:
        """Warn once about all of them, if there are any."""
        kinds = (
            (self.flat, "without area left out"),
            (self.outside, "outside the image left out"),
            (self.clipped, "clipped to the image"),
        )
        said = [f"{len(files)} {what} ({_first(files)})" for files, what in kinds if files]
        if said:
            warnings.warn(f"boxes in {tree}: {'; '.join(said)}", stacklevel=4)


def _first(files: list[str]) -> str:
    names = list(dict.fromkeys(files))
    more = f" and {len(names) - NAMED} more files" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def write_voc(
    folder: str | Path, examples: Iterable[Example], classes: Sequence[str], split: str, *, suffix: str = ".png"
) -> Path:
    """Write images with their boxes in Pascal VOC's format, and a list of them as a split; returns the folder.

    Args:
        folder: Receives ``Annotations``, ``JPEGImages`` and ``ImageSets``, next to what is already there.
        examples: The images; their ``image_id`` names their files.
        classes: Names of the classes.
        split: Name of the list.
        suffix: Kind of the image files: ``".png"`` keeps every pixel, ``".jpg"`` is smaller.

    Raises:
        DataError: An id that can't name a file, a crowd region, which VOC does not have, or a box of at most a pixel's
            width or height, which `read_voc` would treat as having no area.
    """
    folder = Path(folder)
    names = []
    for example in examples:
        truth = example.truth
        name = str(truth.image_id)
        if Path(name).name != name or any(letter.isspace() for letter in name):
            raise DataError(f"image_id {name!r} can't name a file in a list of images")
        if truth.crowd.any():
            raise DataError(f"image {name} has a crowd region, which Pascal VOC's format does not support")
        if len(truth.boxes) and (truth.boxes[:, 2:] - truth.boxes[:, :2]).min() <= 1:
            raise DataError(f"image {name} has a box of at most one pixel's width or height")
        encoded = io.BytesIO()
        pixels = example.image.permute(1, 2, 0).contiguous().cpu().numpy()
        Image.fromarray(pixels).save(encoded, format=Image.registered_extensions()[suffix])
        write_atomically(folder / "JPEGImages" / (name + suffix), encoded.getvalue())
        write_atomically(folder / "Annotations" / f"{name}.xml", _to_xml(example, classes, name + suffix))
        names.append(name)
    write_atomically(folder / "ImageSets" / "Main" / f"{split}.txt", "".join(f"{name}\n" for name in names).encode())
    return folder


def _to_xml(example: Example, classes: Sequence[str], image_name: str) -> bytes:
    truth = example.truth
    top = ET.Element("annotation")
    ET.SubElement(top, "filename").text = image_name
    size = ET.SubElement(top, "size")
    for key, value in (("width", truth.width), ("height", truth.height), ("depth", 3)):
        ET.SubElement(size, key).text = str(value)
    for box, label, difficult in zip(
        truth.boxes.double().tolist(), truth.labels.tolist(), truth.difficult.tolist(), strict=True
    ):
        thing = ET.SubElement(top, "object")
        # Pose and truncated mean nothing here, but VOC's own readers require them.
        for key, text in (("name", classes[label]), ("pose", "Unspecified"), ("truncated", "0")):
            ET.SubElement(thing, key).text = text
        ET.SubElement(thing, "difficult").text = str(int(difficult))
        bounds = ET.SubElement(thing, "bndbox")
        for key, edge in zip(ENDS, (box[0] + 1, box[1] + 1, box[2], box[3]), strict=True):
            ET.SubElement(bounds, key).text = str(int(edge)) if edge.is_integer() else repr(edge)
    ET.indent(top)
    return bytes(ET.tostring(top))
