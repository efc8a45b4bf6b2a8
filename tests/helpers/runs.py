"""What a run of any of the task's tools is held to."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.programs import refused
from metricopt_ext.tasks.metric import Metric

KEPT = frozenset({".lock", "log.txt", "run.json", "report.json", "report.md", "report.html", "events"})
"""What each run's folder holds besides its seeds and pictures."""


def check_needs_resume(tool: ModuleType, config: Path, folder: Path, settings: Sequence[str]) -> None:
    """Check that a tool neither overwrites a finished run nor goes on from one of other settings."""
    message = refused(tool, "--config-file", config, "--output-dir", folder, *settings)
    assert str(folder) in message
    assert "add --resume" in message
    message = refused(tool, "--config-file", config, "--output-dir", folder, "--resume", *settings, "finetune.lr=0.07")
    assert "another run: finetune.lr was" in message


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
