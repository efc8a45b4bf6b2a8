"""A report made up of known numbers."""

from collections.abc import Callable

import numpy as np
import pytest

from metricopt_ext.experiment.method import METHODS
from metricopt_ext.experiment.record import Outcome, SeedRecord
from metricopt_ext.experiment.report import Report
from metricopt_ext.utils.machine import Machine
from metricopt_ext.value.value_function import Quality

GOOD = Quality(spearman=0.9, mae=0.01, constant_mae=0.1, points=100, trajectories=40, near_mae=0.01, headroom=0.1)

POOR = Quality(spearman=0.1, mae=0.2, constant_mae=0.1, points=100, trajectories=40, near_mae=0.2, headroom=0.1)

MACHINE = Machine("A processor", "AVX2", 1, "cpu")

BASE = {name: 0.5 + 0.05 * i for i, name in enumerate(METHODS)}


def _report(tests: dict[str, list[float]] | None = None, *, seeds: int = 3, maximize: bool = True) -> Report:
    rng, records = np.random.default_rng(0), []
    noise = rng.normal(size=(seeds, len(METHODS), 2)) / 100
    for row in range(seeds):
        outcomes = {}
        for column, (name, value) in enumerate(BASE.items()):
            validation, test = (value + noise[row, column]).tolist()
            if tests and name in tests:
                test = tests[name][row]
            outcomes[name] = [Outcome(validation, test, 10 * column, column, seconds=float(row + column))]
        records.append(
            SeedRecord(
                seed=row + 4,
                outcomes=outcomes,
                quality=GOOD if row else POOR,
                kept="metricopt" if row else "start",
                setting=(0.3, 0.15),
                split_half=0.75,
                chance=0.01,
                guard="halves",
                curves={name: (0.5 + noise[row, :3, 0]).tolist() for name in ("loss_finetune", "metricopt")},
                true=noise[row, :, 0].tolist(),
                predicted=noise[row, :, 1].tolist(),
                machine=MACHINE,
            )
        )
    return Report("classification/toy", "accuracy", maximize, records, {"queries": 600, "guard": {"confidence": 0.84}})


@pytest.fixture
def report() -> Callable[..., Report]:
    """Make a report; ``tests`` gives methods' test metrics by seed, in place of a trend with some noise."""
    return _report
