"""One seed of any task's tool: set it up, run MetricOpt beside its baselines, keep the record."""

import copy
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from torch import Tensor

from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.data.rare import Rare
from metricopt_ext.data.reading import Reading
from metricopt_ext.errors import ConfigError, MetricError
from metricopt_ext.experiment.baselines import (
    along_path,
    at_each_budget,
    at_start,
    best_of_loss_finetune,
    loss_path,
    usual_baselines,
    without,
)
from metricopt_ext.experiment.compare import Comparison, compare
from metricopt_ext.experiment.config_sections import SettingsConfig
from metricopt_ext.experiment.events import query_events
from metricopt_ext.experiment.method import STANDING, Baseline, Method
from metricopt_ext.experiment.passes import CountedTask, Counter
from metricopt_ext.experiment.record import SeedRecord
from metricopt_ext.experiment.run_config import SHARE, SOUP, RunConfig
from metricopt_ext.experiment.usual_methods import metricopt_result, usual_methods
from metricopt_ext.experiment.whole_network import LabelParts, whole_network_start
from metricopt_ext.methods.result import Result
from metricopt_ext.methods.soups import Training, soup_starts
from metricopt_ext.methods.starts import batchnorm_line, batchnorm_start
from metricopt_ext.runtime import distributed
from metricopt_ext.runtime.pace import heard
from metricopt_ext.runtime.progress import Callback, Several, told
from metricopt_ext.tasks.batches import Batches
from metricopt_ext.tasks.metric import Metric, Query
from metricopt_ext.tasks.settings import Settings
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.files import save_checkpoint
from metricopt_ext.utils.machine import Machine

SOUP_FOLDER = "soup"  # of a seed's folder, if a start is a soup
MIXED = 0.75  # share of the deployment's in mixed BatchNorm statistics, best or next to it on clean and shifted images

Config = TypeVar("Config", bound=RunConfig)


class Subject(NamedTuple):
    """What a run is about.

    Attributes:
        task: What is finetuned, e.g. ``"classification/a9a"``.
        title: The same in words.
        metric: The metric's name.
        maximize: Whether higher is better.
        explained: What the metric is, in a line; empty if its name says it.
    """

    task: str
    title: str
    metric: str
    maximize: bool = True
    explained: str = ""


class Experiment(ABC, Generic[Config]):
    """A trained model with an adapter, ready to be finetuned: one seed of one task's tool.

    Args:
        config: The settings.
        folder: The seed's folder; the model is saved there, and loaded from there once trained.
        seed: Each seed has a fresh split, model and value function.
        callback: Notified of the model's training.

    Attributes:
        config_type: The settings' class.
        tuned_file: Name of the tuned model, which `finish` leaves in the folder.
        task: Its loss sees the train data, its metric the validation data.
        test_metric: The same metric on the test data.
        reading: How the file of the data was read, None where there is nothing to say; `prepare` sets it.

    Raises:
        MetricOptError: Data, settings or metric are not usable; the message says which.
    """

    config_type: ClassVar[type[RunConfig]]
    tuned_file: ClassVar[str] = "tuned.safetensors"
    reading: Reading | None = None

    def __init__(self, config: Config, folder: Path, seed: int, callback: Callback | None = None) -> None:
        self.config, self.folder, self.seed, self.callback = config, folder, seed, callback or Callback()
        self._charged: list[Counter] = []  # those that a soup's finetunes, which are made once, count in already
        with heard(self.callback.stage):
            self.task, self.test_metric = self.prepare()
        self.task = self.task.with_settings(self.in_force if config.settings is None else self.settings)

    @classmethod
    @abstractmethod
    def describe(cls, config: Any) -> Subject:
        """Return what a run is about.

        Raises:
            ConfigError: There is no such metric, loss or model; this is checked before any work is done.
        """

    @classmethod
    def plot_seeds(cls, folder: Path, seeds: Sequence[int]) -> list[Path]:
        """Draw the task's own pictures of all seeds into the run's folder, and return their paths."""
        return []

    @abstractmethod
    def prepare(self) -> tuple[FinetuneTask, Metric]:
        """Load the data, train the model or load it from the folder, and return the task and the test metric."""

    def rare(self) -> Rare | None:
        """Return of which groups the metric sees few examples; None where all have enough, or a task has no groups."""
        return None

    @cached_property
    def in_force(self) -> Settings | None:
        """Settings of inference that starts have though none is tuned; None of a task without any."""
        return None

    @cached_property
    def settings(self) -> Settings:
        """The settings of inference that the configuration names, or the usual ones, within its limits.

        Raises:
            ConfigError: The task has none, or not that one.
        """
        return (self.config.settings or SettingsConfig()).limit(self.own_settings())

    def own_settings(self) -> Settings:
        """Return the settings of inference that the configuration names, or the usual ones; see `settings`."""
        title = self.describe(self.config).title
        raise ConfigError(f"{title} has no settings of inference")

    @abstractmethod
    def validation(self) -> tuple[Sequence[Any], Batches]:
        """Return the validation data's inputs, in parts of about one size, and labelled batches for the loss."""

    def methods(self, resume: bool = False, callback: Callback | None = None) -> dict[str, Method]:
        """Return the methods to compare, by name; see `usual_methods`."""
        inputs, batches = self.validation()
        return usual_methods(
            self.config,
            self.seed,
            starts=self.starts() if self.config.method.name == "search" else None,  # the others have no use for them
            inputs=inputs,
            batches=batches,
            folder=self.folder,
            resume=resume,
            callback=callback,
        )

    def starts(self) -> dict[str, Start | StartLine]:
        """Return what a method may begin from besides phi = 0: what the settings name, as far as it applies."""
        named = {name: self.start(name) for name in self.config.starts}
        return {name: start for name, start in named.items() if start is not None}

    def start(self, name: str) -> Start | StartLine | None:
        """Return one of `run_config.STARTS`, or of a comparison's further ones, or None if it does not apply."""
        if name == "loss_finetune":
            return Start(loss_path(self.task, self.config.finetune, self.seed, callback=self.callback)[-1])
        if name == "batchnorm":
            return self._batchnorm
        if name in ("batchnorm_line", "batchnorm_mixed"):
            line = batchnorm_line(self.task, self._batchnorm)
            return line.at(MIXED) if line is not None and name == "batchnorm_mixed" else line
        if name == "whole_network_labels":
            return self._whole_network()
        if name == "soup_greedy":
            return self._soup(kind="greedy")
        if name == "soup_batchnorm":
            soup = None if self._batchnorm is None else self._soup()
            return None if soup is None else batchnorm_start(self.task, self.validation()[0], soup)
        return self._soup() if name == "soup" else None

    @cached_property
    def _batchnorm(self) -> Start | None:
        return batchnorm_start(self.task, told(self.validation()[0], self.callback, "BatchNorm on validation"))

    def training(self) -> Training | None:
        """Return how the model was trained, with all its steps, of which a soup's finetunes take a share; or None."""
        return None

    def label_parts(self) -> LabelParts | None:
        """Return the metric's labelled data in two, for a baseline that trains on them; None where a task has none."""
        return None

    def _whole_network(self) -> Start | None:
        training, parts = self.training(), self.label_parts()
        if training is None or parts is None or self.task.loss is None:
            return None
        try:
            return whole_network_start(self.task, self.task.loss, parts, lr=training.lr, seed=self.seed)
        except MetricError as error:  # it is on the held-out labels that the metric need not be defined
            self.callback.say(f"the whole network is not finetuned on held-out labels: {error}")
            return None

    def _soup(self, kind: str = "uniform") -> Start | None:
        """Return the mean of short finetunes, kept in the folder; or None if it is not known how to train."""
        training = self.training()
        if training is None:
            return None
        training = replace(training, steps=max(1, round(SHARE * training.steps)))
        if isinstance(self.task, CountedTask) and not any(each is self.task.losses for each in self._charged):
            self.task.losses.count += SOUP * training.steps
            self._charged.append(self.task.losses)
        (start,) = soup_starts(
            self.task,
            finetunes=SOUP,
            training=training,
            kinds=(kind,),
            seed=self.seed,
            output_dir=self.folder / SOUP_FOLDER,
            callback=self.callback,
        ).values()
        return start

    @classmethod
    def baselines(cls, config: Any, subject: "Experiment[Any] | None" = None) -> dict[str, Baseline]:
        """Return what a comparison can run, by name: what needs scores alone, and a finetune on validation labels.

        A task may add its own.

        Args:
            config: The settings.
            subject: The experiment whose data they may look at; None where only names and least budgets are asked for.
        """

        def on_labels(task: FinetuneTask, start: Tensor, seed: int) -> Tensor:
            assert subject is not None
            _, batches = subject.validation()
            return loss_path(replace(task, batches=batches), config.finetune, seed, start)

        def best_on_labels(task: FinetuneTask, start: Tensor, queries: int, seed: int) -> Tensor:
            return best_of_loss_finetune(task, on_labels(task, start, seed), queries)

        def made(name: str, task: FinetuneTask) -> Start | None:
            own = copy.copy(subject)  # on the task that counts what the method spends
            assert own is not None
            own.task = task
            start = own.start(name)
            assert not isinstance(start, StartLine)
            return start

        def settings() -> Settings:
            return without() if subject is None else subject.settings

        asked = {"soup_greedy": SOUP}
        at_starts = {name: at_start(partial(made, name), asked.get(name, 0)) for name in STANDING}
        return {
            **usual_baselines(config, settings),
            "loss_finetune_validation": along_path(on_labels),
            "loss_finetune_validation_best": at_each_budget(best_on_labels, least=lambda dim: 2),
            **at_starts,
        }

    def test_error(self, before: Start, after: Start) -> float | None:
        """Return the standard error of the test metric's difference between two states, None if it is unknown."""
        return None

    @contextmanager
    def as_trained(self) -> Iterator[None]:
        """Take out for a while what a start replaced that a search has kept; phi stays."""
        adapter = self.task.adapter
        with adapter.applied(Start(adapter.phi)):
            yield

    def save_tuned(self) -> None:
        """Write the model that is tuned, phi merged, as soon as MetricOpt has it: other methods may take long."""
        save_checkpoint(self.folder / "tuned.safetensors", self.task.adapter.merged_state_dict())

    def finish(self) -> None:
        """Write the tuned model once the model has MetricOpt's phi; a task may add more."""
        self.save_tuned()


class _Saving(Callback):
    """Saves the tuned model at the first outcome, which is MetricOpt's."""

    def __init__(self, experiment: Experiment[Any]) -> None:
        self._left = [experiment.save_tuned]

    def outcome(self, before: float, after: float) -> None:
        """Save it, once."""
        while self._left:
            self._left.pop()()


def run_seed(
    experiment_type: type[Experiment[Any]], config: RunConfig, folder: Path, resume: bool, seed: int, callback: Callback
) -> SeedRecord:
    """Run one seed and keep all of it in ``folder/seed-N``; a seed whose record exists is not run again.

    Of ranks that share a seed, each trains the model, and then takes the first one's; that one alone keeps anything.

    Args:
        experiment_type: What to run.
        config: The settings.
        folder: The run's folder.
        resume: Continue what an interrupted run left there.
        seed: The seed.
        callback: Notified of progress.

    Raises:
        MetricOptError: Data, settings or metric are not usable; the message says which.
    """
    run, folder = folder, folder / f"seed-{seed}"
    record_file = folder / "record.json"
    if record := distributed.on_first(
        lambda: SeedRecord.load(record_file) if resume and record_file.exists() else None
    ):
        callback.stage("on file")
        after = record.outcomes["metricopt"][-1]
        before, now = (record.validation(name) for name in ("pretrained", "metricopt"))
        callback.on_file(after.queries_total)
        callback.query(after.queries_total, now)
        callback.outcome(before, now)
        callback.done()
        return record
    callback.stage("data and model")
    subject, kept = experiment_type.describe(config), run / "events" / folder.name / "queries"
    with (
        nullcontext(folder) if distributed.rank() == 0 else TemporaryDirectory() as own,
        query_events(kept, subject.metric, subject.maximize, config.queries) as events,
    ):
        shown = Several(callback, events)  # the other ranks' events are told nothing
        experiment = experiment_type(config, Path(own), seed, shown)
        if (
            (rare := experiment.rare()) and seed == config.seed and distributed.rank() == 0
        ):  # the report counts other seeds
            warnings.warn(str(rare), stacklevel=2)
        counts = {"validation": Counted(experiment.task.metric), "test": Counted(experiment.test_metric)}
        shown.stage("make the starts")
        methods = experiment.methods(resume, Several(shown, _Saving(experiment)))
        comparison = compare(
            experiment.task, experiment.test_metric, methods, bool(config.pictures), shown, experiment.folder
        )
        made = {part: count.queries for part, count in counts.items()}
        record = distributed.on_first(lambda: _recorded(experiment, comparison, made))
    callback.done()
    return record


def _besides(experiment: Experiment[Any], result: Result) -> dict[str, dict[str, tuple[float, float]]]:
    """Return what counts besides the metric, before and after; the adapter has what was kept."""
    if not result.also:
        return {}
    test = experiment.task.judged_by(experiment.test_metric)
    before, after = test.look(Start(test.origin())), test.look(result.start_of(result.chosen))
    return {
        name: {"validation": pair, "test": (before[name], after[name])}
        for name, pair in result.also.items()
        if name in after
    }


class Counted:
    """Counts the queries of a metric and of all that are made of it, those on file too."""

    def __init__(self, metric: Metric) -> None:
        self.queries = 0
        metric.callbacks.append(self)

    def __call__(self, query: Query) -> None:
        """Count one."""
        self.queries += 1


def _recorded(experiment: Experiment[Any], comparison: Comparison, evaluations: dict[str, int]) -> SeedRecord:
    """Set MetricOpt's end, and write the record and the tuned model."""
    folder, seed, task = experiment.folder, experiment.seed, experiment.task
    result = metricopt_result(comparison.results)
    task.adapter.apply(result.start_of(result.chosen))
    sign = task.metric.sign
    searched = [] if result.loss_finetune is not None else [task.metric.value_of(cost) for cost in result.costs]
    record = SeedRecord(
        seed=seed,
        outcomes=comparison.outcomes,
        quality=None if result.fit is None else result.fit.f.quality,
        kept=result.chosen,
        setting=result.setting,
        split_half=None if math.isnan(result.split_half) else result.split_half,
        chance=result.chance,
        guard=result.guard,
        curves=comparison.curves,
        true=[] if result.fit is None else [sign * cost for cost in result.fit.true.tolist()],
        predicted=[] if result.fit is None else [sign * cost for cost in result.fit.predicted.tolist()],
        machine=Machine.current(task.adapter.phi.device),
        searched=searched,
        queries=result.queries,
        rare=experiment.rare(),
        reading=experiment.reading,
        also=_besides(experiment, result),
        made_of=result.made_of,
        promised=result.promised,
        settings={} if result.settings is None else dict(result.settings.changes),
        holding=None if result.constrained is None else result.constrained.holding,
        against=result.against,
        broken=result.broken,
        evaluations=evaluations,
    )
    experiment.finish()
    record.save(folder / "record.json")
    return record
