"""A finished run is attached to a model, and says what no model holds."""

import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.refusals import assert_refused, assert_warned
from metricopt_ext.errors import FileFormatError
from metricopt_ext.methods.finished_run import load_run
from metricopt_ext.methods.pipeline import optimize_metric
from metricopt_ext.methods.search import Search
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.tasks.inference_file import load_inference
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.settings import Setting, Settings


def test_a_finished_run_is_loaded_and_an_unfinished_one_says_what_it_lacks(
    quadratic: Callable[..., Any], tmp_path: Path
) -> None:
    kept, folder = quadratic(), tmp_path / "out" / "seed-3"
    optimize_metric(kept, queries=30, output_dir=folder, callback=Callback())
    for each in (folder, tmp_path / "out"):  # a seed, and the tool's folder that has it alone
        assert torch.equal(load_run(quadratic().adapter.remove(), each).phi, kept.adapter.phi)
    shutil.copytree(folder, tmp_path / "detector" / "search")  # as Detectron2's tools name it
    assert torch.equal(load_run(quadratic().adapter.remove(), tmp_path / "detector").phi, kept.adapter.phi)
    (tmp_path / "out" / "seed-11").mkdir()
    assert_refused(
        lambda: load_run(quadratic().adapter.remove(), tmp_path / "out"), FileFormatError, "seeds", "seed-3", "seed-11"
    )
    (folder / "adapter.safetensors").unlink()
    assert_refused(lambda: load_run(quadratic().adapter.remove(), folder), FileFormatError, "--resume")
    assert_refused(
        lambda: load_run(quadratic().adapter.remove(), tmp_path / "nothing"), FileFormatError, "holds", "identity.json"
    )


def test_settings_of_inference_are_beside_the_adapter_and_loading_says_so(
    quadratic: Callable[..., Any], tmp_path: Path
) -> None:
    now = {"size": 1.0, "flip": False}

    @contextmanager
    def apply(values: dict[str, Any]) -> Iterator[None]:
        before = dict(now)
        now.update(values)
        yield
        now.update(before)

    sizes, flips = (
        Setting("size", values=(1.0, 2.0, 4.0), default=1.0),
        Setting("flip", values=(False, True), default=False),
    )

    def task(gain: float) -> Any:
        made = quadratic()
        metric = Metric(
            lambda model: made.distance(model) - gain * now["size"], maximize=False, bounds=None, name="distance"
        )
        return replace(made, metric=metric, settings=Settings([sizes, flips], apply))

    result = optimize_metric(task(gain=1.0), queries=30, output_dir=tmp_path / "a", callback=Callback())
    assert result.settings is not None
    assert load_inference(tmp_path / "a") == result.settings.after == {"size": 4.0, "flip": False}
    names = ("1", "4", "load_inference", "inference.yaml")
    assert_warned(lambda: load_run(quadratic().adapter.remove(), tmp_path / "a"), *names)
    with Search(task(gain=-1.0), queries=30, output_dir=tmp_path / "b") as search:
        while trials := search.ask(8):
            for trial in trials:
                with trial.applied() as model:
                    search.tell(trial.id, task(gain=-1.0).metric.function(model))
        search.result()
    assert load_inference(tmp_path / "b") == {"size": 1.0, "flip": False}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_run(quadratic().adapter.remove(), tmp_path / "b")


def test_settings_are_set_on_a_model_that_can_hold_them(quadratic: Callable[..., Any], tmp_path: Path) -> None:
    def settings(model: Any, default: float = 1.0, **options: Any) -> Settings:
        size = Setting("size", values=(1.0, 2.0, 4.0), default=default)
        many = Setting("many", values=(1, 300), default=1)

        def set_on(model: Any, values: dict[str, Any]) -> str:
            model.size = values.pop("size")
            return f"left is {values}" if values else ""

        @contextmanager
        def apply(values: dict[str, Any]) -> Iterator[None]:
            model.size = values["size"]
            yield
            model.size = 1.0

        return Settings([size, many], apply, set_on=set_on, **options)

    def finished(folder: Path, **options: Any) -> None:
        made = quadratic()
        model = made.adapter.model
        model.size = 1.0
        metric = Metric(lambda model: made.distance(model) - model.size, maximize=False, bounds=None, name="distance")
        task = replace(made, metric=metric, settings=settings(model, **options))
        optimize_metric(task, queries=30, output_dir=folder, callback=Callback())

    finished(tmp_path / "a", alone=["size"], free={"many": 300})
    assert load_inference(tmp_path / "a") == {"size": 4.0, "many": 300}
    assert not hasattr(quadratic().adapter.remove(), "size")
    model = quadratic().adapter.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapter = load_run(model, tmp_path / "a", settings(model, free={"many": 300}))
    assert (adapter.model is model, model.size) == (True, 4.0)
    model = quadratic().adapter.remove()
    assert_warned(lambda: load_run(model, tmp_path / "a", settings(model)), "left", "many", "300")
    assert model.size == 4.0
    model = quadratic().adapter.remove()
    assert_refused(lambda: load_run(model, tmp_path / "a", settings(model, default=2.0)), ValueError, "yaml", "1", "2")
    assert_refused(
        lambda: load_run(
            model, tmp_path / "a", Settings([Setting("k", 1, 2, default=1)], lambda values: nullcontext())
        ),
        ValueError,
        "size",
    )
    assert not hasattr(model, "metricopt")
    optimize_metric(quadratic(), queries=30, output_dir=tmp_path / "b", callback=Callback())
    assert_refused(lambda: load_run(model, tmp_path / "b", settings(model)), FileFormatError)


def test_settings_are_written_without_packages_and_loading_says_what_it_lacks(
    quadratic: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(
        [Setting("size", values=(1, 2), default=1)], lambda values: nullcontext(), free={"size": 2}, queries=0
    )
    with monkeypatch.context() as without:
        for module in ("omegaconf", "yaml"):
            without.setitem(sys.modules, module, None)
        task = replace(quadratic(), settings=settings)
        optimize_metric(task, queries=30, output_dir=tmp_path, callback=Callback())
        assert_warned(lambda: load_run(quadratic().adapter.remove(), tmp_path), "omegaconf")
    assert load_inference(tmp_path) == {"size": 2}
    assert 'for deployment keep the default: "size"' in (tmp_path / "inference.yaml").read_text()
    (tmp_path / "inference.yaml").write_text("size: 2")
    model = quadratic().adapter.remove()
    assert_refused(lambda: load_run(model, tmp_path), FileFormatError)
    assert not hasattr(model, "metricopt")
