"""The card in a run's folder: what hubs and readers are told of an adapter."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from metricopt_ext.methods.model_card import CARD, model_card
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
    assert (
        f"{result.before:.4f} -\\> {result.after:.4f}" in body or f"{result.before:.4f} -> {result.after:.4f}" in body
    )
    assert f"queries: 30 (starts 1, search {result.queries['search']})" in body
    assert "unguarded" in body
    assert 'mo.load_run(model, "FOLDER")' in body


def test_names_are_text_and_not_markup(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    task = task.judged_by(task.metric.with_settings(name="<b>a|b"))
    result = optimize_metric(task, queries=30, callback=Callback())
    card = model_card(replace(result, metric="<b>a|b"), task.adapter)
    assert "<b>" not in card
    assert "tuned for &lt;b>a\\|b" in card
