"""Settings of a program: how they are written on a command line, and what stands in the command for them."""

from pathlib import Path

import pytest
import yaml

from helpers.refusals import assert_refused
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
    assert_refused(lambda: settings.texts({"s": 501}), ValueError, "501", "10", "500")


@pytest.mark.parametrize(
    ("specs", "defaults", "names"),
    [
        (["nms"], [], ("--setting", "LOW:HIGH:SCALE")),
        (["nms="], [], ("NAME",)),
        (["=1:2"], [], ()),
        (["n m=1:2"], [], ()),
        (["checkpoint=a,b"], [], ("{checkpoint}",)),
        (["trial=1,2"], [], ("{trial}",)),
        (["nms=0.5"], [], ("--setting", "LOW", "HIGH")),
        (["nms=low:high"], [], ("LOW", "HIGH")),
        (["nms=nan:1"], [], ("LOW", "HIGH")),
        (["nms=0:1e999"], [], ("nms", "inf")),
        (["nms=0.1:0.2:log:3"], [], ("LOW:HIGH",)),
        (["nms=0.9:0.3"], [], ()),
        (["nms=0.3:0.9:ln"], [], ("scale", "'ln'")),
        (["nms=0.0:0.9:log"], [], ("log", "0")),
        (["nms=0:1"], [], ("nms=0.0:1.0",)),
        (["nms=a,,b"], [], ("''",)),
        (["nms=a, b"], [], ("' b'",)),
        (["nms=1,1.0"], [], ()),
        (["nms=0.3:0.9,0.5"], [], ("nms=0.3:0.9",)),
        (["nms=a,{b}"], [], ()),
        (["nms=1,2", "nms=3,4"], [], ()),
        (["nms=0.3:0.9"], ["nms=0.2"], ("0.2", "0.3", "0.9")),
        (["nms=0.3:0.9"], ["nms=half"], ("--default", "nms=half")),
        (["nms=0.3:0.9"], ["nsm=0.5"], ("--default", "nsm=0.5", "nms")),
        (["nms=0.3:0.9"], ["nms=0.5", "nms=0.6"], ()),
        (["nms=0.3:0.9"], ["0.5"], ("--default", "0.5", "NAME=VALUE")),
        (["size=320,640"], ["size=480"], ("480", "320", "640")),
        (["mode=a,b"], ["mode=c"], ("'c'", "'a'", "'b'")),
    ],
)
def test_what_is_misread_is_refused(specs: list[str], defaults: list[str], names: tuple[str, ...]) -> None:
    assert_refused(lambda: ProgramSettings(specs, defaults), ConfigError, *names)


def test_names_in_braces_are_all_filled_and_all_there() -> None:
    settings = ProgramSettings(["nms=0.3:0.9", "size=1,2"])
    words = ["run", "--nms={nms}", "{size}x{size}", "{checkpoint}", "{trial}", "{ own }"]
    settings.check_command(words, "--score", ["checkpoint", "trial"])
    assert_refused(lambda: settings.check_command(words, "--score"), ConfigError, "--score")
    settings.check_command(["sh", "-c", "run ${HOME} '{\"a\": 1}' {nms} {size}"], "--score")
    assert_refused(
        lambda: settings.check_command(["run", "{nms}", "{size}", "{iou}"], "--score"),
        ConfigError,
        "--score",
        "{iou}",
        "--setting",
    )
    assert_refused(lambda: settings.check_command(["run", "{nms}"], "--holdout"), ConfigError, "--holdout")


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
