"""The ablation tool on a few variants of a tiny run."""

import json
import math
import warnings
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

import ablate_recipe as tool
from metricopt_ext.errors import FileFormatError
from metricopt_ext.utils.config import load_config
from metricopt_ext.utils.machine import Machine
from metricopt_ext.value.value_function import RidgeValueFunction

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "configs" / "classification" / "digits.yaml"
TINY = [
    *("finetune.steps=6", "method.evals=3", "method.rounds=2", "method.folds=2", "method.trials=0", "queries=60"),
    *("model.epochs=1", "adapter.dim=4", "population=8", "device=cpu", "method.learners=[ridge]", "workers=1"),
]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave only a few quick variants, one of each way to run them."""
    keep = {"FITS": ["ridge alone", "labels: linear"], "STEPS": ["ES, 3 pairs", "no trust radius"], "RUNS": ["K = 2"]}
    for table, names in keep.items():
        monkeypatch.setattr(tool, table, {name: getattr(tool, table)[name] for name in names})


def test_every_variant_is_a_change_that_can_be_run() -> None:
    recipe = load_config(tool.ClassificationConfig, DIGITS, ["method.name=recipe"]).build_strategy()
    for name, change in tool.FITS.items():
        assert tool.replace(recipe, **change) != recipe, name
    for name, overrides in tool.RUNS.items():
        load_config(tool.ClassificationConfig, DIGITS, ["method.name=recipe", *overrides]).check()
        assert overrides, name
    names = [*tool.FITS, *tool.STEPS, *tool.RUNS]
    assert len(set(names)) == len(names)


def test_a_table_of_paired_differences(few: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = [str(DIGITS), *TINY]
    content = tool.ablate([task], tmp_path, range(3, 5), workers=1)
    (of_task,) = content["tasks"].values()
    variants = of_task["variants"]
    assert list(variants) == ["default", "ridge alone", "labels: linear", "ES, 3 pairs", "no trust radius", "K = 2"]
    for a, b in zip(variants["ridge alone"], variants["default"], strict=True):
        assert a["spearman"] == b["spearman"]  # the tiny run has no other
    assert variants["labels: linear"] != variants["default"]
    assert [row["queries"] for row in variants["K = 2"]] != [row["queries"] for row in variants["default"]]
    assert all(row["spearman"] is None for row in variants["ES, 3 pairs"])
    ranks, gains = tool.compared(content, "shifted digits accuracy", "K = 2")
    assert gains == [a["test"] - b["test"] for a, b in zip(variants["K = 2"], variants["default"], strict=True)]
    assert len(ranks) == 2
    text = (tmp_path / "ablations.md").read_text()
    assert f"| K = 2 | {variants['K = 2'][0]['queries']} | {tool.interval(ranks)} | {tool.interval(gains, 4)} |" in text
    assert f"Computed on {Machine.current(torch.device('cpu'), 1)}; other processors" in text
    assert json.loads((tmp_path / "ablations.json").read_text())["tasks"] == content["tasks"]
    simplest = [row["trivial"] for row in variants["default"]]
    means = {name: sum(of_seed[name] for of_seed in simplest) / 2 for name in simplest[0]}
    assert (
        f" (best trivial predictor, {max(means, key=means.get).replace('_', ' ')}: {max(means.values()):.4f})" in text
    )
    assert not any(row["trivial"] for row in variants["K = 2"])
    assert (tmp_path / "ablations.png").stat().st_size > 10_000

    monkeypatch.setattr(tool, "whole", lambda *_: pytest.fail("ran again what is on file"))
    monkeypatch.setattr(tool, "fitted", lambda *_: pytest.fail("fitted again what is on file"))
    assert tool.ablate([task], tmp_path, range(3, 5), workers=1) == content
    with pytest.raises(FileFormatError, match=r"finetune\.lr was 0\.05, now 0\.01;"):
        tool.ablate([[*task, "finetune.lr=0.01"]], tmp_path, range(3, 5), workers=1)
    edited = tmp_path / DIGITS.name
    edited.write_text(DIGITS.read_text().replace("\nbatch_size: 30", "\nbatch_size: 50"))
    with pytest.raises(FileFormatError, match="batch_size was 30, now 50"):
        tool.ablate([[str(edited), *TINY]], tmp_path, range(3, 5), workers=1)


def test_some_changes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["ablate_recipe.py", "--output-dir", str(tmp_path), "--seeds", "1", "--workers", "1"]
    monkeypatch.setattr("sys.argv", [*options, "--changes", "ridge alone", "K = 2", "--task", str(DIGITS), *TINY])
    tool.main()
    (of_task,) = json.loads((tmp_path / "ablations.json").read_text())["tasks"].values()
    assert list(of_task["variants"]) == ["default", "ridge alone", "K = 2"]
    monkeypatch.setattr("sys.argv", [*options, "--changes", "K = 7"])
    with pytest.raises(SystemExit):
        tool.main()
    assert "--changes: 'K = 7' is none of MLP alone, ridge alone" in capsys.readouterr().err


def test_no_seeds_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["ablate_recipe.py", "--output-dir", "nowhere", "--seeds", "0"])
    with pytest.raises(SystemExit):
        tool.main()
    assert "--seeds is 0; it must be at least 1" in capsys.readouterr().err


def test_one_seed_has_no_interval(tmp_path: Path, few: None) -> None:
    rows = {
        "default": [{"spearman": 0.5, "test": 0.4, "queries": 9}],
        "ridge alone": [{"spearman": 0.7, "test": 0.3, "queries": 9}],
    }
    content = {"seeds": [3], "computed_on": "A processor", "tasks": {"t": {"maximize": True, "variants": rows}}}
    text = tool.markdown(content)
    assert "1 seed from 3 on" in text
    assert "| ridge alone | 9 | +0.20 | -0.1000 |" in text
    assert "nan" not in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a standard deviation of a single number
        tool.plot(content, tmp_path / "x.png")


@pytest.mark.parametrize(("spearman", "limit"), [(0.3, 0.6), (0.9, 1.1 * 0.9)])
def test_no_mean_is_drawn_outside_its_panel(
    few: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spearman: float, limit: float
) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(tool, "save_figure", lambda figure, path: figures.append(figure))
    rows = {
        "default": [{"spearman": 0.0, "test": test, "queries": 9} for test in (0.4, 0.5)],
        "ridge alone": [{"spearman": spearman, "test": test, "queries": 9} for test in (0.5, 0.5)],
    }
    content = {"seeds": [3, 4], "computed_on": "", "tasks": {"t": {"maximize": True, "variants": rows}}}
    tool.plot(content, tmp_path / "x.png")
    ranks, gains = figures[0].axes
    assert ranks.get_xlim() == pytest.approx((-limit, limit))
    assert gains.get_xlim() == pytest.approx((-6, 6))


def test_differences_are_better_where_the_metric_is(few: None) -> None:
    rows = {"default": [{"spearman": 0.5, "test": 0.4}], "x": [{"spearman": 0.7, "test": 0.3}]}
    for maximize, sign in ((True, -1), (False, 1)):
        content = {"tasks": {"t": {"maximize": maximize, "variants": rows}}}
        ranks, gains = tool.compared(content, "t", "x")
        assert ranks == pytest.approx([0.2])
        assert gains == pytest.approx([sign * 0.1])
    assert math.isnan(tool.paired_interval([0.1])[1])


def test_every_variant_of_the_paper_s_algorithm_can_be_run() -> None:
    config = load_config(tool.ClassificationConfig, DIGITS, ["method.name=paper"])
    runs = tool.runs_of(config)
    for name, overrides in runs.items():
        changed = load_config(tool.ClassificationConfig, DIGITS, ["method.name=paper", *overrides])
        changed.check()
        same = {"FiLM at all norms", "input bias"}  # one of which a config has already
        assert name in same or changed != config, name
    tasks = (600 - 3) // 5
    assert runs["K = 100% of T"] == ["method.evals=31", f"queries={3 + tasks * 31}", "method.labels=observed"]
    assert runs["K = 10% of T"] == ["method.evals=3", f"queries={3 + tasks * 3}"]
    assert runs["K = 2.5% of T"] == ["method.evals=2", f"queries={3 + tasks * 2}"]
    assert {"Adam", "f trained offline", "no sigma", "metric on train examples"} <= set(runs)


def test_a_table_of_changes_of_the_paper_s_algorithm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "PAPER", {"no sigma": ["method.sigma=false"], "input bias": tool.BOTH["input bias"]})
    monkeypatch.setattr(tool, "OBSERVED", {"K = 100% of T": 1.0})
    of_recipe = ("method.rounds", "method.folds", "method.trials", "method.learners")
    task = [str(DIGITS), *(each for each in TINY if not each.startswith(of_recipe)), "queries=18"]
    content = tool.ablate([task], tmp_path, range(3, 4), 1, "paper")
    (of_task,) = content["tasks"].values()
    spent = {name: rows[0]["queries"] for name, rows in of_task["variants"].items()}
    assert spent == {"default": 18, "no sigma": 18, "input bias": 18, "K = 100% of T": 3 + 5 * 7}
    assert "Ablations of Algorithm 1 as printed" in (tmp_path / "ablations.md").read_text()


def test_adam_in_the_default_step_is_adam() -> None:
    f = RidgeValueFunction(2).eval()
    policy = tool.adam_step(f, 0.3, 0.15, 0.3, 10)
    phi, history = torch.zeros(1, 2), torch.tensor([[[2.0, -5.0]]])
    moved = policy(phi, history, 0)  # f is of unknown quality: the loss step alone, Adam's first
    torch.testing.assert_close(moved, torch.tensor([[-tool.ADAM_RATE, tool.ADAM_RATE]]), rtol=1e-5, atol=0)
