"""The settings that the tools of all tasks share; each key is a field here and nowhere else."""

from dataclasses import asdict, dataclass, field
from typing import Any

from metricopt_ext.data.shift import ImageShift
from metricopt_ext.errors import BudgetError, ConfigError
from metricopt_ext.methods.guard import CONFIDENCE, deviates
from metricopt_ext.methods.paper import Algorithm1
from metricopt_ext.methods.recipe import Recipe
from metricopt_ext.search.direct import CMAES, GuidedES
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.utils.checks import check_above
from metricopt_ext.utils.config import config_section
from metricopt_ext.value.learners import Learner, NeuralLearner, RidgeLearner
from metricopt_ext.value.observations import Labeller
from metricopt_ext.value.reptile import ReptileLearner

DEFAULT = Recipe()
STARTS = ("loss_finetune", "batchnorm", "prior", "prior_twice")
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
        if self.labels == "observed":
            return DEFAULT.labels
        from metricopt_ext.value.labels import GaussianProcessLabels, LinearLabels

        known: dict[str, Labeller] = {
            "linear": LinearLabels(),
            "gp": GaussianProcessLabels(),
            "gp_always": GaussianProcessLabels(always=True),
        }
        if self.labels not in known:
            raise ValueError(f"labels is {self.labels!r}; it must be observed, {', '.join(known)}")
        return known[self.labels]


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
    lr: float = 1e-3  # peak rate of Adam with a one-cycle schedule
    augment: bool = False  # images: random flips and shifts by up to 4 pixels while training

    def check(self) -> None:
        """Reject what can't be trained with.

        Raises:
            ConfigError: A value is out of range.
        """
        check_at_least(1, {"model.epochs": self.epochs})
        with config_section("model"):
            check_above(0, lr=self.lr)


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
class RunConfig:
    """The settings that every task's tool shares; a task adds its data, model and metric."""

    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    recipe: RecipeConfig = field(default_factory=RecipeConfig)
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
    # Further methods to run, sibling methods of MetricOpt's; only the classification tool has any: sl_u, sl_s, sl_r,
    # reloss, reloss_only.
    methods: list[str] = field(default_factory=list)
    refine_queries: int = 0  # of CMA-ES continuing from MetricOpt's end point; 0: none
    seeds: int = 5  # number of seeds, each a fresh split, model and value function
    seed: int = 0  # the first of them
    pictures: bool = True  # of the first seed's value function; its landscape evaluates the metric another 169 times
    workers: int = 1  # seeds that run in parallel, each in its own process
    threads: int = 1  # CPU threads of each
    device: str = "auto"  # auto, cpu, cuda, cuda:0, ...
    # The kernels and number of threads that every processor has, deterministic algorithms on a GPU; slower. Whether
    # processors of different makers then give the same digits is not tested.
    deterministic: bool = False

    def check(self) -> None:
        """Reject what would only fail after work has been done.

        Raises:
            ConfigError: A value is out of range.
            BudgetError: There are too few queries; the message says how many are needed.
        """
        check_at_least(1, {n: getattr(self, n) for n in ("population", "best_evals", "seeds", "workers", "threads")})
        check_at_least(1, {"adapter.dim": self.adapter.dim})
        check_at_least(0, {"seed": self.seed})
        with config_section("guard_confidence"):
            deviates(self.guard_confidence)
        unknown = [name for name in self.starts if name not in STARTS]
        if unknown:
            raise ConfigError(f"starts={self.starts}: {unknown[0]!r} is none of {', '.join(STARTS)}")
        self._check_methods()
        if self.refine_queries and self.strategy != "recipe":
            raise ConfigError(f"refine_queries={self.refine_queries} continue from a recipe's end: set strategy=recipe")
        self.check_queries(self.least_dim())

    def _check_methods(self) -> None:
        known = self.further_methods()
        if self.methods and not known:
            raise ConfigError(f"methods={self.methods}: only the classification tool runs further methods")
        unknown = [name for name in self.methods if name not in known]
        if unknown:
            raise ConfigError(f"methods={self.methods}: {unknown[0]!r} is none of {', '.join(known)}")

    def further_methods(self) -> tuple[str, ...]:
        """Return what ``methods`` may name."""
        return ()

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
            return Algorithm1(steps=recipe.steps, evals=recipe.evals, lr=recipe.lr, start_std=recipe.start_std)
        raise ConfigError(f"strategy={self.strategy!r} must be search, recipe or paper")

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as plain data."""
        return asdict(self)


def check_at_least(least: int, values: dict[str, int]) -> None:
    """Reject settings below a minimum.

    Raises:
        ConfigError: A value is below it; the message names its key.
    """
    for name, value in values.items():
        if value < least:
            raise ConfigError(f"{name}={value}: it must be at least {least}")
