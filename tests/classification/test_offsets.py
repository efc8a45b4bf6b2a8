"""Constants added to the logits: thresholds, offsets class by class, and adjustment by the priors."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from helpers.refusals import assert_refused
from metricopt_ext.adapters.attach import attach_input_bias, attach_outputs
from metricopt_ext.adapters.signature import Outputs
from metricopt_ext.classification.losses import classification_loss
from metricopt_ext.classification.metrics import METRICS, MetricSpec, expected_cost
from metricopt_ext.classification.models import TabularMLP
from metricopt_ext.classification.offsets import (
    Remembered,
    WithOffsets,
    adjust_logits,
    target_line,
    threshold_of,
    tune_adjustment,
    tune_offsets,
    tune_threshold,
)
from metricopt_ext.classification.split_metric import model_metric
from metricopt_ext.classification.targets import Target
from metricopt_ext.data.labelled import Split
from metricopt_ext.data.streamed import StreamedImages, as_inputs, changed
from metricopt_ext.errors import DataError
from metricopt_ext.experiment.baselines import at_each_budget, ending_at
from metricopt_ext.experiment.compare import compare
from metricopt_ext.experiment.method import Method
from metricopt_ext.experiment.passes import Passes, noticing, passes_of
from metricopt_ext.experiment.usual_methods import planned
from metricopt_ext.methods.prior_starts import line_offsets, prior_offsets
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask


def task_of(model: nn.Module, part: Split, metric: MetricSpec) -> FinetuneTask:
    return FinetuneTask(
        attach_input_bias(model, dim=3),
        loss=classification_loss,
        batches=lambda seed, task, step: (part.x, part.y),
        metric=model_metric(metric, part),
    )


@pytest.mark.parametrize(
    "spec",
    [METRICS["mcr"], METRICS["f1"], METRICS["jaccard"], expected_cost([[0, 1], [5, 0]])],
    ids=lambda spec: spec.name,
)
def test_finds_the_best_of_all_candidate_thresholds(spec: MetricSpec) -> None:
    torch.manual_seed(0)
    x = torch.randn(300, 4)
    part = Split(x, ((x @ torch.tensor([1.0, -1.0, 0.5, 0.0]) + torch.randn(300)) > 1).long())
    model = TabularMLP(4).eval()
    with torch.no_grad():
        logits = model(x)
    task = task_of(model, part, spec)
    tuned = tune_threshold(task, x, evals=50)
    assert isinstance(tuned, nn.Module)
    assert task.metric.ledger.spent_on == {"threshold": 50}

    quantiles = [float(logits.quantile(i / 50)) for i in range(1, 50)]
    values = [spec.function(logits - t, part.y) for t in [0.0, *quantiles]]
    best = max(values) if spec.maximize else min(values)
    with torch.no_grad():
        assert spec.function(tuned(x), part.y) == pytest.approx(best, abs=1e-9)


def test_starts_from_phi_zero_whatever_the_adapter_holds() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(50, 4), torch.randint(2, (50,))
    task = task_of(TabularMLP(4).eval(), Split(x, y), METRICS["mcr"])
    before = tune_threshold(task, x, evals=5)
    task.adapter.set_phi(torch.ones(3))
    after = tune_threshold(task, x, evals=5)
    assert isinstance(before, nn.Module)
    assert isinstance(after, nn.Module)
    with torch.no_grad():
        assert torch.equal(before(x), after(x))


def test_several_logits_have_no_threshold_and_cost_no_query() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)  # type: ignore[no-any-return]

    asked: list[int] = []
    task = FinetuneTask(
        attach_input_bias(Counted(), dim=2),
        loss=classification_loss,
        batches=lambda seed, task, step: None,
        metric=Metric(lambda: asked.append(1) or 0.0, maximize=False),
    )
    assert tune_threshold(task, torch.randn(5, 4)) is None
    assert asked == []


# --- Several logits -----------------------------------------------------------------------------------------------

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def linear_task(target: list[float]) -> tuple[FinetuneTask, list[list[float]]]:
    """A linear classifier whose metric is the squared distance of its added offsets from a target.

    Returns:
        The task, and the offsets of each query, filled as they are asked.
    """
    torch.manual_seed(0)
    model = nn.Linear(4, len(target)).double()
    plain = model(X).detach()
    asked: list[list[float]] = []

    def distance(judged: nn.Module) -> float:
        added = (judged(X) - plain).mean(0)
        asked.append([round(value, 9) for value in added.tolist()])
        return float((added - torch.tensor(target).double()).square().sum())

    task = FinetuneTask(
        attach_outputs(model),
        loss=classification_loss,
        batches=lambda seed, task, step: None,
        metric=Metric(distance, maximize=False, bounds=None),
    )
    task.adapter.set_phi(torch.ones(len(target)))  # the original model is what counts
    return task, asked


def added_by(end: nn.Module | None, task: FinetuneTask) -> list[float]:
    assert isinstance(end, WithOffsets)
    with torch.no_grad():
        return (end(X) - end.model(X)).mean(0).tolist()  # type: ignore[no-any-return]


def test_offsets_are_found_class_by_class() -> None:
    """Five values: steps of 2 in the first round, of 1 in the second and 0.5 in the third, each less its middle one."""
    task, asked = linear_task([2.9, -0.4, 0.2])
    tuned = tune_offsets(task, X, rounds=3, points=5)
    assert task.metric.ledger.spent_on == {"offsets": 1 + 3 * 3 * 4}
    assert asked[:5] == [[0, 0, 0], [-4, 0, 0], [-2, 0, 0], [2, 0, 0], [4, 0, 0]]
    assert asked[5:9] == [[2, step, 0] for step in (-4, -2, 2, 4)]
    assert asked[13:17] == [[2 + step, 0, 0] for step in (-2, -1, 1, 2)]
    assert added_by(tuned, task) == pytest.approx([3.0, -0.5, 0.0])


def test_an_even_number_of_values_has_no_middle() -> None:
    task, asked = linear_task([0.1, 0.0])
    tune_offsets(task, X, rounds=1, points=2)
    assert asked == [[0, 0], [-4, 0], [4, 0], [0, -4], [0, 4]]


@pytest.mark.parametrize(("budget", "best"), [(1, [0.0, 0.0]), (4, [2.0, 0.0]), (5, [4.0, 0.0]), (7, [4.0, -2.0])])
def test_a_budget_ends_the_search_with_the_best_so_far(budget: int, best: list[float]) -> None:
    task, asked = linear_task([3.4, -1.7])
    tuned = tune_offsets(task, X, points=5, budget=budget)
    assert task.metric.ledger.spent == len(asked) == budget
    assert added_by(tuned, task) == pytest.approx(best)


def test_offsets_are_for_several_logits_alone() -> None:
    torch.manual_seed(0)
    task = task_of(TabularMLP(4).eval(), Split(X.float(), (X[:, 0] > 0).long()), METRICS["mcr"])
    assert tune_offsets(task, X.float()) is None
    assert task.metric.ledger.spent == 0


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"points": 1}, {"budget": 0}, {"budget": 1.5}])
def test_bad_numbers_of_offsets(wrong: dict[str, float]) -> None:
    task, asked = linear_task([0.0, 0.0])
    ((name, value),) = wrong.items()
    assert_refused(lambda: tune_offsets(task, X, **wrong), ValueError, name, value)
    assert asked == []


# --- Scores that are kept ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tuned", ["threshold", "offsets", "adjustment"])
@pytest.mark.parametrize("parts", [1, 3])
def test_the_model_runs_once_on_data_in_memory(monkeypatch: pytest.MonkeyPatch, tuned: str, parts: int) -> None:
    """However many queries there are, the ends are the same as if it ran for each."""
    monkeypatch.setattr("metricopt_ext.data.parts.CPU_BYTES", 40 // parts * X[0].numel() * 4)
    torch.manual_seed(0)
    x = X.float()
    model = TabularMLP(4) if tuned == "threshold" else nn.Linear(4, 3)
    part = Split(x, (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long() * (tuned != "threshold"))
    task = noticing(task_of(model.eval(), part, METRICS["accuracy"]))
    tune = {
        "threshold": lambda: tune_threshold(task, x, 20),
        "offsets": lambda: tune_offsets(task, x, budget=20),
        "adjustment": lambda: tune_adjustment(task, x, COUNTS, 20),
    }[tuned]
    end = tune()
    assert task.metric.ledger.spent == 20
    assert passes_of(task) == Passes(metric=1)
    monkeypatch.setattr(Remembered, "forward", lambda self, x: self.model(x))
    again = tune()
    assert passes_of(task) == Passes(metric=21)
    assert isinstance(end, WithOffsets)
    assert isinstance(again, WithOffsets)
    assert torch.equal(end.offsets, again.offsets)
    assert not isinstance(end.model, Remembered)


def test_what_is_remembered_is_of_that_tensor_and_as_it_was() -> None:
    x = torch.arange(6.0).view(3, 2)
    model = Remembered(nn.Linear(2, 2))
    with torch.no_grad():
        assert model(x) is model(x) is model(x.view(3, 2))
        for other in (x[:2], x.T[:, :2], x.clone()):
            assert torch.equal(model(other), model.model(other))
        before = model(x).clone()
        x += 1
        assert not torch.equal(model(x), before)
        model.keeps = False
        late = torch.ones(1, 2)
        assert model(late) is not model(late)


@pytest.mark.parametrize("tune", ["offsets", "adjustment", "threshold"])
def test_images_on_disk_are_read_for_the_first_query_alone(tune: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metricopt_ext.data.parts.CPU_BYTES", 4 * 12 * 4)  # of four images
    images, read = torch.randint(0, 256, (30, 3, 2, 2), dtype=torch.uint8, generator=seeded(0)), list[int]()
    y = torch.randint(0, 3 if tune in ("offsets", "adjustment") else 2, (30,), generator=seeded(1))
    disk = StreamedImages.of(lambda row: read.append(row) or images[row], 30, (3, 2, 2))  # type: ignore[func-returns-value]
    torch.manual_seed(0)
    head = nn.Linear(12, 3) if y.max() == 2 else nn.Sequential(nn.Linear(12, 1), nn.Flatten(0))
    model, spec = nn.Sequential(nn.Flatten(), head), METRICS["accuracy"]
    found = []
    for x in (changed(as_inputs(disk), Tensor.float), images.float()):
        part = Split(x, y)
        task = task_of(copy.deepcopy(model), part, spec)
        if tune == "offsets":
            found.append(tune_offsets(task, part.x))
        elif tune == "adjustment":
            found.append(tune_adjustment(task, part.x, torch.tensor([5, 10, 15])))
        else:
            found.append(tune_threshold(task, part.x, evals=11))
        assert task.metric.ledger.spent > 8
    assert set(read) == set(range(30))
    assert len(read) <= 3 * 30  # for the metric, for candidates, and one to tell the number of logits
    assert torch.equal(found[0].offsets, found[1].offsets)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- Priors -------------------------------------------------------------------------------------------------------


def test_prior_offsets_in_closed_form() -> None:
    counts = torch.tensor([80, 10, 5])
    offsets = prior_offsets(counts)
    expected = [-math.log(count / 95) for count in (80, 10, 5)]
    mean = sum(expected) / 3
    assert offsets.tolist() == pytest.approx([value - mean for value in expected], abs=1e-12)
    (single,) = prior_offsets(torch.tensor([30, 10]), one_logit=True).tolist()
    assert single == pytest.approx(math.log(3), abs=1e-12)


def test_adjustment_undoes_the_priors() -> None:
    """Of Bayes' posterior under the priors it makes the one under equal priors, with one logit and with two."""
    likelihood = torch.tensor([[0.2, 0.5], [0.7, 0.1]]).double()  # of two inputs under each class
    counts = torch.tensor([90, 10])
    joint = (likelihood * counts).log()
    expected = (likelihood / likelihood.sum(1, keepdim=True))[:, 1]
    both = (joint + prior_offsets(counts)).softmax(1)[:, 1]
    single = (joint[:, 1] - joint[:, 0] + prior_offsets(counts, one_logit=True)).sigmoid()
    torch.testing.assert_close(both, expected)
    torch.testing.assert_close(single, expected)


def test_priors_that_can_not_be() -> None:
    assert_refused(lambda: prior_offsets(torch.tensor([3, 0])), DataError, "3", "0")
    assert_refused(lambda: prior_offsets(torch.tensor([3, 2, 1]), one_logit=True), ValueError, "2", "3")


COUNTS = torch.tensor([80, 10, 5])


def test_a_line_of_offsets_is_the_adjustment_unless_it_moves_little() -> None:
    several = prior_offsets(torch.tensor([100, 30, 10]))
    assert line_offsets(several) is several
    assert line_offsets(prior_offsets(torch.tensor([100, 99, 98]))) is None
    rare = prior_offsets(torch.tensor([90, 10]), one_logit=True)
    assert line_offsets(rare) is not None
    assert line_offsets(rare).tolist() == rare.tolist() == pytest.approx([math.log(9)])  # type: ignore[union-attr]
    for counts, least in (((60, 40), 1.0), ((40, 60), -1.0), ((50, 50), 1.0)):
        found = line_offsets(prior_offsets(torch.tensor(counts), one_logit=True))
        assert found is not None
        assert found.tolist() == [least]


def test_the_logits_of_two_classes_have_a_threshold_as_one_has() -> None:
    rare = prior_offsets(torch.tensor([90, 10]))
    assert line_offsets(rare, two_classes=True) is rare
    for counts, least in (((60, 40), 0.5), ((40, 60), -0.5), ((50, 50), 0.5)):
        found = line_offsets(prior_offsets(torch.tensor(counts)), two_classes=True)
        assert found is not None
        assert found.tolist() == [-least, least]
    assert line_offsets(prior_offsets(torch.tensor([50, 50]))) is None  # of two labels


LABELS = torch.tensor([[1, 0], [0, 0], [1, 1], [1, 0]])  # shares of 3/4 and 1/4


@pytest.mark.parametrize(
    ("target", "labels", "expected"),
    [
        (Target("classes", 2), torch.tensor([0, 0, 0, 1]), [-math.log(3) / 2, math.log(3) / 2]),
        (Target("classes", 2), torch.tensor([0, 0, 1, 1]), [-0.5, 0.5]),
        (Target("multilabel", 2), LABELS, [-math.log(3), math.log(3)]),
        (Target("classes", 2), torch.tensor([0, 0, 0, 0]), None),  # no prior
        (Target("multilabel", 2), LABELS[:1], None),
        (Target("multilabel", 2), torch.tensor([[1, 0], [0, 1]]), None),  # moves little
    ],
)
def test_the_direction_of_a_line_is_that_of_the_offsets(
    target: Target, labels: Tensor, expected: list[float] | None
) -> None:
    """The offsets are in units of the adapter's scale; no other coordinate moves."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    assert target_line(attach_input_bias(copy.deepcopy(model), dim=3), target, labels) is None
    adapter = attach_input_bias(model, dim=3, outputs=Outputs(scale=4.0))
    line = target_line(adapter, target, labels)
    if expected is None:
        assert line is None
        return
    assert line is not None
    for t in (-2.5, 0.5, 1.0):
        found = line.at(t)
        assert found.phi.tolist() == pytest.approx([0, 0, 0, *(t * each / 4 for each in expected)], rel=1e-12)
        assert not found.replaced


def test_adjusting_costs_no_query() -> None:
    task, asked = linear_task([0.0, 0.0, 0.0])
    adjusted = adjust_logits(task, X, COUNTS, strength=0.5)
    assert added_by(adjusted, task) == pytest.approx((0.5 * prior_offsets(COUNTS)).tolist())
    assert asked == []


def test_the_strength_of_an_adjustment_is_tuned() -> None:
    task, asked = linear_task((1.23 * prior_offsets(COUNTS)).tolist())
    tuned = tune_adjustment(task, X, COUNTS)
    assert added_by(tuned, task) == pytest.approx((1.2 * prior_offsets(COUNTS)).tolist())
    assert task.metric.ledger.spent_on == {"logit adjustment": 21}
    for i in (0, 10, 20):  # strengths of 0, 1 and 2
        assert asked[i] == pytest.approx((i / 10 * prior_offsets(COUNTS)).tolist(), abs=1e-8)


def test_the_adjustment_of_one_logit() -> None:
    torch.manual_seed(0)
    x = X.float()
    task = task_of(TabularMLP(4).eval(), Split(x, (X[:, 0] > 0).long()), METRICS["mcr"])
    adjusted = adjust_logits(task, x, torch.tensor([30, 10]))
    assert isinstance(adjusted, WithOffsets)
    with torch.no_grad():
        torch.testing.assert_close(adjusted(x), adjusted.model(x) + math.log(3))


def test_what_is_tuned_is_compared_like_any_other_end() -> None:
    """Labels by the model's own logits, which then lose what the adjustment adds: a strength of 1 restores them all."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    labels = model(X).argmax(1)
    with torch.no_grad():
        model.bias -= prior_offsets(COUNTS)
    task = FinetuneTask(
        attach_outputs(model),
        loss=classification_loss,
        batches=lambda seed, task, step: None,
        metric=Metric(lambda judged: float((judged(X).argmax(1) == labels).double().mean()), maximize=True),
    )
    methods: dict[str, Method] = {
        "pretrained": planned(ending_at(lambda task: task.origin())),
        "logit_adjustment": planned(ending_at(lambda task: adjust_logits(task, X, COUNTS))),
        "logit_adjustment_tuned": planned(at_each_budget(lambda task, *_: tune_adjustment(task, X, COUNTS)), 21),
    }
    outcomes = compare(task, task.metric.with_new_ledger(), methods).outcomes
    assert outcomes["pretrained"][0].test < 0.9
    for name, queries in (("logit_adjustment", 0), ("logit_adjustment_tuned", 21)):
        assert outcomes[name][0].test == 1.0
        assert outcomes[name][0].queries_total == queries


def test_a_threshold_of_any_model_is_tuned_for_any_metric() -> None:
    torch.manual_seed(0)
    model, x = TabularMLP(4).eval(), torch.randn(100, 4)
    with torch.no_grad():
        part = Split(x, (model(x) > 0.3).long())
    metric = model_metric(METRICS["mcr"], part)
    tuned = threshold_of(model, metric, x, evals=100)
    assert isinstance(tuned, WithOffsets)
    assert metric.cost(tuned, "check") < 0.02
    assert metric.ledger.spent_on == {"threshold": 100, "check": 1}
    assert threshold_of(nn.Linear(4, 2), metric, x) is None
