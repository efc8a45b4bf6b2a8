"""TensorBoard events: of queries while a seed runs, and of the methods' curves."""

from collections.abc import Callable
from pathlib import Path

import pytest

from metricopt_ext.experiment.events import query_events, write_events
from metricopt_ext.experiment.report import Report

pytest.importorskip("tensorboard")


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values by tag, of the only file in the folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (_,) = folder.iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.parametrize(("maximize", "best"), [(True, [0.5, 0.5, 0.75]), (False, [0.5, 0.25, 0.25])])
def test_each_query_is_written_once_with_the_best_so_far_and_what_is_left(
    maximize: bool, best: list[float], tmp_path: Path
) -> None:
    values = [0.5, 0.25, 0.75]
    for number in (2, 3):  # a resumed run tells of all from the first on
        with query_events(tmp_path / "queries", "f[1]", maximize, 10) as events:
            for spent, value in enumerate(values[:number], 1):
                events.query(spent, value)
            events.quality(number, 0.125 * number)
    assert scalars(tmp_path / "queries") == {
        "queries/f[1]": list(enumerate(values, 1)),
        "queries/best": list(enumerate(best, 1)),
        "queries/left": [(1, 9.0), (2, 8.0), (3, 7.0)],
        "value_function/spearman": [(3, 0.375)],
    }


def test_events_hold_each_curve_once(report: Callable[..., Report], tmp_path: Path) -> None:
    made = report(seeds=2)
    for _ in range(2):  # a resumed run writes them again
        write_events(made, tmp_path)
    for record in made.records:
        for name, curve in record.curves.items():
            written = scalars(tmp_path / f"seed-{record.seed}" / name)["validation/accuracy"]
            assert [step for step, _ in written] == [0, 1, 2]
            assert [value for _, value in written] == pytest.approx(curve, abs=1e-6)
