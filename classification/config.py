"""The settings of `tools/finetune_classifier.py`, as a whole and by section; its data's are in `data_config`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metricopt_ext.classification.data_config import (
    DATA,
    KINDS_OF_DATA,
    TABLE,
    DataConfig,
    LabelledImagesConfig,
    OwnDataConfig,
    PartsConfig,
    TableConfig,
)
from metricopt_ext.classification.published import published
from metricopt_ext.classification.targets import KINDS
from metricopt_ext.data.named_model import NamedModelConfig
from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.besides import BesidesConfig
from metricopt_ext.experiment.brought_sections import brought_by, either
from metricopt_ext.experiment.config_sections import AdapterConfig, ShiftConfig, TrainingConfig, check_at_least
from metricopt_ext.experiment.method import METHODS, siblings_of
from metricopt_ext.experiment.own_metric import OwnMetricConfig
from metricopt_ext.experiment.run_config import USUAL_STARTS, RunConfig
from metricopt_ext.experiment.siblings import SiblingsConfig
from metricopt_ext.utils.checks import MOST_BATCH, MOST_SIZE
from metricopt_ext.utils.config import MISSING, known_keys

# Queries by which a threshold is tuned, and the strength of logit adjustment.
THRESHOLDS, STRENGTHS = 101, 21


@dataclass
class ModelConfig(TrainingConfig):
    """The classifier and how it is trained."""

    # tabular_mlp, small_cnn, cifar_resnetN, a torchvision or timm classifier, a folder of Hugging Face's (config.json),
    # or MODULE:FUNCTION, which is imported and run
    name: str = MISSING
    # A state dict as below, or published weights, e.g. ResNet18_Weights.IMAGENET1K_V1: torchvision downloads them, and
    # images get their preprocessing, for training too
    weights: str = ""
    batch_size: int = 100
    balanced: bool = False  # while training: every class, or label, gets an equal share of a batch


@dataclass
class NamedClassifierConfig(NamedModelConfig, ModelConfig):
    """The same with what ``model.name=MODULE:FUNCTION``, ``timm/NAME`` or a folder takes."""


@dataclass
class ClassifierAdapterConfig(AdapterConfig):
    """Where phi acts."""

    # film (layers: all norms by default), input_bias (the first linear layer) or outputs: an offset for each logit of
    # the last linear layer, and no other coordinates (dim is not used)
    kind: str = "film"
    outputs: bool = False  # film, input_bias: these offsets too, as further coordinates after the first dim


@dataclass
class MetricConfig(BesidesConfig):
    """What the classifier is judged by.

    f1, jaccard, aucpr, auc and eer are the positive class's if there are two classes, and macro (the mean over classes)
    else; macro_f1, mean_iou and balanced_accuracy, which is macro recall, are always macro; recall and precision are
    for two classes.
    """

    # accuracy, auc, aucpr, balanced_accuracy, eer, expected_cost, f1, jaccard, macro_f1, mcc, mcr, mean_iou, precision,
    # recall, top5_accuracy, worst_recall, or MODULE:FUNCTION, which is imported and run
    name: str = "accuracy"
    # expected_cost: a row for each true class, a column for each predicted one; each with a decimal point, as omegaconf
    # below 2.4 rejects 0 for 0.0
    costs: list[list[float]] = field(default_factory=list)
    # A column of the table, no input of the model: the metric is its worst value in a group of the same value there.
    # For accuracy, mcr, expected_cost, and of two classes recall, precision, f1 and jaccard
    by: str = ""

    @property
    def title(self) -> str:
        """What the metric is called in tables, if it is one of the tool's."""
        return f"worst {self.name} by {self.by}" if self.by else self.name

    def check_besides(self, metric: str) -> None:
        """Reject what can't be besides the metric; the metric of all rows can, beside its worst group."""
        super().check_besides(self.title if self.by else metric)


@dataclass
class OwnClassifierMetricConfig(OwnMetricConfig, MetricConfig):
    """The same with what a function of the user's own, ``metric.name=MODULE:FUNCTION``, takes."""

    # its predictions, as labels, probabilities or logits; empty is labels, but probabilities for what is of scores by
    # its name or its arguments', such as roc_auc_score(y_true, y_score)
    scores: str = ""
    # What else it is given, FUNCTION(labels, predictions, *columns): columns of the same rows, such as their weight or
    # region, in this order. They are no inputs of the model
    columns: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Reject bounds that are none; an empty list is for values of which none are known.

        Raises:
            ConfigError: The message names them.
        """
        if self.bounds:
            super().check()


@dataclass
class LossConfig:
    """The loss in place of cross-entropy: the classifier is trained and phi is finetuned by it."""

    # cross_entropy, cost_sensitive (by weights of the classes), or MODULE:FUNCTION, which is imported and called as
    # FUNCTION(logits, labels, **params); of a class an object is made with params
    name: str = "cross_entropy"
    params: dict[str, Any] = field(default_factory=dict)  # its arguments, e.g. {weights: [1.0, 3.0]}


@dataclass
class OwnLossConfig(LossConfig):
    """The same with what a loss of the user's own, ``loss.name=MODULE:FUNCTION``, takes."""

    folder: str = ""  # where the module is, if it is not installed


@dataclass
class ClassifierShiftConfig(ShiftConfig):
    """How validation and test differ from what the loss sees: in their images, or in their class ratio."""

    kind: str = "none"  # none, image or class_ratio
    ratio: list[float] = field(default_factory=list)  # class_ratio: share of each class, above 0, summing to 1


@dataclass
class ClassificationConfig(RunConfig):
    """A whole run of `tools/finetune_classifier.py`."""

    CHOICES = (*RunConfig.CHOICES, "data.name", "data.kind", "loss.name")
    NAMED_MODEL = NamedClassifierConfig
    OWN_METRIC = OwnClassifierMetricConfig

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: ClassifierAdapterConfig = field(default_factory=ClassifierAdapterConfig)
    metric: MetricConfig = field(default_factory=MetricConfig)
    shift: ClassifierShiftConfig = field(default_factory=ClassifierShiftConfig)
    loss: LossConfig | None = None  # there if loss.name is
    siblings: SiblingsConfig | None = field(default=None, metadata=brought_by(*siblings_of("classifiers")))
    # see `RunConfig`; no gain of batchnorm_line was found for embedders, and detectors keep their statistics frozen
    starts: list[str] = field(default_factory=lambda: [*USUAL_STARTS, "batchnorm_line"])
    batch_size: int = 100  # of the loss while finetuning
    balanced: bool = True  # of these batches too every class gets an equal share; model.balanced is for training

    @property
    def rows(self) -> dict[str, int]:
        """Those of ``methods`` that bring no section; see `RunConfig.rows`."""
        return {**super().rows, **self.rows_on_logits}

    @property
    def rows_on_logits(self) -> dict[str, int]:
        """Those among them that tune constants on a model's outputs."""
        if self.data.kind != "classes":
            return {"label_thresholds": self.queries}
        return {"threshold": THRESHOLDS, "class_offsets": self.queries, "logit_adjustment_tuned": STRENGTHS}

    @classmethod
    def chosen(cls, choices: Mapping[str, Any]) -> "RunConfig":
        """Return the defaults where these choices are made; see `config.Choosing`."""
        made, name = super().chosen(choices), choices.get("data.name")
        if isinstance(name, str):
            known = OwnDataConfig if ":" in name else DATA.get(name, DataConfig)
            made.data = KINDS_OF_DATA.get((name, str(choices.get("data.kind"))), known)(name)  # type: ignore[attr-defined]
        if "loss.name" in choices:
            own = ":" in str(choices["loss.name"])
            made.loss = OwnLossConfig() if own else LossConfig()  # type: ignore[attr-defined]
        if choices.get("data.kind") == "multilabel":
            made.starts.append("thresholds")
        if choices.get("metric.name") == "expected_cost":
            made.starts.append("costs")
        return made

    def why_absent(self, key: str) -> str:
        """Return which choice would bring a key that this run lacks; see `config.Choosing`."""
        section, _, rest = key.partition(".")
        if section == "loss" and (not rest or rest in known_keys(LossConfig)):
            return f"{key} is a key of loss.name=NAME; this run has cross-entropy"
        for kind, what in ((OwnLossConfig, "loss"), (OwnDataConfig, "data")):
            if section == what and rest.partition(".")[0] in known_keys(kind):
                return f"{key} is a key of {what}.name=MODULE:FUNCTION, your own; this run has one of the tool's"
        bringing = [name for name, kind in DATA.items() if section == "data" and rest in known_keys(kind)]
        if not bringing and section == "data" and rest in known_keys(LabelledImagesConfig):
            return (
                f"{key} is a key of data.name=image_folder with data.kind=multilabel; this run has"
                f" data.name={self.data.name} and data.kind={self.data.kind}"
            )
        if bringing:
            return f"{key} is a key of data.name={' or '.join(bringing)}; this run has data.name={self.data.name}"
        return super().why_absent(key)

    @property
    def metric_columns(self) -> list[str]:
        """The columns that the metric is given, in order."""
        if self.metric.by:
            return [self.metric.by]
        return self.metric.columns if isinstance(self.metric, OwnClassifierMetricConfig) else []

    @property
    def shown_columns(self) -> str:
        """The key that names these columns, with its value, for messages."""
        return f"metric.by={self.metric.by}" if self.metric.by else f"metric.columns={self.metric_columns}"

    def _check_kind(self) -> None:
        """Reject what only classes have, where something else is predicted."""
        data = self.data
        if data.kind not in KINDS:
            raise ConfigError(
                f"data.kind={data.kind!r} must be {either(KINDS)}; tune a model of anything else in Python, by"
                " metricopt_ext.tune_model and a metric of your own"
            )
        if data.kind == "multilabel" and not isinstance(data, TableConfig | LabelledImagesConfig | OwnDataConfig):
            raise ConfigError(
                f"data.kind=multilabel needs data.name={TABLE} with data.targets, data.name=image_folder with a file of"
                f" labels, or data.name=MODULE:FUNCTION; {data.name} has one label"
            )
        if data.kind == "classes":
            return
        if self.loss and not isinstance(self.loss, OwnLossConfig):
            raise ConfigError(f"loss.name={self.loss.name} is for classes, not for data.kind={data.kind}")
        if data.positive:
            raise ConfigError(f"data.positive={data.positive!r} is for two classes, not for data.kind={data.kind}")
        if self.trained_methods:
            raise ConfigError(f"methods=[{self.trained_methods[0]}] is for classes, not for data.kind={data.kind}")
        if data.imbalance != 1 or data.largest_class or self.shift.kind == "class_ratio":
            raise ConfigError(
                f"data.imbalance, data.largest_class and shift.kind=class_ratio are for classes; data.kind={data.kind}"
            )

    def _check_columns(self) -> None:
        """Reject columns that can't be given to the metric, or not everywhere."""
        columns = self.metric_columns
        if repeated := [name for name in columns if columns.count(name) > 1]:
            raise ConfigError(f"{self.shown_columns} has {repeated[0]!r} twice")
        targets = [self.data.target, *self.data.targets] if isinstance(self.data, TableConfig) else []
        if both := [name for name in targets if name in columns]:
            raise ConfigError(
                f"{self.shown_columns} has data.target={both[0]!r}, which the metric is given anyway"
                + ("; metric.name=worst_recall is by class" if self.metric.by else "")
            )
        asking = [name for name in self.trained_methods if METHODS[name].needs == "batch metric"]
        if columns and asking:
            raise ConfigError(
                f"methods=[{asking[0]}] asks the metric on batches of train examples, whose columns are not known;"
                f" leave out {self.shown_columns} or it"
            )

    def data_files(self) -> list[Path]:
        """Return the file or folder of the data, or of each part of it, or nothing."""
        parts = self.data.parts.values() if isinstance(self.data, PartsConfig) else ()
        images = self.data.images if isinstance(self.data, LabelledImagesConfig) else ""
        return [Path(each) for each in (self.data.root, *parts, images) if each]

    def check(self) -> None:
        """Reject what would only fail after work has been done (see `RunConfig.check`)."""
        check_at_least(1, {"batch_size": self.batch_size, "model.batch_size": self.model.batch_size}, MOST_BATCH)
        self._check_kind()
        if isinstance(self.data, TableConfig):
            self.data.check()
        if isinstance(self.data, OwnDataConfig) and self.data.root:
            raise ConfigError(
                f"data.root={self.data.root}: data.name={self.data.name} is a function; give it what it reads by"
                " data.kwargs"
            )
        if isinstance(self.data, PartsConfig):
            _ = self.data.parts  # refuses what does not go together
        check_at_least(0, {"data.image_size": self.data.image_size}, MOST_SIZE)
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
        if isinstance(self.metric, OwnMetricConfig):
            self.metric.check()
        self._check_columns()
        self.model.check()
        super().check()
        if self.siblings:
            self.siblings.check(self.trained_methods)

    def least_dim(self) -> int:
        """Return the dimension of phi as far as it is known before the model; of offsets there is one at least."""
        return 1 if self.adapter.kind == "outputs" else self.adapter.dim
