"""Where a search may begin: starts of other buffers, and BatchNorm statistics against the inputs they come from."""

import copy
import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.refusals import assert_refused
from metricopt_ext import (
    Adapter,
    Callback,
    FinetuneTask,
    Metric,
    Outputs,
    Start,
    StartLine,
    attach_film,
    attach_outputs,
    batchnorm_start,
    optimize_metric,
)
from metricopt_ext.errors import AdapterError, DataError
from metricopt_ext.methods.starts import (
    all_starts,
    batchnorm_line,
    em_prior_start,
    em_priors,
    moved_by,
    prior_line,
    prior_offsets,
    reestimate_batchnorm,
)
from metricopt_ext.search.stages import known_on


def task_of(model: nn.Module) -> FinetuneTask:
    adapter = attach_film(model, dim=4)
    return FinetuneTask(
        adapter,
        loss=lambda model, batch: model(batch).square().mean(),
        batches=lambda seed, task, step: torch.ones(2, 3),
        metric=Metric(lambda model: float(model(torch.ones(2, 3)).sum()), maximize=True, bounds=None),
    )


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)).eval()


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.named_buffers()}


# --- Starts ------------------------------------------------------------------------------------------------------


def test_phi_0_comes_first_and_all_are_copies() -> None:
    task, mean = task_of(normed()), torch.ones(5)
    task.adapter.set_phi(torch.full((4,), 0.5))
    found = all_starts(
        task, {"own": Start(task.adapter.phi), "bn": Start(torch.ones(4).double(), {"1.running_mean": mean})}
    )
    assert list(found) == ["start", "own", "bn"]
    task.adapter.set_phi(torch.full((4,), 7.0))
    mean.zero_()
    assert [start.phi.tolist() for start in found.values()] == [[0.0] * 4, [0.5] * 4, [1.0] * 4]
    assert not any(start.phi.requires_grad or start.phi.dtype != torch.float32 for start in found.values())
    assert found["bn"].tensors["1.running_mean"].tolist() == [1.0] * 5


MEAN = "1.running_mean"
ZERO = torch.zeros(4)


@pytest.mark.parametrize(
    ("start", "error", "names"),
    [
        (None, AdapterError, ()),
        (ZERO, ValueError, ()),
        (Start(torch.zeros(3)), AdapterError, ("(4,)",)),
        (Start(torch.tensor([0.0, math.nan, 0.0, 0.0])), AdapterError, ("phi", "nan")),
        (Start(ZERO, {"1.mean": torch.ones(5)}), AdapterError, ("1.mean",)),
        (Start(ZERO, {MEAN: torch.ones(1)}), AdapterError, (MEAN, "(5,)")),
        (Start(ZERO, {MEAN: torch.full((5,), math.nan)}), AdapterError, (MEAN, "NaN")),
        (Start(ZERO, {"1.running_var": torch.full((5,), -0.5)}), AdapterError, ("1.running_var", "-0.5")),
        (StartLine(lambda t: None, 0.0, 1.0), AdapterError, ("at(0.0)", "None", "Start")),
        (StartLine(lambda t: Start(torch.full((3,), t)), 0.0, 1.0), AdapterError, ("phi", "(3,)")),
    ],
)
def test_what_does_not_fit_is_refused(start: Any, error: type[Exception], names: tuple[str, ...]) -> None:
    assert_refused(lambda: all_starts(task_of(normed()), {"mine": start}), error, "mine", *names)


def test_a_metric_that_knows_its_model_judges_what_a_start_replaces() -> None:
    """Starts are put into the one model, in turn."""
    task = task_of(normed())
    model = task.adapter.model
    own = Metric(lambda: float(model.state_dict()[MEAN].sum()), maximize=True, bounds=None, name="own")
    starts = {"bn": Start(ZERO, {MEAN: torch.ones(5)}), "other": Start(torch.ones(4))}
    result = optimize_metric(task.judged_by(own), queries=12, starts=starts, callback=Callback())
    before = float(normed().state_dict()[MEAN].sum())
    assert result.starts == pytest.approx({"start": before, "bn": 5.0, "other": before})


def test_a_batchnorm_start_is_the_model_with_other_statistics() -> None:
    task, x = task_of(normed()), 2 * torch.randn(40, 3, generator=torch.Generator().manual_seed(1)) + 1
    before = buffers_of(task.adapter.model)
    start = batchnorm_start(task, x.split(20))
    assert start is not None
    assert torch.equal(start.phi, task.origin())
    assert set(start.tensors) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert all(torch.equal(value, before[name]) for name, value in task.adapter.model.named_buffers())
    other = Start(ZERO, {"1.mean": torch.ones(5)})
    assert_refused(lambda: batchnorm_start(task, x.split(20), other), AdapterError, "1.mean")
    expected = reestimate_batchnorm(task.adapter.model, x.split(20))
    assert expected is not None
    with torch.no_grad():
        with task.at(start) as model:
            found = model(x)
        torch.testing.assert_close(found, expected(x), rtol=0, atol=1e-6)
        assert (found - task.adapter.model(x)).abs().max() > 0.01


# --- BatchNorm statistics ----------------------------------------------------------------------------------------


def statistics(norm: nn.Module) -> tuple[Tensor, Tensor]:
    return norm.running_mean, norm.running_var


@pytest.mark.parametrize("batches", [1, 4])
def test_batchnorm_statistics_are_those_of_the_inputs(batches: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5, momentum=0.3), nn.ReLU(), nn.Linear(5, 2)).eval()
    adapter = attach_film(model, dim=4)
    adapter.set_phi(torch.full((4,), 0.7))
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(40, 3) * 2 + 1
    other = reestimate_batchnorm(model, x.split(40 // batches))
    with torch.no_grad():
        inputs = torch.nn.functional.linear(x, model[0].weight, model[0].bias).view(batches, -1, 5)
    mean, var = statistics(other[1])
    torch.testing.assert_close(mean, inputs.mean(1).mean(0))
    torch.testing.assert_close(var, inputs.var(1).mean(0))
    assert (mean - before["1.running_mean"]).abs().min() > 0.01
    assert not hasattr(other, "metricopt")  # the copy is the model without phi
    assert other[1].momentum == 0.3
    assert not any(module.training for module in other.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(adapter.phi, torch.full((4,), 0.7))
    with torch.no_grad():
        expected = model[3](torch.relu((inputs.flatten(0, 1) - mean) / (var + 1e-5).sqrt()))
    torch.testing.assert_close(other(x), expected, rtol=1e-4, atol=1e-5)


def test_batchnorm_statistics_of_a_model_in_training_are_taken_without_dropout_and_random_numbers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Dropout(0.5), nn.BatchNorm2d(3)).train()
    x, state = torch.randn(6, 2, 8, 8), torch.get_rng_state()
    mean, var = statistics(reestimate_batchnorm(model, [x])[2])
    h = model[0](x).detach().movedim(1, 0).flatten(1)
    torch.testing.assert_close(mean, h.mean(1))
    torch.testing.assert_close(var, h.var(1))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert int(model[2].num_batches_tracked) == 0


def test_a_norm_that_no_input_reaches_keeps_its_statistics() -> None:
    class WithAuxiliaryHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.auxiliary = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.auxiliary(x) if self.training else self.norm(x)

    model = WithAuxiliaryHead()
    model(torch.randn(20, 3) + 5)  # in training
    before = copy.deepcopy(model.auxiliary.state_dict())
    assert before["running_mean"].abs().min() > 0.1
    other = reestimate_batchnorm(model, [torch.randn(20, 3) - 2])
    assert all(torch.equal(value, before[name]) for name, value in other.auxiliary.state_dict().items())
    assert (other.norm.running_mean < -1).all()


def test_statistics_of_nothing_or_of_examples_with_labels_are_refused() -> None:
    task, x = task_of(normed()), torch.randn(40, 3)
    batches = iter(x.split(20))
    list(batches)
    for wrong, names in (
        (batches, ()),
        (x, ("0", "(3,)", "x.split(100)")),
        ([x, (x, torch.ones(40))], ("1",)),
        ([x, x[:0]], ("1",)),
        (None, ("inputs", "None")),
    ):
        given: Any = wrong
        assert_refused(lambda given=given: batchnorm_start(task, given), DataError, *names)


def test_statistics_are_mixed_linearly_and_no_variance_is_below_both() -> None:
    task = task_of(normed().double())
    with torch.no_grad():
        task.adapter.model[1].running_mean.uniform_(-1, 1)
        task.adapter.model[1].running_var.uniform_(0.5, 2)
    x = torch.randn(80, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    line = batchnorm_line(task, end := batchnorm_start(task, (2 * x + 1).split(20)))
    assert line is not None
    assert end is not None
    assert (line.low, line.high) == (0, 1)
    own = task.adapter.base_state_dict()
    for t in (0.0, 0.25, 0.75, 1.0):
        start = line.at(t)
        task.adapter.check(start)
        assert start.tensors.keys() == {"1.running_mean", "1.running_var"}
        assert not start.phi.any()
        for name, found in start.tensors.items():
            expected = (1 - t) * own[name] + t * end.tensors[name]
            torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
            assert bool((found >= torch.minimum(own[name], end.tensors[name])).all())
        assert line.at(t).digest == start.digest
    there = Start(torch.ones(4), {"0.weight": 2 * own["0.weight"]})
    beyond = batchnorm_line(task, batchnorm_start(task, (2 * x + 1).split(20), there))
    assert beyond is not None
    for t in (0.0, 1.0):  # all else is as in the start whose statistics were estimated
        assert torch.equal(beyond.at(t).phi, there.phi)
        assert torch.equal(beyond.at(t).tensors["0.weight"], there.tensors["0.weight"])
    assert torch.equal(beyond.at(0.0).tensors["1.running_mean"], own["1.running_mean"])
    assert batchnorm_line(task, there) is None
    starts = [Start(task.origin()), end, line.at(0.75), Start(task.origin() + 1e-3, end.tensors)]
    assert known_on(line, starts, own) == dict(zip(starts, (0, 1, 0.75), strict=False))


X = torch.randn(200, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def with_offsets(outputs: int) -> FinetuneTask:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, outputs)]
    model = nn.Sequential(*layers, *([nn.Flatten(0)] if outputs == 1 else [])).double().eval()
    adapter = attach_film(model, dim=3, outputs=Outputs())
    return FinetuneTask(adapter, metric=Metric(lambda model: 0.0, maximize=True))


def added(adapter: Adapter, start: Start) -> Tensor:
    with torch.no_grad(), adapter.applied(Start(torch.zeros_like(start.phi))) as model:
        plain = model(X)
    with torch.no_grad(), adapter.applied(start) as model:
        return model(X) - plain  # type: ignore[no-any-return]


@pytest.mark.parametrize("scale", [1, 1 / 128])
def test_the_strength_is_menons(scale: float) -> None:
    task = with_offsets(3)
    counts = scale * torch.tensor([100.0, 30.0, 10.0])
    line = prior_line(task, counts)
    assert isinstance(line, StartLine)
    assert (line.low, line.high) == (-2.5, 2.5)
    log = torch.tensor([100.0, 30.0, 10.0]).double().log()
    for t in (-2.5, 0.0, 1.0, 1.7):
        expected = -t * (log - log.mean())
        torch.testing.assert_close(added(task.adapter, line.at(t)), expected.expand(200, 3), rtol=1e-9, atol=1e-9)
    starts = [Start(task.origin()), Start(moved_by(task.adapter, prior_offsets(counts))), line.at(1.7)]
    assert known_on(line, starts, task.adapter.base_state_dict()) == dict(zip(starts, (0, 1), strict=False))
    beside = line.through(starts[1])
    assert known_on(beside, starts, task.adapter.base_state_dict()) == dict(zip(starts, (-1, 0), strict=False))


def test_a_single_logit_moves_by_the_log_odds_or_by_one() -> None:
    task = with_offsets(1)
    for counts, expected in (((90, 10), math.log(9)), ((50, 50), 1.0)):
        line = prior_line(task, counts)
        assert line is not None
        torch.testing.assert_close(added(task.adapter, line.at(1.0)), torch.full((200,), expected).double())
    assert prior_line(with_offsets(3), [100, 99, 98]) is None  # about as frequent


def likelihood(priors: Tensor, probabilities: Tensor, trained: Tensor) -> float:
    return float((probabilities * priors / trained).sum(1).log().sum())


def test_em_finds_the_most_likely_priors() -> None:
    """No other priors of a fine grid explain the predictions better (Saerens et al., section 2.3)."""
    p = (3 * torch.randn(300, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)).softmax(1)
    p = p[p[:, 0] < 0.7]
    trained = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    found = em_priors(p, trained)
    assert float(found.sum()) == pytest.approx(1)
    steps = torch.linspace(0.01, 0.97, 97, dtype=torch.float64)
    grid = [torch.stack([a, b, 1 - a - b]) for a in steps for b in steps if 1 - a - b > 0]
    best = max(grid, key=lambda each: likelihood(each, p, trained))
    assert likelihood(found, p, trained) >= likelihood(best, p, trained)
    assert float((found - best).abs().max()) < 0.015
    assert float((found - trained).abs().max()) > 0.05


@pytest.mark.parametrize("outputs", [1, 3])
def test_the_start_adds_the_logarithm_of_the_ratio(outputs: int) -> None:
    task = with_offsets(outputs)
    counts = torch.tensor([70, 30] if outputs == 1 else [60, 30, 10])
    start = em_prior_start(task, X.split(50), counts)
    with torch.no_grad():
        logits = task.adapter.model(X)
    joint = torch.stack([torch.zeros_like(logits), logits], 1) if outputs == 1 else logits
    trained = counts.double() / counts.sum()
    ratio = (em_priors(joint.softmax(1), trained) / trained).log()
    moved = added(task.adapter, start)
    if outputs == 1:
        torch.testing.assert_close(moved, (ratio[1] - ratio[0]).expand(200))
    else:
        torch.testing.assert_close(moved, (ratio - ratio.mean()).expand(200, 3))
    assert not start.tensors


def test_a_class_that_is_not_there_keeps_half_an_example() -> None:
    p = torch.tensor([[1 - 1e-12, 1e-12]] * 50, dtype=torch.float64)
    found = em_priors(p, torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert float(found[1]) == pytest.approx(0.01 / 1.01)


def test_what_has_no_priors_is_refused() -> None:
    task = with_offsets(3)
    assert_refused(lambda: prior_line(task, [1, 2]), ValueError, "priors", "(2,)", "3")
    assert_refused(lambda: em_prior_start(with_offsets(1), [X], [1, 2, 3]), ValueError, "priors", "(3,)", "2")
    assert_refused(lambda: prior_line(task, [3, 0, 1]), DataError, "0", "3", "1")
    assert_refused(lambda: prior_line(task, Counter([0, 1, 1, 2])), ValueError, "priors", "Counter")
    assert_refused(lambda: em_prior_start(task, [], [1, 1, 1]), DataError, "x.split(100)")
    plain = FinetuneTask(
        attach_film(nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)), dim=3),
        metric=Metric(lambda model: 0.0, maximize=True),
    )
    assert_refused(lambda: prior_line(plain, [1, 1, 1]), AdapterError, "phi", "outputs=Outputs()")


@pytest.mark.parametrize("last", [nn.Softmax(1), nn.Sigmoid()])
def test_probabilities_are_no_logits(last: nn.Module) -> None:
    """Taken for logits they would be adjusted to whatever."""
    torch.manual_seed(0)
    count = 3 if isinstance(last, nn.Softmax) else 1
    adapter = attach_outputs(nn.Sequential(nn.Linear(4, count), last).double().eval())
    task = FinetuneTask(adapter, metric=Metric(lambda model: 0.0, maximize=True))
    assert_refused(lambda: em_prior_start(task, X.split(50), [1.0] * max(2, count)), AdapterError)
