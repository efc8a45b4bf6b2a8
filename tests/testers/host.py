"""What every host keeps: a model tuned within it, judged by its own evaluator, is an ordinary model of the host again.

A host is whatever a user's script trains with: Lightning, a Trainer, an estimator, a loop. The case makes one around a
tiny model whose metric asks a `Judge`, and gives the host's own ways to tune, evaluate, and load what it saved.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import metricopt_ext as mo
from helpers.refusals import assert_refused
from testers import FEW


@dataclass
class Judge:
    """Stands within a host's metric: counts what is asked, fails where it is to, and may answer by chance.

    Attributes:
        evaluations: How often the metric was asked of all data.
        most: How many evaluations it answers; the next one raises an error.
        chance: Whether it answers alike whatever the model, but for chance, which is large on halves.
    """

    evaluations: int = 0
    most: float = float("inf")
    chance: bool = False
    _rng: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0), repr=False)

    def ask(self) -> None:
        """Count an evaluation of all data; the case calls it where its host evaluates."""
        if self.evaluations >= self.most:
            raise RuntimeError("the disk is full")
        self.evaluations += 1

    def says(self, value: float, *, half: bool = False) -> float:
        """Return what the metric is to say in place of its value, on all data or on a half."""
        if not self.chance:
            return value
        return 0.5 + (0.2 if half else 0.001) * (float(torch.rand((), generator=self._rng)) - 0.5)


@dataclass
class Host:
    """A host with a trained model, by the ways that its documentation shows.

    Attributes:
        tune: Tunes it; keyword arguments are passed on to the search.
        model: Returns the model that the host has now.
        evaluate: Returns the metric of that model by the host's own evaluator.
        loaded: Returns each model that the host loads from what it has saved.
        outputs: Returns what a model computes of some inputs.
    """

    tune: Callable[..., mo.Result]
    model: Callable[[], nn.Module]
    evaluate: Callable[[], float]
    loaded: Callable[[], list[nn.Module]]
    outputs: Callable[[nn.Module], Tensor]


@dataclass
class HostRun:
    """A finished run.

    Attributes:
        host: The host after it.
        result: What the search says of it.
        evaluations: How often the metric was asked meanwhile.
        before: The host's model before, its value, and what it computed.
    """

    host: Host
    result: mo.Result
    evaluations: int
    before: "State"
    value: float
    outputs: Tensor


class State:
    """A model's tensors bit for bit, and how it is made: classes, attributes, hooks, modes, what requires gradients."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors = {name: each.detach().clone() for name, each in model.state_dict().items()}
        self.made: dict[str, Any] = {name: each.requires_grad for name, each in model.named_parameters()}
        for name, module in model.named_modules():
            self.made[f"class of {name}"], self.made[f"mode of {name}"] = type(module), module.training
            for attribute, value in vars(module).items():  # and how many each holds, as of hooks
                self.made[f"{name}.{attribute}"] = len(value) if isinstance(value, dict) else None

    def assert_made_as(self, other: "State") -> None:
        """Check that both are made alike, whatever their weights."""
        names = self.made.keys() | other.made.keys()
        assert not {name for name in names if self.made.get(name, "absent") != other.made.get(name, "absent")}
        assert self.tensors.keys() == other.tensors.keys()

    def assert_holds(self, tensors: dict[str, Tensor]) -> None:
        """Check each bit of the weights."""
        assert self.tensors.keys() == tensors.keys()
        assert not [name for name, each in self.tensors.items() if not torch.equal(each, tensors[name])]


class HostTester:
    """The contract of a host. A case defines `host`, and says so where its host resumes no search."""

    queries = 14
    tolerance = 1e-6
    """What the host's evaluator may differ from the result by: it may compute in single precision."""

    def host(self, folder: Path, judge: Judge) -> Host:
        """Make the host, always alike, with a trained model; what it writes goes into the folder."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def tuned(cls, tmp_path_factory: pytest.TempPathFactory) -> HostRun:
        """A run that nothing disturbed."""
        judge = Judge()
        host = cls().host(tmp_path_factory.mktemp("host"), judge)
        value, outputs = host.evaluate(), host.outputs(host.model())
        before, judge.evaluations = State(host.model()), 0
        result = host.tune()
        return HostRun(host, result, judge.evaluations, before, value, outputs)

    def test_the_host_s_evaluator_gives_what_the_result_states(self, tuned: HostRun) -> None:
        """Before and after, and the metric is better: phi was moved."""
        assert tuned.result.before == pytest.approx(tuned.value, abs=self.tolerance)
        assert tuned.result.after == pytest.approx(tuned.host.evaluate(), abs=self.tolerance)
        assert tuned.result.after > tuned.result.before + 10 * self.tolerance

    def test_each_query_is_an_evaluation_and_no_other_is_made(self, tuned: HostRun) -> None:
        assert tuned.evaluations == sum(tuned.result.queries.values()) == self.queries

    def test_the_model_is_an_ordinary_one_again(self, tuned: HostRun) -> None:
        """No adapter, hook, parametrization or attribute is left, and each module is in the mode that it was in."""
        State(tuned.host.model()).assert_made_as(tuned.before)

    def test_the_host_loads_the_tuned_model_from_all_that_it_saved(self, tuned: HostRun) -> None:
        expected, outputs = State(tuned.host.model()).tensors, tuned.host.outputs(tuned.host.model())
        assert not torch.equal(outputs, tuned.outputs)
        models = tuned.host.loaded()
        assert models
        for model in models:
            State(model).assert_holds(expected)
            assert torch.equal(tuned.host.outputs(model), outputs)

    def test_what_is_chance_leaves_every_bit(self, tmp_path: Path) -> None:
        """The guard keeps phi = 0, and what the host loads is what it had."""
        judge = Judge()
        host = self.host(tmp_path, judge)
        before, judge.chance = State(host.model()), True
        result = host.tune()
        assert result.after == result.before
        State(host.model()).assert_made_as(before)
        for model in (host.model(), *host.loaded()):
            State(model).assert_holds(before.tensors)

    @settings(max_examples=FEW)
    @given(data=st.data())
    def test_a_metric_that_fails_leaves_the_host_as_it_was(
        self, tuned: HostRun, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ) -> None:
        """And it can be tuned anew, as if nothing had happened."""
        judge = Judge()
        host = self.host(tmp_path_factory.mktemp("failed"), judge)
        before, judge.evaluations = State(host.model()), 0
        judge.most = data.draw(st.integers(0, self.queries - 1), "evaluations")
        assert_refused(host.tune, mo.errors.MetricError, "the disk is full")
        State(host.model()).assert_made_as(before)
        State(host.model()).assert_holds(before.tensors)
        judge.most = float("inf")
        host.tune()
        State(host.model()).assert_holds(tuned.host.model().state_dict())

    @settings(max_examples=FEW)
    @given(data=st.data())
    def test_a_killed_run_goes_on_to_the_same_end(
        self, tuned: HostRun, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ) -> None:
        """And asks no query twice."""
        killed = data.draw(st.integers(1, self.queries - 1), "evaluations")
        folder, judge = tmp_path_factory.mktemp("killed"), Judge(most=killed)
        host = self.host(folder / "first", judge)
        judge.evaluations = 0
        assert_refused(lambda: host.tune(output_dir=folder / "run"), mo.errors.MetricError, "the disk is full")
        again = Judge()
        host = self.host(folder / "again", again)
        again.evaluations = 0
        result = host.tune(output_dir=folder / "run", resume=True)
        assert killed + again.evaluations == self.queries
        assert result.after == tuned.result.after
        State(host.model()).assert_holds(tuned.host.model().state_dict())
