"""Ask and tell against `optimize_metric`, in any order, over processes; and what is refused."""

import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.refusals import assert_refused, having
from metricopt_ext.adapters.attach import attach_film, attach_input_bias, load_adapter
from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import AdapterError, BudgetError, FileFormatError, MetricError
from metricopt_ext.methods.pipeline import optimize_metric
from metricopt_ext.methods.recipe import Recipe
from metricopt_ext.methods.search import Search
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.direct import CMAES, GuidedES
from metricopt_ext.search.random_search import RandomSearch
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.kept_evaluations import KeptEvaluations
from metricopt_ext.tasks.ledger import Ledger
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.utils.files import UNFINISHED

Make = Callable[..., Any]
STRATEGIES = [GuidedTrustRegion(), CMAES(), GuidedES(), RandomSearch()]
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=["guided", "cma", "guided_es", "random"])


def adapter_of(folder: Path) -> bytes:
    return (folder / "adapter.safetensors").read_bytes()


def tell_all(search: Search, score: Callable[[nn.Module], float], *, n: int = 3, backwards: bool = True) -> None:
    while trials := search.ask(n):
        for trial in reversed(trials) if backwards else trials:
            with trial.applied() as model:
                search.tell(trial.id, score(model))


@pytest.mark.slow
@each_strategy
def test_the_loop_is_optimize_metric_byte_for_byte(quadratic: Make, tmp_path: Path, strategy: Any) -> None:
    """Each batch told in reverse, and the second half by another object that goes on from the folder."""
    whole, task, again = quadratic(), quadratic(), quadratic()
    expected = optimize_metric(
        whole, queries=45, strategy=strategy, seed=3, output_dir=tmp_path / "whole", callback=Callback()
    )
    first = Search(task, 45, strategy=strategy, seed=3, output_dir=tmp_path / "asked")
    while first.spent < 22:
        batch = []
        while trials := first.ask(5):
            batch += trials
        for trial in reversed(batch):
            with trial.applied() as model:
                first.tell(trial.id, task.distance(model))
            if first.spent == 22:
                break
    first.close()
    second = Search(again, 45, strategy=strategy, seed=3, output_dir=tmp_path / "asked", resume=True)
    assert second.spent == 22
    still = {trial.id: trial for trial in second.open()}
    for trial in reversed(still.values()):
        with trial.applied() as model:
            second.tell(trial.id, again.distance(model))
    tell_all(second, again.distance)
    result = second.result()
    assert str(result) == str(expected)
    assert torch.equal(result.points, expected.points)
    assert adapter_of(tmp_path / "asked") == adapter_of(tmp_path / "whole")
    assert torch.equal(again.adapter.phi, whole.adapter.phi)
    assert task.problem.queries + again.problem.queries == 45
    first_file, other = (json.loads((tmp_path / name / "evaluations.json").read_text()) for name in ("asked", "whole"))
    assert first_file == other


def test_a_batch_closes_once_all_of_it_is_answered(quadratic: Make) -> None:
    task = quadratic()
    search = Search(task, 40)
    (start,) = search.ask(5)
    assert (start.id, start.start, start.phi.tolist()) == (0, "start", [0.0] * 4)
    assert search.ask(5) == []
    assert search.open() == [start]
    search.tell(0, 1.0)
    assert search.open() == []
    design = search.ask(3)
    assert [trial.id for trial in design] == [1, 2, 3]
    more = search.ask(99)
    assert [trial.id for trial in more] == [4]
    assert search.ask(1) == []
    assert [trial.id for trial in search.open()] == [1, 2, 3, 4]
    for trial in (more[0], *design[:2]):
        search.tell(trial.id, 2.0 + trial.id)
        assert search.ask(1) == []
    search.fail(3, "out of memory")
    assert [trial.id for trial in search.ask(99)] == list(range(5, 9))
    assert (search.spent, search.failed) == (5, 1)


@pytest.mark.slow
def test_the_order_and_the_sitting_of_answers_do_not_matter(quadratic: Make, tmp_path: Path) -> None:
    """Failures and trials that are given up included."""

    def run(order: int) -> list[Any]:
        task, rng = quadratic(), random.Random(order)
        folder = tmp_path / str(order)
        search = Search(task, 40, seed=1, output_dir=folder)
        while batch := search.ask(99):
            rng.shuffle(batch)
            for trial in batch:
                if trial.id % 7 == 3:
                    search.fail(trial.id)
                elif trial.id % 7 == 5:
                    search.give_up(trial.id)
                else:
                    with trial.applied() as model:
                        search.tell(trial.id, task.distance(model))
                if rng.random() < 0.2:
                    search.close()
                    search = Search(quadratic(), 40, seed=1, output_dir=folder, resume=True)
        result = search.result()
        return [str(result), result.points.tolist(), result.costs, search.failed, search.spent]

    first = run(0)
    assert run(1) == run(2) == first
    assert first[-1] == 40
    assert first[-2] >= 5


def test_open_trials_are_the_same_in_another_process(quadratic: Make, tmp_path: Path) -> None:
    search = Search(quadratic(), 40, output_dir=tmp_path)
    search.tell(search.ask()[0].id, 1.0)
    asked = search.ask(3)
    search.tell(asked[1].id, 0.5)
    search.close()
    again = Search(quadratic(), 40, output_dir=tmp_path, resume=True)
    assert [(t.id, t.phi.tolist()) for t in again.open()] == [(t.id, t.phi.tolist()) for t in (asked[0], asked[2])]
    assert [t.id for t in again.ask(2)] == [asked[0].id, asked[2].id]
    again.tell(asked[0].id, 0.7)


def test_what_the_search_would_ask_today_does_not_move_a_cost(
    quadratic: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = quadratic()
    task.problem.fail_after = 25
    assert_refused(
        lambda: optimize_metric(task, queries=40, output_dir=tmp_path, callback=Callback()), Exception, "server"
    )
    import metricopt_ext.search.trust_region as module

    original, said = module.probe, list[str]()

    def other(*args: Any) -> Any:
        found = original(*args)
        return found._replace(scale=1.01 * found.scale)

    monkeypatch.setattr(module, "probe", other)

    class Saying(Callback):
        def say(self, line: str) -> None:
            said.append(line)

    resumed = quadratic()
    result = optimize_metric(resumed, queries=40, output_dir=tmp_path, resume=True, callback=Saying())
    assert resumed.problem.queries == 15
    assert [resumed.true_cost(point) for point in result.points] == pytest.approx(list(result.costs), rel=1e-12)
    assert len([line for line in said if "kept points are not what the search would ask for today" in line]) == 1


def test_an_adapter_alone_has_plain_directions_and_says_so() -> None:
    adapter = attach_input_bias(nn.Linear(2, 3), dim=4)
    search = Search(adapter, 40, maximize=True, name="accuracy")
    goal = torch.tensor([0.05, -0.05, 0.02, 0.0])
    while trials := search.ask(4):
        for trial in trials:
            search.tell(trial.id, 1 - float((trial.phi - goal).square().sum()))
    result = search.result()
    assert "without a loss, the search treated all directions of phi alike" in str(result)
    assert result.metric == "accuracy"
    assert result.after > result.before
    assert torch.equal(adapter.phi, result.ends[result.chosen])


def test_a_design_that_ruins_the_model_is_narrowed() -> None:
    adapter = attach_input_bias(nn.Linear(2, 3), dim=4)
    search = Search(adapter, 60, maximize=True, bounds=(0.0, 1.0))
    while trials := search.ask(4):
        for trial in trials:
            search.tell(trial.id, 0.9 * math.exp(-float((trial.phi / 0.002).square().sum())))
    result = search.result()
    assert result.details.widened < 1 / 4
    assert "phi was moved" in str(result)


def test_halves_and_noise_reach_the_guard(quadratic: Make) -> None:
    search = Search(quadratic(), 40)
    while trials := search.ask(8):
        for trial in trials:
            value = float((trial.phi - 1).square().sum())
            more = 0.01 * (trial.id % 3)
            search.tell(trial.id, value, halves=(value + more, value - more))
    assert search.result().guard == "halves"
    search = Search(quadratic(), 40)
    while trials := search.ask(8):
        for trial in trials:
            search.tell(trial.id, float((trial.phi - 1).square().sum()), noise=0.01)
    result = search.result()
    assert result.guard == "repeats"
    assert result.chance == pytest.approx(2**0.5 * 0.01)


def test_a_start_with_other_tensors_is_applied_and_kept(tmp_path: Path) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))

    model = make()
    adapter = attach_film(model, "1", dim=4)
    other = Start(torch.zeros(4), {"1.running_mean": torch.full((4,), 2.0)})
    search = Search(adapter, 30, maximize=True, starts={"shifted": other}, output_dir=tmp_path)
    means = set()
    while trials := search.ask(4):
        for trial in trials:
            with trial.applied() as applied:
                mean = float(applied[1].running_mean.mean())
                means.add((trial.start, mean))
                search.tell(trial.id, mean - float((trial.phi - 0.1).square().sum()))
    assert means == {("start", 0.0), ("shifted", 2.0)}
    assert float(model[1].running_mean.mean()) == 0
    result = search.result()
    assert result.started_at == "shifted"
    assert float(model[1].running_mean.mean()) == 2
    assert torch.equal(load_adapter(make(), tmp_path / "adapter.safetensors").phi, adapter.phi)


# --- What is refused ---------------------------------------------------------------------------------------------


def test_several_pairs_of_halves_are_told_and_kept_and_their_number_must_stay(quadratic: Make, tmp_path: Path) -> None:
    task = quadratic()
    task = task.judged_by(Metric(task.distance, maximize=True, bounds=(0.0, 2.0), name="distance"))
    search = Search(task, 40, output_dir=tmp_path)
    (start,) = search.ask()
    for wrong in (((1.0, 0.5), (0.5,)), ((1.0, 0.5), 0.5)):
        with pytest.raises(ValueError, match=having("halves")):
            search.tell(start.id, 1.0, halves=wrong)  # type: ignore[arg-type]
    assert_refused(lambda: search.tell(start.id, 1.0, halves=((1.0, 0.5), (0.5, 3.0))), ValueError)
    search.tell(start.id, 1.0, halves=((1.0, 0.5), (0.5, 2.0)))
    kept = KeptEvaluations(tmp_path / "evaluations.json", task.metric).evaluations[0].evaluation
    assert kept == Evaluation(0.5, (0.5, 0.75), pairs=((0.5, 0.75), (0.75, 0.0)))
    (trial,) = search.ask()
    assert_refused(lambda: search.tell(trial.id, 1.0, halves=(1.0, 0.5)), ValueError, "1", "2")
    search.tell(trial.id, 1.0)  # the metric may be undefined on a half here


def test_what_can_be_no_answer_changes_nothing(quadratic: Make, tmp_path: Path) -> None:
    task = quadratic()
    task = task.judged_by(Metric(task.distance, maximize=False, bounds=(0.0, 50.0), name="distance"))
    search = Search(task, 40, output_dir=tmp_path)
    (start,) = search.ask()
    before = (tmp_path / "evaluations.json").read_bytes()
    for refused, names in (
        (lambda: search.tell("0", 1.0), ("id", "'0'")),
        (lambda: search.tell(7, 1.0), ("7", "0")),
        (lambda: search.tell(0, math.nan), ("nan",)),
        (lambda: search.tell(0, 51.0), ("bounds", "(0.0, 50.0)")),
        (lambda: search.tell(0, 1.0, halves=(1.0, 60.0)), ()),
        (lambda: search.tell(0, 1.0, halves=(1.0,)), ("halves", "None")),  # type: ignore[arg-type]
        (lambda: search.tell(0, 1.0, halves={1.0, 2.0}), ("halves", "None")),  # type: ignore[arg-type]
        (lambda: search.tell(0, 1.0, halves={1: 1.0, 2: 2.0}), ("halves", "None")),  # type: ignore[arg-type]
        (lambda: search.tell(0, None), ("None", "halves")),  # type: ignore[arg-type]
        (lambda: search.tell(0, "much"), ("much", "halves", "None")),  # type: ignore[arg-type]
        (lambda: search.tell(0, 1.0, noise=-1.0), ("noise", "-1.0")),
        (
            lambda: search.fail(0, "killed"),
            ("0", "killed"),
        ),
        (lambda: search.fail(0), ()),
        (lambda: search.give_up(0), ("0",)),
        (lambda: search.ask(0), ("n", "0", "1")),
    ):
        with pytest.raises(ValueError, match=having(*names)):
            refused()
    assert (tmp_path / "evaluations.json").read_bytes() == before
    assert search.open() == [start]
    search.tell(0, 1.0)
    search.tell(0, 1.0)
    for again in (lambda: search.tell(0, 2.0), lambda: search.fail(0), lambda: search.give_up(0)):
        with pytest.raises(ValueError, match=having("0")):
            again()
    # of the batch, but nobody has asked for it
    assert_refused(lambda: search.tell(2, 1.0), ValueError, "2")


def test_a_result_needs_the_least_queries(quadratic: Make) -> None:
    task = quadratic()
    search = Search(task, 30)
    least = GuidedTrustRegion().least_queries(4)
    assert_refused(search.result, BudgetError, least)
    for _ in range(least):
        (trial,) = search.ask(1)
        with trial.applied() as model:
            search.tell(trial.id, task.distance(model))
    early = search.result()
    assert sum(early.queries.values()) == least
    assert len(early.points) == least  # the open batch's answers among them
    tell_all(search, task.distance)
    whole = optimize_metric(quadratic(), queries=30, callback=Callback())
    assert str(search.result()) == str(whole)


def test_strategies_without_ask_and_tell_say_so(quadratic: Make) -> None:
    assert_refused(lambda: Search(quadratic(), 500, strategy=Recipe()), ValueError)
    assert_refused(lambda: Search(quadratic(), 500, strategy=CMAES), ValueError, "strategy", "CMAES")


@pytest.mark.parametrize(
    ("arguments", "error", "names"),
    [
        ({"queries": 6}, BudgetError, ("6", "queries", "GuidedTrustRegion")),
        ({"queries": 200}, BudgetError, ("200", "queries", "100")),
        ({"seed": -1}, ValueError, ("seed", "-1")),
        ({"guard_confidence": 1.0}, ValueError, ("guard_confidence", "1.0")),
        ({"maximize": True}, ValueError, ("maximize",)),
        ({"starts": {"a": Start(torch.zeros(3))}}, AdapterError, ("'a'", "phi", "(3,)")),
    ],
)
def test_bad_arguments_are_refused(quadratic: Make, arguments: Any, error: Any, names: tuple[str, ...]) -> None:
    task = quadratic()
    task = task.judged_by(Metric(task.distance, maximize=False, bounds=None, ledger=Ledger(100)))
    assert_refused(lambda: Search(task, **{"queries": 40} | arguments), error, *names)


def test_an_adapter_needs_a_direction() -> None:
    adapter = attach_input_bias(nn.Linear(2, 3), dim=4)
    assert_refused(lambda: Search(adapter, 40), ValueError, "maximize")
    assert_refused(lambda: Search(adapter.model, 40, maximize=True), ValueError, "FinetuneTask", "Adapter")
    assert_refused(lambda: Search(adapter, 40, maximize=True, strategy=GuidedES()), AdapterError)


def test_a_folder_has_one_writer_and_one_run(quadratic: Make, tmp_path: Path) -> None:
    search = Search(quadratic(), 40, output_dir=tmp_path)
    assert_refused(lambda: Search(quadratic(), 40, output_dir=tmp_path, resume=True), FileFormatError)
    search.tell(search.ask()[0].id, 1.0)
    search.close()
    assert_refused(lambda: Search(quadratic(), 40, output_dir=tmp_path), FileFormatError)
    assert_refused(
        lambda: Search(quadratic(), 40, seed=1, output_dir=tmp_path, resume=True), FileFormatError, "seed", "0", "1"
    )
    with Search(quadratic(), 40, output_dir=tmp_path, resume=True) as again:
        assert again.spent == 1
    assert not list(tmp_path.glob(f"*{UNFINISHED}"))


def test_a_search_that_was_closed_writes_no_more(quadratic: Make, tmp_path: Path) -> None:
    """Another one may have gone on in its folder."""
    first = Search(quadratic(), 40, output_dir=tmp_path)
    first.tell(first.ask()[0].id, 1.0)
    trials = first.ask(2)
    first.close()
    with Search(quadratic(), 40, output_dir=tmp_path, resume=True) as second:
        second.tell(second.open()[0].id, 2.0)
        assert_refused(lambda: first.tell(trials[1].id, 3.0), FileFormatError, "resume=True")
    with Search(quadratic(), 40, output_dir=tmp_path, resume=True) as third:
        assert third.spent == 2
        assert [trial.id for trial in third.open()] == [trials[1].id]


def test_a_result_is_there_after_the_search_was_closed(quadratic: Make, tmp_path: Path) -> None:
    task = quadratic()
    with Search(task, 6, strategy=RandomSearch(), output_dir=tmp_path) as search:
        tell_all(search, task.distance)
    result = search.result()
    assert torch.equal(task.adapter.phi, result.ends[result.chosen])
    assert (tmp_path / "adapter.safetensors").exists()
    with Search(quadratic(), 6, strategy=RandomSearch(), output_dir=tmp_path, resume=True) as again:  # it was left anew
        assert again.ask() == []
        assert_refused(search.result, FileFormatError)


def test_a_result_of_a_search_that_another_went_on_with_is_refused(quadratic: Make, tmp_path: Path) -> None:
    task = quadratic()
    first = Search(task, 8, strategy=RandomSearch(), output_dir=tmp_path)
    for told in range(6):
        first.tell(first.ask(1)[0].id, 1.0 + told)
    first.close()
    other = quadratic()
    with Search(other, 8, strategy=RandomSearch(), output_dir=tmp_path, resume=True) as second:
        second.tell(second.ask(1)[0].id, 0.5)
        second.result()
    kept = adapter_of(tmp_path)
    assert_refused(first.result, FileFormatError, "resume=True")
    assert not task.adapter.phi.any()
    assert adapter_of(tmp_path) == kept


def test_a_result_of_a_folder_that_is_gone_is_refused(quadratic: Make, tmp_path: Path) -> None:
    task = quadratic()
    with Search(task, 6, strategy=RandomSearch(), output_dir=tmp_path / "run") as search:
        tell_all(search, task.distance)
    shutil.rmtree(tmp_path / "run")
    assert_refused(search.result, FileFormatError)
    assert not (tmp_path / "run").exists()
    assert not task.adapter.phi.any()


def test_a_folder_that_can_not_be_read_is_left_to_others(quadratic: Make, tmp_path: Path) -> None:
    with Search(quadratic(), 40, output_dir=tmp_path) as search:
        search.tell(search.ask()[0].id, 1.0)
    (tmp_path / "evaluations.json").write_text("[]")
    for _ in range(2):  # not: by another process
        assert_refused(
            lambda: Search(quadratic(), 40, output_dir=tmp_path, resume=True), FileFormatError, "evaluations.json"
        )


def test_a_metric_that_is_told_can_not_be_called() -> None:
    search = Search(attach_input_bias(nn.Linear(2, 3), dim=4), 40, maximize=True, name="score")
    assert_refused(lambda: search.task.evaluate(search.task.origin(), "search"), MetricError, "search")


def test_a_told_value_is_on_disk_and_a_kill_loses_none(quadratic: Make, tmp_path: Path) -> None:
    search = Search(quadratic(), 40, output_dir=tmp_path)
    search.tell(search.ask()[0].id, 1.25)
    kept = json.loads((tmp_path / "evaluations.json").read_text())["evaluations"]
    assert [(each["id"], each["cost"], each["phi"]) for each in kept] == [(0, 1.25, [0.0] * 4)]


def test_gradients_from_elsewhere_shape_the_design() -> None:
    along = torch.tensor([[1.0, 0.0, 0.0, 0.0]])

    def design(**more: Any) -> torch.Tensor:
        search = Search(attach_input_bias(nn.Linear(2, 3), dim=4), 40, maximize=True, **more)
        search.tell(search.ask()[0].id, 1.0)
        return torch.stack([trial.phi for trial in search.ask(99)])

    plain, shaped = design(), design(gradients=along)
    assert float(shaped[:, 0].square().sum() / shaped.square().sum()) > 0.99
    assert float(plain[:, 0].square().sum() / plain.square().sum()) < 0.9
    for wrong, names in (
        (torch.ones(2, 4).numpy(), ("gradients",)),
        (torch.ones(3), ("gradients", "(3,)", "4")),
        (torch.ones(2, 3), ("gradients", "(2, 3)", "4")),
        (torch.zeros(2, 4), ("gradients", "0")),
    ):
        with pytest.raises(ValueError, match=having(*names)):
            design(gradients=wrong)
