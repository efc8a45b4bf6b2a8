"""A run's folder: what it keeps to be resumed, under what tells it from other runs, and what is loaded of it."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import load_adapter
from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.errors import FileFormatError
from metricopt_ext.methods.guard import shown
from metricopt_ext.methods.result import Result
from metricopt_ext.runtime import distributed
from metricopt_ext.runtime.identity import FIRST_LOSS, claim, fingerprint, fingerprint_of_code, sole_writer
from metricopt_ext.tasks.inference_file import INFERENCE, read_inference, save_inference
from metricopt_ext.tasks.ledger import Ledger
from metricopt_ext.tasks.log import Log
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.settings import Settings
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.tasks.trajectories import TRAJECTORIES, TrajectoryStore
from metricopt_ext.utils.files import read_json, remove_unfinished, write_atomically

FORMAT = 10  # of what is kept: a folder of another format is not resumed
IDENTITY, EVALUATIONS, HOLDOUT = "identity.json", "log.jsonl", "holdout.jsonl"
CARD = "README.md"
ADAPTER = "adapter.safetensors"  # written last: it says that a run has finished
SETTINGS, SEEDS = "run.json", "seed-*"  # of a tool's run, and its seeds' folders


class RunFolder:
    """The folder of one run of `optimize_metric`; without a path nothing is kept.

    Of ranks that share a run, the first alone reads and writes it.

    Args:
        path: The folder; None for memory only.
        identity: What the run depends on; see `identity_of`. Not looked at without a path. By an empty one it is only
            seen that the folder could be taken, long before a run.
    """

    def __init__(self, path: str | Path | None, identity: dict[str, Any]) -> None:
        self.path: Path | None = None if path is None else Path(path).absolute()  # a metric may change the directory
        self.identity: dict[str, Any] = identity
        self.check_held: Callable[[], None] = lambda: None  # refuses to write once the folder was left
        self._charge: Callable[[], None] = lambda: None

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
            OSError: It can't be written to.
        """
        with ExitStack() as held:
            distributed.only_first(lambda: self._take(held, resume))
            yield

    def _take(self, held: ExitStack, resume: bool) -> None:
        if (path := self.path) is None:
            return
        # First: of two runs that begin at once, one alone may claim.
        self.check_held = held.enter_context(sole_writer(path))
        if any((path / name).exists() for name in (IDENTITY, EVALUATIONS, TRAJECTORIES)):
            if not resume:
                raise FileFormatError(f"{path} holds an earlier run; resume it, or use another output folder")
            try:
                read_json(path / IDENTITY)
            except (OSError, FileFormatError) as error:
                raise FileFormatError(
                    f"{path} holds a run, but its {IDENTITY} is missing or damaged, so nobody can tell which; use"
                    " another output folder"
                ) from error
        if self.identity:
            claim(path / IDENTITY, self.identity)  # it guards the evaluations too
            remove_unfinished(path)
            remove_unfinished(path / TRAJECTORIES)

    @contextmanager
    def own_ledger(self, metric: Metric, queries: int) -> Iterator[None]:
        """Count a run in its own ledger, which the metric's ledger is charged for by `keep`.

        A run with a folder that fails before all is kept is not charged: its work is reused when it is resumed. Without
        a folder it is charged for what it spent.

        Args:
            metric: It has the run's ledger meanwhile.
            queries: The run's budget.
        """
        own, metric.ledger = metric.ledger, Ledger(queries)
        charge = partial(own.charge, metric.ledger.spent_on)
        try:
            yield
        finally:
            metric.ledger = own
            if self.path is None:
                charge()
            else:
                self._charge = charge

    def log(self, metric: Metric, name: str = EVALUATIONS) -> Log:
        """Return a log of the run; of ranks that share it, the first one's is in the folder, the others' in memory."""
        path = None if self.path is None else self.path / name
        log = distributed.only_first(lambda: Log(path, metric, self.check_held)) or Log(None, metric)
        log.entries, log.sittings = distributed.on_first(lambda: (log.entries, log.sittings))
        return log

    def keep(self, task: FinetuneTask, result: Result) -> None:
        """Write what was learned, settings of inference, a card, and the adapter with what is applied to it.

        The run, which is complete then, is charged.

        Args:
            task: Has the adapter, the metric, and the settings.
            result: The run's.
        """
        distributed.on_first(lambda: self._write(task, result))
        self._charge()

    def _write(self, task: FinetuneTask, result: Result) -> None:
        if self.path is None:
            return
        self.check_held()
        f = None if result.fit is None else result.fit.f
        for name, learned in (("value_function", f), ("update_rule", result.rule)):
            if learned is not None:
                learned.save(self.path / f"{name}.safetensors")
        if task.settings is not None and result.settings is not None:
            save_inference(self.path / INFERENCE, task.settings, result.settings.after)
        write_atomically(self.path / CARD, result.card(task.adapter).encode())
        task.adapter.save(self.path / ADAPTER)


def identity_of(
    settings: dict[str, Any], task: FinetuneTask, starts: Mapping[str, Start | StartLine], seed: int
) -> dict[str, Any]:
    """Return what a run depends on, as JSON, to tell it from other runs.

    Of loss, labels and batches it is the loss of the first one, and of the metric's function its own code. Data that
    the metric alone sees is not looked at.

    Args:
        settings: The strategy's, with sizes that follow from the budget: the tasks of a round, or the queries of a
            search.
        task: Its model's weights count, so a retrained model makes another run.
        starts: What a guided search may begin from.
        seed: The run's seed.
    """
    metric = task.metric
    limits = {name: fingerprint_of_code(each) for name, each in metric.also.items() if name in metric.subject_to}
    of_metric = {**metric.settings, "code": metric.function, "also": limits}
    with task.keeping_weights():
        first_loss = task.first_loss(seed)
    content = {
        **settings,
        "starts": {name: _identity_of_start(each) for name, each in starts.items()} or None,
        "format": FORMAT,
        "seed": seed,
        "metric": {name: fingerprint_of_code(each) if callable(each) else each for name, each in of_metric.items()},
        "adapter": task.adapter.signature.to_json(),
        "weights": fingerprint(task.adapter.base_state_dict()),
        FIRST_LOSS: first_loss,
        "population": task.at_once,
        "gradients": None if task.gradients is None else fingerprint({"gradients": task.gradients}),
        "settings of inference": None if task.settings is None else task.settings.identity(),
    }
    return {key: value for key, value in content.items() if value is not None}


def _identity_of_start(start: Start | StartLine) -> Any:
    if isinstance(start, StartLine):
        return [start.low, start.high, *start.first, *map(_identity_of_start, start.ends)]
    return [start.digest, dict(start.settings), start.presumed] if start.settings or start.presumed else start.digest


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
        ValueError: ``settings`` lacks one that the run had, or can't have its value.

    Examples:
        >>> adapter = load_run(model, "out/seed-0")  # doctest: +SKIP
    """
    finished = _finished(Path(folder))
    file = finished / INFERENCE
    read = read_inference(file) if file.exists() else {}  # first: of a damaged file the model gets nothing
    values = {name: value for name, (_, value) in read.items()}
    if settings is not None:
        if not read:
            raise FileFormatError(f"{finished} has no {INFERENCE}, as its run tuned no settings; leave settings out")
        settings.complete(values)
    adapter, said = load_adapter(model, finished / ADAPTER), ""
    changed = [f"{name} {shown(old)} -> {shown(new)}" for name, (old, new) in read.items() if old != new]
    if settings is not None:
        said = settings.set_on(model, values)
    elif changed:
        said = (
            f"{finished} was tuned with {', '.join(changed)}, which the model does not hold; give load_run the run's"
            f" Settings, settings=, or apply these by settings.applied(mo.load_inference({str(file)!r}))"
        )
    if said:
        warnings.warn(said, stacklevel=2)
    return adapter


def _finished(folder: Path) -> Path:
    """Return the folder of the one run that a folder holds, which must have finished."""
    seeds = list(folder.glob(f"{SEEDS}/"))
    own = (folder / IDENTITY).exists()
    places = [folder, *seeds, *([] if own else [folder / "search"])]  # the last as Detectron2's tools name it
    finished = [each for each in places if (each / ADAPTER).exists()]
    if len(seeds) > 1 and folder not in finished:
        names = ", ".join(sorted(each.name for each in seeds))
        raise FileFormatError(f"{folder} holds several seeds, each with a model of its own; name one of {names}")
    if not finished:
        raise FileFormatError(
            f"{folder} holds no finished run: neither {ADAPTER}, which is written last, nor a folder {SEEDS} with it;"
            f" if a run was begun there, which {IDENTITY} shows, finish it with the arguments of before and"
            " resume=True, or --resume of a tool"
        )
    return finished[0]
