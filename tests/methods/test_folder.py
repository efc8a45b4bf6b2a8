"""What a run keeps in its folder, what tells it from others, and what is loaded of it."""

import importlib
import shutil
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.inference import put_into
from helpers.quadratics import QuadraticLearner
from helpers.refusals import assert_named, assert_refused, assert_warned
from metricopt_ext import (
    Callback,
    Metric,
    Setting,
    Settings,
    Start,
    StartLine,
    load_inference,
    load_run,
    optimize_metric,
)
from metricopt_ext.adapters.attach import attach_input_bias
from metricopt_ext.errors import FileFormatError, MetricError
from metricopt_ext.experiment.output_folder import open_run
from metricopt_ext.methods.folder import FORMAT
from metricopt_ext.methods.paper.joint import AlgorithmS1
from metricopt_ext.methods.paper.recipe import Recipe
from metricopt_ext.search.direct import CMAES


def test_a_run_folder_is_not_mixed(tmp_path: Path) -> None:
    config = {"queries": 600, "recipe": {"steps": 50}, "seed": 0, "seeds": 5, "workers": 1, "device": "auto"}
    open_run(tmp_path, {**config, "queries": 5}, resume=False)
    open_run(tmp_path, config, resume=False)  # the first one failed before it made anything
    (tmp_path / "seed-0").mkdir()
    assert_refused(lambda: open_run(tmp_path, config, resume=False), FileFormatError, "--resume")
    open_run(tmp_path, config, resume=True)
    open_run(tmp_path, {**config, "seed": 3, "seeds": 9, "workers": 2, "device": "cpu"}, resume=True)
    for other, names in (({"queries": 700}, ("queries", "600", "700")), ({"recipe": {"steps": 60}}, ("recipe.steps",))):
        given = {**config, **other}
        assert_refused(lambda given=given: open_run(tmp_path, given, resume=True), FileFormatError, *names)
    open_run(tmp_path / "new", config, resume=True)  # nothing there to go on with
    (tmp_path / "run.json").write_text('{"queries": 600}')
    assert_refused(lambda: open_run(tmp_path, {"queries": 600}, resume=True), FileFormatError, "None", FORMAT)


def test_a_run_is_not_resumed_on_other_data(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    folder = tree / "out"
    tree.mkdir()
    (tree / "a.txt").write_bytes(b"1")
    for resume in (False, True):
        open_run(folder, {"queries": 600}, resume=resume, files=[tree])
        (folder / "seed-3").mkdir(exist_ok=True)
        (tree / "Thumbs.db").write_bytes(b"")
    (tree / "b.txt").write_bytes(b"2")
    assert_refused(lambda: open_run(folder, {"queries": 600}, resume=True, files=[tree]), FileFormatError, "files")


def test_a_folder_that_vanishes_ends_the_run(quadratic: Callable[..., Any], tmp_path: Path) -> None:
    task = quadratic()

    def vanishing(model: Any) -> float:
        if task.queries == 5:
            (tmp_path / "run").rename(tmp_path / "gone")
        return task.distance(model)

    judged = task.judged_by(Metric(vanishing, maximize=False, bounds=None, name="distance"))
    with pytest.raises(OSError, match="run"):
        optimize_metric(judged, queries=30, output_dir=tmp_path / "run", callback=Callback())
    assert not (tmp_path / "run").exists()
    assert task.queries == 6


def test_a_run_is_not_resumed_on_other_code_of_its_metric(tmp_path: Path) -> None:
    folder = tmp_path / "run"

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
    assert_refused(lambda: opened({"of_a_run": "labels.mean() ** 2"}), FileFormatError, "code.of_a_run:score")
    changed = {"of_a_run": "labels.mean()", "of_a_limit": "0.25"}
    assert_refused(lambda: opened(changed), FileFormatError, "code.of_a_limit:score")
    assert_refused(lambda: opened({}, name="accuracy"), FileFormatError, "metric.name", "of_a_run:score", "accuracy")


RECIPE = Recipe(steps=10, lr=0.1, evals=3, rounds=2, folds=2, trials=1, learner=QuadraticLearner())
S1 = AlgorithmS1(steps=5, evals=3, tasks=2, pairs=3, hidden=4)
ONE = torch.ones(4, dtype=torch.float64)


def along(power: int = 1, scale: float = 1.0, high: float = 1.0) -> StartLine:
    return StartLine(lambda t: Start(scale * t**power * ONE), 0.0, high)


def measured(function: Any = None, **change: Any) -> Callable[[Any], Any]:
    settings = {"maximize": False, "bounds": (0.0, 50.0), "name": "distance", **change}
    return lambda task: task.judged_by(Metric(function or task.distance, **settings))


def inverted(task: Any) -> Any:
    return measured(lambda: 50 - task.distance())(task)


def other_weights(task: Any) -> Any:
    nn.init.ones_(task.adapter.model.bias)
    return task


def with_settings(inference: float) -> Callable[[Any], Any]:
    setting = Setting("size", values=(1, 2), default=1)
    return lambda task: replace(task, settings=Settings([setting], lambda values: nullcontext(), inference=inference))


ASIDE = Metric(lambda model: 0.0, maximize=False, bounds=None, name="aside")
RANGE = {"starts": {"near": Start(0.8 * ONE), "far": Start(-ONE)}}
RECIPES: dict[str, Any] = {"steps": 11, "lr": 0.2, "trials": 0, "learner": QuadraticLearner(penalty=0.1)}

# What is named, what changes in the task, and the arguments of the first run and of the second.
CHANGES: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = [
    *((key, None, {"strategy": RECIPE}, {"strategy": replace(RECIPE, **{key: new})}) for key, new in RECIPES.items()),
    ("rate", None, {"strategy": S1}, {"strategy": replace(S1, rate=0.5)}),
    ("", None, {"strategy": RECIPE}, {"strategy": CMAES()}),
    ("", None, {"strategy": CMAES()}, {"strategy": RECIPE}),
    ("tasks", None, {"strategy": RECIPE}, {"strategy": RECIPE, "queries": 53}),
    ("queries", None, {}, {"queries": 46}),
    ("seed", None, {}, {"seed": 1}),
    ("starts", None, RANGE, {}),
    ("starts", None, RANGE, {"starts": {"near": Start(0.8 * ONE)}}),
    ("starts", None, RANGE, {"starts": {**RANGE["starts"], "far": Start(-2 * ONE)}}),
    *(
        ("starts.along", None, {"starts": {"along": along()}}, {"starts": {"along": along(**other)}})
        for other in ({"power": 2}, {"scale": 2.0}, {"high": 2.0})  # in its middle, at its end, and where it ends
    ),
    ("holdout", None, {"holdout": ASIDE}, {}),
    ("population", lambda task: replace(task, population=5), {}, {}),
    ("metric", measured(name="length"), {}, {}),
    ("metric", measured(maximize=True), {}, {}),
    ("metric", measured(bounds=(0.0, 60.0)), {}, {}),
    ("new_classes", measured(new_classes=True), {}, {}),
    ("subject_to", measured(subject_to={"b": ">= 0"}), {}, {}),
    ("settings", with_settings(inference=2.0), {}, {}),
    ("adapter", lambda task: replace(task, adapter=attach_input_bias(task.adapter.remove(), dim=4, seed=1)), {}, {}),
    ("weights", other_weights, {}, {}),
    ("metric.code", inverted, {}, {}),
    ("loss of the first batch", lambda task: replace(task, loss=lambda *given: 2 * task.loss(*given)), {}, {}),
    ("loss of the first batch", lambda task: replace(task, batches=lambda *of: task.batches(*of) + 0.5), {}, {}),
]


@pytest.mark.parametrize(("key", "change", "first", "second"), CHANGES)
def test_a_run_is_not_resumed_under_other_settings(
    quadratic: Callable[..., Any], tmp_path: Path, key: str, change: Any, first: Any, second: Any
) -> None:
    def run(task: Any, **arguments: Any) -> None:
        given = {"queries": 47, "output_dir": tmp_path, "callback": Callback(), **arguments}
        optimize_metric(task, **given)

    broken, task = (measured()(quadratic()) for _ in range(2))
    broken.problem.fail_after = 5
    with pytest.raises(MetricError):
        run(broken, **first)
    with pytest.raises(FileFormatError) as caught:
        run(task if change is None else change(task), resume=True, **second)
    assert_named(caught, *([key] if key else []))
    assert str(tmp_path) in str(caught.value)
    assert task.queries == 0


def test_a_finished_run_is_loaded_and_an_unfinished_one_says_what_it_lacks(
    quadratic: Callable[..., Any], tmp_path: Path
) -> None:
    kept, folder = quadratic(), tmp_path / "out" / "seed-3"
    optimize_metric(kept, queries=30, output_dir=folder, callback=Callback())
    for each in (folder, tmp_path / "out"):  # a seed, and the tool's folder that has it alone
        assert torch.equal(load_run(quadratic().adapter.remove(), each).phi, kept.adapter.phi)
    shutil.copytree(folder, tmp_path / "detector" / "search")  # as Detectron2's tools name it
    assert torch.equal(load_run(quadratic().adapter.remove(), tmp_path / "detector").phi, kept.adapter.phi)
    (tmp_path / "detector" / "identity.json").write_text("{}")  # of an unfinished run of its own
    assert_refused(lambda: load_run(quadratic().adapter.remove(), tmp_path / "detector"), FileFormatError, "--resume")
    (tmp_path / "out" / "seed-11").mkdir()
    assert_refused(
        lambda: load_run(quadratic().adapter.remove(), tmp_path / "out"), FileFormatError, "seeds", "seed-3", "seed-11"
    )
    (folder / "adapter.safetensors").unlink()
    assert_refused(lambda: load_run(quadratic().adapter.remove(), folder), FileFormatError, "--resume")
    assert_refused(
        lambda: load_run(quadratic().adapter.remove(), tmp_path / "nothing"), FileFormatError, "holds", "identity.json"
    )


def test_settings_are_set_on_a_model_that_can_hold_them(quadratic: Callable[..., Any], tmp_path: Path) -> None:
    def settings(model: Any, default: float = 1.0, **options: Any) -> Settings:
        size = Setting("size", values=(1.0, 2.0, 4.0), default=default)
        many = Setting("many", values=(1, 300), default=1)

        def set_on(model: Any, values: dict[str, Any]) -> str:
            model.size = values.pop("size")
            return f"left is {values}" if values else ""

        return Settings([size, many], put_into(vars(model)), set_on=set_on, **options)

    def finished(folder: Path, **options: Any) -> None:
        made = quadratic()
        model = made.adapter.model
        model.size = 1.0
        metric = Metric(lambda model: made.distance(model) - model.size, maximize=False, bounds=None, name="distance")
        task = replace(made, metric=metric, settings=settings(model, **options))
        optimize_metric(task, queries=30, output_dir=folder, callback=Callback())

    finished(tmp_path / "a", alone=["size"], free={"many": 300})
    assert load_inference(tmp_path / "a") == {"size": 4.0, "many": 300}
    model = quadratic().adapter.remove()
    assert_warned(lambda: load_run(model, tmp_path / "a"), "1", "4", "load_inference", "inference.yaml")
    model = quadratic().adapter.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapter = load_run(model, tmp_path / "a", settings(model, free={"many": 300}))
    assert (adapter.model is model, model.size) == (True, 4.0)
    model = quadratic().adapter.remove()
    assert_warned(lambda: load_run(model, tmp_path / "a", settings(model)), "left", "many", "300")
    assert model.size == 4.0
    model = quadratic().adapter.remove()
    other = Settings([Setting("size", values=(1.0, 2.0), default=1.0)], put_into({}))
    assert_refused(lambda: load_run(model, tmp_path / "a", other), ValueError, "size", "4")
    assert not hasattr(model, "metricopt")
    load_run(model, tmp_path / "a", settings(model, default=2.0, free={"many": 300})).remove()
    assert model.size == 4.0
    optimize_metric(quadratic(), queries=30, output_dir=tmp_path / "b", callback=Callback())
    assert_refused(lambda: load_run(model, tmp_path / "b", settings(model)), FileFormatError)
