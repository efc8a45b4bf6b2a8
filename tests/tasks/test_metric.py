"""The black-box metric: cost mapping, counted queries, and the state it must leave alone."""

import functools
import inspect
import math
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from helpers.refusals import assert_named, assert_refused, assert_warned
from metricopt_ext.errors import BudgetError, MetricError, WeightsError
from metricopt_ext.runtime import distributed
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.halved import Halved
from metricopt_ext.tasks.ledger import Ledger
from metricopt_ext.tasks.metric import Metric, Query


def constant(value: Any) -> Callable[[], Any]:
    return lambda: value


def bound_method() -> Any:
    class Judge:
        def judge(self, model: Any) -> float:
            return 1.0 if isinstance(model, nn.Identity) else 0.0

    return Judge().judge


@pytest.mark.parametrize(
    "function",
    [
        lambda model: float(isinstance(model, nn.Identity)),
        lambda model, scale=1.0: scale * isinstance(model, nn.Identity),
        lambda *args: float(len(args) == 1 and isinstance(args[0], nn.Identity)),
        functools.partial(lambda scale, model: scale * isinstance(model, nn.Identity), 1.0),
        bound_method(),
    ],
)
def test_function_of_the_model(function: Callable[..., Any]) -> None:
    assert Metric(function, maximize=False).cost(nn.Identity(), "test") == 1.0


@pytest.mark.parametrize("function", [lambda: 1.0, lambda scale=1.0: scale, functools.partial(lambda a: a, 1.0)])
def test_function_of_nothing(function: Callable[..., Any]) -> None:
    assert Metric(function, maximize=False).cost(nn.Identity(), "test") == 1.0


@pytest.mark.parametrize("function", [lambda a, b: 0.0, lambda a, b, c=1: 0.0])
def test_two_required_arguments(function: Callable[..., Any]) -> None:
    assert_refused(lambda: Metric(function, maximize=True), ValueError, "'b'")


@pytest.mark.parametrize(
    "value",
    [0.5, 1, 0, True, np.float32(0.5), np.array(0.5), np.array([0.5]), torch.tensor(0.5), torch.tensor([[0.5]])],
)
def test_anything_that_is_a_number(value: Any) -> None:
    cost = Metric(constant(value), maximize=False).cost(nn.Identity(), "test")
    assert type(cost) is float
    assert cost == (value.item() if hasattr(value, "item") else value)


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (math.nan, ("judge", "nan")),
        (math.inf, ("judge", "inf")),
        (-math.inf, ("judge",)),
        (1.01, ("judge", "1.01", "bounds", "(0.0, 1.0)")),
        (-0.01, ("judge", "-0.01")),
        (None, ("judge",)),
        ("high", ("judge", "high")),
        ([0.5], ("judge", "0.5")),
        (torch.ones(2), ("judge", "1")),
        ([0.5, [0.5, 0.5]], ()),
    ],
)
def test_bad_answers_are_errors_and_count(value: Any, names: tuple[str, ...]) -> None:
    metric = Metric(constant(value), maximize=True, name="judge")
    assert_refused(lambda: metric.cost(nn.Identity(), "test"), MetricError, *names)
    assert metric.ledger.spent == 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_not_finite_without_bounds(value: float) -> None:
    assert_refused(lambda: Metric(constant(value), maximize=True, bounds=None).cost(nn.Identity(), "test"), MetricError)


def test_a_raising_metric_counts_and_keeps_its_cause() -> None:
    def broken() -> float:
        raise ZeroDivisionError("no positives")

    metric = Metric(broken, maximize=True)
    with pytest.raises(MetricError) as raised:
        metric.cost(nn.Identity(), "test")
    assert_named(raised, "broken", "positives")
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert metric.ledger.spent == 1


def test_keyboard_interrupt_passes() -> None:
    def interrupted() -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Metric(interrupted, maximize=True).cost(nn.Identity(), "test")


def test_what_can_not_be_called_is_no_metric() -> None:
    assert_refused(lambda: Metric(0.5, maximize=True), TypeError, "0.5")


def test_names() -> None:
    def recall() -> float:
        return 0.0

    assert Metric(recall, maximize=True).name == "recall"
    assert Metric(lambda: 0.0, maximize=True).name == "lambda"
    assert Metric(functools.partial(recall), maximize=True).name == "metric"
    assert Metric(recall, maximize=True, name="mine").name == "mine"


# --- Queries -------------------------------------------------------------------------------------------------


def test_with_new_ledger_judges_alike_and_counts_apart() -> None:
    metric = Metric(constant(1.0), maximize=True, bounds=(0.0, 4.0), name="judge", ledger=Ledger(1))
    metric.cost(nn.Identity(), "test")
    other = metric.with_new_ledger()
    assert [other.cost(nn.Identity(), "test") for _ in range(2)] == [0.75, 0.75]
    assert (other.name, other.ledger.spent, metric.ledger.spent) == ("judge", 2, 1)


# --- The model's state ---------------------------------------------------------------------------------------


def mixed_modes() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()), nn.ReLU())
    model.train()
    model[1][0].eval()
    model[2].eval()
    return model


@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_evaluation_mode_without_gradients(grad: bool, failing: bool) -> None:
    model = mixed_modes()
    before = [module.training for module in model.modules()]
    assert len(set(before)) == 2
    seen: list[tuple[bool, bool]] = []

    def judge(model: nn.Module) -> float:
        seen.append((any(module.training for module in model.modules()), torch.is_grad_enabled()))
        return 1 / (not failing)

    metric = Metric(judge, maximize=True)
    with torch.set_grad_enabled(grad):
        if failing:
            with pytest.raises(MetricError):
                metric.cost(model, "test")
        else:
            metric.cost(model, "test")
        assert torch.is_grad_enabled() == grad
    assert seen == [(False, False)]
    assert [module.training for module in model.modules()] == before


# --- Halves ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("maximize", "cost", "halves"), [(True, 0.25, (0.5, 0.0)), (False, 0.75, (0.5, 1.0))])
def test_halves_are_turned_into_costs_for_one_query(maximize: bool, cost: float, halves: tuple[float, float]) -> None:
    metric = Metric(lambda model: (0.75, (0.5, torch.tensor(1.0))), maximize=maximize)
    assert metric.evaluate(nn.Identity(), "x") == Evaluation(cost, halves)
    assert metric.cost(nn.Identity(), "x") == cost
    assert metric.ledger.spent == 2
    for alone in (0.75, (0.75, None)):
        assert Metric(lambda model, alone=alone: alone, maximize=maximize).evaluate(nn.Identity(), "x") == Evaluation(
            cost
        )


@pytest.mark.parametrize(
    ("answer", "names"),
    [
        ((0.5, (0.5,)), ()),
        ((0.5, (0.5, 0.5, 0.5)), ()),
        ((0.5, (0.5, 0.5), 1), ()),
        ((0.5, 0.5), ()),
        ((0.5, 0.4, 0.6), ()),
        ((0.5, (0.5, math.inf)), ()),
        ((math.nan, (0.5, math.nan)), ()),
        ((0.5, (0.5, 1.5)), ("1.5", "bounds")),
        ((), ()),
        ((0.5, {0: 0.4, 1: 0.6}), ()),  # of which the keys would be taken
        ((0.5, {0.4, 0.6}), ()),
        ((0.5, b"46"), ()),
        ((0.5, (None, None)), ()),
        (10**400, ()),
    ],
)
def test_wrong_halves_are_refused(answer: Any, names: tuple[str, ...]) -> None:
    assert_refused(
        lambda: Metric(lambda model: answer, maximize=True).evaluate(nn.Identity(), "x"), MetricError, *names
    )


def test_repeats_have_the_means_of_their_pairs() -> None:
    answers = iter([(0.5, ((0.25, 0.75), (0.5, 0.5))), (0.75, ((0.75, 0.75), (0.5, 1.0)))])
    found = Metric(lambda: next(answers), maximize=False, repeats=2).evaluate(nn.Identity(), "x")
    assert found == Evaluation(0.625, (0.5, 0.75), 0.125, pairs=((0.5, 0.75), (0.5, 0.75)))


@pytest.mark.parametrize(
    ("answer", "names"),
    [
        ((0.5, ((0.5, 0.5), (0.5,))), ()),
        ((0.5, ((0.5, 0.5), 0.5)), ("halves",)),
        ((0.5, ((0.5, 0.5), (0.5, 0.5, 0.5))), ("halves",)),
        ((0.5, ((0.5, 0.5), {0.4, 0.6})), ("halves",)),
        ((0.5, ((0.5, 0.5), (0.5, "x"))), ("halves",)),
        ((0.5, ((0.5, 0.5), (0.5, math.inf))), ("inf",)),
        ((0.5, ((0.5, 0.5), (0.5, 1.5))), ("1.5",)),
    ],
)
def test_wrong_pairs_of_halves_are_refused(answer: Any, names: tuple[str, ...]) -> None:
    assert_refused(
        lambda: Metric(lambda model: answer, maximize=True).evaluate(nn.Identity(), "x"), MetricError, *names
    )


def test_another_number_of_pairs_than_before_is_refused() -> None:
    answers = iter([(0.5, ((0.5, 0.5), (0.5, 0.5))), (0.5, (0.5, 0.5))])
    metric = Metric(lambda: next(answers), maximize=True, name="recall")
    metric.evaluate(nn.Identity(), "x")
    assert_refused(lambda: metric.evaluate(nn.Identity(), "x"), MetricError, "recall", "2")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((0.5, (0.5, math.nan)), "it is nan on a half of its data"),
        ((0.5, (torch.tensor(math.nan), 0.5)), "it is nan on a half of its data"),
        ((0.5, "class 3 has one example"), "class 3 has one example"),
    ],
)
@pytest.mark.parametrize("repeats", [1, 3])
def test_a_metric_without_halves_says_once_why(answer: Any, why: str, repeats: int) -> None:
    metric = Metric(lambda model: answer, maximize=True, name="auc", repeats=repeats)
    with pytest.warns(UserWarning, match="auc") as said:
        found = [metric.evaluate(nn.Identity(), "x") for _ in range(3)]
    assert found == [Evaluation(0.5, None, None if repeats == 1 else 0.0)] * 3
    (warning,) = said
    assert str(warning.message) == f"metric 'auc' reports no halves, as {why}; a gain can't be told from chance by them"


def in_training_mode(model: nn.Module) -> float:
    """Evaluate as people do by mistake, which moves BatchNorm's statistics."""
    model.train()
    model(torch.ones(4, 3))
    return 0.5


def noisy_weights(model: Any) -> float:
    model[0].weight.add_(1.0)
    return 0.5


def in_half_precision(model: nn.Module) -> float:
    model.half()
    return 0.5


def loaded(model: nn.Module) -> float:
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    return 0.5


def failing(model: Any) -> float:
    model[1].running_mean.zero_()
    raise RuntimeError("no")


@pytest.mark.parametrize("function", [in_training_mode, noisy_weights, in_half_precision, loaded, failing])
def test_a_model_that_the_metric_changed_is_put_back(function: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    metric = Metric(function, maximize=True)
    for told in (1, 0):  # it is said once
        with warnings.catch_warnings(record=True) as said, suppress(MetricError):
            warnings.simplefilter("always")
            metric.evaluate(model, "test")
        assert len(said) == told
        assert all("changed the model's" in str(each.message) for each in said)
        after = model.state_dict()
        assert all(
            torch.equal(value, after[name]) and value.dtype == after[name].dtype for name, value in before.items()
        )
    nn.init.ones_(model[0].weight)  # a change between two evaluations is the user's own
    with suppress(MetricError):
        metric.evaluate(model, "test")
    assert torch.equal(model[0].weight, torch.ones(2, 3))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hooks of 0": lambda model: model[0].register_forward_hook(lambda layer, args, output: 2 * output),
    "hooks of 1": lambda model: model[1].register_forward_pre_hook(lambda layer, args: (2 * args[0],)),
    "0.bias": lambda model: setattr(model[0], "bias", None),
    "1.running_mean": lambda model: model[1]._buffers.pop("running_mean"),
    "0.weight": lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(2, 3))),
    "1": lambda model: model.__setitem__(1, nn.Linear(2, 5)),
    "2": lambda model: model.append(nn.Softmax(1)),
    "0.more": lambda model: model[0].register_buffer("more", torch.ones(2)),
    "requires_grad of 0.weight": lambda model: model.requires_grad_(True),
    "0.weight and 2 more": lambda model: parametrizations.weight_norm(model[0]),
    "0.weight and 3 more": lambda model: prune.l1_unstructured(model[0], "weight", 0.5),
}


@pytest.mark.parametrize("what", list(CHANGES))
def test_layers_and_hooks_that_the_metric_changed_are_put_back(what: str) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).eval().requires_grad_(False)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    weights, state, expected = list(model.parameters()), set(model.state_dict()), model(x)

    def function(model: nn.Module) -> float:
        value = float(model(x).square().mean())
        CHANGES[what](model)
        return value

    metric = Metric(function, maximize=True, bounds=None)
    first = assert_warned(lambda: metric.evaluate(model, "test"), what)
    assert metric.evaluate(model, "test") == first
    assert torch.equal(model(x), expected)
    assert all(own is one for own, one in zip(model.parameters(), weights, strict=True))
    assert set(model.state_dict()) == state
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_cache_that_a_forward_pass_makes_stays() -> None:
    class Caching(nn.Module):
        made = 0

        def forward(self, x: Tensor) -> Tensor:
            if not self.made:
                self.made += 1
                self.register_buffer("cache", torch.ones(1), persistent=False)
            return x + self.get_buffer("cache")

    model = Caching()
    metric = Metric(lambda model: float(model(torch.zeros(1))), maximize=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [metric.cost(model, "test") for _ in range(2)] == [0.0, 0.0]


@pytest.mark.parametrize("answer", [0.5, math.nan])
def test_a_change_without_a_trace_ends_the_run(answer: float) -> None:
    def judge(model: Any) -> float:
        model[0].weight.data.mul_(2.0)
        model[1].bias.detach().numpy()[0] = 1.0
        return answer

    model: Any = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    good = Metric(lambda model: 0.5, maximize=True, name="judge")
    good.evaluate(model, "test")
    good.function = judge
    assert_refused(lambda: good.evaluate(model, "test"), WeightsError, "0.weight", "1")
    assert good.ledger.spent == 2
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_change_by_the_user_without_a_trace_is_kept() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 2))
    metric = Metric(lambda model: 0.5, maximize=True)
    for value in (1.0, 2.0):
        model[0].weight.data.fill_(value)  # as some optimizers and averages do
        metric.evaluate(model, "test")
        assert model[0].weight.eq(value).all()


def test_a_metric_that_changes_nothing_is_not_reported(recwarn: pytest.WarningsRecorder) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    metric = Metric(lambda model: float(model(torch.ones(4, 3)).sum() * 0), maximize=True)
    metric.evaluate(model, "test")
    assert not recwarn.list


def test_a_metric_with_a_new_ledger_is_otherwise_the_same() -> None:
    metric = Metric(constant(0.5), maximize=False, bounds=(0.0, 2.0), name="half", repeats=3)
    assert metric.with_new_ledger().settings == metric.settings
    assert set(metric.settings) == {
        name for name in inspect.signature(Metric.__init__).parameters if name not in ("self", "function", "ledger")
    }


# --- Metrics that misbehave ----------------------------------------------------------------------------------------


def returning(*values: Any) -> Callable[[], Any]:
    """Return a metric's function that returns, or raises, one value after the other."""
    left = iter(values)

    def function() -> Any:
        value = next(left)
        if isinstance(value, Exception):
            raise value
        return value

    return function


def test_repeats_are_averaged_and_counted() -> None:
    metric = Metric(
        returning((0.5, (0.4, 0.6)), (0.7, (0.6, 0.8)), (0.9, (0.8, 1.0))), maximize=False, repeats=3, ledger=Ledger(3)
    )
    evaluation = metric.evaluate(nn.Identity(), "x")
    assert evaluation.cost == pytest.approx(0.7)
    assert evaluation.halves == pytest.approx((0.6, 0.8))
    assert evaluation.noise == pytest.approx(0.2 / math.sqrt(3))  # the standard deviation of .5, .7, .9 is .2
    assert metric.ledger.spent_on == {"x": 3}
    assert_refused(lambda: metric.evaluate(nn.Identity(), "x"), BudgetError, "3", "queries")


@pytest.mark.parametrize("failure", [OSError("busy"), math.nan, 1.5, "no number"])
def test_what_fails_counts_and_can_be_asked_again(failure: Any) -> None:
    metric = Metric(returning(0.2, failure, 0.6), maximize=True)
    assert metric.cost(nn.Identity(), "x") == pytest.approx(0.8)
    with pytest.raises(MetricError):
        metric.cost(nn.Identity(), "x")
    assert metric.cost(nn.Identity(), "x") == pytest.approx(0.4)
    assert metric.ledger.spent == 3


def test_repeats_are_checked() -> None:
    assert_refused(lambda: Metric(lambda: 0.5, maximize=True, repeats=0), ValueError, "repeats", "0", "1")


ON_RANKS = """
import torch
import torch.distributed as dist
from torch import nn
from metricopt_ext.errors import RankError
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.runtime import distributed

dist.init_process_group("gloo")
own, calls = dist.get_rank(), []
draw = torch.Generator().manual_seed(own)

def summed(model):
    value = torch.tensor(0.25)
    dist.all_reduce(value)
    return float(value)

def on_all(model):
    calls.append(1)
    return 0.1 * len(calls), (0.4 + 1e-9 * own, 0.6)

def failing(model):
    if own == 1:
        raise OSError("no such file")
    return 0.5

# A function, further options, and what every rank says: the values of three evaluations, or an error.
METRICS = {
    "a shard": (lambda model: 0.6 - 0.1 * own, {}, "0.6 on rank 0, but 0.5 on rank 1"),
    "halves of a shard": (lambda model: (0.6, (0.5, 0.7 - 0.1 * own)), {}, "all the data"),
    "halves on one": (lambda model: (0.6, (0.5, 0.7)) if own else 0.6, {}, "0.6 on rank 0"),
    "other draws": (lambda model: float(torch.rand(1, generator=draw)), {}, "draw the same"),
    "unbounded": (lambda model: 1000.0 + own, {"bounds": None}, "1000 on rank 0, but 1001"),
    "a failure": (failing, {}, "no such file"),
    "a sum": (summed, {}, "(allreduce)"),
    "rounding": (lambda model: 0.6 + 1e-8 * own, {}, 3),
    "rounding close to 1": (lambda model: 1 - 1e-6 + 1e-7 * own, {}, 3),
    "noise": (lambda model: 0.5 + 0.1 * float(torch.rand(1, generator=draw)), {"repeats": 3}, 3),
    "data beyond noise": (
        lambda model: 0.5 + 0.3 * own + 1e-3 * float(torch.rand(1, generator=draw)), {"repeats": 5}, "all the data"
    ),
    "the same": (on_all, {}, 3),
}
for name, (function, options, right) in METRICS.items():
    metric = Metric(function, maximize=True, **options)
    try:
        with distributed.joined(), distributed.sharing():
            said = len(list(metric.each(metric.judge, [nn.Identity()] * 3, "test")))
        assert metric.ledger.spent == 3 * metric.repeats
    except RuntimeError as error:
        said = str(error)
    assert said == right if isinstance(right, int) else right in str(said), (name, said)
assert len(calls) == 2  # the first point, and one of the two others
assert Metric(summed, maximize=True).evaluate(nn.Identity(), "test").cost == 0.5  # each point together, not joined
dist.destroy_process_group()
print(f"rank {own} is done")
"""


@pytest.mark.slow
def test_ranks_must_find_the_same_and_not_wait_for_each_other(torchrun: Any) -> None:
    process = torchrun(ON_RANKS, 2)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert output.count("is done") == 2


def test_callbacks_are_told_of_a_query_once_whoever_asked_has_the_answer() -> None:
    values, told = iter([0.25, 0.75]), []
    metric = Metric(lambda: next(values), maximize=True, bounds=(0, 2))
    model = nn.Identity()
    with metric.calling(told.append):
        answers = metric.each(metric.judge, [model, model], "search")
        assert (next(answers).cost, told) == (0.875, [])  # the first is told once the second is asked for
        assert next(answers).cost == 0.625
        assert [(query.value, query.spent) for query in told] == [(0.25, 1)]
        assert list(answers) == []
    assert [tuple(query) for query in told] == [
        (model, Evaluation(0.875), 0.25, "search", 1, False),
        (model, Evaluation(0.625), 0.75, "search", 2, False),
    ]


def test_a_callback_is_told_inside_its_block_alone_and_once() -> None:
    told: list[Query] = []
    metric = Metric(lambda: 0.5, maximize=True)
    with metric.calling(told.append), metric.calling(told.append):
        metric.cost(nn.Identity(), "a")
        metric.with_new_ledger().cost(nn.Identity(), "of a copy")
    metric.cost(nn.Identity(), "b")
    assert [(query.purpose, query.spent) for query in told] == [("a", 1), ("of a copy", 1)]


def test_a_metric_with_callbacks_shares_the_ledger() -> None:
    told: list[Query] = []
    metric = Metric(lambda: 0.5, maximize=True)
    metric.with_callbacks(told.append).cost(nn.Identity(), "a")
    assert metric.ledger.spent == len(told) == 1
    assert metric.callbacks == []


def test_what_is_on_file_is_booked_and_told_as_such() -> None:
    told: list[Query] = []
    metric = Metric(lambda: 0.5, maximize=True, repeats=2)
    with metric.calling(told.append):
        assert list(metric.repeat(Evaluation(0.25), "search")) == [Evaluation(0.25)]
    assert [tuple(query) for query in told] == [(None, Evaluation(0.25), 0.75, "search", 2, True)]
    assert metric.ledger.spent_on == {"search": 2}


def test_queries_that_are_asked_at_once_are_told_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Query] = []
    metric = Metric(lambda: 0.5, maximize=True)
    monkeypatch.setattr(distributed, "world", lambda: 2)
    monkeypatch.setattr(distributed, "session", lambda: metric._compared)
    monkeypatch.setattr(distributed, "each", lambda ask, items: map(ask, items))
    with metric.calling(told.append):
        list(metric.each(metric.judge, [nn.Identity()] * 3, "search"))
    assert [query.spent for query in told] == [1, 2, 3]


# --- Other quantities ----------------------------------------------------------------------------------------------


def several(value: Any, **settings: Any) -> Metric:
    return Metric(constant(value), maximize=True, name="f1", **settings)


@pytest.mark.parametrize(
    ("value", "evaluation"),
    [
        ({"f1": 0.75}, Evaluation(0.25)),
        ({"accuracy": 0.9, "f1": 0.75}, Evaluation(0.25, also={"accuracy": 0.9})),
        ({"f1": (0.75, (0.5, 1)), "n": torch.tensor(3)}, Evaluation(0.25, (0.5, 0.0), also={"n": 3.0})),
        ({"f1": Halved(0.75, (0.5, 1.0)), "b": Halved(0.5, (0.0, 1.0))}, Evaluation(0.25, (0.5, 0.0), also={"b": 0.5})),
    ],
)
def test_a_dict_gives_several_values_from_one_call(value: Any, evaluation: Evaluation) -> None:
    metric = several(value)
    assert metric.evaluate(nn.Identity(), "x") == evaluation
    assert metric.ledger.spent == 1


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ({}, ()),
        ({"f2": 0.5, "accuracy": 0.5}, ("accuracy", "0.5", "'f2'")),
        ({"f1": 0.5, "accuracy": math.nan}, ("accuracy",)),
        ({"f1": 0.5, "accuracy": -math.inf}, ("accuracy",)),
        ({"f1": 0.5, "accuracy": "high"}, ("accuracy", "high")),
        ({"f1": 0.5, "accuracy": (0.5, (0.5, 0.5))}, ("accuracy", "0.5")),
        ({"f1": 0.5, 3: 0.5}, ("3", "0.5")),
        ({"f1": 1.5, "accuracy": 0.5}, ("1.5", "bounds")),
        ({"f1": {"value": 0.5}}, ()),
        ({"f1": 0.5, "ece": 0.5}, ("ece",)),
    ],
)
def test_a_dict_that_tells_no_values_is_a_failure(value: Any, names: tuple[str, ...]) -> None:
    metric = several(value, also={"ece": constant(0.1)})
    assert_refused(lambda: metric.evaluate(nn.Identity(), "x"), MetricError, *names)


@pytest.mark.parametrize(
    ("also", "error", "names"),
    [
        (["accuracy"], TypeError, ()),
        ({"accuracy": 0.5}, TypeError, ("also['accuracy']",)),
        ({"accuracy": Metric(constant(1), maximize=True)}, TypeError, ("metric.function",)),
        ({"f1": constant(1)}, ValueError, ("'f1'",)),
        ({"": constant(1)}, ValueError, ()),
        ({3: constant(1)}, ValueError, ()),
    ],
)
def test_also_is_functions_by_name(also: Any, error: Any, names: tuple[str, ...]) -> None:
    assert_refused(lambda: several(0.5, also=also), error, *names)


def test_functions_besides_are_asked_when_looked_at_alone_and_cost_nothing() -> None:
    calls: list[str] = []

    def named(name: str, value: Any) -> Callable[..., Any]:
        def function(model: nn.Module) -> Any:
            assert not model.training
            assert not torch.is_grad_enabled()
            calls.append(name)
            return value

        return function

    also = {"a": named("a", 0.5), "b": named("b", (0.25, (0, 1))), "bound": named("bound", 3)}
    metric = several(0.75, also=also, subject_to={"bound": ">= 1"}, repeats=2)
    model = nn.Linear(1, 1).train()
    assert metric.evaluate(model, "x") == Evaluation(0.25, noise=0.0, also={"bound": 3.0})
    assert calls == ["bound", "bound"]
    assert metric.look(model) == {"a": 0.5, "b": 0.25}
    assert calls[2:] == ["a", "b"]
    assert model.training
    assert metric.ledger.spent == 2
    assert metric.takes_model is False, "the metric's own function knows its model"
    assert Metric(lambda model: 0.5, maximize=True, also={"a": constant(1)}).takes_model
    bound = Metric(lambda model: 0.5, maximize=True, name="m", also={"a": constant(1)}, subject_to={"a": ">= 0"})
    assert not bound.takes_model


def test_a_function_besides_leaves_the_model_as_it_was() -> None:
    def breaks(model: nn.Module) -> float:
        with torch.no_grad():
            model.weight.fill_(7)  # type: ignore[operator]
        return 1.0

    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    with pytest.warns(UserWarning, match=r"changed.*model's.*all was put back"):
        assert several(0.5, also={"a": breaks}).look(model) == {"a": 1.0}
    assert torch.equal(model.weight, before)


def test_what_a_metric_was_made_with_goes_with_it() -> None:
    also, subject_to = {"a": constant(1.0)}, {"a": ">= start", "b": "<= 2"}
    metric = several({"f1": 0.5, "b": 1.0}, also=also, subject_to=subject_to)
    for other in (metric, metric.with_new_ledger(), metric.with_settings(repeats=1), metric.with_callbacks()):
        assert (other.also, other.subject_to) == (also, subject_to)
        assert [str(each) for each in other.constraints] == ["a >= start", "b <= 2"]
    assert metric.evaluate(nn.Identity(), "x").also == {"a": 1.0, "b": 1.0}
    assert_refused(lambda: metric.with_settings(subject_to={"a": "> 1"}), ValueError, "subject_to", "1")
    assert_refused(lambda: metric.with_settings(subject_to="a >= 1"), ValueError, "subject_to", "a >= 1", "constraints")


def test_repeats_tell_the_mean_of_what_all_have() -> None:
    told = iter([{"f1": 0.5, "a": 1.0, "b": 1.0}, {"f1": 0.7, "a": 2.0}])
    evaluation = Metric(lambda: next(told), maximize=True, name="f1", repeats=2).evaluate(nn.Identity(), "x")
    assert evaluation.cost == pytest.approx(0.4)
    assert evaluation.also == {"a": 1.5}


def test_ranks_must_find_the_same_besides() -> None:
    metric = several(0.5)
    one, other = Evaluation(0.5, also={"a": 0.1}), Evaluation(0.5, also={"a": 0.1 + 1e-12})
    assert metric._agree(one, other)
    assert not metric._agree(one, one._replace(also={"a": 0.2}))
    assert not metric._agree(one, one._replace(also=None))


def test_a_metric_that_ends_the_program_has_failed() -> None:
    metric = Metric(lambda: sys.exit(0), maximize=True, name="quits")
    with pytest.raises(MetricError) as caught:
        metric.cost(nn.Identity(), "test")
    assert_named(caught, "quits", "SystemExit", "0")
