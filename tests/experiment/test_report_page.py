"""A run's page has the digits of report.md, says what the guard did, and shows the pictures and what to do next."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from metricopt_ext.experiment.method import METHODS
from metricopt_ext.experiment.page import Page
from metricopt_ext.experiment.report import Report
from metricopt_ext.experiment.report_page import CAPTIONS, report_page
from metricopt_ext.experiment.report_text import markdown
from metricopt_ext.experiment.style import new_figure, save_figure

NUMBER = re.compile(r"[+-]?\d+\.\d+")


@pytest.fixture
def page(tmp_path: Path) -> Callable[[Report], Page]:
    """Make the page of a report whose run drew one picture of all seeds and one of the first."""

    def make(report: Report) -> Page:
        (tmp_path / "seed-4").mkdir(exist_ok=True)
        drawn = [save_figure(new_figure(3, 2)[0], tmp_path / name) for name in ("methods.png", "seed-4/examples.png")]
        return report_page(report, tmp_path, drawn[:1], "tuned.safetensors")

    return make


def markdown_tables(text: str) -> list[list[list[str]]]:
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("| ")]
    rows = [[line[2:-2].split(" | ") for line in block] for block in blocks]
    return [[[cell.replace("**", "") for cell in row] for row in (header, *rest)] for header, _, *rest in rows]


def test_the_page_has_the_digits_of_the_markdown(report: Callable[..., Report], page: Any, html: Any) -> None:
    made = report()
    for record in made.records:
        record.queries.update(starts=3, search=record.outcomes["metricopt"][-1].queries_total - 3)
    text, seen = markdown(made), html(page(made).html())
    tables = markdown_tables(text)
    assert len(tables) == 3  # methods, queries, predictors
    assert [table for table in seen.tables if table in tables] == [tables[0], tables[2], tables[1]]
    assert tables[1][0] == ["seed", "starts", "search", "total", "seconds"]
    assert seen.texts("p")[0] == made.verdict() == text.splitlines()[2]
    for line in made.notes():
        assert line in seen.texts("li")
    shown = " ".join([*seen.texts("p"), *seen.texts("li"), *(" ".join(row) for table in seen.tables for row in table)])
    folded = set(made.to_json()["versions"].values())
    assert set(NUMBER.findall(text)) <= set(NUMBER.findall(shown))
    assert set(NUMBER.findall(shown)) - set(NUMBER.findall(text)) <= set(NUMBER.findall(" ".join(folded)))


def test_the_order_is_that_of_a_reader_s_questions(report: Callable[..., Report], page: Any, html: Any) -> None:
    seen = html(page(report()).html())
    seen.check()
    headings = ["Methods", "Gains", "Plots", "Quality of f", "Queries", "Settings", "Environment", "What to do next"]
    assert seen.texts("h2") == headings
    assert seen.texts("h1") == ["classification/toy: accuracy (higher is better)"]
    captions = [CAPTIONS["methods"], f"{CAPTIONS['examples']} Seed 4."]
    assert [text for text in seen.texts("figcaption") if text in captions] == captions
    assert len([name for name, _ in seen.elements if name == "img"]) == 2


@pytest.mark.parametrize("maximize", [True, False])
def test_the_best_of_validation_and_test_are_marked(
    report: Callable[..., Report], page: Any, html: Any, maximize: bool
) -> None:
    """Means that look alike are alike."""
    tests = {name: [0.5, 0.5, 0.5] for name in METHODS}
    best = 0.6 if maximize else 0.4
    tests["metricopt"] = [best, best, best]
    tests["cma_es"] = [best, best, best + 1e-5]
    made = report(tests, maximize=maximize)
    assert made.best("test") == {"metricopt", "cma_es"}
    extreme = "ala_focal" if maximize else "pretrained"  # the fixture's trend, last and first
    assert made.best("validation") == {extreme}
    marked = html(page(made).html()).texts("strong")
    assert sorted(cell[:6] for cell in marked) == sorted([f"{best:.4f}"] * 2 + [marked_mean(made, extreme)])


def marked_mean(report: Report, name: str) -> str:
    values = report.values(name, "validation")
    return f"{sum(values) / len(values):.4f}"


def kept(report: Report, *names: str) -> Report:
    records = [replace(record, kept=name) for record, name in zip(report.records, names, strict=True)]
    return replace(report, records=records)


def test_the_verdict_says_what_the_guard_did(report: Callable[..., Report]) -> None:
    tests = {"pretrained": [0.5, 0.5, 0.5], "metricopt": [0.6, 0.62, 0.61]}
    made = report(tests)
    started = "accuracy (higher is better): 0.5000 ±0.0000 → 0.6100 ±0.0100 on test and "
    assert made.verdict().startswith(started)
    assert "accepted the change in 2 of 3 seeds and left the model as it was in 1. The gain on test" in made.verdict()
    assert "+0.1100 (95% interval [+0.0852, +0.1348]), significant at 5%. " in made.verdict()
    both = kept(made, "metricopt", "search", "batchnorm")
    assert "accepted the change in 3 of 3 seeds. The gain" in both.verdict()
    unsure = report({"pretrained": [0.5, 0.5, 0.5], "metricopt": [0.4, 0.62, 0.61]})
    assert unsure.verdict().partition(" The best method on test")[0].endswith(", not significant at 5%.")
    worse = report({"pretrained": [0.5, 0.5, 0.5], "metricopt": [0.4, 0.42, 0.41]})
    assert "-0.0900 (95% interval [-0.1148, -0.0652]), a loss, significant at 5%. " in worse.verdict()
    assert both.to_json()["guard"] == "halves"
    for record in both.records:
        object.__setattr__(record, "split_half", None)
        object.__setattr__(record, "chance", None)
        object.__setattr__(record, "guard", "none")
    assert "unguarded, so any gain was kept in 3 of 3 seeds: nothing tells" in both.verdict()
    assert (both.to_json()["guard"], both.to_json()["chance"]) == ("none", [None] * 3)


def test_a_refused_end_is_said_in_the_verdict_and_nothing_is_to_be_merged(
    report: Callable[..., Report], page: Any, html: Any
) -> None:
    refused = kept(report({name: [0.5, 0.5, 0.5] for name in ("pretrained", "metricopt")}), "start", "start", "start")
    seen = html(page(refused).html())
    why = "The guard left the model as it was in every seed, as no gain on validation exceeded what chance explains. "
    assert why in seen.texts("p")[0]
    assert not [text for text in seen.texts("code") if "merge" in text]
    assert any("The guard kept no change in any seed" in text for text in seen.texts("p"))
    one = kept(report(seeds=1), "start")
    assert "left the model as it was, as no gain" in one.verdict()


@pytest.mark.parametrize("maximize", [True, False])
def test_the_verdict_names_the_best_on_test(report: Callable[..., Report], maximize: bool) -> None:
    sign = 1 if maximize else -1
    tests = {name: [0.5, 0.5, 0.5] for name in METHODS}
    tests["metricopt"] = [0.5 + sign * gain for gain in (0.1, 0.12, 0.11)]
    assert report(tests, maximize=maximize).verdict().endswith(". No other method that ran is better on test.")
    tests["cma_es"] = [0.5 + sign * gain for gain in (0.2, 0.22, 0.21)]
    said = report(tests, maximize=maximize).verdict()
    best = f"The best method on test is CMA-ES on the metric with {0.5 + sign * 0.21:.4f}; MetricOpt's gain over it is"
    assert said.endswith(f"{best} -0.1000 (95% interval [-0.1000, -0.1000]), a loss, significant at 5%.")


def test_one_seed_cannot_tell_chance(report: Callable[..., Report]) -> None:
    single = kept(report({"pretrained": [0.5], "metricopt": [0.75]}, seeds=1), "search")
    assert "accuracy (higher is better): 0.5000 → 0.7500 on test and " in single.verdict()
    assert "+0.2500, from one seed, so its significance is unknown. " in single.verdict()


def test_what_to_do_next_takes_a_seed_that_changed_and_follows_a_trusted_f_alone(
    report: Callable[..., Report], page: Any, html: Any, tmp_path: Path
) -> None:
    made = report()  # its first seed was left as it was, the second has an f to trust
    (code,) = (text for text in html(page(made).html()).texts("code") if "import metricopt_ext" in text)
    compile(code, "next", "exec")
    assert "seed-5/tuned.safetensors" in code
    assert 'mo.load_value_function("seed-5/value_function.safetensors")' in code
    assert "buffers" not in code
    assert "seed-4" not in code
    first = kept(made, "search", "start", "start")
    (code,) = (text for text in html(page(first).html()).texts("code") if "import metricopt_ext" in text)
    assert "load_value_function" not in code  # poor
    second = kept(made, "start", "search", "start")
    (code,) = (text for text in html(page(second).html()).texts("code") if "import metricopt_ext" in text)
    assert 'mo.load_run(model, "seed-5")' in code


def test_settings_and_names_are_escaped_and_whole(report: Callable[..., Report], page: Any, html: Any) -> None:
    name = "<script>alert(1)</script>"
    made = replace(report(), task=name, metric=name)
    made.config.update(classes=[name, "ü"])
    text = page(made).html()
    seen = html(text)
    seen.check()
    assert "<script" not in text
    assert seen.texts("h1") == [f"{name}: {name} (higher is better)"]
    (settings,) = (each for each in seen.texts("code") if each.startswith("{"))
    assert json.loads(settings) == made.config
    assert "ü" in settings


def test_a_run_without_f_has_a_page(report: Callable[..., Report], page: Any, html: Any) -> None:
    made = report()
    for record in made.records:
        for name, value in (("quality", None), ("candidates", {})):
            object.__setattr__(record, name, value)
    seen = html(page(made).html())
    assert "There is no f: the metric never varied." in seen.texts("p")
    assert "value function in use" not in markdown(made)


def test_what_it_cost_elsewhere_has_a_section(report: Callable[..., Report], page: Any, html: Any) -> None:
    made = report()
    assert "Elsewhere" not in html(page(made).html()).texts("h2")
    also = {"recall[a]": {"validation": (0.5, 0.25), "test": (0.4, 0.125)}}
    made = replace(made, records=[replace(record, also=also, holding=2) for record in made.records])
    seen = html(page(made).html())
    seen.check()
    assert "Elsewhere" in seen.texts("h2")
    (table,) = [each for each in seen.tables if each[0] == ["quantity", "validation", "test", "subject to"]]
    assert table == [["quantity", "validation", "test", "subject to"], *made.elsewhere()]
    assert made.on_constraints()[0] in seen.texts("li")
