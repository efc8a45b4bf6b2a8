"""Runs the seeds of an experiment one after another or in parallel processes; the results are the same."""

import multiprocessing
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

import torch

from metricopt_ext.errors import ConfigError
from metricopt_ext.utils.progress import Bars, QueueWatcher, Watcher, relay
from metricopt_ext.utils.threads import num_threads

Record = TypeVar("Record")


def run_seeds(
    run: Callable[[int, Watcher], Record], seeds: Sequence[int], *, queries: int, workers: int, threads: int
) -> list[Record]:
    """Run every seed and return what they return, in the order of the seeds.

    Args:
        run: ``run(seed, watcher)``; picklable if there are several workers.
        seeds: The seeds.
        queries: Queries of one seed, for the progress bars.
        workers: Number of processes, at least 1. Each has its own copy of data and model.
        threads: CPU threads of each worker, at least 1. Small models run fastest on one thread, and the same
            number everywhere makes runs repeatable to the last bit.

    Raises:
        ConfigError: ``workers`` or ``threads`` is below 1.
        MetricOptError: A seed failed; seeds that finished keep their records on disk.
    """
    if workers < 1 or threads < 1:
        raise ConfigError(f"workers={workers}, threads={threads}: both must be at least 1")
    with Bars() as bars:
        if workers == 1 or len(seeds) == 1:
            with num_threads(threads):
                return [run(seed, bars.watch(_name(seed), queries)) for seed in seeds]
        context = multiprocessing.get_context("spawn")
        with context.Manager() as manager:
            queue = manager.Queue()
            watchers = {_name(seed): bars.watch(_name(seed), queries) for seed in seeds}
            relaying = threading.Thread(target=relay, args=(queue, watchers), daemon=True)
            relaying.start()
            try:
                setting = threads, torch.are_deterministic_algorithms_enabled()
                with ProcessPoolExecutor(
                    min(workers, len(seeds)), context, initializer=_set_up, initargs=setting
                ) as pool:
                    futures = [pool.submit(run, seed, QueueWatcher(queue, _name(seed))) for seed in seeds]
                    try:
                        return [future.result() for future in futures]
                    except BaseException:
                        pool.shutdown(cancel_futures=True)
                        raise
            finally:
                queue.put(None)
                relaying.join()


def _set_up(threads: int, deterministic: bool) -> None:
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def _name(seed: int) -> str:
    return f"seed {seed}"
