"""The settings stage's baseline: a Gaussian process over all of them at once, with neither order nor presets."""

from collections.abc import Sequence
from typing import Any

from metricopt_ext.search.box import check_package, drawn
from metricopt_ext.search.optuna_sampler import quiet
from metricopt_ext.search.settings_stage import SettingsEnd, Tried
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.settings import Setting, Settings, Value
from metricopt_ext.utils.seeding import generator

# Queries that are drawn at random before the Gaussian process proposes any. By Optuna's default, 10, all would be.
DRAWN = 4

# Random draws, none of which may be asked, after which the search ends.
PATIENCE = 100


class SettingsGPState:
    """Optuna's Gaussian process with expected improvement over all settings, asked and told as `SettingsState`.

    An interval is a float parameter on its scale, numbers in order are integers, other values categories. Where the
    process proposes what was asked before, or what takes more inference time than may be taken, a random draw is asked.

    Args:
        settings: The settings; their ``queries`` bound it.
        first: The metric's evaluation at the first values, which are the study's first trial.
        queries: Queries that it may ask for, at most those of the settings.
        seed: Seed of all draws.

    Raises:
        ImportError: The package optuna is missing.
    """

    def __init__(self, settings: Settings, first: Evaluation, queries: int, seed: int = 0) -> None:
        check_package("optuna", "settings_gp")
        import optuna

        self.settings, self.queries = settings, min(queries, settings.queries)
        self._values = {name: self._affordable(settings[name]) for name in settings.names}
        self._space = {
            name: _distribution(settings[name], values)
            for name, values in self._values.items()
            if values is None or len(values) > 1
        }
        self._tried = [Tried(settings.first, first)]
        self._seeds = generator(seed, "settings_gp")
        self._trial: Any = None
        self._proposed = settings.first
        with quiet(drawn(self._seeds)):
            self._sampler = optuna.samplers.GPSampler(seed=drawn(self._seeds), n_startup_trials=DRAWN)
            self._random = optuna.samplers.RandomSampler(seed=drawn(self._seeds))
            self._study = optuna.create_study(sampler=self._sampler)
        params = {name: self._parameter(name, settings.first[name]) for name in self._space}
        first_trial = optuna.trial.create_trial(params=params, distributions=self._space, value=first.cost)
        self._study.add_trial(first_trial)

    def ask(self) -> list[dict[str, Value]]:
        """Return the values to ask for, alone in a list; [] at the end."""
        import optuna

        if len(self._tried) > self.queries or not self._space:
            return []
        for sampler in [self._sampler, *[self._random] * PATIENCE]:
            self._study.sampler = sampler
            with quiet(drawn(self._seeds)):
                self._trial = self._study.ask(self._space)
            parameters = self._trial.params.items()
            values = {**self.settings.first, **{name: self._value(name, each) for name, each in parameters}}
            if self.settings.affords(values) and all(each.values != values for each in self._tried):
                self._proposed = values
                return [values]
            self._study.tell(self._trial, state=optuna.trial.TrialState.FAIL)
        return []

    def tell(self, index: int, evaluation: Evaluation) -> None:
        """Answer what was asked.

        Args:
            index: Its place in the batch, 0.
            evaluation: The metric's evaluation.
        """
        self._study.tell(self._trial, evaluation.cost)
        self._tried.append(Tried(self._proposed, evaluation))

    def end(self) -> SettingsEnd:
        """Return the best of what was told, the first of equals."""
        best = min(self._tried, key=lambda each: each.evaluation.cost)  # type: ignore[union-attr]
        assert best.evaluation is not None
        return SettingsEnd(best.values, best.evaluation, tuple(self._tried), self.queries)

    def _affordable(self, setting: Setting) -> Sequence[Value] | None:
        """Return the values that inference may take with all others as at first; None of an interval."""
        if setting.values is None:
            return None
        first = self.settings.first
        return [each for each in setting.values if self.settings.affords({**first, setting.name: each})]

    def _value(self, name: str, parameter: Any) -> Value:
        values = self._values[name]
        return self.settings[name].at(parameter) if values is None else values[parameter]

    def _parameter(self, name: str, value: Value) -> Any:
        values = self._values[name]
        return self.settings[name].share(float(value)) if values is None else values.index(value)


def _distribution(setting: Setting, values: Sequence[Value] | None) -> Any:
    """Return a setting as a parameter of Optuna's: a share of its interval, or the place of a value."""
    from optuna import distributions

    if values is None:
        return distributions.FloatDistribution(0.0, 1.0)
    if setting.ordered:
        return distributions.IntDistribution(0, len(values) - 1)
    return distributions.CategoricalDistribution(range(len(values)))
