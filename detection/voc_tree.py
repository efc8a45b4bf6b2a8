"""Where the files of a set in Pascal VOC's format are."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from metricopt_ext.errors import DataError
from metricopt_ext.utils.words import brief

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp")  # in any case, the first that there is

XML = ".xml"

# What the folders of a set are called, in lower case
ANNOTATIONS = "annotations"
IMAGES = ("jpegimages", "images")
LISTS = (("imagesets", "main"), ("imagesets",))
LONGEST_NAME, LISTED = 80, 10  # characters of a name in a message, and names


@dataclass(frozen=True)
class VocTree:
    """Where the files of a set are.

    Attributes:
        folder: What holds them.
        annotations: The folder of the XML files.
        images: Folders that images are looked for in, one after the other.
        lists: The folder of the lists of images; None for a set without lists.
    """

    folder: Path
    annotations: Path
    images: tuple[Path, ...]
    lists: Path | None

    def __str__(self) -> str:
        """Say where what was found, and what is not read."""
        lists = f"lists in {self.lists}" if self.lists is not None else "no lists"
        images = " and ".join(map(str, self.images)) or "no folder"
        return f"VOC's format: XML in {self.annotations}, images in {images}, {lists}"


def quoted(text: str) -> str:
    """A name from a file as messages have it: quoted and cut if it is long or can't be printed."""
    return text if len(text) <= LONGEST_NAME and text.isprintable() else brief(text)


def list_of(names: Sequence[str]) -> str:
    """The first names as messages have them, and how many more there are."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(map(quoted, names[:LISTED])) + more


def find_tree(root: Path) -> VocTree:
    """Return where the files of a set are: in the root, in a folder of it, one level deeper, or around the root.

    Annotations are in a folder ``Annotations``, images beside it in one of `IMAGES`, in any case; or XML files lie
    beside their images in the root, or in a folder of it.

    Args:
        root: The folder.

    Raises:
        DataError: There is no such set, or several.
    """
    level: list[Path] = [root]
    for depth in range(3):
        found = [folder for folder in level if _annotations_in(folder) is not None]
        if not found:
            found = [folder for folder in level if _is_flat(folder, alone=depth == 0) and not _is_annotations(folder)]
        if len(found) > 1:
            several = list_of(sorted(map(str, found)))
            raise DataError(f"{root} holds several sets; name one of them: {several}")
        if found:
            return _tree(found[0], _annotations_in(found[0]) or found[0])
        if depth == 0 and _is_annotations(root):
            inside_link = root.name.lower() != ANNOTATIONS  # then its parent is not what is around it
            root = root.resolve() if inside_link else root
            return _tree(root.parent, root)
        level = [inner for folder in level for inner in folder.iterdir() if inner.is_dir()]
    raise DataError(
        f"{root} holds no folder Annotations, neither directly nor in the two levels of folders below, and no XML files"
        " beside their images"
    )


def _tree(folder: Path, annotations: Path) -> VocTree:
    beside = [each for name in IMAGES for each in _children(folder, name)]
    images = [*beside, *(each for each in dict.fromkeys((annotations, folder)) if _holds(each, SUFFIXES))]
    lists = next((found for names in LISTS for found in _below(folder, names) if _holds(found, (".txt",))), None)
    return VocTree(folder, annotations, tuple(images), lists)


def _annotations_in(folder: Path) -> Path | None:
    """The folder of the XML files in another; one called so by VOC need not hold any."""
    named = _children(folder, ANNOTATIONS)
    own = [each for each in named if each.name == "Annotations"]
    return next(iter([*(each for each in named if _holds(each, (XML,))), *own]), None)


def _is_annotations(root: Path) -> bool:
    return ANNOTATIONS in (root.name.lower(), root.resolve().name.lower())


def _is_flat(folder: Path, alone: bool) -> bool:
    """Whether a folder holds XML files beside their images, or alone."""
    return _holds(folder, (XML,)) and (alone or _holds(folder, SUFFIXES))


def _holds(folder: Path, suffixes: tuple[str, ...]) -> bool:
    return any(each.name.lower().endswith(suffixes) and not each.name.startswith(".") for each in folder.iterdir())


def _children(folder: Path, name: str) -> list[Path]:
    """The folders of a name, in any case, within another; those that are written as VOC's own come first."""
    found = [each for each in folder.iterdir() if each.name.lower() == name and each.is_dir()]
    return sorted(found, key=lambda each: each.name)


def _below(folder: Path, names: Sequence[str]) -> list[Path]:
    found = [folder]
    for name in names:
        found = [inner for each in found for inner in _children(each, name)]
    return found


def xml_files(folder: Path) -> dict[str, Path]:
    """The XML files of a folder by their names without suffix, which may be in upper case."""
    found: dict[str, Path] = {}
    for file in folder.iterdir():
        stem = stem_of(file.name, (XML,))
        if stem == file.name or stem.startswith("."):
            continue
        if stem in found:
            raise DataError(f"{folder} holds both {found[stem].name} and {file.name}; remove one of them")
        found[stem] = file
    return found


def folders_of_xml(folder: Path) -> list[Path]:
    """The folders in another that hold XML files."""
    return sorted((each for each in folder.iterdir() if each.is_dir() and _holds(each, (XML,))), key=str)


def stem_of(name: str, suffixes: Sequence[str]) -> str:
    """A file's name without its suffix, if that is one of some, in upper or lower case."""
    suffix = next((each for each in suffixes if name.lower().endswith(each)), "")
    return name[: len(name) - len(suffix)]
