"""The settings of `tools/finetune_retrieval.py`; each key is a field here and nowhere else."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metricopt_ext.data.named_model import NamedModelConfig
from metricopt_ext.data.own_parts import given_parts
from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.besides import BesidesConfig
from metricopt_ext.experiment.brought_sections import brought_by
from metricopt_ext.experiment.config_sections import AdapterConfig, ShiftConfig, TrainingConfig, check_at_least
from metricopt_ext.experiment.method import siblings_of
from metricopt_ext.experiment.own_metric import OwnMetricConfig
from metricopt_ext.experiment.run_config import RunConfig
from metricopt_ext.experiment.siblings import EmbedderSiblingsConfig
from metricopt_ext.utils.checks import MOST_BATCH, MOST_SIZE
from metricopt_ext.utils.config import MISSING, known_keys


@dataclass
class DataConfig:
    """Where images come from and how their classes are divided."""

    # class_folders (CUB-200-2011 as distributed too), digits (scikit-learn's), omniglot, stanford_online_products, or
    # MODULE:FUNCTION, which is imported and run
    name: str = MISSING
    root: str = ""  # the folder that holds the set; not needed for digits
    # class_folders, in place of root: the folder of each part, which share no class; test may hold query and gallery.
    # Without val it is held out from train's classes by validation_share, without test half of val's are
    train: str = ""
    val: str = ""
    test: str = ""
    image_size: int = 0  # pixels per side; 0 if all images have the same size
    # class_folders: read images from disk whenever they are asked for: less memory, and each query decodes all
    stream: bool = False
    # shares of the classes for train, validation and test; stanford_online_products has its own test part
    fractions: list[float] = field(default_factory=lambda: [0.5, 0.25, 0.25])
    # names of the classes that are the test part whatever the seed; the others are divided by the first two fractions
    test_classes: list[str] = field(default_factory=list)
    last_test: bool = False  # whether the last classes by name are the test part, as is usual for CUB
    validation_share: float = 0.1  # stanford_online_products, parts of one's own: of the train classes

    @property
    def parts(self) -> dict[str, str]:
        """The path of each part of one's own; see `given_parts`."""
        return given_parts({"train": self.train, "validation": self.val, "test": self.test}, self.root)


@dataclass
class OwnDataConfig(DataConfig):
    """The same with what a function of the user's own, ``data.name=MODULE:FUNCTION``, takes."""

    folder: str = ""  # where the module is, if it is not installed
    kwargs: dict[str, Any] = field(default_factory=dict)  # the function's arguments, e.g. {file: my.npz}


@dataclass
class ModelConfig(TrainingConfig):
    """The embedder and how it is trained, by the surrogate loss."""

    # conv4, a torchvision or timm classifier, a folder of Hugging Face's (config.json), or MODULE:FUNCTION, which is
    # imported and run
    name: str = MISSING
    embedding: int = 64  # dimension of the embedding
    width: int = 48  # conv4: channels of each convolution
    trunk_weights: str = ""  # not conv4: the classifier's own weights, e.g. ImageNet's, to start training from


@dataclass
class NamedEmbedderConfig(NamedModelConfig, ModelConfig):
    """The same with what ``model.name=MODULE:FUNCTION``, ``timm/NAME`` or a folder takes."""


@dataclass
class EmbedderAdapterConfig(AdapterConfig):
    """Where phi acts, by FiLM."""

    dim: int = 64
    # what is computed of validation images before the first layer that phi acts on is kept, where that is a fourth of
    # the work or more, up to this many GiB for each running seed; 0: nothing
    keep_gib: float = 4.0


@dataclass
class LossConfig:
    """The surrogate loss: one of pytorch-metric-learning's without weights of its own, or the user's."""

    # contrastive, fast_ap, multi_similarity, triplet_margin, ..., or MODULE:FUNCTION, which is imported and called as
    # FUNCTION(embeddings, labels, **params); of a class an object is made with params
    name: str = "fast_ap"
    params: dict[str, Any] = field(default_factory=dict)  # its arguments, e.g. {margin: 0.1}
    classes: int = 16  # in a batch
    samples: int = 4  # of each class


@dataclass
class OwnLossConfig(LossConfig):
    """The same with what a loss of the user's own, ``loss.name=MODULE:FUNCTION``, takes."""

    folder: str = ""  # where the module is, if it is not installed


@dataclass
class MetricConfig(BesidesConfig):
    """What the embedding is judged by."""

    # recall or precision (the mean over ks), mean_average_precision_at_r, r_precision, mean_average_precision,
    # mean_reciprocal_rank, ndcg, or MODULE:FUNCTION, which is imported and run
    name: str = "recall"
    ks: list[int] = field(default_factory=lambda: [1, 2, 4])  # recall, precision: numbers of neighbours


@dataclass
class OwnEmbedderMetricConfig(OwnMetricConfig, MetricConfig):
    """The same with what a function of the user's own, ``metric.name=MODULE:FUNCTION``, takes."""


@dataclass
class RetrievalConfig(RunConfig):
    """A whole run of `tools/finetune_retrieval.py`."""

    CHOICES = (*RunConfig.CHOICES, "data.name", "loss.name")
    NAMED_MODEL = NamedEmbedderConfig
    OWN_METRIC = OwnEmbedderMetricConfig

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: EmbedderAdapterConfig = field(default_factory=EmbedderAdapterConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    metric: MetricConfig = field(default_factory=MetricConfig)
    shift: ShiftConfig = field(default_factory=ShiftConfig)
    siblings: EmbedderSiblingsConfig | None = field(default=None, metadata=brought_by(*siblings_of("embedders")))
    # those of RunConfig.starts; with whitening, a PCA whitening of power 1/2 that is in force unless it is surely worse
    # than the model as trained, the others have it too
    starts: list[str] = field(default_factory=lambda: ["whitening", "batchnorm"])
    population: int | None = 1  # tasks whose images are embedded together; on a CPU 1 is fastest for convolutions

    @classmethod
    def chosen(cls, choices: Mapping[str, Any]) -> RunConfig:
        """Return the defaults where these choices are made; see `config.Choosing`."""
        made = super().chosen(choices)
        if ":" in str(choices.get("data.name", "")):
            made.data = OwnDataConfig()  # type: ignore[attr-defined]
        if ":" in str(choices.get("loss.name", "")):
            made.loss = OwnLossConfig()  # type: ignore[attr-defined]
        return made

    def why_absent(self, key: str) -> str:
        """Return which choice would bring a key that this run lacks; see `config.Choosing`."""
        section, _, rest = key.partition(".")
        for kind, what in ((OwnLossConfig, "loss"), (OwnDataConfig, "data")):
            if section == what and rest.partition(".")[0] in known_keys(kind):
                return f"{key} is a key of {what}.name=MODULE:FUNCTION, your own; this run has one of the tool's"
        return super().why_absent(key)

    def data_files(self) -> list[Path]:
        """Return the file or folder of the data, or nothing."""
        return [Path(each) for each in (self.data.root, *self.data.parts.values()) if each]

    def check(self) -> None:
        """Reject what would only fail after work has been done (see `RunConfig.check`)."""
        own_test = self.data.last_test or self.data.name == "stanford_online_products"
        if self.data.test_classes and (own_test or self.data.parts):
            raise ConfigError(
                "data.test_classes chooses the test part, as data.last_test or the set's own lists do; leave it empty"
            )
        if self.data.parts and self.data.name != "class_folders":
            raise ConfigError("data.train, data.val and data.test are for data.name=class_folders")
        if isinstance(self.data, OwnDataConfig) and self.data.root:
            raise ConfigError(
                f"data.root={self.data.root}: data.name={self.data.name} is a function; give it what it reads by"
                " data.kwargs"
            )
        if self.data.stream and self.data.name != "class_folders":
            raise ConfigError("data.stream=true is for data.name=class_folders")
        if self.data.parts and self.data.last_test:
            raise ConfigError("data.last_test=true is for data.root; data.test is the test part, or half of data.val")
        if {"whitening", "lda_whitening"} <= {*self.starts}:
            raise ConfigError(
                f"starts={self.starts}: a search begins with whitening or with lda_whitening; leave out one"
            )
        if isinstance(self.metric, OwnMetricConfig):
            self.metric.check()
        if not self.adapter.keep_gib >= 0:
            raise ConfigError(f"adapter.keep_gib={self.adapter.keep_gib}: it must be at least 0")
        self.model.check()
        check_at_least(1, {"model.embedding": self.model.embedding, "model.width": self.model.width}, MOST_SIZE)
        check_at_least(2, {"loss.classes": self.loss.classes, "loss.samples": self.loss.samples}, MOST_BATCH)
        check_at_least(0, {"data.image_size": self.data.image_size}, MOST_SIZE)
        super().check()
        if self.siblings:
            self.siblings.check(self.trained_methods)
