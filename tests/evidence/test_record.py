"""Records of seeds on disk."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from metricopt_ext.errors import FileFormatError
from metricopt_ext.evidence.record import Outcome, SeedRecord
from metricopt_ext.methods.recipe import Setting
from metricopt_ext.utils.machine import Machine
from metricopt_ext.value.value_function import Quality


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    quality = Quality(0.5, 0.1, 0.2, 9, 3, 0.1, 0.2)
    record = SeedRecord(
        seed=3,
        outcomes={"cma_es": [Outcome(0.5, 0.4, 10, 10, 0.1), Outcome(0.6, 0.5, 20, 20, 0.2)]},
        quality=quality,
        candidates={"ridge": quality},
        kept="metricopt",
        setting=Setting(0.0, 0.15),
        split_half=0.5,
        chance=0.01,
        guard="halves",
        curves={"metricopt": [0.1, 0.2]},
        true=[0.5],
        predicted=[0.25],
        machine=Machine("A processor", "AVX2", 1, "cpu"),
    )
    record.save(tmp_path / "record.json")
    assert SeedRecord.load(tmp_path / "record.json") == record


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: json.dumps(whole)[:100],
        lambda whole: "",
        lambda whole: "[1, 2]",
        lambda whole: json.dumps({key: value for key, value in whole.items() if key != "outcomes"}),
        lambda whole: json.dumps({key: value for key, value in whole.items() if key != "curves"}),
        lambda whole: json.dumps({**whole, "surplus": 1}),
        lambda whole: json.dumps({**whole, "outcomes": []}),
        lambda whole: json.dumps({**whole, "quality": {"spearman": 1.0}}),
        lambda whole: json.dumps({**whole, "setting": 0.3}),
        lambda whole: json.dumps({**whole, "guard": "thirds"}),
        lambda whole: json.dumps({**whole, "machine": {"processor": "A processor"}}),
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
        "outcomes": {"metricopt": [asdict(outcome)]},
        "quality": quality,
        "candidates": {"ridge": quality},
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
    assert SeedRecord.load(path).outcomes == {"metricopt": [outcome]}
    path.write_text(damage(whole))
    with pytest.raises(FileFormatError, match=rf"{re.escape(str(path))} .*delete it to regenerate it"):
        SeedRecord.load(path)
