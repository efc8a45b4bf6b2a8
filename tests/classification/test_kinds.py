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
from metricopt_ext.classification.metrics import check_classes
from metricopt_ext.classification.named_metric import build_metric
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


# --- Two classes, of which one may be the positive one -----------------------------------------------------------


def two_classes(folder: Path, names: tuple[str, str], *more: str) -> ClassificationConfig:
    x = np.random.default_rng(0).normal(size=(200, 2))
    y = x[:, 0] + 0.5 * x[:, 1] > 0.8
    rows = [f"{a:.4f},{b:.4f},{names[int(each)]}" for (a, b), each in zip(x, y, strict=True)]
    (folder / "two.csv").write_text("\n".join(["a,b,y", *rows]) + "\n")
    data = ["data.name=csv", f"data.root={folder / 'two.csv'}", "data.target=y"]
    return load_config(ClassificationConfig, None, [*data, *SIZES, "queries=12", *more])


@pytest.mark.parametrize(
    ("names", "metric"),
    [
        (("healthy", "sick"), ["metric.name=f1"]),
        (("ham", "spam"), ["metric.name=jaccard"]),
        (("1", "2"), ["metric.name=aucpr"]),
        (("benign", "malignant"), ["metric.name=accuracy", "metric.also=[f1]"]),
        (("low", "high"), ["metric.name=auc", 'metric.subject_to={f1: ">= start"}']),
    ],
)
def test_the_positive_class_is_asked_for_where_no_name_says_it(
    names: tuple[str, str], metric: list[str], tmp_path: Path
) -> None:
    config = two_classes(tmp_path, names, *metric)
    said = ("data.positive", *map(repr, names))
    run = lambda config: run_and_report(ClassificationExperiment, config, tmp_path / "run", resume=False)  # noqa: E731
    assert_refused(lambda: run(config), ConfigError, *said)
    assert not list((tmp_path / "run").rglob("*.safetensors"))
    if "healthy" in names:  # as told, it is another number
        values = {}
        for positive in names:
            (tmp_path / positive).mkdir()
            told = two_classes(tmp_path, names, *metric, f"data.positive={positive}")
            report = run_and_report(ClassificationExperiment, told, tmp_path / positive / "run", resume=False)
            values[positive] = report.values("pretrained", "test")
        assert values["healthy"] != values["sick"]


@pytest.mark.parametrize(
    "names", [("0", "1"), ("-1", "1"), ("False", "True"), ("no", "yes"), ("neg", "pos"), ("N", "Y"), ("0.0", "1.0")]
)
def test_names_that_say_which_class_is_positive(names: tuple[str, str]) -> None:
    assert not check_classes(["f1", "aucpr"], names, "")


def test_a_cost_says_its_orientation_and_begins_from_bayes_offsets(tmp_path: Path) -> None:
    costs = ["metric.name=expected_cost", "metric.costs=[[0.0,1.0],[5.0,0.0]]"]
    assert "costs" in two_classes(tmp_path, ("healthy", "sick"), *costs).starts
    config = two_classes(tmp_path, ("healthy", "sick"), *costs, "starts=[costs]")
    run_and_report(ClassificationExperiment, config, tmp_path / "run", resume=False)
    assert "costs[true class][predicted class]" in (tmp_path / "run" / "report.md").read_text()
    assert "0 'healthy', 1 'sick'" in (tmp_path / "run" / "log.txt").read_text()
    assert "costs 0." in (tmp_path / "run" / "seed-0" / "README.md").read_text()  # which has the starts' values
    short = two_classes(tmp_path, ("healthy", "sick"), costs[0], "metric.costs=[[0.0,1.0]]")
    assert_refused(lambda: build_metric(short.metric), ConfigError, "true", "predicted")
