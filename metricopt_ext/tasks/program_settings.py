"""Settings of a program: what stands in braces in its command, and what each of them may be."""

import re
from collections.abc import Sequence
from contextlib import nullcontext
from difflib import get_close_matches
from functools import partial
from typing import Any

from metricopt_ext.errors import ConfigError
from metricopt_ext.tasks.program_score import CHECKPOINT, TRIAL
from metricopt_ext.tasks.settings import QUERIES, Setting, Settings, Value, Values
from metricopt_ext.utils.words import brief, nearest

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
NAME = r"[A-Za-z_][\w-]*"
NAMED = re.compile(rf"(?!(?:{CHECKPOINT}|{TRIAL})=)({NAME})=([^{{}}]+)")

# A name in braces, which a shell's ${NAME} is not.
PLACEHOLDER = re.compile(rf"(?<!\$)\{{({NAME})\}}")

# What is no value: text that is empty, begins or ends with a blank, or is an interval.
STRANGE = re.compile(r"|\s.*|.*\s|[-+.\d]+:[-+.\d].*")

# Of a number that nobody wrote, a program gets so many digits: more than any query tells apart, and fit to be read.
DIGITS = 10

FORMS = "LOW:HIGH, LOW:HIGH:SCALE or A,B,C"


class _Told(Setting):
    """A setting of a program, which is told numbers to `DIGITS` digits."""

    def at(self, t: float) -> float:
        """Return the number at a share t of the interval, in [0, 1], as the program is told it."""
        number = super().at(t)
        return number if self.whole else min(max(float(f"{number:.{DIGITS}g}"), self._ends[0]), self._ends[1])


class ProgramSettings(Settings):
    """The settings of a program, which reach it by the words of its command.

    Args:
        specs: Each ``NAME=LOW:HIGH``, ``NAME=LOW:HIGH:SCALE`` with a scale of `SCALES`, or ``NAME=A,B,C``. Values are
            numbers if all of them are, else words.
        defaults: Each ``NAME=VALUE``: what the program is used with now. Of others it is the middle of the interval on
            its scale, or the first of the values.
        queries: Queries that they may take together, at least 0.

    Attributes:
        assumed: Names of the settings whose default nobody gave.

    Raises:
        ConfigError: A spec or a default is misread, or out of range, or of a setting that there is not.

    Examples:
        >>> settings = ProgramSettings(["nms=0.3:0.9", "size=320,480,640"], ["nms=0.5"])
        >>> settings.texts({"size": 640})
        {'nms': '0.5', 'size': '640'}
    """

    def __init__(self, specs: Sequence[str], defaults: Sequence[str] = (), queries: int = QUERIES) -> None:
        known = dict(_named(each, "--default", "VALUE") for each in defaults)
        given = [_named(each, "--setting", FORMS) for each in specs]
        self._texts: dict[tuple[str, Value], str] = {}
        try:
            settings = [self._setting(name, text, *([known[name]] if name in known else [])) for name, text in given]
            super().__init__(settings, lambda values: nullcontext(), queries=queries)
        except ValueError as error:
            raise ConfigError(f"--setting {' '.join(specs)}: {error}; each is NAME={FORMS}") from error
        if len(known) < len(defaults) or not set(known) <= set(self.names):
            raise ConfigError(f"--default {' '.join(defaults)}: give one for each --setting, {', '.join(self.names)}")
        self.assumed = tuple(name for name in self.names if name not in known)

    def _setting(self, name: str, text: str, *default: str) -> Setting:
        comma, made = (",", _of_values) if "," in text else (":", _of_interval)
        parts = text.split(comma)
        self._texts |= {(name, _read(each)): each for each in (*default, *parts)}
        return made(name, parts, *default)

    def texts(self, values: Values) -> dict[str, str]:
        """Return what stands in a command for each setting's name in braces: as it was written, or to `DIGITS` digits.

        Args:
            values: Values by name; the defaults of those that are left out.

        Raises:
            ValueError: A value is none that its setting may have.
        """
        found = self.complete(values).items()
        told = {name: f"{value:.{DIGITS}g}" if isinstance(value, float) else str(value) for name, value in found}
        return {name: self._texts.get((name, value), told[name]) for name, value in found}


def check_braces(words: Sequence[str], switch: str, settings: Sequence[str], others: Sequence[str] = (TRIAL,)) -> None:
    """Refuse a command in which a setting's name is missing, or a name in braces that nothing takes the place of.

    Without settings, only what is like a known name is refused: other braces may be a shell's or awk's.

    Args:
        words: The program and its arguments.
        switch: How messages call it.
        settings: Names of the settings.
        others: Further names that something takes the place of.

    Raises:
        ConfigError: There is one.
    """
    found, known = [name for word in words for name in PLACEHOLDER.findall(word)], [*settings, *others]
    like = partial(get_close_matches, possibilities=known, cutoff=0.75)
    if unknown := [name for name in found if name not in known and (settings or like(name.lower()))]:
        unfilled = f"{switch} has {{{unknown[0]}}}, which nothing fills{nearest(unknown[0], known)}"
        raise ConfigError(f"{unfilled}; add --setting {unknown[0]}=..., or blanks inside of the program's own braces")
    if missing := [name for name in settings if name not in found]:
        raise ConfigError(f"{switch} has no {{{missing[0]}}}; put it where the program takes --setting {missing[0]}")


def _of_interval(name: str, parts: Sequence[str], default: str | None = None) -> Setting:
    ends: list[Any] = [_read(each) for each in parts[:2]]
    scale: Any = ":".join(parts[2:]) or "linear"
    made = partial(_Told, name, *ends, scale=scale)
    # An end is a default that any interval takes; of integers, the middle is one too.
    found = made(default=made(default=ends[0]).at(0.5) if default is None else _read(default))
    if found.whole and found.at(1) - found.at(0) == 1:
        raise ValueError(f"it has two integers alone; write {parts[0]}.0 for numbers between, or {','.join(parts[:2])}")
    return found


def _of_values(name: str, parts: Sequence[str], default: str | None = None) -> Setting:
    if strange := [each for each in parts if STRANGE.fullmatch(each)]:
        raise ValueError(f"a value is {strange[0]!r}; it can't be empty, have blanks at its ends, or be an interval")
    read = str if any(isinstance(_read(each), str) for each in parts) else _read
    return Setting(name, values=[read(each) for each in parts], default=read(default or parts[0]))


def _named(text: str, switch: str, form: str) -> tuple[str, str]:
    """Return the two sides of NAME=...

    Raises:
        ConfigError: It is something else.
    """
    if not (match := NAMED.fullmatch(text)):
        raise ConfigError(f"{switch} {brief(text)}: it must be NAME={form}, not braces, {{checkpoint}} or {{trial}}")
    return match[1], match[2]


def _read(text: str) -> int | float | str:
    """Return the number that a text is, or the text."""
    if not NUMBER.fullmatch(text):
        return text
    return int(text) if text.lstrip("+-").isdecimal() else float(text)
