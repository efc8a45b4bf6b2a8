"""The command line that the tools share: what it makes of its arguments, how it fails, and what a run leaves."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.pictures import check_figures
from helpers.refusals import assert_refused
from metricopt_ext.errors import ConfigError, FileFormatError
from metricopt_ext.experiment import cli
from metricopt_ext.experiment.config_sections import AdapterConfig
from metricopt_ext.experiment.experiment import Experiment, Subject
from metricopt_ext.experiment.method_config import FinetuneConfig, RecipeConfig, SearchConfig
from metricopt_ext.experiment.report import Report
from metricopt_ext.experiment.run_config import RunConfig
from metricopt_ext.experiment.style import new_figure, save_figure
from metricopt_ext.tasks.metric import Metric


@dataclass
class ToyConfig(RunConfig):
    kind: str = "plain"
    layers: list[str] = field(default_factory=list)


class Toy(Experiment[ToyConfig]):
    """An experiment whose test metric is the distance to a goal beside that of the metric."""

    config_type = ToyConfig

    @classmethod
    def describe(cls, config: ToyConfig) -> Subject:
        return Subject("toy/square", "squares", "distance", maximize=False)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[ToyConfig, Path, bool]]:
    """Call `main_of` with a command line and a config file; return what it ran."""
    file = tmp_path / "config.yaml"
    file.write_text("queries: 700\nfinetune: {lr: 0.5}\nseed: 5\n")

    def call(*arguments: Any, run: Callable[..., object] | None = None) -> tuple[ToyConfig, Path, bool]:
        ran: list[tuple[ToyConfig, Path, bool]] = []
        monkeypatch.setattr(sys, "argv", ["tool.py", "--config-file", str(file), *map(str, arguments)])

        def keep(experiment: Any, *given: Any) -> Report:
            ran.append(given)
            return Report("toy", "distance", False, [], {})

        monkeypatch.setattr(cli, "run_and_report", run or keep)
        cli.main_of("A tool.", Toy, "kind=fancy", {"kind": ("plain", "fancy")})
        (only,) = ran
        return only

    return call


def test_file_then_overrides_then_options(called: Any) -> None:
    config, folder, resume = called("--output-dir", "out")
    assert config == ToyConfig(queries=700, finetune=FinetuneConfig(lr=0.5), seed=5)
    assert (folder, resume) == (Path("out"), False)
    config, _, resume = called(
        "queries=800", "--output-dir", "out", "seed=6", "--resume", "finetune.steps=9", "kind=plain"
    )
    assert (config.queries, config.seed, config.finetune.steps, config.finetune.lr) == (800, 6, 9, 0.5)
    assert resume
    config, _, _ = called("--seed", 0, "--output-dir", "out", "seed=6", "--kind", "fancy", "kind=plain")
    assert (config.seed, config.kind) == (0, "fancy")  # 0 is a seed too


@pytest.mark.parametrize("inside", ["out", "a/b/out", "."])
def test_an_output_folder_among_the_data_is_refused_before_it_is_made(
    inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ToyConfig, "data_files", lambda self: [tmp_path])
    assert_refused(lambda: cli.run_and_report(Toy, ToyConfig(), tmp_path / inside, False), ConfigError, "--output-dir")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("model.lr=0:\n  it must be\tabove 0"),
        FloatingPointError("the gradient is not finite"),
        FileNotFoundError(2, "No such file or directory", "\x1b[31m"),
    ],
)
def test_what_a_user_can_mend_ends_in_one_line(called: Any, error: Exception) -> None:
    def fail(*given: Any) -> None:
        raise error

    with pytest.raises(SystemExit) as caught:
        called("--output-dir", "out", run=fail)
    assert caught.value.code == "error: " + " ".join(str(error).split())


def test_what_a_user_cannot_mend_keeps_its_traceback(called: Any) -> None:
    def fail(*given: Any) -> None:
        raise ZeroDivisionError("a bug")

    assert_refused(lambda: called("--output-dir", "out", run=fail), ZeroDivisionError, "a bug")


# --- A whole run -------------------------------------------------------------------------------------------------


def settings(**change: Any) -> ToyConfig:
    given = {"queries": 40, "seeds": 2, "seed": 3, "pictures": ["curves"], **change}
    return ToyConfig(adapter=AdapterConfig(dim=4), finetune=FinetuneConfig(10, 0.1), **given)


METHODS = {
    "search": SearchConfig(),
    "recipe": RecipeConfig(evals=3, rounds=1, folds=2, trials=0),
}


@pytest.fixture
def toy(quadratic: Callable[..., Any]) -> type[Experiment[Any]]:
    """An experiment on a task whose optimum is known, which notes the seeds that it was made for."""

    class Runnable(Toy):
        made: list[int] = []  # noqa: RUF012
        plotted: list[list[int]] = []  # noqa: RUF012

        @classmethod
        def plot_seeds(cls, folder: Path, seeds: Any) -> list[Path]:
            cls.plotted.append(list(seeds))
            return [save_figure(new_figure(2, 1)[0], folder / "more.png")]

        def prepare(self) -> Any:
            self.made.append(self.seed)
            self.folder.mkdir(parents=True, exist_ok=True)
            task = quadratic()
            goal = task.goal + 0.01 * self.seed
            distance = Metric(
                lambda model: float(((model.metricopt.phi - goal) ** 2).sum()),
                maximize=False,
                bounds=None,
                name="distance",
            )
            return task, distance

        def validation(self) -> Any:
            return [], self.task.batches

        def finish(self) -> None:
            torch.save(self.task.adapter.phi.detach(), self.folder / "phi.pt")

    return Runnable


def go(folder: Path, toy: Any, config: ToyConfig | None = None, resume: bool = False) -> Any:
    return cli.run_and_report(toy, config or settings(), folder, resume)


@pytest.mark.usefixtures("tensorboard")
def test_a_metric_that_never_varies_has_no_picture_of_f(toy: Any, tmp_path: Path) -> None:
    class Flat(toy):  # type: ignore[misc]
        def prepare(self) -> Any:
            task, metric = super().prepare()
            return task.judged_by(Metric(lambda model: 0.5, maximize=False, bounds=None, name="distance")), metric

    go(tmp_path, Flat, settings(seeds=1))
    assert not (tmp_path / "value_function.png").exists()
    assert (tmp_path / "search.png").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("tensorboard")
@pytest.mark.parametrize(("strategy", "course"), [("search", "search.png"), ("recipe", "finetuning.png")])
def test_a_run_leaves_its_report_pictures_and_seeds(
    strategy: str,
    course: str,
    toy: Any,
    quadratic: Callable[..., Any],
    tmp_path: Path,
) -> None:
    config = settings(method=METHODS[strategy])
    report = go(tmp_path, toy, config)
    assert (toy.made, toy.plotted) == ([3, 4], [[3, 4]])
    drawn = ["methods.png", course, "value_function.png", "more.png"]
    check_figures(tmp_path / name for name in drawn[:-1])
    content = json.loads((tmp_path / "report.json").read_text())
    assert (content["task"], content["seeds"]) == ("toy/square", [3, 4])
    assert content["metric"] == {"name": "distance", "maximize": False}
    assert content["config"] == config.as_dict()
    task = quadratic()
    for place, seed in enumerate((3, 4)):
        phi = torch.load(tmp_path / f"seed-{seed}" / "phi.pt")  # what the guard kept is in the model at the end
        assert content["methods"]["metricopt"]["validation"][place] == pytest.approx(task.true_cost(phi))
        away = float(((phi - task.goal - 0.01 * seed) ** 2).sum())
        assert content["methods"]["metricopt"]["test"][place] == pytest.approx(away)
        start = float(((task.goal + 0.01 * seed) ** 2).sum())
        assert content["methods"]["pretrained"]["test"][place] == pytest.approx(start)
    assert report.values("metricopt", "test") == content["methods"]["metricopt"]["test"]
    totals = [record.outcomes["metricopt"][-1].queries_total for record in report.records]
    assert [sum(queries.values()) for queries in content["queries"]] == totals


@pytest.fixture
def tensorboard() -> None:
    pytest.importorskip("tensorboard")


@pytest.mark.slow
@pytest.mark.usefixtures("tensorboard")
def test_a_run_is_resumed_with_more_seeds_but_with_no_other_settings(
    toy: Any, html: Callable[[str], Any], tmp_path: Path
) -> None:
    first = go(tmp_path, toy, settings(seeds=1))
    page = (tmp_path / "report.html").read_text()
    assert_refused(lambda: go(tmp_path, toy), FileFormatError, "--resume")
    assert_refused(lambda: go(tmp_path, toy, settings(queries=39), resume=True), FileFormatError, "queries", "40", "39")
    assert toy.made == [3]
    both = go(tmp_path, toy, resume=True)
    assert toy.made == [3, 4]  # the first seed was taken from its record
    assert both.records[0] == first.records[0]
    assert json.loads((tmp_path / "report.json").read_text())["seeds"] == [3, 4]
    assert first.verdict() in html(page).texts("p")
    assert both.verdict() in html((tmp_path / "report.html").read_text()).texts("p")
    assert first.verdict() != both.verdict()
