"""Runs that are stopped."""

from collections.abc import Callable
from typing import Any

import pytest

from metricopt_ext.tasks.metric import Metric


def stopped_after(queries: int, run: Callable[[], object]) -> None:
    """Start a run and press Ctrl-C in place of evaluating the metric once more than ``queries`` times."""
    evaluate, done = Metric.judge, 0

    def judge(self: Metric, *arguments: Any) -> Any:
        nonlocal done
        done += 1
        if done > queries:
            raise KeyboardInterrupt
        return evaluate(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Metric, "judge", judge)
        with pytest.raises(KeyboardInterrupt):
            run()
