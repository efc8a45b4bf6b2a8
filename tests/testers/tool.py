"""The contract of the tools that finetune a model of a config, and of those that tune what a command prints."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from helpers import own
from helpers.pictures import check_figures
from helpers.programs import call, end, refused
from helpers.refusals import having
from testers import FEW

Words = tuple[Any, ...]
SMALL = {"seeds": 1, "workers": 1, "device": "cpu", "queries": 20, "best_evals": 3, "finetune": {"steps": 4}}
"""Settings of a run that is short."""


def report_of(folder: Path) -> Any:
    return json.loads((folder / "report.json").read_text())


class FinetuneTester:
    """A tool that finetunes a model for its metric. A case gives a run of seconds, and judges a model that it kept."""

    program: ModuleType
    config: Mapping[str, Any]
    counted: str  # metric.name of one's own in helpers.own
    beside: str  # another metric, at most 1
    kept = "tuned.safetensors"
    seeds = 2  # of the run that is looked at
    # Overrides, or sections of the settings in place of the usual ones, and what their refusal names.
    refused: Sequence[tuple[Sequence[str] | Mapping[str, Any], Sequence[object]]] = ()
    refused_by_data: Sequence[tuple[Sequence[str] | Mapping[str, Any], Sequence[object]]] = ()  # or by the model

    def judge(self, state: Any, folder: Path) -> float:
        """Return the metric of a state dict on the test data, by another library."""
        raise NotImplementedError

    @classmethod
    def words(cls, folder: Path, *more: object, **sections: Any) -> Words:
        """Return the command line of a run into a folder, perhaps with other sections of the settings."""
        file = folder.with_suffix(".yaml")
        file.write_text(json.dumps({**cls.config, **sections}))  # JSON is YAML
        return ("--config-file", file, "--output-dir", folder, *more)

    @classmethod
    def counted_words(cls, folder: Path, *more: object) -> Words:
        """Return the command line of a run for a metric of one's own that counts its calls."""
        named = (f"metric.name=helpers.own:{cls.counted}", f"metric.folder={own.FOLDER}", "methods=[]")
        return cls.words(folder, *named, *more)

    @pytest.fixture(scope="class")
    @classmethod
    def finished(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A finished run."""
        folder = tmp_path_factory.mktemp("finished") / "run"
        call(cls.program, *cls.words(folder, f"seeds={cls.seeds}", "pictures=[curves]"))
        return folder

    @pytest.fixture(scope="class")
    @classmethod
    def counting(cls, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
        """A finished run for a metric of one's own, and of how many examples each call of that was."""
        folder = tmp_path_factory.mktemp("counting") / "run"
        with own.counting() as asked:
            call(cls.program, *cls.counted_words(folder))
            return folder, list(asked)

    def test_the_report_states_what_the_kept_models_do(self, finished: Path) -> None:
        report = report_of(finished)
        methods = report["methods"]
        assert {*report["kept"]} != {"start"}
        for place, seed in enumerate(sorted(finished.glob("seed-*"))):
            for method, file in (("pretrained", "model.safetensors"), ("metricopt", self.kept)):
                path = seed / file
                state = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
                with torch.no_grad():
                    assert methods[method]["test"][place] == pytest.approx(self.judge(state, seed), abs=1e-6)

    def test_the_table_has_the_numbers_of_the_report(self, finished: Path) -> None:
        rows = [line.split("|")[2:] for line in (finished / "report.md").read_text().splitlines() if "|" in line]
        shown = [[cell.replace("*", "").split(" ")[1:2] for cell in row] for row in rows]
        for name, method in report_of(finished)["methods"].items():
            known = [value for value in method["validation"] if value is not None]
            means = [f"{np.mean(values):.4f}" if values else "" for values in (known, method["test"])]
            cells = [[each] for each in (*means, str(method["queries_total"]))]
            assert cells in [row[:3] for row in shown], name

    def test_its_pictures_are_drawn(self, finished: Path) -> None:
        pictures = list(finished.rglob("*.png"))
        assert {"methods.png", "search.png", "finetuning.png"} <= {path.name for path in pictures}
        check_figures(pictures)

    def test_it_asks_what_it_says_and_what_was_asked_for(
        self, counting: tuple[Path, list[int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Queries are calls on all of validation, and each end is one call on all of test."""
        folder, asked = counting
        report = report_of(folder)
        (told,) = report["evaluations"]
        (purposes,) = report["queries"]
        assert sorted(told.values()) == whole(asked)
        assert told["test"] == len(report["methods"])
        assert told["validation"] == sum(purposes.values()) == report["methods"]["metricopt"]["queries_total"]
        capsys.readouterr()
        with own.counting() as asked:
            call(self.program, *self.counted_words(tmp_path / "run", "--dry-run"))
        said = " ".join(capsys.readouterr().out.split())
        plan = {part: int(n) for part, n in re.findall(r"evaluations on (test|validation) (\d+)", said)}
        assert plan == {"test": told["test"], "validation": self.config["queries"]}
        assert told["validation"] <= plan["validation"]
        assert asked.count(max(asked)) == 2  # timed, and none on test
        assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]

    @pytest.mark.slow
    def test_a_limit_that_nothing_keeps_to_is_told(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """By how much, on which part, in what it prints and writes; and the exit status is 3."""
        words = self.words(tmp_path / "run", "methods=[]", f"metric.subject_to.{self.beside}=>= 2", "pictures=false")
        end(self.program, *words, status=3)
        report = report_of(tmp_path / "run")
        assert (report["holding"], report["kept"]) == ([0], ["start"])
        ((limit, by),) = report["broken"][0].items()
        assert by == pytest.approx(2 - report["also"][self.beside]["validation"]["after"][0])
        for said in (capsys.readouterr().out, (tmp_path / "run" / "report.md").read_text()):
            assert_named(" ".join(said.replace("\\", "").split()), limit, f"{by:.4f}", "validation", "none")

    @settings(max_examples=FEW)
    @given(share=st.floats(0.1, 1))
    def test_killed_anywhere_it_goes_on_to_the_same_end(
        self, counting: tuple[Path, list[int]], tmp_path_factory: pytest.TempPathFactory, share: float
    ) -> None:
        """Killed at a drawn call of the metric; what was asked is not asked again."""
        folder, asked = counting
        other, stop = tmp_path_factory.mktemp("killed") / "run", round(share * len(asked))
        with own.counting(stop):
            assert "--resume" in stopped(self.program, *self.counted_words(other))
        with own.counting() as again:
            call(self.program, *self.counted_words(other, "--resume"))
            assert whole(asked[:stop] + again)[-1] <= whole(asked)[-1] + 1
        assert left(other) == left(folder)

    def test_a_folder_is_of_one_run(self, counting: tuple[Path, list[int]]) -> None:
        """It is neither overwritten nor gone on from under other settings; what is finished is not done again."""
        folder, _ = counting
        words, before = self.counted_words(folder), left(folder)
        with own.counting() as asked:
            assert_named(refused(self.program, *words), folder, "--resume")
            assert_named(refused(self.program, *words, "--resume", "finetune.lr=0.07"), "finetune.lr", "0.07")
            (folder / "report.json").unlink()
            call(self.program, *words, "--resume")
            assert not asked
        assert left(folder) == before
        assert run_began(folder) <= (folder / "seed-0" / "model.safetensors").stat().st_mtime

    @pytest.mark.slow
    def test_a_damaged_record_is_made_anew_as_told(self, counting: tuple[Path, list[int]]) -> None:
        """By deleting it, and without a query, on validation or test, that was answered before."""
        folder, asked = counting
        words, before, record = self.counted_words(folder, "--resume"), left(folder), folder / "seed-0" / "record.json"
        record.write_text("{")
        assert_named(refused(self.program, *words), record, "delete it")
        record.unlink()
        with own.counting() as again:
            call(self.program, *words)
            assert not {*again} & {*sorted({*asked})[-2:]}
        assert left(folder) == before

    def test_its_settings_are_shown_and_read_again(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        shown = []
        for words in (self.counted_words(tmp_path / "run", "queries=33"), ("--config-file", tmp_path / "shown.yaml")):
            call(self.program, *words, "--show-config")
            shown.append(capsys.readouterr().out)
            (tmp_path / "shown.yaml").write_text(shown[-1])
        first, again = ([line.partition("  # ")[0] for line in text.splitlines()] for text in shown)
        assert first == again
        assert {"queries: 33  # command line", "seed: 0  # default"} <= set(shown[0].splitlines())
        assert {path.name for path in tmp_path.iterdir()} == {"run.yaml", "shown.yaml"}

    def test_what_it_can_not_do_is_refused_before_the_folder_is_taken(self, tmp_path: Path) -> None:
        """In one line that names key, value and remedy."""
        usual: list[tuple[Any, list[object]]] = [
            (["metric.nmae=f1"], ["metric.nmae", "metric.name"]),
            (["metric.name=sorcery"], ["sorcery"]),
            (["methods=[sorcery]"], ["methods", "sorcery", "metricopt_paper"]),
            (["queries=many"], ["queries", "many"]),
            (["queries=8"], ["8", "queries", "at least"]),
            (["finetune.lr=0"], ["finetune", "lr"]),
            (["adapter.dim=0"], ["adapter.dim=0", "1"]),
            (["--config-file", "none.yaml"], ["none.yaml"]),
        ]
        for what, names in [*usual, *self.refused]:
            assert_named(self.refusal(tmp_path / "run", what), *names)
            assert not (tmp_path / "run").exists(), what
        for place, (what, names) in enumerate(self.refused_by_data):
            assert_named(self.refusal(tmp_path / str(place), what), *names)
        assert not list(tmp_path.rglob("*.safetensors"))  # nothing was trained
        (tmp_path / "taken").write_text("")
        assert_named(self.refusal(tmp_path / "taken", ()), "taken")

    def refusal(self, folder: Path, what: Sequence[str] | Mapping[str, Any]) -> str:
        """Return why a run into a folder is refused."""
        sections, more = (what, ()) if isinstance(what, Mapping) else ({}, what)
        return refused(self.program, *self.words(folder, *more, **sections))


def whole(asked: Sequence[int]) -> list[int]:
    """Return how often all of validation and all of test were judged, the fewer first.

    Halves, and the few examples on which a metric is tried first, are smaller than both.
    """
    counts = Counter(asked)
    return sorted(counts[size] for size in sorted(counts)[-2:])


def left(folder: Path) -> dict[str, Any]:
    """Return what a run left, but for what the clock says and how often this process asked."""
    report = report_of(folder)
    del report["evaluations"]
    for method in report["methods"].values():
        del method["seconds"]
    kept = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}
    return {"report": report, **kept}


def run_began(folder: Path) -> float:
    return (folder / "run.json").stat().st_mtime


def stopped(program: ModuleType, *words: object) -> str:
    """Return what a program says that ends as Ctrl-C does."""
    said = StringIO()
    with redirect_stderr(said), pytest.raises(SystemExit) as caught:
        call(program, *words)
    assert caught.value.code == 130
    return said.getvalue()


def assert_named(said: str, *names: object) -> None:
    assert re.search(having(*names), said), said


BEFORE = """
import json, math, os, random, sys, time
with open("ran", "a") as file:
    file.write(".")
if os.path.exists("stop") and len(open("ran").read()) >= int(open("stop").read()):
    sys.exit("stopped")
trial = sys.argv[-1]
"""
AFTER = """
print(f"score {value:.9f} even {value + chance:.9f} odd {value - chance:.9f}")
"""
PARSE = ("--parse", r"score (\S+)")
HALVES = ("--halves", r"even (\S+)", r"odd (\S+)")


class CommandTester:
    """A tool that tunes what a command prints. A case gives the command's code, which has ``value`` and ``chance``.

    What the code is given ends with the name of the trial; chance is half of what two halves of the data differ by.
    """

    program: ModuleType
    code: str
    given: str  # what the command is given, e.g. "{checkpoint}"
    switches: Words
    kept: str  # the file that holds what was kept
    queries = 14
    another: Words  # other settings, with which a run is not gone on with
    refused: Sequence[tuple[Words, Sequence[object]]] = ()

    def command(self, report: Any) -> list[str]:
        """Return the command with what a run kept."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Run in a folder of the test's own."""
        monkeypatch.chdir(tmp_path)
        return tmp_path

    def score(self, edit: str = "", name: str = "score.py") -> str:
        """Write the code with an edit of value and chance; returns the command."""
        Path(name).write_text(f"{BEFORE}{self.code}\n{edit}\n{AFTER}")
        return f"{shlex.quote(sys.executable)} -S {name} {self.given} {{trial}}"

    def words(self, score: str, *more: object, out: str = "out") -> Words:
        """Return the arguments of a run; a later one of a kind counts."""
        usual = ("--score", score, *PARSE, "--queries", self.queries, "--output-dir", out)
        return (
            *usual,
            *(each.replace("out", out) if each.startswith("out") else each for each in self.switches),
            *more,
        )

    def tune(self, *words: object, status: int = 0, out: str = "out") -> Any:
        """Run the tool; returns its report."""
        end(self.program, *words, status=status)
        return None if status else report_of(Path(out))

    def test_it_runs_the_command_as_often_as_it_was_asked_and_says(self) -> None:
        report = self.tune(*self.words(self.score(), *HALVES))
        runs, asked = ran(), sum(report["queries"].values())
        assert runs == asked <= self.queries
        assert [path.suffix for path in Path("out/trials").iterdir()] == [".log"] * asked

    def test_what_is_kept_scores_what_the_report_says(self) -> None:
        for edit, minimize in (("", ()), ("value = -value", ("--minimize",))):
            report = self.tune(*self.words(self.score(edit), *HALVES, *minimize))
            assert report["after"] < report["before"] if minimize else report["after"] > report["before"]
            assert (report["guard"]["by"], report["failed"]) == ("halves", 0)
            own = subprocess.run(self.command(report), capture_output=True, text=True, check=True)
            assert float(own.stdout.split()[1]) == pytest.approx(report["after"], abs=1e-8)
            shutil.rmtree("out")

    def test_a_gain_by_chance_is_not_kept(self) -> None:
        noise = "value, chance = (random.Random(str(sys.argv[1:]) + half).random() for half in 'ab')"
        report = self.tune(*self.words(self.score(noise), *HALVES))
        assert report["after"] == report["before"]

    def test_data_held_out_have_the_last_word(self) -> None:
        report = self.tune(*self.words(self.score(), "--holdout", self.score(name="same.py")))
        assert (report["guard"]["by"], report["queries"]["held out"]) == ("held-out", 2)
        assert set(report["guard"]["held out"].values()) <= {report["before"], report["after"]}
        assert report["after"] > report["before"]
        other = self.words(self.score(), "--holdout", self.score("value = -value", "other.py"), out="other")
        report = self.tune(*other, out="other")
        assert report["after"] == report["before"]

    def test_a_limit_is_kept_to_where_a_trial_does_or_its_breach_is_told(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """By how much, with the exit status 3; no data held out bring back defaults that alone break it."""
        load, limit = ("--also", r"load=load (\S+)"), "load: >= start + 0.001"
        score = self.score("print('load', value)")
        self.tune(*self.words(score, *load, "--subject-to", "load: >= 7"), status=3)
        report, (words,) = report_of(Path("out")), report_of(Path("out"))["broken"]
        assert report["after"] == report["before"]
        assert report["broken"] == {"load >= 7": pytest.approx(7 - report["after"], abs=1e-8)}
        assert_named(capsys.readouterr().out, words, f"{report['broken'][words]:.4f}")
        against = ("--holdout", self.score("value = -value", "other.py"))
        report = self.tune(*self.words(score, *load, "--subject-to", limit, *against, out="other"), out="other")
        assert report["broken"] == {}
        assert report["after"] > report["before"]

    @settings(max_examples=FEW)
    @given(share=st.floats(0, 1), jobs=st.integers(1, 3))
    def test_stopped_anywhere_it_goes_on_to_the_same_end_whatever_the_jobs(
        self, folder: Path, share: float, jobs: int
    ) -> None:
        """None is paid for twice but those that were under way."""
        for each in ("out", "whole"):
            shutil.rmtree(each, ignore_errors=True)
        for each in ("ran", "stop", self.kept):
            Path(each).unlink(missing_ok=True)
        whole = self.tune(*self.words(self.score(), *HALVES, out="whole"), out="whole")
        Path("stop").write_text(str(ran() + 1 + round(share * (ran() - 1))))
        words, before = self.words(self.score(), *HALVES, "--jobs", jobs), ran()
        self.tune(*words, status=1)
        assert not Path(self.kept).exists()
        Path("stop").unlink()
        report = self.tune(*words, "--resume")
        assert 2 * before < ran() <= 2 * before + jobs
        assert {**report, **CLOCK} == {**whole, **CLOCK}
        assert Path(self.kept).read_bytes() == Path(self.kept.replace("out", "whole")).read_bytes()

    def test_a_folder_is_of_one_run(self, capsys: pytest.CaptureFixture[str]) -> None:
        words = self.words(self.score(), *HALVES)
        report, runs, kept = self.tune(*words), ran(), Path(self.kept).read_bytes()
        self.tune(*words, status=1)
        assert_named(capsys.readouterr().err, "out", "--resume")
        self.tune(*words, "--resume", *self.another, status=1)
        assert_named(capsys.readouterr().err, self.another[0].removeprefix("--"))
        again = self.tune(*words, "--resume")
        assert {**again, **CLOCK} == {**report, **CLOCK}
        assert (ran(), Path(self.kept).read_bytes()) == (runs, kept)

    def test_a_dry_run_scores_once_and_leaves_the_folder_free(self) -> None:
        end(self.program, *self.words(self.score(), *HALVES, "--dry-run"))
        assert ran() == 1
        assert not Path(self.kept).exists()
        assert not Path("out/run.json").exists()
        self.tune(*self.words(self.score(), *HALVES))

    def test_a_command_that_fails_ends_before_anything_is_tuned(self, capsys: pytest.CaptureFixture[str]) -> None:
        """With the end of what it printed, and the folder is free for the right command."""
        broken = self.score("[print('line', i) for i in range(30)]; sys.exit('no such dataset')")
        self.tune(*self.words(broken, "--failures", "5"), status=1)
        said = capsys.readouterr().err
        assert "no such dataset" in said
        assert "line 29\n" in said
        assert "line 5\n" not in said
        assert ran() == 1
        assert self.tune(*self.words(self.score()))["guard"]["by"] == "none"

    def test_failures_are_allowed_or_end_the_run(self, capsys: pytest.CaptureFixture[str]) -> None:
        score = self.score("if len(open('ran').read()) == 3: sys.exit('no memory')")
        self.tune(*self.words(score, *HALVES), status=1)
        assert_named(capsys.readouterr().err, "--failures", 0)
        Path("ran").unlink()
        assert self.tune(*self.words(score, *HALVES, "--failures", 1, out="other"), out="other")["failed"] == 1

    def test_what_can_not_be_meant_is_refused_before_anything_runs(self, capsys: pytest.CaptureFixture[str]) -> None:
        usual = [
            (("--score", f"no-such-program {self.given}"), ["no-such-program"]),
            (("--score", self.score().replace(self.given.split()[0], "")), [self.given.split()[0]]),
            (("--parse", "score"), ["--parse", "score"]),
            (("--queries", "0"), ["--queries", "0", "1"]),
            (("--jobs", "0"), ["--jobs", "0"]),
            (("--timeout", "0"), ["--timeout", "0"]),
            (("--default", "iou=0.5"), ["--default", "iou=0.5"]),
            (("--parse-json", "a.json:b"), ["--parse"]),
        ]
        for more, names in [*usual, *self.refused]:
            with pytest.raises(SystemExit) as caught:
                call(self.program, *self.words(self.score(), *more))
            assert_named(f"{capsys.readouterr().err} {caught.value.code}", *names)
            assert not Path("ran").exists(), more
            assert not Path("out").exists(), more


CLOCK = dict.fromkeys(("seconds", "seconds of a trial", "config", "command"))


def ran() -> int:
    """Return how often the command was run."""
    return len(Path("ran").read_text())
