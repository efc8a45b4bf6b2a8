import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.refusals import assert_refused

pytest.importorskip("PIL")

from metricopt_ext.detection.ap50 import average_precision
from metricopt_ext.detection.records import Annotated, Detections, DetectionSet
from metricopt_ext.detection.tables import FoundTable, TruthTable
from metricopt_ext.errors import DataError


def image(labels: list[int], areas: list[float] | None = None) -> Annotated:
    n, none = len(labels), torch.zeros(len(labels), dtype=torch.bool)
    told = None if areas is None else torch.tensor(areas)
    boxes = torch.arange(4.0 * n).reshape(n, 4)
    return Annotated("a", Path("folder/a.png"), 30, 20, boxes, torch.tensor(labels), none, ~none, areas=told)


def test_rows_come_by_image() -> None:
    table = TruthTable.of(DetectionSet(("x", "y"), [image([1, 0], [5, 6]), image([]), image([1])]))
    assert (len(table), table.classes, list(table.names)) == (3, ("x", "y"), ["folder/a.png"] * 3)
    assert (table.places.tolist(), table.labels.tolist()) == ([0, 0, 2], [1, 0, 1])
    assert table.boxes.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    assert table.areas.tolist()[:2] == [5, 6]
    assert table.areas[2] != table.areas[2]  # not told
    assert (table.sizes.tolist(), table.crowd.all(), table.difficult.any()) == ([[30, 20]] * 3, True, False)
    assert TruthTable.of(table) is table


def test_a_table_of_nothing_is_empty() -> None:
    assert len(TruthTable.of(DetectionSet(("x",), [])).labels) == 0
    found = FoundTable.of([])
    assert (len(found), found.boxes.shape) == (0, (0, 4))
    none = FoundTable.of([Detections(torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.int64))])
    assert (len(none), none.boxes.shape) == (1, (0, 4))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (
            {"boxes": torch.tensor([[0.0, 0, 1, 1], [0, 0, math.nan, 1]])},
            ("'a'", "0.0", "nan", "1.0"),
        ),
        ({"boxes": torch.zeros(2, 5)}, ("'a'", "2")),
        ({"labels": torch.tensor([0, 1, 1])}, ("(2, 4)", "3", "labels")),
        ({"labels": torch.tensor([0.0, 1.5])}, ("labels", "1.5")),
        ({"labels": torch.tensor([1, 2])}, ("objects", "1", "2", "0")),
        ({"crowd": torch.zeros(1, dtype=torch.bool)}, ("2", "1", "crowd")),
    ],
)
def test_records_that_contradict_themselves_are_refused(change: Any, names: tuple[str, ...]) -> None:
    none = [Detections(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, dtype=torch.int64))]
    assert_refused(
        lambda: average_precision(none, DetectionSet(("x", "y"), [replace(image([0, 1]), **change)]), "coco"),
        DataError,
        *names,
    )
