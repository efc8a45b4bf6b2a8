"""The columns that a metric is given: groups by them, halves that keep their shares, and a run of the tool."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.refusals import assert_refused
from metricopt_ext.classification.callable_metric import from_callable
from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.classification.experiment import ClassificationExperiment
from metricopt_ext.classification.groups import MOST, groups_of, metric_halves, strata
from metricopt_ext.classification.metrics import MetricSpec
from metricopt_ext.classification.predictions import predict
from metricopt_ext.classification.split_metric import model_metric, value_of
from metricopt_ext.classification.splits import load_splits
from metricopt_ext.data.labelled import Split
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.experiment.cli import run_and_report
from metricopt_ext.utils.config import load_config

SCORER = '''
import numpy as np


def worst_region(labels, predictions, region, amount):
    """The lowest accuracy in a region; refuses rows that are not each other's."""
    if not (len(labels) == len(predictions) == len(region) == len(amount)):
        raise ValueError("columns of other lengths")
    if ((amount % 2 == 1) != (labels == 1)).any() or ((amount // 2 % 3 == 0) != (region == "north")).any():
        raise ValueError("columns of other rows")
    return min((predictions == labels)[region == each].mean() for each in np.unique(region))


def cost(labels, predictions, *, amount):
    return float((amount * (labels != predictions)).sum() / amount.sum())
'''


def part(rows: int = 240, seed: int = 0) -> Split:
    rng = np.random.default_rng(seed)
    y = torch.from_numpy(rng.integers(0, 3, rows))
    columns: dict[str, Any] = {
        "region": rng.choice(np.array(["north", "south", "west"], dtype=object), rows),
        "weight": rng.random(rows),
    }
    return Split(torch.zeros(rows, 1), y, columns=columns)


SPEC = MetricSpec("own", True, (0.0, 1.0), lambda *_: 0.5, "", columns=("weight", "region"))


def test_columns_of_few_values_are_groups() -> None:
    found = groups_of(part(), SPEC)
    assert list(found) == ["region"]
    north = torch.from_numpy(part().columns["region"] == "north")
    assert (found["region"][north] == 0).all()
    assert (found["region"][~north] > 0).all()
    many = np.arange(240) % (MOST + 1)
    assert not groups_of(Split(part().x, part().y, columns={"weight": many, "region": np.zeros(240)}), SPEC)


def test_both_halves_have_each_group_of_each_class() -> None:
    whole = part()
    kinds, halves = strata(whole, SPEC), metric_halves(whole, SPEC, seed=1)
    assert len(kinds.unique()) == 9
    assert not isinstance(halves, str)
    first, second = (torch.bincount(kinds[half], minlength=9) for half in halves)
    assert (first - second).abs().max() <= 1
    assert sorted(torch.cat(halves).tolist()) == list(range(240))
    labels = [torch.bincount(whole.y[half]) for half in halves]
    assert (labels[0] - labels[1]).abs().max() <= 1


def test_a_metric_is_given_the_columns_of_the_rows_that_are_judged() -> None:
    whole, asked = part(40), list[Any]()

    def own(labels: Any, predictions: Any, weight: Any, region: Any) -> float:
        asked.append((labels, weight, region))
        weight[:] = 0  # in place, on a copy
        return 0.5

    spec = from_callable(own, maximize=True, columns=("weight", "region"))
    halves = metric_halves(whole, spec, seed=0)
    assert not isinstance(halves, str)
    model_metric(spec, whole, halves).evaluate(torch.nn.Linear(1, 3), "test")
    for rows, (labels, weight, region) in zip((torch.arange(40), *halves), asked, strict=True):
        assert (labels == whole.y[rows].numpy()).all()
        assert len(weight) == len(rows)
        assert (region == whole.columns["region"][rows.numpy()]).all()
    assert whole.columns["weight"].min() > 0
    twice = torch.tensor([3, 3, 5])
    value_of(spec, torch.zeros(40, 3), whole, twice)
    assert (asked[-1][2] == whole.columns["region"][[3, 3, 5]]).all()


def module(folder: Path) -> str:
    """A name that no other test imports."""
    return f"score_{folder.name}"


def table(folder: Path, rows: int = 400) -> Path:
    """Write a table whose amounts tell the label and the region of a row."""
    rng = np.random.default_rng(0)
    lines = ["size,colour,region,amount,bought"]
    for i in range(rows):
        amount = int(rng.integers(0, 600))
        bought, north = amount % 2 == 1, amount // 2 % 3 == 0
        size = rng.normal() + 1.5 * (bought != (north and rng.random() < 0.7))
        lines.append(f"{size:.4f},{'red' if i % 3 else 'blue'},{'north' if north else 'south'},{amount},{'ny'[bought]}")
    path = folder / "shop.csv"
    path.write_text("\n".join(lines) + "\n")
    (folder / f"{module(folder)}.py").write_text(SCORER)
    return path


def config_of(folder: Path, *more: str) -> ClassificationConfig:
    path = folder / "shop.csv"
    settings = [
        *("data.name=csv", f"data.root={path}", "data.target=bought", "data.standardise=true", "seeds=1"),
        *("data.fractions=[0.5,0.3,0.2]", "model.name=tabular_mlp", "model.epochs=3", "device=cpu"),
        *("adapter.dim=2", "adapter.outputs=true", "queries=12", "finetune.steps=3"),
        *(f"metric.name={module(folder)}:worst_region", f"metric.folder={folder}", "metric.columns=[region,amount]"),
    ]
    return load_config(ClassificationConfig, None, [*settings, *more])


@pytest.mark.slow
def test_the_tool_judges_by_columns_of_the_same_rows(tmp_path: Path) -> None:
    table(tmp_path)
    config = config_of(tmp_path)
    run_and_report(ClassificationExperiment, config, tmp_path / "run", resume=False)
    content = json.loads((tmp_path / "run" / "report.json").read_text())
    kinds = {column["name"]: column["kind"] for column in content["reading"]["columns"]}
    assert kinds["region"] == kinds["amount"] == "for the metric"
    splits = load_splits(config, 0)
    assert splits.train.x.shape[1] == 3  # size, and a 0/1 input for each colour
    test = splits.test
    experiment = ClassificationExperiment(config, tmp_path / "run" / "seed-0", 0)
    with torch.no_grad():
        right = ((predict(experiment.task.adapter.model.eval(), test.x) > 0).long() == test.y).numpy()
    region = test.columns["region"]
    expected = min(right[region == each].mean() for each in ("north", "south"))
    assert content["methods"]["pretrained"]["test"] == [pytest.approx(expected)]


@pytest.mark.parametrize(
    ("more", "names"),
    [
        (["metric.columns=[region,price]"], ("price", "0", "5")),
        (["metric.columns=[bought]"], ("data.target='bought'", "metric")),
        (["metric.columns=[region]"], ("amount",)),
    ],
)
def test_columns_that_can_not_be_given_are_refused_by_name(
    tmp_path: Path, more: list[str], names: tuple[str, ...]
) -> None:
    table(tmp_path)
    config = config_of(tmp_path, *more)
    assert_refused(
        lambda: run_and_report(ClassificationExperiment, config, tmp_path / "run", resume=False),
        (ConfigError, DataError),
        *names,
    )
