"""What a function did to a task's model is undone after an error, and stays after none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers.refusals import assert_refused
from metricopt_ext.tasks.ledger import Ledger
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.tasks.undone import undone_if_cut_short


@pytest.mark.parametrize("error", [None, ValueError("own"), KeyboardInterrupt(), SystemExit(1), GeneratorExit()])
def test_a_model_is_as_it_was(quadratic: Callable[..., Any], error: BaseException | None) -> None:
    task = quadratic(dim=4)
    model, ledger = task.adapter.model, task.metric.ledger
    task.adapter.set_phi(torch.full((4,), 0.5))

    @undone_if_cut_short
    def work(task: FinetuneTask, number: int, *, more: int) -> int:
        task.adapter.set_phi(torch.ones(4))
        task.adapter.context.override = torch.zeros(4)
        task.metric.ledger = Ledger()
        model.eval()
        if error is not None:
            raise error
        return number + more

    if error is None:
        assert work(task, 1, more=2) == 3
    else:
        with pytest.raises(type(error)):
            work(task, 1, more=2)
    kept = error is None
    assert task.adapter.phi.tolist() == [1.0 if kept else 0.5] * 4
    assert (task.adapter.context.override is None) != kept
    assert (task.metric.ledger is ledger) != kept
    assert model.training != kept


def test_what_is_no_task_is_refused() -> None:
    assert_refused(lambda: undone_if_cut_short(lambda task: None)(3), TypeError, "task", "3", "FinetuneTask")
