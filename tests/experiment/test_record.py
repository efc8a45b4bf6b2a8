"""Records of seeds on disk."""

import json
import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from helpers.records import record as recorded
from helpers.refusals import assert_refused
from metricopt_ext.errors import FileFormatError
from metricopt_ext.experiment.record import Outcome, SeedRecord, check_alike


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    record = replace(
        recorded(),
        outcomes={
            "pretrained": [Outcome(0.1, 0.2, 0, 0, 0.0)],
            "metricopt": [Outcome(0.3, 0.2, 9, 9, 1.0)],
            "cma_es": [Outcome(0.5, 0.4, 10, 10, 0.1), Outcome(0.6, 0.5, 20, 20, 0.2)],
        },
    )
    record.save(tmp_path / "record.json")
    assert SeedRecord.load(tmp_path / "record.json") == record


OUTCOME = asdict(Outcome(0.5, 0.5, 1, 1, 0.1))


def without(name: str, whole: dict[str, Any]) -> str:
    return json.dumps({**whole, "outcomes": {key: each for key, each in whole["outcomes"].items() if key != name}})


def having(whole: dict[str, Any], **outcomes: Any) -> str:
    return json.dumps({**whole, "outcomes": {**whole["outcomes"], **outcomes}})


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: json.dumps(whole)[:100],
        lambda whole: json.dumps({key: value for key, value in whole.items() if key != "curves"}),
        lambda whole: json.dumps({**whole, "seed": "../0"}),
        lambda whole: json.dumps({**whole, "predicted": [0.5, 0.5]}),
        lambda whole: without("metricopt", whole),
        lambda whole: having(whole, **{"../../owned": [OUTCOME]}),
        lambda whole: json.dumps({**whole, "curves": {"../../owned": [0.5]}}),  # whose events would be beside the run
        lambda whole: having(whole, metricopt=[OUTCOME | {"test": math.nan}]),
    ],
)
def test_a_damaged_record_is_refused(tmp_path: Path, damage: Any) -> None:
    outcome = Outcome(0.5, 0.5, 1, 1, 0.1)
    quality = {
        "spearman": 0.5,
        "mae": 0.1,
        "constant_mae": 0.2,
        "points": 9,
        "trajectories": 3,
        "near_mae": 0.1,
        "headroom": 0.2,
    }
    whole = {
        "seed": 0,
        "outcomes": {"pretrained": [asdict(outcome)], "metricopt": [asdict(outcome)]},
        "quality": quality,
        "kept": "start",
        "setting": [0.0, 0.1],
        "split_half": None,
        "chance": None,
        "guard": "none",
        "curves": {},
        "true": [0.5],
        "predicted": [0.5],
        "machine": {"processor": "A processor", "capability": "AVX2", "threads": 1, "device": "cpu"},
    }
    path = tmp_path / "record.json"
    path.write_text(json.dumps(whole))
    assert SeedRecord.load(path).outcomes == {"pretrained": [outcome], "metricopt": [outcome]}
    path.write_text(damage(whole))
    assert_refused(lambda: SeedRecord.load(path), FileFormatError, path)


def test_a_record_of_another_seed_is_refused(tmp_path: Path, report: Any) -> None:
    record = report().records[0]
    record.save(tmp_path / "seed-4" / "record.json")
    assert SeedRecord.load(tmp_path / "seed-4" / "record.json") == record
    shutil.copytree(tmp_path / "seed-4", tmp_path / "seed-5")
    assert_refused(lambda: SeedRecord.load(tmp_path / "seed-5" / "record.json"), FileFormatError, "seed-5/record.json")


def test_records_of_other_lengths_are_not_put_together(report: Any) -> None:
    first, second, third = report().records
    check_alike([first, second, third])
    longer = replace(second, curves={"metricopt": [*second.curves["metricopt"], 0.5]})
    assert_refused(lambda: check_alike([first, longer, third]), FileFormatError, "5", "3", "metricopt")
