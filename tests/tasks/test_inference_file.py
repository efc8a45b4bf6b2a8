"""Settings of inference are read as they were written, or refused with what is wrong."""

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.refusals import assert_refused
from metricopt_ext.errors import FileFormatError
from metricopt_ext.tasks.inference_file import load_inference, save_inference, scalar
from metricopt_ext.tasks.settings import Setting, Settings

SETTINGS = Settings(
    [
        Setting("score_thresh", 0.00001, 0.95, scale="logit", default=0.05),
        Setting("size", values=(0.71, 1.0, 1.41), default=1.0, inference=lambda value: float(value) ** 2),
        Setting("flip", values=(False, True), default=False, inference=2.0),
        Setting("detections", 1, 1000, default=100),
        Setting("distance", values=("cosine", "yes", "1e-3", "${x}", "Kröte: #1"), default="cosine"),
    ],
    apply=lambda values: nullcontext(),
)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"score_thresh": 0.00002, "size": 1.41, "flip": True, "detections": 300, "distance": "yes"},
        {"score_thresh": 0.1 + 0.2, "distance": "1e-3"},
        {"distance": "${x}"},
        {"distance": "Kröte: #1"},
    ],
)
def test_values_come_back_with_their_types(values: dict[str, Any], tmp_path: Path) -> None:
    save_inference(tmp_path, SETTINGS, values)
    assert [each.name for each in tmp_path.iterdir()] == ["inference.yaml"]
    for path in (tmp_path, tmp_path / "inference.yaml"):
        found = load_inference(path)
        assert list(found.items()) == list(SETTINGS.complete(values).items())
        assert list(map(type, found.values())) == list(map(type, SETTINGS.complete(values).values()))
    with SETTINGS.applied(found) as applied:
        assert applied == found


def test_default_and_factor_are_beside_the_value(tmp_path: Path) -> None:
    save_inference(tmp_path / "mine.yaml", SETTINGS, {"size": 1.41, "flip": True})
    content = yaml.safe_load((tmp_path / "mine.yaml").read_text())
    assert content["size"] == {"value": 1.41, "default": 1.0, "factor": pytest.approx(1.41**2)}
    assert content["flip"] == {"value": True, "default": False, "factor": 2.0}
    assert content["score_thresh"] == {"value": 0.05, "default": 0.05, "factor": 1.0}


def test_what_is_free_is_said_to_be_for_the_metric_alone(tmp_path: Path) -> None:
    settings = Settings(
        [SETTINGS["detections"], SETTINGS["flip"]], lambda values: nullcontext(), free={"detections": 300}
    )
    said = '# Free, for the metric alone; for deployment keep the default: "detections"\n'
    for values, expected in ((settings.first, True), ({"flip": True}, False), ({"detections": 200}, False)):
        save_inference(tmp_path, settings, values)
        assert (said in (tmp_path / "inference.yaml").read_text()) == expected
        assert load_inference(tmp_path) == settings.complete(values)


def test_a_folder_that_is_not_there_yet_is_made(tmp_path: Path) -> None:
    save_inference(tmp_path / "out" / "v1.2", SETTINGS, {"flip": True})
    assert (tmp_path / "out" / "v1.2" / "inference.yaml").is_file()
    assert load_inference(tmp_path / "out" / "v1.2")["flip"] is True


def test_a_value_that_a_setting_can_not_have_is_not_written(tmp_path: Path) -> None:
    assert_refused(
        lambda: save_inference(tmp_path, SETTINGS, {"size": 2}), ValueError, "size", "2", "0.71", "1.0", "1.41"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ("size: 1.41", ("size",)),
        ("size: {value: 1, default: 1}", ("value", "default")),
        ("1: {value: 1, default: 1, factor: 1}", ("1",)),
        ("size: {value: [1], default: 1, factor: 1}", ("size", "1")),
        ("size: {value: .inf, default: 1, factor: 1}", ("size", "inf")),
        ("size: {value: 1, default: null, factor: 1}", ("size", "None")),
        (
            "size: {value: 1, default: 1, factor: 1}\nsize: {value: 2, default: 1, factor: 1}",
            ("size",),
        ),
        ("size: !!python/object/apply:os.getpid []", ()),
        ("[1, 2]", ()),
        ("a: &a [*a]", ()),
        ("", ()),
        ("size: {value: 1", ()),
    ],
)
def test_what_is_no_such_file_is_refused(content: str, names: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "inference.yaml").write_text(content)
    assert_refused(lambda: load_inference(tmp_path), FileFormatError, *names)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert_refused(lambda: load_inference(tmp_path), FileFormatError, "inference.yaml")


@pytest.mark.parametrize(
    "value",
    [1e-5, 1.5e-300, 1e300, -2e-9, 0.1, math.pi, 3, -7, True, "no", "1e-5", "ä\n\"'", "😀\u2028\x00\x7f\\ud83d\\ude00"],
)
def test_yaml_reads_a_value_as_it_was(value: bool | int | float | str) -> None:
    found = yaml.safe_load(scalar(value))
    assert found == value
    assert type(found) is type(value)
