"""The settings of a whole run that the tools of all tasks share; each key is a field here and nowhere else."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from metricopt_ext.data.named_model import NamedModelConfig
from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.besides import BesidesConfig
from metricopt_ext.experiment.brought_sections import bring_sections, brought_by, methods_with_sections
from metricopt_ext.experiment.config_sections import (
    AdapterConfig,
    GuardConfig,
    SettingsConfig,
    check_at_least,
)
from metricopt_ext.experiment.method import SIBLINGS
from metricopt_ext.experiment.method_config import (
    FinetuneConfig,
    LearnedConfig,
    MethodConfig,
    PaperSettings,
    SearchConfig,
    choice_of,
    method_named,
)
from metricopt_ext.experiment.own_metric import OwnMetricConfig
from metricopt_ext.methods.guard import deviates
from metricopt_ext.methods.paper.recipe import Recipe
from metricopt_ext.search.direct import CMAES, GuidedES
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.tasks.direction import known_direction
from metricopt_ext.utils.checks import MOST_SIZE, MOST_THREADS
from metricopt_ext.utils.config import as_plain, config_section, known_keys

# All free starts of the tools, and those that are on by default; each is made by `Experiment.start`.
SOUPS = ("soup", "soup_batchnorm", "soup_prior")
STARTS = (
    "loss_finetune",
    "batchnorm",
    "prior",
    "prior_twice",
    "prior_line",
    "thresholds",
    "costs",
    "batchnorm_line",
    "batchnorm_mixed",
    "em_prior",
    "whitening",
    "lda_whitening",
    *SOUPS,
)
USUAL_STARTS = STARTS[:5]
LINES = ("prior_line", "batchnorm_line")  # which take queries that are to spare, and none where there are not
SOUP, SHARE = 6, 0.1  # finetunes of a soup, and the share of the training that each repeats
SEEDS = 2**32  # how many there are: NumPy draws by no larger ones
VARIANTS = ("metricopt_paper", "metricopt_learned")  # the paper's own forms, run beside MetricOpt


@dataclass
class RunConfig:
    """The settings that every task's tool shares; a task adds its data, model and metric.

    Which of those of methods there are is `method_config`'s rule.
    """

    CHOICES: ClassVar[tuple[str, ...]] = ("method.name", "methods", "metric.name", "model.name")
    NAMED_MODEL: ClassVar[type[NamedModelConfig] | None] = None  # the section model, if they `are_of` model.name
    OWN_METRIC: ClassVar[type[OwnMetricConfig] | None] = None  # the section metric, if metric.name is MODULE:FUNCTION

    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    method: MethodConfig = field(
        default_factory=SearchConfig
    )  # how MetricOpt works; method.name: search, recipe, paper
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    # What the search may begin from besides the model as it is, where it applies; each costs a query, a line three to
    # six. loss_finetune, batchnorm (re-estimated on the validation inputs), prior and prior_twice (classifiers with
    # outputs in phi: logits adjusted by the class shares, with strength 1 and 2), prior_line (with all strengths),
    # thresholds (of several labels, with outputs in phi: those at which as many train examples
    # are predicted as there are; on where data.kind has them), batchnorm_line (statistics between train's and
    # validation's, where batchnorm is better than the model as it is; on for classifiers). By name also
    # batchnorm_mixed (three quarters validation's), em_prior (shares by EM), whitening and lda_whitening (of
    # embeddings), soup (the mean of six finetunes of the whole model by a tenth of its training each: 60% more
    # training), and soup_batchnorm and soup_prior (the same with that besides).
    starts: list[str] = field(default_factory=lambda: list(USUAL_STARTS))
    queries: int = 600  # MetricOpt's metric queries in total
    population: int | None = None  # tasks computed together; null: 16 if that can be done, else 1
    # Further methods to run, whose queries come on top. What a user could do instead: loss_finetune_best, guided_es and
    # cma_es; for classifiers threshold, class_offsets and logit_adjustment_tuned, or with several labels
    # label_thresholds. The others bring a section. settings: MetricOpt tunes inference before phi, where the task has
    # any. The paper's own metricopt_paper and metricopt_learned; siblings of MetricOpt, sl_u,
    # sl_s, sl_r, reloss, reloss_only and ala for classifiers, ala_mixture and ala_focal for embedders.
    methods: list[str] = field(default_factory=list)
    best_evals: int = 51  # queries of loss_finetune_best
    search_queries: int | None = None  # of guided_es and cma_es, from the same start; null: as many as MetricOpt spent
    paper: PaperSettings | None = field(default=None, metadata=brought_by("metricopt_paper"))
    learned: LearnedConfig | None = field(default=None, metadata=brought_by("metricopt_learned"))
    settings: SettingsConfig | None = field(default=None, metadata=brought_by("settings"))
    seeds: int = 5  # number of seeds, each a fresh split, model and value function
    seed: int = 0  # the first of them
    # Those that need queries of their own. [curves]: the metric along each finetune, finetune.steps + 1 for each of
    # them; false: none
    pictures: Any = False
    workers: int = 1  # seeds that run in parallel, each in its own process
    threads: int = 1  # CPU threads of each
    device: str = "auto"  # auto, cpu, cuda, cuda:0, ...

    def __post_init__(self) -> None:
        """Add the sections that ``methods`` bring."""
        bring_sections(self, self.methods)

    @classmethod
    def chosen(cls, choices: Mapping[str, Any]) -> "RunConfig":
        """Return the defaults where these choices are made; see `config.Choosing`."""
        methods = choices.get("methods")
        named = [each for each in methods if isinstance(each, str)] if isinstance(methods, list) else []
        made = cls(method=method_named(choices.get("method.name", SearchConfig.name)), methods=named)
        if cls.NAMED_MODEL and cls.NAMED_MODEL.are_of(str(choices.get("model.name", ""))):
            made.model = cls.NAMED_MODEL()  # type: ignore[attr-defined]
        if cls.OWN_METRIC and ":" in str(choices.get("metric.name", "")):
            made.metric = cls.OWN_METRIC()  # type: ignore[attr-defined]
        return made

    def why_absent(self, key: str) -> str:
        """Return which choice would bring a key that this run lacks; see `config.Choosing`."""
        section, _, rest = key.partition(".")
        if self.OWN_METRIC and section == "metric" and rest.partition(".")[0] in known_keys(self.OWN_METRIC):
            return f"{key} is a key of metric.name=MODULE:FUNCTION, a metric of your own; this run has one of the tool"
        if self.NAMED_MODEL and section == "model" and rest.partition(".")[0] in known_keys(self.NAMED_MODEL):
            return f"{key} is a key of model.name={self.NAMED_MODEL.NAMES}; this run has another model"
        found = [*choice_of(self, key)]
        return f"{key} is a key of {found[0]}; this run has {found[1]}" if found else ""

    def check(self) -> None:
        """Reject what would only fail after work has been done.

        Raises:
            ConfigError: A value is out of range.
            BudgetError: There are too few queries; the message says how many are needed.
        """
        check_at_least(
            1, {name: getattr(self, name) for name in ("population", "best_evals", "search_queries", "seeds")}
        )
        check_at_least(1, {"workers": self.workers, "threads": self.threads}, MOST_THREADS)
        check_at_least(1, {"adapter.dim": self.adapter.dim}, MOST_SIZE)
        check_at_least(0, {"seed": self.seed})
        if self.seed + self.seeds > SEEDS:
            raise ConfigError(f"seed={self.seed} seeds={self.seeds}: all seeds must be below 2^32, as for NumPy")
        self.finetune.check()
        with config_section("guard.confidence"):
            deviates(self.guard.confidence)
        unknown = [name for name in self.starts if name not in STARTS]
        if unknown:
            raise ConfigError(f"starts={self.starts}: {unknown[0]!r} is none of {', '.join(STARTS)}")
        if self.pictures and self.pictures != ["curves"]:
            raise ConfigError(f"pictures={self.pictures}: it must be false, or [curves]")
        self._check_settings()
        self._check_methods()
        self._check_besides()
        self.check_queries(self.least_dim())

    def check_settings(self, known: Sequence[str]) -> None:
        """Reject settings of inference that a task does not have; see `SettingsConfig.check_known`."""
        if self.settings is not None:
            self.settings.check_known(known)

    @property
    def _fixed_starts(self) -> int:
        """How many starts are asked first, the model as it was trained among them."""
        return 1 + sum(name not in LINES for name in self.starts)

    @property
    def named_settings(self) -> list[str]:
        """Names of the settings of inference to tune; none for the usual ones."""
        return [] if self.settings is None else self.settings.chosen

    def _check_settings(self) -> None:
        if self.settings is None:
            return
        self.settings.check()
        if self.method.name != "search":
            raise ConfigError(
                f"methods={self.methods}: method.name={self.method.name} tunes no settings; set method.name=search,"
                " or leave settings out of methods"
            )
        if phi_alone := [name for name in self.methods if name in VARIANTS]:
            raise ConfigError(f"methods={self.methods}: {phi_alone[0]} tunes no settings; leave it or settings out")

    def _check_methods(self) -> None:
        known = [*self.rows, *methods_with_sections(self)]
        unknown = [name for name in self.methods if name not in known]
        if unknown:
            raise ConfigError(f"methods={self.methods}: {unknown[0]!r} is none of {', '.join(known)} in this tool")

    def _check_besides(self) -> None:
        metric = getattr(self, "metric", None)
        if not isinstance(metric, BesidesConfig):
            return
        name = str(getattr(metric, "name", ""))
        metric.check_besides(name)
        told = not isinstance(metric, OwnMetricConfig) or metric.maximize is not None
        if not told and known_direction(name.partition(":")[2]) is None:
            warnings.warn(
                f"metric.name={name} does not say which values are better, so higher ones are taken to be; set"
                " metric.maximize to false if lower ones are, or to true",
                stacklevel=1,
            )
        learning = [] if self.method.name == "search" else [f"method.name={self.method.name}"]
        learning += [f"methods={self.methods}: {name}" for name in self.methods if name in VARIANTS]
        if metric.subject_to and learning:
            raise ConfigError(
                f"metric.subject_to={metric.subject_to}: {learning[0]} can't respect constraints; set"
                " method.name=search and leave those out, or move the names to metric.also"
            )

    @property
    def own_metric(self) -> bool:
        """Whether the metric is a function of the user's own."""
        return ":" in str(getattr(getattr(self, "metric", None), "name", ""))

    @property
    def rows(self) -> dict[str, int]:
        """Those of ``methods`` that bring no section, with the most queries that each asks."""
        searched = self.search_queries or self.queries
        best = min(self.best_evals, self.finetune.steps + 1)
        return {"loss_finetune_best": best, "guided_es": searched, "cma_es": searched}

    @property
    def trained_methods(self) -> list[str]:
        """Those of ``methods`` that train a copy of the model by the siblings' protocol."""
        return [name for name in self.methods if name in SIBLINGS]

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
        phi = f"adapter.dim={dim}" if dim == self.adapter.dim else f"phi of dimension {dim}"
        for name, search in (("guided_es", GuidedES()), ("cma_es", CMAES())):
            least = search.least_queries(dim) + (self._fixed_starts if self.method.name == "search" else 0)
            if name in self.methods and self.rows[name] < least:
                raise ConfigError(
                    f"methods={self.methods}: {name} has {self.rows[name]} queries, but needs {least} for {phi}: set"
                    " search_queries, or leave it out"
                )
        if self.learned:
            self.learned.build(self.finetune).size(self.queries, dim)
        if self.paper:
            self.paper.build(self.finetune).size(self.queries, dim)
        self.build_strategy().size(self.queries, dim, self._fixed_starts)

    def build_strategy(self) -> GuidedTrustRegion | Recipe:
        """Return how MetricOpt works.

        Raises:
            ConfigError: A value is out of range.
        """
        return self.method.build(self.finetune)

    def data_files(self) -> list[Path]:
        """Return the files and folders that the data is read from; none for data that comes with a package."""
        return []

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as plain data."""
        return as_plain(self)
