"""Our part of a Detectron2 config: the node METRICOPT."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_args

import yaml
from detectron2.config import CfgNode, get_cfg

from metricopt_ext.detection.ap50 import Definition
from metricopt_ext.detection.ap_loss import ClassificationLoss
from metricopt_ext.errors import ConfigError
from metricopt_ext.methods.recipe import LEAST_TASKS


@dataclass(frozen=True)
class Settings:
    """The keys of METRICOPT, in lower case here.

    Attributes:
        enabled: Whether phi is finetuned; False is ordinary training.
        data: Sets to register, see `datasets.register_entries`.
        data_root: Where relative folders in ``data`` are.
        classes: Names of the classes of the registered VOC folders; empty for all that a folder's annotations name.
        scenes: Folder, below ``data_root`` if relative, that the scenes of `scenes.write_scenes` are written to where
            they are not there yet; empty writes none.
        scenes_images: Numbers of scenes in the splits train, val and test.
        scenes_shift: Contrast, standard deviation of the noise, and size of the digits in val and test, see
            `scenes.SceneShift`; (1, 0, 1) for the same as in train.
        scenes_seed: Draws the scenes.
        definition: Of AP50: ``voc_11_point``, ``voc`` or ``coco``.
        classification_loss: Of the box head, in ordinary training too: the detector's own ``cross_entropy``, or ``ap``
            (`ap_loss.ap_loss`).
        layers: Where FiLM goes: names of `placements.PLACEMENTS`, or patterns of module names.
        dim: Dimension d of phi.
        seed: Draws FiLM's matrices, the start, the observed steps, the validation images and what steps sample.
        start_std: Standard deviation of phi's start; 0 starts from the model as it was trained.
        value_function: File of f, which MetricOpt then follows; empty follows the loss alone.
        steps: Number T of finetuning steps, in place of ``SOLVER.MAX_ITER``.
        lr: Rate of the loss step, constant: the solver's schedule and gradient clipping are for ordinary training.
        metric_step: Length of the first metric step in units of f's data radius.
        loss_weight: Weight of the loss step beside the metric step.
        trust: Trust radius in units of f's data radius.
        history: Number of past loss gradients that guide the search.
        validation: Name of the set that AP50 is evaluated on during training; empty evaluates nothing.
        validation_images: How many of its images, drawn at random; 0 for all.
        evals: How many of the T + 1 points AP50 is evaluated at, both ends included.
        trajectories: Folder that the run's trajectory is added to, for fitting f; empty keeps none.
        round: The trajectory's round: 0 where the loss alone is followed; later ones follow f even if it is not to be
            trusted, to correct it.
        index: The trajectory's index, which also draws the start; another one for each run.
        rounds: Rounds of meta-training: the first follows the loss alone, each later one the f fitted so far.
        tasks: Runs in each round.
    """

    enabled: bool = False
    data: tuple[str, ...] = ()
    data_root: str = "datasets"
    classes: tuple[str, ...] = ()
    scenes: str = ""
    scenes_images: tuple[int, ...] = (600, 200, 400)
    scenes_shift: tuple[float, ...] = (1.0, 0.0, 1.0)
    scenes_seed: int = 0
    definition: Definition = "voc"
    classification_loss: ClassificationLoss = "cross_entropy"
    layers: tuple[str, ...] = ("backbone",)
    dim: int = 128
    seed: int = 0
    start_std: float = 0.0
    value_function: str = ""
    steps: int = 200
    lr: float = 0.1
    metric_step: float = 0.15
    loss_weight: float = 0.3
    trust: float = 1.2
    history: int = 3
    validation: str = ""
    validation_images: int = 0
    evals: int = 10
    trajectories: str = ""
    round: int = 0
    index: int = 0
    rounds: int = 7
    tasks: int = 4

    def check(self) -> None:
        """Check the keys against each other.

        Raises:
            ConfigError: A value is out of range, or a key lacks another one.
        """
        at_least_0 = ("seed", "start_std", "lr", "metric_step", "loss_weight", "validation_images", "round", "index")
        for least, names in ((0, at_least_0), (1, ("dim", "steps", "history", "rounds")), (LEAST_TASKS, ("tasks",))):
            for name in names:
                if getattr(self, name) < least:
                    raise ConfigError(f"METRICOPT.{name.upper()} is {getattr(self, name)}; it must be at least {least}")
        if not self.trust > 0:
            raise ConfigError(f"METRICOPT.TRUST is {self.trust}; it must be above 0")
        if not 2 <= self.evals <= self.steps + 1:
            raise ConfigError(
                f"METRICOPT.EVALS is {self.evals}; it must be from 2 to METRICOPT.STEPS + 1 = {self.steps + 1}"
            )
        for name, values in (("definition", Definition), ("classification_loss", ClassificationLoss)):
            if getattr(self, name) not in get_args(values):
                raise ConfigError(
                    f"METRICOPT.{name.upper()} is {getattr(self, name)!r}; it must be one of {get_args(values)}"
                )
        for name, what in (("scenes_shift", "contrast, noise, size"), ("scenes_images", "train, val, test")):
            if len(getattr(self, name)) != 3:
                raise ConfigError(
                    f"METRICOPT.{name.upper()} is {getattr(self, name)}; it must be three numbers: {what}"
                )
        if self.trajectories and not self.validation:
            raise ConfigError(
                "METRICOPT.TRAJECTORIES needs METRICOPT.VALIDATION, the set that AP50 is evaluated on; hold it out of"
                " both training and test"
            )


def add_metricopt_config(cfg: CfgNode) -> None:
    """Add the node METRICOPT, with the defaults of `Settings`."""
    cfg.METRICOPT = CfgNode({field.name.upper(): field.default for field in fields(Settings)})


def metricopt_settings(cfg: CfgNode) -> Settings:
    """Return the node METRICOPT as settings.

    Raises:
        ConfigError: A value is impossible.
    """
    settings = Settings(**{name.lower(): value for name, value in cfg.METRICOPT.items()})
    settings.check()
    return settings


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> CfgNode:
    """Return Detectron2's defaults and ours, a config file over them, and overrides over that.

    Args:
        path: A YAML file of Detectron2; its METRICOPT node may be missing.
        overrides: ``[KEY, VALUE, KEY, VALUE, ...]``.

    Raises:
        ConfigError: The file can't be read, or a key or value in it is unknown or of another type.
    """
    cfg = get_cfg()
    add_metricopt_config(cfg)
    try:
        cfg.merge_from_file(str(path), allow_unsafe=False)  # no Python objects in YAML
        cfg.merge_from_list(list(overrides))
    except (OSError, KeyError, ValueError, AssertionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return cfg
