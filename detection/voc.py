"""Annotated images in Pascal VOC's format, in a folder or in a zip file."""

import io
import math
import unicodedata
import warnings
import xml.etree.ElementTree as ET
import zipfile
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from metricopt_ext.data.archives import Archive, open_zip
from metricopt_ext.detection.box_kinds import refuse_normalised
from metricopt_ext.detection.boxes_outside import shown_files, warn_of_boxes_outside
from metricopt_ext.detection.coco_entries import LARGEST
from metricopt_ext.detection.records import UNREADABLE, Annotated, DetectionSet
from metricopt_ext.detection.tables import LONGEST_SIDE, TruthTable
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.errors import DataError
from metricopt_ext.utils.files import read_bounded, write_atomically
from metricopt_ext.utils.words import brief

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp")  # in any case, the first that there is
CORNERS = "a <bndbox> must have its corners in pixels, from 1"
ENDS = ("xmin", "ymin", "xmax", "ymax")
FLAGS = {
    **dict.fromkeys(("", "0", "0.0", "false", "no"), False),
    **dict.fromkeys(("1", "1.0", "true", "yes"), True),
}

XML = ".xml"

# What the folders of a set are called, in lower case: VOC's own names first, then others' (Kaggle's, Label Studio's)
ANNOTATIONS = ("annotations", "annotation", "xmls", "xml")
IMAGES = ("jpegimages", "images", "image", "imgs", "img", "pngimages", "jpgimages")
MASKS = ("segmentationclass", "segmentationobject")  # folders of masks, in lower case
LISTS = (("imagesets", "main"), ("imagesets",))
LONGEST_NAME, LISTED = 80, 10  # characters of a name in a message, and names

# The largest XML file that is read: a thousand objects take 0.3 MB. Parsed, XML takes up to 100 times as much.
XML_BYTES = 1 << 22

# The largest list of images: ten million names.
LIST_BYTES = 1 << 27

Folder = Path | zipfile.Path
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class VocTree:
    """Where the files of a set are.

    Attributes:
        folder: What holds them.
        annotations: The folder of the XML files.
        images: Folders that images are looked for in, one after the other.
        lists: The folder of the lists of images; None for a set without lists.
        unread: Folders of masks, and of lists for other tasks, such as ``SegmentationClass``.
    """

    folder: Folder
    annotations: Folder
    images: tuple[Folder, ...]
    lists: Folder | None
    unread: tuple[Folder, ...] = ()

    def __str__(self) -> str:
        """Say where what was found, and what is not read."""
        lists = f"lists in {self.lists}" if self.lists is not None else "no lists"
        images = " and ".join(map(str, self.images)) or "no folder"
        unread = f" (not read: {', '.join(map(str, self.unread))})" if self.unread else ""
        return f"VOC's format: XML in {self.annotations}, images in {images}, {lists}{unread}"


@dataclass(frozen=True)
class _Object:
    """What an XML file says about one object; corners as VOC counts them, from 1 and inclusive."""

    name: str
    corners: Box
    difficult: bool
    misread: str  # its flag, if that says neither

    @property
    def in_order(self) -> bool:
        """Whether no corner is beyond its opposite; both ends are inside, so a box of one pixel has equal ones."""
        xmin, ymin, xmax, ymax = self.corners
        return xmin <= xmax and ymin <= ymax


@dataclass(frozen=True)
class _Annotation:
    """What an XML file says; its image's sides are 0 if it does not tell."""

    file: Folder
    image: str
    width: int
    height: int
    objects: list[_Object]

    @property
    def stem(self) -> str:
        """The file's name without suffix."""
        return _stem(self.file.name, (XML,))


def read_voc(
    root: str | Path,
    split: str | Path | None = None,
    *,
    classes: Sequence[str] | None = None,
    keep_difficult: bool = True,
    images: bool = True,
) -> DetectionSet:
    """Read annotated images in Pascal VOC's format.

    The folders ``Annotations``, ``JPEGImages`` and ``ImageSets`` may lie in ``root``, in a folder within it, or one
    level deeper (``VOCdevkit/VOC2007``); ``root`` may also be ``Annotations`` itself. Their names may be in any case,
    images may be in ``images``, and XML files may lie beside their images (`find_tree`). VOC counts pixels from 1, with
    both ends inside the box: its ``(xmin, ymin, xmax, ymax)`` become the edges ``(xmin - 1, ymin - 1, xmax, ymax)``.
    Images are opened only for a size that an XML file does not tell. An image without objects is kept.

    Boxes are kept as they are annotated, as Detectron2's VOC evaluator counts them; one warning says how many of them
    are outside their images, or partly, which a training leaves out or clips (`records.inside`). A box whose ``xmin``
    is above its ``xmax``, or ``ymin`` above ``ymax``, is left out, with a warning; that evaluator counts it as an
    object that is never found. A flag ``difficult`` that is a word is read as not difficult, with a warning.

    Args:
        root: A folder, or a zip file, which is read without unpacking it.
        split: Name of a list of images, ``ImageSets/Main/<split>.txt``, or the path of one, which also gives their
            order; None for every
            annotated image, sorted by name. A line is a name, with a suffix and folders or without, or a name without
            spaces and a flag.
        classes: Names of the classes; None for all in the tree's annotations, whatever the split, sorted.
        keep_difficult: Whether to keep objects that are marked as difficult.
        images: Whether the images must be there; the boxes alone can be read without them.

    Raises:
        DataError: No such tree, split, annotation or image; a split that is empty, not in UTF-8 or names an image
            twice; an XML file that is truncated, lacks an object's name or its box, or has a size or a flag that is
            another number than possible; two XML files of one name; a corrupt or encrypted file in the zip file; a
            class that is not among ``classes``.
    """
    root = Path(root)
    if root.is_dir():
        return _read_tree(root, None, split, classes, keep_difficult, images)
    if not root.exists():
        raise DataError(f"{root} does not exist; it should be a folder or a zip file in Pascal VOC's format")
    with open_zip(root) as archive:
        return _read_tree(zipfile.Path(archive.file), archive, split, classes, keep_difficult, images)


def _read_tree(
    root: Folder,
    archive: Archive | None,
    split: str | Path | None,
    classes: Sequence[str] | None,
    keep_difficult: bool,
    need_images: bool,
) -> DetectionSet:
    found_tree = find_tree(root)
    tree = found_tree.folder
    annotated = _xml_files(found_tree.annotations)
    stems = sorted(annotated) if split is None else _read_split(found_tree, split, annotated, archive)
    missing = [stem for stem in stems if stem not in annotated]
    if missing:
        raise DataError(
            f"{found_tree.annotations} lacks {_named(missing[0])}.xml, which the split {str(split)!r} names"
        )
    if not stems:
        raise DataError(f"{found_tree.annotations} holds no .xml file")

    double = [name for name, count in Counter(classes or ()).items() if count > 1]
    if double:
        raise DataError(f"classes must be different names, got {brief(double[0])} twice")
    # Without given classes all files are read, so that every split gets the same labels.
    parsed = {stem: _parse(annotated[stem], archive) for stem in (sorted(annotated) if classes is None else stems)}
    if classes is None:
        classes = sorted({thing.name for annotation in parsed.values() for thing in annotation.objects})
        _warn_of_like_names(tree, classes)
    images = [(folder, _images(folder)) for folder in found_tree.images]
    chosen = [parsed[stem] for stem in stems]
    found = []
    for annotation in chosen:
        path = _image_of(annotation, images, need_images)
        objects = _objects(annotation, classes, keep_difficult)
        image = Annotated(
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
        with suppress(DataError):  # what can't be read is said when it is loaded, if ever
            image = image.with_size()
        found.append(image)
    corners = [thing.corners for annotation in chosen for thing in annotation.objects]
    refuse_normalised(np.array(corners, dtype=np.float64).reshape(-1, 4), str(tree), CORNERS)
    _warn(tree, chosen)
    read = DetectionSet(tuple(classes), found)
    warn_of_boxes_outside(tree, TruthTable.of(read), [annotation.file.name for annotation in chosen])
    return read


def _objects(annotation: _Annotation, classes: Sequence[str], keep_difficult: bool) -> list[tuple[Box, int, bool]]:
    """The box, the label and the flag of each object whose corners are in order."""
    objects = []
    for thing in annotation.objects:
        if thing.name not in classes:
            raise DataError(
                f"{annotation.file} has an object of class {brief(thing.name)}; the classes are {_list_of(classes)}"
            )
        xmin, ymin, xmax, ymax = thing.corners
        if thing.in_order and (keep_difficult or not thing.difficult):
            objects.append(((xmin - 1, ymin - 1, xmax, ymax), classes.index(thing.name), thing.difficult))
    return objects


def _warn(tree: Folder, annotations: Sequence[_Annotation]) -> None:
    """Warn once of boxes whose corners are in the wrong order, and once of flags that are not understood."""
    things = [(each.file.name, thing) for each in annotations for thing in each.objects]
    turned = [name for name, thing in things if not thing.in_order]
    if turned:
        warnings.warn(
            f"boxes in {tree}: {len(turned)} left out, their corners being in the wrong order, xmin above xmax or ymin"
            f" above ymax ({shown_files(turned)}); exchange them to count these objects",
            stacklevel=4,
        )
    misread = [(name, thing.misread) for name, thing in things if thing.misread]
    if misread:
        warnings.warn(
            f"objects in {tree}: {len(misread)} with a flag <difficult> that is neither 0 nor 1, first"
            f" {brief(misread[0][1])}, read as not difficult ({shown_files([name for name, _ in misread])})",
            stacklevel=4,
        )


def _warn_of_like_names(tree: Folder, classes: Sequence[str]) -> None:
    """Warn once of classes that are most likely one, written in several ways."""
    alike: dict[str, list[str]] = defaultdict(list)
    for name in classes:
        alike[unicodedata.normalize("NFKC", " ".join(name.split())).casefold()].append(name)
    told = [" and ".join(map(brief, names)) for names in alike.values() if len(names) > 1]
    if told:
        warnings.warn(
            f"classes in {tree}: {'; '.join(told[:LISTED])} are taken for different ones, though they differ in case,"
            " spaces or the encoding of letters alone; write them alike if they are one",
            stacklevel=4,
        )


def _named(text: str) -> str:
    """A name from a file as messages have it: quoted and cut if it is long or can't be printed."""
    return text if len(text) <= LONGEST_NAME and text.isprintable() else brief(text)


def _list_of(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(map(_named, names[:LISTED])) + more


def find_tree(root: Folder) -> VocTree:
    """Return where the files of a set are: in the root, in a folder of it, one level deeper, or around the root.

    Annotations are in a folder of one of the names `ANNOTATIONS`, images beside it in one of `IMAGES`, in any case; or
    XML files lie beside their images in the root, or in a folder of it.

    Args:
        root: The folder, or the top of a zip file.

    Raises:
        DataError: There is no such set, or several.
    """
    level: list[Folder] = [root]
    for depth in range(3):
        found = [folder for folder in level if _annotations_in(folder) is not None]
        if not found:
            found = [folder for folder in level if _is_flat(folder, alone=depth == 0) and not _is_annotations(folder)]
        if len(found) > 1:
            several = _list_of(sorted(map(str, found)))
            raise DataError(f"{root} holds several sets; name one of them: {several}")
        if found:
            return _tree(found[0], _annotations_in(found[0]) or found[0])
        if depth == 0 and _is_annotations(root):
            assert isinstance(root, Path)
            inside_link = root.name.lower() not in ANNOTATIONS  # then its parent is not what is around it
            root = root.resolve() if inside_link else root
            return _tree(root.parent, root)
        level = [inner for folder in level for inner in folder.iterdir() if inner.is_dir()]
    if masks := masks_in(root):
        raise DataError(masks)
    raise DataError(
        f"{root} holds no folder Annotations, neither directly nor in the two levels of folders below, and no XML files"
        " beside their images"
    )


def _tree(folder: Folder, annotations: Folder) -> VocTree:
    inner = [each for each in annotations.iterdir() if each.is_dir() and each.name.lower() in ANNOTATIONS]
    if inner and not _holds(annotations, (XML,)):  # as annotations/xmls
        annotations = inner[0]
    beside = [each for name in IMAGES for each in _children(folder, name)]
    images = [*beside, *(each for each in dict.fromkeys((annotations, folder)) if _holds(each, SUFFIXES))]
    lists = next((found for names in LISTS for found in _below(folder, names) if _holds(found, (".txt",))), None)
    other = [each for sets in _below(folder, ("imagesets",)) for each in sets.iterdir() if each.is_dir()]
    other = [each for each in other if lists is not None and str(each) != str(lists) and _holds(each, (".txt",))]
    return VocTree(folder, annotations, tuple(images), lists, tuple(sorted([*_masks(folder), *other], key=str)))


def masks_in(root: Folder) -> str:
    """Return in words that a folder, or one in it or a level deeper, holds masks and no boxes; empty without masks.

    Args:
        root: A folder without annotations in VOC's format, or the top of a zip file.
    """
    level: list[Folder] = [root]
    for _ in range(3):
        if found := [each for folder in level for each in _masks(folder)]:
            return (
                f"{root} has masks ({', '.join(map(str, found))}) and no XML files with boxes, which detection needs;"
                " finetune_classifier reads folders of masks, by data.name=segmentation"
            )
        level = [inner for folder in level for inner in folder.iterdir() if inner.is_dir()]
    return ""


def _masks(folder: Folder) -> list[Folder]:
    return [found for name in MASKS for found in _children(folder, name)]


def _annotations_in(folder: Folder) -> Folder | None:
    """The folder of the XML files in another; one called so by VOC need not hold any."""
    named = [each for name in ANNOTATIONS for each in _children(folder, name)]
    inner = [(each, below) for each in named for name in ANNOTATIONS for below in _children(each, name)]
    holding = [each for each in named if _holds(each, (XML,))]
    holding += [each for each, below in inner if _holds(below, (XML,))]
    own = [each for each in named if each.name == "Annotations"]
    return next(iter([*holding, *own]), None)


def _is_annotations(root: Folder) -> bool:
    return isinstance(root, Path) and {root.name.lower(), root.resolve().name.lower()} & {*ANNOTATIONS} != set()


def _is_flat(folder: Folder, alone: bool) -> bool:
    """Whether a folder holds XML files beside their images, or alone."""
    return _holds(folder, (XML,)) and (alone or _holds(folder, SUFFIXES))


def _holds(folder: Folder, suffixes: tuple[str, ...]) -> bool:
    return any(each.name.lower().endswith(suffixes) and not each.name.startswith(".") for each in folder.iterdir())


def _children(folder: Folder, name: str) -> list[Folder]:
    """The folders of a name, in any case, within another; those that are written as VOC's own come first."""
    found = [each for each in folder.iterdir() if each.name.lower() == name and each.is_dir()]
    return sorted(found, key=lambda each: each.name)


def _below(folder: Folder, names: Sequence[str]) -> list[Folder]:
    found = [folder]
    for name in names:
        found = [inner for each in found for inner in _children(each, name)]
    return found


def _xml_files(folder: Folder) -> dict[str, Folder]:
    """The XML files of a folder by their names without suffix, which may be in upper case."""
    found: dict[str, Folder] = {}
    for file in folder.iterdir():
        stem = _stem(file.name, (XML,))
        if stem == file.name or stem.startswith("."):
            continue
        if stem in found:
            raise DataError(f"{folder} holds both {found[stem].name} and {file.name}; remove one of them")
        found[stem] = file
    return found


def _stem(name: str, suffixes: Sequence[str]) -> str:
    """A file's name without its suffix, if that is one of some, in upper or lower case."""
    suffix = next((each for each in suffixes if name.lower().endswith(each)), "")
    return name[: len(name) - len(suffix)]


def _read_split(tree: VocTree, split: str | Path, annotated: Container[str], archive: Archive | None) -> list[str]:
    """The names in a split's file: whole lines that are a name, and the first word of others (name and flag)."""
    folder = tree.folder / "ImageSets" / "Main" if tree.lists is None else tree.lists
    file = split if isinstance(split, Path) else folder / f"{split}.txt"
    if not file.is_file():
        known = sorted(each.name.removesuffix(".txt") for each in folder.iterdir()) if folder.is_dir() else []
        raise DataError(f"there is no split {brief(str(split))} in {folder}; it has {_list_of(known) or 'none'}")
    try:
        lines = _read_bytes(file, archive, LIST_BYTES).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 ({error})") from error
    lines = [line.strip() for line in lines if line.strip()]
    for line in lines:
        _check_words(file, line, annotated)
    stems = [_in_split(line, annotated) for line in lines]
    if not stems:
        raise DataError(f"{file} is empty; it should name an image on each line")
    double = [stem for stem, count in Counter(stems).items() if count > 1]
    if double:
        raise DataError(f"{file} names {_named(double[0])} twice; an image may appear only once")
    return stems


def _in_split(line: str, annotated: Container[str]) -> str:
    """The annotation that a line names, or the line's first word: with a suffix and folders, as other lists have it."""
    first = line.split()[0]
    for name in (line, first):
        within = name.replace("\\", "/").rpartition("/")[2]
        for each in (name, within, _stem(within, (*SUFFIXES, XML))):
            if each in annotated:
                return each
    return first


def _check_words(file: Folder, line: str, annotated: Container[str]) -> None:
    """Reject a line that names several images, of which only the first would be read."""
    first, *words = line.split()
    named = [_in_split(word, annotated) for word in words if word not in ("-1", "0", "1")]  # flags
    others = [name for name in named if name in annotated and name != _in_split(line, annotated)]
    if others and _in_split(line, annotated) == _in_split(first, annotated):
        raise DataError(f"{file} has a line that names {_named(first)} and {_named(others[0])}; write one on each line")


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
        known = flag.lower() in FLAGS
        if not known and flag.removeprefix("-").isdecimal():
            raise DataError(f"{file} has {brief(flag)} as <difficult>; it must be 0 or 1")
        corners = (left, top_edge, right, bottom)
        difficult = FLAGS.get(flag.lower(), False)
        objects.append(_Object(_text(thing, "name", file), corners, difficult, "" if known else flag))
    return _Annotation(file, (top.findtext("filename") or "").strip(), *_size(top, file), objects)


def _size(top: ET.Element, file: Folder) -> tuple[int, int]:
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


def _text(element: ET.Element, path: str, file: Folder) -> str:
    text = (element.findtext(path) or "").strip()
    if not text:
        raise DataError(f"{file} has an <{element.tag}> without <{path}>")
    return text


def _number(element: ET.Element, path: str, file: Folder) -> float:
    text = _text(element, path, file)
    try:
        number = math.nan if "_" in text else float(text)  # Python would take 1_0 for 10
    except ValueError:
        number = math.nan
    if not abs(number) <= LARGEST:  # NaN is not
        raise DataError(f"{file} has {brief(text)} as <{path}>; it must be a number")
    return number


def _images(folder: Folder) -> dict[str, str]:
    """The names of a folder's files by themselves, and by themselves with their suffixes in lower case."""
    names = sorted(image.name for image in folder.iterdir()) if folder.is_dir() else []
    lower = {_stem(name, SUFFIXES) + name[len(_stem(name, SUFFIXES)) :].lower(): name for name in names}
    return {**lower, **{name: name for name in names}}


def _image_of(annotation: _Annotation, folders: Sequence[tuple[Folder, Mapping[str, str]]], needed: bool) -> Folder:
    # The stem is tried first: in many sets files were renamed, but not their <filename>.
    names = (*(annotation.stem + suffix for suffix in SUFFIXES), annotation.image)
    for folder, images in folders:
        for name in names:
            if name in images:
                return folder / images[name]
    if not needed:
        name = annotation.stem + SUFFIXES[0]
        return folders[0][0] / name if folders else Path(name)
    where = " and ".join(str(folder) for folder, _ in folders)
    raise DataError(
        f"{where} lacks the image of {annotation.file}: neither {_named(annotation.stem)} with"
        f" {', '.join(SUFFIXES)} nor its filename {brief(annotation.image)}"
        if where
        else f"there is no folder of images beside {annotation.file.parent}; it may be called {', '.join(IMAGES)}"
    )


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
        DataError: An id that can't name a file, a crowd region, which VOC does not have, or a box of less than a
            pixel's width or height, whose corners would be in the wrong order.
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
        if len(truth.boxes) and (truth.boxes[:, 2:] - truth.boxes[:, :2]).min() < 1:
            raise DataError(f"image {name} has a box of less than one pixel's width or height")
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
