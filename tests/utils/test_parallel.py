"""Seeds one after another and side by side."""

import pytest
import torch

from metricopt_ext.errors import ConfigError
from metricopt_ext.utils.parallel import run_seeds
from metricopt_ext.utils.progress import Watcher


@pytest.mark.parametrize(("workers", "threads"), [(0, 1), (1, 0), (-1, 1)])
def test_workers_and_threads_are_at_least_one(workers: int, threads: int) -> None:
    with pytest.raises(ConfigError, match=f"workers={workers}, threads={threads}: both must be at least 1"):
        run_seeds(lambda seed, watcher: pytest.fail("was run"), [0], queries=1, workers=workers, threads=threads)


def test_the_number_of_threads_is_put_back() -> None:
    before = torch.get_num_threads()
    seen = run_seeds(lambda seed, watcher: torch.get_num_threads(), [0], queries=1, workers=1, threads=before + 1)
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


def test_the_number_of_threads_is_put_back_after_an_error() -> None:
    def failing(seed: int, watcher: Watcher) -> None:
        raise ConfigError("no")

    before = torch.get_num_threads()
    with pytest.raises(ConfigError):
        run_seeds(failing, [0, 1], queries=1, workers=1, threads=before + 1)
    assert torch.get_num_threads() == before
