"""Ask and tell: batches, failures, folders, the model at a trial, and what is refused; see also testers.strategy."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from helpers.refusals import assert_named, assert_refused
from metricopt_ext import Metric, Search, Start, attach_film
from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_input_bias
from metricopt_ext.errors import AdapterError, BudgetError, FileFormatError
from metricopt_ext.methods.paper.recipe import Recipe
from metricopt_ext.search.direct import GuidedES, RandomSearch
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.utils.files import UNFINISHED

Make = Callable[..., Any]


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


def test_noise_reaches_the_guard(quadratic: Make) -> None:
    search = Search(quadratic(), 40)
    while trials := search.ask(8):
        for trial in trials:
            search.tell(trial.id, float((trial.phi - 1).square().sum()), noise=0.01)
    result = search.result()
    assert result.guard == "repeats"
    assert result.chance == pytest.approx(2**0.5 * 0.01)


def test_a_result_needs_the_least_queries(quadratic: Make) -> None:
    task = quadratic()
    search = Search(task, 30)
    least = GuidedTrustRegion().least_queries(4)
    assert_refused(search.result, BudgetError, least)
    for told in range(least):
        (trial,) = search.ask(1)
        search.tell(trial.id, 1.0 + told)
    early = search.result()
    assert sum(early.queries.values()) == len(early.points) == least  # the open batch's answers among them


def test_a_start_that_failed_before_the_trained_model_was_told_is_no_result_yet(quadratic: Make) -> None:
    task = quadratic()
    search = Search(task, 30, starts={"other": Start(task.goal)})
    search.ask(2)
    search.fail(1)
    assert_refused(search.result, BudgetError, GuidedTrustRegion().least_queries(4, 2) - 1)


def test_what_a_search_can_not_work_with_leaves_no_folder(tmp_path: Path) -> None:
    adapter = attach_film(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), dim=2)
    refused = lambda: Search(adapter, maximize=True, strategy=GuidedES(), output_dir=tmp_path / "out")  # noqa: E731
    assert_refused(refused, AdapterError)
    assert not (tmp_path / "out").exists()


def test_a_folder_has_one_writer_and_one_run(quadratic: Make, tmp_path: Path) -> None:
    search = Search(quadratic(), 40, output_dir=tmp_path)
    assert_refused(lambda: Search(quadratic(), 40, output_dir=tmp_path, resume=True), FileFormatError)
    search.tell(search.ask()[0].id, 1.0)
    search.close()
    assert_refused(lambda: Search(quadratic(), 40, output_dir=tmp_path), FileFormatError)
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
        for call in (lambda: first.tell(trials[1].id, 3.0), first.result):
            assert_refused(call, FileFormatError, "resume=True")
    with Search(quadratic(), 40, output_dir=tmp_path, resume=True) as third:
        assert third.spent == 2
        assert [trial.id for trial in third.open()] == [trials[1].id]


def test_gradients_from_elsewhere_shape_the_design() -> None:
    along = torch.tensor([[1.0, 0.0, 0.0, 0.0]])

    def design(alike: bool, **more: Any) -> torch.Tensor:
        search = Search(attach_input_bias(nn.Linear(2, 3), dim=4), 40, maximize=True, **more)
        search.tell(search.ask()[0].id, 1.0)
        batches = [search.ask(99)]
        while batches[-1]:
            for trial in batches[-1]:
                search.tell(trial.id, float(trial.phi.sum()))
            batches.append(search.ask(99))
        assert any("without a loss" in line for line in search.result().lines()) == alike
        return torch.stack([trial.phi for trial in batches[0]])

    plain, shaped = design(True), design(False, gradients=along)
    assert float(shaped[:, 0].square().sum() / shaped.square().sum()) > 0.99
    assert float(plain[:, 0].square().sum() / plain.square().sum()) < 0.9


def test_checkpoints_hold_the_merged_model(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(2))
    x = torch.randn(2, 3, 5, 5)
    model.eval()(x)
    search = Search(attach_film(model, "1", dim=4), 20, maximize=True)
    search.tell(search.ask()[0].id, 0.5)
    trial, other = search.ask(3)[1:]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with trial.applied() as applied, torch.no_grad():
        expected = applied(x)
        with pytest.raises(AdapterError) as caught, other.applied():  # one at a time
            pass
        assert_named(caught, "3", "2")
        copied = Adapter(copy.deepcopy(model))  # which is at no trial
    assert copied.context.trial is None
    for name in ("trial.safetensors", "trial.pth"):
        trial.checkpoint(tmp_path / name)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    state = torch.load(tmp_path / "trial.pth", weights_only=True)
    assert list(state) == [key for key in before if "metricopt" not in key]
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, 2)).eval()
    plain.load_state_dict(state)
    assert torch.allclose(plain(x), expected, atol=1e-5)
    stored = load_file(tmp_path / "trial.safetensors")
    assert all(torch.equal(value, state[key]) for key, value in stored.items())


# --- What is told, by hand -----------------------------------------------------------------------------------------


def answer(search: Search, costs: Callable[[int], float | None]) -> None:
    """Tell a cost for each trial by its number; None is a failure."""
    for trial in search.ask(99):
        cost = costs(trial.id)
        search.fail(trial.id) if cost is None else search.tell(trial.id, cost)


def test_a_failure_is_as_bad_as_the_worst_of_its_batch_or_before(quadratic: Make) -> None:
    search = Search(quadratic(), 6, strategy=RandomSearch())
    answer(search, lambda id: 1.0)
    answer(search, {1: None, 2: 0.5, 3: 7.0, 4: 2.0, 5: 3.0}.__getitem__)
    search.fail(1)  # said twice, it counts once
    assert search.result().costs == (1.0, 7.0, 0.5, 7.0, 2.0, 3.0)
    assert (search.spent, search.failed) == (6, 1)


def test_what_is_given_up_is_replaced(quadratic: Make) -> None:
    search = Search(quadratic(), 6, strategy=RandomSearch())
    answer(search, lambda id: 1.0)
    for trial in search.ask(99):
        search.give_up(trial.id) if trial.id == 2 else search.tell(trial.id, float(trial.id))
    assert [trial.id for trial in search.ask(99)] == [6]
    search.tell(6, 0.25)
    assert search.result().costs == (1.0, 1.0, 3.0, 4.0, 5.0, 0.25)


def test_searches_of_one_task_may_divide_its_data_differently(quadratic: Make) -> None:
    task = quadratic()
    for pairs in (((1.0, 1.5),), ((1.0, 1.5), (0.5, 2.0))):
        search = Search(task, 40)
        search.ask()
        search.tell(0, 1.25, halves=pairs)


# --- What is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "names"),
    [
        ({"queries": 200}, BudgetError, ("200", "queries", "100")),
        ({"maximize": True}, ValueError, ("maximize",)),
        ({"subject_to": {"along": ">= 0"}}, ValueError, ("subject_to",)),
        ({"queries": 90, "strategy": Recipe()}, ValueError, ()),
        ({"queries": None}, ValueError, ("queries", "None")),
        ({"guard_confidense": 0.9}, TypeError, ("guard_confidense",)),
    ],
)
def test_bad_arguments_are_refused(quadratic: Make, arguments: Any, error: Any, names: tuple[str, ...]) -> None:
    task = quadratic(budget=100)
    assert_refused(lambda: Search(task, **{"queries": 40} | arguments), error, *names)


def test_an_adapter_alone_needs_a_direction_and_gradients_of_phi() -> None:
    adapter = attach_input_bias(nn.Linear(2, 3), dim=4)
    for arguments, error, names in (
        ({}, ValueError, ("maximize",)),
        ({"maximize": True, "strategy": GuidedES()}, AdapterError, ()),
        ({"maximize": True, "gradients": torch.ones(2, 3)}, ValueError, ("gradients", "(2, 3)", "4")),
        ({"maximize": True, "gradients": torch.zeros(2, 4)}, ValueError, ("gradients", "0")),
    ):
        given: Any = arguments
        assert_refused(lambda given=given: Search(adapter, 40, **given), error, *names)
    assert_refused(lambda: Search(adapter.model, 40, maximize=True), ValueError, "FinetuneTask", "Adapter")


def test_what_can_be_no_answer_changes_nothing(quadratic: Make, tmp_path: Path) -> None:
    task = quadratic()
    task = task.judged_by(Metric(task.distance, maximize=False, bounds=(0.0, 50.0), name="distance"))
    search: Any = Search(task, 40, output_dir=tmp_path)
    (start,) = search.ask()
    before = (tmp_path / "log.jsonl").read_bytes()
    for refused, names in (
        (lambda: search.tell("0", 1.0), ("id", "'0'")),
        (lambda: search.tell(7, 1.0), ("7", "0")),
        (lambda: search.tell(0, math.nan), ("nan",)),
        (lambda: search.tell(0, 51.0), ("bounds", "(0.0, 50.0)")),
        (lambda: search.tell(0, 1.0, halves=(1.0, 60.0)), ()),
        (lambda: search.tell(0, 1.0, halves=(1.0,)), ("halves", "None")),
        (lambda: search.tell(0, 1.0, halves=((1.0, 0.5), 0.5)), ("halves",)),
        (lambda: search.tell(0, 1.0, halves=(math.nan, 1.0)), ("nan",)),
        (lambda: search.tell(0, 1.0, halves="none"), ("none",)),
        (lambda: search.tell(0, 1.0, outcomes={"f1": (0.5, (math.nan, 0.5))}), ("f1", "nan")),
        (lambda: search.tell(0, 1.0, outcomes={"distance": 0.5}), ("distance",)),
        (lambda: search.tell(0, None), ("None", "halves")),
        (lambda: search.tell(0, 1.0, noise=-1.0), ("noise", "-1.0")),
        (lambda: search.fail(0, "killed"), ("0", "killed")),
        (lambda: search.give_up(0), ("0",)),
        (lambda: search.ask(0), ("n", "0", "1")),
    ):
        assert_refused(refused, ValueError, *names)
    assert (tmp_path / "log.jsonl").read_bytes() == before
    assert search.open() == [start]
    search.tell(0, 1.0, halves=((1.0, 0.5), (0.5, 2.0)))
    search.tell(0, 1.0, halves=((1.0, 0.5), (0.5, 2.0)))
    for again in (lambda: search.tell(0, 2.0), lambda: search.fail(0), lambda: search.give_up(0)):
        assert_refused(again, ValueError, "0")
    assert_refused(lambda: search.tell(2, 1.0), ValueError, "2")  # of the batch, but nobody has asked for it
    (trial,) = search.ask()
    assert_refused(lambda: search.tell(trial.id, 1.0, halves=(1.0, 0.5)), ValueError, "1", "2")  # of the pairs
    search.tell(trial.id, 1.0)  # the metric may be undefined on a half here
