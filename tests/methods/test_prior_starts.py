"""Adjustments by priors, against closed forms and against the likelihood that EM climbs."""

import math
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from helpers.refusals import assert_refused
from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film, attach_outputs
from metricopt_ext.adapters.signature import Outputs
from metricopt_ext.adapters.start import PlacesOnLine, Start, StartLine
from metricopt_ext.errors import AdapterError, DataError
from metricopt_ext.methods import prior_starts
from metricopt_ext.methods.prior_starts import (
    em_prior_start,
    em_priors,
    line_offsets,
    moved_by,
    prior_line,
    prior_offsets,
)
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask

X = torch.randn(200, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def task_of(outputs: int) -> FinetuneTask:
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
    task = task_of(3)
    line = prior_line(task, scale * torch.tensor([100.0, 30.0, 10.0]))
    assert isinstance(line, StartLine)
    assert (line.low, line.high) == (-2.5, 2.5)
    log = torch.tensor([100.0, 30.0, 10.0]).double().log()
    for t in (-2.5, 0.0, 1.0, 1.7):
        expected = -t * (log - log.mean())
        torch.testing.assert_close(added(task.adapter, line.at(t)), expected.expand(200, 3), rtol=1e-9, atol=1e-9)
        assert PlacesOnLine(line, task.adapter.base_state_dict()).of(line.at(t)) == pytest.approx(t, abs=1e-6)


def test_a_single_logit_moves_by_the_log_odds_or_by_one() -> None:
    task = task_of(1)
    for counts, expected in (((90, 10), math.log(9)), ((50, 50), 1.0)):
        line = prior_line(task, counts)
        assert line is not None
        torch.testing.assert_close(added(task.adapter, line.at(1.0)), torch.full((200,), expected).double())
    assert prior_line(task_of(3), [100, 99, 98]) is None  # about as frequent


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


def test_em_recovers_the_shift_of_two_gaussians() -> None:
    """Posteriors are exact here, so the priors are found within three standard errors of the share."""
    rng = torch.Generator().manual_seed(3)
    y = torch.rand(20000, generator=rng, dtype=torch.float64) < 0.8
    x = torch.randn(20000, generator=rng, dtype=torch.float64) + 2 * y - 1
    p = torch.sigmoid(2 * x)  # at equal priors
    found = em_priors(torch.stack([1 - p, p], 1), torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert float(found[1]) == pytest.approx(0.8, abs=3 * 1.4 * math.sqrt(0.16 / 20000))


@pytest.mark.parametrize("outputs", [1, 3])
def test_the_start_adds_the_logarithm_of_the_ratio(outputs: int) -> None:
    task = task_of(outputs)
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
    assert not start.replaced


def test_a_class_that_is_not_there_keeps_half_an_example() -> None:
    p = torch.tensor([[1 - 1e-12, 1e-12]] * 50, dtype=torch.float64)
    found = em_priors(p, torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert float(found[1]) == pytest.approx(0.01 / 1.01)


def test_what_has_no_priors_is_refused() -> None:
    task = task_of(3)
    assert_refused(lambda: prior_line(task, [1, 2]), ValueError, "priors", "(2,)", "3")
    assert_refused(lambda: em_prior_start(task_of(1), [X], [1, 2, 3]), ValueError, "priors", "(3,)", "2")
    assert_refused(lambda: prior_line(task, [3, 0, 1]), DataError, "0", "3", "1")
    assert_refused(lambda: prior_line(task, Counter([0, 1, 1, 2])), ValueError, "priors", "Counter")
    assert_refused(lambda: em_prior_start(task, [], [1, 1, 1]), DataError, "x.split(100)")
    plain = FinetuneTask(
        attach_film(nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)), dim=3),
        metric=Metric(lambda model: 0.0, maximize=True),
    )
    assert_refused(lambda: prior_line(plain, [1, 1, 1]), AdapterError, "phi", "outputs=Outputs()")


def test_offsets_are_moved_alone() -> None:
    adapter = attach_outputs(nn.Sequential(nn.Linear(4, 2)).double())
    offsets = torch.tensor([0.5, -0.5], dtype=torch.float64)
    torch.testing.assert_close(added(adapter, Start(moved_by(adapter, offsets))), offsets.expand(200, 2))


def test_offsets_are_the_priors_negative_logarithms() -> None:
    counts = torch.tensor([8, 2, 1])
    log = torch.tensor([8.0, 2.0, 1.0], dtype=torch.float64).log()
    torch.testing.assert_close(prior_offsets(counts), log.mean() - log)
    torch.testing.assert_close(prior_offsets(counts[:2], one_logit=True), log[:1] - log[1:2])
    assert_refused(lambda: prior_offsets(torch.tensor([8, 0])), DataError, "8", "0")
    assert_refused(lambda: prior_offsets(counts, one_logit=True), ValueError, "2", "3")


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [
        ([0.9, -0.9], [0.9, -0.9]),  # 1.8 apart
        ([0.2, -0.2], [0.5, -0.5]),
        ([-0.1, 0.1], [-0.5, 0.5]),
        ([0.0, 0.0], [-0.5, 0.5]),
    ],
)
def test_two_logits_of_two_classes_are_one_apart_at_least(offsets: list[float], expected: list[float]) -> None:
    found = line_offsets(torch.tensor(offsets), two_classes=True)
    assert found is not None
    assert found.tolist() == pytest.approx(expected)
    labels = line_offsets(torch.tensor(offsets))
    assert (labels is None) == (max(offsets) < 0.2)


def test_em_stops_after_so_many_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    p = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]], dtype=torch.float64)
    trained = torch.tensor([0.5, 0.5], dtype=torch.float64)
    monkeypatch.setattr(prior_starts, "ROUNDS", 1)
    torch.testing.assert_close(em_priors(p, trained), p.mean(0))


@pytest.mark.parametrize("last", [nn.Softmax(1), nn.Sigmoid()])
def test_probabilities_are_no_logits(last: nn.Module) -> None:
    """Taken for logits they would be adjusted to whatever."""
    torch.manual_seed(0)
    count = 3 if isinstance(last, nn.Softmax) else 1
    adapter = attach_outputs(nn.Sequential(nn.Linear(4, count), last).double().eval())
    task = FinetuneTask(adapter, metric=Metric(lambda model: 0.0, maximize=True))
    assert_refused(lambda: em_prior_start(task, X.split(50), [1.0] * max(2, count)), AdapterError)
