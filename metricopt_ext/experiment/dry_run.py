"""What a run of a tool would do, and about how long it would take, without doing it: ``--dry-run``."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from torch import Tensor

from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.data.reading import HEADER as COLUMNS
from metricopt_ext.experiment.experiment import Experiment
from metricopt_ext.experiment.method import METHODS, check_known, now
from metricopt_ext.experiment.run_config import SHARE, SOUP, SOUPS, VARIANTS, RunConfig
from metricopt_ext.experiment.style import direction, print_points, print_table
from metricopt_ext.methods.paper.recipe import Recipe
from metricopt_ext.methods.starts import divided
from metricopt_ext.plain import plain
from metricopt_ext.runtime import distributed
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.probe import GRADIENTS
from metricopt_ext.search.stages import PlannedLine, planned_lines
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.threads import num_threads
from metricopt_ext.utils.words import and_more, counted, duration

TOLD = ("metricopt", "settings", *VARIANTS)  # whose own queries, or MetricOpt's, tell the metric at their ends
TRAINING = 10.0  # seconds for which a model is trained at most


class Work(NamedTuple):
    """What a part of a seed's run is made of.

    Attributes:
        queries: Evaluations of the metric.
        steps: Loss steps of one phi.
        wide: Loss steps of several phi at once.
        width: How many these are.
    """

    queries: int = 0
    steps: int = 0
    wide: int = 0
    width: int = 1


class Trial(Callback):
    """Prints stages, and cuts each training short that goes on for longer than some seconds: it is for the pace alone.

    Args:
        seconds: The limit; a training takes one step at least.

    Attributes:
        left_out: How many seconds the steps left out would have taken, as fast as those before.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self.left_out = seconds, 0.0

    def stage(self, description: str) -> None:
        """Print it at once."""
        print(plain(f"{description} ..."), flush=True)

    def goes_on(self, taken: int, left: int, seconds: float) -> bool:
        """End a training that has taken long enough."""
        if seconds < self._seconds:
            return True
        self.left_out += seconds * left / taken
        return False


def dry_run(experiment: type[Experiment[Any]], config: RunConfig) -> None:
    """Print what a run would do, from its settings and a probe of its first seed; nothing is written or charged.

    Processes of torchrun wait for the first, which does it alone.

    Args:
        experiment: What each seed runs.
        config: The settings.

    Raises:
        MetricOptError: As the run itself would: data, settings or metric are not usable.
    """
    config.check()
    experiment.describe(config)
    with distributed.sharing(config.as_dict()):
        at_once, world = min(config.workers, config.seeds), distributed.world()
        if world > 1:
            at_once = world if config.seeds >= world else 1
        distributed.only_first(lambda: _show(experiment, config, at_once, world))


def _show(experiment: type[Experiment[Any]], config: RunConfig, at_once: int, world: int) -> None:
    subject, cut = experiment.describe(config), Trial(TRAINING)
    print(plain(f"{subject.title}: {subject.metric} ({direction(subject.maximize)})"))
    with TemporaryDirectory() as own, num_threads(config.threads):
        cut.stage(f"data and model, with at most {TRAINING:g} seconds of training")
        began = now()
        quick = [name for name in config.starts if name not in ("loss_finetune", *SOUPS)]
        made = experiment(replace(config, starts=quick), Path(own), config.seed, cut)
        prepared, task, rare = now() - began + cut.left_out, made.task, made.rare()
        config.check_queries(task.dim)
        methods = list(made.methods())
        check_known(methods)
        strategy = config.build_strategy()
        cut.stage("its starts")
        found_starts = {"start": Start(task.origin()), **made.starts()}
        plan, work = planned(strategy, config, task.dim, task.at_once, found_starts, task.adapter.base_state_dict())
        cut.stage(f"a loss step of 1 and of {work.width} phi, and an evaluation on validation")
        one, wide, query = _probe(task, work.width, config.seed)
    baselines = known_queries(config, methods)
    unknown = [name for name in methods if METHODS[name].kind == "queries" and name not in {*baselines, "metricopt"}]
    more = besides(config, methods, strategy)
    validation = work.queries + sum(baselines.values()) + more.queries
    queried = (validation + len(methods)) * query
    soups = config.method.name == "search" and any(name in SOUPS for name in config.starts)
    again = SOUP * SHARE * prepared if soups else 0.0
    seconds = prepared + again + queried + (work.steps + more.steps) * one + work.wide * wide

    rows = [
        ("seeds", f"{config.seeds} ({config.seed} to {config.seed + config.seeds - 1}), {at_once} at a time"),
        ("method", f"{config.method.name}, phi of {counted(task.dim, 'coordinate')}"),
        *plan,
        ("queries of MetricOpt", f"{work.queries} of {config.queries} at most"),
        *((f"queries of {METHODS[name].title}", f"{queries} at most") for name, queries in baselines.items()),
        *((f"queries of {METHODS[name].title}", "not known in advance") for name in unknown),
        *([("for ends and curves of these", f"{more.queries}")] if more.queries else []),
        ("evaluations on validation", f"{validation} at most" + (", and those not known" if unknown else "")),
        ("evaluations on test", f"{len(methods)} at most, one for each end"),
        ("preparing data and model takes about", duration(prepared)),
        ("an evaluation takes", _seconds(query)),
        (f"a loss step for 1 and for {work.width} phi takes", f"{_seconds(one)}, {_seconds(wide)}"),
        ("a seed takes about", duration(seconds)),
        ("the run takes about", duration(math.ceil(config.seeds / at_once) * seconds)),
    ]
    if made.reading is not None:
        print_points(made.reading.lines())
    if made.reading is not None and made.reading.columns:
        print_table(COLUMNS, made.reading.rows(), left=len(COLUMNS))
    print_table(["dry run, per seed", ""], [list(row) for row in rows], left=2)
    shared = f" They are for one process: {world} ranks share the queries of a search." if at_once == 1 < world else ""
    notes = [
        "Times are estimates: one evaluation and one loss step were timed and multiplied by the planned numbers. They"
        " leave out fits of f, its proposals, the training of other methods, and plots." + shared,
        "Nothing was written to the output folder, and no query was charged.",
    ]
    if rare:
        notes.insert(0, f"{rare}.")
    if cut.left_out:
        notes.append(
            f"The model was trained for {TRAINING:g} seconds; at this pace its training takes {duration(cut.left_out)}"
            " more. The other times are those of a model that is hardly trained, which may predict faster or slower."
        )
    print_points(notes)


def planned(
    strategy: GuidedTrustRegion | Recipe,
    config: RunConfig,
    dim: int,
    population: int,
    found: Mapping[str, Start | StartLine | None] | None = None,
    base: Mapping[str, Tensor] | None = None,
) -> tuple[list[tuple[str, str]], Work]:
    """Return what MetricOpt does on a seed, as rows of a table, and its work.

    Args:
        strategy: How MetricOpt works.
        config: The settings.
        dim: Dimension of phi.
        population: Tasks computed together.
        found: The starts but for the loss-only finetune and soups, which take training, by name, the model as it was
            trained as ``"start"``; None of those that do not apply.
        base: What a start does not replace, by name.
    """

    def waves(tasks: int) -> int:
        return math.ceil(tasks / population)

    if isinstance(strategy, Recipe):
        tasks = strategy.size(config.queries)["tasks"]
        collected, tried = strategy.rounds * tasks * strategy.evals, strategy.choice_queries
        rows = [
            ("rounds", f"{strategy.rounds} of {counted(tasks, 'task')}"),
            ("tasks", f"{strategy.rounds * tasks} of {counted(strategy.steps, 'step')}, {strategy.evals} queries each"),
            ("then", f"{tried} queries to choose settings, {strategy.start_queries} for the start and its guard"),
        ]
        wide = (strategy.rounds * waves(tasks) + waves(tried)) * strategy.steps
        # The guard's ends: by the loss alone, by f, and by each half's f.
        queried, ends = collected + tried + strategy.start_queries, strategy.start_queries - 1
        return rows, Work(queried, ends * strategy.steps, wide, min(tasks, population))
    fixed, lines = divided({name: start for name, start in (found or {}).items() if start is not None})
    soups = [name for name in config.starts if name in SOUPS]
    trained = [name for name in config.starts if name == "loss_finetune" or name in SOUPS]
    starts = 1 + len(fixed.keys() - {"start"}) + len(trained)
    spare = config.queries - strategy.least_queries(dim, starts)
    origin = next((name for name, each in fixed.items() if each.presumed), "start")
    planned = planned_lines(lines, fixed, config.queries, spare, base or {}, origin=origin)
    along = sum(each.queries for each in planned.values())
    held = {name for each in planned.values() if each.queries for name in each.holds}
    named = ["the model as trained", *(name for name in fixed if name != "start" and name not in held), *trained]
    left = config.queries - starts - along - 1  # the end is a query of its own
    design = min(strategy.design_size(dim), left)
    batches = math.ceil((left - design) / strategy.batch)
    rows = [
        ("starts", f"{len(named)}, a query each: {', '.join(named)}"),
        *((f"the line {name}", _along(each)) for name, each in planned.items()),
        ("design", f"{counted(design, 'query')} around the start that is chosen"),
        ("batches", f"about {batches} of {strategy.batch} queries, and a query for the end"),
    ]
    if soups:
        finetunes = f"{SOUP} finetunes of the model, {SHARE:.0%} of its training each: {SOUP * SHARE:.0%} more training"
        rows.insert(1, (and_more(soups), finetunes))
    steps = config.finetune.steps if "loss_finetune" in config.starts else 0
    return rows, Work(config.queries, steps, waves(GRADIENTS), min(GRADIENTS, population))


def _along(line: PlannedLine) -> str:
    if not line.queries:
        return "left out, as there are too few queries"
    among = f", including those of {' and '.join(line.holds)}" if line.holds else ""
    where = f", if {line.leads_to} is better than where it begins" if line.leads_to else ""
    return f"{line.queries + len(line.holds)} queries{among}{where}"


def known_queries(config: RunConfig, methods: Sequence[str]) -> dict[str, int]:
    """Return the queries of the methods beside MetricOpt whose number the settings give, at most."""
    known = {
        **config.rows,
        "settings": 0,
        "metricopt_paper": config.queries,
        "metricopt_learned": config.queries,
    }
    return {name: queries for name, queries in known.items() if name in methods}


def besides(config: RunConfig, methods: Sequence[str], strategy: GuidedTrustRegion | Recipe) -> Work:
    """Return what is not MetricOpt's: loss finetunes, curves along them, and the ends of others that ask queries."""
    paths = [name for name in ("loss_finetune", "loss_finetune_validation") if name in methods]
    points, steps = len(paths) * (config.finetune.steps + 1), len(paths) * config.finetune.steps
    if not isinstance(strategy, GuidedTrustRegion):
        points, steps = points + strategy.steps + 1, steps + strategy.steps
    judged = sum(METHODS[name].kind == "queries" and name not in TOLD for name in methods)
    return Work(judged + bool(config.pictures) * points, steps)


def _probe(task: FinetuneTask, width: int, seed: int) -> tuple[float, float, float]:
    """Return the seconds of a loss step of one phi and of several at once, and of an evaluation of the metric."""
    own = replace(task, metric=task.metric.with_settings())

    def steps(number: int) -> Callable[[], object]:
        phi, indices = own.origin().expand(number, -1), range(number)
        return lambda: own.loss_and_gradient(phi, seed, indices, 0)

    one = _second_time(steps(1))
    wide = one if width == 1 else _second_time(steps(width))
    return one, wide, _second_time(lambda: own.evaluate(own.origin(), "probe"))


def _second_time(call: Callable[[], object]) -> float:
    """Return how many seconds the second of two calls takes; the first warms up, and is enough if it takes one."""
    for _ in range(2):
        began = now()
        call()
        if (seconds := now() - began) >= 1:
            break
    return seconds


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
