"""The card in a run's folder: what hubs and readers are told of an adapter."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from metricopt_ext.adapters.start import Start
from metricopt_ext.methods.model_card import CARD, described, model_card
from metricopt_ext.methods.pipeline import optimize_metric
from metricopt_ext.runtime.progress import Callback


def test_a_finished_run_has_a_card_that_says_what_it_is(quadratic: Callable[..., Any], tmp_path: Path) -> None:
    task = quadratic()
    result = optimize_metric(task, queries=30, output_dir=tmp_path, callback=Callback())
    card = (tmp_path / CARD).read_text()
    _, head, body = card.split("---\n", 2)
    assert OmegaConf.create(head) == {
        "library_name": "metricopt-ext",
        "tags": ["metricopt-ext", "black-box-optimization"],
    }
    rows = [line for line in body.splitlines() if line.startswith("| as it ")]
    assert rows == [f"| as it was trained | {result.before:.4f} |", f"| as it is now | {result.after:.4f} |"]
    assert f"- **Queries**: 1 query for starts, {result.queries['search']} queries for search\n" in body
    assert "- **Guard**: none. Nothing told a gain from chance" in body
    assert 'mo.load_run(model, "FOLDER")' in body


def test_names_are_text_and_not_markup(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    task = task.judged_by(task.metric.with_settings(name="<b>a|b"))
    result = optimize_metric(task, queries=30, callback=Callback())
    card = model_card(replace(result, metric="<b>a|b"), task.adapter, task.metric)
    assert "<b>" not in card
    assert "| | &lt;b>a\\|b (lower is better) |" in card


def test_what_a_start_replaced_is_counted(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    name = next(iter(dict(task.adapter.model.named_parameters())))
    before = described(task.adapter)
    weights = {name: torch.zeros_like(task.adapter.base_state_dict()[name])}
    with task.adapter.applied(Start(task.origin(), {}, weights)):
        assert described(task.adapter) == f"{before}; 1 tensor replaced besides: {name}"
