"""The file of evaluations: what it gives back, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.refusals import assert_named, assert_refused
from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import FileFormatError
from metricopt_ext.tasks.cost_scale import CostScale
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.kept_evaluations import (
    KeptEvaluation,
    KeptEvaluations,
    KeptPoint,
    _checksum,
    _content,
    digest_of,
    same_point,
)
from metricopt_ext.utils.files import to_json

UNBOUNDED = CostScale(maximize=False, bounds=None, name="x")
START = Start(torch.zeros(7))
REPLACING = Start(torch.zeros(7), {"mean": torch.ones(2)}, settings={"size": 566, "soft": 0.1 + 0.2, "flip": True})


def phi(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(7, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_points_and_answers_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "kept.json"
    points = [KeptPoint.of(id, phi(dtype) * id, START if id else REPLACING) for id in range(4)]
    kept = KeptEvaluations(path, UNBOUNDED)
    kept.ask(points)
    evaluation = Evaluation(0.1 + 0.2, (1 / 3, 2 / 3), 1e-17)
    kept.tell(KeptEvaluation.evaluated(points[2], evaluation, 3))
    kept.tell(KeptEvaluation.evaluated(points[0], Evaluation(9.0, failed=True), 3))
    kept.tell(KeptEvaluation.without(points[1]))
    again = KeptEvaluations(path, UNBOUNDED)
    assert again.open == {3: points[3]}
    assert again.evaluations == kept.evaluations
    assert again.evaluations[2].evaluation == evaluation
    assert [(each.failed, each.given_up, each.asked) for _, each in sorted(again.evaluations.items())] == [
        (True, False, 3),
        (False, True, 0),
        (False, False, 3),
    ]
    assert again.answered == 2
    assert torch.equal(again.evaluations[2].at(phi(dtype)), phi(dtype) * 2)
    assert path.read_bytes() == path.read_bytes()


def test_pairs_of_halves_come_back_bit_for_bit_and_a_file_without_any_is_as_before(tmp_path: Path) -> None:
    kept = KeptEvaluations(tmp_path / "kept.json", UNBOUNDED)
    one, several = Evaluation(0.1, (1 / 3, 2 / 3)), Evaluation.of(0.1, [(1 / 3, 2 / 3), (0.1 + 0.2, 1e-17)], 0.5)
    kept.tell(KeptEvaluation.evaluated(KeptPoint.of(0, phi(torch.float32), START), one, 1))
    assert "pairs" not in (tmp_path / "kept.json").read_text()
    kept.tell(KeptEvaluation.evaluated(KeptPoint.of(1, phi(torch.float32), START), several, 1))
    again = KeptEvaluations(tmp_path / "kept.json", UNBOUNDED)
    assert again.evaluations == kept.evaluations
    assert [again.evaluations[id].evaluation for id in (0, 1)] == [one, several]


def test_a_refused_write_changes_nothing(tmp_path: Path) -> None:
    def refuse() -> None:
        raise FileFormatError("gone")

    kept = KeptEvaluations(tmp_path / "kept.json", UNBOUNDED, refuse)
    point = KeptPoint.of(0, phi(torch.float32), START)
    kept.ask([point], write=False)
    assert_refused(lambda: kept.tell(KeptEvaluation.evaluated(point, Evaluation(0.5), 1)), FileFormatError, "gone")
    assert (kept.evaluations, kept.open) == ({}, {0: point})
    assert list(tmp_path.iterdir()) == []


def written(path: Path, **changes: Any) -> None:
    content = {"id": 0, "phi": [1.0], "replaced": "", "cost": 0.5, "halves": None, "noise": None}
    content |= {"failed": False, "given_up": False, "asked": 1} | changes
    text = to_json([content])
    path.write_text(f'{{"checksum": "{_checksum(_content([], text))}", {_content([], text)}}}')


@pytest.mark.parametrize(
    ("changes", "bounds", "name"),
    [
        ({}, (0.0, 1.0), ""),
        ({"cost": 1.0}, (0.1, 0.7), ""),  # 0.7 - 1.0 * (0.7 - 0.1) is below 0.1
        ({"cost": -7.0}, None, ""),
        ({"cost": -7.0}, (0.0, 1.0), "-7.0"),
        ({"cost": 1.5}, (0.0, 9.0), "1.5"),
        ({"halves": [0.5, 2.0]}, (0.0, 9.0), "2.0"),
        ({"cost": float("nan")}, (0.0, 1.0), "nan"),
        ({"cost": float("inf")}, None, "inf"),
        ({"noise": -0.5}, None, "-0.5"),
        ({"cost": None}, None, "cost"),
        ({"failed": True}, None, "cost"),
        ({"phi": "x"}, None, "phi"),
        ({"phi": [0.5, float("nan")]}, None, "0"),
        ({"cost": "x"}, None, "cost"),
    ],
)
def test_an_answer_that_can_be_none_is_not_believed(
    tmp_path: Path, changes: dict[str, Any], bounds: Any, name: str
) -> None:
    path, scale = tmp_path / "kept.json", CostScale(maximize=False, bounds=bounds, name="x")
    written(path, **changes)
    if not name:
        assert KeptEvaluations(path, scale).evaluations[0].cost == changes.get("cost", 0.5)
        return
    with pytest.raises(FileFormatError) as caught:
        KeptEvaluations(path, scale)
    assert_named(caught, name)
    assert "use another output folder" in str(caught.value)
    assert "delete" not in str(caught.value)


def test_two_answers_to_one_point_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    written(path)
    one = json.loads(path.read_text())["evaluations"]
    content = _content([], to_json(one * 2))
    path.write_text(f'{{"checksum": "{_checksum(content)}", {content}}}')
    assert_refused(lambda: KeptEvaluations(path, UNBOUNDED), FileFormatError)


def test_a_changed_answer_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    written(path)
    content = json.loads(path.read_text())
    content["evaluations"][0]["phi"] = [2.0]
    path.write_text(json.dumps(content))
    assert_refused(lambda: KeptEvaluations(path, UNBOUNDED), FileFormatError)


@pytest.mark.parametrize("content", ['{"other": 1}', '{"evaluations": [1]}', "{", "[]", "3"])
def test_a_foreign_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "kept.json"
    path.write_text(content)
    assert_refused(lambda: KeptEvaluations(path, UNBOUNDED), FileFormatError)


def test_a_point_of_another_dimension_is_refused() -> None:
    assert_refused(lambda: KeptPoint.of(0, phi(torch.float32), START).at(torch.zeros(3)), ValueError, "7", "phi", "3")


def test_points_are_the_same_but_for_rounding() -> None:
    point = phi(torch.float64)
    assert same_point(point, point)
    assert same_point(point * (1 + 1e-8), point)
    assert not same_point(point * (1 + 1e-4), point)
    assert same_point(point * 0, point * 0)


def test_digests_tell_what_is_replaced() -> None:
    zero = torch.zeros(2)
    assert digest_of(Start(zero)) == digest_of(Start(zero + 1)) == ""
    ones, twos = (digest_of(Start(zero, {"mean": torch.full((2,), value)})) for value in (1.0, 2.0))
    assert ones
    assert ones != twos


def test_other_quantities_come_back_bit_for_bit_and_are_not_there_without_any(tmp_path: Path) -> None:
    path, points = tmp_path / "kept.json", [KeptPoint.of(id, phi(torch.float32), START) for id in range(3)]
    kept = KeptEvaluations(path, UNBOUNDED)
    also = {"recall[person]": 0.1 + 0.2, "ece": 5e-324, "big": -1.7976931348623157e308, "\u00e9 \n": 1 / 3}
    evaluation = Evaluation(0.3, (1 / 3, 2 / 3), also=also)
    kept.tell(KeptEvaluation.evaluated(points[0], evaluation, 1))
    kept.tell(KeptEvaluation.evaluated(points[1], Evaluation(0.5), 1))
    kept.tell(KeptEvaluation.evaluated(points[2], Evaluation(9.0, failed=True, also=also), 1))
    again = KeptEvaluations(path, UNBOUNDED)
    assert again.evaluations == kept.evaluations
    assert again.evaluations[0].evaluation == evaluation
    assert again.evaluations[2].also is None, "a stand-in's are another evaluation's"
    assert path.read_text().count('"also"') == 1
    before = path.read_bytes()
    again.tell(again.evaluations[1])
    assert path.read_bytes() == before


@pytest.mark.parametrize("also", ['{"a": NaN}', '{"a": Infinity}', '{"a": "1"}', "[1.0]", '{"a": true}', '{"a": null}'])
def test_other_quantities_that_are_no_numbers_are_refused(tmp_path: Path, also: str) -> None:
    point = KeptPoint.of(0, phi(torch.float32), START)
    line = KeptEvaluation.evaluated(point, Evaluation(0.5, also={"a": 0.25}), 1).line.replace('{"a": 0.25}', also)
    content = _content([], f"[{line}]")
    path = tmp_path / "kept.json"
    path.write_text(f'{{"checksum": "{_checksum(content)}", {content}}}')
    assert_refused(lambda: KeptEvaluations(path, UNBOUNDED), FileFormatError)


def test_a_point_is_of_a_model_and_its_settings(tmp_path: Path) -> None:
    point = KeptPoint.of(0, phi(torch.float32), REPLACING)
    assert point.is_of(REPLACING)
    assert not point.is_of(START)
    assert not point.is_of(Start(torch.zeros(7), REPLACING.buffers))
    assert not KeptPoint.of(0, phi(torch.float32), START).is_of(REPLACING)
    kept = KeptEvaluations(tmp_path / "kept.json", UNBOUNDED)
    kept.ask([point])
    assert KeptEvaluations(tmp_path / "kept.json", UNBOUNDED).open == {0: point}
    kept.tell(KeptEvaluation.evaluated(point, Evaluation(0.5), 1))
    assert KeptEvaluations(tmp_path / "kept.json", UNBOUNDED).evaluations[0].settings == REPLACING.settings


def test_a_file_without_settings_is_as_before(tmp_path: Path) -> None:
    kept = KeptEvaluations(tmp_path / "kept.json", UNBOUNDED)
    kept.tell(KeptEvaluation.evaluated(KeptPoint.of(0, phi(torch.float32), START), Evaluation(0.5), 1))
    assert "settings" not in (tmp_path / "kept.json").read_text()
