"""The record of one seed: each method's outcome and how good the value function was."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from metricopt_ext.data.rare import Rare
from metricopt_ext.data.reading import Reading
from metricopt_ext.errors import FileFormatError
from metricopt_ext.experiment.method import METHODS
from metricopt_ext.methods.guard import Guard
from metricopt_ext.utils.checks import check_at_least, check_integer
from metricopt_ext.utils.described import LARGEST, from_json
from metricopt_ext.utils.files import read_json, write_json
from metricopt_ext.utils.machine import Machine
from metricopt_ext.utils.words import brief
from metricopt_ext.value.value_function import Quality

SEED = "seed-"  # before a seed's number, in the name of its folder


@dataclass(frozen=True)
class Outcome:
    """What one method reached, in the metric's own units.

    Attributes:
        validation: Metric on the data that queries see; None where no query was asked of the end.
        test: Metric on the test data, evaluated once.
        queries_total: Metric queries spent.
        queries_per_start: How many of these each further start costs again.
        seconds: Wall-clock seconds; of a method that was interrupted, since it went on.
        batch_queries: Evaluations of the metric on batches of scores and labels, besides ``queries_total``.
    """

    validation: float | None
    test: float
    queries_total: int
    queries_per_start: int
    seconds: float
    batch_queries: int = 0


@dataclass(frozen=True)
class SeedRecord:
    """All that a report needs of one seed; a seed is a fresh split, model and value function.

    Attributes:
        seed: The seed.
        outcomes: By method, one for each number of queries that it reports.
        quality: Held-out quality of the value function in use; None if there is none, as the metric never varied.
        kept: Which end point the guard kept.
        setting: How boldly f was followed; None for a search.
        split_half: Correlation of the metric's halves over random phi; None if it does not report them.
        chance: Standard deviation of the chance part of a validation gain; None if nothing told.
        guard: What told it; see `Result.guard`.
        curves: Validation metric along finetuning by method, ``steps + 1`` numbers each, if they were asked for. No
            method sees them.
        true: Metric at held-out points where f is used.
        predicted: What f predicted there before it saw them.
        machine: What the seed was computed on.
        searched: Validation metric at each query of a search, in order.
        queries: MetricOpt's metric queries by what they were for.
        rare: Groups of which the metric saw few examples.
        reading: How the file of the data was read; None where there is nothing to say.
        also: Other quantities than the metric, by name and by ``"validation"`` and ``"test"``: of the pretrained model,
            and of what was kept.
        made_of: The outcomes that the metric is made of, on validation, by name: of the pretrained model, and of what
            was kept, None if it was not asked; empty of a metric that is told as a number.
        promised: Share of how these outcomes varied that their own losses promised; None without promises.
        holding: How many of the points that were asked satisfy the constraints; None without any.
        against: What the search's end was held against: the model as trained, or a start that is presumed in its place.
        broken: By how much what was kept breaks each limit that it breaks, on validation, in the quantity's own unit.
        settings: Settings of inference that were changed, by name: before and after.
        evaluations: Evaluations of the metric on all of ``"validation"`` and of ``"test"``, whoever asked.
        format: Of the file; one of another format is refused.
    """

    seed: int
    outcomes: dict[str, list[Outcome]]
    quality: Quality | None
    kept: str
    setting: tuple[float, float] | None
    split_half: float | None
    chance: float | None
    guard: Guard
    curves: dict[str, list[float]]
    true: list[float]
    predicted: list[float]
    machine: Machine
    searched: list[float] = field(default_factory=list)
    queries: dict[str, int] = field(default_factory=dict)
    rare: Rare | None = None
    reading: Reading | None = None
    also: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)
    made_of: dict[str, tuple[float, float | None]] = field(default_factory=dict)
    promised: float | None = None
    holding: int | None = None
    against: str = "start"
    broken: dict[str, float] = field(default_factory=dict)
    settings: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    evaluations: dict[str, int] = field(default_factory=dict)
    format: Literal["metricopt_ext/record/1"] = "metricopt_ext/record/1"

    def validation(self, method: str) -> float:
        """Return the validation metric of one of the methods of every report, of which it is known."""
        value = self.outcomes[method][-1].validation
        assert value is not None
        return value

    def save(self, path: Path) -> None:
        """Write the record as JSON."""
        write_json(path, asdict(self))

    def _check(self, folder: str) -> None:
        """Reject what a report can't be made of.

        Raises:
            ValueError: A method of every report is missing, one is unknown or ended nowhere, or a number is impossible.
        """
        if self.seed < 0 or (folder.startswith(SEED) and folder != f"{SEED}{self.seed}"):
            raise ValueError(f"it is of seed {self.seed}, but stands in {folder}")
        if strange := [name for name in (*self.outcomes, *self.curves) if name not in METHODS]:  # they name folders
            raise ValueError(f"it has the method {brief(strange[0])}, which does not exist")
        for name in ("pretrained", "metricopt", *self.outcomes):
            if not self.outcomes.get(name):
                raise ValueError(f"it has no outcome of {name}")
            for each in self.outcomes[name]:
                if each.validation is not None:
                    _check_values("validation", [each.validation])
                elif name in ("pretrained", "metricopt"):
                    raise ValueError(f"it does not have the validation metric of {name}")
                _check_values("test", [each.test])
                check_at_least(0, seconds=each.seconds)
                for key in ("queries_total", "queries_per_start", "batch_queries"):
                    check_integer(0, **{key: getattr(each, key)})
        check_integer(0, **self.queries)
        check_integer(0, **self.evaluations)
        if len(self.true) != len(self.predicted):
            raise ValueError(f"it has {len(self.true)} true values and {len(self.predicted)} predicted ones")
        for name, parts in self.also.items():
            if set(parts) != {"validation", "test"}:
                raise ValueError(f"it has {brief(name)} on {brief(sorted(parts))}; it must be on validation and test")
            for pair in parts.values():
                _check_values(name, pair)
        for name, values in self.made_of.items():
            _check_values(name, [each for each in values if each is not None])
        for name, numbers in {**self.curves, "true": self.true, "searched": self.searched}.items():
            _check_values(name, numbers)

    @classmethod
    def load(cls, path: Path) -> "SeedRecord":
        """Read a record.

        Raises:
            FileFormatError: The file holds something else, or stands in the folder of another seed.
        """
        content = read_json(path)
        try:
            record = from_json(cls, content)
            record._check(path.parent.name)
            return record
        except ValueError as error:
            raise FileFormatError(
                f"{path} is not the record of a seed: {brief(error)}; delete it to regenerate it"
            ) from error


def _check_values(name: str, values: Sequence[float]) -> None:
    for value in values:
        if not abs(value) <= LARGEST:  # NaN is not
            raise ValueError(f"{brief(name)} has the value {value}; it must be finite, and at most {LARGEST:.0e}")


def check_alike(records: Sequence[SeedRecord]) -> None:
    """Reject records that were not made with the same settings, as their curves have other lengths.

    Raises:
        FileFormatError: Two of them differ.
    """
    first: dict[str, SeedRecord] = {}
    for record in records:
        for name, curve in record.curves.items():
            other = first.setdefault(name, record)
            if len(curve) != len(other.curves[name]):
                raise FileFormatError(
                    f"the records of seeds {other.seed} and {record.seed} have {len(other.curves[name])} and"
                    f" {len(curve)} points of the curve {brief(name)}; delete the record.json of the wrong one"
                )
