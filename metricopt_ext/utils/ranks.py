"""The processes of a run under torchrun, its ranks: they share the evaluations and rollouts, and end with one result.

All ranks run the same program. What costs time is dealt among them by `each`, what must not be done twice is left to
the first by `on_first`; both return the same on every rank, so that all go on alike. A single process runs the same
code. Only the first rank reads and writes a run's folder, so that ranks need no file system in common.
"""

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import distributed

from metricopt_ext.errors import ConfigError, RankError
from metricopt_ext.utils.identity import same

Item = TypeVar("Item")
Result = TypeVar("Result")

MEETING = timedelta(minutes=30)  # how long the first rank to arrive waits for the others
WORKING = timedelta(days=30)  # how long one may work on its share; a rank that dies is noticed at once, all the same

_joined = False  # whether the processes are to share work
_sharing = _apart = False  # whether they do right now, or must not
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

    Each process has to enter this at the same point of the same program. Inside another one it does nothing.

    Args:
        alike: What must be the same on every rank, by name.

    Raises:
        RankError: A rank has not come within half an hour.
        ConfigError: Something differs on a rank.
    """
    global _sharing
    if _sharing or not several():
        yield
        return
    try:
        distributed.monitored_barrier(_group(), timeout=MEETING, wait_all_ranks=True)
    except RuntimeError as error:
        raise RankError(f"not every rank has come to this point ({error}); call it on all ranks") from error
    _sharing = True
    try:
        _refuse_differences(dict(alike or {}))
        yield
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


def on_first(function: Callable[[], Result]) -> Result:
    """Return what a function returns on the first rank, which alone runs it, `apart`; or raise its error on all."""
    own = _tried(function) if rank() == 0 else _Outcome()
    if world() > 1:
        sent = [_packed(own) if rank() == 0 else b""]
        with _all_there():
            distributed.broadcast_object_list(sent, src=0, group=_group())
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
    begun = _launched() and not _initialized()
    if begun:
        _begin()
    before, _joined = _joined, _initialized()
    try:
        with left_in_order() if begun else nullcontext():
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
    store = PrefixStore(f"metricopt_ext/{_restarts()}", store)
    distributed.init_process_group("gloo", store=store, rank=own, world_size=number, timeout=WORKING)


def is_first() -> bool:
    """Whether this process is the first that torchrun has started, or was not started by it; even outside `joined`."""
    return not _launched() or int(os.environ["RANK"]) == 0


def is_of_another(error: BaseException) -> bool:
    """Whether an error was first raised on another rank, which tells of it."""
    return hasattr(error, "told_by_rank")


def restarted() -> bool:
    """Whether torchrun has started this program again (``--max-restarts``), after a rank has died."""
    return _restarts() > 0


def _launched() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _initialized() -> bool:
    return bool(distributed.is_available() and distributed.is_initialized())


def _restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


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
        with apart() if world() > 1 else nullcontext():
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
    with _all_there():
        distributed.all_gather_object(parts, sent, _group())
    return [own if other == rank() else _unpacked(part) for other, part in enumerate(parts)]


@contextmanager
def _all_there() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankError(f"another rank has ended ({error}); its own message says why") from error


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
