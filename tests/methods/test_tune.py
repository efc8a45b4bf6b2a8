"""One call of a training script that tunes its model: what it leaves, what it refuses, several processes."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

import metricopt_ext as mo
from helpers.refusals import assert_named, assert_refused, assert_warned
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.methods.tune import tune_model
from metricopt_ext.runtime.progress import Callback

X = torch.randn(60, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (X[:, 0] > 0.5).long()
LOADER = DataLoader(TensorDataset(X, Y), batch_size=20, shuffle=True)
ROOT = Path(__file__).resolve().parents[2]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2)).double()


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def likelihood(model: nn.Module) -> tuple[float, list[float]]:
    """The mean probability of the right class, whose best value no rounding decides."""
    right = model(X).detach().softmax(1).gather(1, Y[:, None])[:, 0]
    return float(right.mean()), [float(right[::2].mean()), float(right[1::2].mean())]


def tuned(model: nn.Module, metric: Any, **options: Any) -> Any:
    options = {"queries": 20, "callback": Callback(), "attach": lambda inner: mo.attach_film(inner, dim=4), **options}
    return tune_model(model, LOADER, loss, metric, **options)


def test_the_search_is_the_one_of_the_parts() -> None:
    ours, other = network(), network()
    run = tuned(ours, likelihood)
    task = mo.FinetuneTask(
        adapter := mo.attach_film(other, dim=4),
        loss=loss,
        batches=mo.DatasetBatches(LOADER.dataset, 20),
        metric=mo.Metric(likelihood, maximize=True),
    )
    assert mo.optimize_metric(task, queries=20, callback=Callback()).after == run.after
    adapter.merge()
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), other.state_dict().values(), strict=True))


def test_several_values_by_name_make_the_metric() -> None:
    def by_class(model: nn.Module) -> dict[str, float]:
        right = model(X).detach().softmax(1).gather(1, Y[:, None])[:, 0]
        return {name: float(right[c == Y].mean()) for c, name in enumerate(("no", "yes"))}

    model = network()
    before = by_class(model.eval())
    run = tuned(model, by_class, combine="worst", maximize=True, name="worst")
    assert run.outcomes is not None
    assert run.outcomes.values["start"] == before
    assert run.before == min(before.values())
    assert run.after == pytest.approx(min(by_class(model.eval()).values()))


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile], ids=["DataParallel", "compile"])
def test_a_wrapped_model_is_tuned_as_the_model_in_it(wrap: Any) -> None:
    if wrap is nn.DataParallel and torch.cuda.is_available():
        pytest.skip("there it wants the model on a GPU")
    inner, other = network(), network()
    assert tuned(wrap(inner), likelihood).after == tuned(other, likelihood).after
    assert all(torch.equal(a, b) for a, b in zip(inner.state_dict().values(), other.state_dict().values(), strict=True))


def test_a_loss_that_is_there_in_training_mode_alone() -> None:
    """As that of torchvision's detectors; dropout still computes as in evaluation, and what is drawn is replayed."""
    modes, drawn = set(), []

    def noisy(model: nn.Module, batch: list[Tensor]) -> Tensor:
        modes.add(model.training)
        drawn.append(float(torch.rand(())))
        return loss(model, batch)

    before = torch.get_rng_state()
    tune_model(network(), LOADER, noisy, likelihood, queries=20, training=True, callback=Callback())
    assert modes == {True}
    assert len(set(drawn)) == 1
    assert torch.equal(before, torch.get_rng_state())


def test_a_criterion_of_outputs_and_targets() -> None:
    ours, other = network(), network()
    tuned(ours, likelihood)
    options = {"queries": 20, "callback": Callback(), "attach": lambda inner: mo.attach_film(inner, dim=4)}
    tune_model(other, LOADER, nn.CrossEntropyLoss(), likelihood, **options)
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize(("last", "told"), [(nn.Softmax(1), True), (nn.Sigmoid(), True), (nn.LogSoftmax(1), False)])
def test_a_criterion_of_logits_that_gets_probabilities_is_warned_of(last: nn.Module, told: bool) -> None:
    model = nn.Sequential(*network(), last)
    options = {"queries": 8, "callback": Callback(), "attach": lambda inner: mo.attach_film(inner, dim=2)}
    call = lambda: tune_model(model, LOADER, nn.CrossEntropyLoss(), likelihood, **options)  # noqa: E731
    if told:
        assert_warned(call, "CrossEntropyLoss", "probabilities")
    else:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*probabilities")
            call()


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.softmax(1)[:, 1] - targets).square().mean()


PAIRS = DataLoader([{"x": x, "y": y} for x, y in zip(X, Y, strict=True)], batch_size=20)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("criterion", "loader", "names"),
    [
        (F.cross_entropy, LOADER, ("loss", "cross_entropy", "batch")),
        (squares, LOADER, ("Sequential", "outputs")),
        (nn.CrossEntropyLoss, LOADER, ("loss=CrossEntropyLoss()",)),
        (nn.CrossEntropyLoss(), PAIRS, ("batch['x']", "batch['y']")),
    ],
)
def test_a_loss_of_other_things_is_refused_before_the_first_query(
    criterion: Any, loader: Any, names: tuple[str, ...]
) -> None:
    asked: list[int] = []
    model = network()
    assert_refused(
        lambda: tune_model(model, loader, criterion, lambda: asked.append(1), queries=20, maximize=True),
        TypeError,
        *names,
    )
    assert not asked
    assert set(model.state_dict()) == set(network().state_dict())


def test_an_error_within_a_loss_stays_as_it_is() -> None:
    def fails(model: nn.Module, batch: Any) -> Tensor:
        raise TypeError("no such label")

    assert_refused(
        lambda: tune_model(network(), LOADER, fails, likelihood, queries=20, callback=Callback()),
        TypeError,
        "no such label",
    )


def val_loss(model: nn.Module) -> float:
    return 1 - likelihood(model)[0]


class ErrorRate:
    def __call__(self, model: nn.Module) -> float:
        return val_loss(model)


def judged_so(model: nn.Module, scale: float = 1.0) -> float:
    return scale * val_loss(model)


@pytest.mark.parametrize(
    ("metric", "told"),
    [
        (val_loss, {}),
        (partial(val_loss), {}),
        (ErrorRate(), {}),
        (lambda model: val_loss(model), {"name": "CER"}),
        (judged_so, {"maximize": False}),
    ],
    ids=["function", "partial", "object", "name", "told"],
)
def test_what_is_better_if_lower_is_minimised(metric: Any, told: dict[str, Any]) -> None:
    model = network()
    run = tuned(model, metric, **told)
    assert run.after < run.before
    assert run.after == pytest.approx(val_loss(model.eval()))


@pytest.mark.parametrize(
    "metric",
    [judged_so, partial(judged_so, scale=0.5), lambda model: val_loss(model)],
    ids=["function", "partial", "lambda"],
)
def test_which_way_is_better_is_asked_for_where_nothing_tells(metric: Any) -> None:
    model = network()
    assert_refused(lambda: tuned(model, metric), ConfigError, "maximize=True", "maximize=False")
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
    assert_refused(lambda: tuned(model, metric, maximize=True), DataError, "DataLoader")
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_metric_of_other_data_is_asked() -> None:
    train, judged = (DataLoader(part, batch_size=20) for part in PARTS)
    model = network()
    own = {"queries": 20, "callback": Callback(), "attach": partial(mo.attach_film, dim=4), "maximize": True}
    for metric in (lambda: judged_on(judged, model), lambda: judged_on(judged if len(train) else train, model)):
        assert sum(tune_model(model, train, loss, metric, **own).queries.values()) == 20


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
            tune_model(model, loader, loss, likelihood, queries=20)
        assert_named(caught, *names)
    assert not [name for name in model.state_dict() if "metricopt" in name]
