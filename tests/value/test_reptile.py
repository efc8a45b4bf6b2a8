"""Reptile against loops written from Algorithm 1."""

import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from metricopt_ext.value.fitting import fit_value_function
from metricopt_ext.value.learning import Objective
from metricopt_ext.value.observations import Observations
from metricopt_ext.value.reptile import ADAMW as INNER_ADAMW
from metricopt_ext.value.reptile import SGD, ReptileLearner
from metricopt_ext.value.value_function import NeuralValueFunction

DIM = 4


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def smooth(phi: Tensor) -> Tensor:
    return 0.3 + 0.1 * torch.tanh(phi[:, 0]) + 0.05 * phi[:, 1] ** 2


def observations(tasks: int = 20, points: int = 5, *, uneven: bool = False, seed: int = 0) -> Observations:
    """Straight walks from random starts; every other one is two points shorter if uneven."""
    counts = torch.tensor([points - 2 * (uneven and i % 2) for i in range(tasks)])
    trajectory = torch.arange(tasks).repeat_interleave(counts)
    progress = torch.cat([torch.linspace(0, 1, int(count)) for count in counts])
    start, way = torch.randn(2, tasks, DIM, generator=rng(seed))
    phi = start[trajectory] + 0.5 * progress[:, None] * way[trajectory]
    n = len(phi)
    sigma = 0.01 + 0.02 * torch.rand(n, generator=rng(seed + 1))
    zero = torch.zeros(n, dtype=torch.long)
    return Observations(phi, smooth(phi), sigma, trajectory, zero, progress, torch.ones(n, dtype=torch.bool))


def folded(data: Observations, folds: int) -> Tensor:
    return data.trajectory % folds


QUICK = ReptileLearner(iterations=6, tasks=5, points=3, inner_steps=2)


def parameters(f: NeuralValueFunction) -> list[Tensor]:
    return [p.detach().clone() for p in f.parameters()]


def assert_same(a: list[Tensor], b: list[Tensor], tolerance: float = 0.0) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def assert_differ(a: list[Tensor], b: list[Tensor], least: float) -> None:
    assert max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True)) > least


# --- Algorithm 1, lines 5 and 6 ------------------------------------------------------------------------------


@pytest.fixture
def double() -> Iterator[None]:
    """Compute in double precision: BatchNorm on few points and Adam on zero gradients would magnify rounding errors."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@dataclass(frozen=True)
class Recorder(Objective):
    """Keeps the batches that it is asked for, and f as it was at first."""

    calls: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    initial: list[NeuralValueFunction] = field(default_factory=list)

    def __call__(
        self, f: NeuralValueFunction, phi: Tensor, cost: Tensor, sigma: Tensor, generator: torch.Generator
    ) -> Tensor:
        if not self.initial:
            self.initial.append(deepcopy(f))
        self.calls.append((phi, cost, sigma))
        return super().__call__(f, phi, cost, sigma, generator)


def recorder() -> Recorder:
    return Recorder(gamma=10, beta=1, hardest=True)


ADAMW: Callable[..., Any] = lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.5)  # noqa: E731
PLAIN: Callable[..., Any] = lambda p: torch.optim.SGD(p, lr=0.01)  # noqa: E731


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize(
    ("inner", "reference"),
    [(partial(INNER_ADAMW, lr=0.02, weight_decay=0.5), ADAMW), (partial(SGD, lr=0.01), PLAIN)],
    ids=["adamw", "sgd"],
)
def test_the_outer_loop(inner: Any, reference: Any, adapted: bool) -> None:
    data, spy = observations(), recorder()
    learner = replace(QUICK, iterations=5, inner=inner, inner_steps=3, objective=spy, adapted=adapted)
    f = learner(data, folded(data, 2), 2, seed=1)

    assert len(spy.calls) == 15
    calls, w = iter(spy.calls), spy.initial[0]
    for i in range(5):
        w_tilde = deepcopy(w)
        optimizer, seen = reference(w_tilde.parameters()), []
        for _ in range(3):
            phi, cost, sigma = next(calls)
            optimizer.zero_grad()
            Objective(gamma=10, beta=1, hardest=True)(w_tilde, phi, cost, sigma, rng()).backward()
            optimizer.step()
            seen.append(phi)
        assert all(torch.equal(phi, seen[0]) for phi in seen)  # one meta-batch per meta-iteration
        with torch.no_grad():
            for p, q in zip(w.parameters(), w_tilde.parameters(), strict=True):
                p += (1 - i / 5) * (q - p)
    assert_same(parameters(f), parameters(w_tilde if adapted else w), 1e-6)
    assert_differ(parameters(f), parameters(w if adapted else w_tilde), 1e-3)


@pytest.mark.usefixtures("double")
def test_paper_preset_is_algorithm_1_as_printed() -> None:
    data, spy = observations(tasks=6, points=5), recorder()
    learner = ReptileLearner.paper()
    assert (learner.objective.gamma, learner.objective.beta, learner.objective.hardest) == (10, 1, True)
    f = replace(learner, objective=spy)(data, torch.full_like(data.trajectory, -1), 1, seed=0)
    assert (float(f.cost_mean), float(f.cost_std)) == (0, 1)

    w, taken = spy.initial[0], []
    assert len(spy.calls) == 6
    for i, (phi, cost, sigma) in enumerate(spy.calls):
        (task,) = {int(data.trajectory[(data.phi == p).all(1)]) for p in phi[:, 0]}  # one task, all of it
        taken.append(task)
        own = data.trajectory == task
        assert sorted(cost[:, 0].tolist()) == sorted(data.cost[own].tolist())
        w_tilde = deepcopy(w)
        loss = recorder()(w_tilde, phi, cost, sigma, rng())
        gradients = torch.autograd.grad(loss, list(w_tilde.parameters()))
        with torch.no_grad():
            for p, q, g in zip(w.parameters(), w_tilde.parameters(), gradients, strict=True):
                q -= 0.005 * g
                p += (1 - i / 6) * (q - p)
    assert sorted(taken) == list(range(6))
    assert_same(parameters(f), parameters(w_tilde), 1e-9)


# --- Meta-batches and folds ----------------------------------------------------------------------------------


def test_meta_batches() -> None:
    data, folds, spy = observations(tasks=11, uneven=True), 3, Recorder(gamma=1, beta=0)
    fold, drawn = folded(data, folds), np.zeros((folds, 11))
    replace(QUICK, iterations=300, tasks=4, points=4, inner_steps=1, objective=spy)(data, fold, folds, seed=0)
    assert len(spy.calls) == 300
    for phi, _, _ in spy.calls:
        assert phi.shape == (16, folds, DIM)
        batch = (phi[:, :, None] == data.phi).all(-1).int().argmax(-1)
        for member in range(folds):
            ids, counts = np.unique(batch[:, member], return_counts=True)
            own = data.trajectory[ids].numpy()
            assert not (fold[ids] == member).any()
            assert len(set(own)) == 4
            for task in set(own):
                enough = task % 2 == 0  # of 5 points 4 different ones; of 3 points all, one of them twice
                assert sorted(counts[own == task]) == ([1, 1, 1, 1] if enough else [1, 1, 2])
                drawn[member, task] += 1
    for member in range(folds):
        seen = np.arange(11) % folds != member
        assert (drawn[member][~seen] == 0).all()
        share = 4 / seen.sum()
        assert np.abs(drawn[member][seen] / 300 - share).max() < 5 * math.sqrt(share * (1 - share) / 300)


@pytest.mark.parametrize("member", range(3))
def test_a_member_never_sees_its_fold(member: int) -> None:
    data = observations(uneven=True)
    fold = folded(data, 3)
    learner = replace(QUICK, standardise=False)
    held_out = fold == member
    changed = replace(
        data,
        phi=data.phi + held_out[:, None],
        cost=data.cost + held_out * torch.rand(len(fold), generator=rng(3)),
        sigma=data.sigma * (1 + held_out),
    )
    before, after = (learner(d, fold, 3, seed=0) for d in (data, changed))
    for (name, a), (_, b) in zip(before.state_dict().items(), after.state_dict().items(), strict=True):
        if a.ndim and name != "centre":  # of the domain, which all members share
            by_member = [(x.view(3, -1)) for x in (a, b)]
            for other in range(3):
                same = torch.equal(by_member[0][other], by_member[1][other])
                assert same or other != member, name
                assert not same or other == member or "head.bias" in name or "norms" in name, name


# --- BatchNorm -----------------------------------------------------------------------------------------------


def layer_inputs(f: NeuralValueFunction, phi: Tensor) -> list[Tensor]:
    """What each BatchNorm is given, ``n x M x width``, f being in evaluation mode."""
    inputs: list[Tensor] = []
    hooks = [norm.register_forward_pre_hook(lambda _, args: inputs.append(args[0])) for norm in f.norms]
    f.members(phi)
    for hook in hooks:
        hook.remove()
    return [x.view(len(phi), f.members_count, -1) for x in inputs]


def test_statistics_are_those_of_all_that_a_member_sees() -> None:
    data = observations(tasks=11, uneven=True)
    fold = folded(data, 3)
    f = QUICK(data, fold, 3, seed=0)
    assert not f.training
    for norm, inputs in zip(f.norms, layer_inputs(f, data.phi), strict=True):
        for member in range(3):
            seen = inputs[fold != member, member].detach().double().numpy()
            mine = norm.running_mean.view(3, -1)[member], norm.running_var.view(3, -1)[member]
            np.testing.assert_allclose(mine[0], seen.mean(0), rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(mine[1], seen.var(0), rtol=1e-4, atol=1e-6)


# --- The learner ---------------------------------------------------------------------------------------------


@pytest.mark.outcome
def test_it_learns() -> None:
    data = observations(tasks=60)
    fits = [fit_value_function(data, ReptileLearner(iterations=60), seed=seed) for seed in range(2)]
    qualities = [fit.f.quality for fit in fits]
    assert np.mean([quality.spearman for quality in qualities]) > 0.9  # at worst 0.97 ± 0.01
    # at worst 0.22 ± 0.03
    assert np.mean([quality.mae / quality.constant_mae for quality in qualities]) < 0.4


def test_repr_is_the_same_in_every_process() -> None:
    """Resumed runs are recognised by it."""
    assert "0x" not in repr(ReptileLearner()) + repr(ReptileLearner.paper())
