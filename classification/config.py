"""What `tools/finetune_classifier.py` can be told; each key is a field here and nowhere else."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from metricopt_ext.errors import ConfigError
from metricopt_ext.fitting import Learner, NeuralLearner, RidgeLearner
from metricopt_ext.observations import Labeller, Observations
from metricopt_ext.recipe import Recipe
from metricopt_ext.reptile import ReptileLearner
from metricopt_ext.search import CMAES, GuidedES
from metricopt_ext.value_function import load_value_function


@dataclass
class DataConfig:
    """Where examples come from and how they are divided."""

    # a9a, cifar10, csv, image_folder, libsvm, or scikit-learn's breast_cancer, digits, iris, wine
    name: str = MISSING
    root: str = ""  # the file, or the folder that holds the set; not needed for scikit-learn's
    target: str = ""  # csv: the column of classes
    image_size: int = 0  # image_folder: pixels per side; 0 where all images have one size
    fractions: list[float] = field(default_factory=lambda: [0.7, 0.1, 0.2])  # train, validation, test
    validation_size: int = 5000  # cifar10: held out of its train set
    standardise: bool = False  # tabular: zero mean and unit variance by train statistics


@dataclass
class ModelConfig:
    """The classifier and how it is trained before anything else happens."""

    name: str = MISSING  # tabular_mlp, small_cnn, or a torchvision classifier
    weights: str = ""  # a state dict (.safetensors, or .pt without pickled code) to use in place of training
    epochs: int = 10
    lr: float = 1e-3  # peak rate of Adam under a one-cycle schedule
    batch_size: int = 100
    augment: bool = False  # images: random flips and shifts by up to 4 pixels while training


@dataclass
class AdapterConfig:
    """Where phi acts."""

    kind: str = "film"  # film or input_bias
    layers: list[str] = field(default_factory=list)  # name patterns; empty: all norms (film), first linear (input_bias)
    dim: int = 16


@dataclass
class MetricConfig:
    """What the classifier is judged by."""

    # accuracy, aucpr, balanced_accuracy, expected_cost, f1, jaccard, mcr, worst_recall, or MODULE:FUNCTION
    name: str = "accuracy"
    costs: list[list[float]] = field(default_factory=list)  # expected_cost: cost[true][predicted]
    prior: list[float] = field(default_factory=list)  # expected_cost: weight of each class
    maximize: bool = True  # MODULE:FUNCTION: whether higher is better
    bounds: list[float] = field(default_factory=lambda: [0.0, 1.0])  # MODULE:FUNCTION: lowest and highest value
    scores: str = "labels"  # MODULE:FUNCTION: what it gets, labels, probabilities or logits


@dataclass
class ShiftConfig:
    """How validation and test differ from what the loss sees."""

    kind: str = "none"  # none, image or class_ratio
    contrast: float = 1.0  # factor on each image's contrast, in (0, 1]
    brightness: float = 0.0  # added to every pixel, in [-1, 1]
    noise_std: float = 0.0  # standard deviation of pixel noise
    rotation_degrees: float = 0.0  # angles are uniform within plus or minus this
    ratio: list[float] = field(default_factory=list)  # class_ratio: share of each class, above 0, summing to 1


@dataclass
class TransferConfig:
    """Reuse of another run's value function, for no query, beside the same turned at random (a placebo)."""

    value_function: str = ""  # a value_function.safetensors for phi of the same dimension; empty: no transfer
    loss_weight: float = 0.3
    metric_step: float = 0.15


@dataclass
class SecondRoundConfig:
    """Finetuning of theta under the tuned phi, and of phi again (paper, Table 4, last row)."""

    epochs: int = 0  # of training theta; 0: no second round
    lr: float = 1e-4  # peak rate of Adam under a one-cycle schedule
    batch_size: int = 100
    augment: bool = False


@dataclass
class RecipeConfig:
    """The fields of `metricopt_ext.Recipe` that a run may set; see there."""

    steps: int = 50
    lr: float = 0.1
    evals: int = 5
    rounds: int = 6
    start_std: float = 0.2
    trials: int = 3
    folds: int = 4
    labels: str = "observed"  # observed, linear, gp (interpolated where that shows skill) or gp_always
    learners: list[str] = field(default_factory=lambda: ["neural", "ridge"])  # of neural, ridge, reptile
    adapt_queries: int = 0  # spent along each start's finetuning to adapt f to it; 0 uses f as it is

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
        known: dict[str, Learner] = {"neural": NeuralLearner(), "ridge": RidgeLearner(), "reptile": ReptileLearner()}
        unknown = [name for name in self.learners if name not in known]
        if unknown or not self.learners:
            raise ValueError(f"learners is {self.learners}; it must name some of {', '.join(known)}")
        return tuple(known[name] for name in self.learners)

    def _labeller(self) -> Labeller:
        if self.labels == "observed":
            return Observations.of
        from metricopt_ext.interpolation import GaussianProcessLabels, LinearLabels

        known: dict[str, Labeller] = {
            "linear": LinearLabels(),
            "gp": GaussianProcessLabels(),
            "gp_always": GaussianProcessLabels(always=True),
        }
        if self.labels not in known:
            raise ValueError(f"labels is {self.labels!r}; it must be observed, {', '.join(known)}")
        return known[self.labels]


@dataclass
class ClassificationConfig:
    """A whole run of `tools/finetune_classifier.py`."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    metric: MetricConfig = field(default_factory=MetricConfig)
    shift: ShiftConfig = field(default_factory=ShiftConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    second_round: SecondRoundConfig = field(default_factory=SecondRoundConfig)
    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    queries: int = 600  # metric queries of MetricOpt, all in
    batch_size: int = 100  # of the loss while finetuning
    balanced: bool = True  # every class gets an equal part of a batch
    population: int = 32  # tasks computed together
    best_evals: int = 51  # queries of the rival "loss finetune + best"
    search_queries: int = 0  # of each direct search on the true metric, Guided ES and CMA-ES; 0: none
    refine_queries: int = 0  # of CMA-ES that goes on from MetricOpt's end point; 0: none
    seeds: int = 5  # number of seeds, each a fresh split, model and value function
    seed: int = 0  # the first of them
    pictures: bool = True  # of the first seed's value function; its landscape asks the metric 169 times more
    workers: int = 1  # seeds that run side by side, each in a process of its own
    threads: int = 1  # CPU threads of each
    device: str = "auto"  # auto, cpu, cuda, cuda:0, ...

    def check(self) -> None:
        """Refuse what would only fail after work was done.

        Raises:
            ConfigError: A value is out of range.
            BudgetError: There are too few queries; the message says how many would do.
            FileFormatError: The value function to transfer can't be read.
            ValueFunctionError: It was fitted for another dimension.
        """
        least_one = {name: getattr(self, name) for name in ("batch_size", "population", "best_evals", "seeds")}
        least_one |= {"workers": self.workers, "threads": self.threads}
        least_one |= {"model.epochs": self.model.epochs, "model.batch_size": self.model.batch_size}
        for name, value in least_one.items():
            if value < 1:
                raise ConfigError(f"{name}={value}: it must be at least 1")
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed}: it must be at least 0")
        if not self.model.lr > 0:
            raise ConfigError(f"model.lr={self.model.lr}: it must be above 0")
        searches = {"search_queries": (GuidedES(), CMAES()), "refine_queries": (CMAES(),)}
        for name, used in searches.items():
            value, dim = getattr(self, name), self.adapter.dim
            if value and value < (least := max(search.least_queries(max(1, dim)) for search in used)):
                raise ConfigError(f"{name}={value}: it must be at least {least} for adapter.dim={dim}, or 0")
        if self.transfer.value_function:
            load_value_function(self.transfer.value_function, self.adapter.dim)
        self.recipe.build().tasks_per_round(self.queries)

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as plain data."""
        from dataclasses import asdict

        return asdict(self)
