"""Sections of the settings that the tools of all tasks share; each key is a field here and nowhere else."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from metricopt_ext.data.shift import ImageShift
from metricopt_ext.errors import ConfigError
from metricopt_ext.methods.guard import CONFIDENCE
from metricopt_ext.tasks.settings import Settings
from metricopt_ext.utils.checks import check_above, check_finite
from metricopt_ext.utils.config import config_section
from metricopt_ext.utils.words import nearest

MOST_RATE = 1e9  # at which no training goes well, and numbers of 32 bits last
USUAL = "usual"  # settings that are worth it, in place of their names


@dataclass
class AdapterConfig:
    """Where phi acts, by FiLM."""

    layers: list[str] = field(default_factory=list)  # name patterns; empty: all norms
    dim: int = 16


@dataclass
class TrainingConfig:
    """How a model is trained before anything else happens."""

    # A checkpoint to use instead of training (.safetensors, or a file of torch without pickled code) ...
    weights: str = ""
    entry: str = ""  # ... and the state dict's key in it, with dots into further dictionaries; empty: found
    epochs: int = 10
    lr: float = 1e-3  # peak rate, with a one-cycle schedule
    augment: bool = False  # images: random flips and shifts by up to 4 pixels while training

    def check(self) -> None:
        """Reject what can't be trained with.

        Raises:
            ConfigError: A value is out of range.
        """
        with config_section("model"):
            check_above(0, lr=self.lr)
        check_at_least(0, {"model.lr": self.lr}, MOST_RATE)
        check_at_least(1, {"model.epochs": self.epochs})


@dataclass
class ShiftConfig:
    """How validation and test images differ from those that the loss sees; see `ImageShift`."""

    kind: str = "none"  # none or image
    contrast: float = ImageShift.contrast  # factor on each image's contrast, in (0, 1]
    noise_std: float = ImageShift.noise_std  # standard deviation of pixel noise
    rotation_degrees: float = ImageShift.rotation_degrees  # angles are uniform within plus or minus this

    def image_shift(self) -> ImageShift:
        """Return the shift of images.

        Raises:
            ValueError: A value is out of range.
        """
        return ImageShift(self.contrast, self.noise_std, self.rotation_degrees)


@dataclass
class GuardConfig:
    """When the guard keeps what was found; see `methods.guard`."""

    confidence: float = CONFIDENCE  # how sure it must be that a gain is not chance, in [0.5, 1)


@dataclass
class SettingsConfig:
    """Settings of inference that the search tunes before phi; see `tasks.settings.Settings`."""

    names: list[str] = field(default_factory=lambda: [USUAL])  # which, best first; usual: those that are worth it
    inference: float = 1.0  # factor on inference time that they may take, at least 1

    @property
    def chosen(self) -> list[str]:
        """The names, none for the usual ones."""
        return [] if self.names == [USUAL] else list(self.names)

    def check_known(self, known: Sequence[str]) -> None:
        """Reject names that a task does not have.

        Args:
            known: The names of its settings; none of a task without any.

        Raises:
            ConfigError: One is not among them.
        """
        if not known:
            raise ConfigError("methods has settings, but this task has no settings of inference; leave it out")
        for name in self.chosen:
            if name not in known:
                raise ConfigError(f"settings.names={self.names}: there is no {name!r}{nearest(name, list(known))}")

    def limit(self, settings: Settings) -> Settings:
        """Return settings within these limits."""
        return settings.limited(inference=self.inference)

    def check(self) -> None:
        """Reject values that are out of range.

        Raises:
            ConfigError: One is.
        """
        with config_section("settings"):
            check_finite(inference=self.inference)
        check_at_least(1, {"settings.inference": self.inference})
        if not self.names or (USUAL in self.names and len(self.names) > 1):
            raise ConfigError(f"settings.names={self.names}: it must be [{USUAL}], or name each")


def check_at_least(least: int, values: Mapping[str, float | None], most: float = math.inf) -> None:
    """Reject settings below a minimum, or above a maximum; None, meaning no value, passes.

    Raises:
        ConfigError: A value is; the message names its key.
    """
    for name, value in values.items():
        if value is not None and not least <= value <= most:
            bound = f"at least {least}" if not value > most else f"at most {most}"
            raise ConfigError(f"{name}={value}: it must be {bound}")
