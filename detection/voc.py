"""Annotated images in Pascal VOC's format."""

import io
import warnings
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from metricopt_ext.detection.box_kinds import refuse_normalised
from metricopt_ext.detection.boxes_outside import shown_files, warn_of_boxes_outside
from metricopt_ext.detection.records import Annotated, DetectionSet
from metricopt_ext.detection.tables import TruthTable
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.detection.voc_file import CORNERS, Annotation, Box, parse, to_xml
from metricopt_ext.detection.voc_tree import (
    IMAGES,
    SUFFIXES,
    VocTree,
    find_tree,
    folders_of_xml,
    list_of,
    quoted,
    stem_of,
    xml_files,
)
from metricopt_ext.errors import DataError
from metricopt_ext.runtime.pace import followed
from metricopt_ext.utils.files import existing, write_atomically
from metricopt_ext.utils.words import brief


def read_voc(
    root: str | Path,
    split: str | Path | None = None,
    *,
    classes: Sequence[str] | None = None,
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
    object that is never found.

    Args:
        root: The folder.
        split: Name of a list of images, ``ImageSets/Main/<split>.txt``, or the path of one, which also gives their
            order; None for every
            annotated image, sorted by name. A line is a name, or a name without spaces and a flag.
        classes: Names of the classes; None for all in the tree's annotations, whatever the split, sorted.
        images: Whether the images must be there; the boxes alone can be read without them.

    Raises:
        DataError: No such tree, split, annotation or image; a split that is empty, in another encoding than UTF-8, or
            names an image twice; an XML file that is truncated, lacks an object's name or its box, or has a size or
            a flag that is another number than possible; two XML files of one name; a class that is not among
            ``classes``.
    """
    root = existing(root)
    if not root.is_dir():
        raise DataError(f"{root} is no folder; it should be one in Pascal VOC's format")
    found_tree = find_tree(root)
    tree = found_tree.folder
    annotated = xml_files(found_tree.annotations)
    if deeper := folders_of_xml(found_tree.annotations):
        warnings.warn(
            f"{found_tree.annotations} has XML files in folders below ({list_of([each.name for each in deeper])}),"
            " which are not read; move them up if they belong to the set",
            stacklevel=2,
        )
    stems = sorted(annotated) if split is None else _read_split(found_tree, split, annotated)
    missing = [stem for stem in stems if stem not in annotated]
    if missing:
        raise DataError(
            f"{found_tree.annotations} lacks {quoted(missing[0])}.xml, which the split {str(split)!r} names"
        )
    if not stems:
        raise DataError(f"{found_tree.annotations} holds no .xml file")

    double = [name for name, count in Counter(classes or ()).items() if count > 1]
    if double:
        raise DataError(f"classes must be different names, got {brief(double[0])} twice")
    # Without given classes all files are read, so that every split gets the same labels.
    needed = sorted(annotated) if classes is None else stems
    parsed = {stem: parse(annotated[stem]) for stem in followed(needed, f"read {tree}", len(needed))}
    if classes is None:
        classes = sorted({thing.name for annotation in parsed.values() for thing in annotation.objects})
    folders = [(folder, _images(folder)) for folder in found_tree.images]
    chosen = [parsed[stem] for stem in stems]
    found = []
    for annotation in followed(chosen, f"look at the images of {tree}", len(chosen)):
        path = _image_of(annotation, folders, images)
        objects = _objects(annotation, classes)
        image = Annotated(
            image_id=annotation.stem,
            path=path,
            width=annotation.width,
            height=annotation.height,
            boxes=torch.tensor([box for box, _, _ in objects], dtype=torch.float32).reshape(-1, 4),
            labels=torch.tensor([label for _, label, _ in objects], dtype=torch.int64),
            difficult=torch.tensor([difficult for _, _, difficult in objects], dtype=torch.bool),
            crowd=torch.zeros(len(objects), dtype=torch.bool),
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


def _objects(annotation: Annotation, classes: Sequence[str]) -> list[tuple[Box, int, bool]]:
    """The box, the label and the flag of each object whose corners are in order."""
    objects = []
    for thing in annotation.objects:
        if thing.name not in classes:
            raise DataError(
                f"{annotation.file} has an object of class {brief(thing.name)}; the classes are {list_of(classes)}"
            )
        xmin, ymin, xmax, ymax = thing.corners
        if thing.in_order:
            objects.append(((xmin - 1, ymin - 1, xmax, ymax), classes.index(thing.name), thing.difficult))
    return objects


def _warn(tree: Path, annotations: Sequence[Annotation]) -> None:
    """Warn once of boxes whose corners are in the wrong order."""
    things = [(each.file.name, thing) for each in annotations for thing in each.objects]
    turned = [name for name, thing in things if not thing.in_order]
    if turned:
        warnings.warn(
            f"boxes in {tree}: {len(turned)} left out, their corners being in the wrong order, xmin above xmax or ymin"
            f" above ymax ({shown_files(turned)}); exchange them to count these objects",
            stacklevel=3,
        )


def _read_split(tree: VocTree, split: str | Path, annotated: Container[str]) -> list[str]:
    """The names in a split's file: whole lines that are a name, and the first word of others (name and flag)."""
    folder = tree.folder / "ImageSets" / "Main" if tree.lists is None else tree.lists
    file = split if isinstance(split, Path) else folder / f"{split}.txt"
    if not file.is_file():
        known = sorted(each.name.removesuffix(".txt") for each in folder.iterdir()) if folder.is_dir() else []
        raise DataError(f"there is no split {brief(str(split))} in {folder}; it has {list_of(known) or 'none'}")
    try:
        lines = file.read_text("utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"{file} can't be read: {error}") from error
    stems = [_in_split(file, line.strip(), annotated) for line in lines if line.strip()]
    if not stems:
        raise DataError(f"{file} is empty; it should name an image on each line")
    double = [stem for stem, count in Counter(stems).items() if count > 1]
    if double:
        raise DataError(f"{file} names {quoted(double[0])} twice; an image may appear only once")
    return stems


def _in_split(file: Path, line: str, annotated: Container[str]) -> str:
    """The annotation that a line names: all of it, or its first word, after which there is only a flag."""
    first, *flags = line.split()
    if line in annotated or not flags:
        return line
    if len(flags) > 1 or flags[0] not in ("-1", "0", "1"):
        raise DataError(f"{file} has the line {brief(line)}; it must name one image, as its XML file is called")
    return first


def _images(folder: Path) -> dict[str, str]:
    """The names of a folder's files by themselves, and by themselves with their suffixes in lower case."""
    names = sorted(image.name for image in folder.iterdir()) if folder.is_dir() else []
    lower = {stem_of(name, SUFFIXES) + name[len(stem_of(name, SUFFIXES)) :].lower(): name for name in names}
    return {**lower, **{name: name for name in names}}


def _image_of(annotation: Annotation, folders: Sequence[tuple[Path, Mapping[str, str]]], needed: bool) -> Path:
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
        f"{where} lacks the image of {annotation.file}: neither {quoted(annotation.stem)} with"
        f" {', '.join(SUFFIXES)} nor its filename {brief(annotation.image)}"
        if where
        else f"there is no folder of images beside {annotation.file.parent}; it may be called {', '.join(IMAGES)}"
    )


def write_voc(folder: str | Path, examples: Iterable[Example], classes: Sequence[str], split: str) -> Path:
    """Write images with their boxes in Pascal VOC's format, and a list of them as a split; returns the folder.

    Args:
        folder: Receives ``Annotations``, ``JPEGImages`` and ``ImageSets``, next to what is already there.
        examples: The images; their ``image_id`` names their files.
        classes: Names of the classes.
        split: Name of the list.

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
        Image.fromarray(pixels).save(encoded, format="PNG")
        write_atomically(folder / "JPEGImages" / f"{name}.png", encoded.getvalue())
        write_atomically(folder / "Annotations" / f"{name}.xml", to_xml(example, classes, f"{name}.png"))
        names.append(name)
    write_atomically(folder / "ImageSets" / "Main" / f"{split}.txt", "".join(f"{name}\n" for name in names).encode())
    return folder
