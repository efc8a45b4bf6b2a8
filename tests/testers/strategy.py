"""What each way to find phi keeps to, whether it searches, or learns an f first, or is asked and told."""

import math
import random
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from statistics import mean, stdev
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from hypothesis import Phase, given
from hypothesis import settings as drawing
from hypothesis import strategies as st
from torch import Tensor, nn

import metricopt_ext as mo
from helpers.refusals import assert_named, assert_refused
from testers import FEW

few = drawing(max_examples=FEW, phases=[Phase.generate])  # whole runs: a failure is told as it is drawn

DIM = 8
ROWS = 40
SEEDS = st.integers(0, 10**6)
SOME = torch.Generator().manual_seed(5)
INPUTS = torch.randn(ROWS, 3, generator=SOME, dtype=torch.float64)
NOISE = 0.1 * torch.randn(ROWS, 2, generator=SOME, dtype=torch.float64)
OPTIMUM = torch.tensor([0.8, -0.7, 0.6, 1.0, -0.5, 0.9, -0.8, 0.4], dtype=torch.float64)
GROUPS = {name: slice(10 * at, 10 * at + 10) for at, name in enumerate("abcd")}
OF_LOSS = torch.tensor([0.7, -0.2, 0.8, 0.5, -0.5, 0.3, -0.6, 0.6], dtype=torch.float64)


class World:
    """A model, its task and its metric, made anew as a process would, and what was asked of the metric.

    Rows of inputs have targets, the network's outputs at `OPTIMUM` and noise. A row's score is
    exp(-4 |output - target|^2), the metric their mean, its halves the means of the even and of the odd rows. The loss
    has another optimum. As outcomes the metric tells the mean of each group of rows, of which it is the worst; two of
    them have a loss of their own.

    Args:
        case: Says which options there are.
        judge: Called before each value of the metric with its number, from 1; what it raises, the metric raises. What
            it returns, if anything, is the value.
    """

    def __init__(self, case: "StrategyTester", judge: Callable[[int], Any] = lambda call: None) -> None:
        rng = torch.Generator().manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)).double()
        for each in [*model.parameters(), model[1].running_mean]:
            nn.init.normal_(each, std=0.5, generator=rng)
        model.register_forward_hook(lambda module, args, output: output)
        self.model, self.judge, self.limited, self.grouped = model, judge, case.constraint, case.outcomes
        self.adapter = mo.attach_film(model, dim=DIM, seed=0)
        self.shift = 0.0
        self.targets = self.outputs_at(OPTIMUM) + NOISE
        if case.settings:
            self.targets = self.targets + 0.3
        goal = self.outputs_at(OF_LOSS)
        self.losses, self.loss_fails_at = 0, 0
        self.asked: list[Tensor] = []
        self.aside: list[Tensor] = []
        self.task = mo.FinetuneTask(
            self.adapter,
            loss=self.loss,
            batches=mo.TensorBatches(INPUTS, goal, batch_size=10),
            batches_of={name: [(INPUTS[GROUPS[name]], goal[GROUPS[name]])] for name in "bd"} if case.outcomes else None,
            metric=mo.Metric(
                self.score,
                maximize=True,
                name="score",
                subject_to={"size": "<= start + 0.02"} if case.constraint else None,
                combine="worst" if case.outcomes else None,
                **case.metric_options,
            ),
            settings=mo.Settings([mo.Setting("shift", 0.0, 1.0, default=0.0)], self.shifted) if case.settings else None,
            population=3,
        )
        self.judge_aside: Callable[[], float] | None = None
        self.options: dict[str, Any] = {}
        starts: dict[str, Any] = {}
        if case.starts:
            mean = model[1].running_mean * 0.9
            starts = {"far": mo.Start(-OPTIMUM), "near": mo.Start(0.4 * OPTIMUM, {"1.running_mean": mean})}
        if case.lines:
            starts["along"] = mo.StartLine(lambda t: mo.Start(t * OPTIMUM), -0.5, 0.5)
        if starts:
            self.options["starts"] = starts
        if case.holdout:
            self.options["holdout"] = mo.Metric(self.score_aside, maximize=True, name="aside")

    def outputs_at(self, phi: Tensor) -> Tensor:
        """Return the network's outputs at a phi."""
        self.adapter.set_phi(phi)
        with torch.no_grad():
            outputs = self.model.eval()(INPUTS)
        self.adapter.set_phi(torch.zeros_like(phi))
        return outputs

    @contextmanager
    def shifted(self, values: Mapping[str, Any]) -> Iterator[None]:
        """Shift the outputs that are judged."""
        before, self.shift = self.shift, values["shift"]
        try:
            yield
        finally:
            self.shift = before

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the surrogate loss, whose optimum is `OF_LOSS`."""
        self.losses += 1
        if self.losses == self.loss_fails_at:
            raise OSError("no more memory")
        return 5 * (model(batch[0]) - batch[1]).square().mean()

    def rows(self, model: nn.Module) -> Tensor:
        """Return each row's score."""
        return (-4 * (model(INPUTS) + self.shift - self.targets).square().sum(1)).exp()

    def score(self, model: nn.Module) -> Any:
        """Judge a model: the metric of the task."""
        outputs = model(INPUTS).detach() + self.shift
        self.asked.append(outputs)
        try:
            told = self.judge(len(self.asked))
        except BaseException:
            spoil(model)
            raise
        if told is None:
            assert not any(module.training for module in model.modules())
            rows = self.rows(model).detach()
            of_groups = {name: of_rows(rows[group]) for name, group in GROUPS.items()}
            told = of_groups if self.grouped else of_rows(rows)
        elif self.grouped:
            told = dict.fromkeys(GROUPS, told)
        if not self.limited:
            return told
        return {**(told if self.grouped else {"score": told}), "size": float(outputs.square().mean())}

    def score_aside(self, model: nn.Module) -> Any:
        """Judge a model on other data."""
        self.aside.append(model(INPUTS).detach())
        if self.judge_aside is not None:
            return self.judge_aside()
        return float(self.rows(model)[::3].mean())

    def size(self) -> float:
        """Return what a constraint bounds, of the model as it stands."""
        with torch.no_grad():
            return float((self.model(INPUTS) + self.shift).square().mean())

    def true(self) -> float:
        """Return the metric of the model as it stands, without a query."""
        with torch.no_grad():
            rows = self.rows(self.model.eval())
        return min(float(rows[group].mean()) for group in GROUPS.values()) if self.grouped else float(rows.mean())


def of_rows(rows: Tensor) -> tuple[float, tuple[float, float]]:
    """Return the mean of rows, and of the even and the odd ones."""
    return float(rows.mean()), (float(rows[::2].mean()), float(rows[1::2].mean()))


def spoil(model: nn.Module) -> None:
    """Leave a model as a function may that is cut short."""
    model.train()
    model[1].eval()
    model[3].register_forward_hook(lambda layer, inputs, output: output + 1)
    model.requires_grad_(True)


def state_of(world: World) -> list[Any]:
    """Return all of a model that a run must leave: tensors and which they are, modes, hooks."""
    state: list[Any] = [torch.is_grad_enabled()]
    for name, module in world.model.named_modules():
        hooks = [(key, list(held)) for key, held in sorted(vars(module).items()) if "hooks" in key]
        state.append((name, module.training, hooks))
    for name, tensor in [*world.model.named_parameters(), *world.model.named_buffers()]:
        state.append((name, id(tensor), tensor.requires_grad, tensor.tolist()))
    return state


def streams() -> list[Any]:
    """Return the states of the global random streams."""
    kind, keys, *rest = np.random.get_state()
    return [random.getstate(), kind, keys.tolist(), rest, torch.get_rng_state().tolist()]


def seed_streams(seed: int) -> None:
    """Set the global random streams."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether the same models were asked for, bit for bit, in the same order."""
    return len(a) == len(b) and all(map(torch.equal, a, b))


FIELDS = (
    *("before", "after", "best", "chosen", "chance", "verdict", "needed", "queries", "guard", "evaluations", "starts"),
    *("strengths", "started_at", "ends", "points", "costs", "path", "holdout", "made_of", "also"),
)


def told(result: mo.Result) -> dict[str, Any]:
    """Return what a result tells, to the last digit."""
    lists = {name: getattr(result, name) for name in FIELDS}
    lists |= {name: lists[name].tolist() for name in ("points", "path")}
    lists["ends"] = {name: phi.tolist() for name, phi in result.ends.items()}
    return {**lists, "text": str(result)}


def files_of(folder: Path) -> dict[str, Any]:
    """Return the content of each file in a folder; of the log its lines, as one that says how many follow may move."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: sorted(each.splitlines()) if name.endswith("log.jsonl") else each for name, each in found.items()}


def noisy(rng: random.Random) -> float:
    """Return a value that has nothing to do with the model."""
    return min(1.0, max(0.0, rng.gauss(0.5, 0.07)))


def raising(at: int, error: BaseException) -> Callable[[int], Any]:
    """Return a judge that raises an error at its n-th call."""

    def judge(call: int) -> None:
        if call == at:
            raise error

    return judge


class Ended:
    """A run that nothing disturbed: its world, its result, and its folder's files."""

    def __init__(self, world: World, result: mo.Result, folder: Path) -> None:
        self.world, self.result, self.folder, self.files = world, result, folder, files_of(folder)
        self.phi = world.adapter.phi.detach().clone()


class StrategyTester:
    """A case gives `strategy`, or a whole `run`, the number of queries, and which options there are.

    Attributes:
        queries: Metric queries of a run.
        starts: Whether there are two starts to begin from, one with a buffer of its own.
        lines: Whether there is a line of starts.
        constraint: Whether the metric is subject to a constraint.
        outcomes: Whether the metric is the worst of several outcomes, with losses that promise where two of them go.
        settings: Whether there is a setting of inference to tune.
        holdout: Whether held-out data confirm the end.
        asks_and_tells: Whether it is a search, which can be asked and told.
        grows: Whether a finished run can go on with more queries.
        ends: How many evaluations the end of a budget is, that the search does not know.
        metric_options: Further arguments of the metric.
        collected_again: How many answers may be asked for again after a kill, those of unfinished trajectories.
        refuses_noise: Whether it is run on noise, by night.
        beats: What its outcome, by night, must be better than: the model as trained, or random search.
    """

    queries: ClassVar[int] = 24
    starts: ClassVar[bool] = False
    lines: ClassVar[bool] = False
    constraint: ClassVar[bool] = False
    outcomes: ClassVar[bool] = False
    settings: ClassVar[bool] = False
    holdout: ClassVar[bool] = False
    asks_and_tells: ClassVar[bool] = True
    grows: ClassVar[bool] = False
    ends: ClassVar[int] = 1
    metric_options: ClassVar[dict[str, Any]] = {}
    collected_again: ClassVar[int] = 0
    refuses_noise: ClassVar[bool] = False
    beats: ClassVar[Literal["start", "random"] | None] = None

    @property
    def calls(self) -> int:
        """Calls of the metric that are one evaluation."""
        return int(self.metric_options.get("repeats", 1))

    def strategy(self) -> Any:
        """Return the strategy; None is the default of `mo.optimize_metric`."""
        return None

    def run(self, world: World, folder: Path | None, *, queries: int, seed: int, resume: bool = False) -> mo.Result:
        """Run a whole finetune of a world's task."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # f of so few points is not to be trusted
            return mo.optimize_metric(
                world.task,
                queries=queries,
                strategy=self.strategy(),
                seed=seed,
                output_dir=folder,
                resume=resume,
                callback=mo.Callback(),
                **world.options,
            )

    @pytest.fixture(scope="class")
    @classmethod
    def undisturbed(cls, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Ended]:
        """Return the run of a seed that nothing disturbed, which is made once."""
        ended: dict[int, Ended] = {}

        def run(seed: int) -> Ended:
            if seed not in ended:
                case, folder = cls(), tmp_path_factory.mktemp("undisturbed")
                world = World(case)
                seed_streams(seed)
                before = streams()
                result = case.run(world, folder, queries=case.queries, seed=seed)
                unchanged = streams() == before  # by name: pytest would print all numbers
                assert unchanged
                ended[seed] = Ended(world, result, folder)
            return ended[seed]

        return run

    def test_counts_its_queries_and_tells_the_truth(self, undisturbed: Any) -> None:
        """Queries are the calls of the user's function, and the result has what the function returned."""
        ended = undisturbed(1)
        world, result = ended.world, ended.result
        spent = sum(result.queries.values())
        assert len(world.asked) == spent == sum(world.task.metric.ledger.spent_on.values()) <= self.queries
        assert result.after == pytest.approx(self.true_value(world, result), abs=1e-12)
        assert torch.equal(ended.phi, result.ends[result.chosen])
        fresh = World(self)
        assert result.before == pytest.approx(fresh.true(), abs=1e-12)
        if self.constraint:
            most = fresh.size() + 0.02
            with world.shifted({"shift": self.shift(result)}):
                assert max(world.size(), result.evaluations["search"].also["size"]) <= most + 1e-12
        assert result.best >= result.before
        assert len(world.aside) == len(result.holdout) <= 3
        world.adapter.remove()
        fresh.adapter.remove()
        now, then = world.model.state_dict(), fresh.model.state_dict()
        assert all(torch.equal(now[name], value) for name, value in then.items())

    @given(draw=SEEDS)
    @few
    def test_the_seed_alone_decides(self, undisturbed: Any, draw: int) -> None:
        """The same seed asks for the same, whatever the global streams and without a folder; another for other."""
        whole, world, other = undisturbed(1), World(self), World(self)
        seed_streams(draw)
        assert told(self.run(world, None, queries=self.queries, seed=1)) == told(whole.result)
        assert same(world.asked, whole.world.asked)
        self.run(other, None, queries=self.queries, seed=draw + 2)
        if self.asks_and_tells:  # a search first asks for the model as trained
            assert torch.equal(other.asked[0], world.asked[0])
        assert not same(other.asked, world.asked)

    @given(draw=SEEDS)
    @few
    def test_killed_anywhere_it_goes_on_bit_for_bit(
        self, undisturbed: Any, tmp_path_factory: pytest.TempPathFactory, draw: int
    ) -> None:
        """After Ctrl-C at drawn queries what was answered is not asked again, and all ends as if undisturbed."""
        whole, folder, rng = undisturbed(1), tmp_path_factory.mktemp("killed") / "run", random.Random(draw)
        asked, known = len(whole.world.asked), 0
        for restart in range(2):
            world = World(self, raising(rng.randint(1, asked - known), KeyboardInterrupt()))
            before = state_of(world)
            with pytest.raises(KeyboardInterrupt):
                self.run(world, folder, queries=self.queries, seed=1, resume=restart > 0)
            assert state_of(world) == before
            known = self.went_on(world, whole, known)
        world = World(self)
        result = self.run(world, folder, queries=self.queries, seed=1, resume=True)
        assert self.went_on(world, whole, known) == (asked - 1) // self.calls * self.calls
        assert told(result) == told(whole.result)
        assert torch.equal(world.adapter.phi, whole.phi)
        assert sum(world.task.metric.ledger.spent_on.values()) == len(whole.world.asked)
        assert files_of(folder) == whole.files
        again = World(self)
        assert told(self.run(again, folder, queries=self.queries, seed=1, resume=True)) == told(result)
        assert not again.asked
        assert_refused(lambda: self.run(World(self), folder, queries=self.queries, seed=1), mo.errors.FileFormatError)
        assert_refused(
            lambda: self.run(World(self), folder, queries=self.queries, seed=2, resume=True),
            mo.errors.FileFormatError,
            "seed",
        )
        assert files_of(folder) == whole.files

    def test_a_finished_run_goes_on_with_more_queries(
        self, undisturbed: Any, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """What was answered is not asked again; the earlier end is a query besides, which the search does not know."""
        whole, folder, queries = undisturbed(1), tmp_path_factory.mktemp("more") / "run", self.queries + 12 * self.calls
        shutil.copytree(whole.folder, folder)
        if not self.grows:
            refused = lambda: self.run(World(self), folder, queries=queries, seed=1, resume=True)  # noqa: E731
            assert_refused(refused, mo.errors.FileFormatError)
            assert files_of(folder) == whole.files
            return
        world, besides = World(self), self.ends * self.calls
        result = self.run(world, folder, queries=queries, seed=1, resume=True)
        assert len(whole.world.asked) + len(world.asked) == sum(result.queries.values()) == queries + besides
        assert sum(world.task.metric.ledger.spent_on.values()) == queries + besides
        if not (self.lines or self.settings):  # which keep what the first number left for them
            fresh = World(self)
            assert torch.equal(result.points, self.run(fresh, None, queries=queries, seed=1).points)
            assert torch.equal(world.adapter.phi, fresh.adapter.phi)
        again = World(self)
        assert told(self.run(again, folder, queries=queries, seed=1, resume=True)) == told(result)
        assert not again.asked
        fewer = lambda: self.run(World(self), folder, queries=self.queries, seed=1, resume=True)  # noqa: E731
        assert_refused(fewer, mo.errors.FileFormatError, queries // self.calls, self.queries // self.calls)

    def went_on(self, world: World, whole: Ended, known: int) -> int:
        """Check that a process asked for what was not answered yet, and return how much was answered after it."""
        asked = len(world.asked)
        for at in range(known, max(0, known - self.collected_again) - 1, -1):
            if same(world.asked, whole.world.asked[at : at + asked]):
                return (at + asked - 1) // self.calls * self.calls
        raise AssertionError(f"{asked} queries are not those of the undisturbed run after {known}")

    @given(draw=SEEDS)
    @few
    def test_an_answer_in_any_order_is_the_same_run(
        self, undisturbed: Any, tmp_path_factory: pytest.TempPathFactory, draw: int
    ) -> None:
        """Out of order, by drawn portions, across processes, and looked at, a search ends as `mo.optimize_metric`."""
        self.needs_ask_and_tell()
        whole, folder, rng = undisturbed(1), tmp_path_factory.mktemp("asked"), random.Random(draw)
        world, told_of, result = World(self), dict[int, Tensor](), None
        looked_at = self.queries // self.calls * 3 // 4
        while result is None:
            with self.search(world, output_dir=folder, resume=bool(told_of)) as search:
                trials = search.open()
                for _ in range(rng.randint(3, 12)):
                    trials += search.ask(rng.randint(1, 6))
                    if not trials:
                        result = search.result()
                        break
                    trial = trials.pop(rng.randrange(len(trials)))
                    search.tell(trial.id, **self.judged(world, trial))
                    told_of[trial.id] = world.asked[-1]
                    if len(told_of) == looked_at:
                        early = self.lines or self.settings  # these may not be over yet
                        with suppress(mo.errors.BudgetError) if early else nullcontext():
                            search.result()
        assert same([told_of[id] for id in sorted(told_of)], whole.world.asked[:: self.calls])
        assert told(result) == told(whole.result)
        assert torch.equal(world.adapter.phi, whole.phi)

    @given(draw=SEEDS)
    @few
    def test_trials_may_fail_or_be_given_up(self, draw: int) -> None:
        """One that failed costs a query, one that was given up none; the search goes on until its queries are spent."""
        self.needs_ask_and_tell()
        world, rng, counts, given_up = World(self), random.Random(draw), Counter[str](), 0
        with self.search(world) as search:
            while trials := search.ask(3):
                for trial in trials:
                    fate = rng.random() if trial.id > 2 else 1.0
                    if fate < 0.15 and given_up < 5:
                        search.give_up(trial.id)
                        given_up += 1
                        continue
                    counts["queries"] += self.calls
                    if fate < 0.3:
                        search.fail(trial.id)
                        counts["failed"] += 1
                    else:
                        search.tell(trial.id, **self.judged(world, trial))
            assert (search.spent, search.failed) == (counts["queries"], counts["failed"])
            result = search.result()
        assert counts["queries"] <= self.queries < counts["queries"] + (1 + self.ends) * self.calls
        if result.chosen != "part" or result.kept_share.evaluated:  # else it is what f takes the part for
            assert result.after == pytest.approx(self.true_value(world, result), abs=1e-12)

    def needs_ask_and_tell(self) -> None:
        """Skip what only a search without held-out data can do."""
        if not self.asks_and_tells or self.holdout:
            pytest.skip("has no ask and tell")

    def search(self, world: World, **more: Any) -> mo.Search:
        """Return the search of seed 1 that is asked and told."""
        return mo.Search(world.task, self.queries, strategy=self.strategy(), seed=1, **world.options, **more)

    def judged(self, world: World, trial: Any) -> dict[str, Any]:
        """Return what a scorer elsewhere tells of a trial."""
        with trial.applied() as model:
            found = world.score(model)
        if self.outcomes:
            return {"value": found}
        value, halves = found["score"] if self.constraint else found
        outcomes = {"size": found["size"]} if self.constraint else {}
        return {"value": value, "halves": halves, "noise": 0.0 if self.calls > 1 else None, "outcomes": outcomes}

    @given(draw=SEEDS)
    @few
    def test_a_metric_that_fails_ends_the_run_and_leaves_the_model(self, undisturbed: Any, draw: int) -> None:
        """The error names the query and the model is as it was: weights, buffers, modes and hooks."""
        rng = random.Random(draw)
        at = rng.randint(1, len(undisturbed(1).world.asked))
        judge, names = rng.choice(
            [
                (raising(at, OSError("server is down")), ["OSError", "server is down"]),
                (lambda call: math.nan if call == at else None, ["nan"]),
                (lambda call: 1.5 if call == at else None, ["1.5", "bounds"]),
            ]
        )
        world = World(self, judge)
        world.model.train(rng.random() < 0.5)
        before = state_of(world)
        with pytest.raises(mo.errors.MetricError) as caught:
            self.run(world, None, queries=self.queries, seed=1)
        assert_named(caught, *names)
        if self.asks_and_tells:
            number = (at - 1) // self.calls + 1
            assert re.search(rf"query {number} of|the model as it was|the start '\w+'", str(caught.value))
        assert len(world.asked) == at
        assert state_of(world) == before

    @given(draw=SEEDS)
    @few
    def test_a_loss_that_fails_leaves_the_model(self, undisturbed: Any, draw: int) -> None:
        """Its own error ends the run, whenever it is called."""
        world, rng = World(self), random.Random(draw)
        world.loss_fails_at = world.losses + rng.randint(1, max(1, (undisturbed(1).world.losses - world.losses) // 2))
        world.model.train(rng.random() < 0.5)
        before = state_of(world)
        with pytest.raises((OSError, mo.errors.AdapterError), match="no more memory"):
            self.run(world, None, queries=self.queries, seed=1)
        assert state_of(world) == before

    def test_a_budget_that_is_too_small_asks_nothing(self) -> None:
        """More queries than the metric's ledger has left are refused, as are too few, before the first."""
        world = World(self)
        world.task.metric.ledger.budget = self.queries - 1
        refuses = mo.errors.BudgetError
        assert_refused(lambda: self.run(world, None, queries=self.queries, seed=1), refuses, self.queries)
        assert_refused(lambda: self.run(World(self), None, queries=self.calls, seed=1), refuses, 1)
        assert not world.asked

    @pytest.mark.parametrize("halves", [False, True])
    def test_what_tells_no_chance_makes_no_guard(self, halves: bool) -> None:
        """A number alone is unguarded, and so is one whose halves are equal; held-out data guard it all the same."""
        rng = random.Random(0)

        def judge(call: int) -> Any:
            value = noisy(rng)
            return (value, (value, value)) if halves else value

        result = self.run(World(self, judge), None, queries=self.queries, seed=1)
        held_out = self.holdout and result.best != result.before
        assert result.guard == ("held-out" if held_out else "repeats" if self.calls > 1 else "none")
        if result.guard == "none":
            assert (result.chance, result.needed) == (None, None)
            assert "unguarded" in str(result)

    @pytest.mark.outcome
    @pytest.mark.slow
    def test_noise_changes_the_model_in_few_seeds(self) -> None:
        """The guard lets 7% of 40 seeds pass (14% where held-out data alone tell), but for three standard errors."""
        if not self.refuses_noise:
            pytest.skip("other cases show it")
        changed, share = 0, 0.14 if self.holdout else 0.07
        for seed in range(40):
            rng = random.Random(seed)

            def judge(call: int, rng: random.Random = rng) -> Any:
                halves = noisy(rng), noisy(rng)
                return sum(halves) / 2 if self.holdout or self.calls > 1 else (sum(halves) / 2, halves)

            world = World(self, judge)
            world.judge_aside = lambda rng=rng: noisy(rng)
            changed += self.run(world, None, queries=self.queries, seed=seed).chosen != "start"
        assert changed <= 40 * share + 3 * math.sqrt(40 * share * (1 - share))

    @pytest.mark.outcome
    @pytest.mark.slow
    def test_it_gets_closer_to_the_optimum(self) -> None:
        """Than the model as trained, or than as many random phi at the optimum's own distance, which nobody knows."""
        if self.beats is None:
            pytest.skip("too few queries to learn from, or other cases show it")
        leads, queries = [], max(60, self.queries)
        for seed in range(12 if self.beats == "random" else 4):
            world, other = World(self), World(self)
            after, rival = self.run(world, None, queries=queries, seed=seed).after, other.true()
            if self.beats == "random":
                drawn = torch.randn(queries - 1, DIM, generator=torch.Generator().manual_seed(seed)).double()
                for phi in drawn * OPTIMUM.norm() / math.sqrt(DIM):
                    other.adapter.set_phi(phi)
                    rival = max(rival, other.true())
            leads.append(after - rival)
        assert mean(leads) > 3 * stdev(leads) / math.sqrt(len(leads))

    def true_value(self, world: World, result: mo.Result) -> float:
        """Return the metric of the model as a run has left it."""
        with world.shifted({"shift": self.shift(result)}):
            return world.true()

    def shift(self, result: mo.Result) -> float:
        """Return the setting that a run has kept."""
        return float(result.start_of(result.chosen).settings.get("shift", 0.0))
