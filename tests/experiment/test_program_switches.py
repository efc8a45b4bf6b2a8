"""Switches of a command that scores: what they are read as, what is refused, what is printed of settings."""

import argparse
import json
from pathlib import Path

import pytest

from helpers.refusals import assert_refused
from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.program_switches import (
    Scores,
    add_score_switches,
    add_setting_switches,
    as_written,
    identity_of,
    print_settings,
    read_scores,
    show_end,
    unguarded,
)
from metricopt_ext.tasks.program_score import Written
from metricopt_ext.tasks.program_settings import ProgramSettings


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_score_switches(parser, "{checkpoint}")
    add_setting_switches(parser, required=False)
    parser.add_argument("--dim", type=int, default=2)
    least = ["--score", "echo {a} {checkpoint}", "--parse", "(.*)", "--queries", "9", "--output-dir", "out"]
    return parser.parse_args([*least, *words])


def read(*words: str) -> Scores:
    return read_scores(parsed(*words), least=[("dim", 1)], needed=["checkpoint"])


def test_a_command_with_settings_is_filled_with_values() -> None:
    scores = read("--setting", "a=1,2", "--repeats", "3", "--timeout", "5", "--halves", "a(.)", "b(.)")
    assert scores.settings is not None
    assert scores.settings.defaults == {"a": 1}
    assert (scores.score.repeats, scores.score.timeout, len(scores.score.halves or ())) == (3, 5.0, 2)
    assert scores.holdout is None
    assert scores.score.words == ["echo", "{a}", "{checkpoint}"]
    assert scores.at({"a": 2})[0].words == ["echo", "2", "{checkpoint}"]
    assert scores.at({})[0].words == ["echo", "1", "{checkpoint}"]


def test_data_held_out_have_settings_too_but_no_halves() -> None:
    words = ["--setting", "a=1,2", "--halves", "a(.)", "b(.)", "--holdout", "echo {checkpoint} held {a}"]
    holdout = read(*words).at({"a": 2})[1]
    assert holdout is not None
    assert holdout.words == ["echo", "{checkpoint}", "held", "2"]
    assert holdout.halves is None


def test_other_numbers_and_their_limits() -> None:
    also = ["--also", "acc=acc=(.)", "--also", "recall[a:b] = r (.)"]
    scores = read(*also, "--subject-to", "acc: >= start - 0.005", "--subject-to", "recall[a:b]: <= 0.5")
    assert list(scores.score.also) == ["acc", "recall[a:b]"]
    assert scores.subject_to == {"acc": ">= start - 0.005", "recall[a:b]": "<= 0.5"}
    assert read(*also, "--holdout", "echo {checkpoint}").at({})[1].also == {}  # type: ignore[union-attr]
    asked = ["--also", "acc=out/{trial}.json:acc", "--subject-to", "acc: >= 0"]
    arguments = parsed(*asked)
    arguments.parse, arguments.parse_json = None, "out/{trial}.json:f1"
    assert isinstance(read_scores(arguments).score.also["acc"], Written)
    assert identity_of(arguments)["subject_to"] == ["acc: >= 0"]
    arguments.also, arguments.jobs = ["acc=out/all.json:acc"], 2
    assert_refused(lambda: read_scores(arguments), ConfigError, "--jobs", "2", "acc=out/all.json:acc")


def test_without_settings_other_braces_stay() -> None:
    scores = read()
    assert scores.settings is None
    assert scores.at({}) == (scores.score, None)
    assert scores.score.words == ["echo", "{a}", "{checkpoint}"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dim", "0"], "--dim 0: it must be at least 1"),
        (["--failures", "-1"], "--failures -1: it must be at least 0"),
        (["--score", "echo {a}"], "has no {checkpoint}"),
        (
            ["--score", "echo {checkpoint} {Trail}"],
            "has {Trail}, which nothing fills; did you mean {trial}?",
        ),
        (["--parse", ""], "--parse '' has no group"),
        (["--setting", "b=1,2"], "which nothing fills; add --setting a="),
        (["--setting", "a=1,2", "--holdout", "echo {checkpoint}"], "--holdout has no {a}"),
        (["--default", "a=1"], "--default a=1: there is no --setting"),
        (["--score", "echo {checkpoint}", "--holdout", "echo  '{checkpoint}'"], "is --score itself, which the search"),
        (["--also", "acc"], "--also 'acc': it must be NAME=WHERE"),
        (["--also", "=(.)"], "--also '=(.)': it must be NAME=WHERE"),
        (["--also", "score=(.)"], "--also 'score=(.)': there is a 'score'"),
        (["--also", "a=(.)", "--also", "a=b(.)"], "--also 'a=b(.)': there is a 'a' already"),
        (["--also", "a=b"], "--also a 'b' has no group"),
        (["--also", "a=(.)", "--subject-to", "a > 1"], "'a > 1': it must be 'NAME: LIMIT'"),
        (["--also", "a=(.)", "--subject-to", "a: > 1"], "no constraint; write '>= 0.9'"),
        (["--subject-to", "a: >= 1"], ">= 1': nothing reads 'a'; add --also"),
        (["--subject-to", "score: >= 1"], "which is the metric itself"),
        (["--also", "a=(.)", *["--subject-to", "a: >= 1"] * 2], "'a' has a limit already"),
    ],
)
def test_what_can_not_be_meant_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(*words)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ([], "; give --halves, --repeats or --holdout"),
        (["--repeats", "2"], "; give --halves or --holdout"),
        (["--repeats", "2", "--halves", "(a)", "(b)"], "; give --holdout"),
        (["--repeats", "2", "--halves", "(a)", "(b)", "--holdout", "echo"], ""),
    ],
)
def test_a_remedy_that_is_in_use_is_not_named(words: list[str], remedy: str) -> None:
    assert unguarded(parsed(*words), "none") == [f"unguarded: a gain can't be told from chance{remedy}"]
    assert unguarded(parsed(*words), "halves") == []


def test_a_run_without_settings_is_told_apart_as_before() -> None:
    plain = identity_of(parsed(), "dim")
    assert set(plain) == {
        *("score", "parse", "parse_json", "halves", "holdout", "repeats", "minimize", "queries", "dim")
    }
    with_settings = identity_of(parsed("--setting", "a=1,2", "--default", "a=2"), "dim")
    assert with_settings == {**plain, "setting": ["a=1,2"], "default": ["a=2"]}
    assert json.loads(json.dumps(as_written(parsed())))["output_dir"] == "out"


def test_settings_are_printed_with_what_they_become(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ProgramSettings(["a=0.10,0.20", "k=1:9"], ["k=4"])
    print_settings(settings)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["setting", "may", "be", "now"]
    assert ["a", "0.1", "or", "0.2", "0.10", "(assumed)"] in rows
    assert ["k", "an", "integer", "from", "1", "to", "9", "4"] in rows
    print_settings(settings, {"a": 0.2})
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["a", "0.1", "or", "0.2", "0.10", "(assumed)", "0.20"] in rows
    assert ["k", "an", "integer", "from", "1", "to", "9", "4", "4"] in rows


def test_the_end_of_a_log_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "0.log").write_text("".join(f"line {n}\n" for n in range(30)))
    show_end(tmp_path / "0.log")
    said = capsys.readouterr().err.splitlines()
    assert said[1:] == [f"line {n}" for n in range(10, 30)]
