"""The settings of `tools/finetune_detector.py`; each key is a field here and nowhere else."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metricopt_ext.data.named_model import NamedModelConfig
from metricopt_ext.data.own_parts import given_parts
from metricopt_ext.detection.layouts import part_at
from metricopt_ext.detection.metric import kind_of
from metricopt_ext.detection.scenes import SceneShift, write_scenes
from metricopt_ext.detection.tables import Kind
from metricopt_ext.detection.torchvision_toolkit import TorchvisionToolkit
from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.besides import BesidesConfig
from metricopt_ext.experiment.config_sections import AdapterConfig, check_at_least
from metricopt_ext.experiment.own_metric import OwnMetricConfig
from metricopt_ext.experiment.run_config import RunConfig
from metricopt_ext.utils.checks import MOST_BATCH, MOST_SIZE
from metricopt_ext.utils.config import MISSING, default_of, known_keys

SPLITS = ("train", "val", "test")


# Settings of inference that settings.names may have (`settings.detection_settings`, and Detectron2's).
SETTINGS = ("size", "score_thresh", "detections", "soft_nms", "flip", "multi_scale", "nms")


@dataclass
class DataConfig:
    """Where images and boxes come from: what all kinds have, and all that scenes have."""

    name: str = MISSING  # scenes (of scikit-learn's digits, drawn by the tool), voc, coco or yolo
    # scenes: how many for each part; others: maximum number of images for each part, drawn by the seed, 0: all
    images: list[int] = field(default_factory=lambda: [0, 0, 0])
    size: int = 0  # longer side in pixels of images in memory, larger ones are scaled down; 0: unchanged
    stream: bool = False  # read images from disk whenever they are asked for: less memory, and each query decodes all

    @property
    def parts(self) -> dict[str, str]:
        """The path of each part of one's own, of which there are none."""
        return {}


@dataclass
class FilesConfig(DataConfig):
    """Images and annotations in files (data.name=coco or yolo)."""

    # voc: the tree; coco: the folder of the images, or of their folders; yolo: data.yaml's folder
    root: str = ""
    # voc: names of image lists; coco: annotation files; all: names of the parts' folders, or of data.yaml's parts. An
    # empty second or third one: validation or test is held out from train
    splits: list[str] = field(default_factory=lambda: [*SPLITS])
    # In place of root and splits, for each part: coco: an annotation file, or Roboflow's folder; voc: an image list, or
    # a folder; yolo: a folder of images. Classes are compared by name
    train: str = ""
    val: str = ""
    test: str = ""
    validation_share: float = 0.1  # of train, if the second split is empty, and as many again if the third is

    @property
    def parts(self) -> dict[str, str]:
        """The path of each part of one's own; see `given_parts`."""
        return given_parts({"train": self.train, "validation": self.val, "test": self.test}, self.root)

    def check(self) -> None:
        """Reject what can't be read.

        Raises:
            ConfigError: A value is out of range, or there are both parts and a root.
        """
        given_parts({"train": self.train, "validation": self.val, "test": self.test}, self.root)
        if not 0 < self.validation_share < 1:
            raise ConfigError(f"data.validation_share={self.validation_share}: it must be between 0 and 1")


@dataclass
class VOCConfig(FilesConfig):
    """The same of Pascal VOC's trees (data.name=voc)."""

    more_train: list[str] = field(default_factory=list)  # further trees, whose split of train's name joins train
    classes: list[str] = field(default_factory=list)  # their names; empty: all in the tree


SCENES = "scenes"
DATA: dict[str, type[DataConfig]] = {SCENES: DataConfig, "voc": VOCConfig, "coco": FilesConfig, "yolo": FilesConfig}


@dataclass
class SceneConfig:
    """How scenes are drawn (data.name=scenes)."""

    size: int = default_of(write_scenes, "size")  # pixels per side
    # minimum and maximum in a scene
    digits: list[int] = field(default_factory=lambda: list(default_of(write_scenes, "digits_per_scene")))
    # minimum and maximum pixels per side of a pasted digit
    scale: list[int] = field(default_factory=lambda: list(default_of(write_scenes, "scale")))


@dataclass
class SceneShiftConfig:
    """How validation and test scenes differ from what the loss sees; the defaults change nothing."""

    contrast: float = SceneShift.contrast  # factor on the distance from middle grey, in (0, 1]
    noise_std: float = SceneShift.noise_std  # standard deviation of pixel noise
    scale: float = SceneShift.scale  # factor on the size of the digits

    @property
    def is_none(self) -> bool:
        """Whether nothing changes."""
        return self == SceneShiftConfig()


@dataclass
class ModelConfig:
    """The detector and how it is trained before anything else happens."""

    # transformers: the folder of a detector and its image processor (save_pretrained). torchvision:
    # small_fpn, or torchvision's own name of a detector, e.g. fasterrcnn_resnet50_fpn,
    # fasterrcnn_mobilenet_v3_large_320_fpn, maskrcnn_resnet50_fpn_v2,
    # retinanet_resnet50_fpn, fcos_resnet50_fpn, ssd300_vgg16, ssdlite320_mobilenet_v3_large; or MODULE:FUNCTION, which
    # is imported and run, for a detector of your own with torchvision's interface
    name: str = TorchvisionToolkit.name
    # torchvision: shorter side in pixels to which the network scales images, unless the longer one would then exceed
    # the second number; SSDs have a size of their own
    min_size: int = TorchvisionToolkit.min_size
    max_size: int = TorchvisionToolkit.max_size
    # torchvision: maximum number of proposals per image to detect boxes in; 0: the detector's own number
    proposals: int = TorchvisionToolkit.proposals
    # torchvision: file of its own detectors' weights, for COCO or trained further, to start training from
    coco_weights: str = ""
    config_file: str = ""  # detectron2: the YAML file that describes the detector
    opts: list[str] = field(default_factory=list)  # detectron2: KEY, VALUE, ... that override it
    # A checkpoint to use instead of training (.safetensors, or a file of torch without pickled code) ...
    weights: str = ""
    entry: str = ""  # ... and the state dict's key in it, and in coco_weights; with dots; empty: found
    steps: int = 700  # 0 takes the weights as the toolkit gives them (detectron2: MODEL.WEIGHTS among opts)
    batch_size: int = 8
    lr: float = 0.05  # peak rate of SGD with momentum


@dataclass
class NamedDetectorConfig(NamedModelConfig, ModelConfig):
    """The same with what ``model.name=MODULE:FUNCTION`` takes."""

    NAMES = "MODULE:FUNCTION"

    @classmethod
    def are_of(cls, name: str) -> bool:
        """Whether a model of this name has these settings; a folder of transformers' has none."""
        return ":" in name


@dataclass
class DetectorAdapterConfig(AdapterConfig):
    """Where phi acts, by FiLM: at the layers, or else at a placement."""

    placement: str = "roi_head"  # a name that the toolkit knows; see its PLACEMENTS
    dim: int = 32
    # Features and proposals are computed once where phi can't change them, while they fit into this many GiB, for each
    # running seed; 0: never
    keep_gib: float = 4.0


@dataclass
class MetricConfig(BesidesConfig):
    """What the detector is judged by."""

    # AP50; AP, the mean over the IoUs 0.5, 0.55, ..., 0.95, with definition=coco COCO's AP; AP75; F1, at IoU 0.5 of all
    # that is found, mean over classes; segm/AP50, segm/AP and segm/AP75 of masks, with definition=coco and
    # data.name=coco; or MODULE:FUNCTION, which is imported and run
    name: str = "AP50"
    definition: str = "coco"  # AP50, AP, AP75, F1: coco, voc_11_point (VOC 2007) or voc (all points, 2010 on)


@dataclass
class OwnDetectorMetricConfig(OwnMetricConfig, MetricConfig):
    """The same with what a function of the user's own, ``metric.name=MODULE:FUNCTION``, takes."""


@dataclass
class DetectionConfig(RunConfig):
    """A whole run of `tools/finetune_detector.py`."""

    OWN_METRIC = OwnDetectorMetricConfig
    CHOICES = (*RunConfig.CHOICES, "data.name")
    NAMED_MODEL = NamedDetectorConfig

    toolkit: str = "torchvision"  # or detectron2, or transformers
    data: DataConfig = field(default_factory=DataConfig)
    scene: SceneConfig | None = None  # these two are there with data.name=scenes
    shift: SceneShiftConfig | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: DetectorAdapterConfig = field(default_factory=DetectorAdapterConfig)
    metric: MetricConfig = field(default_factory=MetricConfig)
    classification_loss: str = TorchvisionToolkit.classification_loss  # of the box head; or ap
    batch_size: int = 4  # of finetuning
    population: int | None = 1  # detectors compute one task at a time

    def __post_init__(self) -> None:
        """Add the sections that scenes and ``methods`` bring."""
        if self.data.name == SCENES:
            self.scene, self.shift = self.scene or SceneConfig(), self.shift or SceneShiftConfig()
        super().__post_init__()

    @classmethod
    def chosen(cls, choices: Mapping[str, Any]) -> "RunConfig":
        """Return the defaults where these choices are made; see `config.Choosing`."""
        made: Any = super().chosen(choices)
        if isinstance(name := choices.get("data.name"), str):
            made.data = DATA.get(name, VOCConfig)(name)
            made.__post_init__()
        return made  # type: ignore[no-any-return]

    def why_absent(self, key: str) -> str:
        """Return which choice would bring a key that this run lacks; see `config.Choosing`."""
        section, _, rest = key.partition(".")
        bringing = [name for name, kind in DATA.items() if section == "data" and rest in known_keys(kind)]
        if section in ("scene", "shift"):
            bringing = [SCENES]
        if bringing:
            return f"{key} is a key of data.name={' or '.join(bringing)}; this run has data.name={self.data.name}"
        return super().why_absent(key)

    @property
    def kind(self) -> Kind:
        """What is judged, and trained besides boxes: masks, if the metric or what counts besides is theirs."""
        masks = "segm" in map(kind_of, (self.metric.name, *self.metric.besides))
        return "segm" if masks else "bbox"

    def data_files(self) -> list[Path]:
        """Return the trees of the data, or the annotation files and the folder of the images."""
        data = self.data
        if not isinstance(data, FilesConfig):
            return []
        if parts := data.parts:
            found = [part_at(Path(path), data.name) for path in parts.values()]
            return list(dict.fromkeys(file for part in found for file in part.files))
        annotations = data.splits if data.name == "coco" else []
        files = [each for each in annotations if each and Path(each).is_file()]
        more = data.more_train if isinstance(data, VOCConfig) else []
        return [Path(each) for each in (data.root, *more, *files) if each]

    def check(self) -> None:
        """Reject what would only fail after work has been done (see `RunConfig.check`)."""
        if isinstance(self.metric, OwnMetricConfig):
            self.metric.check()
        if self.kind != "bbox" and self.data.name != "coco":
            raise ConfigError(
                f"masks (segm) are read with data.name=coco, from COCO's files of annotations, not with"
                f" data.name={self.data.name}"
            )
        check_at_least(1, {"batch_size": self.batch_size, "model.batch_size": self.model.batch_size}, MOST_BATCH)
        check_at_least(0, {"model.steps": self.model.steps})
        check_at_least(0, {"data.size": self.data.size}, MOST_SIZE)
        if self.population not in (1, None):
            raise ConfigError(f"population={self.population}: detectors compute one task at a time, so it must be 1")
        if not self.model.lr > 0:
            raise ConfigError(f"model.lr={self.model.lr}: it must be above 0")
        if not self.adapter.keep_gib >= 0:
            raise ConfigError(f"adapter.keep_gib={self.adapter.keep_gib}: it must be at least 0")
        threes = {"data.images": self.data.images, "data.splits": getattr(self.data, "splits", SPLITS)}
        for name, value in threes.items():
            if len(value) != 3:
                raise ConfigError(f"{name}={value}: it must have three entries, for train, validation and test")
        if min(self.data.images) < 0:
            raise ConfigError(f"data.images={self.data.images}: each must be at least 0")
        if isinstance(self.data, FilesConfig):
            self.data.check()
        scene = self.scene or SceneConfig()
        for name, value in (("scene.digits", scene.digits), ("scene.scale", scene.scale)):
            if len(value) != 2:
                raise ConfigError(f"{name}={value}: it must be two numbers, the minimum and the maximum")
        super().check()
