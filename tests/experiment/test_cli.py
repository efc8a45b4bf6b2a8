"""The command line that the tools share: what it makes of its arguments, how it fails, and what a run leaves."""

import json
import runpy
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.refusals import assert_refused, assert_warned
from metricopt_ext.errors import ConfigError, FileFormatError, MetricError
from metricopt_ext.experiment import cli
from metricopt_ext.experiment.config_sections import AdapterConfig
from metricopt_ext.experiment.experiment import Experiment, Subject
from metricopt_ext.experiment.method_config import FinetuneConfig, RecipeConfig, SearchConfig
from metricopt_ext.experiment.run_config import RunConfig
from metricopt_ext.experiment.style import new_figure, save_figure
from metricopt_ext.plain import MESSAGE, in_markdown, plain
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.utils.config import leaf_keys

ROOT = Path(__file__).parents[2]


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


@pytest.mark.parametrize("task", cli.TASKS)
def test_each_task_has_an_experiment(task: str) -> None:
    if task == "retrieval":
        pytest.importorskip("faiss")
    experiment = cli.experiment_of(task)
    assert experiment.__module__ == f"metricopt_ext.{task}.experiment"
    assert issubclass(experiment, Experiment)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[ToyConfig, Path, bool]]:
    """Call `main_of` with a command line and a config file; return what it ran."""
    file = tmp_path / "config.yaml"
    file.write_text("queries: 700\nfinetune: {lr: 0.5}\nseed: 5\n")

    def call(*arguments: Any, run: Callable[..., object] | None = None) -> tuple[ToyConfig, Path, bool]:
        ran: list[tuple[ToyConfig, Path, bool]] = []
        monkeypatch.setattr(sys, "argv", ["tool.py", "--config-file", str(file), *map(str, arguments)])
        keep = run or (lambda experiment, *given: ran.append(given))
        monkeypatch.setattr(cli, "run_and_report", keep)
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


def test_the_configuration_is_shown_without_a_folder(called: Any, capsys: pytest.CaptureFixture[str]) -> None:
    # nothing was run
    assert_refused(lambda: called("--show-config", "queries=800", "--seed", 9, "--kind", "fancy"), ValueError)
    lines = capsys.readouterr().out.splitlines()
    assert {"queries: 800  # command line", "seed: 9  # command line", "kind: fancy  # command line"} <= set(lines)
    assert {"seeds: 5  # default", "  lr: 0.5  # config file"} <= set(lines)
    assert len([line for line in lines if "  # " in line]) == len(leaf_keys(ToyConfig()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "arguments are required: --output-dir"),
        (("--output-dir", "out", "--seed", "first"), "--seed: invalid int value: 'first'"),
        (("--output-dir", "out", "--kind", "odd"), "argument --kind: invalid choice: 'odd'"),
        (("--output-dir", "out", "--sede", "3"), "--sede"),
    ],
)
def test_options_that_are_wrong_end_with_the_usage(
    called: Any, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        called(*arguments, run=lambda *given: pytest.fail("was run"))
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("quires=3",), "error: unknown key 'quires'; did you mean 'queries'?"),
        (("finetune.lr",), "error: override 'finetune.lr' is not of the form key=value"),
        (
            ("--config-file", "none.yaml"),
            "error: config file none.yaml does not exist, neither here nor among the package's own;"
            " `metricopt configs` lists them",
        ),
    ],
)
def test_settings_that_are_wrong_end_in_one_line(called: Any, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(SystemExit) as caught:
        called("--output-dir", "out", *arguments, run=lambda *given: pytest.fail("was run"))
    assert caught.value.code == message


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("model.lr=0:\n  it must be\tabove 0"),
        MetricError("the metric is down"),
        FloatingPointError("the gradient is not finite"),
        FileNotFoundError(2, "No such file or directory", "data.csv"),
        FileNotFoundError(2, "No such file or directory", "\x1b[31m"),
    ],
)
def test_what_a_user_can_mend_ends_in_one_line(called: Any, error: Exception) -> None:
    def fail(*given: Any) -> None:
        raise error

    with pytest.raises(SystemExit) as caught:
        called("--output-dir", "out", run=fail)
    assert caught.value.code == "error: " + " ".join(str(error).split())


def test_the_one_line_is_plain_and_cut(called: Any) -> None:
    def fail(*given: Any) -> None:
        raise OSError("a\x1b]0;owned\x07\u202e\n" + "b" * 10_000 + " use another")

    with pytest.raises(SystemExit) as caught:
        called("--output-dir", "out", run=fail)
    line = str(caught.value.code)
    assert line.startswith(r"error: a\x1b]0;owned\x07\u202e bbb")
    assert line.endswith("b use another")
    assert len(line) == len("error: ") + MESSAGE


def test_what_a_user_cannot_mend_keeps_its_traceback(called: Any) -> None:
    def fail(*given: Any) -> None:
        raise ZeroDivisionError("a bug")

    assert_refused(lambda: called("--output-dir", "out", run=fail), ZeroDivisionError, "a bug")


def test_help_tells_the_settings_and_examples(called: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        called("--help")
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert "A tool." in shown
    assert "those of ToyConfig" in " ".join(shown.split())
    assert "kind=fancy" in shown


@pytest.mark.parametrize(
    "script",
    [
        *("tools/finetune_classifier", "tools/finetune_retrieval", "tools/finetune_detector", "tools/compare"),
        *("benchmarks/compare_starts", "benchmarks/ablate_recipe"),
        *("benchmarks/measure_search", "benchmarks/measure_correlation", "benchmarks/measure_checkpoints"),
    ],
)
def test_help_warns_of_configs_that_run_code(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--help"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / f"{script}.py"), run_name="__main__")
    assert cli.RUNS_CODE in capsys.readouterr().out.splitlines()


# --- A whole run -------------------------------------------------------------------------------------------------


def settings(**change: Any) -> ToyConfig:
    given = {"queries": 40, "seeds": 2, "seed": 3, "pictures": ["curves"], **change}
    return ToyConfig(adapter=AdapterConfig(dim=4), finetune=FinetuneConfig(10, 0.1), **given)


METHODS = {
    "search": SearchConfig(),
    "recipe": RecipeConfig(evals=3, rounds=1, folds=2, trials=0, learners=["ridge"]),
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
    page = (tmp_path / "report.html").read_text()
    assert not (tmp_path / "value_function.png").exists()
    assert (tmp_path / "search.png").exists()
    assert "predicted" not in page


@pytest.mark.slow
@pytest.mark.usefixtures("tensorboard")
@pytest.mark.parametrize(("strategy", "course"), [("search", "search.png"), ("recipe", "finetuning.png")])
def test_a_run_leaves_its_report_pictures_and_seeds(
    strategy: str,
    course: str,
    html: Callable[[str], Any],
    toy: Any,
    quadratic: Callable[..., Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = settings(method=METHODS[strategy])
    report = go(tmp_path, toy, config)
    shown = capsys.readouterr().out
    assert toy.made == [3, 4]
    assert toy.plotted == [[3, 4]]
    assert "squares: distance (lower is better), 2 seeds of 40 queries\n" in shown
    drawn = dict.fromkeys(["methods.png", course, "finetuning.png", "value_function.png", "more.png"])
    named = ["report.json", "report.md", "report.html", *drawn]
    assert [line.strip() for line in shown.split("\nwrote\n")[1].splitlines()] == [
        *(str(tmp_path / name) for name in named),
        f"and {tmp_path}/seed-*/",
    ]
    assert {path.name for path in tmp_path.iterdir()} == {
        *named,
        "run.json",
        "log.txt",
        ".lock",
        "events",
        "seed-3",
        "seed-4",
    }

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
    page = html((tmp_path / "report.html").read_text())
    page.check()
    assert len([name for name, _ in page.elements if name == "img"]) == len(drawn)
    assert page.texts("p")[0] == report.verdict()
    assert f"{report.verdict()}\n" in (tmp_path / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("tensorboard")
@pytest.mark.parametrize(
    ("seeds", "strategy"),
    [(1, "search"), (2, "recipe")],
)
def test_a_metric_may_have_any_name(
    toy: Any,
    html: Callable[[str], Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    seeds: int,
    strategy: str,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    # Markup, an emoji, a wrong formula, placeholders; what a terminal obeys, and columns, code and links of Markdown.
    name = "<script>[/red]f[1] :key: $\\frac$ {0} %s\x1b]0;owned\x07\u202e|`a` [b](c)\n# d"
    seen, in_page = plain(name), in_markdown(name)
    assert seen.endswith(r"\x1b]0;owned\x07\u202e|`a` [b](c)\n# d")

    class Hostile(toy):  # type: ignore[misc]
        @classmethod
        def describe(cls, config: ToyConfig) -> Subject:
            return Subject("toy/[/b]", "[/b]squares", name, maximize=False)

        def prepare(self) -> Any:
            task, distance = super().prepare()
            task.metric.name = distance.name = name
            return task, distance

    folder, config = tmp_path / "[/i]out", settings(seeds=seeds, method=METHODS[strategy])
    report = go(folder, Hostile, config)
    shown = capsys.readouterr().out
    noun = "seed" if seeds == 1 else "seeds"
    assert f"[/b]squares: {seen} (lower is better), {seeds} {noun} of 40 queries\n" in shown
    assert f"toy/[/b]: {seen} (lower is better), {seeds} {noun}\n" in shown
    assert f"\n  {folder}/report.md\n" in shown
    assert (folder / "report.md").read_text().startswith(f"# toy/[/b]: {in_page} (lower is better)\n")
    assert html((folder / "report.html").read_text()).texts("h1") == [
        f"toy/[/b]: {plain(name, lines=True)} (lower is better)"
    ]
    before, after = (report.records[0].outcomes[method][-1] for method in ("pretrained", "metricopt"))
    last = f"{after.queries_total} of 40 queries spent, {40 - after.queries_total} left;"
    outcome = f"{last} {seen} {before.validation:.4f} -> {after.validation:.4f}\n"
    assert f"seed 3  done; {outcome}" in shown
    go(folder, Hostile, config, resume=True)
    again = capsys.readouterr().out
    assert f"seed 3  on file; {last} {seen} {after.validation:.4f}\n" in again
    assert f"seed 3  done; {outcome}" in again
    files = [shown, again, *((folder / file).read_text() for file in ("log.txt", "report.md", "report.html"))]
    for text in files:
        assert text.replace("\n", "").replace("─", "").isprintable()


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
    assert_refused(lambda: go(tmp_path, toy, settings(queries=41), resume=True), FileFormatError, "queries", "40", "41")
    assert toy.made == [3]
    both = go(tmp_path, toy, resume=True)
    assert toy.made == [3, 4]  # the first seed was taken from its record
    assert both.records[0] == first.records[0]
    assert json.loads((tmp_path / "report.json").read_text())["seeds"] == [3, 4]
    assert first.verdict() in html(page).texts("p")
    assert both.verdict() in html((tmp_path / "report.html").read_text()).texts("p")
    assert first.verdict() != both.verdict()


def logged(folder: Path) -> list[str]:
    """The lines of a run's log without their time stamps."""
    return [line.split("  ", 1)[1] for line in (folder / "log.txt").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.usefixtures("tensorboard")
def test_the_log_has_what_was_shown_and_the_error_and_goes_on_when_the_run_is_resumed(
    toy: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing(toy):  # type: ignore[misc]
        down = True

        def prepare(self) -> Any:
            task, distance = super().prepare()
            warnings.warn("odd", stacklevel=1)
            if self.down and self.seed == 4:
                raise MetricError("the metric is down")
            return task, distance

    with pytest.raises(MetricError):
        assert_warned(lambda: go(tmp_path, Failing), "odd")
    first = logged(tmp_path)
    assert first[0] == "squares: distance (lower is better), 2 seeds of 40 queries"
    assert first[1:3] == ["seed 3  train the model", "seed 3  warning: UserWarning: odd"]
    assert first[-1] == "error: MetricError: the metric is down"
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("seed ")]
    assert len(shown) > 5
    told = [line for line in first if line.startswith("seed ") and "warning" not in line]
    without_time = [[line.partition("; about ")[0] for line in lines] for lines in (shown, told)]  # each has a clock
    assert without_time[0] == without_time[1]

    Failing.down = False
    assert_warned(lambda: go(tmp_path, Failing, resume=True), "odd")
    whole = logged(tmp_path)
    assert whole[: len(first)] == first
    assert whole[len(first)] == f"{first[0]}, resumed"
    assert whole[len(first) + 1] == "seed 3  on file"
    assert whole[-1] == "finished"
    with pytest.raises(FileFormatError):
        go(tmp_path, Failing)
    assert logged(tmp_path) == whole  # it is not this run's


@pytest.mark.slow
@pytest.mark.usefixtures("tensorboard")
def test_events_have_each_query_of_metricopt_once_even_of_a_resumed_run(toy: Any, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    class Failing(toy):  # type: ignore[misc]
        down = True

        def validation(self) -> Any:
            return [], self.task.batches

        def finish(self) -> None:
            if self.down:
                raise MetricError("not today")
            super().finish()

    def scalars() -> dict[str, list[tuple[int, float]]]:
        events = EventAccumulator(str(tmp_path / "events" / "seed-3" / "queries"))
        events.Reload()
        return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}

    with pytest.raises(MetricError):
        go(tmp_path, Failing, settings(seeds=1))
    before = scalars()
    Failing.down = False
    report = go(tmp_path, Failing, settings(seeds=1), resume=True)
    assert scalars() == before
    costs = report.records[0].searched
    outcome = report.records[0].outcomes["metricopt"][-1]
    steps, values = zip(*before["queries/distance"], strict=True)
    assert list(steps) == list(range(1, outcome.queries_total + 1))
    assert set(torch.tensor(costs, dtype=torch.float32).tolist()) <= set(values)
    assert before["queries/best"][-1] == (len(steps), min(values))
    assert before["queries/left"][-1] == (len(steps), 40 - len(steps))
    assert before["value_function/spearman"][-1][1] == pytest.approx(report.records[0].quality.spearman)
