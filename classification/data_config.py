"""The settings of the data of `tools/finetune_classifier.py`; each key is a field here and nowhere else."""

from dataclasses import dataclass, field
from typing import Any

from metricopt_ext.data.own_parts import given_parts
from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.brought_sections import either
from metricopt_ext.utils.config import MISSING

TABLE = "csv"  # the data.name that brings the keys of a table
MISSING_NUMBERS = ("mean", "median", "indicator")


@dataclass
class DataConfig:
    """Where examples come from and how they are divided."""

    # a9a, arrays (npz, pt, h5, safetensors), cifar10, csv (or parquet), image_folder, libsvm, scikit-learn's
    # breast_cancer, digits, iris, wine, or MODULE:FUNCTION, which is imported and run
    name: str = MISSING
    root: str = ""  # the file, or the folder that holds the set; not needed for scikit-learn's
    kind: str = "classes"  # what is predicted: classes, or multilabel (several labels each)
    positive: str = ""  # two classes: the one that metrics count as 1; empty: the last by number or alphabet
    image_size: int = 0  # image_folder: pixels per side; 0 if all images have the same size
    # images: what pixels in [0, 1] are normalised by, one number for each channel, as your own checkpoint was trained;
    # empty: not at all, but as published weights need it (model.weights=ResNet18_Weights.IMAGENET1K_V1)
    mean: list[float] = field(default_factory=list)
    std: list[float] = field(default_factory=list)
    fractions: list[float] = field(default_factory=lambda: [0.7, 0.1, 0.2])  # train, validation, test
    validation_size: int = 5000  # cifar10: held out from its train set
    standardise: bool = False  # tabular: zero mean and unit variance by train statistics
    # Long-tailed train data: its class counts fall geometrically, in the order of classes, from the first class's to
    # 1 / imbalance of it; validation and test stay as they are. 1: they stay as they are in train too
    imbalance: float = 1.0
    largest_class: int = 0  # with imbalance: train examples of the first class; 0: as many as there are


@dataclass
class OwnDataConfig(DataConfig):
    """The same with what a function of the user's own, ``data.name=MODULE:FUNCTION``, takes."""

    folder: str = ""  # where the module is, if it is not installed
    kwargs: dict[str, Any] = field(default_factory=dict)  # the function's arguments, e.g. {file: my.npz}


@dataclass
class PartsConfig(DataConfig):
    """The same for files and folders, which may be parts of one's own."""

    # In place of root: the folder or file of each part, its classes compared by name. Without val it is held out from
    # train in the proportion of fractions; without test, val is divided
    train: str = ""
    val: str = ""
    test: str = ""

    @property
    def parts(self) -> dict[str, str]:
        """The path of each part that is given; see `given_parts`."""
        return given_parts({"train": self.train, "validation": self.val, "test": self.test}, self.root)


@dataclass
class ImageFolderConfig(PartsConfig):
    """The same with what folders of images, ``data.name=image_folder``, take."""

    # read images from disk whenever they are asked for: less memory, and each query decodes them all
    stream: bool = False


@dataclass
class LabelledImagesConfig(ImageFolderConfig):
    """The same with what images with several labels each, ``data.kind=multilabel``, take.

    The root, or each part, is a CSV of images' names and labels.
    """

    images: str = ""  # the folder of the images; empty: the file's own
    # a column of 0 and 1 for each label, or the one that lists them; empty: all but that of the images' names
    targets: list[str] = field(default_factory=list)


@dataclass
class TableConfig(PartsConfig):
    """The same with what a table, ``data.name=csv``, needs."""

    target: str = ""  # the column of classes
    targets: list[str] = field(default_factory=list)  # multilabel: in its place a column of 0 and 1 for each label
    drop: list[str] = field(default_factory=list)  # columns to leave out
    categories: list[str] = field(default_factory=list)  # columns whose cells are values as they stand, such as codes
    # What numeric columns lack, or have no number for, is filled in by train's mean or median, or by the mean with one
    # more input that says where (indicator); empty: it is refused
    missing: str = ""

    def check(self) -> None:
        """Reject what can't be read.

        Raises:
            ConfigError: A value is out of range.
        """
        if (self.kind == "multilabel") != bool(self.targets) or len(self.targets) == 1:
            raise ConfigError(
                f"data.targets={self.targets} and data.kind={self.kind}: several labels each are data.kind=multilabel"
                " with two columns or more, data.targets=[A,B,...]; anything else has data.target=COLUMN"
            )
        if self.targets and self.target:
            raise ConfigError(f"data.target={self.target!r} and data.targets={self.targets}: leave one of them out")
        if repeated := [name for name in self.targets if self.targets.count(name) > 1]:
            raise ConfigError(f"data.targets={self.targets} has {repeated[0]!r} twice")
        if both := [name for name in self.targets if name in self.drop]:
            raise ConfigError(f"data.drop={self.drop} must not have {both[0]!r} of data.targets")
        if not self.target and not self.targets:
            raise ConfigError("data.name=csv needs data.target=COLUMN, the name of the column of classes")
        if self.missing not in ("", *MISSING_NUMBERS):
            raise ConfigError(f"data.missing={self.missing!r} must be {either(MISSING_NUMBERS)}, or empty")
        if self.target in self.drop:
            raise ConfigError(f"data.drop={self.drop} must not have data.target={self.target!r}")


# The settings that each data.name has, if they are not those of `DataConfig`
DATA: dict[str, type[DataConfig]] = {
    "arrays": PartsConfig,
    TABLE: TableConfig,
    "image_folder": ImageFolderConfig,
    "libsvm": PartsConfig,
}
# and those that it has with a data.kind
KINDS_OF_DATA: dict[tuple[str, str], type[DataConfig]] = {("image_folder", "multilabel"): LabelledImagesConfig}
