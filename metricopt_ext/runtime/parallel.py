"""Runs the seeds of an experiment one after another or in parallel processes; the results are the same."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import torch

from metricopt_ext.errors import ConfigError
from metricopt_ext.runtime import distributed
from metricopt_ext.runtime.progress import Bars, Callback, QueueCallback, relay
from metricopt_ext.runtime.run_log import telling_warnings
from metricopt_ext.utils.threads import num_threads

Record = TypeVar("Record")

_progress: Any = None  # in a worker: the queue on which it reports


def run_seeds(
    run: Callable[[int, Callback], Record],
    seeds: Sequence[int],
    *,
    queries: int,
    workers: int,
    threads: int,
    shared: bool = False,
    metric: str = "",
    log: Callable[[str], None] | None = None,
) -> list[Record]:
    """Run every seed and return what they return, in the order of the seeds.

    Ranks that share the work (`distributed`) take the seeds in turn, in place of workers.

    Workers end with this process, however it ends: nothing goes on writing behind a user's back. Ctrl-C ends them at
    once; after any other error, the seeds that were begun are finished.

    Args:
        run: ``run(seed, callback)``; picklable if there are several workers.
        seeds: The seeds.
        queries: Queries of one seed, for the progress bars.
        workers: Number of processes, at least 1. Each has its own copy of data and model.
        threads: CPU threads of each worker, at least 1. Small models run fastest on one thread, and the same
            number everywhere makes runs repeatable to the last bit.
        shared: Whether ranks can share a seed, which they do where there are fewer seeds than ranks.
        metric: The metric's name, for the progress bars.
        log: Receives the lines about the progress, and the warnings; of several ranks, those of this rank's seeds.

    Raises:
        ConfigError: ``workers`` or ``threads`` is below 1.
        MetricOptError: A seed failed; seeds that finished keep their records on disk.
    """
    if workers < 1 or threads < 1:
        raise ConfigError(f"workers={workers}, threads={threads}: both must be at least 1")
    if distributed.world() > 1:
        return _run_on_ranks(run, seeds, queries, threads, shared, metric, log)
    with Bars(log=log) as bars:
        at_once = min(workers, len(seeds))
        if len(seeds) > 1:
            bars.expect("all seeds", len(seeds), queries, at_once)
        if at_once == 1:
            with num_threads(threads):
                return [_told(run, seed, bars.watch(_name(seed), queries, metric)) for seed in seeds]
        context = multiprocessing.get_context("spawn")
        queue: Any = context.SimpleQueue()
        callbacks = {_name(seed): bars.watch(_name(seed), queries, metric) for seed in seeds}
        relaying = threading.Thread(target=relay, args=(queue, callbacks), daemon=True)
        relaying.start()
        pool = ProcessPoolExecutor(at_once, context, initializer=_set_up, initargs=(queue, threads))
        try:
            futures = [pool.submit(_run, run, seed) for seed in seeds]
            pool.submit(int)  # a pool looks after the processes that it knew when work came last: now it knows all
            return [future.result() for future in futures]
        except (KeyboardInterrupt, BrokenProcessPool):
            queue = None  # a process that was killed may have left it locked
            for process in multiprocessing.active_children():
                process.kill()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
            if queue is not None:
                queue.put(None)
                relaying.join()


def _run_on_ranks(
    run: Callable[[int, Callback], Record],
    seeds: Sequence[int],
    queries: int,
    threads: int,
    shared: bool,
    metric: str,
    log: Callable[[str], None] | None,
) -> list[Record]:
    together = shared and len(seeds) < distributed.world()
    silent = together and distributed.rank() > 0
    with Bars(lines=True, log=log) as bars, num_threads(threads):
        own = seeds if together else seeds[distributed.rank() :: distributed.world()]
        if distributed.rank() == 0 and len(seeds) > 1:
            name = "all seeds" if together else "all seeds, by the first rank's own"  # it takes as many as any other
            bars.expect(name, len(own), queries, 1)

        def watched(seed: int) -> Record:
            return _told(run, seed, Callback() if silent else bars.watch(_name(seed), queries, metric))

        return [watched(seed) for seed in seeds] if together else list(distributed.each(watched, seeds))


def _run(run: Callable[[int, Callback], Record], seed: int) -> Record:
    return _told(run, seed, QueueCallback(_progress, _name(seed)))


def _told(run: Callable[[int, Callback], Record], seed: int, callback: Callback) -> Record:
    with telling_warnings(callback.warning):
        return run(seed, callback)


def _set_up(queue: Any, threads: int) -> None:
    global _progress
    _progress = queue
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # from this thread, nothing else ends the process


def _name(seed: int) -> str:
    return f"seed {seed}"
