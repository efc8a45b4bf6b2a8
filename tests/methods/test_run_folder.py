"""What a run keeps in its folder."""

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.errors import FileFormatError
from metricopt_ext.methods.pipeline import optimize_metric
from metricopt_ext.methods.recipe import Recipe
from metricopt_ext.methods.run_folder import FORMAT, IDENTITY, claim_open, identity_of, load_run, open_run, settled
from metricopt_ext.methods.search import Search
from metricopt_ext.runtime import distributed
from metricopt_ext.runtime.identity import sole_writer
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.direct import CMAES
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.tasks.inference_file import load_inference
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.population import Population
from metricopt_ext.tasks.settings import Setting, Settings


def test_a_run_folder_is_not_mixed(tmp_path: Path) -> None:
    config = {"queries": 600, "recipe": {"steps": 50}, "seed": 0, "seeds": 5, "workers": 1, "device": "auto"}
    open_run(tmp_path, {**config, "queries": 5}, resume=False)
    open_run(tmp_path, config, resume=False)  # the first one failed before it made anything
    (tmp_path / "seed-0").mkdir()
    with pytest.raises(FileFormatError, match=r"holds an earlier run: add --resume to continue it"):
        open_run(tmp_path, config, resume=False)
    open_run(tmp_path, config, resume=True)
    open_run(tmp_path, {**config, "seed": 3, "seeds": 9, "workers": 2, "device": "cpu"}, resume=True)
    with pytest.raises(FileFormatError, match=r"queries was 600, now 700"):
        open_run(tmp_path, {**config, "queries": 700}, resume=True)
    with pytest.raises(FileFormatError, match=r"recipe\.steps was 50, now 60"):
        open_run(tmp_path, {**config, "recipe": {"steps": 60}}, resume=True)
    open_run(tmp_path / "new", config, resume=True)  # nothing there to go on with
    assert json.loads((tmp_path / "new" / "run.json").read_text()) == {
        "format": FORMAT,
        "queries": 600,
        "recipe": {"steps": 50},
    }


def test_an_assessment_leaves_the_number_of_queries_open(tmp_path: Path) -> None:
    file, settings = tmp_path / "identity.json", {"search": "guided", "seed": 3}
    claim_open(file, settings)
    assert json.loads(file.read_text()) == settings
    with pytest.raises(FileFormatError, match="seed was 3, now 4"):
        claim_open(file, {"search": "guided", "queries": 60, "seed": 4})
    claim_open(file, {"search": "guided", "queries": 60, "seed": 3})
    claim_open(tmp_path / "alone.json", {"search": "guided", "queries": 60, "seed": 3})
    assert file.read_bytes() == (tmp_path / "alone.json").read_bytes()
    claim_open(file, settings)  # another assessment needs no number, and changes none
    with pytest.raises(FileFormatError, match="queries was 60, now 61"):
        claim_open(file, {"search": "guided", "queries": 61, "seed": 3})
    with pytest.raises(FileFormatError, match="seed was 3, now 4"):
        claim_open(file, {"search": "guided", "seed": 4})
    assert file.read_bytes() == (tmp_path / "alone.json").read_bytes()


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
        with pytest.raises(FileFormatError, match="holds another run: content of the data's files was"):
            opened()
        (folder / "run.json").unlink()
        (folder / "seed-3").rmdir()
        opened()  # what is there now is a run of its own
        (folder / "seed-3").mkdir()
        assert json.loads((folder / "run.json").read_text()) != kept
    tree.rename(tmp_path / "gone")
    with pytest.raises(FileFormatError, match="content of the data's files was"):
        opened()


def test_seeds_without_their_settings_are_not_taken_for_the_run_s(tmp_path: Path) -> None:
    (tmp_path / "seed-3").mkdir()
    with pytest.raises(FileFormatError, match=r"holds seeds of a run without its settings, run\.json"):
        open_run(tmp_path, {"queries": 600}, resume=True)


def test_a_run_of_another_format_is_not_resumed(tmp_path: Path) -> None:
    (tmp_path / "seed-3").mkdir()
    (tmp_path / "run.json").write_text('{"queries": 600}')
    with pytest.raises(FileFormatError, match=f"holds another run: format was None, now {FORMAT}"):
        open_run(tmp_path, {"queries": 600}, resume=True)


@pytest.mark.parametrize("strategy", [CMAES(), Recipe(steps=5, evals=3), GuidedTrustRegion()])
def test_identity_does_not_depend_on_where_code_is(quadratic: Callable[..., Any], strategy: Any) -> None:
    text = str(identity_of(strategy, quadratic(), {}, seed=0, size={}))
    assert "metricopt_ext." not in text
    assert "0x" not in text


def test_another_line_is_another_run(quadratic: Callable[..., Any], tmp_path: Path) -> None:
    """What it is at both ends and in the middle counts, and where it ends."""
    way = torch.tensor([1.0, 0, 0, 0]).double()

    def line(power: int = 1, scale: float = 1.0, high: float = 1.0) -> StartLine:
        return StartLine(lambda t: Start(scale * t**power * way), 0.0, high)

    lines = [line(), line(), line(power=2), line(scale=2.0), line(high=2.0)]
    found = [str(identity_of(GuidedTrustRegion(), quadratic(), {"along": each}, seed=0, size={})) for each in lines]
    assert found[0] == found[1]
    assert len(set(found)) == 4
    task, again = quadratic(), quadratic()
    optimize_metric(task, queries=20, starts={"along": lines[0]}, output_dir=tmp_path, callback=Callback())
    with pytest.raises(FileFormatError, match=r"holds another run: starts\.along was"):
        optimize_metric(
            again, queries=20, starts={"along": lines[2]}, output_dir=tmp_path, resume=True, callback=Callback()
        )
    assert again.queries == 0


def test_a_finished_run_is_loaded_and_an_unfinished_one_says_what_it_lacks(
    quadratic: Callable[..., Any], tmp_path: Path
) -> None:
    kept, folder = quadratic(), tmp_path / "out" / "seed-3"
    optimize_metric(kept, queries=30, output_dir=folder, callback=Callback())
    for each in (folder, tmp_path / "out"):  # a seed, and the tool's folder that has it alone
        assert torch.equal(load_run(quadratic().adapter.remove(), each).phi, kept.adapter.phi)
    (tmp_path / "out" / "seed-11").mkdir()
    with pytest.raises(FileFormatError, match=r"several seeds, .* seed-3, seed-11 \(no adapter\.safetensors yet\)"):
        load_run(quadratic().adapter.remove(), tmp_path / "out")
    (folder / "adapter.safetensors").unlink()
    with pytest.raises(FileFormatError, match=r"unfinished run: adapter\.safetensors, .* --resume"):
        load_run(quadratic().adapter.remove(), folder)
    with pytest.raises(FileFormatError, match=r"holds no run: it has neither identity\.json"):
        load_run(quadratic().adapter.remove(), tmp_path / "nothing")


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
    said = (
        r"settings of inference that the model does not hold: size 1 -> 4; put .*load_inference\('.*inference\.yaml'\)"
    )
    with pytest.warns(UserWarning, match=said):
        load_run(quadratic().adapter.remove(), tmp_path / "a")
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
    with pytest.warns(UserWarning, match=r"^left is {'many': 300}$"):
        load_run(model, tmp_path / "a", settings(model))
    assert model.size == 4.0
    model = quadratic().adapter.remove()
    with pytest.raises(ValueError, match=r"yaml: size was 1 by default, and is 2 by the given settings; make"):
        load_run(model, tmp_path / "a", settings(model, default=2.0))
    with pytest.raises(ValueError, match="there is no setting 'size'"):
        load_run(model, tmp_path / "a", Settings([Setting("k", 1, 2, default=1)], lambda values: nullcontext()))
    assert not hasattr(model, "metricopt")
    optimize_metric(quadratic(), queries=30, output_dir=tmp_path / "b", callback=Callback())
    with pytest.raises(FileFormatError, match="as its run tuned no settings; leave settings out"):
        load_run(model, tmp_path / "b", settings(model))


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
        with pytest.warns(UserWarning, match="has settings of inference, and no one can tell which without omegaconf"):
            load_run(quadratic().adapter.remove(), tmp_path)
    assert load_inference(tmp_path) == {"size": 2}
    assert 'for deployment keep the default: "size"' in (tmp_path / "inference.yaml").read_text()
    (tmp_path / "inference.yaml").write_text("size: 2")
    model = quadratic().adapter.remove()
    with pytest.raises(FileFormatError, match="a setting must have a name"):
        load_run(model, tmp_path)
    assert not hasattr(model, "metricopt")


def test_only_a_recipe_s_run_has_trajectories(quadratic: Callable[..., Any], tmp_path: Path) -> None:
    optimize_metric(quadratic(), queries=30, strategy=CMAES(), output_dir=tmp_path, callback=Callback())
    assert {path.name for path in tmp_path.iterdir()} == {
        ".lock",
        "identity.json",
        "evaluations.json",
        "README.md",
        "adapter.safetensors",
    }


@pytest.mark.parametrize("strategy", [CMAES(), Recipe(steps=5, evals=3), GuidedTrustRegion()])
def test_two_runs_do_not_write_to_one_folder(quadratic: Callable[..., Any], strategy: Any, tmp_path: Path) -> None:
    task = quadratic()
    with sole_writer(tmp_path), pytest.raises(FileFormatError, match="is being written by another process"):
        optimize_metric(task, queries=100, strategy=strategy, output_dir=tmp_path, resume=True, callback=Callback())
    assert task.metric.ledger.spent == 0


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
    with pytest.raises(FileFormatError, match="population was 4, now 32"):
        go(resume=True, population=32)
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
