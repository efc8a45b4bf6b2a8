"""The lines of a run: which points are on one, in which order, and which are on none."""

from contextlib import nullcontext
from typing import Any

from metricopt_ext.methods.setting_lines import VALUES, SettingLine, setting_lines
from metricopt_ext.methods.tuned_settings import TunedSettings
from metricopt_ext.tasks.settings import Setting, Settings

SETTINGS = Settings(
    [
        Setting("size", values=(2, 1, 4), default=2),
        Setting("kind", values=("hard", "soft", "other"), default="hard"),
        Setting("sigma", 0.01, 1.0, scale="log", default=0.1),
        Setting("unused", values=(False, True), default=False),
    ],
    nullcontext,
)


def of(*tried: tuple[dict[str, Any], float], **after: Any) -> list[SettingLine]:
    complete = tuple((SETTINGS.complete(values), metric) for values, metric in tried)
    kept = SETTINGS.complete(after)
    return setting_lines(SETTINGS, TunedSettings(SETTINGS.defaults, kept, {}, 1.0, complete, kept))


def test_each_setting_has_its_line_from_the_best_of_those_before() -> None:
    best = {"size": 4, "kind": "soft"}
    lines = of(
        ({}, 0.1),
        ({"size": 4}, 0.3),
        ({"size": 1}, 0.2),
        ({"size": 4, "kind": "other"}, 0.25),
        (best, 0.4),
        ({**best, "sigma": 0.5}, 0.35),
        ({**best, "sigma": 0.02}, 0.45),
        **best,
        sigma=0.02,
    )
    assert lines == [
        SettingLine("size", VALUES, 2, 4, [1, 2, 4], [0.2, 0.1, 0.3]),
        SettingLine("kind", VALUES, "hard", "soft", ["hard", "soft", "other"], [0.3, 0.4, 0.25]),
        SettingLine("sigma", "log", 0.1, 0.02, [0.02, 0.1, 0.5], [0.45, 0.4, 0.35]),
    ]


def test_what_changes_two_at_once_is_on_no_line() -> None:
    assert of(({}, 0.1), ({"size": 4, "kind": "soft"}, 0.3)) == []


def test_the_line_with_most_points_counts() -> None:
    lines = of(
        ({}, 0.1), ({"size": 4}, 0.2), ({"sigma": 0.5}, 0.0), ({"size": 4, "sigma": 0.5}, 0.3), ({"size": 1}, 0.1)
    )
    assert [each for each in lines if each.name == "size"] == [
        SettingLine("size", VALUES, 2, 2, [1, 2, 4], [0.1, 0.1, 0.2])
    ]


def test_a_run_that_tried_nothing_has_none() -> None:
    assert of(({}, 0.1)) == of() == []
