"""The settings of `tools/finetune_classifier.py`; each key is a field here and nowhere else."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metricopt_ext.classification.published import published
from metricopt_ext.classification.tables import read_csv
from metricopt_ext.errors import ConfigError
from metricopt_ext.evidence.method_config import brought_by, either
from metricopt_ext.evidence.run_config import AdapterConfig, RunConfig, ShiftConfig, TrainingConfig, check_at_least
from metricopt_ext.evidence.siblings import SiblingsConfig
from metricopt_ext.methods.recipe_settings import checked_setting
from metricopt_ext.methods.siblings.registry import FOR_EMBEDDINGS, SIBLINGS
from metricopt_ext.search.optimizer import LOSS_WEIGHT, METRIC_STEP
from metricopt_ext.tasks.own_metric import OwnMetricConfig
from metricopt_ext.utils.checks import check_above, check_integer
from metricopt_ext.utils.config import MISSING, config_section, default_of, known_keys
from metricopt_ext.value.loading import load_value_function

TABLE = "csv"  # the data.name that brings the keys of a table
MISSING_NUMBERS = ("mean", "median", "indicator")
FOR_CLASSIFIERS = tuple(name for name in SIBLINGS if name not in FOR_EMBEDDINGS)


@dataclass
class DataConfig:
    """Where examples come from and how they are divided."""

    # a9a, cifar10, csv, image_folder, libsvm, or scikit-learn's breast_cancer, digits, iris, wine
    name: str = MISSING
    root: str = ""  # the file, or the folder that holds the set; not needed for scikit-learn's
    positive: str = ""  # two classes: the one that metrics count as 1; empty: the last by number or alphabet
    image_size: int = 0  # image_folder: pixels per side; 0 if all images have the same size
    # images: what pixels in [0, 1] are normalised by, one number for each channel, as your own checkpoint was trained;
    # empty: not at all, but as published weights need it (model.weights=ResNet18_Weights.IMAGENET1K_V1)
    mean: list[float] = field(default_factory=list)
    std: list[float] = field(default_factory=list)
    fractions: list[float] = field(default_factory=lambda: [0.7, 0.1, 0.2])  # train, validation, test
    validation_size: int = 5000  # cifar10: held out from its train set
    # What the metric is evaluated on, and every rival that is given its inputs or labels: validation, or train: as many
    # train examples, which the losses see too (paper, Fig. S4)
    metric_on: str = "validation"
    standardise: bool = False  # tabular: zero mean and unit variance by train statistics
    # Long-tailed train data: its class counts fall geometrically, in the order of classes, from the first class's to
    # 1 / imbalance of it; validation and test stay as they are. 1: they stay as they are in train too
    imbalance: float = 1.0
    largest_class: int = 0  # with imbalance: train examples of the first class; 0: as many as there are


@dataclass
class TableConfig(DataConfig):
    """The same with what a table, ``data.name=csv``, needs."""

    target: str = ""  # the column of classes
    drop: list[str] = field(default_factory=list)  # columns to leave out
    categories: list[str] = field(default_factory=list)  # columns whose cells are values as they stand, such as codes
    max_categories: int = default_of(read_csv, "max_categories")  # most values of a text column, each one input
    # What numeric columns lack, or have no number for, is filled in by train's mean or median, or by the mean with one
    # more input that says where (indicator); empty: it is refused
    missing: str = ""
    delimiter: str = default_of(read_csv, "delimiter")  # the character between cells; \t for a tab; empty: found
    decimal: str = default_of(read_csv, "decimal")  # . or , with thousands parted by the other; empty: ., none parted
    encoding: str = default_of(read_csv, "encoding")  # any of Python's; empty: utf-8, or utf-16 by its mark

    def check(self) -> None:
        """Reject what can't be read.

        Raises:
            ConfigError: A value is out of range.
        """
        check_at_least(2, {"data.max_categories": self.max_categories})
        if not self.target:
            raise ConfigError("data.name=csv needs data.target=COLUMN, the name of the column of classes")
        if self.missing not in ("", *MISSING_NUMBERS):
            raise ConfigError(f"data.missing={self.missing!r} must be {either(MISSING_NUMBERS)}, or empty")
        if self.decimal not in ("", ".", ","):
            raise ConfigError(f"data.decimal={self.decimal!r} must be . or , or empty")
        if self.decimal and self.decimal == self.delimiter:
            raise ConfigError(f"data.decimal={self.decimal!r} and data.delimiter must differ")
        if self.target in self.drop:
            raise ConfigError(f"data.drop={self.drop} must not have data.target={self.target!r}")
        if self.encoding:
            try:
                "".encode(self.encoding)
            except (LookupError, ValueError) as error:
                raise ConfigError(f"data.encoding={self.encoding!r}: {error}") from error


@dataclass
class ModelConfig(TrainingConfig):
    """The classifier and how it is trained."""

    name: str = MISSING  # tabular_mlp, small_cnn, or a torchvision classifier
    # A state dict as below, or published weights, e.g. ResNet18_Weights.IMAGENET1K_V1: torchvision downloads them, and
    # images get their preprocessing, for training too
    weights: str = ""
    batch_size: int = 100
    balanced: bool = False  # while training: every class gets an equal share of a batch
    bfloat16: bool = False  # images: train in half the precision, on processors that have it in about half the time


@dataclass
class ClassifierAdapterConfig(AdapterConfig):
    """Where phi acts."""

    # film (layers: all norms by default), input_bias (the first linear layer) or outputs: an offset for each logit of
    # the last linear layer, and no other coordinates (dim is not used)
    kind: str = "film"
    outputs: bool = False  # film, input_bias: these offsets too, as further coordinates after the first dim
    temperature: bool = False  # one more coordinate, a factor on all logits; with outputs
    # A layer of a model that runs one after the other, e.g. stage3 of cifar_resnetN, or block3 of cifar_resnet9. The
    # layers before it stay as trained, and what they compute is kept in memory for each example; layers are named from
    # there on. Empty: all of the model runs each time
    keep_before: str = ""

    @property
    def acts_on_logits(self) -> bool:
        """Whether phi has offsets, whose number only the model says."""
        return self.outputs or self.kind == "outputs"


@dataclass
class MetricConfig:
    """What the classifier is judged by.

    f1, jaccard, aucpr, auc and eer are the positive class's if there are two classes, and macro (the mean over classes)
    else; macro_f1, mean_iou and balanced_accuracy, which is macro recall, are always macro.
    """

    # accuracy, auc, aucpr, balanced_accuracy, eer, expected_cost, f1, jaccard, macro_f1, mcc, mcr, mean_iou,
    # top5_accuracy, worst_recall, or MODULE:FUNCTION, which is imported and run
    name: str = "accuracy"
    # expected_cost: cost[true][predicted], each with a decimal point, as omegaconf below 2.4 rejects 0 for 0.0
    costs: list[list[float]] = field(default_factory=list)
    prior: list[float] = field(default_factory=list)  # expected_cost: weight of each class


@dataclass
class OwnClassifierMetricConfig(OwnMetricConfig, MetricConfig):
    """The same with what a function of the user's own, ``metric.name=MODULE:FUNCTION``, takes."""

    scores: str = "labels"  # its predictions, as labels, probabilities or logits


@dataclass
class ClassifierShiftConfig(ShiftConfig):
    """How validation and test differ from what the loss sees: in their images, or in their class ratio."""

    kind: str = "none"  # none, image or class_ratio
    ratio: list[float] = field(default_factory=list)  # class_ratio: share of each class, above 0, summing to 1


@dataclass
class TransferConfig:
    """Reuse of another run's value function, without queries, next to the same f rotated at random (a placebo)."""

    value_function: str = ""  # a value_function.safetensors for phi of the same dimension
    loss_weight: float = LOSS_WEIGHT
    metric_step: float = METRIC_STEP


@dataclass
class SecondRoundConfig:
    """Finetuning of theta under the tuned phi, and of phi again (paper, Table 4, last row).

    Batches are balanced by class if those of the first training are (``model.balanced``).
    """

    epochs: int = 1  # of training theta
    lr: float = 1e-4  # peak rate of Adam with a one-cycle schedule
    batch_size: int = 100
    augment: bool = False


@dataclass
class ClassificationConfig(RunConfig):
    """A whole run of `tools/finetune_classifier.py`."""

    CHOICES = (*RunConfig.CHOICES, "data.name")
    OWN_METRIC = OwnClassifierMetricConfig

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: ClassifierAdapterConfig = field(default_factory=ClassifierAdapterConfig)
    metric: MetricConfig = field(default_factory=MetricConfig)
    shift: ClassifierShiftConfig = field(default_factory=ClassifierShiftConfig)
    siblings: SiblingsConfig | None = field(default=None, metadata=brought_by(*FOR_CLASSIFIERS))
    transfer: TransferConfig | None = field(default=None, metadata=brought_by("transfer"))
    second_round: SecondRoundConfig | None = field(default=None, metadata=brought_by("second_round"))
    batch_size: int = 100  # of the loss while finetuning
    balanced: bool = True  # of these batches too every class gets an equal share; model.balanced is for training

    @classmethod
    def chosen(cls, choices: Mapping[str, Any]) -> "RunConfig":
        """Return the defaults where these choices are made; see `config.Choosing`."""
        made, name = super().chosen(choices), choices.get("data.name")
        if isinstance(name, str):
            made.data = (TableConfig if name == TABLE else DataConfig)(name)  # type: ignore[attr-defined]
        return made

    def why_absent(self, key: str) -> str:
        """Return which choice would bring a key that this run lacks; see `config.Choosing`."""
        section, _, rest = key.partition(".")
        if section == "data" and rest in known_keys(TableConfig):
            return f"{key} is a key of data.name={TABLE}; this run has data.name={self.data.name}"
        return super().why_absent(key)

    def data_files(self) -> list[Path]:
        """Return the file or folder of the data, or nothing."""
        return [Path(self.data.root)] if self.data.root else []

    def check(self) -> None:
        """Reject what would only fail after work has been done (see `RunConfig.check`).

        Raises:
            FileFormatError: The value function to transfer can't be read.
            ValueFunctionError: It was fitted for another dimension.
        """
        check_at_least(1, {"batch_size": self.batch_size, "model.batch_size": self.model.batch_size})
        if isinstance(self.data, TableConfig):
            self.data.check()
        check_at_least(0, {"data.image_size": self.data.image_size})
        if len(self.data.mean) != len(self.data.std) or any(std <= 0 for std in self.data.std):
            raise ConfigError(
                f"data.mean={self.data.mean} and data.std={self.data.std}: both must have one number for each channel,"
                " those of data.std above 0"
            )
        if published(self.model.name, self.model.weights) is not None:
            if self.data.name != "image_folder":
                raise ConfigError(
                    f"model.weights={self.model.weights} needs data.name=image_folder, whose images it crops"
                )
            if self.data.image_size or self.data.mean:
                raise ConfigError(
                    f"model.weights={self.model.weights} has sizes, a mean and a standard deviation of its own; leave"
                    " out data.image_size, data.mean and data.std"
                )
        if self.data.metric_on not in ("validation", "train"):
            raise ConfigError(f"data.metric_on={self.data.metric_on!r} must be validation or train")
        if isinstance(self.metric, OwnMetricConfig):
            self.metric.check()
        self.model.check()
        if self.adapter.temperature and not self.adapter.acts_on_logits:
            raise ConfigError("adapter.temperature=true needs adapter.outputs=true, or adapter.kind=outputs")
        if self.transfer:
            with config_section("transfer"):
                checked_setting((self.transfer.loss_weight, self.transfer.metric_step))
            if not self.transfer.value_function:
                raise ConfigError("methods=[transfer] needs transfer.value_function=FILE, of another run")
        if self.second_round:
            self.needs_recipe("second_round")
            with config_section("second_round"):
                check_integer(1, epochs=self.second_round.epochs, batch_size=self.second_round.batch_size)
                check_above(0, lr=self.second_round.lr)
        from_scratch = self.siblings is not None and self.siblings.trains == "scratch"
        if self.adapter.keep_before and (self.second_round or from_scratch):
            raise ConfigError(
                f"adapter.keep_before={self.adapter.keep_before} leaves the layers before it as trained, but"
                " methods=[second_round] and siblings.trains=scratch train all of them; leave that out, or set phi or"
                " model"
            )
        super().check()
        if self.siblings:
            self.siblings.check(self.trained_methods)
        if self.transfer:
            load_value_function(self.transfer.value_function, None if self.adapter.acts_on_logits else self.adapter.dim)

    def least_dim(self) -> int:
        """Return the dimension of phi as far as it is known before the model; of offsets there is one at least."""
        return 1 if self.adapter.kind == "outputs" else self.adapter.dim

    def check_dim(self, dim: int) -> None:
        """Reject what does not fit the dimension of phi, once the model says what that is.

        Args:
            dim: The dimension.

        Raises:
            ConfigError, BudgetError, ValueFunctionError: As from `check`.
        """
        self.check_queries(dim)
        if self.transfer:
            load_value_function(self.transfer.value_function, dim)
