"""A file of a metric's evaluations, each with its point, so that an interrupted run pays for none of them twice."""

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import FileFormatError
from metricopt_ext.runtime.identity import fingerprint
from metricopt_ext.tasks.cost_scale import CostScale
from metricopt_ext.tasks.evaluation import Evaluation, Pairs
from metricopt_ext.utils.described import from_json
from metricopt_ext.utils.files import read_json, to_json, write_atomically
from metricopt_ext.utils.words import brief

# What is not in the file where there is none of it.
OPTIONAL = ("settings", "pairs", "also")

# Two points are the same if they differ by no more than this share of their size.
SAME = 1e-6


@dataclass(frozen=True)
class KeptPoint:
    """A point that the metric was asked for.

    Attributes:
        id: Its number, from 0, in the order in which the points were asked.
        phi: ``d``.
        replaced: Digest of the tensors that its start put in place of the model's own; empty if there were none.
        settings: The settings of inference that were in force, by name; None, and not in the file, without any.
    """

    id: int
    phi: list[float]
    replaced: str
    settings: dict[str, Any] | None = field(default=None, kw_only=True)

    @classmethod
    def of(cls, id: int, phi: Tensor, start: Start) -> "KeptPoint":
        """Make one of a point, ``d``, in the model of a start."""
        # The shortest numbers that become these very ones in phi's precision again.
        numbers = [float(str(each)) for each in phi.detach().cpu().numpy()]
        return cls(id, numbers, digest_of(start), settings=dict(start.settings) or None)

    def is_of(self, start: Start) -> bool:
        """Whether it was asked in the model of a start, with its settings in force."""
        return self.replaced == digest_of(start) and (self.settings or {}) == dict(start.settings)

    @property
    def place(self) -> tuple[int, list[float], str]:
        """Its number, phi and digest."""
        return self.id, self.phi, self.replaced

    @property
    def fields(self) -> dict[str, Any]:
        """What the file holds of it, by name: what it has none of is left out."""
        return {name: value for name, value in asdict(self).items() if name not in OPTIONAL or value}

    def at(self, like: Tensor) -> Tensor:
        """Return the point, ``d``, in the precision and on the device of another.

        Raises:
            ValueError: That one has another dimension.
        """
        if len(self.phi) != len(like):
            raise ValueError(f"a point of {len(self.phi)} numbers, where phi has {len(like)}")
        return torch.tensor(self.phi, dtype=torch.float64).to(like)


@dataclass(frozen=True)
class KeptEvaluation(KeptPoint):
    """A point and what became of it.

    Attributes:
        cost: The metric's cost; None if it failed or was given up.
        halves: Its costs on two halves of its data; None if it does not tell.
        noise: Standard error of the cost; None without repeats.
        failed: Whether the evaluation failed: the worst cost of the run stands in for it.
        given_up: Whether nobody waits for it any more; it costs no query.
        asked: How often the metric was called.
        pairs: Its costs on several pairs of halves, ``halves`` the first; empty, and not in the file, without several.
        also: Other quantities that it told, by name; None, and not in the file, without any.
    """

    cost: float | None
    halves: tuple[float, float] | None
    noise: float | None
    failed: bool
    given_up: bool
    asked: int
    pairs: Pairs = ()
    also: dict[str, float] | None = None

    @classmethod
    def evaluated(cls, point: KeptPoint, evaluation: Evaluation, asked: int) -> "KeptEvaluation":
        """Make one of an evaluation; of a stand-in only the failure is kept."""
        failed = evaluation.failed
        if failed:
            return cls(*point.place, None, None, None, True, False, asked, settings=point.settings)
        cost, halves, noise = evaluation[:3]
        pairs, also = evaluation.pairs, evaluation.also
        return cls(*point.place, cost, halves, noise, False, False, asked, pairs, also, settings=point.settings)

    @classmethod
    def without(cls, point: KeptPoint) -> "KeptEvaluation":
        """Make one of a point that was given up."""
        return cls(*point.place, None, None, None, False, True, 0, settings=point.settings)

    @property
    def evaluation(self) -> Evaluation | None:
        """What the metric said; None if it failed or was given up."""
        if self.cost is None:
            return None
        return Evaluation(self.cost, self.halves, self.noise, pairs=self.pairs, also=self.also)

    @property
    def line(self) -> str:
        """What the file holds of it."""
        return to_json(self.fields)


class KeptEvaluations:
    """The evaluations of a run, and the points that are still open, in a file that every change rewrites.

    Args:
        path: The JSON file; None keeps them in memory only.
        scale: The metric, whose bounds the costs on file must keep to.
        check: Called before the file is written, to refuse it.

    Attributes:
        told: What became of each point, by id.
        open: The points that were asked for and not answered, by id.

    Raises:
        FileFormatError: The file holds something else.
    """

    def __init__(self, path: Path | None, scale: CostScale, check: Callable[[], None] = lambda: None) -> None:
        self.path: Path | None = path
        self._scale, self._check = scale, check
        self.evaluations: dict[int, KeptEvaluation] = {}
        self.open: dict[int, KeptPoint] = {}
        if path is not None and path.exists():
            content = _read(path, scale)
            self.evaluations = {each.id: each for each in content.evaluations}
            self.open = {each.id: each for each in content.open}
        self._lines = {id: each.line for id, each in self.evaluations.items()}

    @property
    def answered(self) -> int:
        """How many points were evaluated, those that failed among them."""
        return sum(not each.given_up for each in self.evaluations.values())

    def ask(self, points: Iterable[KeptPoint], *, write: bool = True) -> None:
        """Note points that are open from now on.

        Args:
            points: The points.
            write: Whether they are on disk when this returns; else they are with the next answer.
        """
        self.open |= {each.id: each for each in points}
        if write:
            self._write()

    def tell(self, kept: KeptEvaluation) -> None:
        """Keep what became of a point; it is on disk when this returns."""
        line, opened = kept.line, self.open.get(kept.id)
        self.evaluations[kept.id], self._lines[kept.id] = kept, line
        self.open.pop(kept.id, None)
        try:
            self._write()
        except BaseException:
            del self.evaluations[kept.id], self._lines[kept.id]
            if opened is not None:
                self.open[kept.id] = opened
            raise

    def check_unchanged(self) -> None:
        """Refuse a file whose evaluations are not those that are known here.

        Raises:
            FileFormatError: Another process has changed it.
        """
        if self.path is None:
            return
        found = _read(self.path, self._scale).evaluations if self.path.exists() else []
        if {each.id: each.line for each in found} != self._lines:
            raise FileFormatError(
                f"{self.path} was changed by another process since it was left; go on by a new search with resume=True"
            )

    def _write(self) -> None:
        if self.path is None:
            return
        self._check()
        evaluations = ", ".join(self._lines[id] for id in sorted(self._lines))
        content = _content([self.open[id] for id in sorted(self.open)], f"[{evaluations}]")
        start = f'"format": "{_File.format}", "checksum": "{_checksum(content)}"'
        write_atomically(self.path, f"{{{start}, {content}}}\n".encode())


@dataclass(frozen=True)
class _File:
    """What the file holds."""

    checksum: str
    open: list[KeptPoint]
    evaluations: list[KeptEvaluation]
    format: Literal["metricopt_ext/evaluations/1"] = "metricopt_ext/evaluations/1"


def _read(path: Path, scale: CostScale) -> _File:
    try:
        kept = from_json(_File, read_json(path))
        if kept.checksum != _checksum(_content(kept.open, f"[{', '.join(each.line for each in kept.evaluations)}]")):
            raise ValueError("its checksum is another than when it was written")
        points = [*kept.open, *kept.evaluations]
        if len({point.id for point in points}) < len(points):
            raise ValueError("two points have the same id")
        for point in points:
            if not all(map(math.isfinite, point.phi)):
                raise ValueError(f"point {point.id} is not finite")
        for each in kept.evaluations:
            if each.noise is not None and not 0 <= each.noise < math.inf:
                raise ValueError(f"{each.noise} is no standard error")
            if each.pairs and each.halves != each.pairs[0]:
                raise ValueError(f"evaluation {each.id} has other halves than the first of its pairs")
            for cost in (*(() if each.cost is None else (each.cost,)), *(each.halves or ()), *chain(*each.pairs)):
                if not math.isfinite(cost) or (scale.bounds is not None and not 0 <= cost <= 1):
                    raise ValueError(f"{cost} is no cost of a metric with bounds {scale.bounds}")
            for name, value in (each.also or {}).items():
                if not math.isfinite(value) or each.cost is None:
                    raise ValueError(f"evaluation {each.id} has {brief(name)} = {value}, which no evaluation has")
            if (each.cost is None) != (each.failed or each.given_up):
                raise ValueError(f"evaluation {each.id} has a cost although it failed or was given up, or has none")
    except (ValueError, FileFormatError) as error:
        raise FileFormatError(
            f"{path} holds no evaluations of the metric: {brief(error)}; use another output folder"
        ) from error
    return kept


def _content(points: Iterable[KeptPoint], evaluations: str) -> str:
    return f'"open": {to_json([each.fields for each in points])}, "evaluations": {evaluations}'


def _checksum(content: str) -> str:
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def digest_of(start: Start) -> str:
    """Return the digest of what a start puts in place of the model's own tensors; empty if that is nothing."""
    return fingerprint(start.replaced) if start.replaced else ""


def same_point(a: Tensor, b: Tensor) -> bool:
    """Whether two points, ``d``, are the same but for rounding."""
    return bool((a.double() - b.double()).norm() <= SAME * b.double().norm())
