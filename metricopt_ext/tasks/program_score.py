"""A score that a program prints, or writes into a JSON file, for a checkpoint or settings that it is given."""

import math
import os
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from metricopt_ext.errors import ConfigError
from metricopt_ext.utils.files import parse_json
from metricopt_ext.utils.program import Ended, Programs, filled
from metricopt_ext.utils.state_dict import within
from metricopt_ext.utils.words import brief

CHECKPOINT, TRIAL = "checkpoint", "trial"  # stand in braces for the file's path, and for the trial's name
CONTEXT = 40  # characters beside a number, in which it may begin or go on


@dataclass(frozen=True)
class Score:
    """What a program found.

    Attributes:
        value: The score, the mean of all repeats.
        halves: The scores on two halves of the data, if they are asked for; means likewise.
        noise: Standard error of the value; None without repeats.
        seconds: How long all repeats took.
        also: Other quantities by name, means likewise; None without any.
    """

    value: float
    halves: tuple[float, float] | None
    noise: float | None
    seconds: float
    also: dict[str, float] | None = None


@dataclass(frozen=True)
class Failed:
    """Why there is no score, in words."""

    reason: str


Reading: TypeAlias = Callable[[Ended], float | Failed]


class Printed:
    """The number of the last match of a regular expression, in the standard output or else in the error stream.

    Args:
        pattern: The expression; its first group is read by ``float``.
        switch: How messages call it.

    Raises:
        ConfigError: It is no expression, or has no group.
    """

    def __init__(self, pattern: str, switch: str) -> None:
        try:
            self._pattern = re.compile(pattern, re.MULTILINE)
        except re.error as error:
            raise ConfigError(f"{switch} {brief(pattern)} is no regular expression: {error}") from error
        if not self._pattern.groups:
            raise ConfigError(f"{switch} {brief(pattern)} has no group; put the number in one, e.g. 'AP50: ([0-9.]+)'")
        self._switch = switch

    def at(self, values: Mapping[str, str]) -> "Printed":
        """Return itself: nothing that is in braces takes part."""
        return self

    def reading(self, values: Mapping[str, str]) -> Reading:
        """Return what reads the number once the program that is about to be run has ended."""
        return self.read

    def read(self, ended: Ended) -> float | Failed:
        """Return the number that a program printed."""
        for text in (ended.output, ended.errors):
            matches = list(self._pattern.finditer(text))
            if matches:
                found = _number(matches[-1][1], "the program printed")
                if not isinstance(found, Failed) and (whole := _cut(matches[-1])):
                    return Failed(
                        f"the program printed {brief(whole)}, of which the group of {self._switch} takes"
                        f" {brief(matches[-1][1])} alone; let it match the whole number, as (\\S+) does"
                    )
                if isinstance(found, Failed) and re.search(r"\d[,%]", matches[-1][1] or ""):
                    return Failed(
                        f"{found.reason}; it must have a decimal point, and no % in the group of {self._switch}"
                    )
                return found
        return Failed(f"the program printed nothing that matches {self._switch} {brief(self._pattern.pattern)}")


def _cut(match: re.Match[str]) -> str:
    """Return the number as it was printed, if the group begins or ends within it; empty if not.

    A comma between numbers may be one of a list: after a decimal point, or where the expression names it.
    """
    text, (start, end) = match.string, match.span(1)
    before, after = text[max(start - CONTEXT, 0) : start], text[end : end + CONTEXT]
    if not (_begun(before, match) or _goes_on(after, match)):
        return ""
    return re.split(r"[^\w.,+\-\u2212]", before)[-1] + match[1] + re.split(r"[^\w.,+-]", after, maxsplit=1)[0]


def _begun(before: str, match: re.Match[str]) -> bool:
    """Whether a number that a group holds began before it: with digits, a point, a sign or the number of an exponent.

    A minus sign behind a letter or a digit is a hyphen, and more than one are a line.
    """
    if re.match(r"[-+\d]", match[1]) and re.search(r"(?<![\w.])[\d.,]*\d\.?[eE][-+]?\Z", before):
        return True
    if not re.match(r"[\d.]", match[1]):
        return False
    if re.search(r"(?<![\d.])\d+,\Z", before):
        return not _names(match, match.start(1) - 1)
    return bool(re.search(r"(\d|(\d|(?<![\w.]))\.|(?<![\w+\-\u2212])[-\u2212])\Z", before))


def _goes_on(after: str, match: re.Match[str]) -> bool:
    """Whether a number that a group holds goes on after it."""
    if re.match(r",\d", after) and "." not in match[1]:
        return not _names(match, match.end(1))
    return bool(re.match(r"[\d.]*[eE][-+]?\d|\.?\d", after))


def _names(match: re.Match[str], place: int) -> bool:
    """Whether an expression asks for the character at a place, as its match is another with any other one there."""
    text = f"{match.string[:place]}\0{match.string[place + 1 :]}"
    other = match.re.match(text, match.start())
    return other is None or other.span(1) != match.span(1)


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

    def at(self, values: Mapping[str, str]) -> "Written":
        """Return the place with what stands for further names in braces in the file's name."""
        found = copy(self)
        (found._file,) = filled([self._file], values)
        return found

    @property
    def shared(self) -> bool:
        """Whether the programs of all trials write the same file."""
        return all(f"{{{name}}}" not in self._file for name in (CHECKPOINT, TRIAL))

    def reading(self, values: Mapping[str, str]) -> Reading:
        """Return what reads the number once the program that is about to be run has ended.

        Args:
            values: What stands for the names in braces.
        """
        path = Path(filled([self._file], values)[0])
        before = _state(path)

        def read(ended: Ended) -> float | Failed:
            if _state(path) == before:
                return Failed(f"the program wrote no {path}" + (", which is of an earlier run" if before else ""))
            try:
                content = parse_json(Path(path).read_bytes())
            except (OSError, ValueError) as error:
                return Failed(f"{path} can't be read as JSON: {brief(error)}")
            found = within(content, self._key)
            return Failed(f"{path} has no {brief(self._key)}") if found is None else _number(found, f"{path} has")

        return read


def _number(found: Any, where: str) -> float | Failed:
    try:
        value = math.nan if isinstance(found, bool) else float(found)
    except (OverflowError, TypeError, ValueError):
        return Failed(f"{where} {brief(found)}, which is no number")
    return value if math.isfinite(value) else Failed(f"{where} {brief(found)}, which is no finite number")


@dataclass(frozen=True)
class ProgramScore:
    """How a checkpoint, or settings of the program itself, are scored by a program.

    Attributes:
        words: The program and its arguments, with ``{checkpoint}`` and ``{trial}`` in them, and the settings' names.
        score: Where its number is.
        halves: Where the numbers of two halves of its data are.
        also: Where other quantities are, by name.
        repeats: How many times it is run for a score.
        timeout: Seconds that a run may take; None for no limit.
    """

    words: Sequence[str]
    score: Printed | Written
    halves: tuple[Printed, Printed] | None = None
    also: Mapping[str, Printed | Written] = field(default_factory=dict)
    repeats: int = 1
    timeout: float | None = None

    def at(self, settings: Mapping[str, str]) -> "ProgramScore":
        """Return the same with values of settings in its words, by their names in braces."""
        also = {name: each.at(settings) for name, each in self.also.items()}
        return replace(self, words=filled(self.words, settings), score=self.score.at(settings), also=also)

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
        values = {TRIAL: trial, **({} if checkpoint is None else {CHECKPOINT: str(checkpoint)})}
        scores = list[Score]()
        for number in range(self.repeats):
            found = self._once(programs, values, log)
            if isinstance(found, Failed):
                return Failed(f"{found.reason} (run {number + 1} of {self.repeats})") if self.repeats > 1 else found
            scores.append(found)
        if self.repeats == 1:
            return scores[0]
        halves = [each.halves for each in scores if each.halves is not None]
        return Score(
            statistics.mean(each.value for each in scores),
            (statistics.mean(a for a, _ in halves), statistics.mean(b for _, b in halves)) if halves else None,
            statistics.stdev(each.value for each in scores) / math.sqrt(self.repeats),
            sum(each.seconds for each in scores),
            {name: statistics.mean((each.also or {})[name] for each in scores) for name in self.also} or None,
        )

    def _once(self, programs: Programs, values: dict[str, str], log: Path) -> Score | Failed:
        read_from = (self.score, *(self.halves or ()), *self.also.values())
        readings = [each.reading(values) for each in read_from]
        ended = programs.run(filled(self.words, values), log, self.timeout)
        if why := ended.failure():
            return Failed(why)
        numbers = list[float]()
        for read in readings:
            found = read(ended)
            if isinstance(found, Failed):
                return found
            numbers.append(found)
        value, *others = numbers
        halves = (others.pop(0), others.pop(0)) if self.halves else None
        return Score(value, halves, None, ended.seconds, dict(zip(self.also, others, strict=True)) or None)


def _state(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is written; None if there is none."""
    if not path.exists():
        return None
    status = os.stat(path)
    return status.st_ino, status.st_mtime_ns, status.st_size
