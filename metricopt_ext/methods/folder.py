"""A run's folder: what it keeps to be resumed, under what tells it from other runs, and what is loaded of it."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import load_adapter
from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.errors import FileFormatError
from metricopt_ext.methods.model_card import write_card
from metricopt_ext.methods.result import Result
from metricopt_ext.methods.tuned_settings import shown
from metricopt_ext.runtime import distributed
from metricopt_ext.runtime.identity import Held, claim, fingerprint, fingerprint_of_code, sole_writer
from metricopt_ext.tasks.combine import Combination
from metricopt_ext.tasks.inference_file import INFERENCE, changed_inference, save_inference
from metricopt_ext.tasks.ledger import Ledger
from metricopt_ext.tasks.log import Log
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.settings import Settings, Value
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.tasks.trajectories import TRAJECTORIES, TrajectoryStore
from metricopt_ext.utils.files import read_json, remove_unfinished

FORMAT = 9  # of what is kept: a folder of another format is not resumed
IDENTITY, EVALUATIONS, HOLDOUT = "identity.json", "log.jsonl", "holdout.jsonl"
ADAPTER = "adapter.safetensors"  # written last: it says that a run has finished
SETTINGS, SEEDS = "run.json", "seed-*"  # of a tool's run, and its seeds' folders


class RunFolder:
    """The folder of one run of `optimize_metric`; without a path nothing is kept.

    Of ranks that share a run, the first alone reads and writes it.

    Args:
        path: The folder; None for memory only.
        identity: What the run depends on; see `identity_of`. Not looked at without a path.
    """

    def __init__(self, path: str | Path | None, identity: dict[str, Any]) -> None:
        self.path: Path | None = None if path is None else Path(path).absolute()  # a metric may change the directory
        self.identity: dict[str, Any] = identity
        self._held: Held | None = None
        self._unpaid: tuple[Ledger, Ledger] | None = None  # the metric's own, and the run's

    @cached_property
    def trajectories(self) -> TrajectoryStore:
        """What was collected, empty in a new run."""
        folder = None if self.path is None else self.path / TRAJECTORIES
        store = TrajectoryStore(folder, self.identity)
        store.check = self.check_held
        return store

    @contextmanager
    def writing(self, resume: bool) -> Iterator[None]:
        """Take the folder for this run, and keep other processes from writing to it meanwhile.

        Args:
            resume: Continue what an interrupted run left there.

        Raises:
            FileFormatError: Another process writes to the folder; or the folder holds a run and ``resume`` is False, or
                it holds another run; the message names the first difference.
        """
        with ExitStack() as held:
            if (path := self.path) is not None:
                distributed.on_first(lambda: self._take(path, held, resume))
            yield

    def check(self, resume: bool) -> None:
        """Check, long before a run, that the folder can be written to and holds no other run.

        Raises:
            FileFormatError: Another process writes to the folder, or it holds a run and ``resume`` is False.
            OSError: It can't be written to.
        """
        if (path := self.path) is not None:
            with sole_writer(path):
                self._refuse_another(path, resume)

    def _refuse_another(self, path: Path, resume: bool) -> None:
        if not resume and any((path / name).exists() for name in (IDENTITY, TRAJECTORIES, EVALUATIONS)):
            raise FileFormatError(f"{path} holds an earlier run; resume it, or use another output folder")

    def check_held(self) -> None:
        """Refuse to write into a folder that was left, removed or replaced since `writing` took it.

        Raises:
            FileFormatError: It was.
        """
        if self._held is not None:
            self._held.check()

    @contextmanager
    def held(self, check_unchanged: Callable[[], None]) -> Iterator[None]:
        """Keep other processes from writing to the folder inside the ``with`` block, even if it was left before.

        Args:
            check_unchanged: Called to refuse a folder that was left, if another process has gone on there.

        Raises:
            FileFormatError: One has, or writes to it now; or the folder was removed or replaced.
        """
        if self.path is None or self._held is None or not self._held.left:
            self.check_held()
            yield
            return
        if not self.path.is_dir():
            raise FileFormatError(f"{self.path} was removed since it was left; search again in a new folder")
        with sole_writer(self.path) as self._held:
            check_unchanged()
            yield

    def _take(self, path: Path, held: ExitStack, resume: bool) -> None:
        self._held = held.enter_context(sole_writer(path))  # first: of two runs that begin at once, one alone may claim
        self._refuse_another(path, resume)
        _refuse_nameless(path)
        claim(path / IDENTITY, self.identity)  # it guards the evaluations too
        remove_unfinished(path)
        remove_unfinished(path / TRAJECTORIES)

    @contextmanager
    def counted(self, task: FinetuneTask, queries: int) -> Iterator[FinetuneTask]:
        """Count a run in its own ledger, which the metric's ledger is charged for by `keep`.

        What an interrupted run evaluated is read from the log and booked as before. A run with a folder that fails
        before all is kept is not charged: its work is reused when it is resumed. Without a folder it is charged for
        what it spent.

        Args:
            task: Its metric has the run's ledger meanwhile.
            queries: The run's budget.

        Yields:
            The task, whose metric keeps its evaluations in the folder.
        """
        with self.own_ledger(task.metric, queries):
            yield task.judged_by(task.metric.logged(self.log(task.metric)))

    @contextmanager
    def own_ledger(self, metric: Metric, queries: int) -> Iterator[None]:
        """Count a run apart; see `counted`."""
        own, metric.ledger = metric.ledger, Ledger(queries)
        self._unpaid = own, metric.ledger
        try:
            yield
        finally:
            metric.ledger = own
            if self.path is None:
                self._charge()

    def log(self, metric: Metric, name: str = EVALUATIONS) -> Log:
        """Return a log of the run; of ranks that share it, the first one's is in the folder, the others' in memory."""
        path = None if self.path is None else self.path / name
        log = distributed.only_first(lambda: Log(path, metric, self.check_held)) or Log(None, metric)
        log.entries, log.sittings = distributed.on_first(lambda: (log.entries, log.sittings))
        return log

    def _charge(self) -> None:
        if self._unpaid is not None:
            own, run = self._unpaid
            self._unpaid = None
            for purpose, spent in run.spent_on.items():
                own.spend(purpose, spent)

    def keep(self, task: FinetuneTask, result: Result[Any]) -> None:
        """Write what was learned, settings of inference, a card, and the adapter with what is applied to it.

        The run, which is complete then, is charged.

        Args:
            task: Has the adapter, the metric, and the settings.
            result: The run's.
        """
        distributed.on_first(lambda: self._write(task, result))
        self._charge()

    def _write(self, task: FinetuneTask, result: Result[Any]) -> None:
        if self.path is None:
            return
        self.check_held()
        for name, each in result.products().items():
            each.save(self.path / f"{name}.safetensors")
        if task.settings is not None and result.settings is not None:
            save_inference(self.path / INFERENCE, task.settings, result.settings.after)
        write_card(self.path, result, task.adapter)
        task.adapter.save(self.path / ADAPTER)


def _refuse_nameless(path: Path) -> None:
    """Refuse kept work of which nobody can tell what it belongs to.

    Raises:
        FileFormatError: There is some, but its identity is missing or damaged.
    """
    kept = [name for name in (EVALUATIONS, TRAJECTORIES) if (path / name).exists()]
    if not kept:
        return
    try:
        if (path / IDENTITY).exists():
            read_json(path / IDENTITY)
            return
        why = f"{IDENTITY} is missing"
    except FileFormatError:
        why = f"{IDENTITY} is damaged"
    raise FileFormatError(
        f"{path} holds {kept[0]}, but {why}, so nobody can tell which run they are of; use another output folder"
    )


class Described(Protocol):
    """A strategy that tells what a run of it depends on."""

    def identity(self) -> dict[str, Any]:
        """Return that as JSON."""
        ...


def identity_of(
    strategy: Described,
    task: FinetuneTask,
    starts: Mapping[str, Start | StartLine],
    *,
    seed: int,
    size: dict[str, int],
) -> dict[str, Any]:
    """Return what a run depends on, to tell it from other runs.

    Args:
        strategy: The learner or search.
        task: Its model's weights count, so a retrained model makes another run.
        starts: What a guided search may begin from.
        seed: The run's seed.
        size: Sizes that follow from the budget: the tasks of a round, or the queries of a search.
    """
    settings = strategy.identity()
    if starts:
        settings["starts"] = {name: _identity_of_start(each) for name, each in starts.items()}
    return {**settings, **size, **identity_of_task(task, seed)}


def _identity_of_start(start: Start | StartLine) -> Any:
    if isinstance(start, StartLine):
        return [start.low, start.high, *start.first, *(each.digest for each in start.ends)]
    return [start.digest, dict(start.settings)] if start.settings else start.digest


def identity_of_task(task: FinetuneTask, seed: int) -> dict[str, Any]:
    """Return what any run on a task depends on, whatever its method.

    It is the format of what is kept, seed, metric, adapter and weights; of loss, labels and batches it is the loss of
    the first one, and of the metric's function its own code. Data that the metric alone sees is not looked at.
    """
    metric = task.metric
    with task.keeping_weights():
        first_loss = task.first_loss(seed)
    return {
        "format": FORMAT,
        "seed": seed,
        "metric": [metric.name, metric.maximize, metric.bounds],  # stored costs depend on the last two
        "repeats": metric.repeats,
        **({"classes are new": True} if metric.new_classes else {}),
        "code of the metric": fingerprint_of_code(metric.function),
        "adapter": task.adapter.signature.to_json(),
        "weights": fingerprint(task.adapter.base_state_dict()),
        "loss of the first batch": first_loss,
        "population": task.at_once,
        **({} if metric.combination is None else {"made of outcomes": _made_of(metric.combination)}),
        **({} if not metric.subject_to else {"subject to": bounded(metric)}),
        **({} if task.gradients is None else {"gradients": fingerprint({"gradients": task.gradients})}),
        **({} if task.settings is None else {"settings of inference": task.settings.identity()}),
    }


def _made_of(combination: Combination) -> list[Any]:
    how, told = combination.combine, sorted(combination.directions.items())
    return [fingerprint_of_code(how) if callable(how) else how, combination.combined, told]


def bounded(metric: Metric) -> dict[str, list[str]]:
    """Return what a metric is subject to by name, each with the digest of the function that tells it, if one does."""
    return {
        name: [text, *([fingerprint_of_code(metric.also[name])] if name in metric.also else [])]
        for name, text in metric.subject_to.items()
    }


def load_run(model: nn.Module, folder: str | Path, settings: Settings | None = None) -> Adapter:
    """Attach what a finished run kept to a model: phi, and whatever its start replaced.

    Settings of inference are not part of an adapter. With ``settings`` they are set on the model permanently, as far as
    it can hold them (`Settings.set_on`); a UserWarning gives code for the rest. Free settings belong to the metric
    only, and are left alone. Without ``settings`` a UserWarning says which non-default settings the run kept, and how
    to apply them.

    Args:
        model: The bare model, with the weights that the run was given; a UserWarning says if it has others. For a
            tool's run these are the weights that the tool trained or loaded for the seed.
        folder: An ``output_dir`` of `optimize_metric`; the output folder of a tool that ran one seed, or a seed's own
            folder in it; or the ``OUTPUT_DIR`` of a search with Detectron2.
        settings: Settings of inference, made for this model as in the run.

    Raises:
        FileFormatError: The folder holds no run, an unfinished one or several seeds; the message says which files are
            missing, or which folders there are. Or one of its files is corrupt, or ``settings`` are given of a run that
            tuned none.
        AdapterError: The adapter does not fit the model (see `load_adapter`). The model is then as it was.
        ValueError: ``settings`` lacks one that the run kept, or has another default for it than the run's model had.

    Examples:
        >>> adapter = load_run(model, "out/seed-0")  # doctest: +SKIP
    """
    finished = _finished(Path(folder))
    # First: of a damaged file the model gets nothing.
    said, values = (_settings_beside(finished), {}) if settings is None else ("", _values_of(finished, settings))
    adapter = load_adapter(model, finished / ADAPTER)
    if settings is not None:
        said = settings.set_on(model, values)
    if said:
        warnings.warn(said, stacklevel=2)
    return adapter


def _settings_beside(finished: Path) -> str:
    """Say which settings of inference a run kept that no model holds; empty if there are none."""
    file = finished / INFERENCE
    if not file.exists():
        return ""
    try:
        changed = changed_inference(file)
    except ModuleNotFoundError as error:  # a run needs no package to write them
        return f"{file} has settings of inference, and no one can tell which without {error.name}: install it"
    if not changed:
        return ""
    changes = ", ".join(f"{name} {shown(old)} -> {shown(new)}" for name, (old, new) in changed.items())
    return (
        f"{finished} was tuned with settings of inference that the model does not hold: {changes}; put them to use"
        f" by settings.applied(mo.load_inference({str(file)!r})), of the Settings that the run had, or give these to"
        " load_run, settings=, which sets what the model can hold"
    )


def _values_of(finished: Path, settings: Settings) -> dict[str, Value]:
    """Return the settings that a run kept, other than the model's own; those of the given Settings.

    Raises:
        ValueError: These lack one, or have another default.
    """
    file = finished / INFERENCE
    if not file.exists():
        raise FileFormatError(f"{finished} has no {INFERENCE}, as its run tuned no settings; leave settings out")
    changed = changed_inference(file)
    settings.complete({name: value for name, (_, value) in changed.items()})
    for name, (default, _) in changed.items():
        if default != (own := settings[name].default):
            raise ValueError(
                f"{file}: {name} was {shown(default)} by default, and is {shown(own)} by the given settings; make them"
                " of the model as the run had it"
            )
    return {name: value for name, (_, value) in changed.items()}


def _finished(folder: Path) -> Path:
    """Return the folder of the one run that a folder holds, which must have finished."""
    if (folder / ADAPTER).exists():
        return folder
    seeds = sorted((each for each in folder.glob(SEEDS) if each.is_dir()), key=lambda each: (len(each.name), each.name))
    if len(seeds) > 1:
        names = ", ".join(
            each.name if (each / ADAPTER).exists() else f"{each.name} (no {ADAPTER} yet)" for each in seeds
        )
        raise FileFormatError(f"{folder} holds several seeds, each with a model of its own; name one of {names}")
    known = any((folder / name).exists() for name in (IDENTITY, SETTINGS, TRAJECTORIES, EVALUATIONS))
    if not seeds and not known and (folder / "search").is_dir():  # as Detectron2's tools name it
        seeds = [folder / "search"]
    if seeds:
        return _finished(seeds[0])
    if not known and not (folder.match(SEEDS) and folder.is_dir()):
        raise FileFormatError(f"{folder} holds no run: it has neither {IDENTITY} nor folders {SEEDS}")
    raise FileFormatError(
        f"{folder} holds an unfinished run: {ADAPTER}, which is written last, is missing; finish it with the arguments"
        " of before and resume=True, or --resume of a tool"
    )
