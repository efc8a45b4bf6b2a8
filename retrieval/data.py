"""Labelled images in memory: loaders of common sets, and splits whose parts share no class."""

import difflib
import os
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from metricopt_ext.data.images import load_image_folder, read_images, reader
from metricopt_ext.data.labelled import Labelled, Split
from metricopt_ext.data.splits import PARTS, Splits, check_fractions
from metricopt_ext.errors import DataError
from metricopt_ext.utils.files import existing
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.text import text_of
from metricopt_ext.utils.words import brief

StrPath = str | os.PathLike[str]


_COLUMNS = ["image_id", "class_id", "super_class_id", "path"]  # of the lists of Stanford Online Products


@dataclass(frozen=True, eq=False)
class Searched(Splits):
    """Splits whose test images are queries and a gallery.

    Attributes:
        queries: Which test images are queries, ``n`` booleans; the others are the gallery. None if each searches all
            others.
    """

    queries: Tensor | None = None


def queries_of(splits: Splits, part: str = "test") -> Tensor | None:
    """Return which images of a part are queries, ``n`` booleans; None if each searches all others."""
    return splits.queries if isinstance(splits, Searched) and part == "test" else None


def split_classes(
    whole: Labelled,
    fractions: Sequence[float],
    seed: int = 0,
    *,
    last_test: bool = False,
    test_classes: Sequence[str] = (),
) -> Splits:
    """Divide a set by class, at random but the same way for the same seed.

    Args:
        whole: The set.
        fractions: Shares of the classes for train, validation and test, above 0 and summing to 1.
        seed: Seed of the choice.
        last_test: Whether the last classes by name are the test part whatever the seed, as is usual for
            CUB-200-2011.
        test_classes: Names of the classes that are the test part whatever the seed; the others are divided in the
            proportion of the shares of train and validation. Empty for none.

    Raises:
        ValueError: For fractions out of range.
        DataError: For too few classes, or a name that no class has.
    """
    check_fractions(fractions)
    n = len(whole.class_names)
    if test_classes:
        fixed = _places(test_classes, whole.class_names)
        validation, test = round(fractions[1] / sum(fractions[:2]) * (n - len(fixed))), len(fixed)
    else:
        validation, test = (round(share * n) for share in fractions[1:])
        fixed = list(range(n - test, n)) if last_test else []
    if min(n - validation - test, validation, test) < 2:
        raise DataError(
            f"each part needs at least two classes of its own; {n} classes divided by {tuple(fractions)} give "
            f"{n - validation - test}, {validation} and {test}"
        )
    free = torch.tensor(sorted({*range(n)} - {*fixed}))
    order = free[torch.randperm(len(free), generator=generator(seed, "classes"))]
    classes = torch.cat([order, torch.tensor(fixed, dtype=torch.int64)]).split(
        [n - validation - test, validation, test]
    )
    train_part, validation_part, test_part = (_of_classes(whole, part) for part in classes)
    return disjoint(Splits(train_part, validation_part, test_part, whole.class_names))


def hold_out_classes(train: Labelled, test: Labelled, share: float, seed: int = 0) -> Splits:
    """Hold out a share of the train classes for validation, in a set that comes with a test part of other classes.

    Args:
        train: The train part as loaded.
        test: The test part as loaded; its labels count from 0 too.
        share: Share of the train classes, in (0, 1).
        seed: Seed of the choice.

    Raises:
        ValueError: For a share out of range.
        DataError: For too few classes, or a class that is in both parts.
    """
    if not 0 < share < 1:
        raise ValueError(f"validation_share must be in (0, 1), got {share}")
    both = sorted({*train.class_names} & {*test.class_names})
    if both:
        raise DataError(f"class {both[0]!r} is in both the train and the test part")
    n = len(train.class_names)
    order = torch.randperm(n, generator=generator(seed, "classes"))
    rest, held = (_of_classes(train, classes) for classes in order.tensor_split([n - round(share * n)]))
    later = Split(test.x, test.y + n, names=test.names)
    return disjoint(Splits(rest, held, later, train.class_names + test.class_names))


def disjoint(splits: Splits) -> Splits:
    """Return the splits if no class is in two parts, and each part has two classes or more, one of them with a pair.

    Raises:
        DataError: Otherwise; the message names the part and the class.
    """
    seen: dict[int, str] = {}
    for name in PARTS:
        classes, counts = getattr(splits, name).y.unique(return_counts=True)
        if len(classes) < 2:
            raise DataError(f"the {name} part must hold at least two classes, got {len(classes)}")
        if int(counts.max()) < 2:
            raise DataError(f"the {name} part must hold a class of two images or more, but each has one")
        for label in classes.tolist():
            if label in seen:
                raise DataError(f"class {splits.class_names[label]!r} is in {seen[label]} and in {name}")
            seen[label] = name
    return splits


def load_digits() -> Labelled:
    """Load scikit-learn's digits: 1,797 images ``1 x 8 x 8`` of ten classes, in [0, 1]."""
    import sklearn.datasets

    bunch = sklearn.datasets.load_digits()
    x = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16
    return Labelled(x, torch.tensor(bunch.target, dtype=torch.int64), tuple(map(str, bunch.target_names)))


def load_omniglot(root: StrPath, image_size: int | None = 28) -> Labelled:
    """Read Omniglot, ``<alphabet>/<character>/<file>.png``; a class is a character of an alphabet.

    Args:
        root: The folder of the alphabets.
        image_size: Pixels per side to reduce to; None for the original 105.

    Returns:
        Images ``n x 1 x h x w`` uint8, ink 255 on 0.

    Raises:
        DataError: For a missing path, another layout or an unreadable image.
    """
    data = load_image_folder(root, image_size, depth=2, mode="L")
    return Labelled(255 - data.x, data.y, data.class_names, names=data.names)


def load_stanford_online_products(root: StrPath, image_size: int = 224) -> tuple[Labelled, Labelled]:
    """Read the train and test parts of Stanford Online Products from its own lists.

    Args:
        root: The folder of ``Ebay_train.txt`` and ``Ebay_test.txt`` and of the images they name.
        image_size: Pixels per side to resize to.

    Returns:
        Train and test, images ``n x 3 x h x w`` uint8; all 120,053 of 224 pixels take 18 GB.

    Raises:
        DataError: For a missing or malformed list, or an image that is missing, unreadable or listed twice.
    """
    lists = {name: _listed(Path(root), name) for name in ("Ebay_train.txt", "Ebay_test.txt")}
    seen: dict[str, str] = {}
    for name, rows in lists.items():
        for number, _, path in rows:
            where, key = f"line {number} of {name}", posixpath.normpath(path)
            if (first := seen.setdefault(key, where)) != where:
                raise DataError(f"{root} lists {brief(path)} in {first} and in {where}; list each image once")
    train, test = (_listed_images(Path(root), rows, image_size) for rows in lists.values())
    return train, test


def _places(names: Sequence[str], known: Sequence[str]) -> list[int]:
    for name in names:
        if name not in known:
            near = ", ".join(map(repr, difflib.get_close_matches(name, known, n=3, cutoff=0.0)))
            raise DataError(f"data.test_classes has {name!r}, which is no class; nearest of the {len(known)}: {near}")
    return sorted({known.index(name) for name in names})


def _of_classes(whole: Labelled, classes: Tensor) -> Split:
    return whole.take(torch.isin(whole.y, classes))


def _listed(root: Path, name: str) -> list[tuple[int, int, str]]:
    """The line, the class and the path of each image in a list."""
    file = existing(root / name)
    try:
        lines = text_of(file.read_bytes()).splitlines()
    except (ValueError, OSError) as error:
        raise DataError(f"cannot read {file}: {brief(error)}") from error
    (_, header), *listed = [(n, line.strip()) for n, line in enumerate(lines, start=1) if line.strip()] or [(1, "")]
    if header.split() != _COLUMNS or not listed:
        raise DataError(f"{file} must list {' '.join(_COLUMNS)}, got {brief(header)} and {len(listed)} images")
    rows = [(number, line.split(maxsplit=3)) for number, line in listed]
    for number, row in rows:
        if len(row) != 4 or not row[1].isdecimal() or len(row[1]) > 18:  # 18 digits fit into 64 bits
            raise DataError(f"{file}: line {number} must be {' '.join(_COLUMNS)}, got {brief(row)}")
    return [(number, int(row[1]), row[3]) for number, row in rows]


def _listed_images(root: Path, rows: list[tuple[int, int, str]], image_size: int) -> Labelled:
    classes, y = torch.tensor([label for _, label, _ in rows]).unique(return_inverse=True)
    x = read_images(root, [path for _, _, path in rows], reader(root), image_size)
    return Labelled(x, y, tuple(map(str, classes.tolist())), names=[path for *_, path in rows])
