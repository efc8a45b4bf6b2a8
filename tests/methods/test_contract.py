"""Ways to run a search that only whole runs have keep to the contract; for the others see tests/search."""

from pathlib import Path
from typing import Any, ClassVar

import metricopt_ext as mo
from testers.strategy import StrategyTester, World


class TestForNewClasses(StrategyTester):
    grows, ends = True, 2  # and a part of the way to it
    metric_options: ClassVar = {"new_classes": True}


class TestAssessedFirst(StrategyTester):
    """An assessment asks a search's first queries, and the search goes on from its folder."""

    grows = True

    def run(
        self, world: World, folder: Path | None, *, queries: int, seed: int, resume: bool = False, **options: Any
    ) -> mo.Result:
        if folder is not None and not resume:
            mo.assess(world.task, 12, seed=seed, output_dir=folder, callback=mo.Callback(), **world.options)
        return super().run(world, folder, queries=queries, seed=seed, resume=folder is not None, **options)
