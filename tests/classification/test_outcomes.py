"""Metrics that are the worst of their values in groups of rows: of classes, and by the values of a column."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as skm
import torch
from torch import Tensor, nn

from helpers.refusals import assert_refused, assert_warned
from metricopt_ext.classification.besides import besides
from metricopt_ext.classification.config import ClassificationConfig, MetricConfig
from metricopt_ext.classification.experiment import ClassificationExperiment
from metricopt_ext.classification.groups import batches_of_outcomes, check_groups, metric_halves
from metricopt_ext.classification.metrics import METRICS, MetricSpec, worst_recall
from metricopt_ext.classification.named_metric import build_metric, try_metric
from metricopt_ext.classification.split_metric import model_metric, value_of
from metricopt_ext.classification.splits import load_splits
from metricopt_ext.classification.targets import Target
from metricopt_ext.data.halves import stratified_halves
from metricopt_ext.data.labelled import Split
from metricopt_ext.data.splits import Splits
from metricopt_ext.data.streamed import StreamedImages, as_inputs
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.experiment.cli import run_and_report
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.config import load_config
from testers.tool import report_of

CLASSES = ("ant", "bee", "cow", "doe")
MODEL = nn.Identity()  # whose outputs are the inputs


def rows(count: int = 200, classes: int = 4, seed: int = 0) -> Split:
    """Outputs with ties, and labels of all classes but the last."""
    rng = torch.Generator().manual_seed(seed)
    outputs = torch.randint(3, (count, classes), generator=rng).float()
    return Split(outputs, torch.randint(classes - 1, (count,), generator=rng))


def recalls(part: Split, these: Tensor | None = None) -> dict[str, float]:
    """Return each class's recall, of the classes that have examples."""
    these = torch.arange(len(part)) if these is None else these
    right, labels = (part.x.argmax(1) == part.y).numpy()[these], part.y.numpy()[these]
    return {CLASSES[each]: right[labels == each].sum() / (labels == each).sum() for each in np.unique(labels)}


def test_worst_recall_is_made_of_the_classes_recalls() -> None:
    part = rows()
    halves = stratified_halves(part.y, seed=1)
    metric = model_metric(build_metric(MetricConfig("worst_recall"), classes=CLASSES), part, halves)
    told = metric.evaluate(MODEL, "test")
    expected, on_halves = recalls(part), [recalls(part, half) for half in halves]  # type: ignore[arg-type]
    assert list(told.outcomes) == [*CLASSES[:3]]
    for name, outcome in told.outcomes.items():
        assert outcome.value == expected[name]
        assert outcome.pairs == (tuple(half[name] for half in on_halves),)
    assert told.value == min(expected.values()) == METRICS["worst_recall"].function(part.x, part.y)
    assert told.pairs == (tuple(min(half.values()) for half in on_halves),)
    assert metric.outcome_sign("ant") == -1


def test_a_half_without_a_class_leaves_no_halves() -> None:
    part, spec = rows(), build_metric(MetricConfig("worst_recall"), classes=CLASSES)
    first, second = ((part.y > 0) & (torch.arange(200) % 2 == side) for side in (0, 1))
    unlucky = first.nonzero().flatten(), (second | (part.y == 0)).nonzero().flatten()
    told = assert_warned(lambda: model_metric(spec, part, unlucky).evaluate(MODEL, "test"), "ant")
    assert told.halves is None
    single = Split(torch.eye(4)[[0, 0, 1]], torch.tensor([0, 0, 1]))
    why = stratified_halves(single.y, seed=0)
    assert isinstance(why, str)
    told = assert_warned(lambda: model_metric(spec, single, why).evaluate(MODEL, "test"), why)
    assert (told.halves, told.value) == (None, 1)


def test_what_is_bounded_is_told_beside_the_outcomes() -> None:
    part = rows()
    config = MetricConfig("worst_recall", also=["mcr"], subject_to={"precision[ant]": ">= 0", "accuracy": ">= start"})
    spec, also = build_metric(config, classes=CLASSES), besides(config, "classes", CLASSES)
    metric = model_metric(spec, part, stratified_halves(part.y, 0), also=also, subject_to=config.subject_to)
    told = metric.evaluate(MODEL, "test")
    assert list(told.outcomes) == [*CLASSES[:3], "precision[ant]", "accuracy"]
    assert told.also["accuracy"] == pytest.approx(float((part.x.argmax(1) == part.y).double().mean()))
    assert told.value == min(recalls(part).values())
    assert told.halves is not None
    assert metric.look(MODEL) == {"mcr": pytest.approx(1 - told.also["accuracy"])}
    doubled = build_metric(config, classes=("accuracy", *CLASSES[1:]))
    assert_refused(
        lambda: model_metric(doubled, part, also=also, subject_to=config.subject_to),
        ConfigError,
        "accuracy",
        "metric.subject_to",
    )


# --- In groups by a column -------------------------------------------------------------------------------------

PLACES = np.array(["north", "south", "west"], dtype=object)
VALUES = ["region=north", "region=south", "region=west"]
COSTS = [[0.0, 1.0], [5.0, -1.0]]


def in_regions(count: int = 300, classes: int = 2, seed: int = 0) -> Split:
    part, rng = rows(count, classes + 1, seed), np.random.default_rng(seed)
    return Split(part.x[:, :classes], part.y, columns={"region": rng.choice(PLACES, count, p=[0.6, 0.3, 0.1])})


def by_region(name: str, **more: Any) -> MetricSpec:
    return build_metric(MetricConfig(name, by="region", **more), values=np.unique(PLACES))


REFERENCES: dict[str, Callable[[Any, Any], float]] = {
    "accuracy": skm.accuracy_score,
    "mcr": skm.zero_one_loss,
    "recall": skm.recall_score,
    "precision": partial(skm.precision_score, zero_division=0),
    "f1": skm.f1_score,
    "jaccard": skm.jaccard_score,
    "expected_cost": lambda y, said: np.mean([COSTS[true][each] for true, each in zip(y, said, strict=True)]),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_the_worst_group_is_judged_as_by_scikit_learn(name: str) -> None:
    part, spec = in_regions(), by_region(name, costs=COSTS if name == "expected_cost" else [])
    halves = metric_halves(part, spec, seed=2)
    assert not isinstance(halves, str)
    metric = model_metric(spec, part, halves)
    told = metric.evaluate(MODEL, "test")
    y, said, region = part.y.numpy(), part.x.argmax(1).numpy(), part.columns["region"]

    def of(place: str, these: Any) -> float:
        these = these[region[these] == place]
        return REFERENCES[name](y[these], said[these])

    assert list(told.outcomes) == VALUES
    for place, outcome in zip(PLACES, told.outcomes.values(), strict=True):
        assert outcome.value == pytest.approx(of(place, np.arange(300)), abs=1e-12)
        assert outcome.pairs == (pytest.approx([of(place, half.numpy()) for half in halves], abs=1e-12),)
    worst = max if name in ("mcr", "expected_cost") else min
    assert told.value == worst(each.value for each in told.outcomes.values())
    assert told.value == pytest.approx(value_of(spec, part.x, part))
    assert metric.outcome_sign(VALUES[0]) == (1 if worst is max else -1)


@pytest.mark.parametrize("name", ["accuracy", "mcr", "expected_cost"])
def test_means_over_rows_are_judged_in_groups_of_any_number_of_classes(name: str) -> None:
    costs = [[0.0, 1.0, 2.0], [1.0, 0.0, 1.0], [3.0, 1.0, 0.0]]
    part, spec = in_regions(classes=3), by_region(name, costs=costs if name == "expected_cost" else [])
    plain = build_metric(MetricConfig(name, costs=costs if name == "expected_cost" else []))
    each = [
        value_of(plain, part.x, part, torch.from_numpy(part.columns["region"] == place).nonzero()[:, 0])
        for place in PLACES
    ]
    assert value_of(spec, part.x, part) == pytest.approx((min if name == "accuracy" else max)(each), abs=1e-12)


@pytest.mark.parametrize("name", ["recall", "f1"])
def test_a_group_without_a_positive_example_has_no_value(name: str) -> None:
    part, spec = in_regions(), by_region(name)
    west = torch.from_numpy(part.columns["region"] == "west")
    without = Split(part.x, torch.where(west, 0, part.y), columns=part.columns)
    assert list(model_metric(spec, without).evaluate(MODEL, "test").outcomes) == VALUES[:2]
    assert_refused(
        lambda: check_groups(spec, without, "validation"), DataError, "metric.by=region", "region=west", "0", "positive"
    )
    assert_refused(lambda: value_of(spec, part.x, Split(part.x, 0 * part.y, columns=part.columns)), DataError, "none")


def test_both_halves_have_each_group_in_equal_shares() -> None:
    """Two rows of a group, of two classes, are one for each half, whatever there is besides."""
    part = in_regions()
    few = part.columns["region"].copy()
    places = [int((part.y == label).nonzero()[0]) for label in (0, 1)]
    few[places] = "few"
    whole = Split(part.x, part.y, columns={"region": few})
    spec = build_metric(MetricConfig("accuracy", by="region"), values=np.unique(few))
    for seed in range(8):
        halves = metric_halves(whole, spec, seed)
        assert sorted(torch.cat([*halves]).tolist()) == list(range(300))  # type: ignore[list-item]
        for label in (0, 1, None):
            of = whole.y.numpy() == label if label is not None else np.ones(300, dtype=bool)
            for place in np.unique(few):
                counts = [(of & (few == place))[half.numpy()].sum() for half in halves]  # type: ignore[union-attr]
                assert abs(counts[0] - counts[1]) <= 1
        assert model_metric(spec, whole, halves).evaluate(MODEL, "test").halves is not None


def test_many_groups_are_divided_too() -> None:
    columns = {"region": np.arange(400) % 100}
    part = Split(torch.randn(400, 2), torch.arange(400) // 200, columns=columns)
    spec = build_metric(MetricConfig("accuracy", by="region"), values=np.arange(100))
    first, second = metric_halves(part, spec, seed=0)
    assert (np.bincount(columns["region"][first], minlength=100) == 2).all()  # type: ignore[index]
    assert list(model_metric(spec, part, (first, second)).evaluate(MODEL, "x").outcomes)[3] == "region=3"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"name": "macro_f1"}, ("macro_f1", "accuracy", "expected_cost", "f1")),
        ({"name": "auc"}, ("auc", "recall")),
        ({"name": "worst_recall"}, ("worst_recall", "mcr")),
        ({"name": "sklearn.metrics:accuracy_score"}, ("sklearn.metrics:accuracy_score", "accuracy")),
    ],
)
def test_what_has_no_value_in_groups_is_refused_by_name(settings: dict[str, Any], names: tuple[str, ...]) -> None:
    config = MetricConfig(by="region", **settings)
    assert_refused(lambda: build_metric(config), ConfigError, "metric.by='region'", *names)


def test_only_classes_have_groups_and_of_two_a_positive_one() -> None:
    config = MetricConfig("macro_f1", by="region")
    assert_refused(lambda: build_metric(config, "multilabel"), ConfigError, "metric.by", "multilabel")
    part = in_regions(classes=3)
    assert_refused(
        lambda: try_metric(MetricConfig("f1", by="region"), part, Target("classes", 3), metric=by_region("f1")),
        ConfigError,
        *("metric.name=f1", "3", "accuracy"),
    )


def test_the_metric_of_all_rows_can_be_shown_beside_its_worst_group() -> None:
    MetricConfig("accuracy", by="region", also=["accuracy"]).check_besides("accuracy")
    config = MetricConfig("accuracy", by="region", subject_to={"accuracy": ">= start"})
    config.check_besides("accuracy")
    part, also = in_regions(), besides(config, "classes", ("no", "yes"))
    metric = model_metric(by_region("accuracy"), part, also=also, subject_to=config.subject_to)
    told = metric.evaluate(MODEL, "test")
    assert told.also["accuracy"] == skm.accuracy_score(part.y, part.x.argmax(1))
    assert told.value == min(told.also[name] for name in VALUES) < told.also["accuracy"]


# --- The tool --------------------------------------------------------------------------------------------------


def table(folder: Path, change: Callable[[int], str | None] = lambda _: None, count: int = 400) -> Path:
    """Write a table in whose northern rows one of the features misleads; ``change`` has another region of a row."""
    rng = np.random.default_rng(0)
    lines = ["size,weight,region,age,bought"]
    for i in range(count):
        bought, place = i % 2 == 1, change(i)
        usual = "west" if i // 2 % 10 == 9 else ("north", "south")[i // 2 % 2]
        place = usual if place is None else place
        size, weight = rng.normal(size=2) + 1.2 * bought - 2 * (place == "north") * np.array([bought, 0])
        lines.append(f"{size:.4f},{weight:.4f},{place},{rng.uniform(20, 60):.3f},{'ny'[bought]}")
    path = folder / "shop.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def words(folder: Path, *more: str) -> list[str]:
    return [
        *("data.name=csv", f"data.root={folder / 'shop.csv'}", "data.target=bought", "data.standardise=true"),
        *("data.positive=y", "data.drop=[age]", "seeds=1", "data.fractions=[0.4,0.35,0.25]", "model.name=tabular_mlp"),
        *("model.epochs=3", "device=cpu", "adapter.dim=2", "adapter.outputs=true", "queries=14", "finetune.steps=3"),
        *("metric.name=accuracy", "metric.by=region", *more),
    ]


def test_the_tool_tunes_for_the_worst_group(tmp_path: Path) -> None:
    table(tmp_path)
    config = load_config(ClassificationConfig, None, words(tmp_path, "metric.also=[accuracy]"))
    with pytest.warns(UserWarning, match="region=west"):
        run_and_report(ClassificationExperiment, config, tmp_path / "run", resume=False)
    content = report_of(tmp_path / "run")
    assert content["metric"]["name"] == "worst accuracy by region"
    (region,) = (each for each in content["reading"]["columns"] if each["name"] == "region")
    experiment = ClassificationExperiment(config, tmp_path / "run" / "seed-0", 0)
    splits = load_splits(config, 0)
    sizes = dict(zip(*np.unique(splits.validation.columns["region"], return_counts=True), strict=True))
    for place, size in sizes.items():
        assert f"region={place}' {size}" in region["note"]
    assert content["rare"][0]["fewest"] == {f"region={place}": size for place, size in sizes.items() if size < 20}
    told = experiment.test_metric.evaluate(experiment.task.adapter.model, "test")
    assert content["methods"]["pretrained"]["test"] == [
        pytest.approx(min(each.value for each in told.outcomes.values()))
    ]
    assert list(told.outcomes) == VALUES
    assert splits.train.x.shape[1] == 2  # the region is no input
    assert set(content["also"]) == {"accuracy"}


@pytest.mark.parametrize(
    ("change", "more", "names"),
    [
        (lambda i: "east" if i == 7 else None, [], ("east", "2", "region")),
        (lambda i: "" if i == 7 else None, [], ("row 9", "without a value")),
        (lambda i: "?" if i == 7 else None, [], ("row 9", "without a value")),
        (lambda i: "all", [], ("1 value", "'all'")),
        (None, ["metric.by=age", "data.drop=[region]"], ("age", "2", "merge")),
        (None, ["metric.by=bought"], ("data.target='bought'", "worst_recall")),
        (None, ["metric.by=place"], ("place", "age")),
        (None, ["metric.by=region", "methods=[sl_r]"], ("sl_r", "metric.by=region")),
        (None, ["metric.name=eer"], ("eer", "expected_cost")),
    ],
)
def test_groups_that_can_not_be_judged_are_refused(
    tmp_path: Path, change: Any, more: list[str], names: tuple[str, ...]
) -> None:
    table(tmp_path, **({} if change is None else {"change": change}))
    call = lambda: run_and_report(  # noqa: E731
        ClassificationExperiment,
        load_config(ClassificationConfig, None, words(tmp_path, *more)),
        tmp_path / "run",
        resume=False,
    )
    assert_refused(call, (ConfigError, DataError), *names)


def batches_of(task: FinetuneTask, name: str) -> tuple[Tensor, Tensor]:
    """Return all inputs and labels that an outcome's loss sees."""
    assert task.batches_of is not None
    x, y = zip(*task.batches_of[name], strict=True)
    again = torch.cat([each for each, _ in task.batches_of[name]])
    assert torch.equal(torch.cat(x), again)  # which do not change
    assert [len(each) for each in x[:-1]] == [8] * (len(x) - 1)
    return torch.cat(x), torch.cat(y)


@pytest.mark.parametrize("name", ["accuracy", "recall", "f1"])
def test_a_group_s_loss_is_that_of_its_train_rows(tmp_path: Path, name: str) -> None:
    """Of recall, that of its positives: no other row counts."""
    table(tmp_path)
    config = load_config(ClassificationConfig, None, words(tmp_path, f"metric.name={name}", "batch_size=8"))
    experiment = ClassificationExperiment(config, tmp_path, 0)
    train, task = experiment.splits.train, experiment.task
    assert list(task.batches_of or ()) == VALUES
    for place in PLACES:
        rows = torch.from_numpy(train.columns["region"] == place) & ((train.y == 1) | (name != "recall"))
        x, y = batches_of(task, f"region={place}")
        assert torch.equal(x, train.x[rows])
        assert torch.equal(y, train.y[rows])


def test_a_class_s_loss_is_that_of_its_train_rows(tmp_path: Path) -> None:
    more = ["metric.name=worst_recall", "metric.by=", "data.drop=[age,region]", "batch_size=8"]
    table(tmp_path)
    experiment = ClassificationExperiment(
        load_config(ClassificationConfig, None, words(tmp_path, *more)), tmp_path / "run", 0
    )
    train, task = experiment.splits.train, experiment.task
    assert list(task.batches_of or ()) == ["n", "y"]
    for label, name in enumerate("ny"):
        x, y = batches_of(task, name)
        assert torch.equal(x, train.x[train.y == label])
        assert (y == label).all()
    plain = load_config(ClassificationConfig, None, words(tmp_path, "metric.by="))
    assert ClassificationExperiment(plain, tmp_path / "plain", 0).task.batches_of is None


class Said(Callback):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.lines = list[str]()

    def say(self, line: str) -> None:
        self.lines.append(line)


def test_what_train_lacks_promises_nothing_and_is_said(tmp_path: Path) -> None:
    for name, places in (("train", ("north", "south")), ("val", PLACES), ("test", PLACES)):
        lines = [f"{i % 7},{places[i // 2 % len(places)]},{'ny'[i % 2]}" for i in range(60)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["size,region,bought", *lines]))
    parts = [f"data.{name}={tmp_path / name}.csv" for name in ("train", "val", "test")]
    settings = [each for each in words(tmp_path, *parts) if not each.startswith(("data.root", "data.drop"))]
    said = Said()
    experiment = ClassificationExperiment(load_config(ClassificationConfig, None, settings), tmp_path / "run", 0, said)
    assert list(experiment.task.batches_of or ()) == VALUES[:2]
    assert any("region=west" in line and "train" in line for line in said.lines)


def test_a_loss_that_needs_several_classes_promises_nothing_and_is_said(tmp_path: Path) -> None:
    """As one of pairs of a positive and a negative example does."""
    table(tmp_path)
    (tmp_path / "pairs_of_both.py").write_text(
        "def pairs(logits, labels):\n    odds = logits if logits.dim() == 1 else logits[:, 1] - logits[:, 0]\n"
        "    return (1 - odds[labels == 1][:, None] + odds[labels == 0]).relu().mean()\n"
    )
    own = ["loss.name=pairs_of_both:pairs", f"loss.folder={tmp_path}", "batch_size=8"]
    said = Said()
    config = load_config(ClassificationConfig, None, words(tmp_path, *own, "metric.name=recall"))
    experiment = ClassificationExperiment(config, tmp_path / "run", 0, said)
    assert experiment.task.batches_of is None
    assert any("pairs_of_both:pairs" in line for line in said.lines)
    config = load_config(ClassificationConfig, None, words(tmp_path, *own))  # groups have both
    assert list(ClassificationExperiment(config, tmp_path / "groups", 0).task.batches_of or ()) == VALUES


def test_images_on_disk_are_read_as_their_batches_are_asked_for() -> None:
    read = list[int]()

    def image(row: int) -> Tensor:
        read.append(row)
        return torch.full((1, 2, 2), row, dtype=torch.uint8)

    images, y = StreamedImages.of(image, 20, (1, 2, 2)), torch.arange(20) % 2
    part = Split(as_inputs(images), y)
    found = batches_of_outcomes(worst_recall(("even", "odd")), Splits(part, part, part, ("even", "odd")), 4)
    assert not read
    x, labels = next(iter(found["odd"]))
    assert sorted(read) == x[:, 0, 0, 0].tolist() == [1, 3, 5, 7]
    assert (labels == 1).all()
    assert [len(batch) for batch, _ in found["even"]] == [4, 4, 2]
