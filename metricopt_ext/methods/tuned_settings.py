"""What became of the settings of inference in a run: before and after, what they cost, and what was tried."""

from collections.abc import Mapping
from dataclasses import dataclass

from metricopt_ext.search.stages import SettingsStage
from metricopt_ext.tasks.settings import Value, Values


@dataclass(frozen=True)
class TunedSettings:
    """The settings of inference before and after a run.

    Attributes:
        before: Those of the model as it was given, by name.
        after: Those that belong to what was kept.
        free: Those that were changed before anything was asked, as they can't lower the metric.
        factor: How many times as long inference takes by ``after`` as by ``before``.
        tried: What was asked: values of every setting, and the metric there, in its own units.
        untried: Whether none was tried, though some might have been.
    """

    before: dict[str, Value]
    after: dict[str, Value]
    free: dict[str, Value]
    factor: float
    tried: tuple[tuple[dict[str, Value], float], ...]
    untried: bool = False

    @classmethod
    def of(cls, stage: SettingsStage, after: dict[str, Value]) -> "TunedSettings":
        """Make one.

        Args:
            stage: What was asked.
            after: Those of what was kept, a value for each setting.
        """
        settings = stage.settings
        tried = tuple((dict(each.start.settings), each.evaluation.value) for each in stage.points)
        untried = len(tried) == 1 and settings.queries > 0
        return cls(settings.defaults, after, settings.free, settings.factor(after), tried, untried)

    @property
    def changes(self) -> dict[str, tuple[Value, Value]]:
        """What was changed, by name: before and after."""
        return _changes(self.before, self.after)

    def lines(self) -> list[str]:
        """Return what ``str`` of a result says."""
        given, tried, lines = {**self.before, **self.free}, len(self.tried) - 1, []
        if free := _in_words(_changes(self.before, given)):
            lines.append(f"settings for the metric alone, free: {free}; for deployment keep the model's own")
        if changed := _in_words(_changes(given, self.after)):
            longer = f"inference takes {self.factor:.2f} times as long"
            lines.append(f"settings: {changed} ({tried} tried); {longer}")
        elif self.untried:
            lines.append("settings: none was tried; give the search more queries, or allow more by inference=")
        elif tried:
            lines.append(f"settings: as they were ({tried} tried)")
        return lines


def _changes(before: Values, after: Values) -> dict[str, tuple[Value, Value]]:
    return {name: (before[name], value) for name, value in after.items() if before[name] != value}


def _in_words(changes: Mapping[str, tuple[Value, Value]]) -> str:
    return ", ".join(f"{name} {shown(old)} -> {shown(new)}" for name, (old, new) in changes.items())


def shown(value: Value) -> str:
    """Return a value as it is printed."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
