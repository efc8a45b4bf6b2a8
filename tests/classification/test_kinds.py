"""Several labels each, ranks and quantities through the tool: what is reported is what the written model does."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.utils.config import load_config
from metricopt_ext.utils.state_dict import load_checkpoint

SIZES = [
    *("data.standardise=true", "data.fractions=[0.5,0.3,0.2]", "model.name=tabular_mlp", "model.epochs=4", "seeds=1"),
    *("adapter.dim=2", "adapter.outputs=true", "queries=20", "finetune.steps=3", "best_evals=2", "pictures=false"),
    *("device=cpu", "model.lr=0.01"),
]
RANKS = ("bad", "fair", "good", "great")
OWN = """
import numpy as np


def within(labels, predictions, tolerance):
    return float((np.abs(labels - predictions) < tolerance).mean())


def exact(labels, probabilities):
    return float((labels == (probabilities > 0.5)).all(1).mean())


def entropy(labels, probabilities):
    assert np.allclose(probabilities.sum(1), 1)
    return float(-np.log(probabilities[np.arange(len(labels)), labels] + 1e-9).mean())
"""


def write(folder: Path, rows: int = 400) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 3))
    lines = ["a,b,c,red,green,blue,grade,price,weight"]
    labels = (x + 0.6 * rng.normal(size=(rows, 3)) > [0, 1.2, 0.3]).astype(int)
    grades = np.digitize(x[:, 0] + 0.4 * rng.normal(size=rows), [-1, 0, 1.2])
    prices = 1e5 * (3 + x[:, 1] + rng.exponential(size=rows))
    for i in range(rows):
        cells = [*(f"{each:.4f}" for each in x[i]), *labels[i], RANKS[grades[i]], f"{prices[i]:.2f}", 1 + i % 7]
        lines.append(",".join(map(str, cells)))
    (folder / "t.csv").write_text("\n".join(lines) + "\n")
    (folder / f"own_{folder.name}.py").write_text(OWN)


KINDS: dict[str, list[str]] = {
    "multilabel": ["data.targets=[red,green,blue]", "data.drop=[grade,price,weight]", "metric.name=macro_f1"],
    "ordinal": [
        *("data.target=grade", "data.order=[bad,fair,good,great]", "data.drop=[red,green,blue,price,weight]"),
        "metric.name=quadratic_kappa",
    ],
    "regression": ["data.target=price", "data.drop=[red,green,blue,grade,weight]", "metric.name=pinball_0.9"],
}


def config_of(folder: Path, kind: str, *more: str) -> ClassificationConfig:
    settings = ["data.name=csv", f"data.root={folder / 't.csv'}", f"data.kind={kind}", *KINDS[kind], *SIZES]
    return load_config(ClassificationConfig, None, [*settings, *more])


def reference(kind: str, logits: Any, y: Any) -> float:
    if kind == "multilabel":
        return float(skm.f1_score(y, logits > 0, average="macro"))
    if kind == "ordinal":
        return float(skm.cohen_kappa_score(y, (logits > 0).sum(1), weights="quadratic"))
    return float(skm.mean_pinball_loss(y, logits, alpha=0.9))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_report_has_what_the_written_models_do(tmp_path: Path, kind: str) -> None:
    write(tmp_path)
    config = config_of(tmp_path, kind)
    run_and_report(ClassificationExperiment, config, tmp_path / "run", resume=False)
    content = json.loads((tmp_path / "run" / "report.json").read_text())
    splits = load_splits(config, 0)
    for name, file in (("pretrained", "model"), ("metricopt", "tuned")):
        model = built(config, splits)
        load_checkpoint(model, tmp_path / "run" / "seed-0" / f"{file}.safetensors")
        with torch.no_grad():
            logits = predict(model.eval(), splits.test.x).double().numpy()
        expected = reference(kind, logits, splits.test.y.numpy())
        assert content["methods"][name]["test"] == [pytest.approx(expected, rel=1e-5)]
    baseline = {"multilabel": "label_thresholds", "ordinal": "cut_points", "regression": "recalibration"}[kind]
    assert baseline in content["methods"]
    assert not {"threshold", "class_offsets", "logit_adjustment"} & set(content["methods"])
    before, after = (content["methods"][name]["validation"][0] for name in ("pretrained", baseline))
    assert after <= before if kind == "regression" else after >= before
    if kind == "regression":
        assert np.abs(logits - splits.test.y.numpy()).mean() < 2e5  # in the target's units


@pytest.mark.parametrize("kind", ["multilabel", "ordinal"])
def test_thresholds_and_priors_are_starts(tmp_path: Path, kind: str) -> None:
    write(tmp_path)
    experiment = ClassificationExperiment(config_of(tmp_path, kind), tmp_path / "run", 0)
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
    other = ClassificationExperiment(config_of(tmp_path, "regression"), tmp_path / "other", 0)
    assert not {"thresholds", "prior_line"} & set(other.starts())


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("regression", ["within", "metric.kwargs.tolerance=1e5"]),
        ("multilabel", ["exact", "metric.scores=probabilities"]),
        ("ordinal", ["entropy", "metric.scores=probabilities", "metric.maximize=false", "metric.bounds=[]"]),
    ],
)
def test_functions_of_ones_own_see_what_is_predicted(tmp_path: Path, kind: str, more: list[str]) -> None:
    write(tmp_path)
    own = [f"metric.name=own_{tmp_path.name}:{more[0]}", f"metric.folder={tmp_path}", *more[1:]]
    experiment = ClassificationExperiment(config_of(tmp_path, kind, *own), tmp_path / "run", 0)
    evaluation = experiment.task.evaluate(experiment.task.origin(), "test")
    assert evaluation.halves is not None
    target, part = experiment.target, experiment.splits.validation
    logits = scores_at(experiment.task.adapter, experiment.task.origin(), part.x)
    expected = {
        "regression": lambda: ((logits - part.y).abs() < 1e5).double().mean(),
        "multilabel": lambda: ((logits > 0) == (part.y == 1)).all(1).double().mean(),
        "ordinal": lambda: -(target.probabilities(logits).gather(1, part.y[:, None]) + 1e-9).log().mean(),
    }[kind]()
    assert experiment.task.metric.to_value(evaluation.cost) == pytest.approx(float(expected), rel=1e-5)


def test_weights_are_given_to_a_metric_of_quantities(tmp_path: Path) -> None:
    write(tmp_path)
    own = ["metric.name=sklearn.metrics:mean_absolute_error", "metric.columns=[weight]", "metric.maximize=false"]
    config = config_of(tmp_path, "regression", *own, "metric.bounds=[]", "data.drop=[red,green,blue,grade]")
    experiment = ClassificationExperiment(config, tmp_path / "run", 0)
    part = experiment.splits.validation
    predicted = scores_at(experiment.task.adapter, experiment.task.origin(), part.x).double()
    expected = np.average((predicted - part.y).abs().numpy(), weights=part.columns["weight"])
    got = experiment.task.metric.to_value(experiment.task.evaluate(experiment.task.origin(), "test").cost)
    assert got == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "more", "names"),
    [
        ("multilabel", ["data.kind=rank"], ("data.kind='rank'",)),
        ("multilabel", ["data.targets=[red]"], ("data.kind=multilabel",)),
        ("multilabel", ["data.targets=[red,red]"], ("data.targets",)),
        ("multilabel", ["data.target=red"], ("data.target='red'", "data.targets")),
        ("multilabel", ["data.drop=[red]"], ("data.drop",)),
        ("multilabel", ["metric.name=accuracy"], ("data.kind=multilabel", "micro_f1")),
        ("multilabel", ["data.imbalance=3"], ("data.kind=multilabel",)),
        ("ordinal", ["data.order=[]"], ("order",)),
        ("ordinal", ["data.positive=bad"], ("data.kind=ordinal",)),
        ("ordinal", ["methods=[sl_r]"], ("data.kind=ordinal",)),
        ("regression", ["data.order=[a,b]"], ("'b'", "data.kind=ordinal", "run")),
        ("regression", ["adapter.temperature=true"], ("data.kind=regression",)),
        ("regression", ["data.target=grade", "data.drop=[]"], ("grade",)),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, kind: str, more: list[str], names: tuple[str, ...]
) -> None:
    write(tmp_path)
    assert_refused(
        lambda: run_and_report(
            ClassificationExperiment, config_of(tmp_path, kind, *more), tmp_path / "run", resume=False
        ),
        (ConfigError, DataError),
        *names,
    )


@pytest.mark.parametrize(
    ("name", "kind", "names"),
    [
        (
            "digits",
            "multilabel",
            ("data.name=csv", "data.targets"),
        ),
        ("digits", "regression", ("data.kind=regression",)),
        ("diabetes", "classes", ("data.kind=classes",)),
    ],
)
def test_data_of_another_kind_are_refused(name: str, kind: str, names: tuple[str, ...]) -> None:
    config = load_config(ClassificationConfig, None, [f"data.name={name}", f"data.kind={kind}", "model.name=small_cnn"])
    assert_refused(config.check, ConfigError, *names)


def test_the_same_target_everywhere_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    text = (tmp_path / "t.csv").read_text().splitlines()
    fixed = [",".join([*row.split(",")[:7], "5", row.split(",")[8]]) for row in text[1:]]
    (tmp_path / "t.csv").write_text("\n".join([text[0], *fixed]) + "\n")
    assert_refused(
        lambda: ClassificationExperiment(config_of(tmp_path, "regression"), tmp_path / "run", 0), DataError, "5"
    )


RARE = {
    "spearman": ["data.kind=regression", "data.target=claim", "data.drop=[rare,other]"],
    "r2": ["data.kind=regression", "data.target=claim", "data.drop=[rare,other]"],
    "map": ["data.kind=multilabel", "data.targets=[rare,other]", "data.drop=[claim]"],
}


@pytest.mark.parametrize("metric", RARE)
def test_a_metric_that_parts_of_the_test_data_do_not_define_ends_no_run(tmp_path: Path, metric: str) -> None:
    """Of 800 rows, in batches of 100, few have what the metric needs; nor does each resample have one."""
    said: list[str] = []

    class Saying(Callback):
        def say(self, line: str) -> None:
            said.append(line)

    x = np.random.default_rng(0).normal(size=(1600, 2))
    low, high = np.sort(x[:, 0])[[11, -12]]
    lines = ["a,b,claim,rare,other"]
    lines += [f"{a:.4f},{b:.4f},{(a + 9) * (a > high):.2f},{a > high:d},{a < low:d}" for a, b in x]
    (tmp_path / "rare.csv").write_text("\n".join(lines) + "\n")
    data = ["data.name=csv", f"data.root={tmp_path / 'rare.csv'}", *RARE[metric], f"metric.name={metric}"]
    more = ["data.fractions=[0.3,0.2,0.5]", "model.epochs=1"]
    config = load_config(ClassificationConfig, None, [*data, *SIZES, *more])
    experiment = ClassificationExperiment(config, tmp_path / "run", 0, Saying())
    origin = experiment.task.origin()
    report = experiment.correlations([origin])
    assert report is not None
    assert 0 < report.left_out < 8 == report.left_out + len(report.values)
    assert f"leave out {report.left_out} of 8 batches of test outputs, on which {metric} is not defined" in said[-1]
    moved = State(experiment.task, origin + 1)
    error = experiment.test_error(State(experiment.task, origin), moved)
    assert error is not None
    assert error > 0

    few = experiment.splits.test.take(torch.arange(60))  # one batch
    experiment.splits = replace(experiment.splits, test=few)
    assert experiment.correlations([origin]) is None
    assert "no correlations" in said[-1]
