"""The settings of methods. A key exists only for what a chosen method reads.

- ``method`` holds those of the method that ``method.name`` chooses.
- A ``metric.name=MODULE:FUNCTION`` brings the keys of a metric of the user's own to ``metric``.
- Each of ``methods``, which run beside it, brings a section (`brought_by`); several may share one.
- What every run reads, such as ``finetune``, is always there.

A key of what is not chosen is refused by the name of the choice that would bring it (`choice_of`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.brought_sections import either, methods_bringing
from metricopt_ext.methods.paper.joint import AlgorithmS1
from metricopt_ext.methods.paper.recipe import Algorithm1, Recipe
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.utils.checks import check_above, check_integer
from metricopt_ext.utils.config import config_section, known_keys
from metricopt_ext.value.learning import Learner, NeuralLearner
from metricopt_ext.value.reptile import ReptileLearner

LEARNERS: dict[str, Learner] = {"neural": NeuralLearner(), "reptile": ReptileLearner()}


@dataclass
class FinetuneConfig:
    """Finetuning of phi by the loss alone: that of a start and of baselines, and of the runs that others learn from."""

    steps: int = Recipe.steps  # T
    lr: float = Recipe.lr  # of the loss step; Guided ES as a baseline steps at it, too

    def check(self) -> None:
        """Reject what can't be run.

        Raises:
            ConfigError: A value is out of range.
        """
        with config_section("finetune"):
            check_integer(2, steps=self.steps)
            check_above(0, lr=self.lr)


@dataclass
class MethodConfig:
    """How MetricOpt works; each of `METHODS` adds its own keys."""

    name: str = ""

    def build(self, finetune: FinetuneConfig) -> GuidedTrustRegion | Recipe:
        """Return the method.

        Args:
            finetune: Length and rate of the loss's finetuning.

        Raises:
            ConfigError: A value is out of range.
        """
        raise NotImplementedError


@dataclass
class SearchConfig(MethodConfig):
    """A search of phi from one start, from 20 queries up: `metricopt_ext.GuidedTrustRegion`."""

    name: str = "search"

    def build(self, finetune: FinetuneConfig) -> GuidedTrustRegion:
        """Return the search; see `MethodConfig.build`."""
        return GuidedTrustRegion()


@dataclass
class RecipeConfig(MethodConfig):
    """f from many finetuning runs, for many starts: the fields of `metricopt_ext.Recipe` that a run may set; see there.

    ``finetune`` gives steps and lr.
    """

    name: str = "recipe"
    evals: int = Recipe.evals
    rounds: int = Recipe.rounds
    start_std: float = Recipe.start_std
    trials: int = Recipe.trials
    folds: int = Recipe.folds
    learner: str = "neural"  # or reptile

    def build(self, finetune: FinetuneConfig) -> Recipe:
        """Return the recipe; see `MethodConfig.build`."""
        with config_section("method"):
            if self.learner not in LEARNERS:
                raise ValueError(f"learner is {self.learner}; it must be one of {', '.join(LEARNERS)}")
            own = {**vars(self), **vars(finetune), "learner": LEARNERS[self.learner]}
            return Recipe(**{key: value for key, value in own.items() if key != "name"})


@dataclass
class PaperSettings:
    """What a run may change of Algorithm 1 as printed; ``finetune`` gives steps (T) and lr."""

    SECTION: ClassVar[str] = "paper"

    evals: int = Recipe.evals  # K

    def build(self, finetune: FinetuneConfig) -> Algorithm1:
        """Return the algorithm; see `MethodConfig.build`."""
        with config_section(self.SECTION):
            return Algorithm1(steps=finetune.steps, evals=self.evals, lr=finetune.lr)


@dataclass
class PaperConfig(PaperSettings, MethodConfig):
    """The paper's Algorithm 1 as printed."""

    SECTION: ClassVar[str] = "method"

    name: str = "paper"


METHODS: dict[str, type[MethodConfig]] = {"search": SearchConfig, "recipe": RecipeConfig, "paper": PaperConfig}


def method_named(name: Any) -> MethodConfig:
    """Return the settings of one of `METHODS`, with their defaults.

    Raises:
        ConfigError: There is no such method.
    """
    if name not in [*METHODS]:
        raise ConfigError(f"method.name={name!r}: it must be one of {either([*METHODS])}")
    return METHODS[name]()


def choice_of(config: Any, key: str) -> Iterator[str]:
    """Yield the choice that would bring a key to a run's config, and what the run has in its place; nothing if none."""
    names = [name for name, each in METHODS.items() if key in {f"method.{known}" for known in known_keys(each)}]
    if names:
        yield f"method.name={either(names)}"
        yield f"method.name={config.method.name}"
    elif methods := methods_bringing(config, key):
        yield f"{either(methods)} among methods"
        yield f"methods=[{','.join(config.methods)}]"


@dataclass
class LearnedConfig:
    """How the method ``metricopt_learned`` learns its optimizer; see `AlgorithmS1`.

    ``finetune`` gives steps (T), and the lr of the loss-only finetune that it is compared with.
    """

    evals: int = Recipe.evals  # K
    tasks: int = AlgorithmS1.tasks  # collected in a meta-iteration; 1 as printed
    updates: int = AlgorithmS1.updates  # of the optimizer in a meta-iteration; 1 as printed

    def build(self, finetune: FinetuneConfig) -> AlgorithmS1:
        """Return the algorithm.

        Raises:
            ConfigError: A value is out of range.
        """
        with config_section("learned"):
            return AlgorithmS1(**vars(self), steps=finetune.steps, lr=finetune.lr)
