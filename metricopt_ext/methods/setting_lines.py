"""The lines that a run went along: what it asked of one setting, with the others as they were."""

from dataclasses import dataclass
from typing import Any

from metricopt_ext.methods.tuned_settings import TunedSettings
from metricopt_ext.tasks.settings import Settings

VALUES = "values"  # the scale of a setting that is no interval


@dataclass(frozen=True)
class SettingLine:
    """What was asked along one setting.

    Attributes:
        name: The setting's.
        scale: In what its interval is even; `VALUES` of one that has values.
        default: Where the run began.
        chosen: What was kept.
        values: What was asked, ``default`` among them, in the setting's order; at least two.
        metric: The metric there, in its own units.
    """

    name: str
    scale: str
    default: Any
    chosen: Any
    values: list[Any]
    metric: list[float]


def setting_lines(settings: Settings, tuned: TunedSettings) -> list[SettingLine]:
    """Return the lines of a run, one at most for each setting, in their order.

    Where several lines go along one setting, with others at other values, it is the one with most points. What changes
    several settings at once, as a preset may, is on no line.
    """
    lines = []
    for name in settings.names:
        groups: dict[tuple[Any, ...], dict[Any, float]] = {}
        for values, metric in tuned.tried:
            others = tuple(value for other, value in values.items() if other != name)
            groups.setdefault(others, {}).setdefault(values[name], metric)
        points = max(groups.values(), key=len, default={})
        if len(points) < 2:
            continue
        setting = settings[name]
        as_given = setting.values is not None and not setting.ordered
        order = [each for each in setting.values or () if each in points] if as_given else sorted(points, key=float)
        lines.append(
            SettingLine(
                name=name,
                scale=setting.scale if setting.values is None else VALUES,
                default=tuned.tried[0][0][name],
                chosen=tuned.after[name],
                values=order,
                metric=[points[each] for each in order],
            )
        )
    return lines
