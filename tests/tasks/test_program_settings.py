"""Settings of a program: how they are written on a command line, and what stands in the command for them."""

from pathlib import Path

import pytest
import yaml

from metricopt_ext.errors import ConfigError
from metricopt_ext.tasks.inference_file import load_inference, save_inference
from metricopt_ext.tasks.program_settings import ProgramSettings


def test_an_interval_and_values_as_they_are_written() -> None:
    settings = ProgramSettings(["nms=0.3:0.9", "size=320,480,640", "mode=plain,cuda:0"], ["nms=.5", "mode=cuda:0"])
    assert settings.names == ("nms", "size", "mode")
    assert settings.defaults == {"nms": 0.5, "size": 320, "mode": "cuda:0"}
    assert (settings["nms"].low, settings["nms"].high, settings["nms"].scale) == (0.3, 0.9, "linear")
    assert settings["size"].values == (320, 480, 640)
    assert settings["mode"].values == ("plain", "cuda:0")
    assert settings.assumed == ("size",)
    with settings.applied({"size": 640}) as values:
        assert values == {"nms": 0.5, "size": 640, "mode": "cuda:0"}


@pytest.mark.parametrize(
    ("spec", "default", "whole"),
    [
        ("t=0.3:0.9", 0.6, False),
        ("t=0.001:0.1:log", 0.01, False),
        ("t=0.1:0.9:logit", 0.5, False),
        ("t=0.2:0.5:logit", 1 / 3, False),  # odds of 1/4 and 1: the middle has 1/2
        ("t=10:20", 15, True),
        ("t=1:100:log", 10, True),
        ("t=1:4.0", 2.5, False),
        ("t=-1:1.0:linear", 0.0, False),
        ("t=1e-3:1e-1:log", 0.01, False),
    ],
)
def test_without_a_default_it_is_the_middle_on_the_scale(spec: str, default: float, whole: bool) -> None:
    settings = ProgramSettings([spec])
    assert settings.defaults == {"t": pytest.approx(default, rel=1e-12)}
    assert settings["t"].whole is whole
    assert settings.assumed == ("t",)


def test_integers_are_integers_only_if_the_default_is_one() -> None:
    assert ProgramSettings(["k=0:10"], ["k=3"])["k"].whole
    assert not ProgramSettings(["k=0:10"], ["k=3.0"])["k"].whole
    assert not ProgramSettings(["k=0:1"], ["k=0.5"])["k"].whole


def test_the_text_is_what_was_written_or_a_number_of_ten_digits() -> None:
    settings = ProgramSettings(["v=1.0,1.10,2.00", "s=010:0500", "t=1e-3:0.50", "m=a,1"], ["t=0.10", "v=1.1"])
    assert settings.texts({}) == {"v": "1.10", "s": "255", "t": "0.10", "m": "a"}
    assert settings.texts({"v": 2.0, "s": 10, "t": 0.001, "m": "1"}) == {"v": "2.00", "s": "010", "t": "1e-3", "m": "1"}
    assert settings.texts({"t": 0.30000000000000004, "s": 500})["t"] == "0.3"
    assert settings.texts({"t": 1 / 3})["t"] == "0.3333333333"
    with pytest.raises(ValueError, match=r"s is 501.*integer from 10 to 500"):
        settings.texts({"s": 501})


@pytest.mark.parametrize(
    ("specs", "defaults", "message"),
    [
        (["nms"], [], r"--setting.*LOW:HIGH:SCALE or A,B,C"),
        (["nms="], [], "it must be NAME="),
        (["=1:2"], [], "the name must be letters, digits"),
        (["n m=1:2"], [], "the name must be letters, digits"),
        (["checkpoint=a,b"], [], r"{checkpoint}.*checkpoint's.*use another name"),
        (["trial=1,2"], [], "{trial} is the trial's own"),
        (["nms=0.5"], [], r"--setting.*numbers for LOW and HIGH"),
        (["nms=low:high"], [], "with numbers for LOW and HIGH"),
        (["nms=nan:1"], [], "with numbers for LOW and HIGH"),
        (["nms=0:1e999"], [], "nms: high is inf"),
        (["nms=0.1:0.2:log:3"], [], "it must be LOW:HIGH"),
        (["nms=0.9:0.3"], [], "the lower must be below the upper"),
        (["nms=0.3:0.9:ln"], [], r"scale.*'ln'.*linear, log or logit"),
        (["nms=0.0:0.9:log"], [], "on a log scale it must be above 0"),
        (["nms=0:1"], [], r"nms=0.0:1.0.*them, or nms=0,1"),
        (["nms=a,,b"], [], r"a value.*''.*out blanks and commas"),
        (["nms=a, b"], [], "a value is ' b'; leave out blanks"),
        (["nms=1,1.0"], [], "one is there twice"),
        (["nms=0.3:0.9,0.5"], [], r"'0.3:0.9'.*alone, nms=0.3:0.9"),
        (["nms=a,{b}"], [], "a value can't have braces"),
        (["nms=1,2", "nms=3,4"], [], "two have one name"),
        (["nms=0.3:0.9"], ["nms=0.2"], r"0.2.*number from 0.3 to 0.9"),
        (["nms=0.3:0.9"], ["nms=half"], "--default nms=half must be a number"),
        (["nms=0.3:0.9"], ["nsm=0.5"], r"--default nsm=0.5.*you mean \['nms'\]"),
        (["nms=0.3:0.9"], ["nms=0.5", "nms=0.6"], "a setting is there twice"),
        (["nms=0.3:0.9"], ["0.5"], "--default '0.5': it must be NAME=VALUE"),
        (["size=320,640"], ["size=480"], r"the default.*480; it must be 320 or 640"),
        (["mode=a,b"], ["mode=c"], r"the default.*'c'; it must be 'a' or 'b'"),
    ],
)
def test_what_is_misread_is_refused(specs: list[str], defaults: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ProgramSettings(specs, defaults)


def test_names_in_braces_are_all_filled_and_all_there() -> None:
    settings = ProgramSettings(["nms=0.3:0.9", "size=1,2"])
    words = ["run", "--nms={nms}", "{size}x{size}", "{checkpoint}", "{trial}", "{ own }"]
    settings.check_command(words, "--score", ["checkpoint", "trial"])
    with pytest.raises(ConfigError, match=r"--score.*metricopt tune-checkpoint"):
        settings.check_command(words, "--score")
    settings.check_command(["sh", "-c", "run ${HOME} '{\"a\": 1}' {nms} {size}"], "--score")
    with pytest.raises(ConfigError, match=r"--score has \{iou\}.*--setting.*\{ iou \}"):
        settings.check_command(["run", "{nms}", "{size}", "{iou}"], "--score")
    with pytest.raises(ConfigError, match=r"--holdout.*size would change nothing"):
        settings.check_command(["run", "{nms}"], "--holdout")


def test_the_file_holds_what_the_program_was_told(tmp_path: Path) -> None:
    settings = ProgramSettings(["t=1e-6:0.5:log", "size=320,640", "no=yes,1e3", "k=0.5:2.0"], ["t=1e-5"])
    save_inference(tmp_path, settings, {"no": "1e3", "k": 2 / 3})
    assert yaml.safe_load((tmp_path / "inference.yaml").read_text()) == {
        "t": {"value": 1e-5, "default": 1e-5, "factor": None},
        "size": {"value": 320, "default": 320, "factor": None},
        "no": {"value": "1e3", "default": "yes", "factor": None},
        "k": {"value": 0.6666666667, "default": 1.25, "factor": None},
    }
    assert load_inference(tmp_path) == {"t": 1e-5, "size": 320, "no": "1e3", "k": 0.6666666667}
