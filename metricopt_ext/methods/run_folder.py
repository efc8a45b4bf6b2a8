"""What a run keeps in its folder so that it can be resumed: trajectories and evaluations, under its identity."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from metricopt_ext.errors import FileFormatError
from metricopt_ext.methods.model_card import write_card
from metricopt_ext.methods.result import Result
from metricopt_ext.runtime import distributed
from metricopt_ext.runtime.identity import Held, claim, sole_writer
from metricopt_ext.tasks.inference_file import INFERENCE, save_inference
from metricopt_ext.tasks.ledger import Ledger
from metricopt_ext.tasks.log import Log
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.tasks.trajectories import TRAJECTORIES, TrajectoryStore
from metricopt_ext.utils.files import read_json, remove_unfinished

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
