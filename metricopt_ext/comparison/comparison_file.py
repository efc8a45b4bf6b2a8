"""The files of a comparison: what each holds, checked before any of it becomes a name, a key or a size."""

from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from metricopt_ext.comparison.guarded import TRAINED
from metricopt_ext.errors import FileFormatError
from metricopt_ext.experiment.method import METHODS
from metricopt_ext.experiment.passes import Passes
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.utils.described import Finite, read_shaped
from metricopt_ext.utils.words import brief, counted

STARTS = "starts.json"
FILE_FORMAT = "metricopt_ext/comparison/1"


class StartsFile(TypedDict):
    """What `STARTS` holds of a seed: each free start's metric, by name, and what making and choosing one took."""

    seed: int
    chosen: str
    validation: dict[str, Finite]
    test: dict[str, Finite]
    queries: int
    seconds: Finite
    passes: Passes


class Judgement(TypedDict):
    """What a guard did to a whole run (see `claims.Judged`)."""

    accepted: bool
    change: Finite
    error: Finite | None
    best: Finite
    best_error: Finite | None


class Guarded(TypedDict):
    """What a guard did to a search (see `guarded`)."""

    accepted: bool
    change: Finite
    error: Finite | None
    end: NotRequired[Finite]  # not in those in benchmarks/results
    broken: NotRequired[dict[str, Finite]]
    whole: Judgement


class Cell(TypedDict):
    """Where a method stood with some queries."""

    queries: int
    validation: Finite
    test: Finite
    seconds: Finite
    passes: Passes | None
    guard: Guarded | None


class MethodRow(TypedDict):
    """What a method's file holds of a seed: the budgets that it was run at, cells and errors by budget."""

    seed: int
    method: str
    least: int
    budgets: list[int]
    cells: dict[str, Cell]
    errors: dict[str, str]
    machine: str


class Column(TypedDict):
    """The metric by seed; None where a seed has none."""

    validation: list[Finite | None]
    test: list[Finite | None]


class Columns(Column):
    """A method at a budget, by seed."""

    queries: list[int | None]
    seconds: list[Finite | None]
    passes: list[Passes | None]


class BestStart(Column):
    """The best free start, by seed."""

    queries: int
    chosen: list[str | None]
    seconds: list[Finite | None]
    passes: list[Passes | None]


class MethodColumns(TypedDict):
    """A method: the least queries that it needs, columns and errors by budget."""

    least: int
    cells: dict[str, Columns]
    errors: dict[str, list[str]]


class OwnGuard(Guarded):
    """A guard, and whose it is."""

    seed: int
    method: str
    budget: int


class MetricName(TypedDict):
    """A metric, and whether higher is better."""

    name: str
    maximize: bool


class Ran(TypedDict, total=False):
    """Of the settings, what the report names, and the page's commands to repeat it."""

    task: Literal["classification", "detection", "retrieval"]
    config: str
    overrides: list[str]
    most: dict[str, int]


class Comparison(TypedDict):
    """What comparison.json holds."""

    task: str
    title: str
    metric: MetricName
    budgets: list[int]
    seeds: list[int]
    starts: dict[str, Column]
    best_start: BestStart
    methods: dict[str, MethodColumns]
    guards: list[OwnGuard]
    machines: list[str]
    versions: dict[str, str]
    config: Ran
    subject_to: NotRequired[dict[str, str]]
    format: NotRequired[Literal["metricopt_ext/comparison/1"]]  # not in those in benchmarks/results


def read_starts(file: Path) -> dict[str, Any]:
    """Read a seed's starts.

    Raises:
        FileFormatError: The file holds something else.
    """
    starts = read_shaped(file, StartsFile, "what a seed of a comparison began from")
    if starts["chosen"] not in starts["validation"].keys() & starts["test"].keys():
        raise FileFormatError(
            f"{file} has no start {brief(starts['chosen'])}, which it chose; delete it to regenerate it"
        )
    return starts


def read_row(file: Path) -> dict[str, Any]:
    """Read a method's row.

    Raises:
        FileFormatError: The file holds something else.
    """
    return read_shaped(file, MethodRow, "a row of a comparison")


def read_comparison(file: Path) -> dict[str, Any]:
    """Read a comparison.json.

    Raises:
        FileFormatError: The file holds something else.
    """
    content = read_shaped(file, Comparison, "a comparison's")
    try:
        _check(content)
    except ValueError as error:
        raise FileFormatError(f"{file} is not a comparison's: {brief(error)}; delete it to regenerate it") from error
    return content


def _check(content: dict[str, Any]) -> None:
    """Reject what no page can be made of.

    Raises:
        ValueError: There is no seed, no budget or no model as it was, a name is unknown, or a column has another length
            than there are seeds.
    """
    seeds, budgets = content["seeds"], content["budgets"]
    check_integer(0, **{f"seeds[{i}]": seed for i, seed in enumerate(seeds)})
    check_integer(1, **{f"budgets[{i}]": budget for i, budget in enumerate(budgets)})
    if not seeds or not budgets or TRAINED not in content["starts"]:
        raise ValueError(f"it has no seeds, no budgets or no start {TRAINED!r}")
    for name in content["methods"]:
        if name not in METHODS:
            raise ValueError(f"it has the method {brief(name)}, which does not exist")
    best = {key: value for key, value in content["best_start"].items() if key != "queries"}
    cells = {f"{name}, {q}": cell for name, each in content["methods"].items() for q, cell in each["cells"].items()}
    for name, columns in {**content["starts"], "best_start": best, **cells}.items():
        for key, column in columns.items():
            if isinstance(column, list) and len(column) != len(seeds):
                raise ValueError(
                    f"{brief(name)} has {len(column)} values of {key}, there are {counted(len(seeds), 'seed')}"
                )
    if not any(value is not None for value in content["starts"][TRAINED]["test"]):
        raise ValueError(f"it has no value of {TRAINED!r}")
