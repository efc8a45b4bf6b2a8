"""Summarise what sibling methods measured on the way, over the seeds of runs of the finetune tools.

    python benchmarks/summarise_siblings.py --run-dir out/ala_digits
    python benchmarks/summarise_siblings.py --run-dir out/ala_transferred --against out/ala_fixed

For each sibling method of a run: each quantity of its history at its first and last point and averaged over the later
half, mean and standard error over seeds, with the metric on test data and what was spent. --against names another run
of the same seeds, and prints the paired differences of the test metric, this run minus that one, with the 95% interval.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from metricopt_ext.errors import DataError, MetricOptError
from metricopt_ext.experiment.method import SIBLINGS
from metricopt_ext.experiment.record import SeedRecord
from metricopt_ext.experiment.seeds import paired_interval
from metricopt_ext.experiment.style import print_table
from metricopt_ext.siblings.kept import read_numbers
from metricopt_ext.utils.files import content_of

HEADER = ["", "first", "last", "later half", "seeds"]


def mean_and_error(values: Sequence[float]) -> str:
    """Return the mean with its standard error, which a single value lacks."""
    error = f" (se {np.std(values, ddof=1) / np.sqrt(len(values)):.4f})" if len(values) > 1 else ""
    return f"{np.mean(values):.4f}{error}"


def seed_folders(run: Path) -> list[Path]:
    """Return the folders of a run's finished seeds.

    Raises:
        DataError: There are none.
    """
    found = sorted(path.parent for path in run.glob("seed-*/record.json"))
    if not found:
        raise DataError(f"{run} holds no finished seed of a finetune tool's run")
    return found


def methods_of(run: Path) -> list[str]:
    """Return the sibling methods that all seeds of a run have.

    Raises:
        DataError: There are none.
    """
    folders = seed_folders(run)
    found = [name for name in SIBLINGS if all((folder / f"{name}.json").exists() for folder in folders)]
    if not found:
        raise DataError(f"{run} ran no sibling method; run its tool with methods=[...]")
    return found


def rows_of(run: Path, method: str) -> list[list[str]]:
    """Return a line for each quantity of a method's history, then the test metric and what was spent."""
    kept = [read_numbers(folder / f"{method}.json") for folder in seed_folders(run)]
    with content_of(run, f"{method}.json of the same kind for each seed"):
        return _rows(run, method, kept)


def _rows(run: Path, method: str, kept: Sequence[dict[str, Any]]) -> list[list[str]]:
    rows = []
    for quantity in kept[0]["history"]:
        series = [[value for _, value in each["history"][quantity]] for each in kept]
        columns = [s[0] for s in series], [s[-1] for s in series], [float(np.mean(s[len(s) // 2 :])) for s in series]
        rows.append([quantity, *map(mean_and_error, columns), str(len(kept))])
    spent: dict[str, list[float]] = {
        "test metric": list(values_on_test(run, method).values()),
        "queries": [sum(each["queries"].values()) for each in kept],
        "batch queries": [sum(each["batch_queries"].values()) for each in kept],
        "seconds": [each["seconds"] for each in kept],
    }
    return rows + [[name, "", mean_and_error(values), "", str(len(kept))] for name, values in spent.items()]


def values_on_test(run: Path, method: str) -> dict[int, float]:
    """Return the test metric that a method reached, by seed."""
    records = [SeedRecord.load(folder / "record.json") for folder in seed_folders(run)]
    return {record.seed: record.outcomes[method][-1].test for record in records}


def difference(run: Path, other: Path, method: str) -> str:
    """Return a line on the paired differences of the test metric, over the seeds that both runs have.

    Raises:
        DataError: They share no seed.
    """
    ours, theirs = values_on_test(run, method), values_on_test(other, method)
    shared = sorted(set(ours) & set(theirs))
    if not shared:
        raise DataError(f"{run} and {other} have no seed in common")
    interval = paired_interval(np.array([ours[seed] - theirs[seed] for seed in shared]))
    return (
        f"{method}, test metric of {run} minus that of {other}: {interval.mean:+.4f}"
        f" [{interval.low:+.4f}, {interval.high:+.4f}], {len(shared)} seeds"
    )


def summarise(run: Path, against: Path | None = None) -> None:
    """Print the summary of a run and, if there is another, the differences from it."""
    for method in methods_of(run):
        print_table(HEADER, rows_of(run, method), title=f"{run}: {method}")
    if against is not None:
        for method in [name for name in methods_of(run) if name in methods_of(against)]:
            print(difference(run, against, method))


def main(argv: Sequence[str] | None = None) -> Any:
    """Read the arguments and print the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, required=True, help="output folder of a finetune tool")
    parser.add_argument("--against", type=Path, help="output folder of another run with the same seeds")
    arguments = parser.parse_args(argv)
    try:
        summarise(arguments.run_dir, arguments.against)
    except MetricOptError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
