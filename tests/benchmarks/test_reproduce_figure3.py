"""The paper's Fig. 3 at toy size, and what its numbers mean."""

import json
from pathlib import Path

import pytest
import torch

import reproduce_figure3 as tool
from metricopt_ext.errors import FileFormatError
from metricopt_ext.methods.algorithm1 import Algorithm1
from metricopt_ext.search.guided_es import es_direction
from metricopt_ext.tasks.trajectory import Trajectory
from metricopt_ext.utils.config import load_config
from metricopt_ext.value.value_function import RidgeValueFunction

ROOT = Path(__file__).parents[2]
TINY = [
    *("data.name=breast_cancer", "data.standardise=true", "model.epochs=5", "adapter.dim=4", "device=cpu"),
    *("seeds=1", "finetune.steps=6", "method.evals=3", "method.labels=observed", "metric.name=aucpr"),
]


def linear(slope: float) -> RidgeValueFunction:
    f = RidgeValueFunction(2).eval()
    f.coefficients[0, 0] = slope
    return f


def test_every_row_is_another_algorithm_of_the_paper_s_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    rows = tool.PARTS | tool.LITERAL
    built = {name: tool.algorithm(["data.root=x"], change) for name, change in rows.items()}
    assert len({repr(each) for each in built.values()}) == len(rows)
    assert all(each.evals == 0.05 * each.steps for each in built.values())
    config = load_config(tool.ClassificationConfig, tool.CONFIG, tool.PAPER)
    assert (config.balanced, config.adapter.dim, config.adapter.outputs) == (True, 16, False)


def test_the_metric_alone_is_searched_in_all_directions_alike() -> None:
    settings, f, phi = Algorithm1(metric_rate=0.5), linear(3.0), torch.randn(4, 2)
    policy = tool.MetricOnly(settings, f, torch.Generator().manual_seed(1))
    moved = policy(phi, torch.randn(4, 3, 2), 0)
    u = es_direction(f, phi, torch.zeros(4, 0, 2), generator=torch.Generator().manual_seed(1), count=3, variance=0.01)
    assert torch.equal(moved, phi - 0.5 * u)


def test_f_is_judged_where_the_metric_was_observed() -> None:
    phi = torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [3.0, 0.0]])
    cost = torch.tensor([0.1, 2.0, 3.5], dtype=torch.float64)
    observed = torch.tensor([0, 2, 3])
    trajectories = [Trajectory(0, i, phi, torch.zeros(3), observed, cost) for i in range(2)]
    error, spearman = tool.judged(linear(1.0), trajectories)
    assert error == pytest.approx((0.1 + 0.0 + 0.5) / 3)
    assert spearman == pytest.approx(1)


def test_a_tiny_run_and_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(tool, "PARTS", {tool.PRINTED: []})
    monkeypatch.setattr(tool, "RATES", (0.001, 0.01))
    monkeypatch.setattr(tool, "LITERAL", {"ends at random": tool.LITERAL["ends at random"]})
    content = tool.reproduce(TINY, tmp_path, [4, 6], 3, 2)
    variants = content["records"][0]["variants"]
    assert list(variants) == ["4 as printed", "4 ends at random", "6 as printed"]
    for row in variants.values():
        for scheme in ("guided", "metric only"):
            assert row[scheme]["rate"] in tool.RATES
            assert 0 <= row[scheme]["test"] <= 1
    assert content["records"][0]["queries"] == {"4": 12, "6": 18}
    text = (tmp_path / "figure3.md").read_text()
    row = variants["6 as printed"]
    assert f"| 6 as printed | {row['error']:.3f} | {row['spearman']:.2f} | {row['guided']['boldest']:.4f} |" in text
    assert (tmp_path / "figure3.png").stat().st_size > 5_000
    assert json.loads((tmp_path / "figure3.json").read_text()) == content

    monkeypatch.setattr(tool, "run_seed", lambda *_: pytest.fail("ran again what is on file"))
    assert tool.reproduce(TINY, tmp_path, [4, 6], 3, 2) == content
    with pytest.raises(FileFormatError, match="starts was 2, now 5"):
        tool.reproduce(TINY, tmp_path, [4, 6], 3, 5)


def test_one_seed_has_no_error() -> None:
    assert tool.with_error([0.5]) == "0.5000"
    assert tool.with_error([0.5, 0.7]) == "0.6000 ±0.1000"
