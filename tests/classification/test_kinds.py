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
from metricopt_ext.classification.predictions import predict, scores_at
from metricopt_ext.classification.splits import load_splits
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.experiment.cli import run_and_report
from metricopt_ext.experiment.experiment import State
from metricopt_ext.utils.config import load_config
from metricopt_ext.utils.state_dict import load_checkpoint

SIZES = [
    *("data.standardise=true", "data.fractions=[0.5,0.3,0.2]", "model.name=tabular_mlp", "model.epochs=4", "seeds=1"),
    *("adapter.dim=2", "adapter.outputs=true", "queries=20", "finetune.steps=3", "best_evals=2", "pictures=false"),
    *("device=cpu", "model.lr=0.01"),
]
OWN = """
import numpy as np


def exact(labels, probabilities):
    return float((labels == (probabilities > 0.5)).all(1).mean())
"""


def write(folder: Path, rows: int = 400) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 3))
    lines = ["a,b,c,red,green,blue,weight"]
    labels = (x + 0.6 * rng.normal(size=(rows, 3)) > [0, 1.2, 0.3]).astype(int)
    for i in range(rows):
        cells = [*(f"{each:.4f}" for each in x[i]), *labels[i], 1 + i % 7]
        lines.append(",".join(map(str, cells)))
    (folder / "t.csv").write_text("\n".join(lines) + "\n")
    (folder / f"own_{folder.name}.py").write_text(OWN)


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


def test_thresholds_and_priors_are_starts(tmp_path: Path) -> None:
    write(tmp_path)
    experiment = ClassificationExperiment(config_of(tmp_path), tmp_path / "run", 0)
    starts, train = experiment.starts(), experiment.splits.train
    assert {"prior", "prior_twice", "prior_line", "thresholds"} <= set(starts)
    target, adapter = experiment.target, experiment.task.adapter
    shares = target.shares(train.y)
    found = scores_at(adapter, starts["thresholds"].phi, train.x) > 0
    assert found.double().mean(0).tolist() == pytest.approx(shares.tolist(), abs=0.006)  # of 200
    plain = scores_at(adapter, experiment.task.origin(), train.x)
    moved = scores_at(adapter, starts["prior"].phi, train.x) - plain
    torch.testing.assert_close(moved.double(), (-shares.logit()).expand(200, -1), atol=1e-4, rtol=1e-4)
    for strength, name in ((0, None), (1, "prior"), (2, "prior_twice")):
        expected = experiment.task.origin() if name is None else starts[name].phi
        assert torch.equal(starts["prior_line"].at(strength).phi, expected)


def test_functions_of_ones_own_see_what_is_predicted(tmp_path: Path) -> None:
    write(tmp_path)
    own = [f"metric.name=own_{tmp_path.name}:exact", f"metric.folder={tmp_path}", "metric.scores=probabilities"]
    experiment = ClassificationExperiment(config_of(tmp_path, *own), tmp_path / "run", 0)
    evaluation = experiment.task.evaluate(experiment.task.origin(), "test")
    assert evaluation.halves is not None
    part = experiment.splits.validation
    logits = scores_at(experiment.task.adapter, experiment.task.origin(), part.x)
    expected = ((logits > 0) == (part.y == 1)).all(1).double().mean()
    assert experiment.task.metric.to_value(evaluation.cost) == pytest.approx(float(expected), rel=1e-5)


def test_weights_are_given_to_a_metric_of_several_labels(tmp_path: Path) -> None:
    write(tmp_path)
    own = ["metric.name=sklearn.metrics:accuracy_score", "metric.columns=[weight]", "data.drop=[]"]
    experiment = ClassificationExperiment(config_of(tmp_path, *own), tmp_path / "run", 0)
    part = experiment.splits.validation
    right = ((scores_at(experiment.task.adapter, experiment.task.origin(), part.x) > 0) == (part.y == 1)).all(1)
    expected = np.average(right.numpy(), weights=part.columns["weight"])
    got = experiment.task.metric.to_value(experiment.task.evaluate(experiment.task.origin(), "test").cost)
    assert got == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("more", "names"),
    [
        (["data.kind=rank"], ("data.kind='rank'", "multilabel")),
        (["data.kind=ordinal"], ("data.kind='ordinal'", "tune_model")),
        (["data.targets=[red]"], ("data.kind=multilabel",)),
        (["data.targets=[red,red]"], ("data.targets",)),
        (["data.target=red"], ("data.target='red'", "data.targets")),
        (["data.drop=[red]"], ("data.drop",)),
        (["metric.name=accuracy"], ("data.kind=multilabel", "micro_f1")),
        (["data.imbalance=3"], ("data.kind=multilabel",)),
        (["data.positive=red"], ("data.positive", "data.kind=multilabel")),
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


def test_data_of_one_label_are_refused() -> None:
    config = load_config(
        ClassificationConfig, None, ["data.name=digits", "data.kind=multilabel", "model.name=small_cnn"]
    )
    assert_refused(config.check, ConfigError, "data.name=csv", "data.targets")


def test_a_metric_that_parts_of_the_test_data_do_not_define_ends_no_run(tmp_path: Path) -> None:
    """Of 800 rows few have what the metric needs, so that not each resample has one."""
    x = np.random.default_rng(0).normal(size=(1600, 2))
    low, high = np.sort(x[:, 0])[[11, -12]]
    lines = ["a,b,rare,other"]
    lines += [f"{a:.4f},{b:.4f},{a > high:d},{a < low:d}" for a, b in x]
    (tmp_path / "rare.csv").write_text("\n".join(lines) + "\n")
    data = ["data.name=csv", f"data.root={tmp_path / 'rare.csv'}", "data.kind=multilabel", "metric.name=map"]
    data += ["data.targets=[rare,other]"]
    more = ["data.fractions=[0.3,0.2,0.5]", "model.epochs=1"]
    config = load_config(ClassificationConfig, None, [*data, *SIZES, *more])
    experiment = ClassificationExperiment(config, tmp_path / "run", 0)
    origin = experiment.task.origin()
    moved = State(experiment.task, origin + 1)
    error = experiment.test_error(State(experiment.task, origin), moved)
    assert error is not None
    assert error > 0
