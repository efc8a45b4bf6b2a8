"""The evidence in one place: methods side by side over seeds, in numbers and in words."""

import collections
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from metricopt_ext.data.reading import Reading
from metricopt_ext.experiment.method import METHODS
from metricopt_ext.experiment.record import SeedRecord
from metricopt_ext.experiment.seeds import Interval, chance_in_words, paired_interval, spread
from metricopt_ext.experiment.style import direction
from metricopt_ext.methods.guard import Guard, deviates, excess_in_words, shown
from metricopt_ext.methods.result import kept, without_verdict, worst_of
from metricopt_ext.utils.versions import versions
from metricopt_ext.utils.words import counted
from metricopt_ext.value.value_function import Quality

BATCH_NOTE = "batch queries: further evaluations of the metric, on batches of scores and labels."
IN_USE = "value function in use"
DIGITS = 4  # after the point, of a metric
PARTS = ("validation", "test")
FROM_OUR_START = ("metricopt", "guided_es", "cma_es")  # from the start that was chosen, as MetricOpt's search
HEADER = ["method", "validation", "test", "queries", "per start", "seconds"]


@dataclass(frozen=True)
class Report:
    """Everything that a tool reports about a run.

    Attributes:
        task: What was finetuned, e.g. ``"classification/a9a"``.
        metric: The metric's name.
        maximize: Whether higher is better.
        records: One for each seed.
        config: The run's settings.
        explained: What the metric is, in a line; empty if its name says it.
    """

    task: str
    metric: str
    maximize: bool
    records: list[SeedRecord]
    config: dict[str, Any]
    explained: str = ""

    @property
    def methods(self) -> list[str]:
        """Names of the methods that any seed has, in the order of the tables."""
        return [name for name in METHODS if any(name in record.outcomes for record in self.records)]

    def title(self, method: str) -> str:
        """Return a method's name in tables and plots, with the number of seeds that have it if some lack it."""
        seeds, missing = len(self.records), sum(method not in record.outcomes for record in self.records)
        return METHODS[method].title + (f" ({seeds - missing} of {seeds} seeds)" if missing else "")

    def needs(self, method: str) -> str:
        """Return what a method needs of the data that the metric sees, its free starts included."""
        searched = self.config.get("method", {}).get("name") == "search"
        start_needs_inputs = searched and "batchnorm" in self.config.get("starts", [])
        return "inputs" if method in FROM_OUR_START and start_needs_inputs else METHODS[method].needs

    def values(self, method: str, column: str) -> list[float]:
        """Return one number of a method's last `Outcome`, e.g. ``"test"``, for each seed that has the method."""
        return [value for value in self._by_seed(method, column) if value is not None]

    @property
    def batch_queried(self) -> bool:
        """Whether a method evaluated the metric on batches."""
        return any(value > 0 for name in self.methods for value in self.values(name, "batch_queries"))

    def _by_seed(self, method: str, column: str) -> list[float | None]:
        """Return one number of a method's last `Outcome` for each seed, None if the method is missing."""
        found = [record.outcomes.get(method) for record in self.records]
        return [getattr(outcomes[-1], column) if outcomes else None for outcomes in found]

    @property
    def searched(self) -> bool:
        """Whether MetricOpt was a search, not a recipe."""
        return all(record.searched for record in self.records)

    @property
    def predicts(self) -> bool:
        """Whether a value function made predictions of what it was not fitted to; not under ``method.name=paper``."""
        return any(record.predicted for record in self.records)

    @property
    def quality(self) -> list[Quality]:
        """Held-out quality of the value function, one for each seed that has one."""
        return [record.quality for record in self.records if record.quality is not None]

    def to_json(self) -> dict[str, Any]:
        """Return the content of report.json."""

        def mean(values: Sequence[float]) -> float | None:
            return float(np.mean(values)) if values else None

        return {
            "task": self.task,
            "metric": {"name": self.metric, "maximize": self.maximize},
            "seeds": [record.seed for record in self.records],
            "methods": {
                name: {
                    "validation": self._by_seed(name, "validation"),
                    "test": self._by_seed(name, "test"),
                    "queries_total": max(self.values(name, "queries_total")),
                    "queries_per_start": max(self.values(name, "queries_per_start")),
                    "seconds": mean(self.values(name, "seconds")),
                    "batch_queries": max(self.values(name, "batch_queries")),
                }
                for name in self.methods
            },
            "value_function": {
                "heldout_spearman": mean([q.spearman for q in self.quality]),
                "heldout_mae": mean([q.mae for q in self.quality]),
                "constant_mae": mean([q.constant_mae for q in self.quality]),
                "trusted": [q.trusted for q in self.quality],
                "per_seed": [vars(q) for q in self.quality],
            },
            "split_half": [record.split_half for record in self.records],
            "guard": self.guard,
            "also": self.also(),
            "outcomes": self.outcomes(),
            "holding": [record.holding for record in self.records],
            "broken": [record.broken for record in self.records],
            "rare": [None if record.rare is None else vars(record.rare) for record in self.records],
            "chance": [record.chance for record in self.records],
            "kept": [record.kept for record in self.records],
            "queries": [record.queries for record in self.records],
            "evaluations": [record.evaluations for record in self.records],
            "settings": [record.setting for record in self.records],
            "inference": [record.settings for record in self.records],
            "reading": None if self.reading is None else asdict(self.reading),
            "machines": [vars(record.machine) for record in self.records],
            "versions": versions(),
            "config": self.config,
        }

    @property
    def reading(self) -> Reading | None:
        """How the file of the data was read, as the first seed has it; None where there is nothing to say."""
        return self.records[0].reading

    def also(self) -> dict[str, dict[str, dict[str, list[float | None]]]]:
        """Return other quantities than the metric: by name, part, and before and after, a number for each seed."""
        names = dict.fromkeys(name for record in self.records for name in record.also)

        def by_seed(name: str, part: str, place: int) -> list[float | None]:
            return [record.also[name][part][place] if name in record.also else None for record in self.records]

        return {
            name: {
                part: {"before": by_seed(name, part, 0), "after": by_seed(name, part, 1)}
                for part in ("validation", "test")
            }
            for name in names
        }

    def outcomes(self) -> dict[str, dict[str, list[float | None]]]:
        """Return what the metric is made of on validation: by name, before and after, a number for each seed."""
        names = dict.fromkeys(name for record in self.records for name in record.made_of)
        return {
            name: {
                when: [record.made_of.get(name, (None, None))[place] for record in self.records]
                for place, when in enumerate(("before", "after"))
            }
            for name in names
        }

    def on_outcomes(self) -> list[str]:
        """Say which of the metric's outcomes was the worst in each seed; nothing of a metric without any."""
        several = len(self.records) > 1
        return [
            (f"Seed {record.seed}: " if several else "")
            + worst_of(record.made_of, self.maximize, " on validation")
            + ("" if record.promised is None else f"; their losses promised {record.promised:.0%} of how they varied")
            for record in self.records
            if record.made_of
        ]

    def elsewhere(self) -> list[list[str]]:
        """Return a row for each other quantity under `QUANTITIES`; none if there are no others."""

        def change(parts: dict[str, list[float | None]]) -> str:
            before, after = ([value for value in parts[when] if value is not None] for when in ("before", "after"))
            return f"{spread(before)} → {spread(after)}"

        bounds = self.config.get("metric", {}).get("subject_to", {})
        return [
            [name, change(parts["validation"]), change(parts["test"]), bounds.get(name, "")]
            for name, parts in self.also().items()
        ]

    def on_constraints(self) -> list[str]:
        """Say what became of the constraints in each seed; nothing without any."""
        known = [record for record in self.records if record.holding is not None]
        if not known:
            return []
        bounds = self.config.get("metric", {}).get("subject_to", {})
        said = " and ".join(f"{name} {text}" for name, text in bounds.items())
        kept = sum(not record.broken for record in known)
        lines = [
            f"Subject to {said} on validation: what is kept satisfies this in {kept} of {counted(len(known), 'seed')}"
        ]
        for record in known:
            if record.broken:
                lines.append(
                    f"Seed {record.seed}: what is kept violates {excess_in_words(record.broken)} on validation; none of"
                    " the points that were asked satisfies all limits"
                )
        return lines

    def read(self) -> tuple[str, list[list[str]]]:
        """Return how the data were read: a sentence, and the columns' rows under `reading.HEADER`; empty if nothing."""
        if self.reading is None:
            return "", []
        filled = f"; in the first seed, {self.reading.filled}" if self.reading.filled else ""
        return f"The data were read as {self.reading.found}{filled}", self.reading.rows()

    @property
    def guard(self) -> Guard:
        """What told gains from chance, in all seeds; ``"none"`` if nothing did in one of them."""
        guards = [record.guard for record in self.records]
        return "none" if "none" in guards else guards[0]

    def gain(self, over: str, part: str = "test") -> Interval:
        """Return MetricOpt's gain over a method, over the seeds that have it; see `paired_interval`.

        Positive is better whatever the metric's direction.
        """
        pairs = zip(self._by_seed("metricopt", part), self._by_seed(over, part), strict=True)
        gains = [ours - theirs for ours, theirs in pairs if ours is not None and theirs is not None]
        return paired_interval(np.array(gains) * (1 if self.maximize else -1))

    @property
    def heading(self) -> str:
        """What the report is about."""
        return f"{self.task}: {self.metric} ({direction(self.maximize)})"

    def verdict(self) -> str:
        """Say in a few sentences what came out: before and after, what the guard did, and whether it may be chance."""
        parts = []
        for part in reversed(PARTS):
            before, after = (spread(self.values(name, part)) for name in ("pretrained", "metricopt"))
            parts.append(f"{before} → {after} on {part}")
        seeds = len(self.records)
        over = f" (mean ± standard deviation over {seeds} seeds)" if seeds > 1 else ""
        said = f"{self.metric} ({direction(self.maximize)}): {' and '.join(parts)}{over}"
        return f"{said}. {self._accepted()} {self._beside_the_best()}"

    def _accepted(self) -> str:
        """Say what the guard did, and whether the gain may be chance."""
        seeds, left = len(self.records), sum(record.kept == "start" for record in self.records)
        known = self.guard != "none"
        if left == seeds:
            why = "no gain on validation exceeded what chance explains" if known else "validation showed no gain"
            return f"The guard left the model as it was{' in every seed' if seeds > 1 else ''}, as {why}."
        where = "" if seeds == 1 else f" in {seeds - left} of {seeds} seeds"
        beside = f" and left the model as it was in {left}" if left else ""
        guard = (
            f"The guard accepted the change{where}{beside}."
            if known
            else f"The run is unguarded, so any gain was kept{where}{beside}, and a start is taken by its value:"
            " nothing tells how much of it is chance."
        )
        return f"{guard} The gain on test is {self._gain_in_words('pretrained')}."

    def _beside_the_best(self) -> str:
        """Say how MetricOpt compares with the best method on test."""
        best = self.best("test")
        if "metricopt" in best:
            return "No other method that ran is better on test."
        top = next(name for name in self.methods if name in best)
        value = np.mean(self.values(top, "test"))
        return (
            f"The best method on test is {self.title(top)} with {value:.{DIGITS}f}; MetricOpt's gain over it is"
            f" {self._gain_in_words(top)}."
        )

    def _gain_in_words(self, over: str) -> str:
        mean, low, high = gain = self.gain(over)
        interval = "" if math.isnan(low) else f" (95% interval [{low:+.4f}, {high:+.4f}])"
        return f"{mean:+.4f}{interval}, {chance_in_words(gain)}"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the table of methods: the titles of its columns, and its rows."""
        return [*self._header(), "needs"], [
            [*row, self.needs(name)] for name, row in zip(self.methods, self._rows(), strict=True)
        ]

    def best(self, part: str) -> set[str]:
        """Return the methods whose mean validation or test metric, to the digits that are shown, is the best."""
        known = {name: self.values(name, part) for name in self.methods}
        shown = {name: round(float(np.mean(values)), DIGITS) for name, values in known.items() if values}
        top = (max if self.maximize else min)(shown.values())
        return {name for name, value in shown.items() if value == top}

    def notes(self) -> list[str]:
        """Say what the table's numbers are."""
        one = len(self.records) == 1
        over = f"Mean ± standard deviation over {len(self.records)} seeds; each has its own"
        return [
            *([f"{self.metric}: {self.explained}."] if self.explained else []),
            f"{'One seed: one' if one else over} data split, model and value function.",
            "validation: data that the queries see, empty for an end that no query was asked of; test: data that no"
            " method sees.",
            "queries: calls of the metric; per start: how many of them another starting point of phi costs again.",
            *([BATCH_NOTE] if self.batch_queried else []),
        ]

    def spent(self) -> tuple[list[str], list[list[str]]]:
        """Return MetricOpt's queries of each seed by what they were for: titles and rows of a table."""
        purposes = list(dict.fromkeys(purpose for record in self.records for purpose in record.queries))
        rows = []
        for record in self.records:
            ours = record.outcomes["metricopt"][-1]
            each = [str(record.queries.get(purpose, 0)) for purpose in purposes]
            rows.append([str(record.seed), *each, str(ours.queries_total), f"{ours.seconds:.1f}"])
        return ["seed", *(purpose.replace("_", " ") for purpose in purposes), "total", "seconds"], rows

    def evaluations(self) -> str:
        """Say how often the metric was evaluated in all, whoever asked."""
        counts = {part: sum(record.evaluations.get(part, 0) for record in self.records) for part in PARTS}
        said = " and ".join(f"{counted(number, 'evaluation')} on {part}" for part, number in counts.items())
        return f"The metric, in {counted(len(self.records), 'seed')}: {said}"

    def computed_on(self) -> str:
        """Say which machines the digits are of."""
        machines = dict.fromkeys(str(record.machine) for record in self.records)
        return (
            f"Computed on {'; '.join(machines)}. Training amplifies rounding, so other processors, instruction sets and"
            " numbers of threads give other digits."
        )

    def findings(self) -> list[str]:
        """Say in words what the numbers show, both gains and failures."""
        return [
            *self.on_gains(),
            *self.on_outcomes(),
            *self.on_constraints(),
            *self.on_guard(),
            *self.on_f(),
            *self.on_data(),
        ]

    def on_gains(self) -> list[str]:
        """Say how MetricOpt compares with each other method."""
        return [
            f"MetricOpt against {over}: {gain} on test"
            + (f", 95% interval {interval}: {verdict}" if interval else f" ({verdict})")
            for over, gain, interval, verdict in self.gains()
        ]

    def gains(self) -> list[tuple[str, str, str, str]]:
        """Return each baseline's title, MetricOpt's gain over it, the gain's interval, and what it shows."""
        rows = []
        for name in self.methods:
            if name == "metricopt":
                continue
            mean, low, high = self.gain(name)
            verdict = "a gain" if low > 0 else "a loss" if high < 0 else "no gain shown"
            shown = ("", "one seed, no interval") if math.isnan(low) else (f"[{low:+.4f}, {high:+.4f}]", verdict)
            rows.append((self.title(name), f"{mean:+.4f}", *shown))
        return rows

    def on_guard(self) -> list[str]:
        """Say what counted as chance and what the guard kept."""
        lines, seeds = [], counted(len(self.records), "seed")
        halves = [record.split_half for record in self.records if record.split_half is not None]
        chances = [record.chance for record in self.records if record.chance is not None]
        if halves and chances:
            chance, confidence = np.mean(chances), self.config["guard"]["confidence"]
            left = sum(record.kept == "start" for record in self.records)
            lines += [
                f"Split-half correlation of the metric over phi: {np.mean(halves):.2f} (near 0 the metric is mostly"
                " noise, and no method can help)",
                f"A gain on validation counts as chance unless it exceeds {deviates(confidence) * chance:.4f} after its"
                f" optimism is subtracted; the model was left as it was in {left} of {seeds}",
            ]
        counts = collections.Counter(record.kept for record in self.records)
        kept_in = ", ".join(f"{kept(name)} in {count}" for name, count in counts.most_common())
        presumed = collections.Counter(record.against for record in self.records if record.against != "start")
        said = [f"In {count} of {seeds} {without_verdict(name)}" for name, count in presumed.items()]
        return [*lines, f"Kept: {kept_in} of {seeds}", *said, *self.on_settings()]

    def on_settings(self) -> list[str]:
        """Say which settings of inference were changed, in how many seeds; nothing where none could be."""
        if not (self.config.get("settings") or any(record.settings for record in self.records)):
            return []
        changes = collections.Counter(
            f"{name} {shown(before)} → {shown(after)}"
            for record in self.records
            for name, (before, after) in record.settings.items()
        )
        changed_in = ", ".join(f"{change} in {count}" for change, count in changes.most_common())
        changed_in += f" of {counted(len(self.records), 'seed')}" if changed_in else ""
        return [f"Settings of inference kept: {changed_in or 'the original ones'}; MetricOpt is evaluated with these"]

    def on_data(self) -> list[str]:
        """Say of what the metric saw few examples."""
        rare = [(record.seed, record.rare) for record in self.records if record.rare is not None]
        if not rare:
            return []
        (seed, first), seeds = rare[0], counted(len(self.records), "seed")
        return [f"Few examples in {len(rare)} of {seeds}; in seed {seed}, {first}"]

    def on_f(self) -> list[str]:
        """Say how well f predicted, and in how many seeds it is to be trusted; nothing if there was no f."""
        if not self.quality:
            return []
        trusted = sum(quality.trusted for quality in self.quality)
        spearman = np.mean([quality.spearman for quality in self.quality])
        mae = np.mean([quality.mae for quality in self.quality])
        baselines = {"a constant": [quality.constant_mae for quality in self.quality]}
        so_far = [quality.incumbent_mae for quality in self.quality if quality.incumbent_mae is not None]
        if so_far:
            baselines["the best value so far"] = so_far
        against = ", ".join(f"{np.mean(errors):.4f} for {name}" for name, errors in baselines.items())
        where = "before each query" if self.searched else "on held-out trajectories"
        return [
            f"Value function, tested {where}: Spearman {spearman:.2f}; mean absolute error {mae:.4f}"
            f" ({against}); trusted in {trusted} of {counted(len(self.records), 'seed')}"
        ]

    def predictors(self) -> list[tuple[str, str, str]]:
        """Return how well f predicts, in a row; none if there was no f."""
        rows = {IN_USE: self.quality} if self.quality else {}
        return [(name, spread([q.spearman for q in qs]), spread([q.mae for q in qs])) for name, qs in rows.items()]

    def _header(self) -> list[str]:
        return [*HEADER[:-1], *(["batch queries"] if self.batch_queried else []), HEADER[-1]]

    def _rows(self) -> list[list[str]]:
        on_batches = self.batch_queried
        return [
            [
                self.title(name),
                spread(values) if (values := self.values(name, "validation")) else "",
                spread(self.values(name, "test")),
                f"{max(self.values(name, 'queries_total')):.0f}",
                f"{max(self.values(name, 'queries_per_start')):.0f}",
                *([f"{max(self.values(name, 'batch_queries')):.0f}"] if on_batches else []),
                f"{np.mean(self.values(name, 'seconds')):.1f}",
            ]
            for name in self.methods
        ]
