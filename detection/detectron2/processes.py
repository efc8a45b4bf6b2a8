"""What Detectron2's processes do together, and what each does by itself."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TypeVar
from unittest import mock

from detectron2.utils import comm

from metricopt_ext.errors import MetricOptError, RankError

T = TypeVar("T")


@contextmanager
def alone() -> Iterator[None]:
    """Let this process work as if it were the only one, with Detectron2's loaders, evaluators and trainers.

    They ask Detectron2's ``comm`` for the other processes, which sees no torch.distributed meanwhile. A layer that
    asks torch itself, torch.nn.SyncBatchNorm in training mode, is not reached by this.
    """
    with mock.patch.object(comm, "dist", SimpleNamespace(is_available=lambda: False)):
        yield


def on_main_process(compute: Callable[[], T]) -> T:
    """Return to every process what the main one computes, or raise its error in all of them: none waits for another.

    Raises:
        MetricOptError: What was raised.
        RankError: Something else was raised, in the main process as it is.
    """
    outcome: T | MetricOptError | None = None
    own: BaseException | None = None
    if comm.is_main_process():
        try:
            outcome = compute()
        except MetricOptError as error:
            outcome = error
        except BaseException as error:
            own, outcome = error, RankError(f"the main process has ended: {type(error).__name__}: {error}")
    outcome = comm.all_gather(outcome)[0]
    if own is not None:
        raise own
    if isinstance(outcome, MetricOptError):
        raise outcome
    return outcome
