"""Switches of a command that scores: what they are read as, what is refused, what is printed of settings."""

import argparse

import pytest

from helpers.refusals import assert_refused
from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.program_switches import (
    Scores,
    add_score_switches,
    add_setting_switches,
    identity_of,
    read_scores,
)
from metricopt_ext.tasks.combine import Combination
from metricopt_ext.tasks.program_score import PrintedByName, Written, WrittenByName


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_score_switches(parser, "{checkpoint}")
    add_setting_switches(parser, required=False)
    parser.add_argument("--dim", type=int, default=2)
    least = ["--score", "echo {a} {checkpoint}", "--parse", "(.*)", "--queries", "9", "--output-dir", "out"]
    return parser.parse_args([*least, *words])


def read(*words: str) -> Scores:
    return read_scores(parsed(*words), least=[("dim", 1)], needed=["checkpoint"])


def test_data_held_out_have_settings_too_but_no_halves() -> None:
    words = ["--setting", "a=1,2", "--halves", "a(.)", "b(.)", "--holdout", "echo {checkpoint} held {a}"]
    holdout = read(*words).at({"a": 2})[1]
    assert holdout is not None
    assert holdout.command({}) == ["echo", "{checkpoint}", "held", "2"]
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


def test_outcomes_make_the_score_of_each_command() -> None:
    by_name, also = (
        ["--combine", "worst", "--parse", r"(\w+)=(\S+)"],
        ["--also", "acc=(.)", "--subject-to", "acc: >= 0"],
    )
    scores = read(*by_name, *also, "--minimize", "--holdout", "echo {checkpoint}")
    assert isinstance(scores.score.score, PrintedByName)
    seen, aside = (each and each.scale and each.scale.combination for each in (scores.score, scores.holdout))
    assert (seen, aside) == (Combination("worst", 1, None, ("acc",)), Combination("worst", 1))
    assert identity_of(parsed(*by_name))["combine"] == "worst"
    arguments = parsed("--combine", "mean")
    arguments.parse, arguments.parse_json = None, "out/{trial}.json:recalls"
    assert isinstance(read_scores(arguments).score.score, WrittenByName)
    assert read().score.scale is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--combine", "mean"], "--parse '(.*)' has 1 group"),
        (["--combine", "mean", "--parse", "(.)=(.)", "--halves", "a(.)", "b(.)"], "--halves with --combine"),
        (["--combine", "mean", "--parse", "(.)=(.)", "--also", "acc=(.)"], "--also acc with --combine"),
        (["--dim", "0"], "--dim 0: it must be at least 1"),
        (["--score", "echo {checkpoint} {Trail}"], "has {Trail}, which nothing fills; did you mean ['trial']?"),
        (["--setting", "a=1,2", "--holdout", "echo {checkpoint}"], "--holdout has no {a}"),
        (["--score", "echo {checkpoint}", "--holdout", "echo  '{checkpoint}'"], "is --score itself, which the search"),
        (["--also", "score=(.)"], "--also 'score=(.)': there is a 'score'"),
        (["--also", "a=(.)", "--subject-to", "a: > 1"], "no constraint; write '>= 0.9'"),
        (["--subject-to", "a: >= 1"], ">= 1': nothing reads 'a'; add --also"),
    ],
)
def test_what_can_not_be_meant_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(*words)
    assert message in str(caught.value)
