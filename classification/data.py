"""Labelled data in memory: loaders of known sets, and the three parts that finetuning for a metric needs."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from metricopt_ext.data.images import load_image_folder
from metricopt_ext.data.label_parts import label_parts
from metricopt_ext.data.labelled import Labelled, Split, Unscaled
from metricopt_ext.data.precision import check_told_apart, mean_and_spread
from metricopt_ext.data.reading import Column, Reading
from metricopt_ext.data.splits import PARTS, Splits, check_fractions
from metricopt_ext.errors import DataError
from metricopt_ext.utils.words import override

StrPath = str | os.PathLike[str]

SKLEARN_SETS = ("breast_cancer", "digits", "iris", "wine")


def divided(
    whole: Split, names: tuple[str, ...], fractions: Sequence[float] = (0.7, 0.1, 0.2), seed: int = 0
) -> Splits:
    """Divide a set at random, the same way for the same seed; of a table (`Unscaled`) the parts are such tables too.

    Args:
        whole: The set.
        names: The name of each class.
        fractions: Shares of train, validation and test, above 0 and summing to 1.
        seed: Seed of the shuffle.

    Raises:
        ValueError: For fractions out of range.
        DataError: For a set too small to divide this way.
    """
    check_fractions(fractions)
    if len(whole) == 0:
        raise DataError("the set to split is empty")
    _check_parts(whole.y, names)
    _, validation, test = (round(share * len(whole)) for share in fractions)
    rest, test_part = hold_out(whole, test, seed)
    train_part, validation_part = hold_out(rest, validation, seed)
    return Splits(train_part, validation_part, test_part, names)


def _check_parts(y: Tensor, names: Sequence[str]) -> None:
    """Reject labels that can't be in three parts."""
    if y.ndim == 2:
        for name, count in zip(names, y.sum(0).tolist(), strict=True):
            if min(count, len(y) - count) < len(PARTS):
                raise DataError(
                    f"label {name!r} is in {count} of {len(y)} examples; train, validation and test need one with it"
                    " and one without it each"
                )
        return
    single = (y.bincount() == 1).nonzero().flatten().tolist()
    if single:
        raise DataError(
            f"class {names[single[0]]!r} has a single example ({len(single)} of {len(names)} classes do), which can't"
            " be in train, validation and test; leave such classes out or merge them"
        )


def hold_out(data: Split, size: int | float, seed: int = 0) -> tuple[Split, Split]:
    """Set aside a part at random, e.g. for validation in a set that comes with its own test part.

    A class's only example stays in the rest.

    Args:
        data: The examples.
        size: How many to set aside, or their share if it is a float in (0, 1).
        seed: Seed of the shuffle.

    Returns:
        The rest, and the part set aside.

    Raises:
        DataError: If either part would be empty, or too small to hold every class.
    """
    from sklearn.model_selection import train_test_split

    count = round(size * len(data)) if isinstance(size, float) else size
    if not 0 < count < len(data):
        raise DataError(f"holding out a part must leave neither part empty, got {count} of {len(data)} examples")
    if data.y.ndim == 2:
        rest, held = label_parts(data.y, [len(data) - count, count], seed)
        return data.take(rest), data.take(held)
    labels = data.y.numpy(force=True)
    alone = np.bincount(labels)[labels] == 1
    several = np.flatnonzero(~alone)
    try:
        rest, held = train_test_split(several, test_size=count, random_state=seed, stratify=labels[several])
    except ValueError as error:
        raise DataError(
            f"cannot set aside {count} of {len(data)} examples by class: {str(error).rstrip('.')}. A larger part"
            " has room for each class, as by data.fractions; so have more examples, or fewer classes"
        ) from error
    all_rest = np.concatenate([rest, np.flatnonzero(alone)])
    return data.take(torch.from_numpy(all_rest)), data.take(torch.from_numpy(held))


def imputed(splits: Splits, how: str) -> Splits:
    """Fill in missing numbers of a table by scikit-learn's ``SimpleImputer``, by what train has of a column.

    Args:
        splits: Parts with `Unscaled` rows, ``n x d``; NaN is missing.
        how: ``"mean"``, ``"median"``, or ``"indicator"``: by the mean, and one more 0/1 input for each column with a
            missing number in train, which says where.

    Raises:
        DataError: A column has no number in train.
    """
    from sklearn.impute import SimpleImputer

    x, reading = splits.train.x.double().numpy(force=True), splits.reading or Reading("")
    names = reading.inputs or [str(i + 1) for i in range(x.shape[1])]
    empty = np.flatnonzero(np.isnan(x).all(0))
    if len(empty):
        name = names[empty[0]]
        raise DataError(
            f"column {name!r} has no number in train to fill it in by; leave it out ({override('data.drop', name)})"
        )
    imputer = SimpleImputer(strategy="median" if how == "median" else "mean", add_indicator=how == "indicator").fit(x)

    def fill(part: Split, name: str) -> Split:
        filled = torch.from_numpy(imputer.transform(part.x.double().numpy(force=True)))
        return Unscaled(filled.to(part.x.device), part.y, columns=part.columns)

    missing = {name: int(getattr(splits, name).x.isnan().sum()) for name in PARTS}
    said = ""
    if any(missing.values()):
        by = "median" if how == "median" else "mean"
        added = imputer.indicator_.features_ if how == "indicator" else []
        where = ", ".join(f"{count} in {name}" for name, count in missing.items())
        said = f"missing numbers are filled in by train's {by}: {where}"
        said += f"; inputs that say where: {len(added)}" if len(added) else ""
        more = [Column(f"{names[i]} is missing", "indicator", 1, 2) for i in added]
        reading = replace(reading, columns=[*reading.columns, *more], filled=said)
    return replace(splits.map(fill), reading=reading)


def standardise(splits: Splits) -> Splits:
    """Shift and scale each feature by its mean and standard deviation in train; constant features are only shifted.

    All of it happens in float64.

    Args:
        splits: Parts with inputs ``n x d``, float32 or those of a table (`Unscaled`).

    Returns:
        Parts with float32 inputs.

    Raises:
        DataError: For inputs of another shape or type, or a column whose values float32 can't tell apart even then.
    """
    x = splits.train.x
    if x.ndim != 2 or not x.is_floating_point():
        raise DataError(f"inputs to standardise must be n x d floats, got {x.dtype} of shape {tuple(x.shape)}")
    mean, std = mean_and_spread(x)
    return _rounded(
        splits, lambda part: (part.double() - mean) / std, "leave out the column, or what is far from all else"
    )


def single_precision(splits: Splits) -> Splits:
    """Round a table's numbers to float32 inputs.

    Args:
        splits: Parts with `Unscaled` rows, ``n x d``, none missing.

    Raises:
        DataError: A column has values that float32 can't tell apart.
    """
    return _rounded(splits, lambda x: x, "set data.standardise=true, which is done in float64, or leave it out")


def _rounded(splits: Splits, change: Callable[[Tensor], Tensor], remedy: str) -> Splits:
    """Change the inputs in float64 and round them; train's values must stay apart, and all finite."""
    names = splits.reading.inputs if splits.reading else []

    def rounded(part: Split, name: str) -> Split:
        x = change(part.x).float()
        check_told_apart(part.x, x, names, remedy, distinct=name == "train")
        return Split(x, part.y, columns=part.columns)

    return splits.map(rounded)


def with_positive(splits: Splits, name: str) -> Splits:
    """Number two classes such that the one of this name is 1, the positive class of binary metrics.

    Raises:
        DataError: There are more than two classes, or none has this name.
    """
    names = splits.class_names
    if len(names) != 2:
        raise DataError(f"data.positive={name!r} is for two classes, but the data have {len(names)}")
    if name not in names:
        raise DataError(f"data.positive={name!r} must be one of the two classes, {names[0]!r} or {names[1]!r}")
    if name == names[1]:
        return splits
    return replace(splits.map(lambda part, _: replace(part, y=1 - part.y)), class_names=names[::-1])


def load_cifar10(root: StrPath) -> tuple[Labelled, Labelled]:
    """Read the train and test sets of CIFAR-10, 50,000 and 10,000 images of ten classes.

    Args:
        root: Folder that holds either ``cifar-10-batches-py``, or ``train`` and ``test``, each a folder of
            ``<class>/<file>`` images.

    Returns:
        Train and test, with inputs ``n x 3 x 32 x 32`` uint8 (RGB).

    Raises:
        DataError: If neither layout is found, a file is corrupt, or the sets' classes differ.
    """
    if Path(root, "cifar-10-batches-py").is_dir():
        return _cifar10_batches(root, True), _cifar10_batches(root, False)
    train, test = (load_image_folder(Path(root, name)) for name in ("train", "test"))
    if train.class_names != test.class_names:
        raise DataError(f"{root}: test must have the classes of train {train.class_names}, got {test.class_names}")
    return train, test


def load_sklearn(name: str) -> Labelled:
    """Load a real data set that comes with scikit-learn.

    Args:
        name: ``breast_cancer``, ``digits``, ``iris`` or ``wine``.

    Returns:
        Inputs ``n x d`` float32; for digits, ``n x 1 x 8 x 8`` in [0, 1].

    Raises:
        ValueError: For another name.
    """
    import sklearn.datasets

    if name not in SKLEARN_SETS:
        raise ValueError(f"the data set must be one of {', '.join(SKLEARN_SETS)}, got {name!r}")
    bunch = getattr(sklearn.datasets, f"load_{name}")()
    x = torch.tensor(bunch.data, dtype=torch.float32)
    if name == "digits":
        x = x.view(-1, 1, 8, 8) / 16
    return Labelled(x, torch.tensor(bunch.target, dtype=torch.int64), tuple(map(str, bunch.target_names)))


def _cifar10_batches(root: StrPath, train: bool) -> Labelled:
    from torchvision.datasets import CIFAR10

    try:
        batches = CIFAR10(os.fspath(root), train=train)
    except RuntimeError as error:
        raise DataError(f"{Path(root, 'cifar-10-batches-py')} is incomplete or corrupt: {error}") from error
    y = torch.tensor(batches.targets)
    x = torch.from_numpy(batches.data).permute(0, 3, 1, 2).contiguous()
    return Labelled(x, y, tuple(batches.classes))
