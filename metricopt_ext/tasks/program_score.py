"""A score that a program prints, or writes into a JSON file, for a checkpoint or settings that it is given."""

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metricopt_ext.errors import ConfigError, MetricError
from metricopt_ext.tasks.cost_scale import CostScale
from metricopt_ext.tasks.evaluation import Outcome, mean_of
from metricopt_ext.utils.files import parse_json
from metricopt_ext.utils.program import Ended, Programs, filled
from metricopt_ext.utils.state_dict import within
from metricopt_ext.utils.words import brief

CHECKPOINT, TRIAL = "checkpoint", "trial"  # stand in braces for the file's path, and for the trial's name

# A number as programs print it: commas may group its digits or stand for the point, and behind a letter or a digit
# a minus sign is a hyphen.
NUMBER = re.compile(r"((?<![\w+\-\u2212])[-\u2212])?(\d+(,\d+)*(\.\d+)?|(?<![^\W\d])(?<!\.)\.\d+)(\.?[eE][-+]?\d+)?")


@dataclass(frozen=True)
class Score:
    """What a program found.

    Attributes:
        value: The score, the mean of all repeats.
        halves: The scores on two halves of the data, if they are asked for; means likewise.
        noise: Standard error of the value; None without repeats.
        seconds: How long all repeats took.
        also: Other quantities by name, means likewise; None without any.
        outcomes: What the score is made of, by name, means likewise with noise of their own; None of a number.
    """

    value: float
    halves: tuple[float, float] | None
    noise: float | None
    seconds: float
    also: dict[str, float] | None = None
    outcomes: dict[str, Outcome] | None = None

    @property
    def besides(self) -> dict[str, Outcome]:
        """All that it found by name."""
        return {**(self.outcomes or {}), **{name: Outcome(value) for name, value in (self.also or {}).items()}}


@dataclass(frozen=True)
class Failed:
    """Why there is no score, in words."""

    reason: str


class Printed:
    """The number of the last match of a regular expression, in the standard output or else in the error stream.

    Args:
        pattern: The expression; its first group is read by ``float``.
        switch: How messages call it.

    Raises:
        ConfigError: It is no expression, or has no group.
    """

    def __init__(self, pattern: str, switch: str) -> None:
        self._pattern, self._switch = _compiled(pattern, switch), switch
        if not self._pattern.groups:
            raise ConfigError(f"{switch} {brief(pattern)} has no group; put the number in one, e.g. 'AP50: ([0-9.]+)'")

    def reading(self, values: Mapping[str, str]) -> Callable[[Ended], float]:
        """Return what reads the number once the program that is about to be run has ended."""
        return self.read

    def read(self, ended: Ended) -> float:
        """Return the number that a program printed.

        Raises:
            MetricError: It printed none, or the group holds a part of it.
        """
        return _read(_matches(self._pattern, ended, self._switch)[-1], 1, self._switch)


class PrintedByName:
    """Outcomes, by all matches of a regular expression as of `Printed`; of a name the last one counts.

    Args:
        pattern: The expression; its groups are the name and the number, and perhaps those on two halves of the data.
        switch: How messages call it.

    Raises:
        ConfigError: It is no expression, or has another number of groups.
    """

    def __init__(self, pattern: str, switch: str) -> None:
        self._pattern, self._switch = _compiled(pattern, switch), switch
        if self._pattern.groups not in (2, 4):
            raise ConfigError(
                f"{switch} {brief(pattern)} has {self._pattern.groups} groups; with --combine they are the name and the"
                r" number, as '^(\w+)=(\S+)', and perhaps the numbers on two halves, as '^(\w+)=(\S+) (\S+) (\S+)'"
            )

    def reading(self, values: Mapping[str, str]) -> Callable[[Ended], dict[str, Outcome]]:
        """Return what reads the outcomes once the program that is about to be run has ended."""
        return self.read

    def read(self, ended: Ended) -> dict[str, Outcome]:
        """Return the outcomes that a program printed, in the order of their names' first lines.

        Raises:
            MetricError: It printed none, or a group holds a part of a number.
        """
        found = dict[str, Outcome]()
        for match in _matches(self._pattern, ended, self._switch):
            value, *halves = (_read(match, group, self._switch) for group in range(2, self._pattern.groups + 1))
            found[match[1]] = Outcome(value, ((halves[0], halves[1]),) if halves else ())
        return found


def _compiled(pattern: str, switch: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.MULTILINE)
    except re.error as error:
        raise ConfigError(f"{switch} {brief(pattern)} is no regular expression: {error}") from error


def _matches(pattern: re.Pattern[str], ended: Ended, switch: str) -> list[re.Match[str]]:
    """Return the matches in the standard output, or else in the error stream; at least one."""
    for text in (ended.output, ended.errors):
        if matches := list(pattern.finditer(text)):
            return matches
    raise MetricError(f"the program printed nothing that matches {switch} {brief(pattern.pattern)}")


def _read(match: re.Match[str], group: int, switch: str) -> float:
    """Return the number of a group, which must hold it whole."""
    if whole := _cut(match, group):
        taken = f"of which the group of {switch} takes {brief(match[group])} alone"
        raise MetricError(f"the program printed {brief(whole)}, {taken}; let it take all, as (\\S+) does")
    return _number(match[group], "the program printed")


def _cut(match: re.Match[str], group: int) -> str:
    """Return the number that a group holds a part of; empty if it holds it whole.

    A comma that the expression names separates numbers.
    """
    text, (start, end) = match.string, match.span(group)
    first, last = text.rfind("\n", 0, max(start, 0)) + 1, text.find("\n", end)
    for number in NUMBER.finditer(text, first, last if last >= 0 else len(text)):
        beyond = [place for place in (start - 1, end) if number.start() <= place < number.end()]
        inside = number.start() < end and start < number.end()
        if inside and not all(text[place] == "," and _names(match, place, group) for place in beyond):
            return number[0]
    return ""


def _names(match: re.Match[str], place: int, group: int) -> bool:
    """Whether an expression asks for the character at a place, as its match is another with any other one there."""
    text = f"{match.string[:place]}\0{match.string[place + 1 :]}"
    other = match.re.match(text, match.start())
    return other is None or other.span(group) != match.span(group)


class Written:
    """A number that a program writes into a JSON file.

    Args:
        place: ``FILE:KEY``; ``{checkpoint}`` and ``{trial}`` are replaced in the file's name. The key has dots into
            nested objects and lists.
        switch: How messages call it.

    Raises:
        ConfigError: It is something else.
    """

    def __init__(self, place: str, switch: str) -> None:
        self._file, colon, self._key = place.partition(":")
        if not (self._file and colon and self._key):
            raise ConfigError(f"{switch} {brief(place)}: it must be FILE:KEY, e.g. 'out/metrics.json:bbox.AP50'")

    def reading(self, values: Mapping[str, str]) -> Callable[[Ended], Any]:
        """Return what reads the number once the program that is about to be run has ended.

        Args:
            values: What stands for the names in braces.
        """
        path = Path(filled([self._file], values)[0])
        before = _state(path)

        def read(ended: Ended) -> Any:
            if _state(path) == before:
                raise MetricError(f"the program wrote no {path}" + (", which is of an earlier run" if before else ""))
            try:
                found = within(parse_json(path.read_bytes()), self._key)
            except (OSError, ValueError) as error:
                raise MetricError(f"{path} can't be read as JSON: {brief(error)}") from error
            return self._read(found, f"{path} has {brief(self._key)},")

        return read

    def _read(self, found: Any, where: str) -> Any:
        return _number(found, where)


class WrittenByName(Written):
    """Outcomes that a program writes into a JSON file, as an object of numbers at a place as of `Written`."""

    def _read(self, found: Any, where: str) -> dict[str, Outcome]:
        if not isinstance(found, dict):
            raise MetricError(f"{where} {brief(found)}; with --combine it must be an object, {{NAME: number}}")
        return {name: Outcome(_number(each, f"{where} of which {brief(name)} is")) for name, each in found.items()}


def _state(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is written; None if there is none."""
    status = path.stat() if path.exists() else None
    return status and (status.st_ino, status.st_mtime_ns, status.st_size)


def _number(found: Any, where: str) -> float:
    with suppress(OverflowError, TypeError, ValueError):
        if not isinstance(found, bool) and math.isfinite(value := float(found)):
            return value
    raise MetricError(f"{where} {brief(found)}, which is no finite number")


@dataclass(frozen=True)
class ProgramScore:
    """How a checkpoint, or settings of the program itself, are scored by a program.

    Attributes:
        words: The program and its arguments, with ``{checkpoint}`` and ``{trial}`` in them, and the settings' names.
        score: Where its number is, or its outcomes.
        halves: Where the numbers of two halves of its data are.
        also: Where other quantities are, by name.
        repeats: How many times it is run for a score.
        timeout: Seconds that a run may take; None for no limit.
        settings: What the program is told of settings, by their names in braces.
        scale: Whose combination makes the score of its outcomes; None where it is a number.
    """

    words: Sequence[str]
    score: Printed | Written | PrintedByName
    halves: tuple[Printed, Printed] | None = None
    also: Mapping[str, Printed | Written] = field(default_factory=dict)
    repeats: int = 1
    timeout: float | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    scale: CostScale | None = None

    def command(self, values: Mapping[str, str]) -> list[str]:
        """Return the program and its arguments, with what stands for the names in braces besides the settings."""
        return filled(self.words, {**self.settings, **values})

    def __call__(self, programs: Programs, checkpoint: Path | None, trial: str, log: Path) -> Score | Failed:
        """Score a checkpoint, or what the program scores without one.

        Args:
            programs: Runs the program.
            checkpoint: The file; None without any.
            trial: The trial's name.
            log: Has what the program wrote, of all repeats; what was in it is gone.

        Raises:
            ConfigError, StoppedError, OSError: As from `Programs.run`.
        """
        log.unlink(missing_ok=True)
        values = {**self.settings, TRIAL: trial, **({} if checkpoint is None else {CHECKPOINT: str(checkpoint)})}
        rows, seconds = list[tuple[Any, ...]](), 0.0
        for run in range(self.repeats):
            readings = [each.reading(values) for each in (self.score, *(self.halves or ()), *self.also.values())]
            ended = programs.run(self.command(values), log, self.timeout)
            try:
                if why := ended.failure():
                    raise MetricError(why)
                found, *others = (read(ended) for read in readings)
                rows.append((*self._made(found), *others))
            except MetricError as error:
                return Failed(f"{error} (run {run + 1} of {self.repeats})" if self.repeats > 1 else str(error))
            seconds += ended.seconds
        outcomes, own, *others = zip(*rows, strict=True)
        value, *others = map(statistics.mean, (own, *others))
        noise = statistics.stdev(own) / math.sqrt(self.repeats) if self.repeats > 1 else None
        halves = (others.pop(0), others.pop(0)) if self.halves else None
        also = dict(zip(self.also, others, strict=True)) or None
        if self.scale is None:
            return Score(value, halves, noise, seconds, also)
        means = {name: mean_of([each[name] for each in outcomes]) for name in outcomes[0]}
        value, pairs, _ = self.scale.combined_of(means)
        return Score(value, pairs[0] if pairs else None, noise, seconds, also, means)

    def _made(self, found: Any) -> tuple[dict[str, Outcome] | None, float]:
        """Return the outcomes, if there are any, and the score."""
        if self.scale is None:
            return None, found
        if twice := found.keys() & self.also.keys():
            raise MetricError(
                f"the program's outcomes have {brief(min(twice))}, which --also reads; combine the others"
            )
        value = self.scale.combined_of(found).value
        self.scale.remember(found)
        return found, value
