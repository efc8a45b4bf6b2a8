"""The tool that measures what f is worth on another task, on tiny runs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import measure_transfer as tool
from helpers import programs

ROOT = Path(__file__).parents[2]

TINY = [
    *("data.name=breast_cancer", "data.standardise=true", "shift.kind=none", "model.name=tabular_mlp"),
    *("adapter.kind=input_bias", "adapter.layers=[]", "model.epochs=1", "finetune.steps=4", "finetune.lr=0.1"),
    *("method.evals=2", "method.rounds=1", "method.trials=0", "method.learners=[ridge]", "queries=30", "device=cpu"),
    *("seeds=2", "population=4"),
]


def call(folder: Path, *arguments: str, source: tuple[str, ...] = (), target: tuple[str, ...] = ()) -> None:
    config = ["--task", "classification", "--config-file", str(ROOT / "configs" / "classification" / "digits.yaml")]
    own = ["--from", "metric.name=mcr", "adapter.dim=3", *source, "--to", "metric.name=f1", "adapter.dim=3", *target]
    programs.call(tool, *config, "--output-dir", folder, *arguments, *own)


def test_the_first_tasks_f_is_followed_on_the_second_beside_a_fresh_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, learned, seen = tool.learned, [], []

    def spy(experiment: Any, learner: str, seed: int) -> Any:
        made = original(experiment, learner, seed)
        learned.append((experiment.config.metric.name, made[0]))
        return made

    follow = tool.followed
    monkeypatch.setattr(tool, "learned", spy)
    monkeypatch.setattr(tool, "followed", lambda config, f, *rest: seen.append(f) or follow(config, f, *rest))
    call(tmp_path, "--learners", "recipe", "--inputs", "outputs", "--both", *TINY)
    assert [name for name, _ in learned] == ["mcr", "f1"] * 2
    (_, moved), (_, fresh) = learned[:2]
    assert seen[0] is fresh
    assert seen[1] is moved
    assert torch.equal(seen[2].f.coefficients, moved.coefficients)  # the placebo's, turned
    content = json.loads((tmp_path / "transfer.json").read_text())
    rows = content["per_seed"]
    names = ["phi by recipe", "outputs"]
    whats = ["fresh", "transferred", "placebo"]
    ends = [f"{name}, {what}" for name in names for what in whats]
    assert list(rows[0]["test"]) == ["pretrained", "loss", *ends, "batchnorm"]
    for name in names:
        gains = [row["test"][f"{name}, transferred"] - row["test"][f"{name}, placebo"] for row in rows]
        told = content["gains"][f"{name}, transferred over {name}, placebo"]
        assert told["mean"] == pytest.approx(sum(gains) / 2)
        assert told["error"] == pytest.approx(abs(gains[0] - gains[1]) / 2)
    assert {row["queries"][side] for row in rows for side in ("from", "to")} == {22}  # 11 tasks of 2; none to follow f


def test_what_can_not_be_compared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=re.escape("phi has dimension 3 and 4; give both tasks one adapter.dim")):
        call(tmp_path / "a", "--both", *TINY, target=("adapter.dim=4",))
    with pytest.raises(SystemExit, match="name recipe among --learners"):
        call(tmp_path / "b", "--learners", "paper", "--both", *TINY)


def test_the_wide_cnn_is_twice_as_wide() -> None:
    model: Any = tool.wide_cnn(10, (1, 8, 8))
    assert (model.norm1.num_features, model.norm3.num_features) == (32, 64)
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
