"""The tool that measures costs: that both sides do the work, and that the verdicts follow from the ratios."""

import json
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import measure_cost as tool
from metricopt_ext.search.optimizer import MetricOpt

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "measure_cost.py"
TINY_STEP: dict[str, Any] = {"model": "small_cnn", "pixels": 6, "batch_size": 3, "dim": 5}
TINY_FIT: dict[str, Any] = {"points": 40, "dim": 3}
TINY_POPULATION: dict[str, Any] = {"population": 4, "features": 7, "batch_size": 3, "dim": 5}
REPEATS = 6


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[int], Any]]:
    """Keep what is timed, to call it again."""
    kept: dict[str, Callable[[int], Any]] = {}
    take_turns = tool.take_turns

    def keep(timed: dict[str, Callable[[int], Any]], repeats: int) -> dict[str, np.ndarray]:
        kept.update(timed)
        return take_turns(timed, repeats)

    monkeypatch.setattr(tool, "take_turns", keep)
    return kept


def test_sides_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, called = [0.0], []
    monkeypatch.setattr(tool.time, "perf_counter", lambda: clock[0])

    def side(name: str, seconds: float, turn: int) -> None:
        called.append(f"{name}{turn}")
        clock[0] += seconds + turn

    taken = tool.take_turns({"a": partial(side, "a", 0.25), "b": partial(side, "b", 0.5)}, 2)
    first = tool.WARM_UP
    assert called == [f"{name}{turn}" for turn in range(first + 2) for name in "ab"]
    np.testing.assert_allclose(taken["a"], [first + 0.25, first + 1.25])
    np.testing.assert_allclose(taken["b"], [first + 0.5, first + 1.5])


@pytest.mark.parametrize("n", [6, 7, 30, 100])
def test_interval_covers_the_median_in_95_of_100_cases(n: int) -> None:
    ratios = np.random.default_rng(n).lognormal(size=n)
    low, high = tool.Ratio("a", "b", ratios.tolist()).interval
    # Between the k-th smallest and the k-th largest is the median unless fewer than k fall on one side of it.
    tails = [2 * sum(math.comb(n, i) for i in range(k)) / 2**n for k in range(n // 2 + 1)]
    k = max(k for k, tail in enumerate(tails) if tail <= 0.05)
    assert k >= 1
    np.testing.assert_allclose([low, high], np.sort(ratios)[[k - 1, n - k]])


@pytest.mark.parametrize(
    ("target", "low", "high", "cells"),
    [
        ({}, 0.5, 2.0, ["", ""]),
        ({"at_most": 1.1}, 1.0, 1.09, ["<= 1.10", "met"]),
        ({"at_most": 1.1}, 1.0, 1.12, ["<= 1.10", "missed"]),  # the median meets it, the interval does not
        ({"at_least": 5}, 5.1, 9.0, [">= 5.00", "met"]),
        ({"at_least": 5}, 4.9, 9.0, [">= 5.00", "missed"]),
    ],
)
def test_verdict(target: dict[str, float], low: float, high: float, cells: list[str]) -> None:
    ratios = np.linspace(low, high, 7)
    ratio = tool.Ratio("new", "old", ratios.tolist(), **target)
    centre = (low + high) / 2
    assert ratio.row() == ["new", "old", f"{centre:.3f}", f"[{low:.3f}, {high:.3f}]", *cells]
    assert ratio.met == {"": None, "met": True, "missed": False}[cells[1]]


@pytest.mark.outcome
def test_the_step_that_is_timed_follows_f(monkeypatch: pytest.MonkeyPatch, sides: dict[str, Any]) -> None:
    attach_film, fit, adapters, fs = tool.attach_film, tool.fitted_value_function, [], []
    monkeypatch.setattr(tool, "attach_film", lambda *a, **k: adapters.append(attach_film(*a, **k)) or adapters[-1])
    monkeypatch.setattr(tool, "fitted_value_function", lambda dim: fs.append(fit(dim)) or fs[-1])
    table = tool.measure_step(REPEATS, **TINY_STEP)
    (adapter,), (f,) = adapters, fs
    sgd, alone, metricopt = sides
    assert list(table.seconds) == list(sides)
    assert [(row.of, row.over, row.at_most) for row in table.rows] == [(metricopt, sgd, 1.1), (alone, sgd, None)]
    assert all(len(row.ratios) == REPEATS and min(row.ratios) > 0 for row in table.rows)

    ends = {}
    for name in (sgd, metricopt):
        sides[name](0)
        ends[name] = adapter.phi.detach().clone()
        gradient = adapter.phi.grad.clone()
    torch.testing.assert_close(ends[sgd], -0.1 * gradient)
    by_f = ends[metricopt] + 0.3 * 0.1 * gradient  # what the loss did not do
    assert by_f.norm() == pytest.approx(0.15 * float(f.radius), rel=0.2)
    assert f(by_f) < f(torch.zeros(5))  # by 0.57 ± 0.05 of the error of a constant
    sides[alone](0)
    assert f(adapter.phi) < f(ends[metricopt])


@pytest.mark.outcome
def test_an_f_that_is_not_followed_is_an_error() -> None:
    f, gradient = tool.fitted_value_function(5), torch.ones(5)
    start = torch.zeros(5)
    assert f.trusted
    tool.check_followed(f, start, gradient)
    phi = nn.Parameter(start.clone())
    phi.grad = gradient
    MetricOpt([phi], f, lr=0.0).step()
    assert phi.norm() > 0.01 * f.radius
    assert not start.any()
    f.quality = None
    with pytest.raises(RuntimeError, match="did not follow f, whose quality is None"):
        tool.check_followed(f, start, gradient)


def test_all_populations_find_the_same_gradients(monkeypatch: pytest.MonkeyPatch, sides: dict[str, Any]) -> None:
    table = tool.measure_population(REPEATS, **TINY_POPULATION)
    assert list(table.seconds) == list(sides)
    together, *others = sides
    assert [(row.of, row.over, row.at_least) for row in table.rows] == [(name, "together", 5) for name in others]
    assert all(len(row.ratios) == REPEATS and min(row.ratios) > 0 for row in table.rows)

    passes: list[str] = []
    vmap = torch.func.vmap
    monkeypatch.setattr(torch.func, "vmap", lambda function: passes.append("vmap") or vmap(function))
    gradients: dict[str, Tensor] = {}
    for name, side in sides.items():
        passes.clear()
        gradients[name] = side(3)
        assert passes == (["vmap"] if name == together else []), name
    for name in others:
        assert gradients[name].shape == (4, 5)
        assert (gradients[name].norm(dim=1) > 0).all()
        torch.testing.assert_close(gradients[name], gradients[together])


def test_sides_that_disagree_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    gradient = tool.plain_gradient
    monkeypatch.setattr(tool, "plain_gradient", lambda *arguments: 1.5 * gradient(*arguments))
    with pytest.raises(RuntimeError, match=r"plain.*computed different gradients"):
        tool.measure_population(REPEATS, **TINY_POPULATION)


def test_both_fits_predict_the_costs(sides: dict[str, Any]) -> None:
    table = tool.measure_fit(REPEATS, **TINY_FIT)
    assert list(table.seconds) == list(sides) == ["GPLearner", "gpytorch"]
    assert [(row.of, row.over) for row in table.rows] == [("GPLearner", "gpytorch")]
    phi, cost = tool.queried(**TINY_FIT)
    for side in sides.values():
        assert (side(0)(phi).double() - cost).var() < cost.var() / 10  # 0.004 of it
        assert side(0)(phi[:7] + 0.1).shape == (7,)


def test_a_fit_that_explains_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "gpytorch_fit", lambda phi, cost: lambda x: x.sum(1) * 0)
    with pytest.raises(RuntimeError, match=r"gpytorch explains.*0% of the variance"):
        tool.measure_fit(REPEATS, **TINY_FIT)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, sizes in (
        ("measure_step", TINY_STEP),
        ("measure_population", TINY_POPULATION),
        ("measure_fit", TINY_FIT),
    ):
        monkeypatch.setattr(tool, name, partial(getattr(tool, name), **sizes))


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", ["measure_cost.py", *map(str, arguments)])
    tool.main()


@pytest.mark.usefixtures("tiny")
def test_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(monkeypatch, "--output-dir", tmp_path / "new", "--repeats", REPEATS)  # missed targets raise nothing
    content = json.loads((tmp_path / "new" / "cost.json").read_text())
    assert (content["threads"], content["repeats"]) == (1, REPEATS)
    assert content["processor"] == tool.processor() != ""
    assert content["versions"]["torch"] in torch.__version__
    text, printed = (tmp_path / "new" / "cost.md").read_text(), capsys.readouterr().out
    ratios = [ratio for table in content["tables"] for ratio in table["ratios"]]
    assert [ratio["at_most"] or ratio["at_least"] for ratio in ratios] == [1.1, None, 5, 5, 5, None]
    for ratio in ratios:
        low, high = ratio["interval"]
        assert 0 < low <= ratio["ratio"] <= high
        verdict = {None: "", True: "met", False: "missed"}[ratio["met"]]
        cells = f"| {ratio['of']} | {ratio['over']} | {ratio['ratio']:.3f} | [{low:.3f}, {high:.3f}] |"
        assert [line.endswith(f"| {verdict} |") for line in text.splitlines() if line.startswith(cells)] == [True]
        assert f"{ratio['ratio']:.3f}" in printed
    for table in content["tables"]:
        assert f"## {table['title']}\n" in text
        assert all(seconds > 0 for seconds in table["seconds"].values())
    assert f"--threads 1 --repeats {REPEATS}`" in text
    assert " ms" not in text


@pytest.mark.usefixtures("tiny")
def test_failures_end_with_a_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        (["--repeats", "5"], "--repeats is 5; it must be at least 6"),
        (["--threads", "0"], "--threads is 0; it must be at least 1"),
    ):
        with pytest.raises(SystemExit, match="2"):
            call(monkeypatch, "--output-dir", tmp_path, *arguments)
        assert message in capsys.readouterr().err
    monkeypatch.setattr(tool, "check_followed", lambda *arguments: (_ for _ in ()).throw(RuntimeError("no\nf")))
    with pytest.raises(SystemExit, match="error: no f"):
        call(monkeypatch, "--output-dir", tmp_path, "--repeats", str(REPEATS))
