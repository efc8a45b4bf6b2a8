"""The settings of methods. A key exists only for what a chosen method reads.

- ``method`` holds those of the method that ``method.name`` chooses.
- A ``metric.name=MODULE:FUNCTION`` brings the keys of a metric of the user's own to ``metric``.
- Each of ``methods``, which run beside it, brings a section (`brought_by`); several may share one.
- What every run reads, such as ``finetune``, is always there.

A key of what is not chosen is refused by the name of the choice that would bring it (`choice_of`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.brought_sections import either, methods_bringing
from metricopt_ext.methods.algorithm1 import Algorithm1
from metricopt_ext.methods.algorithm_s1 import AlgorithmS1
from metricopt_ext.methods.recipe import Recipe
from metricopt_ext.search.learned_objective import LearnedObjective
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.utils.checks import check_above, check_integer
from metricopt_ext.utils.config import config_section, known_keys
from metricopt_ext.value.learners import Learner, NeuralLearner, RidgeLearner
from metricopt_ext.value.objective import sampled_triplets
from metricopt_ext.value.observations import Labeller
from metricopt_ext.value.reptile import ReptileLearner

DEFAULT = Recipe()
LEARNERS: dict[str, Learner] = {"neural": NeuralLearner(), "ridge": RidgeLearner(), "reptile": ReptileLearner()}
DEFAULT_LEARNERS = [name for name, learner in LEARNERS.items() if learner in DEFAULT.learners]


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

    def build(self, finetune: FinetuneConfig) -> GuidedTrustRegion | Recipe | Algorithm1:
        """Return the method.

        Args:
            finetune: Length and rate of the loss's finetuning.

        Raises:
            ConfigError: A value is out of range.
        """
        raise NotImplementedError


@dataclass
class SearchConfig(MethodConfig):
    """A search of phi from one start, from 20 queries up: the fields of `metricopt_ext.GuidedTrustRegion`; see there.

    Radii are in units of the probed scale.
    """

    name: str = "search"
    design: int = GuidedTrustRegion.design  # largest number of points of the first design
    batch: int = GuidedTrustRegion.batch  # queries between two fits
    radius: float = GuidedTrustRegion.radius  # largest first radius of the region
    least_radius: float = GuidedTrustRegion.least_radius
    largest_radius: float = GuidedTrustRegion.largest_radius
    grow: float = GuidedTrustRegion.grow  # factor on it after success
    shrink: float = GuidedTrustRegion.shrink  # factor on it after failure
    boldness: float = GuidedTrustRegion.boldness  # largest tau

    def build(self, finetune: FinetuneConfig) -> GuidedTrustRegion:
        """Return the search; see `MethodConfig.build`."""
        with config_section("method"):
            return GuidedTrustRegion(**{key: value for key, value in vars(self).items() if key != "name"})


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
    labels: str = "observed"  # observed, linear, gp (interpolated if that shows skill) or gp_always
    learners: list[str] = field(default_factory=DEFAULT_LEARNERS.copy)  # any of neural, ridge, reptile

    def build(self, finetune: FinetuneConfig) -> Recipe:
        """Return the recipe; see `MethodConfig.build`."""
        with config_section("method"):
            own = {**vars(self), **vars(finetune), "labels": labeller(self.labels), "learners": self._learners()}
            return Recipe(**{key: value for key, value in own.items() if key != "name"})

    def _learners(self) -> tuple[Learner, ...]:
        unknown = [name for name in self.learners if name not in LEARNERS]
        if unknown or not self.learners:
            raise ValueError(f"learners is {self.learners}; it must name one or more of {', '.join(LEARNERS)}")
        return tuple(LEARNERS[name] for name in self.learners)


def labeller(name: str) -> Labeller:
    """Return a labeller by its name in the settings.

    Raises:
        ValueError: There is none of that name.
    """
    if name == "observed":
        return DEFAULT.labels
    from metricopt_ext.value.labels import GaussianProcessLabels, LinearLabels

    known: dict[str, Labeller] = {
        "linear": LinearLabels(),
        "gp": GaussianProcessLabels(),
        "gp_always": GaussianProcessLabels(always=True),
    }
    if name not in known:
        raise ValueError(f"labels is {name!r}; it must be observed, {', '.join(known)}")
    return known[name]


@dataclass
class PaperSettings:
    """What a run may change of Algorithm 1 as printed, part by part; ``finetune`` gives steps (T) and lr."""

    SECTION: ClassVar[str] = "paper"

    evals: int = Recipe.evals  # K
    ends: str = Algorithm1.ends  # of the T steps: observed, or random: all K are drawn from 1 ... T
    start_std: float = Algorithm1.start_std
    optimizer: str = Algorithm1.optimizer  # sgd or adam
    metric_rate: float = Algorithm1.metric_rate  # alpha_t
    history: int = Algorithm1.history  # k of Eq. 3
    history_grows: bool = Algorithm1.history_grows  # false: Eq. 3 divides by k from the first step on
    count: int = Algorithm1.count  # P of Eq. 4
    variance: float = Algorithm1.variance  # s^2 of Eq. 4
    labels: str = "gp_always"  # observed, linear, gp (interpolated if that shows skill) or gp_always
    kernel: str = "rbf_constant"  # of the Gaussian process; rbf: without the constant
    # true: of an observation, noise included; posterior: without it; false: all labels are equally certain (Fig. 3b)
    sigma: str = "true"
    # reptile (as printed), reptile_mixed (many tasks in a meta-batch), offline (Fig. 3b), neural or ridge
    learner: str = "reptile"
    gamma: float = ReptileLearner.paper().objective.gamma  # weight of the regression in Eq. 2, of learners but ridge
    beta: float = ReptileLearner.paper().objective.beta  # of the ordinal term; 0: none (Fig. 3a)

    def build(self, finetune: FinetuneConfig) -> Algorithm1:
        """Return the algorithm; see `MethodConfig.build`."""
        with config_section(self.SECTION):
            return Algorithm1(
                steps=finetune.steps,
                evals=self.evals,
                ends=self.ends,  # type: ignore[arg-type]
                lr=finetune.lr,
                start_std=self.start_std,
                optimizer=self.optimizer,  # type: ignore[arg-type]
                metric_rate=self.metric_rate,
                history=self.history,
                history_grows=self.history_grows,
                count=self.count,
                variance=self.variance,
                labels=self._labels(),
                learner=self._learner(),
            )

    def _labels(self) -> Labeller:
        from metricopt_ext.value.labels import GaussianProcessLabels, WithoutSigma

        labels, sigma = labeller(self.labels), str(self.sigma).lower()  # YAML's true and false arrive as True and False
        one_of("kernel", self.kernel, ("rbf_constant", "rbf"))
        one_of("sigma", sigma, ("true", "posterior", "false"))
        if isinstance(labels, GaussianProcessLabels):
            labels = replace(labels, levels=self.kernel == "rbf_constant", noisy=sigma != "posterior")
        elif self.kernel == "rbf" or sigma == "posterior":
            wrong = "kernel is 'rbf'" if self.kernel == "rbf" else "sigma is 'posterior'"
            raise ValueError(f"{wrong}, but labels is {self.labels!r}; only gp and gp_always have a Gaussian process")
        return WithoutSigma(labels) if sigma == "false" else labels

    def _learner(self) -> Learner:
        objective = replace(ReptileLearner.paper().objective, gamma=self.gamma, beta=self.beta)
        known: dict[str, Learner] = {
            "reptile": replace(ReptileLearner.paper(), objective=objective),
            "reptile_mixed": ReptileLearner(objective=objective),
            "offline": replace(NeuralLearner.offline(), objective=replace(objective, miner=sampled_triplets)),
            "neural": NeuralLearner(objective=replace(objective, miner=sampled_triplets)),
            "ridge": RidgeLearner(),
        }
        one_of("learner", self.learner, [*known])
        return known[self.learner]


def one_of(name: str, value: str, choices: Sequence[str]) -> None:
    """Reject a value that is none of the choices.

    Raises:
        ValueError: It is none of them; the message lists them.
    """
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")


@dataclass
class PaperConfig(PaperSettings, MethodConfig):
    """The paper's Algorithm 1 as printed, but for what these keys change."""

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

    queries: int = 0  # metric queries in all; 0: as many as MetricOpt has
    evals: int = Recipe.evals  # K
    start_std: float = AlgorithmS1.start_std
    tasks: int = AlgorithmS1.tasks  # collected in a meta-iteration; 1 as printed
    updates: int = AlgorithmS1.updates  # of the optimizer in a meta-iteration; 1 as printed
    pairs: int = AlgorithmS1.pairs  # antithetic pairs of perturbed weights for each update
    rate: float = AlgorithmS1.rate  # Adam's, on the optimizer's weights
    variance: float = AlgorithmS1.variance  # epsilon^2 of Eq. 7
    estimator: str = AlgorithmS1.estimator  # combined, reparameterised, or score (for a loss without 2nd derivatives)
    metric_weight: float = LearnedObjective.metric_weight  # lambda of Eq. 6
    sharpness: float = 0.0  # beta of Eq. 6; 0: T/2
    sees_loss: bool = AlgorithmS1.sees_loss  # false: for trainers that only call step()
    sees_metric: bool = AlgorithmS1.sees_metric  # true costs evals - 1 queries for each start
    hidden: int = AlgorithmS1.hidden  # units
    step: float = AlgorithmS1.step  # typical change of a coordinate of phi in a step
    labels: str = "observed"  # observed, linear, gp or gp_always, as for the recipe
    mixed: bool = True  # f is adapted to batches that mix tasks; false: to one task at a time by SGD, as printed

    def build(self, finetune: FinetuneConfig) -> AlgorithmS1:
        """Return the algorithm.

        Raises:
            ConfigError: A value is out of range.
        """
        with config_section("learned"):
            check_integer(0, queries=self.queries)
            same = ("tasks", "updates", "pairs", "rate", "variance", "sees_loss", "sees_metric")
            return AlgorithmS1(
                steps=finetune.steps,
                evals=self.evals,
                start_std=self.start_std,
                lr=finetune.lr,
                objective=LearnedObjective(self.metric_weight, self.sharpness or None),
                estimator=self.estimator,  # type: ignore[arg-type]
                value=ReptileLearner() if self.mixed else ReptileLearner.paper(),
                labels=labeller(self.labels),
                hidden=self.hidden,
                step=self.step,
                **{name: getattr(self, name) for name in same},
            )


@dataclass
class RefinedConfig:
    """How the method ``refined`` works: CMA-ES, continuing from a recipe's end point."""

    queries: int = 100
