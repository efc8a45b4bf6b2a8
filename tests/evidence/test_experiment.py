"""One seed of a real run, and several beside each other."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from metricopt_ext.classification.config import (
    ClassificationConfig,
    ClassifierAdapterConfig,
    DataConfig,
    MetricConfig,
    ModelConfig,
)
from metricopt_ext.classification.experiment import ClassificationExperiment
from metricopt_ext.errors import FileFormatError
from metricopt_ext.evidence.experiment import run_seed
from metricopt_ext.evidence.record import SeedRecord
from metricopt_ext.evidence.run_config import RecipeConfig
from metricopt_ext.utils.parallel import run_seeds


def without_seconds(record: SeedRecord) -> SeedRecord:
    outcomes = {name: [replace(each, seconds=0.0) for each in of] for name, of in record.outcomes.items()}
    return replace(record, outcomes=outcomes)


def tiny() -> ClassificationConfig:
    return ClassificationConfig(
        data=DataConfig(name="wine", fractions=[0.5, 0.25, 0.25], standardise=True),
        model=ModelConfig(name="tabular_mlp", epochs=3, batch_size=30),
        adapter=ClassifierAdapterConfig(kind="input_bias", dim=3),
        metric=MetricConfig(name="mcr"),
        recipe=RecipeConfig(steps=4, lr=0.1, evals=2, rounds=1, folds=2, trials=0, start_std=1.0),
        strategy="recipe",
        queries=30,
        batch_size=9,
        best_evals=2,
    )


@pytest.mark.slow
def test_workers_change_nothing_and_pass_their_errors_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny()
    alone = run_seeds(
        partial(run_seed, ClassificationExperiment, config, tmp_path / "a", False),
        [4, 2],
        queries=30,
        workers=1,
        threads=1,
    )
    assert [record.seed for record in alone] == [4, 2]
    assert alone[0].outcomes["loss_finetune"] != alone[1].outcomes["loss_finetune"]
    (tmp_path / "b" / "seed-1").mkdir(parents=True)
    (tmp_path / "b" / "seed-1" / "record.json").write_text("{")
    capsys.readouterr()
    with pytest.raises(FileFormatError, match=r"seed-1.record\.json is not valid JSON"):
        run_seeds(
            partial(run_seed, ClassificationExperiment, config, tmp_path / "b", True),
            [4, 2, 1],
            queries=30,
            workers=2,
            threads=1,
        )
    for record in alone:
        kept = SeedRecord.load(tmp_path / "b" / f"seed-{record.seed}" / "record.json")
        assert without_seconds(kept) == without_seconds(record)
    shown = capsys.readouterr().out
    assert "seed 4  value function" in shown
    assert "seed 2  value function" in shown
