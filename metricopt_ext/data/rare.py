"""Groups of which a metric sees so few examples that what it says of them is mostly chance."""

from collections.abc import Mapping
from dataclasses import dataclass

from metricopt_ext.utils.words import brief, counted

LEAST = 10  # examples, below which a group is rare
NAMED = 5  # rare groups that are named


@dataclass(frozen=True)
class Rare:
    """Groups of few examples in the data that a metric sees, or of none.

    Attributes:
        of: What a group is, e.g. ``"class"``.
        groups: How many groups there are.
        rare: How many of them are rare.
        fewest: Numbers of examples of the rarest groups, by name, at most `NAMED` of them.
        least: The number of examples below which a group is rare.
    """

    of: str
    groups: int
    rare: int
    fewest: dict[str, int]
    least: int = LEAST

    def __str__(self) -> str:
        """Say it in two sentences."""
        named = ", ".join(f"{brief(name)} {count}" for name, count in self.fewest.items())
        named += ", ..." if self.rare > len(self.fewest) else ""
        return (
            f"{self.rare} of {counted(self.groups, self.of)} {'has' if self.rare == 1 else 'have'} fewer than"
            f" {self.least} examples in the validation data, which the metric sees ({named}). Its values for them are"
            " mostly chance: add validation examples of them"
        )


def rare_groups(of: str, counts: Mapping[str, int], least: int = LEAST) -> Rare | None:
    """Return what is rare among groups of examples, None if nothing is.

    Args:
        of: What a group is, e.g. ``"class"``.
        counts: Numbers of examples by the groups' names, 0 for a group that the data lack.
        least: How many are not few.
    """
    rare = sorted((name for name in counts if counts[name] < least), key=lambda name: (counts[name], name))
    return Rare(of, len(counts), len(rare), {name: counts[name] for name in rare[:NAMED]}, least) if rare else None
