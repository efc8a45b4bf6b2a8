"""What became of the settings of inference in a run: before and after, what they cost, and what was tried."""

from dataclasses import dataclass, replace
from typing import Any

from metricopt_ext.methods.guard import judge
from metricopt_ext.search.stages import SettingsStage
from metricopt_ext.tasks.settings import Settings, Value, Values
from metricopt_ext.utils.words import counted

# How sure the guard must be of tuned settings, the best of few candidates with names. At 0.75 and at 0.85 it keeps no
# more on test, on four tasks, and refuses some that gain (docs/settings.md).
SETTINGS_CONFIDENCE = 0.6


@dataclass(frozen=True)
class TunedSettings:
    """The settings of inference before and after a run.

    Attributes:
        before: Those of the model as it was given, by name.
        after: Those that belong to what was kept.
        free: Those that were changed before anything was asked, as they can't lower the metric.
        factor: How many times as long inference takes by ``after`` as by ``before``.
        tried: What was asked: values of every setting, and the metric there, in its own units.
        started: Those that the search of phi began with.
        untried: Why none was tried, if any might have been; empty otherwise.
    """

    before: dict[str, Value]
    after: dict[str, Value]
    free: dict[str, Value]
    factor: float
    tried: tuple[tuple[dict[str, Value], float], ...]
    started: dict[str, Value]
    untried: str = ""

    @classmethod
    def of(
        cls, settings: Settings, after: Values, stage: SettingsStage | None, started: Values | None = None
    ) -> "TunedSettings":
        """Make one.

        Args:
            settings: The task's.
            after: Those of what was kept.
            stage: What was asked; None where it was not run.
            started: Those that the search of phi began with; None for those that were kept.
        """
        points = [] if stage is None else stage.points
        tried = tuple((dict(each.start.settings), each.evaluation.value) for each in points)
        untried = ""
        if stage is not None and len(tried) == 1 and settings.queries:
            untried = "the search needs all queries; give it more"
            if stage.given_up:
                untried = "all were given up"
            elif stage.queries:
                untried = (
                    f"what else there is takes more than {settings.inference:g} times as long; allow more by inference="
                )
        own = settings.defaults, settings.complete(after), settings.free, settings.factor(after)
        return cls(*own, tried, settings.complete(after if started is None else started), untried)

    def of_kept(self, settings: Settings, after: Values) -> "TunedSettings":
        """Return the same where something else was kept, with settings of its own."""
        return replace(self, after=settings.complete(after), factor=settings.factor(after))

    @property
    def changed(self) -> dict[str, tuple[Value, Value]]:
        """What was changed by the metric, by name: before and after."""
        return self._changed(self.after)

    def _changed(self, values: Values) -> dict[str, tuple[Value, Value]]:
        pairs = {name: (self.free.get(name, self.before[name]), value) for name, value in values.items()}
        return {name: (before, after) for name, (before, after) in pairs.items() if before != after}

    @property
    def changes(self) -> dict[str, tuple[Value, Value]]:
        """All that was changed, what was free too, by name: before and after."""
        pairs = {name: (before, self.after[name]) for name, before in self.before.items()}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def lines(self) -> list[str]:
        """Return what ``str`` of a result says."""
        lines = []
        if self.free:
            changes = ", ".join(f"{name} {shown(self.before[name])} -> {shown(new)}" for name, new in self.free.items())
            lines.append(f"settings for the metric alone, free: {changes}; for deployment keep the model's own")
        tried = max(0, len(self.tried) - 1)
        changes = ", ".join(
            f"{name} {shown(old)} -> {shown(new)}"
            for name, (old, new) in (self.changed or self._changed(self.started)).items()
        )
        if self.changed:
            cost = "" if abs(self.factor - 1) < 0.005 else f"; inference takes {self.factor:.2f} times as long"
            lines.append(f"settings: {changes} ({tried} tried){cost}")
        elif changes:
            lines.append(f"settings: as they were; {changes} gained ({tried} tried), but was not kept")
        elif self.untried:
            lines.append(f"settings: none was tried, as {self.untried}")
        elif tried:
            lines.append(f"settings: as they were; none of {counted(tried, 'other choice')} surely gains")
        return lines


def shown(value: Value) -> str:
    """Return a value as it is printed."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def accepted(stage: SettingsStage, confidence: float) -> bool:
    """Whether the guard believes the gain of tuned settings over those that a stage began with.

    Args:
        stage: The stage, at its end.
        confidence: The run's; at most `SETTINGS_CONFIDENCE` is asked.
    """
    first, best = stage.points[0], stage.best
    if best is first:
        return False
    visited = [each.evaluation for each in stage.points]
    return judge(first.evaluation, best.evaluation, visited, min(confidence, SETTINGS_CONFIDENCE)).accepted


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
