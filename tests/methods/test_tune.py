"""One call of a training script that tunes its model: what it leaves, and what it refuses."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

import metricopt_ext as mo
from helpers.refusals import assert_named, assert_refused
from metricopt_ext.errors import AdapterError, BudgetError, DataError
from metricopt_ext.runtime.progress import Callback

X = torch.randn(60, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (X[:, 0] > 0.5).long()
LOADER = DataLoader(TensorDataset(X, Y), batch_size=20, shuffle=True)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2)).double()


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def likelihood(model: nn.Module) -> tuple[float, list[float]]:
    """The mean probability of the right class, whose best value no rounding decides."""
    right = model(X).detach().softmax(1).gather(1, Y[:, None])[:, 0]
    return float(right.mean()), [float(right[::2].mean()), float(right[1::2].mean())]


def tuned(model: nn.Module, metric: Any = likelihood, **options: Any) -> Any:
    attach = partial(mo.attach_film, dim=4)
    given = {"loss": loss, "batches": LOADER, "queries": 20, "callback": Callback(), "attach": attach, **options}
    return mo.tune_model(model, metric=mo.Metric(metric, maximize=True) if callable(metric) else metric, **given)


def assert_same(model: nn.Module, other: nn.Module) -> None:
    """Check each bit of two models' weights."""
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("drawn", [LOADER, mo.DatasetBatches(LOADER.dataset, 20)], ids=["loader", "function"])
@pytest.mark.parametrize("criterion", [loss, nn.CrossEntropyLoss()], ids=["loss", "criterion"])
def test_the_search_is_the_one_of_the_parts(criterion: Any, drawn: Any) -> None:
    ours, other = network(), network()
    run = tuned(ours, loss=criterion, batches=drawn)
    task = mo.FinetuneTask(
        adapter := mo.attach_film(other, dim=4),
        loss=loss,
        batches=mo.DatasetBatches(LOADER.dataset, 20),
        metric=mo.Metric(likelihood, maximize=True),
    )
    assert mo.optimize_metric(task, queries=20, callback=Callback()).after == run.after
    adapter.merge()
    assert_same(ours, other)


def test_starts_are_made_of_the_task_and_the_adapter_may_stay() -> None:
    model = network()
    asked: list[mo.FinetuneTask] = []

    def starts(task: mo.FinetuneTask) -> dict[str, mo.Start]:
        asked.append(task)
        return {"mine": mo.Start(torch.full_like(task.origin(), 0.5))}

    run = tuned(model, starts=starts, merge=False)
    assert "mine" in run.evaluations
    adapter = mo.Adapter(model)
    assert asked[0].adapter.model is model
    assert torch.equal(adapter.phi, run.start_of(run.chosen).phi)
    adapter.remove()
    assert_same(model, network())


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile], ids=["DataParallel", "compile"])
def test_a_wrapped_model_is_tuned_as_the_model_in_it(wrap: Any) -> None:
    if wrap is nn.DataParallel and torch.cuda.is_available():
        pytest.skip("there it wants the model on a GPU")
    inner, other = network(), network()
    assert tuned(wrap(inner)).after == tuned(other).after
    assert_same(inner, other)


@pytest.mark.parametrize(("training", "seen"), [(True, {True}), (False, {False}), (None, {True, False})])
def test_the_mode_of_the_loss_and_what_it_draws(training: bool | None, seen: set[bool]) -> None:
    """In training mode as that of torchvision's detectors; dropout still computes as in evaluation."""
    modes, drawn, model = set(), [], network()
    model[0].eval()

    def noisy(model: nn.Module, batch: list[Tensor]) -> Tensor:
        modes.update((model.training, model[0].training))  # type: ignore[index,union-attr]
        drawn.append(float(torch.rand(())))
        return loss(model, batch)

    before = torch.get_rng_state()
    tuned(model, loss=noisy, training=training)
    assert modes == seen
    assert (model.training, model[0].training) == (True, False)
    assert len(set(drawn)) == 1
    assert torch.equal(before, torch.get_rng_state())


PAIRS = DataLoader([{"x": x, "y": y} for x, y in zip(X, Y, strict=True)], batch_size=20)  # type: ignore[arg-type]


def fails(model: nn.Module, batch: Any) -> Tensor:
    raise KeyError("no such label")


@pytest.mark.parametrize(
    ("options", "error", "names"),
    [
        ({"loss": F.cross_entropy}, TypeError, ("Tensor", "Sequential")),
        ({"loss": nn.MSELoss}, AdapterError, ("MSELoss", "scalar")),
        ({"loss": nn.CrossEntropyLoss(), "batches": PAIRS}, TypeError, ("CrossEntropyLoss", "dict", "loss=lambda")),
        ({"loss": nn.MSELoss(), "batches": lambda *place: X[:20]}, TypeError, ("MSELoss", "Tensor", "loss=lambda")),
        ({"loss": fails}, KeyError, ("no such label",)),
        ({"metric": None}, TypeError, ("metric", "Metric(function, maximize=True)")),
        ({"queries": 3}, BudgetError, ("3", "queries")),
        ({"starts": lambda task: {"mine": mo.Start(torch.zeros(9))}}, AdapterError, ("mine", "(9,)")),
    ],
)
def test_what_can_not_be_meant_is_refused_before_the_first_query(
    options: dict[str, Any], error: type[Exception], names: tuple[str, ...]
) -> None:
    asked: list[int] = []
    model, metric = network(), mo.Metric(lambda: asked.append(1), maximize=True)
    assert_refused(lambda: tuned(model, **{"metric": metric, **options}), error, *names)
    assert not asked
    assert set(model.state_dict()) == set(network().state_dict())
    assert all(parameter.requires_grad for parameter in model.parameters())


def judged_on(loader: Any, model: nn.Module) -> float:
    return float(torch.stack([(model(x).argmax(1) == y).double().mean() for x, y in loader]).mean())


PARTS = Subset(LOADER.dataset, range(40)), Subset(LOADER.dataset, range(40, 60))
AGAIN = DataLoader(TensorDataset(X.clone(), Y), batch_size=30)


@pytest.mark.parametrize(
    "metric",
    [
        lambda model: judged_on(LOADER, model),
        lambda model: judged_on(AGAIN, model),
        partial(judged_on, DataLoader(PARTS[0], batch_size=20)),
    ],
    ids=["itself", "its rows", "a part"],
)
def test_a_metric_of_the_training_data_is_refused(metric: Any) -> None:
    model = network()
    assert_refused(lambda: tuned(model, metric), DataError, "DataLoader")
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_metric_of_other_data_is_asked() -> None:
    train, judged = (DataLoader(part, batch_size=20) for part in PARTS)
    model = network()
    for metric in (lambda: judged_on(judged, model), lambda: judged_on(judged if len(train) else train, model)):
        assert sum(tuned(model, metric, batches=train).queries.values()) == 20


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(zip(X, Y, strict=True))


def test_data_without_batches_to_draw_again() -> None:
    model = network()
    for loader, names in (
        (DataLoader(Stream(), batch_size=5), ()),
        ([(X, Y)], ()),
        (DataLoader(TensorDataset(X, Y), batch_size=None), ("batch_size",)),
    ):
        with pytest.raises(DataError) as caught:
            tuned(model, batches=loader)
        assert_named(caught, *names)
    assert not [name for name in model.state_dict() if "metricopt" in name]
