"""What a run keeps in its folder."""

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.refusals import assert_named, assert_refused
from metricopt_ext.errors import FileFormatError
from metricopt_ext.methods.pipeline import optimize_metric
from metricopt_ext.methods.recipe import Recipe
from metricopt_ext.methods.run_folder import IDENTITY, RunFolder, open_run, settled
from metricopt_ext.methods.run_identity import FORMAT
from metricopt_ext.runtime import distributed
from metricopt_ext.runtime.identity import sole_writer
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.direct import CMAES
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.tasks.population import Population


def test_a_run_folder_is_not_mixed(tmp_path: Path) -> None:
    config = {"queries": 600, "recipe": {"steps": 50}, "seed": 0, "seeds": 5, "workers": 1, "device": "auto"}
    open_run(tmp_path, {**config, "queries": 5}, resume=False)
    open_run(tmp_path, config, resume=False)  # the first one failed before it made anything
    (tmp_path / "seed-0").mkdir()
    assert_refused(lambda: open_run(tmp_path, config, resume=False), FileFormatError, "--resume")
    open_run(tmp_path, config, resume=True)
    open_run(tmp_path, {**config, "seed": 3, "seeds": 9, "workers": 2, "device": "cpu"}, resume=True)
    assert_refused(
        lambda: open_run(tmp_path, {**config, "queries": 700}, resume=True), FileFormatError, "queries", "600", "700"
    )
    assert_refused(
        lambda: open_run(tmp_path, {**config, "recipe": {"steps": 60}}, resume=True),
        FileFormatError,
        "recipe.steps",
        "50",
        "60",
    )
    open_run(tmp_path / "new", config, resume=True)  # nothing there to go on with
    assert json.loads((tmp_path / "new" / "run.json").read_text()) == {
        "format": FORMAT,
        "queries": 600,
        "recipe": {"steps": 50},
    }


def test_a_run_is_not_resumed_on_other_data(tmp_path: Path) -> None:
    tree, listed, folder = tmp_path / "tree", tmp_path / "list.txt", tmp_path / "run"
    (tree / "images").mkdir(parents=True)
    (tree / "images" / "a.png").write_bytes(b"12")
    (tree / "b.txt").write_bytes(b"3")
    listed.write_text("a\n")

    def opened() -> None:
        open_run(folder, {"queries": 600}, resume=True, files=[tree, listed])

    opened()
    (folder / "seed-3").mkdir()
    opened()
    tree.rename(tmp_path / "moved")
    tree = tmp_path / "moved"
    opened()
    changes = [
        lambda: (tree / "b.txt").write_bytes(b"4"),
        lambda: (tree / "c.txt").write_bytes(b""),
        lambda: (tree / "b.txt").rename(tree / "d.txt"),
        lambda: listed.write_text("b\n"),
    ]
    kept = json.loads((folder / "run.json").read_text())
    for change in changes:
        change()
        assert_refused(opened, FileFormatError)
        (folder / "run.json").unlink()
        (folder / "seed-3").rmdir()
        opened()  # what is there now is a run of its own
        (folder / "seed-3").mkdir()
        assert json.loads((folder / "run.json").read_text()) != kept
    tree.rename(tmp_path / "gone")
    assert_refused(opened, FileFormatError)


def test_a_run_is_not_resumed_on_other_code_of_its_metric(tmp_path: Path) -> None:
    folder, file = tmp_path / "run", tmp_path / "run" / "run.json"

    def opened(bodies: dict[str, str], **more: object) -> None:
        for name, body in bodies.items():
            (tmp_path / f"{name}.py").write_text(f"def score(labels, predictions): return {body}\n")
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        metric = {"name": "of_a_run:score", "folder": str(tmp_path), "subject_to": {"of_a_limit:score": ">= 0"}}
        open_run(folder, {"queries": 600, "metric": {**metric, **more}}, resume=True)

    opened({"of_a_run": "labels.mean()", "of_a_limit": "0.5"})
    (folder / "seed-3").mkdir()
    opened({"of_a_run": "labels.mean()  # a remark"})
    for name, change in (
        ("of_a_run", {"of_a_run": "labels.mean() ** 2"}),
        ("of_a_limit", {"of_a_run": "labels.mean()", "of_a_limit": "0.25"}),
    ):
        with pytest.raises(FileFormatError) as caught:
            opened(change)
        assert_named(caught, f"code.{name}:score")
    assert_refused(lambda: opened({}, name="accuracy"), FileFormatError, "metric.name", "of_a_run:score", "accuracy")
    kept = json.loads(file.read_text())
    code = kept.pop("own code")
    file.write_text(json.dumps(kept))  # as before the code was kept
    opened({})
    assert json.loads(file.read_text())["own code"] != code
    assert_refused(lambda: opened({"of_a_limit": "0.5"}), FileFormatError, "code.of_a_limit")
    assert "own code" not in json.dumps(_claimed(tmp_path / "named", {"metric": {"name": "accuracy"}}))


def _claimed(folder: Path, settings: dict[str, Any]) -> Any:
    open_run(folder, settings, resume=False)
    return json.loads((folder / "run.json").read_text())


def test_seeds_without_their_settings_are_not_taken_for_the_run_s(tmp_path: Path) -> None:
    (tmp_path / "seed-3").mkdir()
    assert_refused(lambda: open_run(tmp_path, {"queries": 600}, resume=True), FileFormatError, "run.json")


def test_a_run_of_another_format_is_not_resumed(tmp_path: Path) -> None:
    (tmp_path / "seed-3").mkdir()
    (tmp_path / "run.json").write_text('{"queries": 600}')
    assert_refused(lambda: open_run(tmp_path, {"queries": 600}, resume=True), FileFormatError, "None", FORMAT)


def test_only_a_recipe_s_run_has_trajectories(quadratic: Callable[..., Any], tmp_path: Path) -> None:
    optimize_metric(quadratic(), queries=30, strategy=CMAES(), output_dir=tmp_path, callback=Callback())
    assert {path.name for path in tmp_path.iterdir()} == {
        ".lock",
        "identity.json",
        "evaluations.json",
        "README.md",
        "adapter.safetensors",
    }


def test_a_metric_may_change_the_directory(
    quadratic: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    task = quadratic()
    task.metric.callbacks.append(lambda query: os.chdir(tmp_path / "elsewhere"))
    optimize_metric(task, queries=30, strategy=CMAES(), output_dir="run")
    assert (tmp_path / "run" / "adapter.safetensors").exists()
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("strategy", [CMAES(), Recipe(steps=5, evals=3), GuidedTrustRegion()])
def test_two_runs_do_not_write_to_one_folder(quadratic: Callable[..., Any], strategy: Any, tmp_path: Path) -> None:
    task = quadratic()
    with sole_writer(tmp_path):
        assert_refused(
            lambda: optimize_metric(
                task, queries=100, strategy=strategy, output_dir=tmp_path, resume=True, callback=Callback()
            ),
            FileFormatError,
        )
    assert task.metric.ledger.spent == 0


def test_a_folder_can_be_checked_long_before_its_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", {})
    for resume in (False, True):
        folder.check(resume)
    (tmp_path / "run" / IDENTITY).write_text("{}")
    assert_refused(lambda: folder.check(resume=False), FileFormatError, "resume")
    folder.check(resume=True)
    with sole_writer(tmp_path / "run"):
        assert_refused(lambda: folder.check(resume=True), FileFormatError)
    RunFolder(None, {}).check(resume=False)


class Heard(Callback):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def test_a_chosen_population_is_said_kept_and_taken_up_again(quadratic: Callable[..., Any], tmp_path: Path) -> None:
    def go(resume: bool = False, **task: Any) -> list[str]:
        heard = Heard()
        optimize_metric(
            quadratic(**task), queries=20, strategy=CMAES(), output_dir=tmp_path, resume=resume, callback=heard
        )
        return [line for line in heard.lines if line.startswith("population")]

    (line,) = go(population=None)
    assert line.startswith("population 32: the activations of 32 batches take 0.")
    kept = json.loads((tmp_path / IDENTITY).read_text())
    assert kept["population"] == 32
    assert go(resume=True, population=None) == [line]
    (tmp_path / IDENTITY).write_text(json.dumps({**kept, "population": 4}))
    assert go(resume=True, population=None) == ["population 4: the run in the folder has it"]
    assert_refused(lambda: go(resume=True, population=32), FileFormatError, "population", "4", "32")
    assert go(resume=True, population=4) == []


def test_a_chosen_population_is_that_of_the_first_rank(
    quadratic: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "on_first", lambda function: Population(16, "the first rank has room for it"))
    for population, expected in ((None, 16), (3, 3)):
        task, identity = quadratic(population=population), dict[str, Any]()
        task = settled(task, identity, None)
        assert task.population == expected
        assert identity == ({} if population else {"population": 16})


@pytest.mark.parametrize("damaged", ["[]", '{"population": true}', '{"population": 0}', "{}", "not json"])
def test_a_damaged_identity_does_not_choose_a_population(
    quadratic: Callable[..., Any], tmp_path: Path, damaged: str
) -> None:
    (tmp_path / IDENTITY).write_text(damaged)
    assert settled(quadratic(population=None), {}, tmp_path).population == 32
