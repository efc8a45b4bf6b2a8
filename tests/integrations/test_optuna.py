"""The sampler in Optuna's own studies: what it finds, tells, asks beside, and goes on from."""

import math
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import torch

optuna = pytest.importorskip("optuna", reason="the extra `optuna` is not installed")

from optuna.distributions import FloatDistribution  # noqa: E402
from optuna.samplers import RandomSampler  # noqa: E402
from optuna.trial import TrialState, create_trial  # noqa: E402

from metricopt_ext.integrations.optuna import SPREAD, Box, MetricOptSampler  # noqa: E402
from metricopt_ext.search.trust_region import GuidedTrustRegion  # noqa: E402

Objective = Callable[[Any], float]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(before)


def quadratic(seed: int, dim: int = 6) -> Objective:
    """The squared distance from a point of the box [-5, 5]^d, with a weight for each coordinate."""
    rng = torch.Generator().manual_seed(seed)
    at, weights = 6 * torch.rand(dim, generator=rng) - 3, 0.5 + 3 * torch.rand(dim, generator=rng)

    def objective(trial: Any) -> float:
        x = torch.tensor([trial.suggest_float(f"x{i}", -5, 5) for i in range(dim)])
        return float((weights * (x - at).square()).sum())

    return objective


def study_of(objective: Objective, trials: int, sampler: Any = None, **options: Any) -> Any:
    study = optuna.create_study(sampler=sampler or MetricOptSampler(trials), **options)
    study.optimize(objective, n_trials=trials)
    return study


def params_of(study: Any) -> list[dict[str, float]]:
    return [trial.params for trial in study.trials]


# --- What it finds -----------------------------------------------------------------------------------------------


@pytest.mark.outcome
def test_a_quadratic_is_searched_better_than_at_random() -> None:
    def best(sampler: Any, seed: int) -> float:
        return math.log(study_of(quadratic(seed), 40, sampler).best_value)

    gains = [best(RandomSampler(seed), seed) - best(MetricOptSampler(40, seed=seed), seed) for seed in range(8)]
    assert mean(gains) > 3 * stdev(gains) / math.sqrt(len(gains))
    assert mean(gains) > math.log(4)


def test_a_log_scale_is_searched_in_log_space() -> None:
    study = study_of(lambda trial: math.log10(trial.suggest_float("rate", 1e-6, 1e2, log=True) / 1e-4) ** 2, 30)
    assert study.trials[0].params["rate"] == pytest.approx(1e-2)
    assert 0.5e-4 < study.best_params["rate"] < 2e-4


def test_maximising_is_minimising_the_negative() -> None:
    lower = study_of(quadratic(0), 20)
    higher = study_of(lambda trial: -quadratic(0)(trial), 20, direction="maximize")
    assert params_of(higher) == params_of(lower)


def test_the_same_seed_gives_the_same_trials() -> None:
    first, again, other = (study_of(quadratic(0), 16, MetricOptSampler(16, seed=seed)) for seed in (3, 3, 4))
    assert params_of(first) == params_of(again)
    assert params_of(first)[0] == params_of(other)[0]
    assert params_of(first)[1:] != params_of(other)[1:]


def test_no_draw_is_taken_from_the_user() -> None:
    before = torch.random.get_rng_state()
    study_of(quadratic(0), 10)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_study_may_go_on_beyond_its_queries() -> None:
    study = study_of(quadratic(0), 31, MetricOptSampler(10))
    assert len({tuple(params.values()) for params in params_of(study)}) == 31


def test_a_constant_objective_ends() -> None:
    assert len(study_of(lambda trial: 0 * trial.suggest_float("x", 0, 1), 25, MetricOptSampler(10)).trials) == 25


# --- The box -----------------------------------------------------------------------------------------------------


def test_the_first_trial_is_the_middle_and_the_design_is_antithetic_around_it() -> None:
    study = study_of(quadratic(0), 5, MetricOptSampler(20))
    assert set(params_of(study)[0].values()) == {0.0}
    design = torch.tensor([list(params.values()) for params in params_of(study)[1:]], dtype=torch.float64)
    torch.testing.assert_close(design[:2], -design[2:])
    assert 0.3 < design.square().mean().sqrt() / (5 * SPREAD) < 3


def test_a_box_maps_there_and_back() -> None:
    box = Box({"a": FloatDistribution(-1, 3), "b": FloatDistribution(1e-4, 1e2, log=True)})
    assert box.params(torch.tensor([0.5, -1 / 3])) == pytest.approx({"a": 2.0, "b": 1e-2})
    assert box.point({"a": 2.0, "b": 1e-2, "c": 7}).tolist() == pytest.approx([0.5, -1 / 3])
    assert box.params(torch.tensor([7.0, -7.0])) == pytest.approx({"a": 3.0, "b": 1e-4})
    assert box.point({"a": 2.0}) is None
    assert box.point({"a": 4.0, "b": 1.0}) is None


def test_steps_are_kept() -> None:
    study = study_of(lambda trial: (trial.suggest_float("x", -1, 2, step=0.125) - 1.5) ** 2, 30)
    assert all(params["x"] % 0.125 == 0 for params in params_of(study))
    assert study.best_value <= 0.125**2


def test_an_optimum_outside_is_found_at_the_edge_and_told_there() -> None:
    study = study_of(lambda trial: (trial.suggest_float("x", 0, 1) - 9) ** 2, 25)
    assert study.best_params["x"] == 1
    search = study.sampler._search
    assert max(float(point.abs().max()) for point in search._state.points) <= 0.02 / SPREAD + 1e-12


# --- What is told ------------------------------------------------------------------------------------------------


def told(study: Any) -> list[Any]:
    """Ask for one more trial, and return what the search knows by then, also of its open batch."""
    study.ask().suggest_float("x", 0, 1)
    state = study.sampler._search._state
    return [*state.evaluations, *(evaluation for _, evaluation in state.answered())]


def test_a_failed_trial_counts_as_the_worst_and_a_pruned_one_is_left_out() -> None:
    study = optuna.create_study(sampler=MetricOptSampler(30))
    for value, state in ((1.0, None), (5.0, None), (None, TrialState.FAIL), (None, TrialState.PRUNED), (2.0, None)):
        trial = study.ask()
        trial.suggest_float("x", 0, 1)
        study.tell(trial, value, state)
    evaluations = told(study)
    assert [(each.cost, each.failed) for each in evaluations] == [(1, False), (5, False), (5, True), (2, False)]


def test_an_infinite_value_counts_as_failed() -> None:
    def objective(trial: Any) -> float:
        x = trial.suggest_float("x", 0, 1)
        return x if trial.number < 2 else -math.inf

    study = study_of(objective, 3, MetricOptSampler(20))
    worst = max(trial.value for trial in study.trials)
    assert [(each.cost, each.failed) for each in told(study)][2:] == [(worst, True)]


def test_a_first_trial_that_fails_is_followed_by_random_ones_until_there_is_a_value() -> None:
    def objective(trial: Any) -> float:
        x = trial.suggest_float("x", 0, 1)
        return math.inf if trial.number < 3 else x

    study = study_of(objective, 12)
    assert len({params["x"] for params in params_of(study)}) == 12
    assert study.sampler._search.started


def test_an_enqueued_point_is_where_the_search_begins() -> None:
    study = optuna.create_study(sampler=MetricOptSampler(20))
    study.enqueue_trial({f"x{i}": 2.0 for i in range(6)})
    study.optimize(quadratic(0), n_trials=5)
    points = torch.tensor([list(params.values()) for params in params_of(study)], dtype=torch.float64)
    torch.testing.assert_close(points[0], torch.full((6,), 2.0, dtype=torch.float64))
    inside = (points[1:].abs() < 5).all(0)
    torch.testing.assert_close((points[1:3] + points[3:5])[:, inside] / 2, points[:2, inside] * 0 + 2)


# --- Several workers, and another day ----------------------------------------------------------------------------


def test_two_threads_share_one_search() -> None:
    study = optuna.create_study(sampler=MetricOptSampler(40))
    study.optimize(quadratic(0), n_trials=40, n_jobs=2)
    assert {trial.state for trial in study.trials} == {TrialState.COMPLETE}
    assert len({tuple(params.values()) for params in params_of(study)}) == 40
    assert study.best_value < min(study_of(quadratic(0), 40, RandomSampler(seed)).best_value for seed in range(3))


def test_whoever_asks_before_the_batch_is_told_gets_points_beside_the_best() -> None:
    study = optuna.create_study(sampler=MetricOptSampler(60, strategy=GuidedTrustRegion(design=4, batch=4)))
    study.optimize(quadratic(0), n_trials=1)

    def asked() -> Any:
        trial = study.ask()
        for i in range(6):
            trial.suggest_float(f"x{i}", -5, 5)
        return trial

    design, beside = [asked() for _ in range(4)], [asked() for _ in range(4)]
    offsets = torch.tensor([list(trial.params.values()) for trial in beside]) / 5
    assert 0.03 < offsets.square().mean().sqrt() < 0.3  # the best, the middle, is at 0
    state = study.sampler._search._state
    assert len(state.ask()) == 4
    for trial in beside:
        study.tell(trial, 1e3)
    late = asked()  # the design is given up
    assert len(state.points) == 5
    study.tell(design[0], 1.0)
    study.tell(late, 2.0)
    asked()
    assert sorted(each.cost for _, each in [*state.answered(), *study.sampler._search._others]) == [1.0, 2.0]


@pytest.mark.slow
def test_a_study_goes_on_from_its_storage(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    first = study_of(quadratic(0), 20, MetricOptSampler(40), storage=storage, study_name="mine")
    least = first.best_value
    study = optuna.load_study(study_name="mine", storage=storage, sampler=MetricOptSampler(40))
    study.optimize(quadratic(0), n_trials=1)
    state = study.sampler._search._state
    assert [each.cost for each in state.evaluations] == [trial.value for trial in first.trials[:20]]
    best = Box({name: FloatDistribution(-5, 5) for name in sorted(first.best_params)}).point(first.best_params)
    assert best is not None
    torch.testing.assert_close(state.start, best * 0.02 / SPREAD)
    study.optimize(quadratic(0), n_trials=19)
    assert study.best_value < least


def test_trials_of_others_are_known() -> None:
    study = optuna.create_study(sampler=MetricOptSampler(20))
    ranges = {"x": FloatDistribution(0, 1)}
    study.add_trial(create_trial(params={"x": 0.25}, distributions=ranges, value=3.0))
    assert [each.cost for each in told(study)] == [3.0]


def test_a_study_with_more_trials_than_queries_gets_as_many_again() -> None:
    study = study_of(quadratic(0), 30, RandomSampler(0))
    study.sampler = MetricOptSampler(10)
    study.optimize(quadratic(0), n_trials=9)
    state = study.sampler._search._state
    assert (state.queries, len(state.points)) == (40, 38)  # a design and a batch were told, and one, the rest, is open
    study.optimize(quadratic(0), n_trials=2)
    assert (state.queries, len(state.points)) == (50, 39)  # the fortieth is the end's own


def test_a_study_can_be_pickled() -> None:
    study = pickle.loads(pickle.dumps(study_of(quadratic(0), 10)))
    study.optimize(quadratic(0), n_trials=5)
    assert len(study.trials) == 15


def test_one_sampler_may_serve_two_studies() -> None:
    sampler = MetricOptSampler(12)
    first, second = (study_of(quadratic(0), 12, sampler) for _ in range(2))
    assert params_of(first) == params_of(second)


# --- What it does not search -------------------------------------------------------------------------------------


def test_other_parameters_are_drawn_at_random_and_named_once() -> None:
    def objective(trial: Any) -> float:
        x = trial.suggest_float("x", -1, 1)
        if trial.number > 1:
            trial.suggest_float("sometimes", 0, 1)
        return x**2 + trial.suggest_int("layers", 1, 5) + (trial.suggest_categorical("kind", ["a", "b"]) == "a")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        study = study_of(objective, 15)
    said = [str(each.message) for each in caught if "drawn at random" in str(each.message)]
    assert sorted(said) == [
        "parameter 'kind' is drawn at random: it is no float; suggest_float is searched",
        "parameter 'layers' is drawn at random: it is no float; suggest_float is searched",
        "parameter 'sometimes' is drawn at random: not all trials have it with one range",
    ]
    assert len({params["layers"] for params in params_of(study)}) > 1
    assert set(study.sampler._search.box.ranges) == {"x"}


def test_several_objectives_are_refused() -> None:
    study = optuna.create_study(directions=["minimize", "maximize"], sampler=MetricOptSampler(10))
    with pytest.raises(ValueError, match=r"has 2.*MetricOptSampler takes one"):
        study.ask().suggest_float("x", 0, 1)


@pytest.mark.parametrize("settings", [{"queries": 6}, {"seed": -1}])
def test_settings_out_of_range_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        MetricOptSampler(**settings)


@pytest.mark.slow
def test_the_core_does_not_import_optuna() -> None:
    code = "import sys, metricopt_ext as mo; mo.Search, mo.optimize_metric; print('optuna' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
