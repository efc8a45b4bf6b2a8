"""Parts of one's own: train, validation and test as they are given, their classes compared by name."""

import hashlib
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from metricopt_ext.data.labelled import Split
from metricopt_ext.data.splits import PARTS, Splits
from metricopt_ext.data.streamed import is_streamed
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.runtime.pace import followed
from metricopt_ext.utils.words import brief, counted

KEYS = {"train": "data.train", "validation": "data.val", "test": "data.test"}

# What folders of the parts are called, in lower case.
FOLDERS = {
    "train": ("train", "training"),
    "validation": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
ROWS = 1024  # of a table that are looked at together
NAMED = 5  # files in two parts that a warning names


def given_parts(paths: Mapping[str, str], root: str = "") -> dict[str, str]:
    """Return the path of each part that is given, in the order of `PARTS`; none if no part is.

    Args:
        paths: The path of each of `PARTS`; empty for one that is not given.
        root: What ``data.root`` names, which then must be empty.

    Raises:
        ConfigError: Train is missing, or nothing to judge on, or ``data.root`` is given too.
    """
    given = {name: paths[name] for name in PARTS if paths.get(name)}
    if not given:
        return {}
    shown = " and ".join(KEYS[name] for name in given)
    if root:
        raise ConfigError(f"data.root={root} and {shown} both say where the data are; leave one of them out")
    if "train" not in given or len(given) == 1:
        raise ConfigError(
            f"{shown} alone: parts of one's own need data.train, and data.val or data.test or both; data.root is for"
            " data that are to be divided"
        )
    return given


def folders_of_parts(root: Path) -> tuple[dict[str, Path], list[Path]]:
    """Return the folders of the parts that a folder holds, as ``train`` and ``val``, and those that hold no folder.

    Args:
        root: The folder; perhaps with one more folder around the parts.

    Returns:
        The folder of each part that holds folders itself, and the others, which have no classes; both empty unless
            the folder holds train, another part, and no other folder.

    Raises:
        DataError: Two folders are the same part.
    """
    if not root.is_dir():
        return {}, []
    inner = _inner_folders(root)
    if len(inner) == 1:
        inner = _inner_folders(inner[0])
    found: dict[str, Path] = {}
    for folder in inner:
        name = next((name for name, known in FOLDERS.items() if folder.name.lower() in known), None)
        if name is None:
            return {}, []
        if name in found:
            raise DataError(f"{root} has {found[name].name} and {folder.name} for {KEYS[name]}; name the one to use")
        found[name] = folder
    with_classes = {name: found[name] for name in PARTS if name in found and _inner_folders(found[name])}
    if "train" not in with_classes or len(found) < 2:
        return {}, []
    return with_classes, [folder for name, folder in found.items() if name not in with_classes]


def same_classes(parts: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the classes of all parts, train's in its order.

    One warning names those that train and another part have and a third lacks.

    Args:
        parts: The names of the classes in each part, train among them.

    Raises:
        DataError: A part alone has a class, or train lacks one of them; the message names it.
    """
    everywhere = {name: None for classes in parts.values() for name in classes}
    partly = []
    for name in everywhere:
        having = [part for part in parts if name in parts[part]]
        lacking = [part for part in parts if part not in having]
        if lacking and ("train" not in having or len(having) == 1):
            raise DataError(
                f"class {brief(name)} is in {_keys(having)} alone, and {_keys(lacking)} {_lacks(lacking)} it; all parts"
                " must have the same classes: remove its examples, or use one name in all parts"
            )
        if lacking:
            partly.append(f"{brief(name)} in {_keys(lacking)}")
    if partly:
        more = f" and {len(partly) - NAMED} more" if len(partly) > NAMED else ""
        warnings.warn(f"classes without an example: {', '.join(partly[:NAMED])}{more}", stacklevel=2)
    return tuple(parts["train"])


def renumbered(y: Tensor, own: Sequence[str], classes: Sequence[str]) -> Tensor:
    """Return labels ``n`` that count a part's own classes, as numbers of all classes.

    Args:
        y: Labels, ``n`` int64: places in ``own``.
        own: The part's classes.
        classes: All classes, its own among them.
    """
    places = {name: place for place, name in enumerate(classes)}
    return torch.tensor([places[name] for name in own], dtype=torch.int64)[y]


def warn_of_copies(splits: Splits) -> None:
    """Warn once of examples in two parts, by what they hold, labels aside; see `warn_of_shared`."""
    parts: dict[str, Split] = {name: getattr(splits, name) for name in PARTS}
    if is_streamed(splits.train.x):
        found = digests_of_files({name: map(Path, part.names) for name, part in parts.items()})
    else:
        named = {name: part.names or [f"example {i}" for i in range(len(part))] for name, part in parts.items()}
        found = {name: digests_of_rows(part.x, named[name]) for name, part in parts.items()}
    warn_of_shared(found, "row" if splits.train.x.ndim == 2 else "image")


def warn_of_shared(parts: Mapping[str, Mapping[str, str]], what: str) -> None:
    """Warn once of what is in two parts, by content: how many of each part, and the first five.

    Args:
        parts: Of each part the digest of each file, or row, by its name.
        what: What the names are of.
    """
    where: dict[str, tuple[str, str]] = {}  # the part and the name where a content was met first
    copies, counts = list[str](), Counter[str]()
    for part, digests in parts.items():
        for name, digest in digests.items():
            first, its_name = where.setdefault(digest, (part, name))
            if first != part:
                counts[part] += 1
                copies.append(f"{name} of {part} is {its_name} of {first}")
    if copies:
        said = " and ".join(f"{count} of {counted(len(parts[part]), what)} of {part}" for part, count in counts.items())
        more = f"; and {len(copies) - NAMED} more" if len(copies) > NAMED else ""
        warnings.warn(
            f"{said} are in another part, too, by content: {'; '.join(copies[:NAMED])}{more}. What the model has seen"
            " is judged too well",
            stacklevel=3,
        )


def digests_of_files(parts: Mapping[str, Iterable[Path]]) -> dict[str, dict[str, str]]:
    """Return, of each part, a digest of each file, by its path; of one whose size no other file has, the path itself.

    A file that can't be read is left to whoever reads it to report.

    Args:
        parts: The files of each part.
    """
    known = {
        part: {str(file): file.stat().st_size for file in files if file.is_file()} for part, files in parts.items()
    }
    sizes = Counter(size for files in known.values() for size in files.values())
    return {
        part: {
            name: _digest_of(name) if sizes[size] > 1 else name
            for name, size in followed(files.items(), f"look for copies among the files of {part}", len(files))
        }
        for part, files in known.items()
    }


def digests_of_rows(x: Tensor, names: Iterable[str]) -> dict[str, str]:
    """Return what tells inputs ``n x ...`` apart, bit for bit, by their names."""
    digests: list[str] = []
    for some in x.split(ROWS):
        numbers = some if some.dtype == torch.uint8 else some.double() + 0.0  # -0 is 0
        rows = numbers.reshape(len(some), -1).numpy(force=True)
        digests += [hashlib.blake2b(row.tobytes(), digest_size=16).hexdigest() for row in rows]
    return dict(zip(names, digests, strict=True))


def _digest_of(name: str) -> str:
    with open(name, "rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _inner_folders(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith((".", "__")))


def _keys(parts: Sequence[str]) -> str:
    return " and ".join(KEYS[part] for part in parts)


def _lacks(parts: Sequence[str]) -> str:
    return "lacks" if len(parts) == 1 else "lack"
