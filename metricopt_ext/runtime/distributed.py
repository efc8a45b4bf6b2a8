"""The processes of a run under torchrun, its ranks: they share the evaluations, and end with one result.

All ranks run the same program. What costs time is dealt among them by `each`, what must not be done twice is left to
the first by `on_first`; both return the same on every rank, so that all go on alike. A single process runs the same
code. Only the first rank reads and writes a run's folder, so that ranks need no file system in common.

All leave `sharing` together: a rank that leaves it by an error, or is interrupted, ends the others within seconds.
"""

import io
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar
from unittest import mock

import torch
from torch import distributed, nn

from metricopt_ext.errors import ConfigError, RankError
from metricopt_ext.runtime.identity import same
from metricopt_ext.runtime.launched import launched, restarts

Item = TypeVar("Item")
Result = TypeVar("Result")

MEETING = timedelta(minutes=30)  # how long the first rank to arrive waits for the others
WORKING = timedelta(days=30)  # how long one may work on its share; a rank that dies is noticed at once, all the same
LOOKING = 1.0  # seconds after which a rank that waits looks again whether another has left

_joined = False  # whether the processes are to share work
_group: Any = None  # of those that do right now, whatever torch's own group is made for
_alone = False  # whether this one works on something of its own meanwhile


class _Outcome(NamedTuple):
    value: Any = None
    error: Exception | None = None


def world() -> int:
    """Return how many processes share the work right now; 1 outside `sharing`."""
    return 1 if _group is None or _alone else distributed.get_world_size()


def rank() -> int:
    """Return which of them this is, from 0; 0 outside `sharing`."""
    return 0 if _group is None or _alone else distributed.get_rank()


def several() -> bool:
    """Whether `sharing` would share the work with other processes, or does."""
    return _joined and not _alone and distributed.get_world_size() > 1


@contextmanager
def sharing(alike: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Share the work with the other processes that have `joined`, if there are any.

    Each process has to enter this at the same point of the same program. Inside another one it does nothing. All leave
    together: where one leaves by an error of its own, or is interrupted, the others get a `RankError` within seconds,
    wherever they wait for it.

    Args:
        alike: What must be the same on every rank, by name.

    Raises:
        RankError: A rank has not come within half an hour, or one has left.
        ConfigError: Something differs on a rank.
    """
    global _group
    if _group is not None or not several():
        yield
        return
    _group = _awaited(partial(distributed.new_group, backend="gloo", timeout=WORKING), MEETING)
    try:
        _refuse_differences(dict(alike or {}))
        yield
        _awaited(partial(distributed.barrier, _group))
    except BaseException as error:
        _left(error)
        raise
    finally:
        group, _group = _group, None
        distributed.destroy_process_group(group)


def each(function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """Yield ``function(item)`` for each item, in order; ranks take turns, so as many items as ranks run at once.

    Args:
        function: Its results depend on the item alone. Of several ranks, it sees no process group.
        items: As many on every rank.

    Raises:
        Exception: What the function raised, on every rank, after the results before it.
        RankError: It waited for the other ranks, each of which runs another item.
    """
    for at in range(0, len(items), world()):
        wave = items[at : at + world()]
        own = _tried(partial(function, wave[rank()])) if rank() < len(wave) else _Outcome()
        for other in range(len(wave)):
            yield _sent_by(other, own)


def on_first(function: Callable[[], Result]) -> Result:
    """Return what a function returns on the first rank, which alone runs it as `each` does; or raise its error on all.

    Raises:
        RankError: It waited for the other ranks.
    """
    result: Result = _sent_by(0, _tried(function) if rank() == 0 else _Outcome())
    return result


def only_first(function: Callable[[], Result]) -> Result | None:
    """Run a function on the first rank alone, and return what it returns there, None on the others.

    Raises:
        Exception: What the function raised, on every rank.
        RankError: It waited for the other ranks.
    """
    own = _tried(function) if rank() == 0 else _Outcome()
    _sent_by(0, own._replace(value=None))
    return own.value  # type: ignore[no-any-return]


@contextmanager
def joined() -> Iterator[None]:
    """Share work with the other processes meanwhile: of torch's process group, or of one that torchrun has prepared.

    Without either, or outside of this, a process works by itself.
    """
    global _joined
    started = launched() and not (_alone or _initialized())
    if started:
        _begin()
    before, _joined = _joined, _initialized()
    try:
        with left_in_order() if started else nullcontext():
            yield
    finally:
        _joined = before


@contextmanager
def left_in_order() -> Iterator[None]:
    """Leave torch's process group at the end, if there is one: all ranks together, but at once after an error.

    A process that ends while its group's threads still serve another one can abort.
    """
    try:
        yield
        if _initialized():
            with suppress(RuntimeError):  # a rank that has ended before says itself why
                distributed.barrier()
    finally:
        if _initialized():
            distributed.destroy_process_group()


def _begin() -> None:
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    store, own, number = next(rendezvous("env://", timeout=MEETING))
    # The launcher may keep its store when it starts processes again, with addresses in it of those that are gone.
    store = PrefixStore(f"metricopt_ext/{restarts()}", store)
    distributed.init_process_group("gloo", store=store, rank=own, world_size=number, timeout=WORKING)


def restarted() -> bool:
    """Whether torchrun has started this program again (``--max-restarts``), after a rank has died."""
    return restarts() > 0


def _initialized() -> bool:
    return bool(distributed.is_available() and distributed.is_initialized())


def _refuse_differences(own: dict[str, Any]) -> None:
    for other, theirs in enumerate(list(each(lambda rank: own, range(world())))):
        for name, value in own.items():
            if not same(theirs.get(name), value):
                raise ConfigError(
                    f"{name} is {value!r} on rank {rank()}, {theirs.get(name)!r} on rank {other}; give all ranks the"
                    " same"
                )


def _tried(function: Callable[[], Any]) -> _Outcome:
    try:
        if world() == 1:
            return _Outcome(function())
        with _working_alone():
            return _Outcome(function())
    except Exception as error:
        if world() == 1 or "process group" not in str(error):  # in torch's words, or in those of `_refused`
            return _Outcome(error=error)
        return _Outcome(
            error=RankError(
                f"rank {rank()} asked for the other ranks where it works by itself, as in an evaluation of the metric"
                f" ({error}): they evaluate other points or wait for this one, and don't answer. Give each rank's"
                " metric all the data and no collective; or search without distributed.joined(), so that all ranks"
                " evaluate each point together"
            )
        )


@contextmanager
def _working_alone() -> Iterator[None]:
    """Let this process see no process group, so that what would share its work with the others does all of it here.

    A group that it holds already refuses: of the other ranks each does something else, and would not answer. A model
    in DistributedDataParallel is the model itself.
    """
    global _alone
    from torch._C._distributed_c10d import _register_process_group, _unregister_all_process_groups
    from torch.distributed import distributed_c10d as c10d

    def unwrapped(wrapped: nn.parallel.DistributedDataParallel, *inputs: Any, **options: Any) -> Any:
        return wrapped.module(*inputs, **options)

    whole, names = distributed.group.WORLD, dict(c10d._world.pg_names)
    _alone, distributed.group.WORLD = True, None
    _unregister_all_process_groups()  # functional collectives find them by their names
    try:
        with (
            mock.patch.object(distributed.ProcessGroup, "__getattribute__", _refused),
            mock.patch.object(nn.parallel.DistributedDataParallel, "forward", unwrapped),
            mock.patch.object(c10d, "rendezvous", _refused),  # by which a new group would begin
        ):
            yield
    finally:
        _alone, distributed.group.WORLD = False, whole
        for group, name in names.items():
            _register_process_group(name, group)


def _refused(*asked: Any, **options: Any) -> NoReturn:
    raise RankError("a process group can't be used here")


def _sent_by(other: int, own: _Outcome) -> Any:
    """Return what one of the ranks has, on all of them, or raise its error; each gives its own."""
    if world() > 1:
        sent = [_packed(own) if other == rank() else b""]
        _awaited(partial(distributed.broadcast_object_list, sent, src=other, group=_group))
        own = own if other == rank() else _unpacked(sent[0])
    if own.error is None:
        return own.value
    if other != rank():
        own.error.told_by_rank = other  # type: ignore[attr-defined]
    raise own.error


def _awaited(exchange: Callable[[], Any], most: timedelta = WORKING) -> Any:
    """Run an exchange with the other ranks, in a thread of its own: so Ctrl-C and a rank that has left end the wait.

    Raises:
        RankError: Another rank has left or died, or has not come in time.
    """
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(exchange())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()  # one that is left waiting must not keep the process
    until, left = time.monotonic() + most.total_seconds(), ""
    while not wait([answer], LOOKING).done:
        if left:
            raise RankError(f"another rank has ended: {left}")
        left = _left()  # all may leave by an error that they share: then this one gets it in the time until it looks
        if time.monotonic() > until:
            raise RankError("not every rank has come to this point in half an hour; call it on all ranks")
    try:
        return answer.result()
    except RuntimeError as error:
        raise RankError(f"another rank has ended ({_left() or error}); its own message says why") from error


def _left(error: BaseException | None = None) -> str:
    """Return which rank has left, and why; empty if none has.

    Args:
        error: By which this one leaves. The first to tell is heard.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    told = "" if error is None else f"rank {distributed.get_rank()}, by {type(error).__name__}: {error}"[:500]
    try:  # by the store where they met, which needs no answer from another rank
        store = _get_default_store()
        return store.compare_set(f"metricopt_ext/left/{_group and _group.group_name}", "", told).decode()
    except RuntimeError as gone:
        return f"where they met is gone ({gone})"


def _packed(value: Any) -> bytes:
    packed = io.BytesIO()
    try:
        torch.save(value, packed)
    except Exception as error:  # of any kind: an object decides itself how it is pickled
        if not isinstance(value, _Outcome) or value.error is None:
            raise TypeError(f"{type(value).__name__} can't be sent to other ranks: {error}") from error
        return _packed(_Outcome(error=RuntimeError(f"{type(value.error).__name__}: {value.error}")))
    return packed.getvalue()


def _unpacked(packed: bytes) -> Any:
    """Return what another rank packed, its tensors on this rank's own device of the same kind."""

    def placed(storage: Any, location: str) -> Any:
        return storage.cuda() if location.startswith("cuda") else storage

    return torch.load(io.BytesIO(packed), map_location=placed, weights_only=False)
