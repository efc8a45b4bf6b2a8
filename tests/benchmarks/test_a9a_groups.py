"""a9a as tables: each row's group, and rows that have none."""

import csv
from pathlib import Path

import pytest

from a9a_groups import write
from helpers.refusals import assert_refused
from metricopt_ext.errors import DataError

ROWS = ["-1 3:1 67:1 72:1 123:1", "+1 1:1 71:1 73:1", "-1 70:1 72:1"]


def table(folder: Path, *rows: str) -> list[dict[str, str]]:
    (folder / "a9a").write_text("\n".join(rows))
    write(folder / "a9a", folder / "made" / "train.csv")
    with (folder / "made" / "train.csv").open() as file:
        return list(csv.DictReader(file))


def test_each_row_keeps_its_label_and_features_and_has_a_group(tmp_path: Path) -> None:
    found = table(tmp_path, *ROWS)
    assert [row["group"] for row in found] == ["female/White", "male/Black", "female/Other"]
    assert [row["label"] for row in found] == ["-1", "1", "-1"]
    for row, text in zip(found, ROWS, strict=True):
        marked = {f"f{each.partition(':')[0]}" for each in text.split()[1:]}
        assert {name for name, value in row.items() if name[0] == "f" and value == "1"} == marked
    assert set(found[0]) == {"label", "group", *(f"f{number}" for number in range(1, 124))}


@pytest.mark.parametrize(("row", "features"), [("-1 67:1", "72, 73"), ("-1 67:1 68:1 72:1", "67, 68, 69, 70, 71")])
def test_a_row_without_one_sex_and_one_race_is_refused(tmp_path: Path, row: str, features: str) -> None:
    assert_refused(lambda: table(tmp_path, ROWS[0], row), DataError, "row 2", features)
