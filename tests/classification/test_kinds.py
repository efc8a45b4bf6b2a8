"""Several labels each through the tool: what is reported is what the written model does."""

import json
from pathlib import Path

import numpy as np
import pytest
import sklearn.metrics as skm
import torch

from helpers.refusals import assert_refused
from metricopt_ext.classification.classifier import built
from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.classification.experiment import ClassificationExperiment
from metricopt_ext.classification.predictions import predict
from metricopt_ext.classification.splits import load_splits
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.experiment.cli import run_and_report
from metricopt_ext.utils.config import load_config
from metricopt_ext.utils.state_dict import load_checkpoint

SIZES = [
    *("data.standardise=true", "data.fractions=[0.5,0.3,0.2]", "model.name=tabular_mlp", "model.epochs=4", "seeds=1"),
    *("adapter.dim=2", "adapter.outputs=true", "queries=20", "finetune.steps=3", "best_evals=2", "pictures=false"),
    *("device=cpu", "model.lr=0.01"),
]


def write(folder: Path, rows: int = 400) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 3))
    lines = ["a,b,c,red,green,blue,weight"]
    labels = (x + 0.6 * rng.normal(size=(rows, 3)) > [0, 1.2, 0.3]).astype(int)
    for i in range(rows):
        cells = [*(f"{each:.4f}" for each in x[i]), *labels[i], 1 + i % 7]
        lines.append(",".join(map(str, cells)))
    (folder / "t.csv").write_text("\n".join(lines) + "\n")


def config_of(folder: Path, *more: str) -> ClassificationConfig:
    settings = ["data.name=csv", f"data.root={folder / 't.csv'}", "data.kind=multilabel", "metric.name=macro_f1"]
    columns = ["data.targets=[red,green,blue]", "data.drop=[weight]"]
    return load_config(ClassificationConfig, None, [*settings, *columns, *SIZES, *more])


@pytest.mark.slow
def test_the_report_has_what_the_written_models_do(tmp_path: Path) -> None:
    write(tmp_path)
    config = config_of(tmp_path, "methods=[label_thresholds]")
    run_and_report(ClassificationExperiment, config, tmp_path / "run", resume=False)
    content = json.loads((tmp_path / "run" / "report.json").read_text())
    splits = load_splits(config, 0)
    for name, file in (("pretrained", "model"), ("metricopt", "tuned")):
        model = built(config, splits)
        load_checkpoint(model, tmp_path / "run" / "seed-0" / f"{file}.safetensors")
        with torch.no_grad():
            logits = predict(model.eval(), splits.test.x).double().numpy()
        expected = float(skm.f1_score(splits.test.y.numpy(), logits > 0, average="macro"))
        assert content["methods"][name]["test"] == [pytest.approx(expected, rel=1e-5)]
    assert not {"threshold", "class_offsets", "logit_adjustment"} & set(content["methods"])
    before, after = (content["methods"][name]["validation"][0] for name in ("pretrained", "label_thresholds"))
    assert after >= before


@pytest.mark.parametrize(
    ("more", "names"),
    [
        (["data.kind=ordinal"], ("data.kind='ordinal'", "tune_model")),
        (["data.target=red"], ("data.target='red'", "data.targets")),
        (["data.imbalance=3"], ("data.kind=multilabel",)),
        (["methods=[sl_r]"], ("methods=[sl_r]", "data.kind=multilabel")),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, more: list[str], names: tuple[str, ...]) -> None:
    write(tmp_path)
    assert_refused(
        lambda: run_and_report(ClassificationExperiment, config_of(tmp_path, *more), tmp_path / "run", resume=False),
        (ConfigError, DataError),
        *names,
    )
