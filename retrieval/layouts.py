"""Sets for retrieval as they are distributed: In-Shop, Cars196, Market-1501, folders of queries and a gallery."""

import posixpath
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch

from metricopt_ext.data.images import (
    SUFFIXES,
    ImageSize,
    Limits,
    load_image_folder,
    noting,
    read_images,
    reader,
    stream_images,
)
from metricopt_ext.data.labelled import Labelled
from metricopt_ext.data.streamed import as_inputs, stacked
from metricopt_ext.errors import DataError
from metricopt_ext.retrieval.cameras import CAMERA, JUNK
from metricopt_ext.utils.files import read_bounded
from metricopt_ext.utils.text import text_of
from metricopt_ext.utils.words import brief, counted

IN_SHOP = "list_eval_partition.txt"
CARS = "cars_annos.mat"
PARTITION = ("train", "query", "gallery")
COLUMNS = ["image_name", "item_id", "evaluation_status"]
LIST_BYTES = 1 << 27  # of In-Shop's list, whose own has 5 MB
MAT_BYTES = 1 << 27  # of Cars196's annotations, whose own have 1 MB

# Market-1501's folders, by part, and what its files' names say: the identity and the camera, as 0002_c1s1_000451_03.jpg
MARKET = {"train": "bounding_box_train", "query": "query", "gallery": "bounding_box_test"}
SEEN = re.compile(r"(?P<identity>-1|[0-9]+)_c(?P<camera>[0-9]+)(?![0-9]).*")
DISTRACTOR = 0  # in place of an identity: images of nobody asked for

# What folders of queries and of what they search are called, in lower case.
QUERIES, GALLERIES = ("query", "queries"), ("gallery", "index", "database")


def load_in_shop(root: Path, size: ImageSize | None, limits: Limits, stream: bool = False) -> dict[str, Labelled]:
    """Read In-Shop Clothes Retrieval by its partition file: train, query and gallery.

    Args:
        root: The folder that holds ``list_eval_partition.txt``, or ``Eval`` with it, and the images that it names, or
            ``Img`` with them.
        size: As ``image_size`` of `load_image_folder`.
        limits: What the files may take, of each part.
        stream: Whether the images stay on disk (`StreamedImages`).

    Returns:
        The three parts by their names; a class is an item, named by its id.

    Raises:
        DataError: The file is missing or malformed, names an image twice, or one that is not there; a part is empty.
    """
    file = next((each for each in (root / IN_SHOP, *sorted(root.glob(f"*/{IN_SHOP}"))) if each.is_file()), None)
    if file is None:
        raise DataError(f"{root} must hold {IN_SHOP}, or a folder with it, for data.name=in_shop")
    rows = _partition(file)
    base = _base(root, file, rows[0][1])
    parts = {}
    for name in PARTITION:
        own = [(path, item) for _, path, item, status in rows if status == name]
        if not own:
            raise DataError(f"{file} lists no image for {name}")
        parts[name] = _listed(base, own, sorted({item for _, item in own}), size, limits, stream=stream)
    return parts


def load_cars196(
    root: Path, size: ImageSize | None, limits: Limits, contents: dict[str, str] | None = None, stream: bool = False
) -> Labelled:
    """Read Cars196 by its ``.mat`` files; the division into train and test by image is not used.

    Args:
        root: The folder of ``cars_annos.mat`` and ``car_ims``; or of ``cars_train``, ``cars_test``, and their
            annotations, ``cars_train_annos.mat`` and ``cars_test_annos_withlabels.mat``, there or in ``devkit``.
        size: As ``image_size`` of `load_image_folder`.
        limits: What the files may take.
        contents: Receives a digest of each image's file that is read, by its name.
        stream: Whether the images stay on disk (`StreamedImages`).

    Returns:
        All images; the classes in the order of their numbers, so that the last half by name is the usual test part.

    Raises:
        DataError: The files are missing or malformed, or name an image that is not there.
    """
    rows = _cars(root)
    numbers = sorted({number for _, number in rows})
    width = len(str(numbers[-1]))
    named = [(path, f"{number:0{width}d}") for path, number in rows]
    return _listed(root, named, [f"{number:0{width}d}" for number in numbers], size, limits, contents, stream)


def load_market(root: Path, size: ImageSize | None, limits: Limits, stream: bool = False) -> dict[str, Labelled]:
    """Read Market-1501, or DukeMTMC-reID, by the names of its files: train, query and gallery.

    Junk images (identity -1) are left out, as by the set's own evaluation; distractors (identity 0) stay in the
    gallery. Each image has its camera as a column (`CAMERA`); see `cameras` for what that rules out.

    Args:
        root: The folder of ``bounding_box_train``, ``query`` and ``bounding_box_test``, or one around it.
        size: As ``image_size`` of `load_image_folder`.
        limits: What the files may take, of each part.
        stream: Whether the images stay on disk (`StreamedImages`).

    Returns:
        The three parts by their names; a class is an identity, named by its number.

    Raises:
        DataError: A folder is missing or empty, a file's name does not say identity and camera, or a query is of none.
    """
    places = [root, *sorted(each for each in root.iterdir() if each.is_dir())] if root.is_dir() else [root]
    base = next((each for each in places if is_market(each)), None)
    if base is None:
        raise DataError(
            f"{root} must hold {', '.join(MARKET.values())}, or a folder with them, for data.name=market1501"
        )
    return {name: _seen(base / folder, name, size, limits, stream) for name, folder in MARKET.items()}


def is_market(root: Path) -> bool:
    """Whether a folder holds Market-1501's folders."""
    return all((root / name).is_dir() for name in MARKET.values())


def _seen(folder: Path, part: str, size: ImageSize | None, limits: Limits, stream: bool) -> Labelled:
    """One of Market-1501's folders."""
    files = sorted(each.name for each in folder.iterdir() if each.name.lower().endswith(SUFFIXES))
    files = [name for name in files if not name.startswith(".")]
    matches = {name: SEEN.fullmatch(PurePosixPath(name).stem) for name in files}
    if wrong := [name for name, match in matches.items() if match is None]:
        raise DataError(
            f"{folder}: a file's name must be IDENTITY_cCAMERA..., as 0002_c1s1_000451_03.jpg, got {brief(wrong[0])}"
            + (f" and {len(wrong) - 1} more" if len(wrong) > 1 else "")
        )
    said = {name: (int(match["identity"]), int(match["camera"])) for name, match in matches.items() if match}
    kept = [name for name, (identity, _) in said.items() if identity != JUNK]
    if not kept:
        raise DataError(f"{folder} has no image of a person")
    nobody = next((name for name in kept if said[name][0] == DISTRACTOR), None)
    if nobody is not None and part != "gallery":
        raise DataError(f"{folder}: {nobody} is of identity 0, a distractor; only bounding_box_test has these")
    if left := len(files) - len(kept):
        warnings.warn(f"{folder}: {counted(left, 'junk image')} (identity -1) left out", stacklevel=3)
    names = sorted({f"{said[name][0]:04d}" for name in kept})
    rows = [(name, f"{said[name][0]:04d}") for name in kept]
    found = _listed(folder, rows, names, size, limits, stream=stream)
    return replace(found, columns={CAMERA: np.array([said[name][1] for name in kept])})


def is_cars196(root: Path) -> bool:
    """Whether a folder holds Cars196's annotations."""
    return root.is_dir() and bool(_cars_files(root))


def queries_and_gallery(root: Path) -> tuple[Path, Path] | None:
    """Return the folders of queries and of the gallery in a folder, or None if it does not hold both.

    Raises:
        DataError: It holds one of them alone, or one twice.
    """
    folders = [each for each in root.iterdir() if each.is_dir()] if root.is_dir() else []
    found = [[each for each in folders if each.name.lower() in names] for names in (QUERIES, GALLERIES)]
    if not any(found):
        return None
    if [len(each) for each in found] != [1, 1]:
        names = sorted(each.name for each in folders)
        raise DataError(f"{root} must hold one folder of queries and one of the gallery, got {brief(names)}")
    return found[0][0], found[1][0]


def joined(parts: Mapping[str, Labelled]) -> Labelled:
    """Return the examples of several sets as one, one after the other; classes of the same name are one.

    Raises:
        DataError: Their inputs are of different shapes.
    """
    names = sorted({name for part in parts.values() for name in part.class_names})
    places = {name: place for place, name in enumerate(names)}
    shapes = {name: tuple(part.x.shape[1:]) for name, part in parts.items()}
    if len({*shapes.values()}) > 1:
        raise DataError(f"images must all have one size, got {brief(shapes)}; set data.image_size")
    y = [torch.tensor([places[name] for name in part.class_names])[part.y] for part in parts.values()]
    columns = {
        name: np.concatenate([part.columns[name] for part in parts.values()])
        for name in next(iter(parts.values())).columns
    }
    return Labelled(stacked([part.x for part in parts.values()]), torch.cat(y), tuple(names), columns=columns)


def load_class_folders(
    root: Path, size: ImageSize | None, limits: Limits, contents: dict[str, str] | None = None, stream: bool = False
) -> tuple[Labelled, str]:
    """Read images of classes: ``<class>/<file>``, or ``images`` with these (CUB-200-2011), or Cars196's.

    Args:
        root: The folder or zip file.
        size: As ``image_size`` of `load_image_folder`.
        limits: What the files may take.
        contents: Receives a digest of each image's file that is read, by its name.
        stream: Whether the images stay on disk (`StreamedImages`).

    Returns:
        The images, and what they were taken for; empty for ``<class>/<file>``.

    Raises:
        DataError: It is of none of these layouts, or can't be read.
    """
    if is_cars196(root):
        cars = load_cars196(root, size, limits, contents, stream)
        files = " and ".join(file.name for file in _cars_files(root))
        return cars, f"Cars196: {counted(len(cars), 'image')} of {counted(len(cars.class_names), 'class')} by {files}"
    inner = root / "images"
    if (root / "images.txt").is_file() and (root / "image_class_labels.txt").is_file() and inner.is_dir():
        return load_image_folder(
            inner, size, contents=contents, stream=stream, **limits
        ), f"CUB-200-2011: the classes of {inner}"
    return load_image_folder(root, size, contents=contents, stream=stream, **limits), ""


def _partition(file: Path) -> list[tuple[int, str, str, str]]:
    """The line, the path, the item and the part of each image."""
    try:
        lines = text_of(read_bounded(file, LIST_BYTES)).splitlines()
    except (ValueError, OSError) as error:
        raise DataError(f"cannot read {file}: {brief(error)}") from error
    rows = [(number, line.split()) for number, line in enumerate(lines, start=1) if line.strip()]
    if len(rows) < 3 or rows[1][1] != COLUMNS or len(rows[0][1]) != 1 or not rows[0][1][0].isdecimal():
        raise DataError(f"{file} must begin with the number of images and a line {' '.join(COLUMNS)}")
    count = int(rows[0][1][0])
    listed, seen = [], dict[str, int]()
    for number, words in rows[2:]:
        if len(words) != 3 or words[2] not in PARTITION:
            raise DataError(
                f"{file}: line {number} must be {' '.join(COLUMNS)}, the last one of {', '.join(PARTITION)}, got"
                f" {brief(words)}"
            )
        path = posixpath.normpath(words[0])
        if (first := seen.setdefault(path, number)) != number:
            raise DataError(f"{file} names {brief(path)} in line {first} and in line {number}; list each image once")
        listed.append((number, path, words[1], words[2]))
    if count != len(listed):
        raise DataError(f"{file} says {counted(count, 'image')}, but lists {len(listed)}; it may be cut off")
    return listed


def _base(root: Path, file: Path, path: str) -> Path:
    """The folder that the listed paths are relative to: the first that holds the first image."""
    inner = sorted(each for each in root.iterdir() if each.is_dir())
    tried = [root, file.parent, *inner]
    found = next((folder for folder in tried if (folder / path).is_file()), None)
    if found is None:
        raise DataError(f"{root} lacks {brief(path)}, which {file} names, there and in its folders")
    return found


def _listed(
    base: Path,
    rows: Sequence[tuple[str, str]],
    classes: Sequence[str],
    size: ImageSize | None,
    limits: Limits,
    contents: dict[str, str] | None = None,
    stream: bool = False,
) -> Labelled:
    places = {name: place for place, name in enumerate(classes)}
    paths = [path for path, _ in rows]
    if stream:
        images = stream_images(base, paths, reader(base), size, max_pixels=limits["max_pixels"], contents=contents)
        x = as_inputs(images)
    else:
        x = read_images(base, paths, noting(reader(base), contents), size, **limits)
    return Labelled(x, torch.tensor([places[name] for _, name in rows]), tuple(classes))


def _cars_files(root: Path) -> list[Path]:
    """The files of Cars196's annotations: one of all images, or those of train and test."""
    for folder in (root, root / "devkit"):
        if (folder / CARS).is_file():
            return [folder / CARS]
    names = ("cars_train_annos.mat", "cars_test_annos_withlabels.mat")
    places = (root, root / "devkit")
    found = [next((folder / name for folder in places if (folder / name).is_file()), None) for name in names]
    if found[0] is not None and found[1] is None:
        raise DataError(f"{root} has {names[0]}, but lacks {names[1]}; half of the classes' images have no label")
    return [each for each in found if each is not None]


def _cars(root: Path) -> list[tuple[str, int]]:
    """The path and the class of each image."""
    files = _cars_files(root)
    if not files:
        raise DataError(f"{root} must hold {CARS}")
    rows = []
    for file in files:
        annotations = _annotations(file)
        fields = annotations.dtype.names or ()
        key = next((name for name in ("relative_im_path", "fname") if name in fields), "")
        if not key or "class" not in fields:
            raise DataError(f"{file} must tell each image's relative_im_path (or fname) and class, got {brief(fields)}")
        folder = "" if key == "relative_im_path" else "cars_test" if "test" in file.name else "cars_train"
        for place, row in enumerate(annotations.reshape(-1)):
            path, number = _scalar(row[key]), _scalar(row["class"])
            if not isinstance(path, str) or isinstance(number, bool | str) or not float(number).is_integer():
                raise DataError(f"{file}: image {place + 1} has {brief(path)} of class {brief(number)}")
            rows.append((posixpath.normpath(posixpath.join(folder, path)), int(number)))
    return rows


def _annotations(file: Path) -> Any:
    import io

    from scipy.io import loadmat

    try:
        content = loadmat(io.BytesIO(read_bounded(file, MAT_BYTES)), variable_names=["annotations"])
        annotations = content["annotations"]
    except Exception as error:  # scipy's reader raises errors of many types
        raise DataError(f"cannot read {file} as Cars196's annotations: {brief(error)}") from error
    if annotations.size == 0:
        raise DataError(f"{file} has annotations of no image")
    return annotations


def _scalar(value: Any) -> Any:
    """What an entry of MATLAB's holds, which is an array of arrays of one element."""
    while hasattr(value, "reshape") and getattr(value, "size", 0) == 1 and getattr(value, "ndim", 0):
        value = value.reshape(-1)[0]
    return value.item() if hasattr(value, "item") else value
