"""The settings that the tools of all tasks share; each key is a field here and nowhere else."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from metricopt_ext.data.images import MAX_PIXELS, Limits
from metricopt_ext.data.labelled import MAX_BYTES
from metricopt_ext.data.shift import ImageShift
from metricopt_ext.data.training import OPTIMIZERS
from metricopt_ext.errors import BudgetError, ConfigError
from metricopt_ext.methods.guard import CONFIDENCE, deviates
from metricopt_ext.methods.paper import Algorithm1
from metricopt_ext.methods.recipe import Recipe
from metricopt_ext.methods.siblings.algorithm_s1 import AlgorithmS1
from metricopt_ext.search.direct import CMAES, GuidedES
from metricopt_ext.search.learned_objective import LearnedObjective
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.utils.checks import check_above, check_finite, check_integer
from metricopt_ext.utils.config import config_section
from metricopt_ext.value.learners import Learner, NeuralLearner, RidgeLearner
from metricopt_ext.value.objective import sampled_triplets
from metricopt_ext.value.observations import Labeller
from metricopt_ext.value.reptile import ReptileLearner

DEFAULT = Recipe()
STARTS = ("loss_finetune", "batchnorm", "prior", "prior_twice")
VARIANTS = ("metricopt_paper", "metricopt_learned")  # the paper's own forms, run beside the strategy
LEARNERS: dict[str, Learner] = {"neural": NeuralLearner(), "ridge": RidgeLearner(), "reptile": ReptileLearner()}
DEFAULT_LEARNERS = [name for name, learner in LEARNERS.items() if learner in DEFAULT.learners]


@dataclass
class RecipeConfig:
    """The fields of `metricopt_ext.Recipe` that a run may set; see there."""

    steps: int = Recipe.steps
    lr: float = Recipe.lr
    evals: int = Recipe.evals
    rounds: int = Recipe.rounds
    start_std: float = Recipe.start_std
    trials: int = Recipe.trials
    folds: int = Recipe.folds
    labels: str = "observed"  # observed, linear, gp (interpolated if that shows skill) or gp_always
    learners: list[str] = field(default_factory=DEFAULT_LEARNERS.copy)  # any of neural, ridge, reptile
    adapt_queries: int = Recipe.adapt_queries  # spent along each start's finetuning to adapt f to it; 0 uses f as it is

    def build(self) -> Recipe:
        """Return the recipe.

        Raises:
            ConfigError: A value is out of range.
        """
        try:
            return Recipe(**{**vars(self), "labels": self._labeller(), "learners": self._learners()})
        except ValueError as error:
            raise ConfigError(f"recipe: {error}") from error

    def _learners(self) -> tuple[Learner, ...]:
        unknown = [name for name in self.learners if name not in LEARNERS]
        if unknown or not self.learners:
            raise ValueError(f"learners is {self.learners}; it must name one or more of {', '.join(LEARNERS)}")
        return tuple(LEARNERS[name] for name in self.learners)

    def _labeller(self) -> Labeller:
        return labeller(self.labels)


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
class PaperConfig:
    """What strategy=paper may change of Algorithm 1 as printed, part by part; the rest is the recipe's.

    ``recipe`` gives steps (T), evals (K), lr and start_std.
    """

    optimizer: str = Algorithm1.optimizer  # sgd or adam
    metric_rate: float = Algorithm1.metric_rate  # alpha_t
    history: int = Algorithm1.history  # k of Eq. 3
    count: int = Algorithm1.count  # P of Eq. 4
    variance: float = Algorithm1.variance  # s^2 of Eq. 4
    labels: str = "gp_always"  # observed, linear, gp (interpolated if that shows skill) or gp_always
    sigma: bool = True  # false: all labels count as equally certain (Fig. 3b)
    # reptile (as printed), reptile_mixed (many tasks in a meta-batch), offline (Fig. 3b), neural or ridge
    learner: str = "reptile"
    gamma: float = ReptileLearner.paper().objective.gamma  # weight of the regression in Eq. 2, of learners but ridge
    beta: float = ReptileLearner.paper().objective.beta  # of the ordinal term; 0: none (Fig. 3a)

    def build(self, recipe: Recipe) -> Algorithm1:
        """Return the algorithm.

        Raises:
            ConfigError: A value is out of range.
        """
        with config_section("paper"):
            labels = labeller(self.labels)
            if not self.sigma:
                from metricopt_ext.value.labels import WithoutSigma

                labels = WithoutSigma(labels)
            return Algorithm1(
                steps=recipe.steps,
                evals=recipe.evals,
                lr=recipe.lr,
                start_std=recipe.start_std,
                optimizer=self.optimizer,  # type: ignore[arg-type]
                metric_rate=self.metric_rate,
                history=self.history,
                count=self.count,
                variance=self.variance,
                labels=labels,
                learner=self._learner(),
            )

    def _learner(self) -> Learner:
        objective = replace(ReptileLearner.paper().objective, gamma=self.gamma, beta=self.beta)
        known: dict[str, Learner] = {
            "reptile": replace(ReptileLearner.paper(), objective=objective),
            "reptile_mixed": ReptileLearner(objective=objective),
            "offline": replace(NeuralLearner.offline(), objective=replace(objective, miner=sampled_triplets)),
            "neural": NeuralLearner(objective=replace(objective, miner=sampled_triplets)),
            "ridge": RidgeLearner(),
        }
        if self.learner not in known:
            raise ValueError(f"learner is {self.learner!r}; it must be one of {', '.join(known)}")
        return known[self.learner]


@dataclass
class LearnedConfig:
    """How the method ``metricopt_learned`` learns its optimizer; see `AlgorithmS1`.

    ``recipe`` gives steps (T), evals (K), start_std, and the lr of the loss-only finetune that it is compared with.
    """

    queries: int = 0  # metric queries in all; 0: as many as MetricOpt has
    tasks: int = AlgorithmS1.tasks  # collected in a meta-iteration; 1 as printed
    updates: int = AlgorithmS1.updates  # of the optimizer in a meta-iteration; 1 as printed
    pairs: int = AlgorithmS1.pairs  # antithetic pairs of perturbed weights for each update
    rate: float = AlgorithmS1.rate  # Adam's, on the optimizer's weights
    variance: float = AlgorithmS1.variance  # epsilon^2 of Eq. 7
    estimator: str = AlgorithmS1.estimator  # combined, reparameterised, or score (for a loss without 2nd derivatives)
    metric_weight: float = LearnedObjective.metric_weight  # lambda of Eq. 6
    sharpness: float = 0.0  # beta of Eq. 6; 0: T/2
    coordinatewise: bool = AlgorithmS1.coordinatewise  # false: one network sees the whole of phi
    sees_loss: bool = AlgorithmS1.sees_loss  # false: for trainers that only call step()
    sees_metric: bool = AlgorithmS1.sees_metric  # true costs evals - 1 queries for each start
    hidden: int = AlgorithmS1.hidden  # units
    step: float = AlgorithmS1.step  # typical change of a coordinate of phi in a step
    labels: str = "observed"  # observed, linear, gp or gp_always, as for the recipe
    mixed: bool = True  # f is adapted to batches that mix tasks; false: to one task at a time by SGD, as printed

    def build(self, recipe: Recipe) -> AlgorithmS1:
        """Return the algorithm.

        Raises:
            ConfigError: A value is out of range.
        """
        with config_section("learned"):
            check_integer(0, queries=self.queries)
            same = ("tasks", "updates", "pairs", "rate", "variance", "coordinatewise", "sees_loss", "sees_metric")
            return AlgorithmS1(
                steps=recipe.steps,
                evals=recipe.evals,
                start_std=recipe.start_std,
                lr=recipe.lr,
                objective=LearnedObjective(self.metric_weight, self.sharpness or None),
                estimator=self.estimator,  # type: ignore[arg-type]
                value=ReptileLearner() if self.mixed else ReptileLearner.paper(),
                labels=labeller(self.labels),
                hidden=self.hidden,
                step=self.step,
                **{name: getattr(self, name) for name in same},
            )


@dataclass
class AdapterConfig:
    """Where phi acts, by FiLM."""

    layers: list[str] = field(default_factory=list)  # name patterns; empty: all norms
    dim: int = 16


@dataclass
class TrainingConfig:
    """How a model is trained before anything else happens."""

    weights: str = ""  # a state dict (.safetensors, or .pt without pickled code) to use instead of training
    epochs: int = 10
    optimizer: str = "adamw"  # or sgd, with Nesterov's momentum; which is better for convolutions in long trainings
    lr: float = 1e-3  # peak rate, with a one-cycle schedule
    weight_decay: float = 0.0  # adamw: share of the rate by which weights shrink in a step; sgd: factor of the penalty
    augment: bool = False  # images: random flips and shifts by up to 4 pixels while training

    def check(self) -> None:
        """Reject what can't be trained with.

        Raises:
            ConfigError: A value is out of range.
        """
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(f"model.optimizer={self.optimizer!r} is none of {', '.join(OPTIMIZERS)}")
        with config_section("model"):
            check_above(0, lr=self.lr)
            check_finite(weight_decay=self.weight_decay)
        check_at_least(1, {"model.epochs": self.epochs})
        check_at_least(0, {"model.weight_decay": self.weight_decay})


@dataclass
class ShiftConfig:
    """How validation and test images differ from those that the loss sees; see `ImageShift`."""

    kind: str = "none"  # none or image
    contrast: float = ImageShift.contrast  # factor on each image's contrast, in (0, 1]
    brightness: float = ImageShift.brightness  # added to every pixel, in [-1, 1]
    noise_std: float = ImageShift.noise_std  # standard deviation of pixel noise
    rotation_degrees: float = ImageShift.rotation_degrees  # angles are uniform within plus or minus this

    def image_shift(self) -> ImageShift:
        """Return the shift of images.

        Raises:
            ValueError: A value is out of range.
        """
        return ImageShift(self.contrast, self.brightness, self.noise_std, self.rotation_degrees)


@dataclass
class EvaluationConfig:
    """How the metric is evaluated on the validation data; see `Metric`."""

    failures: int = 0  # evaluations that may fail: the worst value so far is taken in their place
    timeout: float | None = None  # seconds that an evaluation may take; null: no limit


@dataclass
class RunConfig:
    """The settings that every task's tool shares; a task adds its data, model and metric."""

    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    paper: PaperConfig = field(default_factory=PaperConfig)
    learned: LearnedConfig = field(default_factory=LearnedConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    # How MetricOpt works: search (guided trust region, from 20 queries up), recipe (f from many finetuning runs, for
    # many starts) or paper (Algorithm 1 as printed).
    strategy: str = "search"
    # What the search may begin from besides the model as it is, where it applies; each costs a query. loss_finetune,
    # batchnorm (re-estimated on the validation inputs), prior and prior_twice (classifiers with outputs in phi: logits
    # adjusted by the class shares, with strength 1 and 2).
    starts: list[str] = field(default_factory=lambda: list(STARTS))
    guard_confidence: float = CONFIDENCE  # how sure the guard must be that a gain is not chance, in [0.5, 1)
    queries: int = 600  # MetricOpt's metric queries in total
    population: int = 32  # tasks computed together
    best_evals: int = 51  # queries of the rival "loss finetune + best"
    # Of each direct search, Guided ES and CMA-ES, from the same start; same: as many as MetricOpt spent; 0: none.
    search_queries: int | str = 0
    # Further methods to run: the paper's own metricopt_paper and metricopt_learned; siblings of MetricOpt, sl_u, sl_s,
    # sl_r, reloss, reloss_only and ala for classifiers, ala_mixture and ala_focal for embedders.
    methods: list[str] = field(default_factory=list)
    refine_queries: int = 0  # of CMA-ES continuing from MetricOpt's end point; 0: none
    seeds: int = 5  # number of seeds, each a fresh split, model and value function
    seed: int = 0  # the first of them
    pictures: bool = True  # of the first seed's value function; its landscape evaluates the metric another 169 times
    workers: int = 1  # seeds that run in parallel, each in its own process
    threads: int = 1  # CPU threads of each
    device: str = "auto"  # auto, cpu, cuda, cuda:0, ...
    # What files of data may take, so that a small one can't fill the memory. They have no influence on results.
    max_bytes: int = MAX_BYTES  # of memory, for a set as it is loaded, or a part of one that comes in parts
    max_pixels: int = MAX_PIXELS  # of an image as it is stored
    # The kernels and number of threads that every processor has, deterministic algorithms on a GPU; slower. Whether
    # processors of different makers then give the same digits is not tested.
    deterministic: bool = False

    @property
    def limits(self) -> Limits:
        """Return what loaders of images take as their bounds."""
        return Limits(max_bytes=self.max_bytes, max_pixels=self.max_pixels)

    def check(self) -> None:
        """Reject what would only fail after work has been done.

        Raises:
            ConfigError: A value is out of range.
            BudgetError: There are too few queries; the message says how many are needed.
        """
        check_at_least(1, {"max_bytes": self.max_bytes, "max_pixels": self.max_pixels})
        check_at_least(1, {n: getattr(self, n) for n in ("population", "best_evals", "seeds", "workers", "threads")})
        check_at_least(1, {"adapter.dim": self.adapter.dim})
        check_at_least(0, {"seed": self.seed})
        with config_section("guard_confidence"):
            deviates(self.guard_confidence)
        with config_section("evaluation"):
            check_integer(0, failures=self.evaluation.failures)
            check_above(0, timeout=self.evaluation.timeout)
        unknown = [name for name in self.starts if name not in STARTS]
        if unknown:
            raise ConfigError(f"starts={self.starts}: {unknown[0]!r} is none of {', '.join(STARTS)}")
        self._check_methods()
        if self.refine_queries and self.strategy != "recipe":
            raise ConfigError(f"refine_queries={self.refine_queries} continue from a recipe's end: set strategy=recipe")
        self.check_queries(self.least_dim())

    def _check_methods(self) -> None:
        known = self.further_methods()
        unknown = [name for name in self.methods if name not in known]
        if unknown:
            raise ConfigError(f"methods={self.methods}: {unknown[0]!r} is none of {', '.join(known)} in this tool")

    def further_methods(self) -> tuple[str, ...]:
        """Return what ``methods`` may name."""
        return VARIANTS

    @property
    def trained_methods(self) -> list[str]:
        """Those of ``methods`` that train a copy of the model by the siblings' protocol."""
        return [name for name in self.methods if name not in VARIANTS]

    def least_dim(self) -> int:
        """Return the dimension of phi as far as it is known before the model."""
        return self.adapter.dim

    def check_queries(self, dim: int) -> None:
        """Reject numbers of queries that are too small for phi.

        Args:
            dim: The dimension of phi.

        Raises:
            ConfigError: A search on the true metric has too few.
            BudgetError: MetricOpt has too few; the message says how many are needed.
        """
        searches = {"search_queries": (GuidedES(), CMAES()), "refine_queries": (CMAES(),)}
        phi = f"adapter.dim={dim}" if dim == self.adapter.dim else f"phi of dimension {dim}"
        for name, used in searches.items():
            value, least = getattr(self, name), max(search.least_queries(dim) for search in used)
            if name == "search_queries":
                value, least = self._searched(), least + (len(self.starts) + 1 if self.strategy == "search" else 0)
            if value and value < least:
                raise ConfigError(f"{name}={value}: it must be at least {least} for {phi}, or 0")
        if "metricopt_learned" in self.methods:
            self.learned.build(self.recipe.build()).iterations(self.learned.queries or self.queries)
        if "metricopt_paper" in self.methods:
            self.paper.build(self.recipe.build()).tasks(self.queries)
        strategy: Any = self.build_strategy()
        if self.strategy == "recipe":
            strategy.tasks_per_round(self.queries, dim)
        elif self.strategy == "paper":
            strategy.tasks(self.queries)
        elif self.queries < (least := strategy.least_queries(dim) + len(self.starts)):
            raise BudgetError(f"queries={self.queries}: the search needs at least {least} for these settings")

    def _searched(self) -> int:
        if isinstance(self.search_queries, str) and self.search_queries != "same":
            raise ConfigError(f"search_queries={self.search_queries!r}: it must be a number, or same")
        return self.queries if isinstance(self.search_queries, str) else self.search_queries

    def build_strategy(self) -> GuidedTrustRegion | Recipe | Algorithm1:
        """Return how MetricOpt works.

        Raises:
            ConfigError: The strategy is unknown, or a value is out of range.
        """
        recipe = self.recipe.build()
        if self.strategy == "search":
            return GuidedTrustRegion()
        if self.strategy == "recipe":
            return recipe
        if self.strategy == "paper":
            return self.paper.build(recipe)
        raise ConfigError(f"strategy={self.strategy!r} must be search, recipe or paper")

    def data_files(self) -> list[Path]:
        """Return the files and folders that the data is read from; none for data that comes with a package."""
        return []

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as plain data."""
        return asdict(self)


def check_at_least(least: int, values: Mapping[str, float]) -> None:
    """Reject settings below a minimum.

    Raises:
        ConfigError: A value is below it; the message names its key.
    """
    for name, value in values.items():
        if value < least:
            raise ConfigError(f"{name}={value}: it must be at least {least}")
