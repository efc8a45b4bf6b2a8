"""What an outcome's own loss promises: gradients by hand, which way they count, and what is refused."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import metricopt_ext as mo
from helpers.refusals import assert_refused
from helpers.tensors import rand
from metricopt_ext.adapters.attach import attach_input_bias
from metricopt_ext.adapters.start import Start
from metricopt_ext.search.direct import CMAES, RandomSearch
from metricopt_ext.tasks.task import FinetuneTask, OutputLoss

D, ROWS = 5, 30
X, Y = rand(ROWS, 4), torch.arange(ROWS) % 3
NAMES = ("a", "b", "c")
# Of each class its 10 examples, in batches of several sizes.
OF_CLASSES = {
    name: [(X[part], Y[part]) for part in (at == Y).nonzero()[:, 0].split([1, 6, 3])] for at, name in enumerate(NAMES)
}


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def recalls(model: nn.Module) -> dict[str, float]:
    right = (model(X).argmax(1) == Y).double()
    return {name: float(right[at == Y].mean()) for at, name in enumerate(NAMES)}


def soft(model: nn.Module) -> dict[str, float]:
    """The mean probability of the own class, which any phi moves."""
    own = model(X).detach().softmax(1).gather(1, Y[:, None])[:, 0]
    return {name: float(own[at == Y].mean()) for at, name in enumerate(NAMES)}


def task_of(
    batches_of: Mapping[str, Iterable[Any]] | None = OF_CLASSES,
    metric: mo.Metric | None = None,
    loss: Any = cross_entropy,
) -> FinetuneTask:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return FinetuneTask(
        attach_input_bias(model, dim=D),
        loss=loss,
        batches=None if loss is None else mo.TensorBatches(X, Y, batch_size=6),
        batches_of=batches_of,
        metric=metric or mo.Metric(recalls, maximize=True, combine="worst", name="lowest recall"),
    )


def by_hand(task: FinetuneTask, phi: Tensor, name: str, weight: Tensor | None = None) -> Tensor:
    """The gradient of a class's mean loss over all its rows at once."""
    first, last = task.adapter.model[0], task.adapter.model[2]
    x, point = X[NAMES.index(name) == Y], phi.detach().clone().requires_grad_(True)
    hidden = torch.tanh(x @ first.weight.T + first.bias + task.adapter.moves["0"].C @ point)
    logits = hidden @ (last.weight if weight is None else weight).T + last.bias
    (gradient,) = torch.autograd.grad((logits.logsumexp(1) - logits[:, NAMES.index(name)]).mean(), point)
    return gradient


# --- Gradients ---------------------------------------------------------------------------------------------------


IN_PARTS = OutputLoss(lambda model, batch: model(batch[0]), lambda outputs, batch: F.cross_entropy(outputs, batch[1]))


@pytest.mark.parametrize("loss", [cross_entropy, IN_PARTS], ids=["whole", "in parts"])
@pytest.mark.parametrize("at", [None, 2])
def test_it_is_the_gradient_of_the_mean_loss_over_all_rows(loss: Any, at: int | None) -> None:
    """However they are batched: a recall rises where the loss falls."""
    task = task_of(loss=loss)
    phi = task.origin() if at is None else rand(D, seed=at)
    before = [each.clone() for each in task.adapter.model.state_dict().values()]
    stream, mode = torch.get_rng_state(), task.adapter.model.training
    found = task.promised(phi)
    assert list(found) == list(NAMES)
    for name in NAMES:
        torch.testing.assert_close(found[name], -by_hand(task, phi, name), rtol=1e-10, atol=1e-12)
        assert not found[name].requires_grad
    assert all(map(torch.equal, before, task.adapter.model.state_dict().values()))
    assert torch.equal(torch.get_rng_state(), stream)
    assert task.adapter.model.training == mode
    assert task.adapter.phi.grad is None
    assert task.metric.ledger.spent == 0


def test_what_has_no_batches_has_no_promise() -> None:
    assert list(task_of({"b": OF_CLASSES["b"]}).promised(torch.zeros(D).double())) == ["b"]
    assert task_of(None).promised(torch.zeros(D).double()) == {}


def test_each_batch_is_gone_through_once_and_draws_the_same_each_time() -> None:
    """Dropout of one batch does not hang on the others, nor on the global stream."""
    seen: list[int] = []

    def dropping(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        seen.append(len(batch[0]))
        return F.cross_entropy(F.dropout(model(batch[0]), 0.5), batch[1])

    task = task_of(loss=dropping)
    seen.clear()
    first = task.promised(task.origin())
    assert seen == [1, 6, 3] * 3
    torch.rand(3)
    again = task.promised(task.origin())
    assert all(torch.equal(first[name], again[name]) for name in NAMES)


# --- Starts ------------------------------------------------------------------------------------------------------


def test_it_is_that_of_the_start_whose_tensors_are_in_force() -> None:
    task, other, phi = task_of(), rand(3, 6, seed=4), rand(D, seed=2)
    plain = task.promised(phi)
    with task.at(Start(phi, {"2.weight": other})):
        found = task.promised(phi)
    for name in NAMES:
        expected = -by_hand(task, phi, name, other)
        torch.testing.assert_close(found[name], expected, rtol=1e-10, atol=1e-12)
        assert float(F.cosine_similarity(expected, plain[name], dim=0)) < 0.9


def test_a_search_from_a_start_is_promised_what_the_losses_promise_there() -> None:
    """With the start's phi and tensors: along that alone the trend of each outcome of f goes."""
    other, phi = rand(3, 6, seed=4), 0.1 * rand(D, seed=2)

    def better_there(model: nn.Module) -> dict[str, float]:
        return {name: each / 10 + 0.5 * torch.equal(model[2].weight, other) for name, each in soft(model).items()}

    task = task_of(metric=mo.Metric(better_there, maximize=True, combine="worst", name="lowest"))
    trained = {name: by_hand(task, task.origin(), name) for name in NAMES}
    there = {name: by_hand(task, phi, name, other) for name in NAMES}
    started = {"other": Start(phi, {"2.weight": other})}
    result = mo.optimize_metric(task, queries=30, starts=started, callback=mo.Callback())
    assert result.started_at == "other"
    assert result.fit is not None
    for name, slope in zip(NAMES, result.fit.f.trend, strict=True):  # of a cost, which rises with the loss
        assert float(F.cosine_similarity(slope, there[name], dim=0)) == pytest.approx(1, abs=1e-9)
        assert float(F.cosine_similarity(slope, trained[name], dim=0)) < 0.95
    assert result.promised is not None
    assert 0 < result.promised < 1
    assert f"{result.promised:.0%}" in str(result)
    assert sum(result.queries.values()) == 30


# --- Which way ---------------------------------------------------------------------------------------------------


def first(values: Tensor) -> Tensor:
    return values[..., 0]


@pytest.mark.parametrize(
    ("options", "signs"),
    [
        ({"maximize": True, "combine": "worst"}, (-1, -1, -1)),
        ({"maximize": False, "combine": "worst"}, (1, 1, 1)),
        ({"maximize": False, "combine": "mean"}, (1, 1, 1)),
        ({"maximize": True, "combine": "mean", "subject_to": {"b": "<= 0.9", "c": ">= 0.1"}}, (-1, 1, -1)),
        ({"maximize": False, "combine": "worst", "subject_to": {"b": "<= 0.9", "c": ">= 0.1"}}, (1, 1, -1)),
        ({"maximize": True, "combine": first, "directions": {"a": True, "b": False, "c": True}}, (-1, 1, -1)),
        ({"maximize": False, "combine": first, "directions": {"a": True, "b": False, "c": True}}, (-1, 1, -1)),
    ],
)
def test_it_is_along_what_lets_the_outcome_rise(options: dict[str, Any], signs: tuple[int, ...]) -> None:
    """Where higher is better the loss falls there; where lower is, as of a rate of errors, it rises."""
    task = task_of(metric=mo.Metric(recalls, name="made", **options))
    found, phi = task.promised(task.origin()), task.origin()
    for name, sign in zip(NAMES, signs, strict=True):
        torch.testing.assert_close(found[name], sign * by_hand(task, phi, name), rtol=1e-10, atol=1e-12)


# --- Refusals ----------------------------------------------------------------------------------------------------


def asked_once(batches_of: Any, error: type[Exception], *names: Any, strategy: Any = None) -> None:
    """Check that a search refuses once it knows the start's outcomes, with that one query, and leaves the model."""
    calls: list[int] = []

    def counted(model: nn.Module) -> dict[str, float]:
        calls.append(1)
        return recalls(model)

    task = task_of(batches_of, mo.Metric(counted, maximize=True, combine="worst", name="lowest"))
    before = task.adapter.phi.detach().clone()
    given: dict[str, Any] = {"queries": 20, "strategy": strategy, "callback": mo.Callback()}
    assert_refused(lambda: mo.optimize_metric(task, **given), error, *names)
    assert len(calls) == task.metric.ledger.spent == 1
    assert torch.equal(task.adapter.phi, before)


def test_without_a_loss_nothing_is_promised() -> None:
    assert_refused(lambda: task_of(loss=None), ValueError, "batches_of", "loss")


@pytest.mark.parametrize("given", [[("a", [])], "ab", 3])
def test_what_does_not_map_names_is_refused(given: Any) -> None:
    assert_refused(lambda: task_of(given), TypeError, "batches_of", "NAME")


@pytest.mark.parametrize("strategy", [None, RandomSearch(), CMAES()], ids=["guided", "random", "CMA-ES"])
def test_a_name_that_no_outcome_has_is_refused_as_soon_as_that_is_known(strategy: Any) -> None:
    """Where the metric is a number only constraints are, or outcomes are listed; else the first evaluation tells."""
    number: dict[str, Any] = {"maximize": True, "name": "accuracy"}
    plain = mo.Metric(lambda model: 0.5, **number)
    assert_refused(lambda: task_of({"a": OF_CLASSES["a"]}, plain), ValueError, "batches_of", "'a'", "'accuracy'")
    bounded = mo.Metric(lambda model: {"accuracy": 0.5, "a": 0.3}, **number, subject_to={"a": ">= 0.2"})
    task_of({"a": OF_CLASSES["a"]}, bounded)
    listed = mo.Metric(recalls, maximize=True, combine="worst", combined=["a"], name="lowest")
    assert_refused(lambda: task_of({"b": OF_CLASSES["b"]}, listed), ValueError, "batches_of", "'b'", "'lowest'")
    wrong = {"a": OF_CLASSES["a"], "d": OF_CLASSES["b"]}
    asked_once(wrong, ValueError, "batches_of", "'d'", "a", "b", "c", strategy=strategy)


def test_an_outcome_of_unknown_direction_is_refused_with_the_remedy() -> None:
    metric = mo.Metric(recalls, maximize=True, combine=first)
    assert_refused(lambda: task_of({"a": OF_CLASSES["a"]}, metric), ValueError, "'a'", "directions")


def uneven(rows: int, weights: int) -> tuple[Tensor, Tensor, Tensor]:
    return X[:rows], Y[:rows], torch.ones(weights)


@pytest.mark.parametrize(
    ("batches", "error", "names"),
    [
        ([], ValueError, ("batches_of", "'a'")),
        ([(X[:0], Y[:0])], ValueError, ("batches_of", "'a'")),
        ([uneven(3, 2)], ValueError, (2, 3)),
        ([(X[:3], Y[:3]), (X[:3] * float("nan"), Y[:3])], FloatingPointError, ("'a'",)),
    ],
    ids=["none", "no rows", "rows of two numbers", "nan"],
)
def test_batches_that_promise_nothing_definite_are_refused(batches: Any, error: Any, names: tuple[Any, ...]) -> None:
    asked_once({"a": batches}, error, *names)


@pytest.mark.parametrize("batches", [iter(OF_CLASSES["a"]), 3])
def test_batches_that_can_not_be_gone_through_again_are_refused(batches: Any) -> None:
    assert_refused(lambda: task_of({"a": batches}), TypeError, "batches_of", "'a'")


def test_it_costs_no_query() -> None:
    """A search asks as often with promises as without, and the first design does not hang on them."""
    asked: list[list[Tensor]] = []
    for batches_of in (None, OF_CLASSES):
        phis: list[Tensor] = []
        task = task_of(batches_of, mo.Metric(soft, maximize=True, combine="worst", name="lowest"))
        task.metric.callbacks.append(lambda query, phis=phis: phis.append(query.item))
        result = mo.optimize_metric(task, queries=20, callback=mo.Callback())
        assert task.metric.ledger.spent == sum(result.queries.values()) == len(phis) == 20
        asked.append(phis)
    assert all(map(torch.equal, asked[0][:5], asked[1][:5]))
    assert not torch.equal(asked[0][5], asked[1][5])


def test_another_task_of_the_same_model_keeps_them() -> None:
    task = task_of()
    other = replace(task, metric=mo.Metric(recalls, maximize=False, combine="mean", name="mean"))
    found, turned = (each.promised(task.origin()) for each in (task, other))
    assert torch.equal(task.copied().promised(task.origin())["a"], found["a"])
    assert torch.equal(turned["a"], -found["a"])
