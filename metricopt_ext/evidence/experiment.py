"""One seed of any task's tool: set it up, run MetricOpt beside its rivals, keep the record."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from metricopt_ext.evidence.compare import compare
from metricopt_ext.evidence.record import SeedRecord
from metricopt_ext.evidence.rivals import Rival
from metricopt_ext.evidence.run_config import RunConfig
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.progress import Watcher


@dataclass(frozen=True)
class Experiment:
    """What one seed runs.

    Attributes:
        task: Its loss sees the train data, its metric the validation data.
        test_metric: The same metric on the test data.
        rivals: Further methods by name, see `evidence.compare`.
        follow_ups: Further methods that go on from MetricOpt's result.
        finish: Writes what else is to be kept, e.g. pictures, once the model has MetricOpt's phi.
    """

    task: FinetuneTask
    test_metric: Metric
    rivals: Mapping[str, Rival]
    follow_ups: Mapping[str, Rival]
    finish: Callable[[], object]


def run_experiment(
    set_up: Callable[[Path], Experiment], config: RunConfig, folder: Path, resume: bool, seed: int, watcher: Watcher
) -> SeedRecord:
    """Run one seed and keep all of it in ``folder/seed-N``; a seed whose record is there is not run again.

    Args:
        set_up: Makes the experiment; is given the seed's folder.
        config: The settings.
        folder: The run's folder.
        resume: Go on with what an interrupted run left there.
        seed: The seed.
        watcher: Is told of the progress.
    """
    folder = folder / f"seed-{seed}"
    record_file = folder / "record.json"
    if resume and record_file.exists():
        watcher.done()
        return SeedRecord.load(record_file)
    watcher.stage("train the model")
    experiment = set_up(folder)
    record = compare(
        experiment.task,
        experiment.test_metric,
        experiment.rivals,
        experiment.follow_ups,
        queries=config.queries,
        recipe=config.recipe.build(),
        seed=seed,
        folder=folder,
        best_evals=config.best_evals,
        pictures=config.pictures and seed == config.seed,
        resume=resume,
        watcher=watcher,
    )
    experiment.finish()
    record.save(record_file)
    return record
