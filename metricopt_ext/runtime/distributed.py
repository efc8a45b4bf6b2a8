"""The processes of a run under torchrun, its ranks: they share the evaluations and rollouts, and end with one result.

All ranks run the same program. What costs time is dealt among them by `each`, what must not be done twice is left to
the first by `on_first`; both return the same on every rank, so that all go on alike. A single process runs the same
code. Only the first rank reads and writes a run's folder, so that ranks need no file system in common.

All leave `sharing` together: a rank that leaves it by an error, or is interrupted, ends the others within seconds.
"""

import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import distributed

from metricopt_ext.errors import ConfigError, RankError
from metricopt_ext.runtime.identity import same
from metricopt_ext.runtime.launched import launched, restarts

Item = TypeVar("Item")
Result = TypeVar("Result")

MEETING = timedelta(minutes=30)  # how long the first rank to arrive waits for the others
WORKING = timedelta(days=30)  # how long one may work on its share; a rank that dies is noticed at once, all the same
LOOKING = 0.5  # seconds after which a rank that waits looks again whether another has left
GRACE = 2.0  # seconds that an exchange has to end when one has: all may leave by an error that they share

# How the methods of a process group begin that wait for other ranks; the names differ from one torch to the next.
WAITING = ("all", "barrier", "broadcast", "gather", "merge", "monitored", "recv", "reduce", "scatter", "send", "split")

_joined = False  # whether the processes are to share work
_sharing = _apart = False  # whether they do right now, or must not
_session = 0  # how often they have begun to, the same on every rank
_groups: dict[Any, Any] = {}  # our own group of all processes, by torch's


class _Outcome(NamedTuple):
    value: Any = None
    error: Exception | None = None


def world() -> int:
    """Return how many processes share the work right now; 1 outside `sharing`."""
    return distributed.get_world_size() if _sharing else 1


def rank() -> int:
    """Return which of them this is, from 0; 0 outside `sharing`."""
    return distributed.get_rank() if _sharing else 0


def several() -> bool:
    """Whether `sharing` would share the work with other processes, or does."""
    return _joined and not _apart and distributed.get_world_size() > 1


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
    global _sharing, _session
    if _sharing or not several():
        yield
        return
    _session += 1
    try:
        _meet()
        _sharing = True
        _refuse_differences(dict(alike or {}))
        yield
        _gathered(None)
    except BaseException as error:
        _tell_of(error)
        _groups.clear()  # an exchange that was left may still wait there
        raise
    finally:
        _sharing = False


@contextmanager
def apart() -> Iterator[None]:
    """Work on something of this process's own for a while: `sharing` has no effect inside."""
    global _apart, _sharing
    before, _apart, _sharing = (_apart, _sharing), True, False
    try:
        yield
    finally:
        _apart, _sharing = before


def each(function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """Yield ``function(item)`` for each item, in order; ranks take turns, so as many items as ranks run at once.

    Args:
        function: Its results depend on the item alone. It runs `apart`.
        items: As many on every rank.

    Raises:
        Exception: What the function raised, on every rank, after the results before it.
    """
    for at in range(0, len(items), world()):
        wave = items[at : at + world()]
        own = _tried(partial(function, wave[rank()])) if rank() < len(wave) else _Outcome()
        for other, outcome in enumerate(_gathered(own)[: len(wave)]):
            yield _value(outcome, other)


def everywhere(function: Callable[[], Result]) -> list[Result]:
    """Return what a function returns on each rank, in their order; all run it, `apart`.

    Raises:
        Exception: What the function raised on the first rank where it did, on every rank.
    """
    return [_value(outcome, other) for other, outcome in enumerate(_gathered(_tried(function)))]


def on_first(function: Callable[[], Result]) -> Result:
    """Return what a function returns on the first rank, which alone runs it, `apart`; or raise its error on all."""
    own = _tried(function) if rank() == 0 else _Outcome()
    if world() > 1:
        sent = [_packed(own) if rank() == 0 else b""]
        _awaited(lambda: distributed.broadcast_object_list(sent, src=0, group=_group()))
        own = own if rank() == 0 else _unpacked(sent[0])
    result: Result = _value(own)
    return result


def only_first(function: Callable[[], Result]) -> Result | None:
    """Run a function on the first rank alone, `apart`, and return what it returns there, None on the others.

    Raises:
        Exception: What the function raised, on every rank.
    """
    own = _tried(function) if rank() == 0 else _Outcome()
    on_first(partial(_value, own._replace(value=None)))
    return own.value  # type: ignore[no-any-return]


@contextmanager
def joined() -> Iterator[None]:
    """Share work with the other processes meanwhile: of torch's process group, or of one that torchrun has prepared.

    Without either, or outside of this, a process works by itself.
    """
    global _joined
    started = launched() and not _initialized()
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
        _groups.clear()
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
    for other, theirs in enumerate(_gathered(own)):
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
        with apart(), _waiting_refused():
            return _Outcome(function())
    except Exception as error:
        return _Outcome(error=error)


def _value(outcome: _Outcome, of: int = 0) -> Any:
    if outcome.error is not None:
        if of != rank():
            outcome.error.told_by_rank = of  # type: ignore[attr-defined]
        raise outcome.error
    return outcome.value


def _gathered(own: Any) -> list[Any]:
    """Return what each rank has, in their order."""
    if world() == 1:
        return [own]
    parts: list[Any] = [None] * world()
    sent = _packed(own)
    _awaited(lambda: distributed.all_gather_object(parts, sent, _group()))
    return [own if other == rank() else _unpacked(part) for other, part in enumerate(parts)]


def _meet() -> None:
    """Wait until every rank has come to this point."""
    try:
        _awaited(
            lambda: distributed.monitored_barrier(_group(), timeout=MEETING, wait_all_ranks=True),
            MEETING.total_seconds() + GRACE,
        )
    except RankError as error:
        raise RankError(f"not every rank has come to this point ({error}); call it on all ranks") from error


def _awaited(exchange: Callable[[], None], seconds: float = WORKING.total_seconds()) -> None:
    """Run an exchange with the other ranks, in a thread of its own: so Ctrl-C and a rank that has left end the wait.

    Raises:
        RankError: Another rank has left or died, or has not come in time.
    """
    failed: list[Exception] = []
    done = threading.Event()

    def run() -> None:
        try:
            exchange()
        except Exception as error:
            failed.append(error)
        finally:
            done.set()

    threading.Thread(target=run, daemon=True).start()  # one that is left waiting must not keep the process
    until = time.monotonic() + seconds
    while not done.wait(LOOKING):
        if (left := _left()) and not done.wait(GRACE):
            raise RankError(f"another rank has ended: {left}")
        if time.monotonic() > until:
            raise RankError(f"no answer in {seconds:.0f} s")
    if failed and isinstance(failed[0], RuntimeError):
        why = _left() or str(failed[0])
        raise RankError(f"another rank has ended ({why}); its own message says why") from failed[0]
    if failed:
        raise failed[0]


def _tell_of(error: BaseException) -> None:
    """Let ranks that wait for this one know that it won't come; the first to tell is heard."""
    told = f"rank {distributed.get_rank()}, by {type(error).__name__}: {error}"[:500]
    with suppress(RuntimeError):  # where the ranks met is gone: its process has ended
        _store().compare_set(_ended(), "", told)


def _left() -> str:
    """Return which rank has left, and why; empty if none has."""
    try:
        return _store().get(_ended()).decode(errors="replace") if _store().check([_ended()]) else ""
    except RuntimeError as error:
        return f"where they met is gone ({error})"


def _ended() -> str:
    return f"metricopt_ext/ended/{_session}"


def _store() -> Any:
    """Return the store by which the ranks have met, which needs no answer from another rank."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


@contextmanager
def _waiting_refused() -> Iterator[None]:
    """Refuse what waits for the other ranks, of which each does something else meanwhile.

    Threads that were there before may go on: a checkpoint may be under way.

    Raises:
        RankError: Something waited, whatever became of the error that it got.
    """
    elsewhere = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
    called: list[str] = []
    over = False

    def refused(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if over or threading.get_ident() in elsewhere:
                return original(*args, **kwargs)
            called.append(name)
            raise _refusal(name)

        return call

    patched = _what_waits()
    try:
        for owner, name, original in patched:
            setattr(owner, name, refused(name, original))
        yield
    except Exception as error:
        if called:
            raise _refusal(called[0]) from error
        raise
    finally:
        over = True
        for owner, name, original in patched:
            setattr(owner, name, original)
    if called:
        raise _refusal(called[0])


def _what_waits() -> list[tuple[Any, str, Any]]:
    """Return the functions through which torch's collectives, sends and stores go: owner, name and function."""
    from torch.distributed.distributed_c10d import ProcessGroup, Store

    named: list[tuple[Any, str]] = [
        (ProcessGroup, name) for name in vars(ProcessGroup) if name.lstrip("_").startswith(WAITING)
    ]
    named += [(Store, "wait"), (Store, "get"), (distributed, "_broadcast_coalesced")]  # the last of them by DDP
    functional = sys.modules.get("torch.distributed._functional_collectives")
    named += [(functional, "_resolve_group"), (functional, "_resolve_group_name")]
    return [
        (owner, name, vars(owner)[name]) for owner, name in named if callable(getattr(owner, "__dict__", {}).get(name))
    ]


def _refusal(name: str) -> RankError:
    return RankError(
        f"rank {distributed.get_rank()} called torch.distributed ({name}) where it works by itself, as in an evaluation"
        " of the metric: the other ranks, which evaluate other points or wait for this one, do not answer. Give each"
        " rank's metric all the data and no collective (of torchmetrics: sync_on_compute=False); or search without"
        " distributed.joined(), so that all ranks evaluate each point together"
    )


def _group() -> Any:
    """Return a group of all processes that exchanges objects, whatever torch's own group is made for."""
    whole = distributed.group.WORLD
    if whole not in _groups:
        _groups.clear()
        _groups[whole] = distributed.new_group(backend="gloo", timeout=WORKING)
    return _groups[whole]


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
