"""The log of a run: a line for each point that the metric was asked for, and one for each answer, on disk at once."""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import FileFormatError, MetricError
from metricopt_ext.runtime.identity import fingerprint
from metricopt_ext.tasks.cost_scale import CostScale
from metricopt_ext.tasks.evaluation import Evaluation, Outcome, Pairs
from metricopt_ext.utils.described import Finite, from_json
from metricopt_ext.utils.files import parse_json, to_json
from metricopt_ext.utils.words import brief

FORMAT = {"format": "metricopt_ext/log/2"}  # the first line

# Two points are the same if they differ by no more than this share of their size.
SAME = 1e-6


@dataclass(frozen=True)
class Entry:
    """A point that the metric was asked for, and what became of it, as far as it is known.

    Attributes:
        id: Its number, from 0, in the order in which the points were asked.
        phi: ``d``.
        replaced: Digest of the tensors that its start put in place of the model's own; empty if there were none.
        settings: The settings of inference that were in force, by name; None without any.
        value: The metric's value; None while nobody has told it, or if it failed or was given up.
        outcomes: Other quantities that it told, by name (`Evaluation`, as for what follows).
        pairs: Its values on pairs of halves of its data.
        noise: Standard error of the value.
        failed: Whether the evaluation failed: the worst of the run stands in for it.
        given_up: Whether nobody waits for it any more; it costs no query.
        asked: How often the metric was called.
        seconds: How long it took; 0 where nobody said.
    """

    id: int
    phi: list[Finite]
    replaced: str = ""
    settings: dict[str, Any] | None = None
    value: float | None = None
    outcomes: dict[str, Outcome] | None = None
    pairs: Pairs = ()
    noise: float | None = None
    failed: bool = False
    given_up: bool = False
    asked: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, id: int, start: Start) -> "Entry":
        """Make one of a start that is asked for."""
        # The shortest numbers that become these very ones in phi's precision again.
        numbers = [Finite(float(str(each))) for each in start.phi.detach().cpu().numpy()]
        return cls(id, numbers, digest_of(start), dict(start.settings) or None)

    def told(self, evaluation: Evaluation | None, asked: int, seconds: float = 0.0) -> "Entry":
        """Return it with its answer; None gives it up. Of a stand-in only the failure is kept."""
        if evaluation is None:
            return replace(self, given_up=True)
        if evaluation.failed:
            return replace(self, failed=True, asked=asked)
        told = replace(self, value=evaluation.value, outcomes=evaluation.outcomes or None, pairs=evaluation.pairs)
        return replace(told, noise=evaluation.noise, asked=asked, seconds=seconds)

    @property
    def open(self) -> bool:
        """Whether nobody has answered it."""
        return self.value is None and not self.failed and not self.given_up

    @property
    def content(self) -> dict[str, Any]:
        """What the file holds of it; what it has none of is left out."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}

    def is_of(self, start: Start) -> bool:
        """Whether it was asked in the model of a start, with its settings in force."""
        return self.replaced == digest_of(start) and (self.settings or {}) == dict(start.settings)

    def at(self, like: Tensor) -> Tensor:
        """Return the point, ``d``, in the precision and on the device of another.

        Raises:
            ValueError: That one has another dimension.
        """
        if len(self.phi) != len(like):
            raise ValueError(f"a point of {len(self.phi)} numbers, where phi has {len(like)}")
        return torch.tensor(self.phi, dtype=torch.float64).to(like)

    def same_point(self, phi: Tensor) -> bool:
        """Whether it is at a point, ``d``, but for rounding."""
        same = len(self.phi) == len(phi)
        return same and bool((self.at(phi).double() - phi.double()).norm() <= SAME * phi.double().norm())


@dataclass(frozen=True)
class Sitting:
    """How many evaluations a run may make from now on.

    Attributes:
        budget: That number.
        goes_on: Whether the run had come to the end of the budget before, which was asked for, too.
    """

    budget: int
    goes_on: bool = False


class Log:
    """What a run asked and was told, in a file that only grows; a last line that a kill tore is dropped.

    Args:
        path: The file; None keeps it in memory only.
        scale: The metric, whose bounds the values on file must keep to.
        check: Called before the file is written, to refuse it.

    Attributes:
        entries: What is known of each point, by its number.
        sittings: The budgets that the run was given, one after another.

    Raises:
        FileFormatError: The file holds something else.
    """

    def __init__(self, path: Path | None, scale: CostScale, check: Callable[[], None] = lambda: None) -> None:
        self.path: Path | None = path
        self._scale, self._check = scale, check
        self.entries: dict[int, Entry] = {}
        self.sittings: list[Sitting] = []
        self._way = ""  # how points are looked up
        self._size = 0  # bytes that are known
        self._unclaimed: list[Entry] = []  # of an earlier process, that were not asked for again yet
        if path is not None and path.exists():
            self._read(path)

    def evaluation(self, entry: Entry) -> Evaluation | None:
        """Return what the metric said at an entry's point; None if it failed, was given up, or is open."""
        if entry.value is None:
            return None
        return Evaluation(entry.value, entry.outcomes or {}, entry.pairs, entry.noise, sign=self._scale.sign)

    def told(self, id: int) -> Entry | None:
        """Return what became of a point; None while nobody has said."""
        entry = self.entries.get(id)
        return None if entry is None or entry.open else entry

    @property
    def answered(self) -> int:
        """How many points were evaluated, those that failed among them."""
        return sum(each.failed or each.value is not None for each in self.entries.values())

    @property
    def asked(self) -> int:
        """How often the metric was called."""
        return sum(each.asked for each in self.entries.values())

    @property
    def failed(self) -> int:
        """How many points' evaluations failed."""
        return sum(each.failed and each.asked > 0 for each in self.entries.values())

    def use(self, way: str) -> None:
        """Refuse to look points up in two ways, as a point's number in the one is no number of the other."""
        if self._way not in ("", way):
            raise RuntimeError(f"{self.path or 'a log'} is used {self._way}, so it can't be {way}; use another log")
        self._way = way

    def evaluated(self, at: Start, judged: Callable[[], Evaluation], asked: int) -> tuple[Evaluation, bool]:
        """Return an evaluation of a point, and whether an earlier process left it, whatever it asked before.

        What is made now is on disk when this returns. Each that was left is returned once, in their order.
        """
        self.use("by points")
        for entry in self._unclaimed:
            known = self.evaluation(entry)
            if known is not None and entry.is_of(at) and entry.same_point(at.phi):
                self._unclaimed.remove(entry)
                return known, True
        evaluation = judged()
        self.append([Entry.of(len(self.entries), at).told(evaluation, asked)])
        return evaluation, False

    def sit(self, budget: int) -> list[int]:
        """Note how many evaluations the run may make from now on, at least as many as before.

        Returns:
            The budgets to whose ends the run comes, this one last, and the first that it planned with before them.

        Raises:
            FileFormatError: It may make fewer than before.
        """
        before = self.sittings[-1].budget if self.sittings else 0
        if budget < before:
            raise FileFormatError(f"{self.path} has {before} evaluations, not {budget}; give as many queries or more")
        if budget > before:
            sitting = Sitting(budget, bool(before) and self.answered >= before)
            self._write([asdict(sitting)])
            self.sittings.append(sitting)
        return [*(each.budget for each, after in pairwise(self.sittings) if after.goes_on), budget]

    def append(self, entries: Sequence[Entry]) -> None:
        """Take points that are open from now on, or answers; they are on disk when this returns."""
        self._write([each.content for each in entries])
        self.entries |= {each.id: each for each in entries}
        for each in entries:
            if each.value is not None:
                self._scale.remember(each.outcomes or {})

    def _write(self, contents: Sequence[Any]) -> None:
        if self.path is None:
            return
        self._check()
        lines = contents if self._size else [FORMAT, *contents]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab") as file:
                file.truncate(self._size)  # what a kill tore, or an error left
                file.write("".join(f"{to_json(each)}\n" for each in lines).encode())
                file.flush()
                os.fsync(file.fileno())
                self._size = file.tell()
        except OSError as error:  # which names no file where there is no room
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def _read(self, path: Path) -> None:
        """Read all but a torn last line."""
        content = path.read_bytes()
        *lines, torn = content.split(b"\n")
        try:
            if lines and parse_json(lines[0]) != FORMAT:
                raise ValueError(f"its first line is {brief(lines[0].decode(errors='replace'))}")
            for line in lines[1:]:
                found = parse_json(line)
                if isinstance(found, dict) and "budget" in found:
                    self.sittings.append(from_json(Sitting, found))
                else:
                    self._take(from_json(Entry, found))
        except (ValueError, MetricError) as error:
            raise FileFormatError(f"{path} is no log of a metric: {brief(error)}; use another output folder") from error
        self._size, self._unclaimed = len(content) - len(torn), [each for _, each in sorted(self.entries.items())]

    def _take(self, entry: Entry) -> None:
        """Take an entry from the file, unless it has numbers that no evaluation has."""
        known, found = self.entries.get(entry.id), self.evaluation(entry)
        if known is not None and (not known.open or entry.open):
            raise ValueError(f"two lines are of point {entry.id}")
        if found is not None:
            if entry.failed or entry.given_up:
                raise ValueError(f"evaluation {entry.id} has a value although it failed or was given up")
            found.check()
            self._scale.checked(found.value)
            self._scale.checked_pairs(found.pairs)
            if self._scale.combination is not None:
                made = self._scale.combined_of(found.outcomes).value
                if abs(made - found.value) > SAME * max(1.0, abs(made)):
                    raise ValueError(f"evaluation {entry.id} is {found.value}, and its outcomes make {made}")
                self._scale.remember(found.outcomes)
        self.entries[entry.id] = entry


def digest_of(start: Start) -> str:
    """Return the digest of what a start puts in place of the model's own tensors; empty if that is nothing."""
    return fingerprint(dict(start.tensors)) if start.tensors else ""
