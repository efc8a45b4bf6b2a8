"""Settings of a program: what stands in braces in its command, and what each of them may be."""

import difflib
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import cast

from metricopt_ext.errors import ConfigError
from metricopt_ext.tasks.program_score import CHECKPOINT, TRIAL
from metricopt_ext.tasks.settings import QUERIES, SCALES, Scale, Setting, Settings, Value, Values
from metricopt_ext.utils.words import brief, nearest

INTEGER = re.compile(r"[-+]?\d+")
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
NAME = re.compile(r"[A-Za-z_][\w-]*")

# A name in braces, which a shell's ${NAME} is not.
PLACEHOLDER = re.compile(rf"(?<!\$)\{{({NAME.pattern})\}}")

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
        if len(known) < len(defaults):
            raise ConfigError(f"--default {' '.join(defaults)}: a setting is there twice; give one default for each")
        self._texts: dict[tuple[str, Value], str] = {}
        settings = [self._setting(spec, known) for spec in specs]
        names = [each.name for each in settings]
        if unknown := [name for name in known if name not in names]:
            near = nearest(unknown[0], names)
            raise ConfigError(f"--default {unknown[0]}={known[unknown[0]]}: no --setting has this name{near}")
        try:
            super().__init__(settings, lambda values: nullcontext(), queries=queries)
        except ValueError as error:
            raise ConfigError(f"--setting: {error}") from error
        self.assumed = tuple(name for name in names if name not in known)

    def _setting(self, spec: str, defaults: Mapping[str, str]) -> Setting:
        name, text = _named(spec, "--setting", FORMS)
        try:
            if "," in text:
                return self._of_values(name, text.split(","), defaults.get(name))
            return self._of_interval(name, text.split(":"), defaults.get(name))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"--setting {spec}: {error}") from error

    def _of_interval(self, name: str, parts: Sequence[str], default: str | None) -> Setting:
        ends = [_number(each) for each in parts[:2]]
        low, high = [*ends, None, None][:2]
        if low is None or high is None or len(parts) > 3:
            raise ValueError(f"it must be {FORMS}, with numbers for LOW and HIGH")
        self._texts |= {(name, low): parts[0], (name, high): parts[1]}
        scale = cast(Scale, parts[2] if len(parts) == 3 else "linear")
        if isinstance(low, int) and high == low + 1 and not isinstance(_number(default or ""), float):
            raise ValueError(
                f"it has only two integers; write {name}={float(low)}:{float(high)} for numbers between them, or"
                f" {name}={low},{high}"
            )
        if default is None:
            # An end is a default that any interval takes; of integers, the middle is one too.
            middle = _Told(name, low, high, scale=scale, default=low).at(0.5)
            return _Told(name, low, high, scale=scale, default=middle)
        number = _number(default)
        if number is None:
            raise ValueError(f"--default {name}={default} must be a number")
        found = _Told(name, low, high, scale=scale, default=number)
        self._texts[name, number] = default
        return found

    def _of_values(self, name: str, parts: Sequence[str], default: str | None) -> Setting:
        if empty := [each for each in parts if not each.strip() or each != each.strip()]:
            raise ValueError(f"a value is {empty[0]!r}; leave out blanks and commas without a value")
        if ranges := [each for each in parts if _is_interval(each)]:
            raise ValueError(f"a value is {ranges[0]!r}; an interval stands alone, {name}={ranges[0]}")
        numbers = [_number(each) for each in parts]
        values: list[Value] = list(parts) if None in numbers else [each for each in numbers if each is not None]
        chosen: Value = values[0]
        if default is not None:
            number = _number(default)
            chosen = default if None in numbers or number is None else number
        found = Setting(name, values=values, default=chosen)
        self._texts |= {(name, value): text for value, text in zip(values, parts, strict=True)}
        return found

    def texts(self, values: Values) -> dict[str, str]:
        """Return what stands in a command for each setting's name in braces: as it was written, or to `DIGITS` digits.

        Args:
            values: Values by name; the defaults of those that are left out.

        Raises:
            ValueError: A value is none that its setting may have.
        """
        return {name: self._text(name, value) for name, value in self.complete(values).items()}

    def _text(self, name: str, value: Value) -> str:
        if (name, value) in self._texts:
            return self._texts[name, value]
        return f"{value:.{DIGITS}g}" if isinstance(value, float) else str(value)

    def check_command(self, words: Sequence[str], switch: str, others: Sequence[str] = (TRIAL,)) -> None:
        """Refuse a command in which a setting's name is missing, or a name in braces that nothing takes the place of.

        Args:
            words: The program and its arguments.
            switch: How messages call it.
            others: Further names that something takes the place of.

        Raises:
            ConfigError: There is one.
        """
        found = [name for word in words for name in PLACEHOLDER.findall(word)]
        if unknown := [name for name in found if name not in (*self.names, *others)]:
            if unknown[0] == CHECKPOINT:
                raise ConfigError(
                    f"{switch} has {{{CHECKPOINT}}}, but there is none; metricopt tune-checkpoint takes one"
                )
            raise ConfigError(
                f"{switch} has {{{unknown[0]}}}, which nothing fills; add --setting {unknown[0]}=..., or"
                f" write {{ {unknown[0]} }} if the program needs the braces"
            )
        if missing := [name for name in self.names if name not in found]:
            raise ConfigError(
                f"{switch} has no {{{missing[0]}}}, so --setting {missing[0]} would change nothing; put it where the"
                " program takes the value"
            )


def check_misspelt(words: Sequence[str], switch: str, names: Sequence[str]) -> None:
    """Refuse a name in braces that is like one of these, but none of them; others may be a shell's or awk's.

    Raises:
        ConfigError: There is one.
    """
    for name in (name for word in words for name in PLACEHOLDER.findall(word)):
        near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.75)
        if near and name not in names:
            raise ConfigError(f"{switch} has {{{name}}}, which nothing fills; did you mean {{{near[0]}}}?")


def _named(text: str, switch: str, form: str) -> tuple[str, str]:
    """Return the two sides of NAME=...

    Raises:
        ConfigError: It is something else.
    """
    name, equals, rest = text.partition("=")
    if not equals or not rest:
        raise ConfigError(f"{switch} {brief(text)}: it must be NAME={form}")
    if not NAME.fullmatch(name):
        raise ConfigError(f"{switch} {brief(text)}: the name must be letters, digits, _ and -, and begin with a letter")
    if name in (CHECKPOINT, TRIAL):
        raise ConfigError(f"{switch} {brief(text)}: {{{name}}} is the {name}'s own; use another name")
    if any(brace in rest for brace in "{}"):
        raise ConfigError(f"{switch} {brief(text)}: a value can't have braces")
    return name, rest


def _number(text: str) -> int | float | None:
    """Return the number that a text is; None if it is none."""
    if INTEGER.fullmatch(text):
        return int(text)
    return float(text) if NUMBER.fullmatch(text) else None


def _is_interval(text: str) -> bool:
    """Whether a text is LOW:HIGH or LOW:HIGH:SCALE."""
    low, *others = text.split(":")
    numbers = [_number(low), *(_number(each) for each in others[:1])]
    return len(numbers) == 2 and None not in numbers and all(each in SCALES for each in others[1:])
