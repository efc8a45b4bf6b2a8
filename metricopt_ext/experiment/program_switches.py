"""Switches of the tools that score by a command: which there are, how they are read, what is said of settings."""

import argparse
import shutil
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.program_trials import NAME
from metricopt_ext.experiment.settings_run import AFTER, BEFORE, SettingsOutcome
from metricopt_ext.experiment.style import print_table
from metricopt_ext.methods.guard import Guard
from metricopt_ext.methods.result import told_of_guard
from metricopt_ext.plain import plain
from metricopt_ext.tasks.combine import Combination
from metricopt_ext.tasks.constraints import parse_constraints
from metricopt_ext.tasks.cost_scale import CostScale
from metricopt_ext.tasks.program_score import (
    CHECKPOINT,
    TRIAL,
    Printed,
    PrintedByName,
    ProgramScore,
    Written,
    WrittenByName,
)
from metricopt_ext.tasks.program_settings import FORMS, ProgramSettings, check_braces
from metricopt_ext.tasks.settings import Values
from metricopt_ext.utils.program import command_words, last_lines
from metricopt_ext.utils.words import brief

LARGEST = 2**63 - 1  # seed that is an integer of 64 bits
TAIL = 20  # lines of a failed trial's log that are shown

# What a run depends on, so that another is not taken for it.
IDENTITY = ("score", "parse", "parse_json", "halves", "holdout", "repeats", "minimize", "queries")


def add_score_switches(parser: argparse.ArgumentParser, scored: str) -> None:
    """Add what says how a command scores, and how often it may be run.

    Args:
        parser: The tool's command line.
        scored: What the command prints a number for.
    """
    parser.add_argument("--score", required=True, metavar="COMMAND", help=f"prints the number for {scored}")
    reads = parser.add_mutually_exclusive_group(required=True)
    reads.add_argument("--parse", metavar="REGEX", help="its first group is the number; the last match counts")
    reads.add_argument("--parse-json", metavar="FILE:KEY", help="where COMMAND writes the number; KEY may have dots")
    parser.add_argument(
        "--combine",
        choices=["worst", "mean"],
        help="COMMAND prints several numbers, of which this is the score: the groups of REGEX are a name, its number,"
        " and perhaps its numbers on two halves, as '^(\\w+)=(\\S+)'; KEY has an object of numbers",
    )
    parser.add_argument(
        "--queries", required=True, type=int, metavar="N", help="how many times COMMAND may be run by the search"
    )
    parser.add_argument(
        "--output-dir",
        required=True,
        type=Path,
        metavar="DIR",
        help="folder of the run: logs, report, what --resume needs",
    )
    parser.add_argument(
        "--holdout", metavar="COMMAND", help="the same for data that --score does not see: two or three runs at the end"
    )
    parser.add_argument(
        "--halves", nargs=2, metavar=("REGEX_A", "REGEX_B"), help="the number on two random halves of the data"
    )
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="NAME=WHERE",
        help="another number, shown before and after; WHERE is a REGEX with --parse, and else FILE:KEY; repeat it",
    )
    parser.add_argument(
        "--subject-to",
        action="append",
        default=[],
        metavar="'NAME: LIMIT'",
        help="a limit on such a number, e.g. 'accuracy: >= start - 0.005', which the search and the guard respect",
    )
    parser.add_argument(
        "--repeats", type=int, default=1, metavar="N", help="runs of COMMAND for one trial, if its number is noisy"
    )
    parser.add_argument("--minimize", action="store_true", help="lower is better")
    parser.add_argument("--timeout", type=float, metavar="S", help="seconds that one run of COMMAND may take")
    parser.add_argument("--failures", type=int, default=0, metavar="N", help="how many trials may fail; default none")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="how many runs of COMMAND at once; the result is the same"
    )
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run in DIR")


def add_setting_switches(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add what says which settings there are in the command."""
    parser.add_argument(
        "--setting",
        action="append",
        required=required,
        default=None if required else [],
        metavar="NAME=SPEC",
        help=f"what to try for {{NAME}} in COMMAND; SPEC is {FORMS} (scale: linear, log, logit); repeat it for more",
    )
    parser.add_argument(
        "--default",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="what it is now; else the middle of its interval, or the first of its values",
    )


class Scores(NamedTuple):
    """What the switches say.

    Attributes:
        score: Scores on the data that the search sees.
        holdout: Scores on other data; None without any.
        settings: Settings in the commands; None without any.
        subject_to: Constraints on other numbers of theirs, by name.
    """

    score: ProgramScore
    holdout: ProgramScore | None
    settings: ProgramSettings | None
    subject_to: dict[str, str]

    def at(self, values: Values) -> tuple[ProgramScore, ProgramScore | None]:
        """Return what scores with values of the settings, if there are any, and the defaults of others."""
        if self.settings is None:
            return self.score, self.holdout
        texts = self.settings.texts(values)
        return replace(self.score, settings=texts), self.holdout and replace(self.holdout, settings=texts)


def read_scores(
    arguments: argparse.Namespace, least: Sequence[tuple[str, int]] = (), needed: Sequence[str] = ()
) -> Scores:
    """Check the switches that `add_score_switches` and `add_setting_switches` added.

    Args:
        arguments: The command line.
        least: Further switches of integers, with the least that each may be.
        needed: Names that must be in braces in the commands.

    Raises:
        ConfigError: A switch is out of range, or clashes with another.
    """
    for switch, bound in (("queries", 1), ("repeats", 1), ("failures", 0), ("jobs", 1), *least):
        if (value := getattr(arguments, switch)) < bound:
            raise ConfigError(f"--{switch} {value}: it must be at least {bound}")
    if (seed := getattr(arguments, "seed", 0)) > LARGEST:
        raise ConfigError(f"--seed {seed}: it must be at most {LARGEST}")
    if arguments.timeout is not None and not arguments.timeout > 0:
        raise ConfigError(f"--timeout {arguments.timeout:g}: it must be above 0")
    printed = arguments.parse is not None
    number = _number(arguments)
    also = _also(arguments.also, Printed if printed else Written)
    subject_to = _subject_to(arguments.subject_to, also)
    for place in () if printed else (arguments.parse_json, *arguments.also):
        if arguments.jobs > 1 and not any(f"{{{name}}}" in place for name in (CHECKPOINT, TRIAL)):
            raise ConfigError(f"--jobs {arguments.jobs}: all would write {place}; put {{trial}} in its name")
    for name in also if arguments.combine else ():
        if name not in subject_to:
            raise ConfigError(f"--also {name} with --combine: give it a limit by --subject-to, or leave it out")
    halves = [Printed(each, "--halves") for each in arguments.halves or ()]
    if arguments.default and not arguments.setting:
        raise ConfigError(f"--default {arguments.default[0]}: there is no --setting; add one, or leave it out")
    settings = None
    if arguments.setting:
        settings = ProgramSettings(arguments.setting, arguments.default, arguments.queries)

    def score(command: str, switch: str) -> ProgramScore:
        words = command_words(command, switch, needed=needed)
        check_braces(words, switch, settings.names if settings else (), [*needed, TRIAL])
        if shutil.which(words[0]) is None:
            raise ConfigError(f"{switch}: there is no program {words[0]!r}")
        both = (halves[0], halves[1]) if halves and switch == "--score" else None
        others = also if switch == "--score" else {}
        scale = _scale(arguments, tuple(others)) if arguments.combine else None
        return ProgramScore(words, number, both, others, arguments.repeats, arguments.timeout, scale=scale)

    seen = score(arguments.score, "--score")
    holdout = score(arguments.holdout, "--holdout") if arguments.holdout else None
    if holdout is not None and holdout.words == seen.words:
        raise ConfigError(
            f"--holdout {brief(arguments.holdout)} is --score itself, which the search sees; it must score other data"
        )
    return Scores(seen, holdout, settings, subject_to)


def _number(arguments: argparse.Namespace) -> Printed | Written | PrintedByName:
    """Return where the number is, or with ``--combine`` the outcomes that it is made of.

    Raises:
        ConfigError: It is no such place, or there are ``--halves`` beside outcomes, which have their own.
    """
    if arguments.combine and arguments.halves:
        raise ConfigError(
            "--halves with --combine: let COMMAND print each outcome with its halves, and the third and fourth group of"
            " --parse be these"
        )
    if arguments.parse is not None:
        return (PrintedByName if arguments.combine else Printed)(arguments.parse, "--parse")
    return (WrittenByName if arguments.combine else Written)(arguments.parse_json, "--parse-json")


def _scale(arguments: argparse.Namespace, bounded: tuple[str, ...]) -> CostScale:
    combination = Combination(arguments.combine, 1 if arguments.minimize else -1, None, bounded)
    return CostScale(maximize=not arguments.minimize, bounds=None, name=NAME, combination=combination)


def _also(given: Sequence[str], reader: type[Printed] | type[Written]) -> dict[str, Printed | Written]:
    """Return where other numbers are, by name.

    Raises:
        ConfigError: One is no NAME=WHERE, or its name is taken.
    """
    found = dict[str, Printed | Written]()
    for text in given:
        name, _, where = text.partition("=")
        name = name.strip()
        if not (name and where):
            raise ConfigError(f"--also {brief(text)}: it must be NAME=WHERE, e.g. 'accuracy=accuracy: ([0-9.]+)'")
        if name in (NAME, *found):
            raise ConfigError(f"--also {brief(text)}: there is a {brief(name)} already; use another name")
        found[name] = reader(where, f"--also {name}")
    return found


def _subject_to(given: Sequence[str], also: Collection[str]) -> dict[str, str]:
    """Return the constraints on such numbers, by name.

    Raises:
        ConfigError: One is no 'NAME: LIMIT', or nothing reads its number.
    """
    found = dict[str, str]()
    for text in given:
        name, _, limit = (each.strip() for each in text.rpartition(":"))
        if name in found:
            raise ConfigError(f"--subject-to {brief(text)}: {brief(name)} has a limit already")
        try:
            parse_constraints({name: limit}, NAME)
        except ValueError as error:
            raise ConfigError(f"--subject-to {brief(text)}: it must be 'NAME: LIMIT'; {error}") from error
        if name not in also:
            raise ConfigError(f"--subject-to {brief(text)}: nothing reads {brief(name)}; add --also {name}=WHERE")
        found[name] = limit
    return found


def print_settings(settings: ProgramSettings, values: Values | None = None) -> None:
    """Print what each setting is and may be, and what it becomes if that is known."""
    before, after = settings.texts({}), settings.texts(values or {})
    rows = [
        [name, settings[name].said, f"{before[name]}{' (assumed)' if name in settings.assumed else ''}", after[name]]
        for name in settings.names
    ]
    if values is None:
        print_table(["setting", "may be", "now"], [row[:3] for row in rows], left=2)
        return
    changed = [i for i, name in enumerate(settings.names) if name in settings.changed(values)]
    print_table(["setting", "may be", "before", "after"], rows, left=2, bold=changed)


def told_of_settings(settings: ProgramSettings, tuned: SettingsOutcome) -> dict[str, Any]:
    """Return what a report says of a run on settings."""
    defaults, best, kept = (settings.texts(each) for each in ({}, tuned.best_values, tuned.values))
    return {
        "before": tuned.before.value,
        "after": tuned.after.value,
        "best": tuned.best,
        **told_of_guard(tuned, AFTER if tuned.changed else BEFORE),
        "settings": {
            name: {"before": defaults[name], "best": best[name], "after": kept[name]} for name in settings.names
        },
        "assumed": list(settings.assumed),
        "queries": tuned.queries,
        "failed": tuned.failed,
        "seconds of a trial": {"before": tuned.before.seconds, "after": tuned.after.seconds},
    }


def as_written(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the switches as JSON."""
    return {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}


def unguarded(arguments: argparse.Namespace, guard: Guard) -> list[str]:
    """Return a line if nothing told a gain from chance, with the switches that could, of those not in use."""
    if guard != "none":
        return []
    used = {"--halves": arguments.halves, "--repeats": arguments.repeats > 1, "--holdout": arguments.holdout}
    left = [switch for switch, given in used.items() if not given]
    remedy = " or ".join(filter(None, [", ".join(left[:-1]), *left[-1:]]))
    return ["unguarded: a gain can't be told from chance" + (f"; give {remedy}" if remedy else "")]


def show_end(log: Path) -> None:
    """Print the last lines of a failed trial's log."""
    print(plain(f"the end of {log}:"), *(plain(line) for line in last_lines(log, TAIL)), sep="\n", file=sys.stderr)


def identity_of(arguments: argparse.Namespace, *more: str) -> dict[str, Any]:
    """Return what the run depends on, so that another is not taken for it.

    Args:
        arguments: The command line: `IDENTITY`, and what is given of other numbers and settings.
        more: Further switches.
    """
    settings = {"setting": arguments.setting, "default": arguments.default} if arguments.setting else {}
    others = {name: getattr(arguments, name) for name in ("also", "subject_to", "combine") if getattr(arguments, name)}
    return {name: getattr(arguments, name) for name in (*IDENTITY, *more)} | others | settings
