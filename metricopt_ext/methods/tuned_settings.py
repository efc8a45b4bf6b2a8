"""What became of the settings of inference in a run: before and after, what they cost, and what was tried."""

from collections.abc import Mapping
from dataclasses import dataclass

from metricopt_ext.search.stages import SettingsStage
from metricopt_ext.tasks.settings import Value, Values
from metricopt_ext.utils.words import counted


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
    def of(cls, stage: SettingsStage, started: Values, after: Values) -> "TunedSettings":
        """Make one.

        Args:
            stage: What was asked.
            started: Those that the search of phi began with, a value for each setting.
            after: Those of what was kept, a value for each setting.
        """
        settings, untried = stage.settings, ""
        tried = tuple((dict(each.start.settings), each.evaluation.value) for each in stage.points)
        if len(tried) == 1 and settings.queries:
            untried = "the search needs all queries; give it more"
            if stage.queries:
                longer = f"more than {settings.inference:g} times as long"
                untried = f"all others were given up, or take {longer}; allow more by inference="
        factor = settings.factor(after)
        return cls(settings.defaults, dict(after), settings.free, factor, tried, dict(started), untried)

    @property
    def changed(self) -> dict[str, tuple[Value, Value]]:
        """What was changed by the metric, by name: before and after."""
        return _changes({**self.before, **self.free}, self.after)

    @property
    def changes(self) -> dict[str, tuple[Value, Value]]:
        """All that was changed, what was free too, by name: before and after."""
        return _changes(self.before, self.after)

    def lines(self) -> list[str]:
        """Return what ``str`` of a result says."""
        lines, tried = [], len(self.tried) - 1
        if free := _in_words(_changes(self.before, {**self.before, **self.free})):
            lines.append(f"settings for the metric alone, free: {free}; for deployment keep the model's own")
        if changed := _in_words(self.changed):
            cost = "" if abs(self.factor - 1) < 0.005 else f"; inference takes {self.factor:.2f} times as long"
            lines.append(f"settings: {changed} ({tried} tried){cost}")
        elif gained := _in_words(_changes({**self.before, **self.free}, self.started)):
            lines.append(f"settings: as they were; {gained} gained ({tried} tried), but was not kept")
        elif self.untried:
            lines.append(f"settings: none was tried, as {self.untried}")
        elif tried:
            lines.append(f"settings: as they were; none of {counted(tried, 'other choice')} surely gains")
        return lines


def _changes(before: Values, after: Values) -> dict[str, tuple[Value, Value]]:
    return {name: (before[name], value) for name, value in after.items() if before[name] != value}


def _in_words(changes: Mapping[str, tuple[Value, Value]]) -> str:
    return ", ".join(f"{name} {shown(old)} -> {shown(new)}" for name, (old, new) in changes.items())


def shown(value: Value) -> str:
    """Return a value as it is printed."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
