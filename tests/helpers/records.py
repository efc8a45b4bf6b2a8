"""The record of a seed, with all that one may hold."""

from metricopt_ext.experiment.record import Outcome, SeedRecord
from metricopt_ext.utils.machine import Machine
from metricopt_ext.value.value_function import Quality

QUALITY = Quality(0.5, 0.1, 0.2, 9, 3, 0.1, 0.2)


def record() -> SeedRecord:
    """Return a record, always the same."""
    return SeedRecord(
        seed=3,
        outcomes={"pretrained": [Outcome(0.1, 0.2, 0, 0, 0.0)], "metricopt": [Outcome(1 / 3, 0.1 + 0.2, 9, 2, 1.5, 4)]},
        quality=QUALITY,
        kept="metricopt",
        setting=(0.0, 0.15),
        split_half=0.5,
        chance=0.01,
        guard="halves",
        curves={"metricopt": [0.1, 0.2]},
        true=[0.5],
        predicted=[0.25],
        machine=Machine("A processor", "AVX2", 1, "cpu"),
        searched=[0.1, 0.2],
        queries={"search": 9},
        also={"recall[a]": {"validation": (0.1 + 0.2, 1 / 3), "test": (0.0, 1.0)}},
        made_of={"zebra": (0.1 + 0.2, 1 / 3), "ape": (0.5, None)},
        promised=0.25,
        holding=7,
        settings={"size": (1.0, 1.41)},
    )
