"""The black-box metric: values and costs, counted queries, halves, and the model that it must leave alone."""

import functools
import math
import pickle
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from helpers.refusals import assert_named, assert_refused
from metricopt_ext.errors import BudgetError, MetricError, WeightsError
from metricopt_ext.siblings.batch_metric import BatchMetric
from metricopt_ext.tasks.evaluation import Evaluation, Outcome, noise_of, stacked_pairs
from metricopt_ext.tasks.halved import Halved, with_halves
from metricopt_ext.tasks.ledger import Ledger
from metricopt_ext.tasks.metric import Metric, Query


def constant(value: Any) -> Callable[[], Any]:
    return lambda: value


def returning(*values: Any) -> Callable[[], Any]:
    """Return a metric's function that returns, or raises, one value after the other."""
    left = iter(values)

    def function() -> Any:
        value = next(left)
        if isinstance(value, BaseException):
            raise value
        return value

    return function


# --- Functions, values and costs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda model: float(isinstance(model, nn.Identity)),
        functools.partial(lambda scale, model: scale * isinstance(model, nn.Identity), 1.0),
        lambda scale=1.0: scale,
    ],
)
def test_a_function_takes_the_model_or_nothing(function: Callable[..., Any]) -> None:
    assert Metric(function, maximize=False).cost(nn.Identity(), "test") == 1.0


@pytest.mark.parametrize("value", [0.5, 1, True, np.float32(0.5), np.array([0.5]), torch.tensor([[0.5]])])
def test_anything_that_is_a_number(value: Any) -> None:
    cost = Metric(constant(value), maximize=False).cost(nn.Identity(), "test")
    assert type(cost) is float
    assert cost == (value.item() if hasattr(value, "item") else value)


@pytest.mark.parametrize(
    ("maximize", "bounds", "value", "scaled"),
    [
        (True, (0.0, 1.0), 0.75, 0.25),
        (False, (0.0, 1.0), 0.75, 0.75),
        (True, (-1.0, 3.0), 0.0, 0.75),
        (False, (-1.0, 3.0), 0.0, 0.25),
        (False, (10.0, 20.0), 20.0, 1.0),
        (True, None, 37.5, -37.5),
        (False, None, 37.5, 37.5),
    ],
)
def test_a_cost_is_the_value_with_a_sign_and_a_learner_s_is_scaled(
    maximize: bool, bounds: Any, value: float, scaled: float
) -> None:
    metric = Metric(constant(value), maximize=maximize, bounds=bounds)
    assert metric.cost(nn.Identity(), "test") == (-value if maximize else value)
    of_batch = BatchMetric(lambda scores, labels: value, maximize=maximize, bounds=bounds)
    assert of_batch.value(torch.zeros(2), torch.zeros(2), "test") == value
    assert of_batch.cost(torch.zeros(2), torch.zeros(2), "test") == pytest.approx(scaled, abs=1e-15)
    assert metric.value_of(scaled) == value


def test_rounding_beyond_a_bound_is_the_bound() -> None:
    scale = Metric(constant(0), maximize=True, bounds=(-1.0, 3.0))
    assert [scale.checked(value) for value in (-1 - 3e-6, 3 + 3e-6)] == [-1, 3]
    assert_refused(lambda: scale.checked(3 + 5e-6), MetricError, "bounds")


@pytest.mark.parametrize(
    ("settings", "error", "names"),
    [
        ({"function": 0.5}, TypeError, ("0.5",)),
        ({"function": lambda a, b: 0.0}, ValueError, ("'b'",)),
        ({"maximize": "min"}, ValueError, ("maximize", "min")),
        ({"bounds": (0, math.inf)}, ValueError, ("bounds=None",)),
        ({"bounds": "01"}, ValueError, ("bounds", "01")),
        ({"bounds": {0, 1}}, ValueError, ("bounds",)),
        ({"repeats": 0}, ValueError, ("repeats", "0")),
        ({"also": {"f1": constant(1)}}, ValueError, ("'f1'",)),
        ({"subject_to": {"a": "> 1"}}, ValueError, ("subject_to", "1")),
    ],
)
def test_what_is_no_metric_is_refused(settings: dict[str, Any], error: Any, names: tuple[str, ...]) -> None:
    given = {"function": constant(0.5), "maximize": True, "name": "f1", **settings}
    assert_refused(lambda: Metric(**given), error, *names)


@pytest.mark.parametrize(
    ("answer", "names"),
    [
        (math.nan, ("judge", "nan")),
        (1.01, ("judge", "1.01", "bounds")),
        (None, ("judge",)),
        ((0.5, (0.5, 0.5), 1), ()),
        ((0.5, (0.5, 1.5)), ("1.5", "bounds")),
        ((0.5, {0: 0.4, 1: 0.6}), ()),  # of which the keys would be taken
        ({"f2": 0.5, "accuracy": 0.5}, ("accuracy", "'f2'")),
        ({"judge": 0.5, "accuracy": (0.5, (0.5, 0.5), 1)}, ("accuracy",)),
        ({"judge": 0.5, "ece": 0.5}, ("ece",)),  # which `also` has too
        (ZeroDivisionError("no positives"), ("judge", "positives")),
        (SystemExit(0), ("judge", "SystemExit")),
    ],
)
def test_an_answer_that_is_none_is_an_error_counts_and_can_be_asked_again(answer: Any, names: tuple[str, ...]) -> None:
    metric = Metric(returning(0.2, answer, 0.6), maximize=True, name="judge", also={"ece": constant(0.1)})
    assert metric.evaluate(nn.Identity(), "test").value == 0.2
    with pytest.raises(MetricError) as caught:
        metric.cost(nn.Identity(), "test")
    assert_named(caught, *names)
    assert not isinstance(answer, Exception) or caught.value.__cause__ is answer
    assert metric.evaluate(nn.Identity(), "test").value == 0.6
    assert metric.ledger.spent == 3


def test_a_value_without_bounds_is_finite_and_an_interrupt_passes() -> None:
    unbounded = Metric(constant(math.inf), maximize=True, bounds=None)
    assert_refused(lambda: unbounded.cost(nn.Identity(), "test"), MetricError)
    interrupted = Metric(returning(KeyboardInterrupt()), maximize=True)
    with pytest.raises(KeyboardInterrupt):
        interrupted.cost(nn.Identity(), "test")


# --- Queries -------------------------------------------------------------------------------------------------------


def test_queries_are_counted_by_purpose_and_refused_before_the_metric_is_asked() -> None:
    calls: list[int] = []
    ledger = Ledger(4)
    one, other = (Metric(lambda: calls.append(1) or 0.5, maximize=True, ledger=ledger, repeats=n) for n in (1, 2))
    for metric in (one, other, one):
        metric.cost(nn.Identity(), "collect")
    assert (ledger.spent_on, ledger.left, len(calls)) == ({"collect": 4}, 0, 4)
    for metric in (one, other):
        assert_refused(lambda m=metric: m.cost(nn.Identity(), "guard"), BudgetError, "guard", "0", "4", "collect")
    assert (ledger.spent, len(calls)) == (4, 4)
    apart = one.with_settings()
    apart.cost(nn.Identity(), "x")
    assert (apart.ledger.spent, apart.ledger.left, apart.settings) == (1, math.inf, one.settings)
    for budget in (-1, 30.0, True):
        assert_refused(lambda b=budget: Ledger(b), ValueError, "budget", budget)


def test_the_metric_of_a_batch_sees_detached_scores_and_counts_what_fails() -> None:
    seen = []

    def share(scores: Tensor, labels: Tensor) -> Tensor:
        seen.append(scores.requires_grad)
        return (scores > 0).float().mean() / len(labels)

    metric = BatchMetric(share, maximize=False, ledger=Ledger(2))
    scores = torch.tensor([0.5, -0.5]).requires_grad_()
    assert metric.cost(scores, torch.ones(2), "a") == 0.25
    assert_refused(lambda: metric.cost(scores, torch.ones(0), "b"), MetricError, "share")
    assert_refused(lambda: metric.cost(scores, torch.ones(2), "b"), BudgetError, "1", "0")
    assert (metric.ledger.spent_on, seen) == ({"a": 1, "b": 1}, [False, False])
    assert_refused(lambda: BatchMetric(3, maximize=False), TypeError, "3")


def test_repeats_are_averaged_and_counted() -> None:
    answers = (0.5, ((0.4, 0.6), (0.5, 0.5))), (0.7, ((0.6, 0.8), (0.5, 0.5))), (0.9, ((0.8, 1.0), (0.5, 1.0)))
    metric = Metric(returning(*answers), maximize=False, repeats=3)
    found = metric.evaluate(nn.Identity(), "x")
    assert found.cost == pytest.approx(0.7)
    assert found.halves == pytest.approx((0.6, 0.8))
    assert found.pairs[1] == pytest.approx((0.5, 2 / 3))
    assert found.noise == pytest.approx(0.2 / math.sqrt(3))  # the standard deviation of .5, .7, .9 is .2
    assert metric.ledger.spent_on == {"x": 3}
    told = Metric(returning({"f": 0.5, "a": 1.0, "b": 1.0}, {"f": 0.7, "a": 2.0}), maximize=True, name="f", repeats=2)
    assert told.evaluate(nn.Identity(), "x").also == {"a": 1.5}  # what all have
    pooled = [Evaluation(0.5, noise=0.3), Evaluation(0.1, noise=0.4), Evaluation(0.2)]
    assert noise_of(pooled) == pytest.approx(math.sqrt((0.09 + 0.16) / 2))
    assert noise_of(pooled[2:]) == noise_of([]) == 0.0


def test_callbacks_are_told_of_each_query_once() -> None:
    told: list[Query] = []
    metric, model = Metric(returning(0.25, 0.75, 0.5, 0.5, 0.5), maximize=True, bounds=(0, 2)), nn.Identity()
    with metric.calling(told.append), metric.calling(told.append):
        assert [metric.cost(model, "search") for _ in range(2)] == [-0.25, -0.75]
        metric.with_settings().cost(model, "of a copy")
    metric.cost(model, "outside")
    metric.with_callbacks(told.append).cost(model, "with the same ledger")
    assert [tuple(query) for query in told[:2]] == [
        (model, Evaluation(0.25, sign=metric.sign), "search", 1, False),
        (model, Evaluation(0.75, sign=metric.sign), "search", 2, False),
    ]
    assert [(query.purpose, query.spent) for query in told[2:]] == [("of a copy", 1), ("with the same ledger", 4)]
    assert metric.callbacks == []


# --- Halves --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", [[(0.5, 1.0), (0.25, 0.75)], torch.tensor([[0.5, 1.0], [0.25, 0.75]]).numpy()])
def test_halves_are_costs_of_one_query_and_the_first_pair_counts_where_one_is_meant(pairs: Any) -> None:
    metric = Metric(lambda: (0.75, pairs), maximize=True)
    found = metric.evaluate(nn.Identity(), "x")
    assert found == Evaluation(0.75, pairs=((0.5, 1.0), (0.25, 0.75)), sign=-1)
    assert (found.cost, found.halves, metric.ledger.spent) == (-0.75, (-0.5, -1.0), 1)
    one = Metric(lambda: (0.75, pairs[:1]), maximize=False).evaluate(nn.Identity(), "x")
    assert one == Evaluation(0.75, pairs=((0.5, 1.0),), sign=1)
    stacked, alone = stacked_pairs([found, found]), stacked_pairs([one])
    assert stacked is not None
    assert stacked.tolist() == [[[-0.5, -1.0], [-0.25, -0.75]]] * 2
    assert alone is not None
    assert alone.tolist() == [[[0.5, 1.0]]]
    assert stacked_pairs([found, Evaluation(0.5)]) is None


def test_another_number_of_pairs_than_before_is_refused() -> None:
    metric = Metric(returning((0.5, ((0.5, 0.5), (0.5, 0.5))), (0.5, (0.5, 0.5))), maximize=True, name="recall")
    metric.evaluate(nn.Identity(), "x")
    assert_refused(lambda: metric.evaluate(nn.Identity(), "x"), MetricError, "recall", "2")


@pytest.mark.parametrize("answer", [(0.5, (torch.tensor(math.nan), 0.5)), (0.5, "class 3 has one example")])
@pytest.mark.parametrize("repeats", [1, 3])
def test_a_metric_without_halves_says_once_why(answer: Any, repeats: int) -> None:
    metric = Metric(lambda model: answer, maximize=True, name="auc", repeats=repeats)
    with pytest.warns(UserWarning, match="auc") as said:
        found = [metric.evaluate(nn.Identity(), "x") for _ in range(3)]
    assert found == [Evaluation(0.5, noise=None if repeats == 1 else 0.0, sign=-1)] * 3
    (warning,) = said
    assert ("nan" if isinstance(answer[1], tuple) else answer[1]) in str(warning.message)


def test_a_value_with_halves_is_the_same_in_another_process() -> None:
    sent = pickle.loads(pickle.dumps({"a": Halved(0.5, (0.25, 0.75))}))["a"]
    assert (sent, sent.halves, type(sent)) == (0.5, (0.25, 0.75), Halved)


def test_values_on_halves_of_the_data_are_those_of_their_rows() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    pairs = [(torch.tensor([0, 1]), torch.tensor([2, 3])), (torch.tensor([0, 2]), torch.tensor([1, 3]))]

    def mean(rows: Tensor | None) -> float:
        if rows is not None and len(rows) < 2:
            raise ValueError("too few")
        return float((x if rows is None else x[rows]).mean())

    found = with_halves(mean, pairs)
    assert (float(found), found.halves) == (2.5, ((1.5, 3.5), (2.0, 3.0)))
    assert with_halves(mean, pairs[0]).halves == (1.5, 3.5)
    assert "too few" in str(with_halves(mean, [torch.tensor([0, 2]), torch.tensor([1])]).halves)  # undefined there
    assert with_halves(mean, "there are no classes").halves == "there are no classes"
    assert with_halves(mean, ()).halves is None
    shared = [(torch.tensor([0, 1]), torch.tensor([1, 2]))]
    assert_refused(lambda: with_halves(mean, [pairs[0], *shared]), ValueError, "halves", "1")

    def broken(rows: Tensor | None) -> float:
        if rows is not None:
            raise OSError("no disk")
        return 0.25

    metric = Metric(lambda: with_halves(broken, pairs), maximize=True)  # which has nothing to do with halves
    assert_refused(lambda: metric.evaluate(nn.Identity(), "x"), MetricError, "OSError")


# --- Other quantities ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "evaluation"),
    [
        ({"accuracy": 0.9, "f1": 0.75}, Evaluation(0.75, {"accuracy": Outcome(0.9)}, sign=-1)),
        (
            {"f1": (0.75, (0.5, 1)), "n": torch.tensor(3)},
            Evaluation(0.75, {"n": Outcome(3.0)}, ((0.5, 1.0),), sign=-1),
        ),
        (
            {"f1": Halved(0.75, (0.5, 1.0)), "b": Halved(0.5, (0.0, 1.0)), "c": (0.5, "no halves")},
            Evaluation(0.75, {"b": Outcome(0.5, ((0.0, 1.0),)), "c": Outcome(0.5)}, ((0.5, 1.0),), sign=-1),
        ),
    ],
)
def test_a_dict_gives_several_values_from_one_call(value: Any, evaluation: Evaluation) -> None:
    metric = Metric(constant(value), maximize=True, name="f1")
    assert metric.evaluate(nn.Identity(), "x") == evaluation
    assert metric.ledger.spent == 1


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
    bounds = {"bound": ">= 1", "told": "<= start"}
    answer = constant({"f1": 0.75, "told": 1.0})
    metric = Metric(answer, maximize=True, name="f1", also=also, subject_to=bounds, repeats=2)
    model = nn.Linear(1, 1).train()
    for each in (metric, metric.with_settings(), metric.with_settings(repeats=2), metric.with_callbacks()):
        others = {"told": Outcome(1.0, noise=0.0), "bound": Outcome(3.0, noise=0.0)}
        assert each.evaluate(model, "x") == Evaluation(0.75, others, noise=0.0, sign=-1)
        assert [str(one) for one in each.constraints] == ["bound >= 1", "told <= start"]
    assert calls == ["bound", "bound"] * 4
    spent = metric.ledger.spent
    assert metric.look(model) == {"a": 0.5, "b": 0.25}
    assert calls[8:] == ["a", "b"]
    assert model.training
    assert metric.ledger.spent == spent


def test_what_is_derived_from_a_subclass_judges_as_it_does() -> None:
    class Halved(Metric):
        def judge(self, model: nn.Module) -> Evaluation:  # type: ignore[override]
            found = super().judge(model)
            return found._replace(value=found.value / 2)

    metric = Halved(constant(0.2), maximize=True)
    for each in (metric, metric.with_settings(), metric.with_settings(repeats=2), metric.with_callbacks()):
        assert each.cost(nn.Identity(), "x") == -0.1


# --- The model's state ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_it_is_asked_in_evaluation_mode_without_gradients(grad: bool, failing: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()), nn.ReLU()).train()
    model[1][0].eval()
    before = [module.training for module in model.modules()]
    seen: list[tuple[bool, bool]] = []

    def judge(model: nn.Module) -> float:
        seen.append((any(module.training for module in model.modules()), torch.is_grad_enabled()))
        return 1 / (not failing)

    metric = Metric(judge, maximize=True)
    with torch.set_grad_enabled(grad), suppress(MetricError):
        metric.cost(model, "test")
    assert seen == [(False, False)]
    assert [module.training for module in model.modules()] == before


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


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (in_training_mode, "1.running_mean"),
        (noisy_weights, "0.weight"),
        (in_half_precision, "0.weight"),
        (loaded, "0.weight"),
    ],
)
def test_a_metric_that_changes_the_weights_is_refused(function: Any, named: str) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)))
    metric = Metric(function, maximize=True)
    assert_refused(lambda: metric.evaluate(model, "test"), WeightsError, named)
    assert metric.ledger.spent == 1
    assert all(module.training for module in model.modules())


def test_a_metric_that_fails_half_way_says_what_it_left_changed() -> None:
    def failing(model: Any) -> float:
        model[1].running_mean.add_(1)
        raise OSError("server is down")

    metric = Metric(failing, maximize=True)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    assert_refused(lambda: metric.evaluate(model, "test"), MetricError, "server is down", "1.running_mean")


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hooks of 0": lambda model: model[0].register_forward_hook(lambda layer, args, output: 2 * output),
    "hooks of 1": lambda model: model[1].register_forward_pre_hook(lambda layer, args: (2 * args[0],)),
    "1.running_mean": lambda model: model[1]._buffers.pop("running_mean"),
    "0.weight": lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(2, 3))),
    "1": lambda model: model.__setitem__(1, nn.Linear(2, 5)),
    "0.more": lambda model: model[0].register_buffer("more", torch.ones(2)),
    "requires_grad of 0.weight": lambda model: model.requires_grad_(True),
    "0.weight and 2 more": lambda model: parametrizations.weight_norm(model[0]),
}


@pytest.mark.parametrize("what", list(CHANGES))
def test_a_metric_that_changes_layers_or_hooks_is_refused(what: str) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).eval().requires_grad_(False)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))

    def function(model: nn.Module) -> float:
        value = float(model(x).square().mean())
        CHANGES[what](model)
        return value

    metric = Metric(function, maximize=True, bounds=None)
    assert_refused(lambda: metric.evaluate(model, "test"), WeightsError, what)


def test_a_cache_stays_that_a_forward_pass_makes_and_is_put_back_where_it_is_changed() -> None:
    class Caching(nn.Module):
        made = 0

        def forward(self, x: Tensor) -> Tensor:
            if not self.made:
                self.made += 1
                self.register_buffer("cache", torch.ones(1), persistent=False)
            self.get_buffer("cache").add_(1)
            return x + self.get_buffer("cache") - 2

    model = Caching()
    metric = Metric(lambda model: float(model(torch.zeros(1))), maximize=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [metric.evaluate(model, "test").value for _ in range(3)] == [0.0, 1.0, 1.0]


def test_a_change_without_a_trace_ends_the_run() -> None:
    def judge(model: Any) -> float:
        model[0].weight.data.mul_(2.0)
        model[1].bias.detach().numpy()[0] = 1.0
        return 0.5

    model: Any = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    good = Metric(lambda model: 0.5, maximize=True, name="judge")
    good.evaluate(model, "test")
    good.function = judge
    assert_refused(lambda: good.evaluate(model, "test"), WeightsError, "0.weight", "1")
    assert good.ledger.spent == 2


def test_a_change_by_the_user_without_a_trace_is_kept() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 2))
    metric = Metric(lambda model: 0.5, maximize=True)
    for value in (1.0, 2.0):
        model[0].weight.data.fill_(value)  # as some optimizers and averages do
        metric.evaluate(model, "test")
        assert model[0].weight.eq(value).all()


# --- Metrics of several outcomes -----------------------------------------------------------------------------------

RECALLS = {"cat": 0.5, "dog": 0.25, "cow": 0.75}
ON_HALVES = {"cat": 0.5, "dog": 0.125, "cow": 1.0}, {"cat": 0.25, "dog": 0.5, "cow": 0.5}


def smooth(outcomes: Tensor) -> Tensor:
    """Return their geometric mean, ``...``, of ``... x m``."""
    return outcomes.clamp(min=1e-6).log().mean(-1).exp()


def made_of(answer: Any, **settings: Any) -> Metric:
    function = answer if callable(answer) else constant(answer)
    return Metric(function, **{"maximize": True, "combine": "worst", "name": "made", **settings})


@pytest.mark.parametrize(
    ("settings", "value", "pair"),
    [
        ({}, 0.25, (0.125, 0.25)),
        ({"maximize": False}, 0.75, (1.0, 0.5)),
        ({"combine": "mean"}, 0.5, (1.625 / 3, 1.25 / 3)),
        ({"combine": lambda x: x[..., 0] - x[..., 2] / 4}, 0.3125, (0.25, 0.125)),
        ({"combined": ["cow", "cat"]}, 0.5, (0.5, 0.25)),
        ({"subject_to": {"dog": ">= 0.2"}}, 0.5, (0.5, 0.25)),
        ({"subject_to": {"dog": ">= 0.2"}, "combined": ["cat", "dog"]}, 0.25, (0.125, 0.25)),
        ({"also": {"bird": constant((0.0, (0.0, 0.1)))}}, 0.25, (0.125, 0.25)),
    ],
)
@pytest.mark.parametrize("pairs", [1, 3])
def test_outcomes_make_the_value_and_each_half_s(settings: dict[str, Any], value: float, pair: Any, pairs: int) -> None:
    metric = made_of((RECALLS, ON_HALVES if pairs == 1 else (ON_HALVES,) * pairs), **settings)
    found = metric.evaluate(nn.Identity(), "test")
    assert found.value == pytest.approx(value, abs=1e-15)
    assert found.pairs == (pytest.approx(pair, abs=1e-15),) * pairs
    told = {name: found.also[name] for name in RECALLS}
    assert told == RECALLS
    assert list(found.outcomes) == list(RECALLS)
    assert found.outcomes["dog"].pairs == ((0.125, 0.5),) * pairs
    assert metric.ledger.spent == 1


def test_each_outcome_of_a_dict_may_have_its_own_halves() -> None:
    found = made_of({"a": (0.5, (0.25, 0.75)), "b": (0.6, (0.5, 0.7))}).evaluate(nn.Identity(), "test")
    assert (found.value, found.pairs) == (0.5, ((0.25, 0.7),))


def test_a_function_besides_is_combined_where_it_is_listed_alone() -> None:
    calls: list[int] = []

    def bird() -> Any:
        calls.append(1)
        return 0.0, (0.0, 0.1)

    unlisted, listed = (
        made_of((RECALLS, ON_HALVES), also={"bird": bird}, combined=names) for names in (None, ["bird"])
    )
    assert unlisted.evaluate(nn.Identity(), "test").value == 0.25
    assert (len(calls), unlisted.look(nn.Identity())) == (0, {"bird": 0.0})
    found = listed.evaluate(nn.Identity(), "test")
    assert (found.value, found.pairs) == (0.0, ((0.0, 0.1),))
    assert (len(calls), listed.look(nn.Identity())) == (2, {})


def test_repeats_are_averaged_by_outcome_before_they_are_combined() -> None:
    calls = [({"a": 0.25, "b": 0.5}, ({"a": 0.0, "b": 0.5}, {"a": 0.5, "b": 0.5})), ({"a": 0.75, "b": 0.25}, None)]
    found = made_of(returning(*calls), repeats=2).evaluate(nn.Identity(), "test")
    assert (found.value, found.pairs, found.noise) == (0.375, (), 0.0)  # each call's worst is .25
    assert found.outcomes == {"a": Outcome(0.5, (), 0.25), "b": Outcome(0.375, (), 0.125)}


def test_the_direction_of_each_outcome_is_known_where_something_tells() -> None:
    lower = made_of(RECALLS, maximize=False, subject_to={"dog": ">= 0.2", "ece": "<= 1"})
    assert [lower.outcome_sign(name) for name in ("cat", "dog", "ece")] == [1, -1, 1]
    both = made_of(RECALLS, maximize=False, subject_to={"dog": ">= 0.2"}, combined=["dog"])
    assert [both.outcome_sign(name) for name in ("cat", "dog")] == [None, 1]
    told = made_of(RECALLS, combine=smooth, directions={"cat": True, "dog": False}, subject_to={"cow": "<= 1"})
    assert [told.outcome_sign(name) for name in ("cat", "dog", "cow", "bird")] == [-1, 1, 1, None]


@pytest.mark.parametrize("combine", ["worst", smooth])
def test_what_is_derived_from_a_metric_of_outcomes_is_one(combine: Any) -> None:
    metric = made_of((RECALLS, ON_HALVES), combine=combine, combined=["cow", "cat"])
    found = metric.with_settings(repeats=1).evaluate(nn.Identity(), "test")
    assert found == metric.evaluate(nn.Identity(), "test")
    assert metric.settings["combined"] == ["cow", "cat"]
    assert metric.with_settings(combine=None, combined=None).combination is None


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"combine": "best"}, ("best", "'worst'")),
        ({"combine": 3}, ("3",)),
        ({"combined": "cat"}, ("combined", "cat")),
        ({"combined": []}, ("combined",)),
        ({"combined": ["cat", "cat"]}, ("combined", "cat")),
        ({"combine": None, "combined": ["cat"]}, ("combined", "combine=")),
        ({"combine": None, "directions": {}}, ("directions", "combine=")),
        ({"directions": {"cat": True}}, ("directions", "'worst'")),
        ({"combine": smooth, "directions": {"cat": 1}}, ("directions", "1")),
        ({"combine": smooth, "directions": []}, ("directions", "[]")),
        ({"combine": smooth, "directions": {"cat": True}, "subject_to": {"cat": "<= 0.9"}}, ("directions", "'cat'")),
    ],
)
def test_what_is_no_combination_is_refused(settings: dict[str, Any], names: tuple[str, ...]) -> None:
    assert_refused(lambda: made_of(RECALLS, **settings), ValueError, *names)


@pytest.mark.parametrize(
    ("answer", "settings", "names"),
    [
        (0.5, {}, ("0.5", "combine")),
        ({}, {}, ("none",)),
        (RECALLS, {"subject_to": dict.fromkeys(RECALLS, ">= 0")}, ("none",)),
        ({**RECALLS, "dog": math.nan}, {}, ("'dog'", "nan", "leave out")),
        ({**RECALLS, "dog": "0.5%"}, {}, ("'dog'", "0.5%")),
        ({**RECALLS, 3: 0.5}, {}, ("3", "text")),
        ({**RECALLS, "made": 0.5}, {}, ("'made'",)),
        ({**RECALLS, "cat": 1.5}, {}, ("1.5", "'cat'", "bounds")),
        ({**RECALLS, "cat": 75.0}, {"combine": "mean"}, ("75", "'cat'", "bounds")),
        ({"a": (0.5, (0.4, 0.6)), "b": 0.5}, {}, ("'b'", "halves", "nan")),
        ((RECALLS, ON_HALVES[:1]), {}, ("halves",)),
        ((RECALLS, 0.5), {}, ("halves", "0.5")),
        ((RECALLS, (0.25, 0.5)), {}, ("halves", "0.25")),
        ((RECALLS, ()), {}, ("halves",)),
        ((RECALLS, ({**ON_HALVES[0], "bird": 0.5}, ON_HALVES[1])), {}, ("halves", "'bird'")),
        ((RECALLS, ({"cat": 0.5}, ON_HALVES[1])), {}, ("halves", "'dog'", "nan")),
        ({"a": (0.5, (0.4, 0.6)), "b": (0.5, ((0.4, 0.6), (0.4, 0.6)))}, {}, ("1, 2",)),
        (RECALLS, {"combined": ["cat", "bird"]}, ("'bird'",)),
        (RECALLS, {"combine": smooth, "directions": {"bird": True}}, ("'bird'", "directions")),
        (RECALLS, {"combine": None}, ("'made'", "combine=")),
        (RECALLS, {"combine": lambda x: x.amin()}, ("(6, 3)",)),
        (RECALLS, {"combine": lambda x: x.amin(0)}, ("(6, 3)",)),
        ({**RECALLS, **dict.fromkeys("abc", 0.5)}, {"combine": lambda x: x.amin(0)}, ("alone",)),
        (RECALLS, {"combine": lambda x: x[:, 0]}, ("... x m",)),
        (RECALLS, {"combine": lambda x: x.detach().amin(-1)}, ("gradient",)),
        (RECALLS, {"combine": lambda x: (x > 0.3).double().mean(-1)}, ("gradient",)),
        (RECALLS, {"combine": lambda x: x.detach().mean().item()}, ("float",)),
        (RECALLS, {"combine": lambda x: (10 * x).round().mean(-1) / 10}, ("gradient", "round")),
        (RECALLS, {"combine": lambda x: 0 * x.sum(-1) + 0.5}, ("gradient", "constant")),
        (RECALLS, {"combine": lambda x: x.log().mean(-1).exp()}, ("finite", "clamp")),
    ],
)
def test_outcomes_that_make_no_value_are_refused_at_the_first_query(
    answer: Any, settings: dict[str, Any], names: tuple[str, ...]
) -> None:
    metric = made_of(answer, **settings)
    assert_refused(lambda: metric.evaluate(nn.Identity(), "test"), MetricError, *names)


@pytest.mark.parametrize(
    "later", [{"cat": 0.5, "dog": 0.5}, {**RECALLS, "cow ": 0.5}, {"dog": 0.5, "cat": 0.5, "cow": 0.5}]
)
def test_outcomes_of_other_names_or_order_than_before_are_refused(later: dict[str, float]) -> None:
    metric = made_of(returning(RECALLS, later, RECALLS))
    metric.evaluate(nn.Identity(), "test")
    assert_refused(lambda: metric.evaluate(nn.Identity(), "test"), MetricError, *map(repr, later), "'cow'")
    assert metric.evaluate(nn.Identity(), "test").value == 0.25


@pytest.mark.parametrize("halves", ["few rows", (ON_HALVES[0], {**ON_HALVES[1], "cat": math.nan})])
def test_an_outcome_without_halves_is_named_once(halves: Any) -> None:
    metric = made_of((RECALLS, halves))
    with pytest.warns(UserWarning, match="'cat'"):
        found = metric.evaluate(nn.Identity(), "test")
    assert (found.value, found.pairs) == (0.25, ())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert metric.evaluate(nn.Identity(), "test") == found


def test_a_function_may_combine_where_no_gradients_are_taken() -> None:
    for without in (torch.no_grad(), torch.inference_mode()):
        with without:
            assert made_of(RECALLS, combine=smooth).evaluate(nn.Identity(), "test").value == pytest.approx(
                0.4543, abs=1e-4
            )
