"""A run on a checkpoint: its trial files, how many programs run at once, whose the folder is."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.refusals import assert_refused
from metricopt_ext.adapters.file import norms
from metricopt_ext.errors import ConfigError, FileFormatError
from metricopt_ext.experiment.checkpoint_run import CheckpointRun
from metricopt_ext.tasks.combine import Combination
from metricopt_ext.tasks.cost_scale import CostScale
from metricopt_ext.tasks.program_score import Printed, PrintedByName, ProgramScore, Score
from metricopt_ext.utils.checkpoint_file import read_checkpoint

# Keeps what it is given, and notes when it ran.
KEEPING = """
import shutil, sys, time
began = time.monotonic()
shutil.copy(sys.argv[1], f"seen-{sys.argv[2]}")
time.sleep(0.1)
print("score", (int(sys.argv[2]) if sys.argv[2].isdecimal() else 0) % 5)
with open("times", "a") as file:
    file.write(f"{sys.argv[2]} {began} {time.monotonic()}\\n")
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointRun:
    monkeypatch.chdir(tmp_path)
    save_file({"norm.weight": torch.ones(4), "norm.bias": torch.tensor([-0.0, 1, 2, 3])}, "in.safetensors")
    return made(KEEPING)


def made(code: str, *, repeats: int = 1, seed: int = 0) -> CheckpointRun:
    file = read_checkpoint("in.safetensors")
    words = [sys.executable, "-S", "-c", code, "{checkpoint}", "{trial}"]
    score = ProgramScore(words, Printed(r"score (\S+)", "--parse"), repeats=repeats)
    return CheckpointRun(file, norms(file, dim=2, seed=seed), score, Path("out"), seed=seed)


def test_the_unchanged_file_is_scored_bit_for_bit(run: CheckpointRun) -> None:
    found = run.score_unchanged()
    assert found == Score(0.0, None, None, found.seconds)
    assert Path("seen-0").read_bytes() == Path("in.safetensors").read_bytes()
    assert not run.started()


def test_each_trial_is_scored_once_by_as_many_programs_as_jobs(run: CheckpointRun) -> None:
    unchanged = run.score_unchanged()
    tuned = run.tune(12, unchanged=unchanged, jobs=3)
    rows = [line.split() for line in Path("times").read_text().splitlines()]
    assert sorted(int(row[0]) for row in rows) == list(range(12))
    times = [(float(began), float(ended)) for _, began, ended in rows]
    at_once = [sum(began <= each < ended for began, ended in times) for each, _ in times]
    assert max(at_once) in (2, 3)  # a batch may end with fewer
    assert [path.name for path in Path("out/trials").glob("*") if path.suffix != ".log"] == []
    files = [load_file(f"seen-{n}") for n in range(12)]
    assert len({tuple(each["norm.weight"].tolist()) for each in files}) == 12
    run.write(Path("out.safetensors"), tuned)
    assert tuned.changed
    assert tuned.queries == {"score": 12}
    (kept,) = [n for n in range(12) if Path("out.safetensors").read_bytes() == Path(f"seen-{n}").read_bytes()]
    assert tuned.result.after == kept % 5


def test_outcomes_are_told_by_name(run: CheckpointRun) -> None:
    code = KEEPING.replace('print("score",', 'print("zebra=3", end="\\nape="); print(')
    scale = CostScale(maximize=True, bounds=None, name="score", combination=Combination("worst", -1))
    score = replace(made(code).score, score=PrintedByName(r"^(\w+)=(\S+)$", "--parse"), scale=scale)
    one = CheckpointRun(run.file, run.moving, score, Path("out"))
    tuned = one.tune(12, unchanged=one.score_unchanged())
    assert tuned.result.best == 3.0  # the lower of 3 and the trial's number, up to 4
    assert tuned.result.evaluations["start"].also == {"zebra": 3.0, "ape": 0.0}


def test_repeats_count_as_queries(run: CheckpointRun) -> None:
    repeated = made(KEEPING.replace("time.sleep(0.1)", ""), repeats=2)
    assert_refused(lambda: repeated.tune(12), ConfigError, "--queries", "12", "2", "6")
    assert not Path("times").exists()
    assert repeated.tune(23).queries == {"score": 22}


def test_a_folder_is_of_one_run(run: CheckpointRun, tmp_path: Path) -> None:
    run.claim({"score": "a"}, resume=False)
    assert run.started()
    assert_refused(lambda: run.claim({"score": "a"}, resume=False), FileFormatError, "--resume")
    assert_refused(lambda: run.claim({"score": "b"}, resume=True), FileFormatError, "score", "'a'", "'b'")
    leftovers = [tmp_path / "out/trials/3.safetensors", tmp_path / "out/trials/.3.safetensors.x.unfinished"]
    for path in leftovers:
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    run.claim({"score": "a"}, resume=True)
    assert not any(path.exists() for path in leftovers)
    save_file({"norm.weight": torch.zeros(4), "norm.bias": torch.zeros(4)}, "in.safetensors")
    assert_refused(lambda: run.claim({"score": "a"}, resume=True), FileFormatError)
    assert json.loads(Path("out/run.json").read_text())["moved"] == ["norm.weight", "norm.bias"]
