"""An annotation file in Pascal VOC's format: one image with its objects, read and written."""

import math
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from metricopt_ext.detection.tables import LARGEST, LONGEST_SIDE
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.detection.voc_tree import XML, stem_of
from metricopt_ext.errors import DataError
from metricopt_ext.utils.files import bytes_of
from metricopt_ext.utils.words import brief

CORNERS = "a <bndbox> must have its corners in pixels, from 1"
ENDS = ("xmin", "ymin", "xmax", "ymax")
FLAGS = {**dict.fromkeys(("", "0", "0.0"), False), **dict.fromkeys(("1", "1.0"), True)}

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Object:
    """What an XML file says about one object; corners as VOC counts them, from 1 and inclusive."""

    name: str
    corners: Box
    difficult: bool

    @property
    def in_order(self) -> bool:
        """Whether no corner is beyond its opposite; both ends are inside, so a box of one pixel has equal ones."""
        xmin, ymin, xmax, ymax = self.corners
        return xmin <= xmax and ymin <= ymax


@dataclass(frozen=True)
class Annotation:
    """What an XML file says; its image's sides are 0 if it does not tell."""

    file: Path
    image: str
    width: int
    height: int
    objects: list[Object]

    @property
    def stem(self) -> str:
        """The file's name without suffix."""
        return stem_of(self.file.name, (XML,))


def parse(file: Path) -> Annotation:
    """Read an annotation file.

    Raises:
        DataError: It can't be read, or is no such file.
    """
    try:
        top = ET.fromstring(bytes_of(file))
    except OSError as error:
        raise DataError(f"{file} can't be read ({error})") from error
    except (ET.ParseError, LookupError, ValueError) as error:
        raise DataError(f"{file} is truncated or not XML ({brief(error)})") from error
    for each in top.iter():
        each.tag = each.tag.lower()
    if top.tag != "annotation" and top.find("object") is None:
        raise DataError(f"{file} is not in Pascal VOC's format: it has no <annotation>, but {brief(top.tag)}")
    objects, things = [], top.findall("object")
    if deeper := sum(1 for _ in top.iter("object")) - len(things):
        raise DataError(f"{file} has {deeper} <object> within other elements; each must be directly in <{top.tag}>")
    for thing in things:
        if len(thing.findall("bndbox")) > 1:
            raise DataError(f"{file} has an <object> with several <bndbox>; write each as an <object> of its own")
        left, top_edge, right, bottom = (_number(thing, f"bndbox/{end}", file) for end in ENDS)
        flag = (thing.findtext("difficult") or "").strip()
        if flag not in FLAGS:
            raise DataError(f"{file} has {brief(flag)} as <difficult>; it must be 0 or 1")
        corners = (left, top_edge, right, bottom)
        objects.append(Object(_text(thing, "name", file), corners, FLAGS[flag]))
    return Annotation(file, (top.findtext("filename") or "").strip(), *_size(top, file), objects)


def _size(top: ET.Element, file: Path) -> tuple[int, int]:
    """The image's width and height; 0 if the file does not tell both: no side, or 0, as some tools write."""
    told = [top.findtext(f"size/{side}") for side in ("width", "height")]
    width, height = (
        _number(top, f"size/{side}", file) if (text or "").strip() else 0.0
        for side, text in zip(("width", "height"), told, strict=True)
    )
    if not all(side.is_integer() and 0 <= side <= LONGEST_SIDE for side in (width, height)):
        raise DataError(
            f"{file} says that its image has {width:g} x {height:g} pixels; it must be whole numbers of at most"
            f" {LONGEST_SIDE}, or no size"
        )
    return (int(width), int(height)) if width and height else (0, 0)


def _text(element: ET.Element, path: str, file: Path) -> str:
    text = (element.findtext(path) or "").strip()
    if not text:
        raise DataError(f"{file} has an <{element.tag}> without <{path}>")
    return text


def _number(element: ET.Element, path: str, file: Path) -> float:
    text = _text(element, path, file)
    try:
        number = math.nan if "_" in text else float(text)  # Python would take 1_0 for 10
    except ValueError:
        number = math.nan
    if not abs(number) <= LARGEST:  # NaN is not
        raise DataError(f"{file} has {brief(text)} as <{path}>; it must be a number")
    return number


def to_xml(example: Example, classes: Sequence[str], image_name: str) -> bytes:
    """Return the content of an annotation file, in pixels that are counted from 1."""
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
