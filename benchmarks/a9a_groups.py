"""Write a9a (Adult) as tables with a column of the groups by sex and race, for metric.by.

    python benchmarks/a9a_groups.py --data FOLDER --output-dir out/a9a_groups

``--data`` holds a9a and a9a.t, gzipped (.gz) or not. Their rows go to train.csv and test.csv: the label, -1 or 1, the
features f1 to f123, sex and race among them, and the group, as female/Black. The comparison is compare/a9a_groups.yaml.
"""

import argparse
import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from metricopt_ext.classification.libsvm import read_libsvm
from metricopt_ext.errors import DataError
from metricopt_ext.experiment.command import errors_in_one_line

FEATURES = 123
RACES = {67: "White", 68: "Asian-Pac-Islander", 69: "Amer-Indian-Eskimo", 70: "Other", 71: "Black"}  # by feature
SEXES = {72: "female", 73: "male"}


def main() -> None:
    """Parse the command line and write both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path, help="folder of a9a[.gz] and a9a.t[.gz]")
    parser.add_argument("--output-dir", required=True, type=Path, help="receives train.csv and test.csv")
    arguments = parser.parse_args()
    with errors_in_one_line():
        for name, part in (("a9a", "train"), ("a9a.t", "test")):
            plain = arguments.data / name
            write(plain if plain.exists() else plain.with_name(f"{name}.gz"), arguments.output_dir / f"{part}.csv")


def write(source: Path, output: Path) -> None:
    """Write the rows of a LIBSVM file as a table, and print the sizes of the groups.

    Raises:
        DataError: The file is missing or malformed, or a row has not one sex and one race.
    """
    table = read_libsvm(source, FEATURES)
    groups = groups_of(table.x, table.names)
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["label", *(f"f{number}" for number in range(1, FEATURES + 1)), "group"])
        for label, x, group in zip(table.y.tolist(), table.x.tolist(), groups, strict=True):
            rows.writerow([table.class_names[label], *(f"{value:g}" for value in x), group])
    sizes = ", ".join(f"{group} {size}" for group, size in sorted(Counter(groups).items()))
    print(f"{output}: {len(groups)} rows; {sizes}")


def groups_of(x: Tensor, names: Sequence[str]) -> list[str]:
    """Return each row's sex and race, as ``female/Black``.

    Args:
        x: Features, ``n x 123``, 0 or 1.
        names: What rows are called in messages.

    Raises:
        DataError: A row has none, or several.
    """
    parts = []
    for what, values in (("sex", SEXES), ("race", RACES)):
        marked = x[:, [number - 1 for number in values]] != 0
        if (odd := marked.sum(1) != 1).any():
            row = int(odd.nonzero()[0])
            raise DataError(
                f"{names[row]} has {int(marked[row].sum())} of the features {', '.join(map(str, values))}, its {what};"
                " it must have one: leave the row out"
            )
        kinds = list(values.values())
        parts.append([kinds[place] for place in marked.to(torch.uint8).argmax(1).tolist()])
    return ["/".join(each) for each in zip(*parts, strict=True)]


if __name__ == "__main__":
    main()
